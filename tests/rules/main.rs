//! Rules in both rule formats: what the kernel stores equals what the tools write, and both formats have the same outcome
//! for any policy. Needs root, `ip`, `iptables` and `nft`.

mod equivalence;
mod iptables;
mod native;
mod routing;
#[path = "../support/mod.rs"]
mod support;
