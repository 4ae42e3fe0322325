//! A node with its files, kinds of pods, and calls of the plugin as a container runtime makes them.

use crate::scene;
pub(crate) use crate::scene::is_redirected;
use crate::support::api::{Api, NAMESPACES, PODS, kubeconfig_of};
use crate::support::called::Called;
use crate::support::netns_pod::Pod;
use crate::support::private_node::left_in_state;
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// `timeout_seconds` of the configuration.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);
/// The node's directory of the plugin.
const DIRECTORY: &str = "/var/lib/cni/detour";

/// A kind of pod: its namespace and name, and its annotations as the runtime passes them.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    pub(crate) namespace: &'static str,
    pub(crate) name: &'static str,
    pub(crate) annotations: Option<Value>,
}

impl Kind {
    fn of_shop(annotations: Option<Value>) -> Self {
        Self { namespace: "shop", name: "web-0", annotations }
    }

    /// A pod that Istio's injector has processed.
    pub(crate) fn meshed() -> Self {
        Self::of_shop(Some(
            json!({"sidecar.istio.io/status": "{\"revision\":\"default\"}", "kubernetes.io/config.source": "api"}),
        ))
    }

    /// A pod without a sidecar. It requests an exclusion, which has no effect.
    pub(crate) fn plain() -> Self {
        Self::of_shop(Some(json!({"kubernetes.io/config.source": "api", "detour.io/exclude-uids": "7"})))
    }

    /// A pod of a runtime that passes no annotations.
    pub(crate) fn unknown() -> Self {
        Self::of_shop(None)
    }

    /// A meshed pod in an excluded namespace.
    pub(crate) fn excluded() -> Self {
        Self { namespace: "kube-system", ..Self::meshed() }
    }

    /// The agent's own pod. The runtime passes no annotations.
    pub(crate) fn agent() -> Self {
        Self { namespace: "mesh", name: "detour-agent-x7k2p", annotations: None }
    }

    /// Those that start on every node.
    pub(crate) fn starting() -> [Self; 3] {
        [Self::plain(), Self::excluded(), Self::agent()]
    }

    /// Those that wait for their facts.
    pub(crate) fn waiting() -> [Self; 2] {
        [Self::meshed(), Self::unknown()]
    }
}

/// A node whose agent's API server has a pod with a sidecar.
pub(crate) struct Scene<'a>(&'a scene::Scene);

impl Deref for Scene<'_> {
    type Target = scene::Scene;

    fn deref(&self) -> &scene::Scene {
        self.0
    }
}

impl Scene<'_> {
    /// Runs a test on a node of its own.
    pub(crate) fn run(test: impl FnOnce(&Scene<'_>) + Send) {
        scene::Scene::run(|node| {
            fs::create_dir_all(DIRECTORY).expect("needs root");
            let flags = MsFlags::empty();
            mount(Some("tmpfs"), DIRECTORY, Some("tmpfs"), flags, Some("size=1m,mode=755")).expect("a tmpfs");
            test(&Scene(node));
            assert_eq!(left_in_state(), Vec::<PathBuf>::new(), "state is left");
        });
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.root.join("kubeconfig")
    }

    /// Writes a kubeconfig with these values of its cluster and a token.
    pub(crate) fn write_kubeconfig(&self, cluster: &Value) {
        fs::write(self.kubeconfig(), kubeconfig_of(cluster, &json!({"token": "of-last-month"}))).expect("written");
    }

    /// The node configuration.
    pub(crate) fn node_configuration(&self) -> PathBuf {
        Path::new(DIRECTORY).join("node.json")
    }

    /// The entry of the plugin in the node's configuration list.
    pub(crate) fn conf(&self) -> Value {
        json!({
            "cniVersion": "1.1.0", "name": "k8s-pod-network", "type": "detour",
            "kubernetes": {
                "agent_socket": self.socket(), "kubeconfig": self.kubeconfig(), "timeout_seconds": TIMEOUT.as_secs(),
                "exclude_namespaces": ["kube-system"], "agent_namespace": "mesh",
            },
            "chain": [{"type": "istio-redirect"}, {"type": "uid-exclude", "uids": ["1337"]}],
            "capabilities": {"io.kubernetes.cri.pod-annotations": true},
        })
    }

    /// The same with this API server.
    pub(crate) fn conf_with(&self, api: &Api) -> Value {
        self.write_kubeconfig(&json!({"server": api.url()}));
        self.conf()
    }

    /// The same without an API server.
    pub(crate) fn conf_of_agent_alone(&self) -> Value {
        scene::without("kubeconfig", self.conf())
    }

    /// Checks each kind of pod: those that need facts fail with this code and a message that contains `parts`, and leave
    /// nothing behind; all others start. STATUS succeeds, because the agent's pod must start. The calls are concurrent.
    #[track_caller]
    pub(crate) fn only_pods_with_a_sidecar_wait(&self, code: u64, parts: &[&str]) {
        let conf = self.conf();
        thread::scope(|scope| {
            for kind in Kind::waiting() {
                let conf = &conf;
                scope.spawn(move || {
                    waits(&kind, conf, code, parts);
                });
            }
            for kind in Kind::starting() {
                let conf = &conf;
                scope.spawn(move || starts(&kind, conf));
            }
            let log = call(&Pod::new(), "STATUS", &conf, &Kind::unknown()).done().stderr;
            // An API server that reports "not found" answers.
            let is_true = code == 100 || log.contains("an ADD of a pod with a sidecar would fail now");
            assert!(is_true, "{log}");
        });
    }
}

