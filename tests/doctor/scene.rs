//! A node of OpenShift with one pod: a file system, an API server, a network namespace with a proxy, and
//! the program on it as `detour install` leaves it.

use crate::api::{Cluster, PROXY, UID, token};
use crate::pod::{Netns, Proxy};
use crate::programs::{DETOUR, STATIC};
use crate::server::{Server, closed_port};
use crate::support::called::Called;
use crate::support::directory::Directory;
use detour_cni::agent::install::Digest;
use detour_cni::cluster::agent::{AgentAnswer, Hello};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

pub(crate) const BIN: &str = "var/lib/cni/bin/detour";
pub(crate) const CONF: &str = "etc/cni/multus/net.d/istio-cni.conf";
pub(crate) const KUBECONFIG: &str = "var/lib/cni/detour/kubeconfig";
/// In the container's name, so that it is nowhere else.
const CONTAINER: &str = "0123456789abcdef";

/// What is there before anything is installed.
pub(crate) struct Plan {
    pub(crate) cluster: Cluster,
    /// Keys of the plugin's configuration.
    pub(crate) config: Value,
    /// What the node has for its cluster's network.
    pub(crate) lists: Vec<(&'static str, Value)>,
    /// More flags of `detour install`.
    pub(crate) install: Vec<String>,
    pub(crate) token: String,
    pub(crate) api_is_up: bool,
    /// Whether the pod has IPv6 besides IPv4.
    pub(crate) is_dual: bool,
    /// Whom the node knows as the pod's root: 0 unless the pod has its own users (`hostUsers: false`).
    pub(crate) root_is: u32,
    /// Whether the plugin is called for the pod.
    pub(crate) is_added: bool,
    /// As whom the proxy runs, and where it listens.
    pub(crate) proxy: (u32, &'static [u16]),
}

impl Plan {
    pub(crate) fn new() -> Self {
        let chain = json!([
            { "type": "istio-redirect" },
            { "type": "uid-exclude", "uids": ["1337"] },
            { "type": "dns-exclude", "uids": ["1337"] },
        ]);
        Self {
            cluster: Cluster::new(),
            config: json!({
                "dialect": "iptables",
                "chain": chain,
                "log_file": "/var/log/detour.log",
                "kubernetes": { "agent_socket": "/run/detour/agent.sock" },
            }),
            lists: Vec::new(),
            install: Vec::new(),
            // The end of the century.
            token: token(4_102_444_800),
            api_is_up: true,
            is_dual: false,
            root_is: 0,
            is_added: true,
            proxy: (PROXY, &[15001, 15006, 15053]),
        }
    }
}

/// The node, as long as a scene is played.
pub(crate) struct Scene {
    pub(crate) root: PathBuf,
    pub(crate) netns: Netns,
    pub(crate) cluster: Arc<Mutex<Cluster>>,
    api: String,
    _proxy: Proxy,
}

/// Plays a scene on a node that goes with its end.
pub(crate) fn scene<T: Send>(plan: Plan, play: impl FnOnce(&Scene) -> T + Send) -> T {
    let root = Directory::new("doctor");
    let played = std::thread::scope(|scope| {
        let on_stage = || {
            unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS).expect("needs CAP_SYS_ADMIN");
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private");
            fs::create_dir_all("/run/detour").expect("made");
            mount(Some("tmpfs"), "/run/detour", Some("tmpfs"), MsFlags::empty(), Some("size=16m")).expect("mounted");
            play(&Scene::new(root.to_path_buf(), plan))
        };
        scope.spawn(on_stage).join()
    });
    played.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Scene {
    fn new(root: PathBuf, plan: Plan) -> Self {
        for directory in ["etc/machine-config-daemon", "etc/cni/multus/net.d", "run/detour", "run/netns", "var/log"] {
            fs::create_dir_all(root.join(directory)).expect("made");
        }
        for directory in ["proc/1/ns", "var/lib/cni/results", "sa"] {
            fs::create_dir_all(root.join(directory)).expect("made");
        }
        symlink("/run", root.join("var/run")).expect("linked");
        symlink(format!("/proc/{}/ns/net", std::process::id()), root.join("proc/1/ns/net")).expect("linked");
        let state = root.join("run/detour");
        mount(Some("/run/detour"), &state, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted");
        let logs = root.join("var/log");
        mount(Some(&logs), "/var/log", None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted");
        let netns = Netns::new(&root.join("run/netns/pod"), plan.is_dual, plan.root_is);
        let (uid, ports) = plan.proxy;
        agent(&root);
        let cluster = Arc::new(Mutex::new(plan.cluster.clone()));
        let answers = cluster.clone();
        let server = Server::plain(move |request| answers.lock().expect("unpoisoned").answer(request));
        let api = if plan.api_is_up { server.http() } else { format!("http://{}", closed_port()) };
        let scene = Self { _proxy: netns.proxy(uid, ports), root, netns, cluster, api };
        scene.write("etc/hostname", "node-1\n");
        scene.write("var/log/detour.log", "");
        scene.write("sa/ca.crt", &authority());
        scene.write("sa/token", &plan.token);
        scene.write("config.json", &plan.config.to_string());
        for (name, list) in &plan.lists {
            scene.write(&format!("etc/cni/multus/net.d/{name}"), &list.to_string());
        }
        scene.install(&plan.install);
        scene.keep_result(["shop", "web-0", UID], CONTAINER, "pod");
        if plan.is_added {
            scene.add();
        }
        scene
    }

    pub(crate) fn path(&self, within: &str) -> PathBuf {
        self.root.join(within)
    }

    pub(crate) fn write(&self, within: &str, text: &str) {
        fs::write(self.path(within), text).expect("written");
    }

    pub(crate) fn json(&self, within: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(within)).expect("readable")).expect("JSON")
    }

    /// Installs with what is in /sa and /config.json, and puts the static program in its place.
    fn install(&self, more: &[String]) {
        let root = self.root.display();
        let output = Command::new(&*DETOUR)
            .args([
                "install",
                "--platform=openshift",
                &format!("--root={root}"),
                &format!("--service-account={root}/sa"),
            ])
            .args([&format!("--api-server={}", self.api), &format!("--config={root}/config.json")])
            .args(more)
            .env_clear()
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{output:?}");
        self.put_program(&STATIC);
    }

    /// Puts another program there, as an installation would.
    pub(crate) fn put_program(&self, program: &Path) {
        let bytes = fs::read(program).expect("readable");
        fs::remove_file(self.path(BIN)).expect("it was installed");
        fs::copy(program, self.path(BIN)).expect("copied");
        let log = "var/lib/cni/detour/install.json";
        let mut record = self.json(log);
        record["files"][format!("/{BIN}")]["sha256"] = json!([Digest::of(&bytes)]);
        self.write(log, &record.to_string());
    }

    /// Saves the result of another pod's ADD, whose network namespace has the name `netns`.
    pub(crate) fn keep_result_of(&self, pod: &Value, netns: &str) {
        let text = |key: &str| pod["metadata"][key].as_str().expect("text").to_owned();
        self.keep_result([&text("namespace"), &text("name"), &text("uid")], &format!("{netns}0000"), netns);
    }

    /// Saves what the runtime's library keeps of a pod: its namespace, name and UID, its container and its network
    /// namespace.
    fn keep_result(&self, [namespace, name, uid]: [&str; 3], container: &str, netns: &str) {
        let text = json!({
            "kind": "cniCacheV1", "containerId": container, "ifName": "eth0", "networkName": "cluster",
            "cniArgs": [["K8S_POD_NAMESPACE", namespace], ["K8S_POD_NAME", name], ["K8S_POD_UID", uid]],
            "result": {
                "cniVersion": "1.0.0",
                "interfaces": [{"name": "eth0", "sandbox": format!("/var/run/netns/{netns}")}],
            },
        });
        self.write(&format!("var/lib/cni/results/cluster-{container}-eth0"), &text.to_string());
    }

    /// Calls the plugin as Multus would, with the configuration that was installed.
    fn add(&self) {
        let directory = fs::read_dir(self.path("etc/cni/multus/net.d")).expect("readable");
        let files = directory.flatten().map(|entry| fs::read(entry.path()).expect("readable"));
        let mut files = files.filter(|text| String::from_utf8_lossy(text).contains("\"detour\""));
        let conf: Value = serde_json::from_slice(&files.next().expect("it was installed")).expect("JSON");
        let mut conf = match conf["plugins"].as_array() {
            Some(plugins) => {
                let mut own = plugins.iter().find(|plugin| plugin["type"] == "detour").expect("it is in it").clone();
                (own["name"], own["cniVersion"]) = (conf["name"].clone(), conf["cniVersion"].clone());
                own
            }
            None => conf,
        };
        conf["kubernetes"]["kubeconfig"] = self.path(KUBECONFIG).display().to_string().into();
        let netns = self.path("run/netns/pod").display().to_string();
        let pod = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID={UID}");
        let environment = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", CONTAINER),
            ("CNI_NETNS", &netns),
            ("CNI_IFNAME", "net1"),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", &pod),
        ];
        Called::run(Command::new(&*DETOUR).env_clear().envs(environment), &conf).done();
    }

    /// Runs the doctor on the node.
    pub(crate) fn doctor(&self, arguments: &[&str]) -> Output {
        self.command("doctor", arguments)
    }

    /// Runs a command on the node.
    pub(crate) fn command(&self, name: &str, arguments: &[&str]) -> Output {
        Command::new(&*DETOUR)
            .args([name, "--root"])
            .arg(&self.root)
            .args(arguments)
            .env_clear()
            .env("PATH", self.path("tools").display().to_string() + ":/usr/bin:/bin")
            .env("COLUMNS", "10000")
            .output()
            .expect("it starts")
    }

    /// The report about the pod, or about the node alone.
    pub(crate) fn report(&self, arguments: &[&str]) -> Value {
        let output = self.doctor(&[arguments, &["-o", "json"]].concat());
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
        assert_eq!(output.status.code(), Some(i32::from(report["healthy"] == false)), "{report:#}");
        report
    }

    /// What people see, with what differs from run to run replaced.
    pub(crate) fn printed(&self, arguments: &[&str]) -> String {
        let output = self.doctor(arguments);
        let text = String::from_utf8(output.stdout).expect("text");
        assert!(output.stderr.is_empty() && !text.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = text.replace(&self.root.display().to_string(), "").replace(&self.api, "https://10.96.0.1:443");
        // The golden files do not depend on the version.
        let text = text.replace(concat!("bin/detour: ", env!("CARGO_PKG_VERSION")), "bin/detour: VERSION");
        let text = text.replace(concat!("expected detour ", env!("CARGO_PKG_VERSION")), "expected detour VERSION");
        let text = match text.split_once("the last: ") {
            Some((before, line)) => format!("{before}the last: …{}", &line[line.find('\n').unwrap_or(0)..]),
            None => text,
        };
        without_hashes(&without_chance(&text))
    }
}

pub(crate) const POD: [&str; 3] = ["-n", "shop", "web-0"];

/// Hashes of policies: the golden files do not depend on the fields of a policy.
fn without_hashes(text: &str) -> String {
    let mut pieces = text.split("policy ");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| {
        let is_hash = piece.get(..12).is_some_and(|hash| hash.chars().all(|c| c.is_ascii_hexdigit()));
        if is_hash { format!("{text}policy HASH{}", &piece[12..]) } else { format!("{text}policy {piece}") }
    })
}

/// Random addresses and ports of packets that were sent.
fn without_chance(text: &str) -> String {
    const NOWHERE: &str = "192.0.2.";
    let mut pieces = text.split(NOWHERE);
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| {
        let (digits, rest) = piece.split_once(':').unwrap_or((piece, ""));
        let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let shown = if port == "53" { "53" } else { "PORT" };
        assert!(digits.parse::<u8>().is_ok(), "{piece}");
        format!("{text}{NOWHERE}X:{shown}{}", &rest[port.len()..])
    })
}

