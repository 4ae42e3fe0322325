//! Real packets through real rules: every test makes a world of its own, two network namespaces
//! joined by a veth pair, and asks where what was sent arrived. Needs root, `ip`, `iptables` and `nft`.

#[macro_use]
mod dialect;

#[path = "../install/agent_process.rs"]
#[expect(dead_code, reason = "other tests use the rest of it")]
mod agent_process;
mod attachments;
mod configuration;
mod expectations;
mod foreign_redirection;
mod foreign_rules;
mod home_made_plugin;
mod iptables_view;
mod istio;
mod istio_init;
mod late_ipv6;
mod limits;
mod many_uids;
mod migration;
mod native;
mod own_users;
mod pod;
mod processes;
#[path = "../install/program.rs"]
mod program;
mod resolvers;
#[path = "../install/scene.rs"]
#[expect(dead_code, reason = "other tests use the rest of it")]
mod scene;
mod secondary_networks;
mod tproxy;
mod trace;
mod vault_init;
mod world;
