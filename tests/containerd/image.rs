//! The image of every container here: one program that waits. No registry is needed for it.

use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its name.
pub(crate) const NAME: &str = "detour.invalid/pause:1";
const PAUSE: &str = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n";

/// Packs it below `directory`, as `docker save` would (Docker Image Specification v1.2).
pub(crate) fn pack(directory: &Path) -> PathBuf {
    let path = |name: &str| directory.join(name).display().to_string();
    fs::write(path("pause.c"), PAUSE).expect("written");
    run("gcc", &["-static", "-O1", "-o", &path("pause"), &path("pause.c")]);
    let layer = path("layer.tar");
    run("tar", &["-C", &directory.display().to_string(), "-cf", &layer, "pause"]);
    let digest = run("sha256sum", &[&layer]);
    let digest = digest.split_whitespace().next().expect("a digest");
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
    });
    let manifest = json!([{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]);
    fs::write(path("config.json"), config.to_string()).expect("written");
    fs::write(path("manifest.json"), manifest.to_string()).expect("written");
    let image = directory.join("image.tar");
    let files = ["manifest.json", "config.json", "layer.tar"];
    run("tar", &[&["-C", &directory.display().to_string(), "-cf", &image.display().to_string()][..], &files].concat());
    image
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program} is needed: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
