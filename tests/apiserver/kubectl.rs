//! `kubectl detour`: with a real API server, which forwards exec to the endpoint of a kubelet.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::node::{Kubelet, NAME, Node, meshed_pod, on_a_node};
use crate::shipped::{NAMESPACE, apply, chart, cluster_with, manifests, objects, of_kind};
use crate::support::netns_pod::Pod;
use crate::support::program::{built, write_executable};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The result of a command.
#[derive(Debug)]
struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    fn json_or_null(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_default()
    }

    /// Checks the exit code, and that the report on stdout has these parts.
    #[track_caller]
    fn reports(&self, code: i32, parts: &[&str]) {
        let missing = parts.iter().find(|part| !self.stdout.contains(**part));
        assert_eq!((self.code, missing), (Some(code), None), "{self:?}");
    }

    /// Checks that it failed with this part on stderr.
    #[track_caller]
    fn fails_with(&self, part: &str) {
        assert!(self.code == Some(1) && self.stderr.contains(part), "{part}: {self:?}");
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A user's machine: its kubeconfig, and the program under its name for kubectl.
struct Machine {
    directory: PathBuf,
}

impl Machine {
    fn new(name: &str, kubeconfig: &Value) -> Self {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kubectl-{name}"));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("writable");
        symlink(env!("CARGO_BIN_EXE_detour"), directory.join("kubectl-detour")).expect("writable");
        let machine = Self { directory };
        machine.write("kubeconfig", &kubeconfig.to_string());
        machine
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.directory.join(name);
        fs::write(&path, text).expect("writable");
        path.display().to_string()
    }

    fn program(&self, name: &str, text: &str) -> String {
        let path = self.directory.join(name);
        write_executable(&path, text);
        path.display().to_string()
    }

    fn detour(&self, arguments: &[&str]) -> Run {
        self.run(&self.directory.join("kubectl-detour"), arguments, "kubeconfig")
    }

    /// `KUBECONFIG` is the file `kubeconfig` of the machine.
    fn run(&self, program: &Path, arguments: &[&str], kubeconfig: &str) -> Run {
        let mut command = Command::new(program);
        command.args(arguments).env_clear().env("KUBECONFIG", self.directory.join(kubeconfig));
        let kubectl = built("kubectl");
        let tools = kubectl.parent().expect("a directory").display();
        let path = format!("{}:{tools}:/usr/bin:/bin", self.directory.display());
        command.env("PATH", path).env("HOME", &self.directory).env("COLUMNS", "10000");
        let output = command.output().unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// A cluster with the shipped agent on a node, and a pod there with rules.
struct Scene<'a> {
    plane: &'a ControlPlane,
    admin: Client,
    objects: &'a [Value],
    node: &'a Node<'a>,
    machine: Machine,
}

fn scene(name: &str, values: &[&str], work: impl FnOnce(&Scene<'_>) + Send) {
    let objects = chart(values);
    let plane = cluster_with(&objects);
    on_a_node(&plane, &objects, |node| {
        let machine = Machine::new(name, &plane.admin_kubeconfig());
        work(&Scene { plane: &plane, admin: plane.admin(), objects: &objects, node, machine });
    });
}

impl Scene<'_> {
    /// Adds a Node whose kubelet runs commands of the agent's container with `program`.
    fn kubelet(&self, program: &str) -> Kubelet {
        let kubelet = self.node.start_kubelet("detour-agent-x", Path::new(program));
        self.add_node(NAME, kubelet.port, &json!({"kubernetes.io/os": "linux"}));
        kubelet
    }

    fn add_node(&self, name: &str, port: u16, labels: &Value) {
        let metadata = json!({"name": name, "labels": labels});
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata});
        self.admin.apply(&node).expect("accepted");
        let status = json!({
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        });
        self.admin.merge_status(&node, &json!({"status": status})).expect("accepted");
    }

    /// Adds the shipped agent's pod on the node, with its container running.
    fn agent_pod(&self, change: impl FnOnce(&mut Value)) -> Value {
        let template = &of_kind(self.objects, "DaemonSet")["spec"]["template"];
        let mut pod =
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
        pod["metadata"]["name"] = json!("detour-agent-x");
        pod["metadata"]["namespace"] = json!(NAMESPACE);
        pod["spec"]["nodeName"] = json!(NAME);
        change(&mut pod);
        self.admin.apply(&pod).expect("accepted");
        self.set_status(&pod, &json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}}), true);
        pod
    }

    fn set_status(&self, pod: &Value, state: &Value, ready: bool) {
        let container = json!({
            "name": "agent", "image": "detour", "imageID": "", "ready": ready, "restartCount": 0, "state": state,
        });
        let condition = json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
        let status = json!({"phase": "Running", "conditions": [condition], "containerStatuses": [container]});
        self.admin.merge_status(pod, &json!({"status": status})).expect("accepted");
    }
}

