//! The OCI hook as a process, with states as CRI-O and containerd write them, real network namespaces and real control
//! groups. Needs root, `ip` and `nft`.

#[path = "../support/mod.rs"]
mod support;

use detour_cni::firewall::{ContainerElement, change_container_elements, container_elements};
use detour_cni::policy::ContainerScope;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{Shutdown, shutdown};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::slice;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use support::cgroup::Cgroup;
use support::directory::Directory;
use support::netns_pod::Pod;
use support::private_node::{STATE, on_a_node_with};

const VAULT: &str = "6f1b1e3a0f4f7c1c6c1d1b0a7a6d3f5e8b9c0d1e2f3a4b5c6d7e8f9a0b1c2d3e";

/// A pod that excludes the container `vault`, with the hook's program.
struct Scene {
    directory: Directory,
    pod: Pod,
}

impl Scene {
    fn new(until: &str) -> Self {
        let scene = Self { directory: Directory::new("hook"), pod: Pod::new() };
        symlink(env!("CARGO_BIN_EXE_detour"), scene.program()).expect("linked");
        let container = |name: &str| json!({"name": name, "image": "i"});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": "shop", "name": "web-0"},
            "spec": {"containers": [container("app"), container("vault"), container("istio-proxy")]},
        });
        fs::create_dir(scene.directory.join("manifests")).expect("made");
        fs::write(scene.directory.join("manifests/pod.json"), pod.to_string()).expect("written");
        let added = scene.call("ADD", &scene.configuration(until));
        assert!(added.status.success(), "{added:?}");
        scene
    }

    fn configuration(&self, until: &str) -> Value {
        json!({
            "cniVersion": "1.0.0", "name": "n", "type": "detour", "log_level": "none",
            "kubernetes": {"manifests_dir": self.directory.join("manifests")},
            "chain": [{"type": "container-exclude", "containers": ["vault"], "until": until}],
        })
    }

    /// Calls the plugin.
    fn call(&self, command: &str, configuration: &Value) -> Output {
        let mut plugin = Command::new(env!("CARGO_BIN_EXE_detour"));
        plugin.env_clear().envs([
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", &self.pod.container_id),
            ("CNI_NETNS", self.pod.netns().to_str().expect("text")),
            ("CNI_IFNAME", "net1"),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
        ]);
        Self::run(&mut plugin, &configuration.to_string())
    }

    /// Returns the error of CHECK; `None` if it succeeds. `socket` is that of an agent.
    fn check(&self, socket: &Path) -> Option<Value> {
        let mut configuration = self.configuration("container-exit");
        configuration["prevResult"] = json!({"cniVersion": "1.0.0"});
        configuration["kubernetes"]["agent_socket"] = json!(socket);
        let output = self.call("CHECK", &configuration);
        (!output.status.success()).then(|| serde_json::from_slice(&output.stdout).expect("an error"))
    }

    fn program(&self) -> PathBuf {
        self.directory.join("detour-hook")
    }

    fn record(&self) -> PathBuf {
        Path::new(STATE).join("attachments").join(&self.pod.container_id).join("n@net1.json")
    }

    fn run(command: &mut Command, stdin: &str) -> Output {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let mut process =
            command.stdin(reader).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        // The hook may refuse before it has read all.
        let _ = writer.write_all(stdin.as_bytes());
        drop(writer);
        let output = process.wait().and_then(|_| process.wait_with_output());
        output.expect("it ends")
    }

    fn hook(&self, state: &Value) -> Output {
        Self::run(Command::new(self.program()).env_clear(), &state.to_string())
    }

    #[track_caller]
    fn accepts(&self, state: &Value) {
        let output = self.hook(state);
        assert!(output.status.success() && output.stderr.is_empty() && output.stdout.is_empty(), "{output:?}");
    }

    /// Returns the message of the hook, which must refuse.
    #[track_caller]
    fn refuses(&self, state: &Value) -> String {
        let output = self.hook(state);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(message.lines().count(), 1, "{message}");
        message
    }

    /// Runs `work` in the network namespace of the pod.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let netns = File::open(self.pod.netns()).expect("readable");
        let enter = || {
            setns(&netns, CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            work()
        };
        thread::scope(|scope| scope.spawn(enter).join()).expect("no panic")
    }

    fn elements(&self) -> Vec<ContainerElement> {
        self.inside(|| container_elements().expect("listed"))
    }

    /// Starts a process of the pod in a control group, as a runtime does before the hook.
    fn process(&self, cgroup: &Cgroup) -> Process {
        let process = self.inside(|| Command::new("sleep").arg("600").spawn().expect("it starts"));
        cgroup.take(process.id());
        Process(process)
    }

    fn crio(&self, name: &str, status: &str, pid: u32) -> Value {
        json!({"ociVersion": "1.0.2", "id": VAULT, "status": status, "pid": pid, "bundle": "/b", "annotations": {
            "io.kubernetes.cri-o.ContainerType": "container",
            "io.kubernetes.cri-o.SandboxID": self.pod.container_id,
            "io.kubernetes.cri-o.Metadata": json!({"name": name, "attempt": 0}).to_string(),
            "io.kubernetes.container.name": "set-by-the-pod",
        }})
    }

    fn containerd(&self, name: &str, status: &str, pid: u32) -> Value {
        json!({"ociVersion": "1.2.0", "id": VAULT, "status": status, "pid": pid, "bundle": "/b", "annotations": {
            "io.kubernetes.cri.container-name": name,
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-id": self.pod.container_id,
        }})
    }
}

