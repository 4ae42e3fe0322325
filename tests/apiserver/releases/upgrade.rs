//! Upgrades, uninstallation, what helm prints after an installation, and `helm test`: the hook's pod runs here as on a node,
//! with its mounts and capabilities.

use super::{Helm, cluster, definition_of, difference, inventory, objects_of};
use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::node::{NAME, Node, on_a_node};
use crate::shipped::{NAMESPACE, apply, base};
use crate::support::golden::compare;
use detour_cni::agent::install::PLATFORMS;
use serde_json::{Value, json};
use std::process::{Command, Output};
use std::thread;

const EXCLUDEDNS: &str = "manifests/chart/values-excludedns.yaml";

/// This chart, excludedns beside it, each other name of the platform, and nothing. The other platforms differ in
/// directories, which `tests/chart` compares.
#[test]
fn a_platform_is_upgraded_extended_and_uninstalled_without_remains() {
    let (_plane, admin, helm) = cluster();
    let empty = inventory(&admin);
    for platform in PLATFORMS.iter().filter(|platform| ["openshift", "k3s"].contains(&platform.name)) {
        let name = platform.name;
        let values = |name: &str| format!("global.platform={name}");
        helm.upgrade("detour", &["--set", &values(name)]);
        let own = objects_of(&admin, "detour", NAMESPACE);
        helm.upgrade("excludedns", &["-f", EXCLUDEDNS, "--set", &values(name), "--set", "chained=false"]);
        let both = inventory(&admin);
        assert!(own.iter().all(|(name, object)| both.get(name) == Some(object)), "{name}: unchanged");
        let created = difference(&both, &empty).into_iter().filter(|name| !name.starts_with("Secret "));
        for object in created {
            let labels = &both[object]["metadata"]["labels"];
            for label in ["name", "instance", "version", "component", "part-of", "managed-by"] {
                assert!(labels[format!("app.kubernetes.io/{label}")].is_string(), "{name}: {object}: {label}");
            }
            assert_eq!(labels["helm.sh/chart"], concat!("detour-", env!("CARGO_PKG_VERSION")), "{name}: {object}");
        }
        for alias in &platform.aliases {
            helm.upgrade("detour", &["--set", &values(alias)]);
            assert_eq!(objects_of(&admin, "detour", NAMESPACE), own, "{alias} has the same objects as {name}");
        }
        helm.uninstall("detour", NAMESPACE);
        helm.uninstall("excludedns", NAMESPACE);
        assert_eq!(difference(&empty, &inventory(&admin)), [""; 0], "{name}");
    }
}

/// The new agents remove the files that the earlier ones wrote there.
#[test]
fn an_upgrade_mounts_the_directories_of_the_previous_revision() {
    let (_plane, admin, helm) = cluster();
    let daemon_set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": NAMESPACE, "name": "detour-agent"}});
    let previous = || -> Vec<String> {
        let pod = admin.get(&daemon_set).expect("there")["spec"]["template"]["spec"].take();
        let all = |of: &Value| of.as_array().expect("a list").clone();
        let volumes = all(&pod["volumes"]).into_iter();
        let volumes =
            volumes.filter(|volume| volume["name"].as_str().is_some_and(|name| name.starts_with("previous-")));
        let paths = volumes.map(|volume| {
            let path = volume["hostPath"]["path"].as_str().expect("a path").to_owned();
            let place = format!("/host{path}");
            let mut mounts = all(&pod["containers"][0]["volumeMounts"]).into_iter();
            assert!(mounts.any(|mount| mount["name"] == volume["name"] && mount["mountPath"] == place.as_str()));
            path
        });
        paths.collect()
    };
    let chain = "/run/multus/cni/net.d/vendor-cni-chain";
    helm.upgrade("detour", &["--set", &format!("global.platform=openshift,cni.multusChain={chain}")]);
    assert_eq!(previous(), [""; 0]);
    let moved = ["--set", "global.platform=openshift,cniBinDir=/opt/other/bin"];
    helm.upgrade("detour", &moved);
    assert_eq!(previous(), ["/var/lib/cni/bin", chain]);
    helm.upgrade("detour", &moved);
    assert_eq!(previous(), [""; 0]);
}

