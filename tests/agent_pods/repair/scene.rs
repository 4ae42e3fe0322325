//! A node with the plugin in the cluster network's list, running pods, and an API server.

use crate::repair::kernel::Tools;
use crate::repair::node::{self, Node};
use crate::repair::server::{Answer, Request, Server};
use crate::support::agent_process::write_account;
use crate::support::node_pod::NodePod;
use detour_cni::agent::install::{FileRecord, HostPath, HostRoot, InstallRecord, NodeFiles, Role};
use detour_cni::agent::pods::{ObservedNode, PodReconciler};
use detour_cni::agent::{Metrics, ObservedPod, PodReports, PodSettings, RepairMode, run_tasks};
use detour_cni::cluster::{Api, Event, objects};
use nix::mount::{MsFlags, mount, umount};
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::future::pending;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{fs, thread};
use tokio::runtime::{Builder, Runtime};

const STATE: &str = "/run/detour";
const LIST: &str = "/etc/cni/net.d/10-cluster.conflist";

/// Starts tasks on an event loop of another thread, which runs until the process ends.
pub(crate) fn on_event_loop<T: Send + 'static>(start: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, started) = channel();
    thread::spawn(move || {
        run_tasks(async move {
            sender.send(start()).expect("the test waits");
            pending::<()>().await;
        })
    });
    started.recv().expect("an event loop")
}

pub(crate) struct Scene<'a> {
    pub(crate) node: &'a Node,
    pub(crate) api: Server,
    pub(crate) metrics: Metrics,
    /// The reports, whose task writes Events until the scene ends.
    reports: OnceCell<PodReports>,
}

