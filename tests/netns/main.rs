//! Real packets through real rules: every test creates its own world of two network namespaces joined by a veth pair,
//! and asserts where traffic arrives. Needs root, `ip`, `iptables` and `nft`.

#[macro_use]
mod dialect;

mod ambient;
mod bounds;
mod configuration;
mod container_check;
mod containers;
mod demo;
mod earlier_chains;
mod exclusions_first;
mod expectations;
mod foreign_redirection;
mod guard;
mod home_made_plugin;
mod iptables_view;
mod istio;
mod late_ipv6;
mod limits;
mod live_policy;
mod migration;
mod native;
mod own_users;
mod pod;
mod processes;
mod resolvers;
mod secondary_networks;
#[path = "../support/mod.rs"]
mod support;
mod tproxy;
mod trace;
mod vault_init;
mod world;

use support::{agent_process, install_scene as scene};
