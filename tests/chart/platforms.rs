//! Platforms: the binary, the chart and the documentation have the same names and directories.

use crate::helm::{agent, manifests, nested, objects, render, render_for_openshift, schema};
use detour_cni::agent::install::{PLATFORMS, Platform};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

fn on(name: &str) -> Value {
    nested("global.platform", json!(name))
}

#[test]
fn each_name_renders_with_the_directories_of_the_program() {
    for name in Platform::names() {
        let platform = Platform::named(name).expect("a name");
        let agent = agent(&on(name));
        for flag in [
            format!("--platform={}", platform.name),
            format!("--bin-dir={}", platform.bin_dir),
            format!("--conf-dir={}", platform.conf_dir),
            format!("--chained={}", platform.chained),
        ] {
            assert!(agent["args"].as_array().expect("a list").contains(&json!(flag)), "{name}: {flag}");
        }
        let mounts = agent["volumeMounts"].as_array().expect("a list");
        for dir in [platform.bin_dir, platform.conf_dir] {
            assert!(mounts.iter().any(|mount| mount["mountPath"] == format!("/host{dir}")), "{name}: {dir}");
        }
    }
}

#[test]
fn the_schema_and_the_help_text_list_all_names() {
    let mut names = schema()["properties"]["global"]["properties"]["platform"]["enum"].take();
    let listed: Vec<String> = serde_json::from_value(names.take()).expect("strings");
    let wanted: Vec<&str> = [""].into_iter().chain(Platform::names()).collect();
    assert_eq!(listed, wanted);
    let error = render(&on("openshit")).expect_err("refused");
    assert!(error.contains("at '/global/platform': value must be one of '', 'aks', 'aro'"), "{error}");
    let help = Command::new(env!("CARGO_BIN_EXE_detour")).args(["install", "--help"]).output().expect("it starts");
    let help = String::from_utf8(help.stdout).expect("text");
    let platforms = help.split("\nPlatforms: ").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("a list");
    let words: Vec<&str> = platforms.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    for name in Platform::names() {
        assert!(words.contains(&name), "{name}: {platforms}");
    }
}

#[test]
fn objects_depend_on_the_platform() {
    let kinds = |name: &str| -> Vec<String> {
        objects(&on(name)).iter().map(|object| object["kind"].as_str().expect("text").to_owned()).collect()
    };
    for (name, scc, quota, definition) in [
        ("kubernetes", false, false, false),
        ("eks", false, false, false),
        ("gke", false, true, false),
        ("openshift", true, false, true),
        ("rosa", true, false, true),
        ("microshift", true, false, true),
    ] {
        let kinds = kinds(name);
        let has = |kind: &str| kinds.iter().any(|own| own == kind);
        let found = (has("SecurityContextConstraints"), has("ResourceQuota"), has("NetworkAttachmentDefinition"));
        assert_eq!(found, (scc, quota, definition), "{name}");
    }
    let without = json!({"global": {"platform": "gke"}, "resourceQuotas": {"enabled": false}});
    assert!(objects(&without).iter().all(|object| object["kind"] != "ResourceQuota"));
    for (name, wanted) in [("okd", json!("spc_t")), ("bottlerocket", json!("spc_t")), ("talos", Value::Null)] {
        assert_eq!(agent(&on(name))["securityContext"]["seLinuxOptions"]["type"], wanted, "{name}");
    }
    let own = json!({"global": {"platform": "openshift"}, "seLinuxOptions": {"level": "s0:c1", "type": "own_t"}});
    assert_eq!(agent(&own)["securityContext"]["seLinuxOptions"], json!({"level": "s0:c1", "type": "own_t"}));
}

/// The agent's pods would be refused, and Multus would not find the plugin.
#[test]
fn a_cluster_with_openshifts_api_needs_a_platform() {
    for none in [json!({}), on(""), json!({"global": {"platform": null}})] {
        let refused = render_for_openshift(&none).expect_err("refused");
        assert!(refused.contains("global.platform: no value, but the cluster has OpenShift's API"), "{refused}");
    }
    for name in ["openshift", "microshift", "kubernetes"] {
        assert_eq!(render_for_openshift(&on(name)), render(&on(name)), "{name}");
    }
}

#[test]
fn the_directory_of_network_namespaces_is_mounted_under_both_of_its_names() {
    let paths = |values: &Value| -> Vec<String> {
        let agent = agent(values);
        let mounts = agent["volumeMounts"].as_array().expect("a list");
        let paths = mounts.iter().map(|mount| mount["mountPath"].as_str().expect("text").to_owned());
        paths.filter(|path| path.ends_with("netns")).collect()
    };
    let usual = ["/host/run/netns", "/host/var/run/netns"];
    let docker = ["/host/run/docker/netns", "/host/var/run/docker/netns"];
    assert_eq!(paths(&json!({})), usual);
    assert_eq!(paths(&json!({"cniNetnsDir": "/var/run/netns"})), usual);
    assert_eq!(paths(&on("minikube")), [usual, docker].concat());
    assert_eq!(paths(&json!({"cniNetnsDir": "/var/run/docker/netns"})), [usual, docker].concat());
    assert_eq!(paths(&json!({"cniNetnsDir": "/srv/netns"})), [&usual[..], &["/host/srv/netns"]].concat());
}

#[test]
fn the_documentation_has_the_same_rows() {
    let text = fs::read_to_string(manifests().join("../docs/install.md")).expect("readable");
    let section = text.split("\n## Platforms\n").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("a section");
    let code = |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let rows: Vec<Vec<Vec<String>>> = section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('|').skip(1).map(code).collect())
        .collect();
    assert_eq!(rows.len(), PLATFORMS.len());
    for (platform, row) in PLATFORMS.iter().zip(&rows) {
        let names: Vec<&str> = [platform.name].into_iter().chain(platform.aliases.iter().copied()).collect();
        assert_eq!(row[0], names);
        assert_eq!(
            (&row[1][..], &row[2][..]),
            (&[platform.bin_dir.to_owned()][..], &[platform.conf_dir.to_owned()][..])
        );
    }
}
