//! What is shipped in `manifests/`: it parses, its flags exist, and with the directories that it
//! mounts the agent has all that it needs.

use crate::agent_process::{Agent, SETTLED};
use crate::scene::{CALICO, Scene};
use detour_cni::agent::install::PLATFORMS;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests")
}

fn documents(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("readable");
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn rendered(platform: &str) -> Vec<Value> {
    documents(&manifests().join(platform).join("rendered.yaml"))
}

fn kind<'a>(documents: &'a [Value], kind: &str) -> &'a Value {
    documents.iter().find(|document| document["kind"] == kind).unwrap_or_else(|| panic!("there is no {kind}"))
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().map(|item| item.as_str().expect("a string")).collect()
}

#[test]
fn every_object_has_what_the_api_wants() {
    let mut kinds = Vec::new();
    for directory in ["kubernetes", "openshift"] {
        for object in rendered(directory) {
            let kind = object["kind"].as_str().expect("a kind").to_owned();
            assert!(object["apiVersion"].is_string() && object["metadata"]["name"].is_string(), "{kind}");
            kinds.push(format!("{directory} {kind}"));
        }
        let kustomization = documents(&manifests().join(directory).join("kustomization.yaml"));
        assert_eq!(kustomization[0]["resources"], json!(["rendered.yaml"]));
    }
    kinds.sort();
    let wanted = [
        "kubernetes ClusterRole",
        "kubernetes ClusterRoleBinding",
        "kubernetes ConfigMap",
        "kubernetes DaemonSet",
        "kubernetes ServiceAccount",
        "openshift ClusterRole",
        "openshift ClusterRoleBinding",
        "openshift ConfigMap",
        "openshift DaemonSet",
        "openshift NetworkAttachmentDefinition",
        "openshift SecurityContextConstraints",
        "openshift ServiceAccount",
    ];
    assert_eq!(kinds, wanted);
    for sample in fs::read_dir(manifests().join("samples")).expect("readable") {
        assert_eq!(documents(&sample.expect("readable").path()).len(), 1);
    }
}

#[test]
fn the_rights_are_two_and_the_scc_is_no_more_than_the_pod_needs() {
    for platform in ["kubernetes", "openshift"] {
        let objects = rendered(platform);
        let rules = kind(&objects, "ClusterRole")["rules"].as_array().expect("rules");
        assert_eq!(rules[0], json!({"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["get"]}));
        assert_eq!(rules.len(), if platform == "openshift" { 2 } else { 1 });
    }
    let objects = rendered("openshift");
    let scc = kind(&objects, "SecurityContextConstraints");
    let context = &kind(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    assert_eq!(scc["allowedCapabilities"], context["capabilities"]["add"]);
    assert_eq!((&scc["allowPrivilegedContainer"], &context["privileged"]), (&json!(false), &json!(false)));
    assert_eq!(context["seLinuxOptions"], json!({"type": "spc_t"}));
}

#[test]
fn the_agent_does_its_work_with_what_is_mounted() {
    for (platform, conf) in
        [("kubernetes", "etc/cni/net.d/10-calico.conflist"), ("openshift", "etc/cni/multus/net.d/istio-cni.conf")]
    {
        let objects = rendered(platform);
        let pod = &kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        let scene = Scene::with(&format!("shipped-{platform}"), "10-calico.conflist", CALICO);
        let config = kind(&objects, "ConfigMap")["data"]["config.json"].as_str().expect("text");
        scene.write("config.json", config);
        let config = scene.path("config.json").display().to_string();
        let arguments = strings(&container["args"]).into_iter().filter(|argument| !argument.starts_with("--root="));
        let arguments: Vec<String> = arguments
            .skip(1)
            .map(|argument| argument.replace("/etc/detour/config.json", &config).replace(":8000", ":0"))
            .collect();
        let before = scene.files();
        let agent = Agent::start(&scene, "a", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        agent.says(SETTLED);

        let mounts = container["volumeMounts"].as_array().expect("mounts");
        let mounts: Vec<&str> =
            mounts.iter().filter_map(|mount| mount["mountPath"].as_str()?.strip_prefix("/host/")).collect();
        for path in scene.files().into_keys().filter(|path| !before.contains_key(path)) {
            assert!(mounts.iter().any(|mount| path.starts_with(mount)), "{} is on no volume", path.display());
        }
        for volume in pod["volumes"].as_array().expect("volumes") {
            let Some(path) = volume["hostPath"]["path"].as_str() else { continue };
            assert!(mounts.contains(&path.trim_start_matches('/')), "{path} is mounted at its own place");
        }
        let written = scene.read(conf);
        assert!(written.contains("\"uid-exclude\"") && written.contains("1337"), "{written}");
    }
}

#[test]
fn the_bases_are_of_this_chart() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/manifests.sh");
    let output = Command::new(script).arg("--digest").output().expect("it starts");
    let line = format!("# Chart: {}\n", String::from_utf8_lossy(&output.stdout).trim());
    assert!(output.status.success() && line.len() > 20, "{line}");
    for platform in ["kubernetes", "openshift"] {
        let text = fs::read_to_string(manifests().join(platform).join("rendered.yaml")).expect("readable");
        assert!(text.contains(&line), "{platform}: run hack/manifests.sh");
    }
}

#[test]
fn the_charts_platforms_are_the_programs() {
    let table = documents(&manifests().join("chart/platforms.yaml")).remove(0);
    let known = PLATFORMS.iter().map(|platform| {
        let row = json!({
            "cniBinDir": platform.bin_dir, "cniConfDir": platform.conf_dir, "chained": platform.chained,
        });
        (platform.name.to_owned(), row)
    });
    assert_eq!(table, Value::Object(known.collect()));
}
