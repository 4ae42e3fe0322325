//! The program on the node. Cargo's own is dynamic, so that a static one of the same version, which can
//! say no more than that, stands in for it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

fn compiled(name: &str, version: &str, flags: &[&str]) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor");
    std::fs::create_dir_all(&directory).expect("made");
    let (source, program) = (directory.join(format!("{name}.c")), directory.join(name));
    let text = format!(
        "#include <stdio.h>\nint main(void) {{ puts(\"{{\\\"version\\\": \\\"{version}\\\"}}\"); return 0; }}\n"
    );
    std::fs::write(&source, text).expect("written");
    let status = Command::new("gcc").args(flags).arg("-o").arg(&program).arg(&source).status().expect("gcc starts");
    assert!(status.success(), "gcc {flags:?}");
    program
}

const OWN: &str = env!("CARGO_PKG_VERSION");
pub(crate) static STATIC: LazyLock<PathBuf> = LazyLock::new(|| compiled("static", OWN, &["-static"]));
pub(crate) static OLDER: LazyLock<PathBuf> = LazyLock::new(|| compiled("older", "0.0.9", &["-static"]));

/// Cargo's own without its debugging information, two thirds of it.
pub(crate) static DETOUR: LazyLock<PathBuf> = LazyLock::new(|| {
    let stripped = STATIC.with_file_name("detour");
    let strip = Command::new("strip").arg("-o").arg(&stripped).arg(env!("CARGO_BIN_EXE_detour")).status();
    assert!(strip.expect("strip starts").success());
    stripped
});
