//! Real packets through real rules: every test creates its own world of two network namespaces joined by a veth pair,
//! and asserts where traffic arrives. Needs root, `ip`, `iptables` and `nft`.

use support::{agent_process, install_scene as scene};

#[macro_use]
mod dialect;

mod ambient;
mod containers;
mod demo;
mod earlier_chains;
mod example;
mod exclusions;
mod exclusions_first;
mod expectations;
mod guard;
mod limits;
mod live_policy;
mod migration;
mod rule_formats;
mod secondary_networks;
#[path = "../support/mod.rs"]
mod support;
mod trace;
mod world;
