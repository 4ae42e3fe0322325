//! The API server of the node's cluster, and the agent on the node.

use crate::api::{Api, NAMESPACES, PODS};
use crate::node::{Node, until};
use crate::pod::Pod;
use crate::program::program;
use crate::support::agent_process;
use crate::support::health::fetch;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{Shutdown, shutdown};
use serde_json::{Value, json};
use std::fs;
use std::net::TcpListener;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

/// The sub-plugin chain of the node.
const CHAIN: &str =
    r#"[{"type": "istio-redirect", "redirect_dns": true, "capture_all_dns": true}, {"type": "container-exclude"}]"#;

/// Runs a command in its own control group and cgroup namespace, as runtimes run the agent's container.
const CONTAINED: &str = r#"set -e
group=$(findmnt --types cgroup2 --noheadings --output TARGET | head -n 1)$0/agent/container
mkdir -p "$group"
echo $$ >"$group/cgroup.procs"
exec unshare --cgroup "$@""#;

/// The agent's log message after its registration.
pub(crate) const REGISTERED: &str = "\"registered at the container runtime\"";

/// The address at which an agent in the node's network serves `/readyz`.
const HEALTH: &str = "127.0.0.1:8099";

pub(crate) struct Cluster {
    pub(crate) api: Api,
}

/// The API server in the node's network, at the same address as in the test's. It accepts connections and answers none,
/// until [`Cluster::answer`]. Dropping it closes its port.
pub(crate) struct Entrance(TcpListener);

impl Drop for Entrance {
    fn drop(&mut self) {
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }
}