#[test]
fn commands_about_a_pod_run_in_the_agent_on_its_node() {
    let values = [
        "config.chain[0].type=istio-redirect",
        "config.chain[1].type=uid-exclude",
        "config.chain[1].uids={4711}",
        "repair.repairPods=false",
    ];
    scene("kubectl-pod", &values, |scene| {
        let _kubelet = scene.kubelet(env!("CARGO_BIN_EXE_detour"));
        let pod = meshed_pod(&scene.admin, "web-0");
        let machine = &scene.machine;
        let missing = machine.detour(&["rules", "web-0"]);
        missing.fails_with("pod shop/web-0: no agent on its node node-1; see kubectl detour check --node node-1");

        scene.agent_pod(|_| {});
        let sandbox = Pod::new();
        sandbox.pin(&pod);
        let _agent = scene.node.settled_agent("detour-agent-x");
        scene.node.call("ADD", &sandbox, &pod).expect("added");

        let report = |explained: &Run| {
            let mut report = explained.json();
            let excluded = report["exempt"].to_string();
            assert!(excluded.contains("4711"), "{explained:?}");
            let configuration = report["configuration"].take();
            (report, configuration)
        };
        let (_, configuration) = report(&machine.detour(&["explain", "web-0", "-o", "json"]));
        let file = "/etc/cni/net.d/00-detour.conflist";
        assert_eq!(configuration, json!({"source": "node", "places": [file], "reason": null}));
        let anywhere = machine.run(
            Path::new(env!("CARGO_BIN_EXE_detour")),
            &["explain", "-n", "shop", "web-0", "-o", "json"],
            "kubeconfig",
        );
        let elsewhere = anywhere.json();
        assert_eq!(elsewhere["configuration"]["source"], "built-in", "{anywhere:?}");
        let reason = elsewhere["configuration"]["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("not the pod's node"), "{anywhere:?}");
        let trace = machine.detour(&["trace", "web-0", "--from", "uid=4711", "--to", "1.2.3.4:443/tcp"]);
        trace.reports(0, &["direct", &format!("Configuration: installed on the node: {file}")]);
        let config = machine.write(
            "other.conf",
            r#"{"cniVersion": "1.1.0", "name": "other", "type": "detour", "kubernetes": {"kubeconfig": "/k"}}"#,
        );
        let other = machine.detour(&["explain", "web-0", "-o", "json", "--config", &config]);
        assert_eq!(
            (&other.json()["network"], &other.json()["configuration"]["source"]),
            (&json!("other"), &json!("file")),
            "{other:?}"
        );
        let none =
            machine.detour(&["explain", "web-0", "-o", "json", "--agent-namespace", "shop", "--config", "/dev/null"]);
        assert_eq!(none.code, Some(2), "{none:?}");

        let rules = machine.detour(&["rules", "-n", "shop", "web-0", "-o", "json"]);
        assert_eq!((rules.code, &rules.json()["as_asked"]), (Some(0), &json!(true)), "{rules:?}");
        // The namespace of the context, and an exit code of the agent's process.
        sandbox.flush();
        let drift = machine.detour(&["rules", "pod/web-0"]);
        assert_eq!(drift.code, Some(1), "{drift:?}");
        assert!(drift.stdout.contains("missing") && !drift.stdout.contains('\u{1b}'), "{drift:?}");

        let audit = machine.detour(&["audit", "-o", "json"]);
        let found = &audit.json()["pods"][0];
        assert_eq!((&found["node"], &found["pod"], audit.code), (&json!(NAME), &json!("web-0"), Some(1)), "{audit:?}");
        assert_eq!((&found["redirected"], &found["error"]), (&json!(false), &Value::Null), "{audit:?}");
        assert_eq!(machine.detour(&["audit", "-n", "default"]).stdout, "No pod bypasses the mesh; pods checked: 0\n");
        // A node without an agent: its pods with a sidecar are not examined.
        scene.add_node("node-2", 1, &json!({}));
        let containers = json!([{"name": "istio-proxy", "image": "proxy"}]);
        let spec = json!({"nodeName": "node-2", "automountServiceAccountToken": false, "containers": containers});
        let metadata = json!({"namespace": "shop", "name": "web-9"});
        scene
            .admin
            .apply(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))
            .expect("accepted");
        let audit = machine.detour(&["audit", "-o", "json"]);
        let error = &audit.json()["errors"][0];
        assert_eq!((&error["node"], audit.code), (&json!("node-2"), Some(1)), "{audit:?}");
        assert!(error["error"].to_string().contains("no agent; pods with a sidecar, not examined: 1;"));
        assert_eq!(machine.detour(&["audit", "-n", "default"]).stdout, "No pod bypasses the mesh; pods checked: 0\n");

        let doctor = machine.detour(&["doctor", "web-0", "-o", "json"]);
        assert_eq!(doctor.code, Some(1), "{doctor:?}");
        let checks = doctor.json()["checks"].as_array().expect("checks").clone();
        let found = checks.iter().find(|check| check["id"] == "netns-found").expect("the check");
        assert_eq!(found["outcome"], "pass", "{doctor:?}");

        let of = |from: &str| {
            machine.detour(&["trace", "--live", "web-0", "--from", from, "--to", "1.2.3.4:443/tcp", "-o", "json"])
        };
        let trace = of("uid=1000");
        assert_eq!(trace.json()["arrives_at"], "direct", "{trace:?}");
        let trace = of("container=istio-proxy,uid=1337");
        assert_eq!(trace.json()["container"]["name"], "istio-proxy", "{trace:?}");
        let unknown = of("container=no");
        assert!(unknown.code == Some(2) && unknown.stderr.contains("expected one of "), "{unknown:?}");
    });
}