#[test]
fn an_upgrade_that_would_rename_the_objects_is_refused() {
    let (_plane, admin, helm) = cluster();
    let empty = inventory(&admin);
    helm.upgrade("mesh", &["--set", "global.platform=openshift,fullnameOverride=detour"]);
    let refused = helm.try_upgrade("mesh", &["--set", "fullnameOverride=other"]).expect_err("renamed");
    assert!(refused.contains("set fullnameOverride=detour"), "{refused}");
    helm.uninstall("mesh", NAMESPACE);
    assert_eq!(difference(&empty, &inventory(&admin)), [""; 0]);
}

/// tests/chart/notes.rs has the notes that do not depend on the cluster.
#[test]
fn the_notes_name_definitions_of_other_owners() {
    let (_plane, admin, helm) = cluster();
    apply(&admin, &[definition_of("shop", "a")]);
    // With an API that the chart finds in the cluster.
    let values = "taint.enabled=true,taint.atCreation=true,definitions=never,attachments[0].name=a,attachments[0].namespaces={shop}";
    let notes = helm.upgrade("detour", &["--set", values]);
    let notes = notes.split_once("NOTES:\n").expect("notes").1.replace(env!("CARGO_PKG_VERSION"), "VERSION");
    compare("notes.md", "kubernetes", "definitions of other owners", &notes);
}

/// Mounts the directories of $2… below /media, read-only, and runs $1 there.
const CONTAINER: &str = r#"
set -eu
mount -t tmpfs tmpfs /media
run=$1
shift
for directory; do
    mkdir -p "/media$directory"
    mount --bind "/mnt$directory" "/media$directory"
    mount -o remount,bind,ro "/media$directory"
done
mount -o remount,ro /media
exec $run
"#;

fn pod() -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": NAMESPACE, "name": "detour-test"}})
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().expect("a list").iter().map(|item| item.as_str().expect("text"))
}

/// Runs the container of a pod.
fn container(node: &Node<'_>, pod: &Value) -> Output {
    let container = &pod["spec"]["containers"][0];
    let context = &container["securityContext"];
    assert_eq!(context["readOnlyRootFilesystem"], true);
    assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
    let capabilities: String =
        strings(&context["capabilities"]["add"]).map(|name| format!(",+{}", name.to_lowercase())).collect();
    let arguments: Vec<String> =
        strings(&container["args"]).map(|argument| argument.replace("=/host", "=/media")).collect();
    let run =
        format!("setpriv --bounding-set=-all{capabilities} {} {}", env!("CARGO_BIN_EXE_detour"), arguments.join(" "));
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", CONTAINER, "sh", &run]);
    for mounted in container["volumeMounts"].as_array().expect("mounts") {
        assert_eq!(mounted["readOnly"], true, "{mounted}");
        let directory = mounted["mountPath"].as_str().and_then(|path| path.strip_prefix("/host")).expect("below /host");
        let mut volumes = pod["spec"]["volumes"].as_array().expect("volumes").iter();
        let volume = volumes.find(|volume| volume["name"] == mounted["name"]).expect("a volume");
        assert_eq!(volume["hostPath"]["path"], directory);
        assert!(node.path(&directory[1..]).is_dir(), "the agent's pod mounts {directory} too");
        command.arg(directory);
    }
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("NODE_NAME", NAME);
    command.output().expect("unshare starts")
}

/// The heading of the checks that were not made.
const NOT_CHECKED: &str = "\nNot checked\n";

