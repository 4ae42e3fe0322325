//! Rules in both rule formats: what the kernel stores equals what the tools write. Needs root, `ip`, `iptables` and `nft`.

// Modules of the fuzzer, which are not part of the library, and what they import.
use detour_cni::{cni, firewall, policy, printable};
use input::Choices;

#[allow(dead_code, reason = "the fuzzer uses the rest")]
#[path = "../../src/fuzzing/drawn.rs"]
mod drawn;
#[allow(dead_code, reason = "the fuzzer uses the rest")]
#[path = "../../src/fuzzing/input.rs"]
mod input;
mod iptables;
mod native;
mod routing;
#[path = "../support/mod.rs"]
mod support;