#[test]
fn a_command_that_cannot_run_fails_with_the_reason() {
    scene("kubectl-refused", &["repair.enabled=false"], |scene| {
        let kubelet = scene.kubelet(env!("CARGO_BIN_EXE_detour"));
        let pod = meshed_pod(&scene.admin, "web-0");
        let agent = scene.agent_pod(|_| {});
        let machine = &scene.machine;
        let fails = |arguments: &[&str], code: i32, message: &str| {
            let run = machine.detour(arguments);
            assert_eq!(run.code, Some(code), "{arguments:?}: {run:?}");
            assert!(run.stderr.contains(message) && run.stdout.is_empty(), "{arguments:?}: {run:?}");
        };
        fails(&["rules", "web-1"], 1, "pod web-1: not found in the namespace of the context; add -n NAMESPACE");
        fails(&["rules", "-n", "default", "web-1"], 1, "pod default/web-1: not found");
        fails(
            &["rules", "web-0"],
            1,
            "pod kube-system/detour-agent-x: the agent lacks the capabilities to enter pods' network namespaces; set the chart value repair.enabled=true",
        );
        fails(&["trace", "--live", "web-0", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], 1, "lacks the capabilities");
        fails(&["doctor"], 2, "expected a pod: [-n NAMESPACE] POD; see --help");
        fails(&["rules", "--pid", "1"], 2, "--pid: not supported by kubectl detour; run detour on the node");
        fails(&["doctor", "web-0", "--context", "other"], 1, "context was not found for specified context: other");
        fails(&["doctor", "web-0", "--kubeconfig", "/no/such/file"], 1, "/no/such/file: no such file");
        fails(&["install"], 2, "unrecognized subcommand 'install'");

        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        scene.set_status(&agent, &waiting, false);
        fails(
            &["doctor", "web-0"],
            1,
            "pod kube-system/detour-agent-x: container agent: not running: CrashLoopBackOff; see kubectl describe pod -n kube-system detour-agent-x",
        );
        scene.set_status(&agent, &json!({"running": {}}), true);

        // A user who may read pods, but not run commands.
        let role = |verbs: &[&str], resources: &[&str]| {
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "user"},
                "rules": [{"apiGroups": [""], "resources": resources, "verbs": verbs}],
            })
        };
        let account =
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "user", "namespace": "shop"}});
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "user"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "user"},
            "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": "shop"}],
        });
        apply(&scene.admin, &[account, role(&["get", "list"], &["pods"]), binding]);
        let token = json!({"token": scene.admin.token("shop", "user")});
        machine.write("kubeconfig", &scene.plane.kubeconfig_of(&token).to_string());
        let lacks = "cannot create resource \"pods/exec\"";
        scene.plane.until(|| machine.detour(&["doctor", "web-0"]).stderr.contains(lacks));
        fails(&["doctor", "web-0"], 1, lacks);
        fails(&["check"], 1, "cannot list resource \"nodes\"");
        // The shipped role suffices, also for check.
        let text = fs::read_to_string(manifests().join("samples/kubectl-detour-role.yaml")).expect("readable");
        let group = "name: detour-operators";
        assert_eq!(text.matches(group).count(), 2);
        apply(&scene.admin, &objects(&text.replace(group, "name: system:serviceaccounts:shop")));
        scene
            .plane
            .until(|| machine.detour(&["check", "-o", "json"]).json_or_null()["nodes"][0]["version"].is_string());
        let doctor = machine.detour(&["doctor", "web-0", "-o", "json"]);
        assert!(doctor.json()["checks"].is_array(), "{doctor:?}");

        let config = machine.write("other.conf", r#"{"name": "other", "type": "detour"}"#);
        fails(&["explain", "web-0", "--config", &config], 1, "cannot get resource \"namespaces\"");
        apply(&scene.admin, &[role(&["get", "list"], &["pods", "namespaces"])]);
        scene.plane.until(|| machine.detour(&["explain", "web-0", "--config", &config]).stdout.contains("shop/web-0"));

        drop(kubelet);
        fails(&["doctor", "web-0"], 1, "dial tcp 127.0.0.1:");
        assert!(pod["spec"].is_object());
    });
}

