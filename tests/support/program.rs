//! The binary that tests install.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Returns the binary without debugging information, which is two thirds of its size and would be copied by each
/// installation. The variable `DETOUR_PROGRAM` replaces it, for measurements.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        if let Some(program) = std::env::var_os("DETOUR_PROGRAM") {
            return program.into();
        }
        let stripped = Path::new(env!("CARGO_TARGET_TMPDIR")).join("detour");
        let strip = Command::new("strip").arg("-o").arg(&stripped).arg(env!("CARGO_BIN_EXE_detour")).status();
        assert!(strip.expect("strip starts").success());
        stripped
    });
    &PROGRAM
}