struct Process(Child);

impl Process {
    fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

fn on_a_node(work: impl FnOnce() + Send) {
    on_a_node_with("size=64m", work);
}

#[test]
fn an_excluded_container_is_exempt_from_its_creation_to_its_end() {
    on_a_node(|| {
        let scene = Scene::new("container-exit");
        for state in [Scene::crio, Scene::containerd] {
            let (pods, app) = (Cgroup::new(), Cgroup::new());
            let cgroup = pods.child("container");
            let [process, other] = [scene.process(&cgroup), scene.process(&app)];
            scene.accepts(&state(&scene, "vault", "creating", process.id()));
            let expected = ContainerElement::new(ContainerScope::All, cgroup.id(), "vault", VAULT);
            assert_eq!(scene.elements(), slice::from_ref(&expected));
            scene.accepts(&state(&scene, "app", "creating", other.id()));
            scene.accepts(&state(&scene, "vault", "creating", process.id()));
            assert_eq!(scene.elements(), [expected]);
            scene.accepts(&state(&scene, "app", "stopped", 0));
            assert_eq!(scene.elements().len(), 1);
            scene.accepts(&state(&scene, "vault", "stopped", 0));
            assert_eq!(scene.elements(), []);
        }
    });
}

#[test]
fn an_excluded_container_that_cannot_be_exempted_does_not_start() {
    on_a_node(|| {
        let scene = Scene::new("container-exit");
        let cgroup = Cgroup::new();
        let process = scene.process(&cgroup);
        let start = |pid| scene.crio("vault", "creating", pid);
        let message = scene.refuses(&start(std::process::id()));
        let named = format!("detour-hook: container \"vault\" ({VAULT}) of pod sandbox {:?}: ", scene.pod.container_id);
        assert!(message.starts_with(&named), "{message}");
        assert!(message.contains("expected the network namespace of the pod sandbox, got another one"), "{message}");
        assert!(message.contains("must not start"), "{message}");
        for pid in [0, i32::MAX as u32] {
            assert!(scene.refuses(&start(pid)).contains("expected the network namespace"), "{pid}");
        }
        let mut nameless = start(process.id());
        nameless["annotations"]["io.kubernetes.cri-o.Metadata"] = "{".into();
        assert!(scene.refuses(&nameless).contains("expected the container's name"));
        scene.pod.tool("nft", &["delete", "table", "inet", "detour-exclusions"], "");
        assert!(scene.refuses(&start(process.id())).contains("detour-exclusions"));
        scene.accepts(&scene.crio("vault", "stopped", 0));
        scene.accepts(&scene.crio("app", "creating", process.id()));
        fs::write(scene.record(), "{").expect("written");
        let message = scene.refuses(&start(process.id()));
        assert!(message.contains("n@net1.json: can't read the saved state"), "{message}");
    });
}

#[test]
fn other_containers_and_sandboxes_are_ignored() {
    on_a_node(|| {
        let scene = Scene::new("container-exit");
        let sandbox = |kind: &str| {
            let mut state = scene.crio("vault", "creating", 1);
            state["annotations"][kind] = "sandbox".into();
            state
        };
        scene.accepts(&sandbox("io.kubernetes.cri-o.ContainerType"));
        for id in ["unknown", "../../etc", "", "/"] {
            let mut state = scene.crio("vault", "creating", 1);
            state["annotations"]["io.kubernetes.cri-o.SandboxID"] = id.into();
            scene.accepts(&state);
        }
        scene.accepts(&json!({"id": "c", "status": "creating", "pid": 1, "annotations": null}));
        scene.accepts(&json!({"id": "c", "status": "creating", "pid": 1, "annotations": {"a": "b"}}));
        assert_eq!(scene.elements(), []);
        let message = scene.refuses(&json!("no object"));
        assert!(message.starts_with("detour-hook: invalid container state on stdin: "), "{message}");
    });
}

#[test]
fn a_container_that_ends_after_its_pod_is_no_error() {
    on_a_node(|| {
        let scene = Scene::new("container-exit");
        let text = fs::read_to_string(scene.record()).expect("saved");
        let path = scene.pod.netns().display().to_string();
        fs::write(scene.record(), text.replace(&path, "/run/netns/detour-none")).expect("written");
        scene.accepts(&scene.crio("vault", "stopped", 0));
        let message = scene.refuses(&scene.crio("vault", "creating", std::process::id()));
        assert!(message.contains("network namespace /run/netns/detour-none: gone"), "{message}");
    });
}

#[test]
fn a_container_that_starts_after_the_proxy_listens_is_captured() {
    on_a_node(|| {
        let scene = Scene::new("proxy-ready");
        let cgroup = Cgroup::new();
        let process = scene.process(&cgroup);
        let start = scene.crio("vault", "creating", process.id());
        scene.accepts(&start);
        assert_eq!(scene.elements().len(), 1);
        let proxy = scene.inside(|| TcpListener::bind("0.0.0.0:15001").expect("free"));
        scene.accepts(&start);
        assert_eq!(scene.elements(), []);
        // Not only closed: a process that another test has just forked may still have the socket.
        shutdown(proxy.as_raw_fd(), Shutdown::Both).expect("it listens");
        scene.accepts(&start);
        assert_eq!(scene.elements(), [], "the proxy restarts");
        // The table is no longer needed.
        scene.pod.tool("nft", &["delete", "table", "inet", "detour-exclusions"], "");
        scene.accepts(&start);
    });
}

/// Serves a socket of an agent that knows these containers, for as many requests. Returns the requests.
fn agent(socket: &Path, answers: Vec<Value>) -> JoinHandle<Vec<Value>> {
    let listener = UnixListener::bind(socket).expect("a socket");
    let serve = move |answer: Value| loop {
        let (stream, _) = listener.accept().expect("a request");
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).expect("a line");
        let request: Value = serde_json::from_str(&line).expect("JSON");
        // Each call also reports its outcome.
        if request["ask"]["about"] == "containers" {
            let hello = json!({"version": "9.9.9", "facts": 999});
            let lines = format!("{hello}\n{}\n", json!({"answer": "containers", "expected": answer}));
            (&stream).write_all(lines.as_bytes()).expect("it reads");
            return request;
        }
    };
    thread::spawn(move || answers.into_iter().map(serve).collect())
}