/// Checks that a pod fails and leaves nothing behind. Returns the time that the call took.
pub(crate) fn waits(kind: &Kind, conf: &Value, code: u64, parts: &[&str]) -> Duration {
    let (pod, started) = (Pod::new(), Instant::now());
    let called = call(&pod, "ADD", conf, kind);
    let took = started.elapsed();
    let (found, text) = called.refused();
    assert_eq!(found, code, "{kind:?}: {text}");
    let name = format!("pod {}/{}", kind.namespace, kind.name);
    for part in [&[name.as_str()], parts].concat() {
        assert!(text.contains(part), "{part}: {text}");
    }
    let says_why = text.contains("the pod has a sidecar (annotation sidecar.istio.io/status)");
    let is_meshed = kind.annotations.is_some();
    assert!(says_why == is_meshed || parts.contains(&"node.json"), "{text}");
    assert!(!has_rules(&pod));
    call(&pod, "DEL", conf, kind).done();
    took
}

/// Checks that a pod starts without rules, and that CHECK and DEL work in the same state of the node.
/// Returns the log.
pub(crate) fn starts(kind: &Kind, conf: &Value) -> String {
    let pod = Pod::new();
    let log = call(&pod, "ADD", conf, kind).done().stderr;
    assert!(!has_rules(&pod));
    call(&pod, "CHECK", conf, kind).done();
    call(&pod, "DEL", conf, kind).done();
    call(&pod, "DEL", conf, kind).done();
    log
}

/// Starts an API server that knows the pod with a sidecar, with or without the annotation of Istio's injector.
pub(crate) fn api(with_annotation: bool) -> Api {
    let api = Api::start();
    api.put(NAMESPACES, &json!({"metadata": {"name": "shop"}}));
    let mut pod = scene::pod("uid-1");
    if !with_annotation {
        pod["metadata"]["annotations"] = json!({});
    }
    api.put(PODS, &pod);
    api
}

/// Returns whether a rule of this plugin is in the pod.
pub(crate) fn has_rules(pod: &Pod) -> bool {
    let rules = pod.tool("nft", &["list", "ruleset"], "");
    ["ISTIO_", "DETOUR_", "detour"].iter().any(|part| rules.contains(part))
}

/// Calls the plugin for a pod.
pub(crate) fn call(pod: &Pod, verb: &str, conf: &Value, kind: &Kind) -> Called {
    let mut conf = conf.clone();
    if let Some(annotations) = &kind.annotations {
        conf["runtimeConfig"]["io.kubernetes.cri.pod-annotations"] = annotations.clone();
    }
    conf.as_object_mut().expect("an object").remove("capabilities");
    conf["prevResult"] = json!({"cniVersion": conf["cniVersion"], "interfaces": [{"name": "eth0"}]});
    let Kind { namespace, name, .. } = kind;
    let arguments = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID=uid-1");
    Called::ended(scene::start(pod, verb, "eth0", &arguments, &conf))
}