/// Returns the checks with this result.
fn checks<'a>(report: &'a str, result: &str) -> Vec<&'a str> {
    let names = report.lines().filter_map(|line| line.strip_prefix("  ")?.strip_prefix(result)?.strip_prefix("  "));
    names.filter_map(|line| line.trim_start().split(' ').next()).collect()
}

/// Runs `helm test`, and the pod that it creates. Returns the result of helm and the pod's output.
fn test(plane: &ControlPlane, admin: &Client, node: &Node<'_>) -> (Result<String, String>, String) {
    thread::scope(|scope| {
        let helm = scope.spawn(|| Helm::new(plane).run(&["test", "detour", "-n", NAMESPACE, "--timeout", "300s"]));
        let is_new = |pod: &Value| pod["status"]["phase"] == "Pending";
        plane.until(|| helm.is_finished() || admin.get(&pod()).is_ok_and(|pod| is_new(&pod)));
        if let Ok(created) = admin.get(&pod()) {
            let output = container(node, &created);
            let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
            let report = format!("{out}{err}");
            let phase = if output.status.success() { "Succeeded" } else { "Failed" };
            admin.merge_status(&created, &json!({"status": {"phase": phase}})).expect("accepted");
            return (helm.join().expect("no panic"), report);
        }
        (helm.join().expect("no panic"), String::new())
    })
}

#[test]
fn helm_test_checks_a_node_with_read_only_mounts_and_without_a_token() {
    let (plane, admin, helm) = cluster();
    let empty = inventory(&admin);
    helm.upgrade("detour", &[]);
    on_a_node(&plane, &base("kubernetes"), |node| {
        let agent = node.settled_agent("a");
        let (before, installed) = (node.files(), inventory(&admin));
        let (result, output) = test(&plane, &admin, node);
        assert!(result.as_ref().is_ok_and(|text| text.contains("Succeeded")), "{result:?}\n{output}");
        assert!(!output.contains(NOT_CHECKED), "{output}");
        let passed = checks(&output, "pass");
        for check in ["program-present", "kubeconfig-valid", "permissions", "agent-reachable", "kernel-rules"] {
            assert!(passed.contains(&check), "{check}: {output}");
        }
        assert_eq!(node.files(), before, "nothing changes");
        assert_eq!(difference(&installed, &inventory(&admin)), [""; 0], "a pod that succeeded is deleted");

        agent.ended();
        let (result, output) = test(&plane, &admin, node);
        assert!(result.is_err_and(|error| error.contains("detour-test failed")), "{output}");
        assert_eq!(checks(&output, "FAIL"), ["agent-reachable"], "{output}");
        assert_eq!(admin.get(&pod()).expect("it stays")["status"]["phase"], "Failed");

        // The next test replaces it. Without the capabilities for repairs, the kernel's features are not checked.
        let _again = node.settled_agent("b");
        helm.upgrade("detour", &["--set", "repair.enabled=false"]);
        let (result, output) = test(&plane, &admin, node);
        assert!(result.is_ok(), "{result:?}\n{output}");
        assert!(output.contains("1 not checked\n\nTo do\n  -    kernel-rules ("), "{output}");
    });
    helm.uninstall("detour", NAMESPACE);
    let node = ["Node /node-1", "Pod kube-system/detour-agent-node-1"];
    assert_eq!(difference(&empty, &inventory(&admin)), node, "no object of the release stays");
}

#[test]
fn helm_test_passes_for_an_attachment_on_openshift() {
    let (plane, admin, helm) = cluster();
    helm.upgrade("detour", &["--set", "global.platform=openshift"]);
    on_a_node(&plane, &base("openshift"), |node| {
        let _agent = node.settled_agent("a");
        let (result, output) = test(&plane, &admin, node);
        assert!(result.is_ok(), "{result:?}\n{output}");
        assert!(!output.contains(NOT_CHECKED), "{output}");
        assert!(output.contains("/etc/cni/multus/net.d/istio-cni.conf"), "{output}");
    });
}