impl Cluster {
    /// An API server with the namespace `shop`, whose pods share one UID, as in OpenShift.
    pub(crate) fn new(node: &Node) -> Self {
        let api = Api::start();
        let annotations = json!({"openshift.io/sa.scc.uid-range": "1000650000/10000"});
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop", "annotations": annotations}});
        api.put(NAMESPACES, &namespace);
        let authority = rcgen::generate_simple_self_signed(["client.invalid".to_owned()]).expect("a certificate");
        fs::create_dir_all(node.path("account")).expect("made");
        fs::write(node.path("account/ca.crt"), authority.cert.pem()).expect("written");
        fs::write(node.path("account/token"), "token").expect("written");
        fs::write(node.path("config.json"), format!(r#"{{"chain": {CHAIN}}}"#)).expect("written");
        Self { api }
    }

    /// Opens the API server's port in the node's network.
    pub(crate) fn open(&self, node: &Node) -> Entrance {
        let (netns, address) = (format!("/proc/{}/ns/net", node.first_process()), self.api.address);
        let thread = thread::spawn(move || {
            let netns = fs::File::open(netns).expect("the node runs");
            setns(netns, CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            TcpListener::bind(address).expect("the port is free")
        });
        Entrance(thread.join().expect("it listens"))
    }

    /// Answers all connections of the entrance.
    pub(crate) fn answer(&self, entrance: &Entrance) {
        self.api.serve(entrance.0.try_clone().expect("a descriptor"));
    }

    /// The API server accepts only this token from now on. The kubelet has mounted it for the agent.
    pub(crate) fn issue(&self, node: &Node, token: &str) {
        fs::write(node.path("account/token"), token).expect("written");
        self.api.accept_only(token);
    }

    pub(crate) fn has(&self, pod: &Pod) {
        self.api.put(PODS, &pod.manifest());
    }
}

/// The binary: the release build of hack/e2e.sh or, as fallback, that of `cargo test`.
pub(crate) fn detour() -> PathBuf {
    program().to_owned()
}

/// A running agent. Dropping it sends SIGKILL.
pub(crate) struct Agent(agent_process::Agent);

impl Agent {
    /// Starts the agent on the node. It uses the network of the test, in which the API server is.
    pub(crate) fn start(node: &Node, cluster: &Cluster) -> Self {
        let arguments = ["--nri-socket", "--health-address=127.0.0.1:0"];
        Self::start_in(&["--mount", "--pid"], node, cluster, &arguments)
    }

    /// Starts the agent in the node's network, in which the API server is at times. It repairs no pods.
    pub(crate) fn start_on_node(node: &Node, cluster: &Cluster, arguments: &[&str]) -> Self {
        let address = format!("--health-address={HEALTH}");
        let arguments = [&[&address, "--repair=off"], arguments].concat();
        Self::start_in(&["--mount", "--pid", "--net"], node, cluster, &arguments)
    }

    fn start_in(namespaces: &[&str], node: &Node, cluster: &Cluster, arguments: &[&str]) -> Self {
        let first = node.first_process().to_string();
        let mut command = Command::new("nsenter");
        command.args(["--target", &first]).args(namespaces).args(["--", "sh", "-c", CONTAINED, &node.group]);
        command.arg(detour()).args(["agent", "--platform=kubernetes", "--node-name=node-1"]);
        command.arg(format!("--api-server={}", cluster.api.url()));
        command.arg(format!("--service-account={}", node.path("account").display()));
        command.arg(format!("--config={}", node.path("config.json").display()));
        command.args(arguments);
        command.env_clear().env("HOSTNAME", "a").env("POD_NAMESPACE", "detour-system");
        Self(agent_process::Agent::of(&mut command))
    }

    /// Whether the agent in the node's network reports that it is ready.
    pub(crate) fn is_ready(&self, node: &Node) -> bool {
        node.run(&["curl", "--silent", "--fail", "--max-time", "5", &format!("http://{HEALTH}/readyz")])
            .status
            .success()
    }

    /// Starts the agent and waits until the runtime uses the plugin and the agent.
    pub(crate) fn start_ready(node: &Node, cluster: &Cluster) -> Self {
        let agent = Self::start(node, cluster);
        agent.until_ready();
        let has_plugin = || node.ok(&["cat", "/etc/cni/net.d/10-net.conflist"]).contains("detour");
        until("the plugin is in the list", has_plugin);
        node.wait_for_plugin();
        agent
    }

    /// Waits until the agent serves the plugin and is registered.
    #[track_caller]
    fn until_ready(&self) {
        self.0.wait_for_logs(&["watching pods", "watching namespaces", "serving the plugin's", REGISTERED]);
    }

    /// Everything that the agent logged.
    pub(crate) fn logged(&self) -> Vec<String> {
        self.0.log()
    }

    /// The samples of `/metrics` with this prefix of their name: the labels, and the value.
    pub(crate) fn metrics(&self, name: &str) -> Vec<(String, f64)> {
        let (_, text) = fetch(&self.0.address(), "/metrics");
        let samples = text.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
        samples.filter_map(|(labels, value)| Some((labels.to_owned(), value.parse().ok()?))).collect()
    }

    /// Kills the agent.
    pub(crate) fn kill(&mut self) {
        self.end("-KILL");
    }

    /// Sends a signal to the agent, not to the nsenter around it. Waits until it has ended.
    pub(crate) fn end(&mut self, signal: &str) {
        let nsenter = self.0.id();
        // proc_pid(5): the children of a task. There are none before nsenter has forked.
        let children = || fs::read_to_string(format!("/proc/{nsenter}/task/{nsenter}/children")).unwrap_or_default();
        until("nsenter starts the agent", || !children().is_empty() || self.0.has_ended());
        for child in children().split_whitespace() {
            let _ = Command::new("kill").args([signal, child]).status();
        }
        until("nsenter ends", || self.0.has_ended());
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Node {
    /// Waits until the runtime has read the configuration list with the plugin.
    pub(crate) fn wait_for_plugin(&self) {
        // crictl's answer names the plugins of containerd only.
        let name = self.runtime.name();
        until("the runtime uses the plugin", || match name {
            "containerd" => {
                let info: Value = serde_json::from_str(&self.ok(&["crictl", "info"])).expect("JSON");
                info["cniconfig"]["Networks"].to_string().contains("detour")
            }
            _ => self.log().matches("Found CNI network net").count() > 1,
        });
    }
}
