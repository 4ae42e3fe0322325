//! In the agent's container, which has the capabilities that the manifests give it and no others.

use crate::programs::DETOUR;
use crate::scene::{POD, Plan, scene};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// As the agent's container has them.
fn shipped() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/openshift/rendered.yaml");
    let objects: Vec<Value> = serde_saphyr::from_multiple(&fs::read_to_string(path).expect("readable")).expect("YAML");
    let daemon_set = objects.iter().find(|object| object["kind"] == "DaemonSet").expect("a DaemonSet");
    let context = &daemon_set["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    serde_json::from_value(context["capabilities"]["add"].clone()).expect("names")
}

/// What came of each line, for a doctor that has these.
fn outcomes(root: &Path, capabilities: &[String]) -> Vec<(String, String, String)> {
    let bounds = capabilities.iter().map(|name| format!(",+{}", name.to_lowercase())).collect::<String>();
    let output = Command::new("setpriv")
        .arg(format!("--bounding-set=-all{bounds}"))
        .arg(&*DETOUR)
        .args(["doctor", "--probe", "-o", "json", "--root"])
        .arg(root)
        .args(POD)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .output()
        .expect("setpriv starts");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
    let lines = report["checks"].as_array().expect("checks").iter();
    lines.map(|line| (text(line, "id"), text(line, "outcome"), text(line, "found"))).collect()
}

#[test]
fn the_agents_container_has_all_that_it_needs() {
    scene(Plan::new(), |scene| {
        let mut lines = outcomes(&scene.root, &shipped());
        // There is no journal, and nothing was sent before.
        lines.retain(|(id, ..)| id != "runtime-log");
        let others: Vec<_> = lines.iter().filter(|(_, outcome, _)| outcome != "pass").collect();
        assert!(others.is_empty() && lines.len() > 25, "{others:?}");
    });
}

#[test]
fn who_may_not_send_as_others_finds_no_fault_with_the_pod() {
    let capabilities: Vec<_> = shipped().into_iter().filter(|name| name != "SETUID" && name != "SETGID").collect();
    scene(Plan::new(), |scene| {
        let lines = outcomes(&scene.root, &capabilities);
        let failed: Vec<_> = lines.iter().filter(|(_, outcome, _)| outcome == "fail").collect();
        assert!(failed.is_empty(), "{failed:?}");
        let of = |id: &str| lines.iter().find(|(own, ..)| own == id).expect("a line");
        let (_, outcome, found) = of("probe-excluded");
        assert!(outcome == "not-checked" && found.contains("CAP_SETUID"), "{outcome}: {found}");
    });
}
