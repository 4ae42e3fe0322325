//! A node with pods, agents, a simulated runtime and an API server that records Events.

use crate::nri::peer::{Peer, Runtime as Socket, bytes, integer};
use crate::support::agent_node::{self, AGENT_SOCKET, AgentNode, ROOT, bind, reach, write};
use crate::support::agent_process::Agent;
use crate::support::cgroup::{Cgroup, hierarchy};
use crate::support::new_netns::{in_netns, tool_in};
use crate::support::node_pod::NodePod;
use crate::support::program::program;
use crate::support::simulated_node::{Process, Where, id};
use crate::support::wait::until;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::ops::Deref;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::{fs, thread};

pub(crate) const SOCKET: &str = "/run/nri/nri.sock";
/// The address of the server outside of the pod.
const DESTINATION: &str = "10.88.0.1";
const PROXY_PORT: u16 = 15001;
/// The names of the simulated pods' containers.
pub(crate) const VAULT: &str = "vault-agent-init";
pub(crate) const WEB: &str = "web";
/// The reason of the Events about containers that start captured.
pub(crate) const CAPTURED: &str = "DetourContainerCaptured";
/// The flags of each agent. The pods have other configurations than the node.
const FLAGS: [&str; 3] = ["--health-address=127.0.0.1:0", "--nri-socket=/run/nri/nri.sock", "--live-policy=off"];

/// Runs `work` with a temporary node.
pub(crate) fn scene(work: impl FnOnce(&AgentNode<'_>) + Send) {
    agent_node::scene(|scene| {
        let groups = Path::new(ROOT).join("sys/fs/cgroup");
        fs::create_dir_all(&groups).expect("made");
        bind(&hierarchy(), &groups);
        let of_node = format!("/proc/{}/ns/cgroup", std::process::id());
        symlink(of_node, scene.node.root.join("proc/1/ns/cgroup")).expect("linked");
        scene.configure(r#"[{"type": "istio-redirect"}]"#);
        work(scene);
    });
}

impl AgentNode<'_> {
    /// Starts an agent.
    pub(crate) fn agent(&self) -> Agent {
        self.start_agent("a", &FLAGS)
    }

    /// Starts an agent that repairs no pods.
    pub(crate) fn agent_without_repair(&self) -> Agent {
        self.start_agent("a", &[&FLAGS[..], &["--repair=off"]].concat())
    }

    /// Starts the runtime and an agent, which registers with these pods.
    pub(crate) fn registered(&self, pods: &[&Pod]) -> (Agent, Runtime, Plugin) {
        let (runtime, agent) = (Runtime::listen(), self.agent());
        let plugin = runtime.register_agent(&agent, pods);
        (agent, runtime, plugin)
    }

    /// Starts an agent as in a container: the node's cgroup namespace is that of process 1 below `--root`.
    pub(crate) fn agent_in_private_cgroup_namespace(&self) -> Agent {
        let program = program().to_str().expect("text").to_owned();
        let arguments = [vec!["--cgroup".to_owned(), program], self.arguments(&FLAGS)].concat();
        Agent::spawn_program(Path::new("/usr/bin/unshare"), &[("HOSTNAME", "a")], &arguments)
    }

    /// Creates a pod whose annotation excludes these containers.
    pub(crate) fn pod(&self, annotation: &str) -> Pod {
        let pod = NodePod::new(self.node, None).with_init_containers(&[VAULT, "istio-validation"]);
        pod.set("detour.io/exclude-containers", annotation);
        self.node.keep("results", ("cluster", "eth0"), &pod.sandbox, (&pod.name, &pod.uid), &pod.sandbox);
        let outside = self.node.process("outside", &format!("outside/{}", pod.sandbox), Where::New);
        pod.tool("ip", &["link", "set", "peer0", "netns", &outside.pid().to_string()], "");
        tool_in(&outside.netns(), "ip", &["-batch", "-"], "link set peer0 up\naddr add 10.88.0.1/24 dev peer0\n");
        serve(&outside.netns(), &format!("{DESTINATION}:80"), "direct");
        write(&format!("/manifests/{}.json", pod.uid), &pod.object().to_string());
        let conf = json!({
            "cniVersion": "1.0.0", "name": "cluster", "type": "detour", "log_level": "warn",
            "chain": [{"type": "istio-redirect"}, {"type": "container-exclude"}],
            "kubernetes": {"manifests_dir": reach("/manifests"), "agent_socket": AGENT_SOCKET},
        });
        pod.call("ADD", &conf).unwrap_or_else(|printed| panic!("{printed}"));
        Pod { pod, _outside: outside }
    }
}

/// A running pod, and a server outside of the pod.
pub(crate) struct Pod {
    pod: NodePod,
    _outside: Process,
}

impl Deref for Pod {
    type Target = NodePod;

    fn deref(&self) -> &NodePod {
        &self.pod
    }
}

impl Pod {
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
    pub(crate) fn wait_for_elements(&self, wanted: &[u64]) {
        until(&format!("elements {wanted:?}"), || self.elements() == wanted);
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
        let path = value.as_str().expect("a path");
        if let Ok(id) = path.parse() {
            return id;
        }
        let path = Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/'));
        fs::metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).ino()
    })
}

