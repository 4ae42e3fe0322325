//! The binary that tests install, and executables that they write.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// Returns the binary without debugging information, which is two thirds of its size and would be copied by each
/// installation. The variable `DETOUR_PROGRAM` replaces it, for measurements.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        if let Some(program) = std::env::var_os("DETOUR_PROGRAM") {
            return program.into();
        }
        let stripped = Path::new(env!("CARGO_TARGET_TMPDIR")).join("detour");
        // Another test program may run it.
        let unfinished = stripped.with_extension(std::process::id().to_string());
        let strip = Command::new("strip").arg("-o").arg(&unfinished).arg(env!("CARGO_BIN_EXE_detour")).status();
        assert!(strip.expect("strip starts").success());
        std::fs::rename(unfinished, &stripped).expect("renamed");
        stripped
    });
    &PROGRAM
}

/// Returns the path of a tool that hack/test.sh builds.
pub(crate) fn built(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("tools").join(name);
    assert!(path.exists(), "{} is needed: hack/test.sh builds it", path.display());
    path
}

/// Writes an executable by another process. If this process wrote it, a child that another thread starts at the same
/// time would hold it open for writing for a moment, and it could not be started (`ETXTBSY`).
pub(crate) fn write_executable(path: &Path, text: &str) {
    let mut install = Command::new("install");
    let mut install =
        install.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped()).spawn().expect("started");
    install.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("written");
    assert!(install.wait().expect("its status").success(), "{path:?}");
}
