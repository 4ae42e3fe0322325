//! What is installed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The binary without its debugging information, two thirds of it, which each installation would
/// copy.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let stripped = Path::new(env!("CARGO_TARGET_TMPDIR")).join("detour");
        let strip = Command::new("strip").arg("-o").arg(&stripped).arg(env!("CARGO_BIN_EXE_detour")).status();
        assert!(strip.expect("strip starts").success());
        stripped
    });
    &PROGRAM
}