#[test]
fn output_of_a_compromised_node_is_escaped() {
    scene("kubectl-hostile", &[], |scene| {
        let script = scene.machine.program(
            "hostile",
            "#!/bin/sh\nprintf 'a\\033[2Jb\\342\\200\\256c\\n'; printf 'd\\033]0;x\\007\\n' >&2; exit 7\n",
        );
        let _kubelet = scene.kubelet(&script);
        meshed_pod(&scene.admin, "web-0");
        scene.agent_pod(|_| {});
        let run = scene.machine.detour(&["rules", "web-0"]);
        assert_eq!((run.code, run.stdout.as_str()), (Some(7), "a\\u{1b}[2Jb\\u{202e}c\n"), "{run:?}");
        assert_eq!(run.stderr, "node-1: d\\u{1b}]0;x\\u{7}\n");
        for command in [&["check"][..], &["audit", "-A"]] {
            let run = scene.machine.detour(command);
            assert_eq!(run.code, Some(1), "{run:?}");
            assert!(run.stdout.contains("expected a report, got ") && !run.stdout.contains('\u{1b}'), "{run:?}");
        }
        // A pod of another user has the labels of an agent, but can't mount the node's directory.
        scene.admin.delete(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "detour-agent-x", "namespace": NAMESPACE}})).expect("deleted");
        scene.agent_pod(|pod| {
            pod["metadata"]["namespace"] = json!("shop");
            pod["spec"]["serviceAccountName"] = json!("default");
            for volume in pod["spec"]["volumes"].as_array_mut().expect("volumes") {
                *volume = json!({"name": volume["name"], "emptyDir": {}});
            }
        });
        let run = scene.machine.detour(&["rules", "web-0"]);
        assert!(run.stderr.contains("no agent on its node node-1"), "{run:?}");
    });
}

/// Creates pods with a native sidecar whose init container runs as UID 1337: two of a Deployment, one alone, and one that
/// has ended.
fn workloads_with_native_sidecars(admin: &Client) {
    let deployment = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d9c", "uid": "1", "controller": true,
    }]);
    let sidecar =
        json!({"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"], "restartPolicy": "Always"});
    let vault = json!({"name": "vault-agent-init", "image": "vault", "securityContext": {"runAsUser": 1337}});
    for (name, owners, phase) in [
        ("web-5d9c-a", &deployment, "Running"),
        ("web-5d9c-b", &deployment, "Running"),
        ("alone", &json!([]), "Running"),
        ("ended", &json!([]), "Succeeded"),
    ] {
        let mut pod = meshed_pod(admin, name);
        admin.delete(&pod).expect("deleted");
        pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": "shop", "name": name, "annotations": pod["metadata"]["annotations"],
                "labels": {"pod-template-hash": "5d9c"}, "ownerReferences": owners,
            },
            "spec": {
                "nodeName": NAME, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
                "initContainers": [sidecar, vault], "containers": [{"name": "app", "image": "app"}],
            },
        });
        admin.apply(&pod).expect("accepted");
        admin.merge_status(&pod, &json!({"status": {"phase": phase}})).expect("accepted");
    }
}