/// Serves a greeting at an address in a network namespace.
fn serve(netns: &Path, address: &str, greeting: &'static str) {
    let listener = in_netns(netns, || TcpListener::bind(address).expect("a port"));
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = writeln!(stream, "{greeting}");
        }
    });
}

/// Connects for each line of its input, and prints the greeting.
const SCRIPT: &str = r#"while read -r _; do exec 3<>/dev/tcp/$0/80 && head -n 1 <&3 || echo failed; exec 3>&-; done"#;

pub(crate) struct Container<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) name: &'static str,
    pub(crate) id: String,
    group: Cgroup,
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl<'a> Container<'a> {
    /// Creates a container that waits for its first command.
    pub(crate) fn create(pod: &'a Pod, name: &'static str) -> Self {
        // The beginning is unique, as in random IDs: comments of elements have only that.
        let id: String = id("c").chars().rev().collect();
        let group = Cgroup::of_container(&id);
        let mut process = group
            .command("nsenter")
            .arg(format!("--net={}", pod.netns().display()))
            .args(["bash", "-c", SCRIPT, DESTINATION])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("bash and nsenter are needed");
        let commands = process.stdin.take().expect("a pipe");
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        // It enters the control group first.
        let netns = |path: &Path| fs::metadata(path).map(|file| file.ino()).ok();
        let (own, wanted) = (PathBuf::from(format!("/proc/{}/ns/net", process.id())), netns(&pod.netns()));
        until("the process is in the pod", || netns(&own) == wanted);
        Self { pod, name, id, group, process, commands, answers }
    }

    pub(crate) fn cgroups_path(&self) -> String {
        self.group.path()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn cgroup(&self) -> u64 {
        self.group.id()
    }

    /// Returns where a new connection ends: `direct` or `sidecar`.
    pub(crate) fn connect(&mut self) -> String {
        writeln!(self.commands).expect("it runs");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("it runs");
        answer.trim_end().to_owned()
    }

    /// Ends the processes and removes the control group.
    pub(crate) fn vanish(&mut self) {
        self.exit();
        fs::remove_dir(self.group.directory()).expect("it is empty");
    }

    /// Ends the processes. The control group stays until the value is dropped.
    pub(crate) fn exit(&mut self) {
        fs::write(self.group.directory().join("cgroup.kill"), "1").expect("killed");
        self.process.wait().expect("it ends");
    }
}

/// The numbers of `CONTAINER_CREATED` and `CONTAINER_RUNNING`.
const CREATED: u64 = 2;
const RUNNING: u64 = 3;

/// The runtime's socket.
pub(crate) struct Runtime(Socket);

/// A registered plugin.
pub(crate) struct Plugin(Peer);

impl Runtime {
    /// Starts the runtime's NRI socket.
    pub(crate) fn listen() -> Self {
        let path = reach(SOCKET);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        Self(Socket::listen(&path))
    }

    /// Waits for a plugin and registers it, with these containers running.
    pub(crate) fn register(&self, pods: &[&Pod], containers: &[&Container<'_>]) -> Plugin {
        let pods = pods.iter().map(|pod| bytes(1, encoded_pod(pod)));
        let containers = containers.iter().map(|container| bytes(2, encoded(container, RUNNING)));
        let list: Vec<u8> = pods.chain(containers).flatten().collect();
        Plugin(self.0.register(&list))
    }

    /// The same for the plugin of this agent, without containers. Waits until the agent knows.
    pub(crate) fn register_agent(&self, agent: &Agent, pods: &[&Pod]) -> Plugin {
        let plugin = self.register(pods, &[]);
        agent.wait_for_log("registered at the container runtime");
        plugin
    }
}

impl Plugin {
    /// Reports the start of a container, and lets it run when the plugin has answered.
    pub(crate) fn start(&mut self, container: &Container<'_>) {
        self.0.call("StartContainer", &event(container, CREATED));
        self.0.call("PostStartContainer", &event(container, RUNNING));
    }

    /// Creates a container, and starts it.
    pub(crate) fn run<'a>(&mut self, pod: &'a Pod, name: &'static str) -> Container<'a> {
        let container = Container::create(pod, name);
        self.start(&container);
        container
    }

    /// Reports the removal of a container.
    pub(crate) fn remove(&mut self, container: &Container<'_>) {
        self.0.call("RemoveContainer", &event(container, RUNNING));
    }

    /// Reports the end of a container.
    pub(crate) fn stop(&mut self, container: &Container<'_>) {
        self.0.call("StopContainer", &event(container, RUNNING));
    }
}

fn event(container: &Container<'_>, state: u64) -> Vec<u8> {
    [bytes(1, encoded_pod(container.pod)), bytes(2, encoded(container, state))].concat()
}

fn encoded_pod(pod: &Pod) -> Vec<u8> {
    [bytes(1, &pod.sandbox), bytes(2, &pod.name), bytes(3, &pod.uid), bytes(4, "shop")].concat()
}

fn encoded(container: &Container<'_>, state: u64) -> Vec<u8> {
    [
        bytes(1, &container.id),
        bytes(2, &container.pod.sandbox),
        bytes(3, container.name),
        integer(4, state),
        bytes(11, bytes(5, container.cgroups_path())),
        integer(12, container.pid().into()),
    ]
    .concat()
}
