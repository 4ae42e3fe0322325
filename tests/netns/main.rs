//! Real packets through real rules: every test makes a world of its own, two network namespaces
//! joined by a veth pair, and asks where what was sent arrived. Needs root, `ip` and `iptables`.

mod attachments;
mod configuration;
mod expectations;
mod foreign_rules;
mod home_made_plugin;
mod iptables_view;
mod istio;
mod pod;
mod resolvers;
mod tproxy;
mod trace;
mod vault_init;
mod world;