#[test]
fn check_reports_elements_that_no_excluded_container_explains() {
    on_a_node(|| {
        let scene = Scene::new("container-exit");
        let none = scene.directory.join("agent.sock");
        assert_eq!(scene.check(&none), None);
        let element = |cgroup, name| ContainerElement::new(ContainerScope::All, cgroup, name, VAULT);
        let [vault, app] = [element(1, "vault"), element(2, "app")];
        let change = |remove: &[ContainerElement], add: &[ContainerElement]| {
            scene.inside(|| change_container_elements(remove, add).expect("changed"));
        };
        change(&[], slice::from_ref(&vault));
        assert_eq!(scene.check(&none), None, "without an agent, the running containers are unknown");
        change(&[], slice::from_ref(&app));
        let error = scene.check(&none).expect("drift");
        assert_eq!(error["code"], 103, "{error}");
        let details = "unexpected: control group 2 in the set \"excluded-all\": container \"app\" is not excluded";
        assert_eq!(error["details"], details);
        change(&[app], &[]);

        let exempt = json!([{"name": "vault", "id": VAULT, "cgroup": 1, "scope": "all"}]);
        let served = agent(&none, vec![exempt, json!(null), json!([]), json!([])]);
        assert_eq!(scene.check(&none), None);
        assert_eq!(scene.check(&none), None, "an agent that can't say is no error");
        // The second answer decides: a container may start or exit during the first comparison.
        let error = scene.check(&none).expect("drift");
        assert!(error["details"].as_str().expect("text").contains("\"vault\" has ended"), "{error}");
        let requests = served.join().expect("no panic");
        assert!(
            requests.iter().all(|request| request["ask"]["container"] == json!(scene.pod.container_id)),
            "{requests:?}"
        );
    });
}

/// Prints medians; the limit of 3 ms is for a release build.
#[test]
fn the_time_of_a_call_is_measured() {
    on_a_node(|| {
        let scene = Scene::new("container-exit");
        let cgroup = Cgroup::new();
        let process = scene.process(&cgroup);
        let median = |work: &mut dyn FnMut()| {
            let mut times = BTreeSet::new();
            for round in 0..51_u32 {
                let started = Instant::now();
                work();
                times.insert((started.elapsed(), round));
            }
            times.into_iter().nth(25).map_or(Duration::MAX, |(time, _)| time)
        };
        let (start, stop, other) = (
            scene.crio("vault", "creating", process.id()),
            scene.crio("vault", "stopped", 0),
            scene.crio("app", "creating", process.id()),
        );
        let nothing = median(&mut || drop(Command::new("/bin/true").output()));
        let both = median(&mut || {
            scene.accepts(&start);
            scene.accepts(&stop);
        });
        let ignored = median(&mut || scene.accepts(&other));
        println!("/bin/true {nothing:?}; start and end of an excluded container {both:?}; of another one {ignored:?}");
    });
}