/// Runs `work` with a temporary node and an API server that accepts every request.
pub(crate) fn scene(work: impl FnOnce(&Scene<'_>) + Send) {
    scene_with(|_| Answer::json(200, &json!({})), work);
}

/// The same with an API server that answers by `script`.
pub(crate) fn scene_with(
    script: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    work: impl FnOnce(&Scene<'_>) + Send,
) {
    node::scene(|node| {
        fs::create_dir_all(STATE).expect("needs root");
        mount(Some("tmpfs"), STATE, Some("tmpfs"), MsFlags::empty(), Some("size=16m")).expect("a tmpfs");
        let here = node.root.join("run/detour");
        fs::create_dir_all(&here).expect("made");
        mount(Some(STATE), &here, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted there too");
        let metrics = Metrics::default();
        let scene = Scene { node, api: Server::plain(script), metrics, reports: OnceCell::new() };
        scene.install(&json!([{"type": "istio-redirect"}]));
        work(&scene);
    });
}

impl Scene<'_> {
    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.node.root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    }

    fn log(&self, record: &InstallRecord) {
        self.write("/var/lib/cni/detour/install.json", &serde_json::to_string(record).expect("a log"));
    }

    /// Puts the plugin with this chain into the cluster network's list.
    pub(crate) fn install(&self, chain: &Value) {
        let list = json!({"cniVersion": "1.0.0", "name": "cluster", "plugins": [
            {"type": "ovn"},
            {"type": "detour", "chain": chain, "kubernetes": {
                "manifests_dir": "/manifests", "exclude_namespaces": ["kube-system"],
            }},
        ]});
        self.write(LIST, &list.to_string());
        let listed = FileRecord { role: Role::Entry, sha256: Vec::new(), plugin: Some("detour".into()), source: None };
        self.log(&InstallRecord { files: [(host(LIST), listed)].into(), ..InstallRecord::default() });
        fs::create_dir_all(self.manifests()).expect("made");
    }

    fn manifests(&self) -> PathBuf {
        self.node.root.join("manifests")
    }

    /// Returns the configuration for a call by the runtime.
    pub(crate) fn call_configuration(&self) -> Value {
        json!({
            "cniVersion": "1.0.0", "name": "cluster", "type": "detour", "chain": [{"type": "istio-redirect"}],
            "kubernetes": {"manifests_dir": self.manifests()}, "log_level": "none",
        })
    }

    /// Creates a pod for which the plugin was never called.
    pub(crate) fn pod(&self) -> Pod {
        let pod = Pod::new(self);
        self.publish(&pod);
        pod
    }

    /// Writes the pod's manifest for the plugin.
    pub(crate) fn publish(&self, pod: &Pod) {
        self.write(&format!("/manifests/{}.json", pod.uid), &pod.object().to_string());
    }

    pub(crate) fn repair(&self) -> Repair {
        self.repair_by(RepairMode::InPlace)
    }

    pub(crate) fn repair_by(&self, mode: RepairMode) -> Repair {
        let account = self.account();
        let start = move || PodReports::start(Some(account.for_tasks()));
        let reports = self.reports.get_or_init(|| on_event_loop(start));
        let settings = PodSettings { repair: mode, live_policy: false };
        let runtime = Builder::new_current_thread().enable_all().build().expect("an event loop");
        let account = self.account().for_tasks();
        Repair(PodReconciler::new(settings, self.files(), account, reports.clone(), self.metrics.clone()), runtime)
    }

    pub(crate) fn files(&self) -> NodeFiles {
        NodeFiles::new(HostRoot::new(&self.node.root))
    }

    /// Returns the agent's account, whose files are in the directory `account`.
    pub(crate) fn account(&self) -> Api {
        let directory = self.node.root.join("account");
        write_account(&directory);
        Api::of_account(self.api.http(), directory)
    }

    /// Waits for this many Events. Returns reasons and types of all.
    #[track_caller]
    pub(crate) fn events(&self, count: usize) -> Vec<(String, String)> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let bodies = self.request_bodies("POST /api/v1/namespaces/shop/events");
            if bodies.len() >= count {
                let text = |body: &Value, key: &str| body[key].as_str().unwrap_or_default().to_owned();
                return bodies.iter().map(|body| (text(body, "reason"), text(body, "type"))).collect();
            }
            assert!(Instant::now() < deadline, "expected {count} Events, got {bodies:#?}");
            thread::park_timeout(Duration::from_millis(10));
        }
    }

    /// Returns the bodies of the requests that start with `start`.
    pub(crate) fn request_bodies(&self, start: &str) -> Vec<Value> {
        let requests = self.api.requests();
        let such = requests.iter().filter(|request| request.line.starts_with(start));
        such.map(|request| serde_json::from_slice(&request.body).expect("JSON")).collect()
    }

    /// Returns a sample of the agent's metrics.
    pub(crate) fn counted(&self, series: &str) -> u32 {
        let text = self.metrics.text();
        let sample = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        sample.map_or(0, |value| value.parse().expect("a number"))
    }

    /// Returns the names of the pod's saved records.
    pub(crate) fn attachments(&self, pod: &Pod) -> Vec<String> {
        let directory = Path::new(STATE).join("attachments").join(&pod.sandbox);
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().expect("text"));
        names.filter(|name| name.ends_with(".json")).collect()
    }
}

/// The reconciler of an agent that repairs pods, and its event loop.
pub(crate) struct Repair(PodReconciler, Runtime);

impl Repair {
    /// Checks the pods that are due at `now`. Returns the Events about repairs.
    pub(crate) fn run_pass(&mut self, pods: &[Arc<ObservedPod>], now: Instant) -> Vec<Event> {
        self.0.update_node(true, now);
        let pods = pods.iter().map(|pod| (Arc::clone(pod), None)).collect();
        let node = ObservedNode { pods, is_current: true };
        let mut done = Vec::new();
        // A pod that was repaired is due again at once.
        for _ in 0..=2 * node.pods.len() {
            done.extend(self.0.run_next(&node, now).into_iter().flatten());
            done.extend(self.1.block_on(self.0.delete(now)));
        }
        done.retain(|event| ["DetourRepaired", "DetourDeleted", "DetourRepairFailed"].contains(&&*event.reason));
        done
    }
}

