//! A node with pods, agents, a simulated runtime and an API server that records Events.

use crate::agent_node::{self, ROOT, bind, mount_node, write};
use crate::agent_process::{Agent, write_account};
use crate::api::{Api, NAMESPACES, PODS};
use crate::cgroup;
use crate::node::{self, Node, Process, Where, id, uid};
use crate::program::program;
use crate::runtime::{Plugin, Runtime};
use crate::support::new_netns::{in_netns, tool_in};
use crate::support::wait::{DEADLINE, until_within};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

pub(crate) const SOCKET: &str = "/run/nri/nri.sock";
pub(crate) const AGENT_SOCKET: &str = "/run/detour/agent.sock";
/// The address of the server outside of the pod.
pub(crate) const DESTINATION: &str = "10.88.0.1";
const PROXY_PORT: u16 = 15001;
/// The names of the simulated pods' containers.
pub(crate) const VAULT: &str = "vault-agent-init";
pub(crate) const WEB: &str = "web";

pub(crate) struct Scene<'a> {
    node: &'a Node,
    pub(crate) api: Api,
}

/// Runs `work` with a temporary node.
pub(crate) fn scene(work: impl FnOnce(&Scene<'_>) + Send) {
    node::scene(|node| {
        mount_node(node);
        let groups = Path::new(ROOT).join("sys/fs/cgroup");
        fs::create_dir_all(&groups).expect("made");
        bind(&cgroup::hierarchy(), &groups);
        let of_node = format!("/proc/{}/ns/cgroup", std::process::id());
        symlink(of_node, node.root.join("proc/1/ns/cgroup")).expect("linked");
        let scene = Scene { node, api: Api::start() };
        let list = json!({"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "ovn"}]});
        write("/etc/cni/net.d/10-cluster.conflist", &list.to_string());
        scene.api.put(NAMESPACES, &json!({"metadata": {"name": "shop"}}));
        work(&scene);
    });
}

impl Scene<'_> {
    /// Returns a path of the node as this process reaches it.
    pub(crate) fn reach(&self, path: &str) -> PathBuf {
        agent_node::reach(path)
    }

    /// Returns the arguments of an agent with the flag `--nri-socket`.
    pub(crate) fn arguments(&self) -> Vec<String> {
        write_account(&self.reach("/account"));
        let config = write("/agent-config.json", r#"{"chain": [{"type": "istio-redirect"}]}"#);
        vec![
            "agent".into(),
            "--platform=kubernetes".into(),
            "--node-name=node-1".into(),
            "--health-address=127.0.0.1:0".into(),
            format!("--nri-socket={SOCKET}"),
            // The pods have other configurations than the node.
            "--live-policy=off".into(),
            format!("--root={ROOT}"),
            format!("--api-server={}", self.api.url()),
            format!("--service-account={}", self.reach("/account").display()),
            format!("--config={}", config.display()),
        ]
    }

    /// Starts an agent.
    pub(crate) fn agent(&self) -> Agent {
        Agent::spawn("a", &self.arguments())
    }

    /// Starts the runtime and an agent, which registers with these pods.
    pub(crate) fn registered(&self, pods: &[&Pod]) -> (Agent, Runtime, Plugin) {
        let (runtime, agent) = (self.runtime(), self.agent());
        let plugin = runtime.register(pods, &[]);
        agent.wait_for_log("registered at the container runtime");
        (agent, runtime, plugin)
    }

    /// Starts an agent that repairs no pods.
    pub(crate) fn agent_without_repair(&self) -> Agent {
        Agent::spawn("a", &[self.arguments(), vec!["--repair=off".into()]].concat())
    }

    /// Starts an agent as in a container: the node's cgroup namespace is that of process 1 below `--root`.
    pub(crate) fn agent_in_private_cgroup_namespace(&self) -> Agent {
        let program = program().to_str().expect("text").to_owned();
        let arguments = [vec!["--cgroup".to_owned(), program], self.arguments()].concat();
        Agent::spawn_program(Path::new("/usr/bin/unshare"), &[("HOSTNAME", "a")], &arguments)
    }

    /// Starts the runtime's NRI socket.
    pub(crate) fn runtime(&self) -> Runtime {
        Runtime::listen(&self.reach(SOCKET))
    }

    /// Creates a pod whose annotation excludes these containers, with this block of `container-exclude`.
    pub(crate) fn pod(&self, annotation: &str, block: &Value) -> Pod {
        let (uid, sandbox) = (uid(), id("b"));
        let group = format!("kubepods.slice/kubepods-pod{uid}.slice/crio-{sandbox}.scope");
        let pause = self.node.process("pause", &group, Where::New);
        let outside = self.node.process("outside", &format!("{group}/outside"), Where::New);
        agent_node::pin(&sandbox, &pause);
        let pod = Pod { uid, sandbox, pause, outside, annotation: annotation.to_owned() };
        self.node.keep("results", ("cluster", "eth0"), &pod.sandbox, (&pod.name(), &pod.uid), &pod.sandbox);
        pod.tool(
            "ip",
            &["-batch", "-"],
            &format!(
                "link set lo up\nlink add eth0 type veth peer name peer0\nlink set peer0 netns {}\nlink set eth0 up\n\
                 addr add 10.88.0.2/24 dev eth0\n",
                pod.outside.pid()
            ),
        );
        tool_in(&pod.outside.netns(), "ip", &["-batch", "-"], "link set peer0 up\naddr add 10.88.0.1/24 dev peer0\n");
        serve(&pod.outside.netns(), &format!("{DESTINATION}:80"), "direct");
        let manifest = pod.manifest();
        write(&format!("/manifests/{}.json", pod.uid), &manifest.to_string());
        pod.call(self, "ADD", block);
        pod
    }

    /// Waits for an Event of the pod with this reason whose message names the container. Returns the message.
    #[track_caller]
    pub(crate) fn wait_for_event(&self, pod: &Pod, reason: &str, container: &str) -> String {
        agent_node::wait_for_event(&self.api, &pod.uid, reason, container)
    }

    /// Returns the messages of the pod's Events with this reason.
    pub(crate) fn events(&self, pod: &Pod, reason: &str) -> Vec<String> {
        agent_node::events(&self.api, &pod.uid, reason)
    }

    /// Publishes the pod to the agent's watch.
    pub(crate) fn publish(&self, pod: &Pod, change: &str) {
        let mut object = pod.manifest();
        object["spec"]["nodeName"] = json!("node-1");
        object["metadata"]["labels"]["change"] = json!(change);
        object["status"] = json!({"phase": "Running", "podIPs": [{"ip": "10.88.0.2"}]});
        self.api.put(PODS, &object);
    }
}

/// A pod: its sandbox's process, and a server outside of the pod.
pub(crate) struct Pod {
    pub(crate) uid: String,
    pub(crate) sandbox: String,
    pause: Process,
    outside: Process,
    annotation: String,
}

impl Pod {
    pub(crate) fn name(&self) -> String {
        format!("web-{}", self.uid)
    }

    pub(crate) fn netns(&self) -> PathBuf {
        self.pause.netns()
    }

    fn manifest(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": self.name(), "namespace": "shop", "uid": self.uid, "labels": {"app": "web"},
                "annotations": {"sidecar.istio.io/status": "{}", "detour.io/exclude-containers": self.annotation},
            },
            "spec": {
                "initContainers": [{"name": VAULT}, {"name": "istio-validation"}],
                "containers": [
                    {"name": WEB},
                    {"name": "istio-proxy", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1337}},
                ],
            },
        })
    }

    /// Calls the plugin as the runtime does, which must succeed.
    #[track_caller]
    pub(crate) fn call(&self, scene: &Scene<'_>, verb: &str, block: &Value) {
        let mut exclude = json!({"type": "container-exclude"});
        exclude.as_object_mut().expect("an object").extend(block.as_object().cloned().unwrap_or_default());
        let conf = json!({
            "cniVersion": "1.0.0", "name": "cluster", "type": "detour", "log_level": "warn",
            "chain": [{"type": "istio-redirect"}, exclude],
            "kubernetes": {"manifests_dir": scene.reach("/manifests"), "agent_socket": AGENT_SOCKET},
            "prevResult": {"cniVersion": "1.0.0"},
        });
        let netns = agent_node::netns_of(&self.sandbox);
        let called = agent_node::call(verb, (&self.sandbox, &netns), (&self.name(), ""), &conf);
        called.unwrap_or_else(|printed| panic!("{verb}: {printed}"));
    }

    /// Adds so many records to the pod's saved state that they take minutes to read: links to one file.
    pub(crate) fn add_records(&self) {
        let directory = Path::new("/run/detour/attachments").join(&self.sandbox);
        let own = fs::read_dir(&directory).expect("records").next().expect("a record").expect("readable").path();
        let mut record: Value = serde_json::from_str(&fs::read_to_string(own).expect("readable")).expect("JSON");
        record["padding"] = json!(vec![0; 500_000]);
        let first = directory.join("n@net0.json");
        fs::write(&first, record.to_string()).expect("written");
        for number in 1..10_000 {
            fs::hard_link(&first, directory.join(format!("n@net{number}.json"))).expect("linked");
        }
    }

    /// Runs a tool in the network namespace, which must succeed. Returns its stdout.
    #[track_caller]
    pub(crate) fn tool(&self, program: &str, arguments: &[&str], stdin: &str) -> String {
        tool_in(&self.netns(), program, arguments, stdin)
    }

    /// Returns the cgroup IDs of the elements of the sets.
    pub(crate) fn elements(&self) -> Vec<u64> {
        let listed = self.tool("nft", &["-j", "list", "ruleset"], "");
        let listed: Value = serde_json::from_str(&listed).expect("JSON");
        let mut found = Vec::new();
        for entry in listed["nftables"].as_array().expect("a list") {
            if entry["set"]["table"] == "detour-exclusions" {
                found.extend(entry["set"]["elem"].as_array().into_iter().flatten().map(cgroup_of));
            }
        }
        found.sort_unstable();
        found
    }

    /// Removes all elements, as another process could.
    pub(crate) fn flush_elements(&self) {
        self.tool("nft", &["flush", "set", "inet", "detour-exclusions", "excluded-all"], "");
    }

    /// Deletes the table of excluded containers, as another process could.
    pub(crate) fn delete_table(&self) {
        self.tool("nft", &["delete", "table", "inet", "detour-exclusions"], "");
    }

    /// Returns whether the table of excluded containers exists.
    pub(crate) fn has_table(&self) -> bool {
        self.tool("nft", &["list", "tables"], "").contains("inet detour-exclusions")
    }

    /// Waits until the sets have exactly these elements.
    #[track_caller]
    pub(crate) fn wait_for_elements(&self, wanted: &[u64], limit: Duration) {
        until_within(limit, &format!("elements {wanted:?}"), || self.elements() == wanted);
    }

    /// Starts the proxy.
    pub(crate) fn start_proxy(&self) {
        serve(&self.netns(), &format!("0.0.0.0:{PROXY_PORT}"), "sidecar");
    }
}

/// Returns the cgroup ID of an element: nft prints the path of a control group, or its ID if there is no path.
fn cgroup_of(element: &Value) -> u64 {
    let value = element.get("elem").map_or(element, |inner| &inner["val"]);
    value.as_u64().unwrap_or_else(|| {
        use std::os::unix::fs::MetadataExt;
        let path = value.as_str().expect("a path");
        if let Ok(id) = path.parse() {
            return id;
        }
        let path = Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/'));
        fs::metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).ino()
    })
}

/// Serves a greeting at an address in a network namespace, and the same line for each line that a client sends.
fn serve(netns: &Path, address: &str, greeting: &'static str) {
    let listener = in_netns(netns, || TcpListener::bind(address).expect("a port"));
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                writeln!(stream, "{greeting}")?;
                let reader = BufReader::new(stream.try_clone()?);
                reader.lines().try_for_each(|line| line.and_then(|_| writeln!(stream, "{greeting}")))
            });
        }
    });
}

/// How long tests wait for a condition.
pub(crate) const SLOW: Duration = DEADLINE;
/// How long tests wait for what the agent must notice at once. It checks each sandbox every 30 s in any case.
pub(crate) const SOON: Duration = Duration::from_secs(25);
