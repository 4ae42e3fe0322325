//! The fuzzer: one program for all targets, of which the environment variable `TARGET` selects one.

#![no_main]

use detour_cni::fuzzing::{TARGETS, run};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static TARGET: LazyLock<String> = LazyLock::new(|| {
    let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    std::env::var("TARGET").unwrap_or_else(|_| panic!("set TARGET to one of {}", names.join(", ")))
});

fuzz_target!(|input: &[u8]| run(&TARGET, input));