pub(crate) fn event(reason: &str, kind: &str) -> (String, String) {
    (reason.into(), kind.into())
}

/// Returns the only Event.
#[track_caller]
pub(crate) fn one(done: Vec<Event>) -> Event {
    let [one] = <[Event; 1]>::try_from(done).expect("one thing is done");
    one
}

/// Checks the Event about a repair.
#[track_caller]
pub(crate) fn assert_is(done: &Event, reason: &str, part: &str) {
    assert!(done.reason == reason && done.message.contains(part), "expected {reason} with {part:?}, got {done:?}");
}

fn host(path: &str) -> HostPath {
    path.parse().expect("a path")
}

/// A running pod with the runtime's cached result of the cluster network's ADD.
pub(crate) struct Pod {
    pod: NodePod,
    address: &'static str,
    pub(crate) dialect: &'static str,
}

impl Deref for Pod {
    type Target = NodePod;

    fn deref(&self) -> &NodePod {
        &self.pod
    }
}

impl Tools for Pod {
    fn tool(&self, name: &str, args: &[&str], input: &str) -> String {
        self.pod.tool(name, args, input)
    }
}

impl Pod {
    pub(crate) fn new(scene: &Scene<'_>) -> Self {
        let pod = NodePod::new(scene.node, None);
        scene.node.pin(&pod.sandbox, &pod.pause);
        scene.node.keep("results", ("cluster", "eth0"), &pod.sandbox, (&pod.name, &pod.uid), &pod.sandbox);
        pod.tool("ip", &["addr", "add", "fd88::2/64", "dev", "eth0", "nodad"], "");
        Self { pod, address: "10.88.0.2", dialect: "auto" }
    }

    /// Returns another pod, of which only a process in this pod's network namespace is left.
    pub(crate) fn stray(&self, scene: &Scene<'_>) -> Self {
        Self { pod: self.pod.stray(scene.node), address: "10.88.0.3", dialect: "auto" }
    }

    /// Ends the pod without a DEL.
    pub(crate) fn go(&self, scene: &Scene<'_>) {
        let path = scene.node.root.join("run/netns").join(&self.sandbox);
        umount(&path).expect("unmounted");
        fs::remove_file(path).expect("removed");
        self.pause.end();
    }

    /// Calls the plugin as the runtime does, which must succeed.
    #[track_caller]
    pub(crate) fn call(&self, scene: &Scene<'_>, verb: &str) {
        let mut conf = scene.call_configuration();
        conf["dialect"] = self.dialect.into();
        if verb == "CHECK" {
            conf["prevResult"] = json!({});
        }
        let called = self.pod.call(verb, &self.netns(), &conf, "");
        called.unwrap_or_else(|printed| panic!("{verb}: {printed}"));
    }

    /// Adds an annotation, and publishes the pod.
    pub(crate) fn annotate(&mut self, scene: &Scene<'_>, key: &str, value: &str) {
        self.set(key, value);
        scene.publish(self);
    }

    /// Returns the pod as the agent observes it with its addresses.
    pub(crate) fn observed(&self) -> ObservedPod {
        self.observed_as(&self.object())
    }

    pub(crate) fn observed_as(&self, manifest: &Value) -> ObservedPod {
        let pod = objects(Path::new("pod"), &manifest.to_string(), "default").expect("a manifest").pods.remove(0).pod;
        ObservedPod {
            pod,
            resource_version: "7".into(),
            owned: true,
            addresses: vec![self.address.parse().expect("an address")],
            ..ObservedPod::default()
        }
    }

    /// Returns the pod after a failed validation.
    pub(crate) fn unvalidated(&self) -> Arc<ObservedPod> {
        Arc::new(ObservedPod { validation_failed: true, ..self.observed() })
    }
}
