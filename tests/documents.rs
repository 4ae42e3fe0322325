//! What the documents say of the code is so.

use detour_cni::cni::Code;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

#[test]
fn every_error_code_is_in_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("conf/README.md");
    let text = std::fs::read_to_string(path).expect("readable");
    let (_, table) = text.split_once("## Error codes").expect("a section");
    for (code, name) in Code::NAMES {
        let row = format!("\n| {} | `{}` |", code.number(), name);
        assert!(table.contains(&row), "{code:?} is not in the table");
    }
}

/// Adds the files of a directory, as paths within `root`.
fn files(root: &Path, directory: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            files(root, &path, found);
        } else {
            found.insert(path.strip_prefix(root).expect("below src").to_str().expect("text").to_owned());
        }
    }
}

/// Answering takes no privileges, and neither builds nor installs anything: it ends at once, from any directory.
#[test]
fn every_script_prints_its_usage() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut scripts = BTreeSet::new();
    files(root, &root.join("hack"), &mut scripts);
    files(root, &root.join(".ci"), &mut scripts);
    scripts.retain(|path| {
        let mode = std::fs::metadata(root.join(path)).expect("readable").permissions().mode();
        mode & 0o111 != 0
    });
    assert!(scripts.contains(".ci/run") && scripts.contains("hack/image.sh"), "{scripts:?}");
    for (script, option) in scripts.iter().flat_map(|script| [(script, "-h"), (script, "--help")]) {
        let (directory, name) = script.rsplit_once('/').expect("a directory");
        let output = Command::new("timeout")
            .args(["10", &format!("./{name}"), option])
            .current_dir(root.join(directory))
            .output()
            .expect("timeout(1)");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && output.stderr.is_empty(), "{script} {option}: {output:?}");
        assert!(text.contains(&format!("\nUsage: {script}")) && !text.contains("set -e"), "{script} {option}: {text}");
    }
}

/// The rules of krew's validation (krew.sigs.k8s.io, "Writing Krew plugin manifests"; `internal/index/validation`), and
/// what hack/release.sh replaces.
#[test]
fn the_manifest_for_krew_is_valid() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/krew/detour.yaml"))
        .expect("readable");
    let sum = "0123456789abcdef".repeat(4);
    let text = text.replace("SHA256_AMD64", &sum).replace("SHA256_ARM64", &sum).replace("VERSION", "0.2.0");
    let manifest: serde_json::Value = serde_saphyr::from_str(&text).expect("YAML");
    let keys = |value: &serde_json::Value, known: &[&str]| {
        let object = value.as_object().expect("an object");
        assert!(object.keys().all(|key| known.contains(&key.as_str())), "{object:?}: expected only {known:?}");
    };
    keys(&manifest, &["apiVersion", "kind", "metadata", "spec"]);
    assert_eq!(manifest["apiVersion"], "krew.googlecontainertools.github.com/v1alpha2");
    // The name is that of the file, and `kubectl NAME` runs the plugin.
    assert_eq!((&manifest["kind"], &manifest["metadata"]["name"]), (&"Plugin".into(), &"detour".into()));
    let spec = &manifest["spec"];
    keys(spec, &["version", "shortDescription", "description", "caveats", "homepage", "platforms"]);
    assert_eq!(spec["version"], "v0.2.0");
    let short = spec["shortDescription"].as_str().expect("a text");
    assert!(!short.contains('\n') && short.len() <= 50, "{short}");
    let platforms = spec["platforms"].as_array().expect("a list");
    assert_eq!(platforms.len(), 2);
    for (platform, architecture) in platforms.iter().zip(["amd64", "arm64"]) {
        keys(platform, &["uri", "sha256", "selector", "files", "bin", "license"]);
        assert_eq!(platform["selector"]["matchLabels"], serde_json::json!({"os": "linux", "arch": architecture}));
        let archive = format!("/releases/download/v0.2.0/detour-v0.2.0-linux-{architecture}.tar.gz");
        assert!(platform["uri"].as_str().is_some_and(|uri| uri.starts_with("https://") && uri.ends_with(&archive)));
        assert_eq!((platform["sha256"].as_str(), platform["bin"].as_str()), (Some(sum.as_str()), Some("detour")));
    }
}