#[test]
fn check_summarizes_all_nodes() {
    scene("kubectl-check", &[], |scene| {
        let machine = &scene.machine;
        let kubelet = scene.kubelet(env!("CARGO_BIN_EXE_detour"));
        let agent = scene.agent_pod(|_| {});
        let running = scene.node.settled_agent("detour-agent-x");
        scene.add_node("windows-1", kubelet.port, &json!({"kubernetes.io/os": "windows"}));
        workloads_with_native_sidecars(&scene.admin);
        let run = machine.detour(&["check", "-o", "json"]);
        let report = run.json();
        let needless = |container: &str, kind: &str, name: &str, exclusions: &[&str], pods: u32| {
            json!({
                "namespace": "shop", "kind": kind, "name": name, "container": container, "exclusions": exclusions,
                "pods": pods,
            })
        };
        let by_uid: &[&str] = &["uid 1337 (configuration, chain[1])"];
        let expected = json!([
            needless("vault-agent-init", "Deployment", "web", by_uid, 2),
            needless("vault-agent-init", "Pod", "alone", by_uid, 1),
        ]);
        assert_eq!(report["needless_exclusions"], expected, "{run:?}");
        let yaml: Value = serde_saphyr::from_str(&machine.detour(&["check", "-o", "yaml"]).stdout).expect("YAML");
        assert_eq!(yaml["needless_exclusions"], expected);
        let text = machine.detour(&["check"]).stdout;
        let (_, list) = text.split_once("Exclusions that are no longer needed").expect("a list");
        for part in ["Deployment shop/web  2 pods  init container vault-agent-init", by_uid[0]] {
            assert!(list.contains(part), "{part}: {text}");
        }
        let node = &report["nodes"][0];
        assert_eq!((&node["node"], &node["agent"]), (&json!(NAME), &json!("kube-system/detour-agent-x")), "{run:?}");
        assert_eq!(node["version"], env!("CARGO_PKG_VERSION"), "{run:?}");
        assert_eq!((&node["failed"], run.code), (&json!([]), Some(0)), "{run:?}");
        assert_eq!(
            (&report["nodes"][1]["node"], &report["nodes"][1]["result"]),
            (&json!("windows-1"), &json!("skipped"))
        );

        let report = "#!/bin/sh\necho '{\"version\": \"0.3.0\", \"healthy\": true, \"checks\": []}'\n";
        let healthy = scene.kubelet(&machine.program("healthy", report));
        let run = machine.detour(&["check"]);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{run:?}");
        assert!(run.stdout.starts_with("Nodes: 1 healthy, 0 unhealthy, 1 skipped\n"), "{run:?}");
        drop(healthy);
        scene.add_node(NAME, kubelet.port, &json!({"kubernetes.io/os": "linux"}));

        // A broken node, one without an agent, and an agent that is not ready.
        fs::remove_file(scene.node.path("var/lib/cni/detour/kubeconfig")).expect("installed");
        drop(running);
        scene.add_node("node-2", kubelet.port, &json!({"kubernetes.io/os": "linux", "zone": "b"}));
        scene.set_status(&agent, &json!({"running": {}}), false);
        let run = machine.detour(&["check"]);
        assert_eq!(run.stderr, "error: unhealthy nodes: node-1, node-2\n", "{run:?}");
        let selects = "no agent, but DaemonSet kube-system/detour-agent selects this node; see kubectl describe daemonset -n \
                       kube-system detour-agent";
        run.reports(1, &["the agent is not ready; failed: ", "kubeconfig-", selects]);
        let one = machine.detour(&["check", "--node", "windows-1"]);
        assert_eq!(one.code, Some(0), "{one:?}");

        // As the plugin of kubectl itself, and with several kubeconfigs, of which one is missing.
        let kubectl = built("kubectl");
        let other = machine.write("other", &json!({"current-context": "none", "contexts": []}).to_string());
        let kubeconfigs = format!("missing:{}:{other}", machine.directory.join("kubeconfig").display());
        let through = machine.run(&kubectl, &["detour", "check", "--node", "windows-1"], &kubeconfigs);
        assert_eq!((through.code, &through.stdout), (Some(0), &one.stdout), "{through:?}");
        machine.run(&kubectl, &["detour", "check", "--context=other"], "kubeconfig").fails_with("other");
        let help = machine.run(&kubectl, &["detour", "check", "--help"], "kubeconfig");
        help.reports(0, &["Usage: kubectl detour check [OPTIONS]"]);
        let selected = machine.detour(&["check", "-l", "zone=b", "-o", "yaml"]);
        selected.fails_with("unhealthy nodes: node-2\n");
        assert!(!selected.stdout.contains("node-1"), "{selected:?}");
        machine.detour(&["check", "--node", "node-9"]).fails_with("node node-9: not found; see kubectl get nodes");
    });
}
