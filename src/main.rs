//! The `detour` binary.

fn main() {}
