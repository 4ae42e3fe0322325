//! The agent's pod as a kubelet starts it: the container of the chart's DaemonSet, with its arguments, environment,
//! volumes and security context.

use super::cluster::{Cluster, SYSTEM};
use crate::certificates::SERVICE;
use crate::cluster::detour;
use crate::node::Node;
use crate::pod::{Class, Pod, Sandbox, printed};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The directory of a service account's token in a container.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The agent's pod on the node.
pub(crate) struct Agent<'a> {
    cluster: &'a Cluster,
    node: &'a Node,
    pub(crate) pod: Pod,
    pub(crate) sandbox: Sandbox<'a>,
    container: Value,
    volumes: Vec<Value>,
    pub(crate) running: Option<(String, PathBuf)>,
    address: String,
}

/// A copy of the binary for the agent's container. A version differs from others in its content.
pub(crate) fn image(node: &Node, version: u8) -> PathBuf {
    let path = node.path(&format!("image/detour-{version}"));
    fs::copy(detour(), &path).expect("copied");
    let mut file = fs::File::options().append(true).open(&path).expect("writable");
    file.write_all(&[version]).expect("writable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("ours");
    path
}

impl<'a> Agent<'a> {
    /// Starts a pod of the DaemonSet with this program.
    pub(crate) fn start(
        cluster: &'a Cluster,
        node: &'a Node,
        (daemon_set, config): &(Value, Value),
        name: &str,
        program: &Path,
    ) -> Self {
        let template = &daemon_set["spec"]["template"];
        let mut pod = Pod::new(name, Class::Burstable, "").in_namespace(SYSTEM);
        pod.annotations = template["metadata"]["annotations"].clone();
        pod.spec = template["spec"].clone();
        cluster.create(&mut pod);
        let sandbox = pod.start(node).unwrap_or_else(|error| panic!("the agent's pod: {error}"));
        let addresses = sandbox.addresses();
        cluster.has_started(&pod, &addresses);
        let volume = |volume: &Value| {
            let host_path = match volume["hostPath"]["path"].as_str() {
                Some(path) => {
                    node.ok(&["mkdir", "-p", path]);
                    path.to_owned()
                }
                None => write_config(node, config).display().to_string(),
            };
            json!({"name": volume["name"], "path": host_path})
        };
        let volumes = template["spec"]["volumes"].as_array().expect("volumes").iter().map(volume).collect();
        let container = template["spec"]["containers"][0].clone();
        let address = addresses[0].clone();
        let mut agent = Self { cluster, node, pod, sandbox, container, volumes, running: None, address };
        agent.run(program);
        agent
    }

    /// Starts the container with this program.
    pub(crate) fn run(&mut self, program: &Path) {
        let account = self.node.path("account");
        fs::create_dir_all(&account).expect("made");
        fs::write(account.join("ca.crt"), self.cluster.plane.authority()).expect("written");
        let name = self.pod.spec["serviceAccountName"].as_str().expect("a name");
        // As the kubelet's, it names the pod and its node.
        let token = self.cluster.admin.bound_token(SYSTEM, name, &self.pod.manifest());
        fs::write(account.join("token"), token).expect("written");
        let mut mounts = vec![
            json!({"container_path": ACCOUNT, "host_path": account, "readonly": true}),
            json!({"container_path": "/detour", "host_path": program, "readonly": true}),
        ];
        for mount in self.container["volumeMounts"].as_array().expect("mounts") {
            let volume = self.volumes.iter().find(|volume| volume["name"] == mount["name"]).expect("a volume");
            let propagation = match mount["mountPropagation"].as_str() {
                Some("HostToContainer") => "PROPAGATION_HOST_TO_CONTAINER",
                _ => "PROPAGATION_PRIVATE",
            };
            mounts.push(json!({
                "container_path": mount["mountPath"], "host_path": volume["path"],
                "readonly": mount["readOnly"] == true, "propagation": propagation,
            }));
        }
        let security = &self.container["securityContext"];
        let capabilities = &security["capabilities"];
        let fields = json!({
            "args": self.container["args"],
            "envs": self.environment(),
            "mounts": mounts,
            "linux": {
                "resources": {"memory_limit_in_bytes": 128 << 20},
                "security_context": {
                    "namespace_options": {"pid": "CONTAINER"},
                    "run_as_user": {"value": security["runAsUser"]}, "run_as_group": {"value": security["runAsGroup"]},
                    "readonly_rootfs": security["readOnlyRootFilesystem"],
                    "no_new_privs": security["allowPrivilegeEscalation"] == false,
                    "capabilities": {"add_capabilities": capabilities["add"], "drop_capabilities": capabilities["drop"]},
                    "seccomp": {"profile_type": security["seccompProfile"]["type"]},
                },
            },
        });
        let started = self.sandbox.run_with("agent", &["/detour"], &fields);
        self.running = Some(started.unwrap_or_else(|error| panic!("the agent's container: {error}")));
    }

    fn environment(&self) -> Vec<Value> {
        let metadata = &self.pod.manifest()["metadata"];
        let mut variables =
            vec![variable("KUBERNETES_SERVICE_HOST", SERVICE), variable("KUBERNETES_SERVICE_PORT", "443")];
        for given in self.container["env"].as_array().expect("variables") {
            let value = match given["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some("spec.nodeName") => "node-1",
                Some(path) => metadata[path.trim_start_matches("metadata.")].as_str().expect("text"),
                None => given["value"].as_str().expect("text"),
            };
            variables.push(variable(given["name"].as_str().expect("a name"), value));
        }
        variables
    }

    /// Everything that the container logged.
    pub(crate) fn logged(&self) -> Vec<String> {
        self.running.as_ref().map(|(_, log)| printed(log)).unwrap_or_default()
    }

    fn get(&self, path: &str) -> Option<String> {
        let url = format!("http://{}:8000{path}", self.address);
        let output = self.node.run(&["curl", "--silent", "--fail", "--max-time", "5", &url]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[track_caller]
    pub(crate) fn until_ready(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.get("/readyz").is_none() {
            let waits = Instant::now() < deadline && self.is_running();
            assert!(waits, "the agent is not ready: {:#?}", self.logged());
            thread::park_timeout(Duration::from_millis(20));
        }
    }

    /// Whether the container runs.
    pub(crate) fn is_running(&self) -> bool {
        self.process().is_some()
    }

    /// The process ID of the container on the node.
    fn process(&self) -> Option<String> {
        let (id, _) = self.running.as_ref()?;
        let status: Value = serde_json::from_str(&self.node.ok(&["crictl", "inspect", id])).expect("JSON");
        let runs = status["status"]["state"] == "CONTAINER_RUNNING";
        runs.then(|| status["info"]["pid"].to_string())
    }

    /// The number of calls with this verb that the plugin has reported, and their duration in seconds.
    pub(crate) fn calls(&self, verb: &str) -> (f64, f64) {
        let text = self.get("/metrics").expect("the agent serves them");
        let sample = |name: &str| {
            let prefix = format!("detour_plugin_call_duration_seconds_{name}{{verb=\"{verb}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&prefix)?.parse().ok()).unwrap_or(0.0)
        };
        (sample("count"), sample("sum"))
    }

    /// Sends SIGKILL to the agent and waits for its end.
    pub(crate) fn kill(&mut self) {
        let pid = self.process().expect("the agent runs");
        self.node.ok(&["kill", "-KILL", &pid]);
        let (id, _) = self.running.take().expect("the agent runs");
        self.node.asked(json!({"op": "wait", "container": id}));
        self.node.asked(json!({"op": "remove", "container": id}));
    }

    /// Ends the container as the kubelet does. Returns its log.
    pub(crate) fn stop(&mut self) -> Vec<String> {
        let (id, log) = self.running.take().expect("the agent runs");
        self.node.asked(json!({"op": "stop", "container": id, "seconds": 30}));
        let logged = printed(&log);
        self.node.asked(json!({"op": "remove", "container": id}));
        logged
    }

    /// Deletes the pod, whose container has ended.
    pub(crate) fn remove(self) {
        self.sandbox.remove();
        self.cluster.admin.delete(&self.pod.manifest()).expect("deleted");
    }
}

/// A variable of a container. The value has the type bytes.
fn variable(name: &str, value: &str) -> Value {
    json!({"key": name, "value": BASE64_STANDARD.encode(value)})
}

/// Writes the files of the ConfigMap. Returns their directory.
fn write_config(node: &Node, config: &Value) -> PathBuf {
    let directory = node.path("config");
    fs::create_dir_all(&directory).expect("made");
    for (file, text) in config["data"].as_object().expect("files") {
        fs::write(directory.join(file), text.as_str().expect("text")).expect("written");
    }
    directory
}
