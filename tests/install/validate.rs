//! The command `detour validate`.

use crate::scene::{Scene, program};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

#[test]
fn validate_reports_by_exit_code_in_every_output_format_and_reads_stdin() {
    let scene = Scene::new("validate");
    scene.write("good.conf", include_str!("../../conf/openshift-istio-cni.conf"));
    scene.write("bad.conf", r#"{"name": "n", "type": "detour", "chain": [{"type": "uid-exclud"}]}"#);
    scene.write("list", "- 1");
    scene.write("bin/uid-exclud", "");
    let validate = |arguments: &[String]| {
        let output = Command::new(program()).arg("validate").args(arguments).env_clear().output().expect("it starts");
        let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.code(), printed)
    };
    let path = |file: &str| scene.path(file).display().to_string();
    let (code, printed) = validate(&[path("good.conf")]);
    assert!(code == Some(0) && printed.ends_with("good.conf: valid\n"), "{printed}");
    let (code, printed) = validate(&[path("bad.conf")]);
    assert!(
        code == Some(1) && printed.contains("chain[0].type: \"uid-exclud\" is not a sub-plugin; did you mean"),
        "{printed}"
    );
    assert_eq!(validate(&[path("bad.conf"), format!("--bin-dir={}", path("bin"))]).0, Some(0));
    let (code, printed) = validate(&[path("bad.conf"), "-o=json".to_owned()]);
    let report: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(
        (code, &report["valid"], &report["configurations"][0]["valid"]),
        (Some(1), &json!(false), &json!(false))
    );
    assert!(validate(&[path("bad.conf"), "-o=yaml".to_owned()]).1.contains("valid: false"));
    for wrong in [path("list"), path("nowhere")] {
        assert_eq!(validate(std::slice::from_ref(&wrong)).0, Some(2), "{wrong}");
    }
    let own = path("own.conf");
    let conf = json!({
        "name": "n", "type": "detour", "chain": [{"type": "uid-exclud"}], "kubernetes": {"cni_bin_dir": path("bin")},
    });
    scene.write("own.conf", &conf.to_string());
    assert_eq!(validate(std::slice::from_ref(&own)).0, Some(0), "in the directory of the configuration");
    fs::remove_file(scene.path("bin/uid-exclud")).expect("removed");
    let (code, printed) = validate(&[own]);
    assert!(code == Some(1) && printed.contains("not an executable in the program directories"), "{printed}");
    let stdin = fs::File::open(scene.path("bad.conf")).expect("there");
    let status = Command::new(program()).args(["validate", "-"]).env_clear().stdin(stdin).output().expect("it starts");
    assert_eq!(status.status.code(), Some(1));
}

/// The chart's ConfigMap.
#[test]
fn the_shipped_configurations_are_valid() {
    let scene = Scene::new("shipped");
    scene.write("bin/exclude-backup", "");
    let programs = format!("--bin-dir={}", scene.path("bin").display());
    for file in [
        "manifests/kubernetes/rendered.yaml",
        "manifests/openshift/rendered.yaml",
        "conf/chained.conflist",
        "conf/node.json",
        "conf/primary-bridge.conf",
        "conf/primary-openshift.conf",
        "conf/primary-own-exclusion.conf",
        "conf/99-exclude-dns.conf",
        "conf/openshift-vault.conf",
    ] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let output =
            Command::new(program()).args(["validate", &programs]).arg(path).env_clear().output().expect("it starts");
        assert!(output.status.success(), "{file}: {}", String::from_utf8_lossy(&output.stdout));
    }
    // It has all defaults, and therefore no source of facts.
    let full = concat!(env!("CARGO_MANIFEST_DIR"), "/conf/full.conf");
    let output = Command::new(program()).args(["validate", full]).env_clear().output().expect("it starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("invalid: chain[0]: istio-redirect needs facts of the pod: set kube"), "{printed}");
}
