//! The OCI hook as a process, with states as CRI-O and containerd write them, real network namespaces and real control
//! groups. Needs root, `ip` and `nft`.

#[path = "../support/mod.rs"]
mod support;

use detour_cni::firewall::{ContainerElement, container_elements};
use detour_cni::policy::ContainerScope;
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
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
    /// Creates the pod with an ADD, whose record then gets the excluded containers.
    fn new(until: &str) -> Self {
        let scene = Self { directory: Directory::new("hook"), pod: Pod::new() };
        symlink(env!("CARGO_BIN_EXE_detour"), scene.program()).expect("linked");
        let configuration = json!({
            "cniVersion": "1.0.0", "name": "n", "type": "detour",
            "chain": [{"type": "uid-exclude", "uids": ["7"]}],
        });
        let added = Self::run(
            Command::new(env!("CARGO_BIN_EXE_detour")).env_clear().envs([
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", &scene.pod.container_id),
                ("CNI_NETNS", scene.pod.netns().to_str().expect("text")),
                ("CNI_IFNAME", "net1"),
                ("CNI_PATH", "/opt/cni/bin"),
            ]),
            &configuration.to_string(),
        );
        assert!(added.status.success(), "{added:?}");
        let mut record: Value = serde_json::from_slice(&fs::read(scene.record()).expect("saved")).expect("JSON");
        record["policy"]["containers"] = json!([{"name": "vault", "scope": "all", "until": until}]);
        fs::write(scene.record(), record.to_string()).expect("written");
        scene.table("add");
        scene
    }

    /// Adds or deletes the table with the set.
    fn table(&self, verb: &str) {
        let set = if verb == "add" { "add set inet detour-containers excluded-all { type cgroupsv2; }" } else { "" };
        self.pod.tool("nft", &["-f", "-"], &format!("{verb} table inet detour-containers\n{set}\n"));
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
        std::thread::scope(|scope| scope.spawn(enter).join()).expect("no panic")
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
            assert_eq!(scene.elements(), [expected.clone()]);
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
        scene.table("delete");
        assert!(scene.refuses(&start(process.id())).contains("detour-containers"));
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
        let _proxy = scene.inside(|| TcpListener::bind("0.0.0.0:15001").expect("free"));
        scene.accepts(&start);
        assert_eq!(scene.elements(), []);
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
