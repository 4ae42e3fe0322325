//! Rules in both rule formats: what the kernel stores equals what the tools write. Needs root, `ip`, `iptables` and `nft`.

mod iptables;
mod native;
mod routing;
#[path = "../support/mod.rs"]
mod support;