/// The file with the agent's answer about excluded containers.
pub(crate) const AGENT_CONTAINERS: &str = "agent-containers.json";

/// The file with the agent's answer about policies: JSON, or `unknown` for an agent of an earlier version.
pub(crate) const AGENT_POLICIES: &str = "agent-policies.json";

/// An agent that is well and knows nothing of pods, except for what [`AGENT_CONTAINERS`] and
/// [`AGENT_POLICIES`] contain.
fn agent(root: &Path) {
    let listener = UnixListener::bind(root.join("run/detour/agent.sock")).expect("free");
    let containers = root.join(AGENT_CONTAINERS);
    let policies = root.join(AGENT_POLICIES);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let hello = stream.write_all(format!("{}\n", json!(Hello::own())).as_bytes());
            let mut line = String::new();
            let read = BufReader::new(&stream).read_line(&mut line);
            let answer = match () {
                () if line.contains("\"probe\"") => AgentAnswer::Done,
                () if line.contains("\"containers\"") => {
                    let text = fs::read(&containers).unwrap_or_else(|_| b"{}".to_vec());
                    AgentAnswer::Containers(serde_json::from_slice(&text).expect("a status"))
                }
                () if line.contains("\"policies\"") => {
                    let text = fs::read(&policies).unwrap_or_else(|_| HEALTHY_POLICIES.to_vec());
                    serde_json::from_slice(&text).map_or(AgentAnswer::Unknown, AgentAnswer::Policies)
                }
                () => AgentAnswer::Unknown,
            };
            // One that tells something does not wait for an answer.
            let _ = hello.and(read).and_then(|_| stream.write_all(format!("{}\n", json!(answer)).as_bytes()));
        }
    });
}

const HEALTHY_POLICIES: &[u8] = br#"{"follows": true, "current": 1}"#;

fn authority() -> String {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.self_signed(&KeyPair::generate().expect("a key")).expect("a CA").pem()
}

/// Returns the line of a check in a report, with its outcome, finding and next step.
#[track_caller]
pub(crate) fn line<'a>(report: &'a Value, id: &str) -> (&'a str, &'a str, &'a str) {
    let checks = report["checks"].as_array().expect("checks");
    let line = checks.iter().find(|line| line["id"] == id).unwrap_or_else(|| panic!("no line {id}: {report:#}"));
    let text = |key: &str| line[key].as_str().unwrap_or_default();
    (text("outcome"), text("found"), text("next"))
}
