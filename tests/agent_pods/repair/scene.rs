//! A node with the plugin in the cluster network's list, running pods, and an API server.

use crate::support::agent_node::{self, AgentNode, LIST, ROOT, reach, write};
use crate::support::agent_process::write_account;
use crate::support::kernel::Tools;
use crate::support::node_pod::NodePod as Pod;
use crate::support::wait::{DEADLINE, pause};
use detour_cni::agent::install::{FileRecord, HostRoot, InstallRecord, NodeFiles, Role};
use detour_cni::agent::pods::{ObservedNode, PodReconciler};
use detour_cni::agent::{Metrics, ObservedPod, PodReports, PodSettings, RepairMode, run_tasks};
use detour_cni::cluster::{Api, Event, objects};
use nix::mount::umount;
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::future::pending;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;
use std::{fs, thread};
use tokio::runtime::{Builder, Runtime};

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
    agent_node: &'a AgentNode<'a>,
    metrics: Metrics,
    /// The reports, whose task writes Events until the scene ends.
    reports: OnceCell<PodReports>,
}

impl<'a> Deref for Scene<'a> {
    type Target = AgentNode<'a>;

    fn deref(&self) -> &AgentNode<'a> {
        self.agent_node
    }
}

/// Runs `work` with a temporary node.
pub(crate) fn scene(work: impl FnOnce(&Scene<'_>) + Send) {
    agent_node::scene(|agent_node| {
        let scene = Scene { agent_node, metrics: Metrics::default(), reports: OnceCell::new() };
        scene.install(&json!([{"type": "istio-redirect"}]));
        work(&scene);
    });
}

impl Scene<'_> {
    /// Puts the plugin with this chain into the cluster network's list.
    pub(crate) fn install(&self, chain: &Value) {
        let list = json!({"cniVersion": "1.0.0", "name": "cluster", "plugins": [
            {"type": "ovn"},
            {"type": "detour", "chain": chain, "kubernetes": {
                "manifests_dir": "/manifests", "exclude_namespaces": ["kube-system"],
            }},
        ]});
        write(LIST, &list.to_string());
        let listed = FileRecord { role: Role::Entry, sha256: Vec::new(), plugin: Some("detour".into()), source: None };
        let files = [(LIST.parse().expect("a path"), listed)].into();
        let record = InstallRecord { files, ..InstallRecord::default() };
        write("/var/lib/cni/detour/install.json", &serde_json::to_string(&record).expect("JSON"));
        fs::create_dir_all(reach("/manifests")).expect("made");
    }

    /// Calls the plugin as the runtime does, which must succeed.
    #[track_caller]
    pub(crate) fn call(&self, pod: &Pod, verb: &str) {
        self.call_in("auto", pod, verb);
    }

    /// The same with this rule format.
    #[track_caller]
    pub(crate) fn call_in(&self, dialect: &str, pod: &Pod, verb: &str) {
        let conf = json!({
            "cniVersion": "1.0.0", "name": "cluster", "type": "detour", "chain": [{"type": "istio-redirect"}],
            "kubernetes": {"manifests_dir": reach("/manifests")}, "log_level": "none", "dialect": dialect,
        });
        pod.call(verb, &conf).unwrap_or_else(|printed| panic!("{verb}: {printed}"));
    }

    /// Creates a pod for which the plugin was never called.
    pub(crate) fn pod(&self) -> Pod {
        let pod = Pod::new(self.node, None);
        self.node.keep("results", ("cluster", "eth0"), &pod.sandbox, (&pod.name, &pod.uid), &pod.sandbox);
        self.write_manifest(&pod);
        pod
    }

    /// Writes the pod's manifest for the plugin.
    fn write_manifest(&self, pod: &Pod) {
        write(&format!("/manifests/{}.json", pod.uid), &pod.object().to_string());
    }

    /// Adds an annotation to the pod and to its manifest for the plugin.
    pub(crate) fn annotate(&self, pod: &Pod, key: &str, value: &str) {
        pod.set(key, value);
        self.write_manifest(pod);
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
        NodeFiles::new(HostRoot::new(ROOT))
    }

    /// Returns the agent's account.
    pub(crate) fn account(&self) -> Api {
        self.account_at(self.api.url())
    }

    /// Returns the agent's account at this API server.
    pub(crate) fn account_at(&self, url: String) -> Api {
        let directory = reach("/sa");
        write_account(&directory);
        Api::of_account(url, directory)
    }

    /// Waits for this many Events. Returns reasons and types of all.
    #[track_caller]
    pub(crate) fn wait_for_events(&self, count: usize) -> Vec<(String, String)> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let bodies = self.api.bodies_of("POST /api/v1/namespaces/shop/events");
            if bodies.len() >= count {
                let text = |body: &Value, key: &str| body[key].as_str().unwrap_or_default().to_owned();
                return bodies.iter().map(|body| (text(body, "reason"), text(body, "type"))).collect();
            }
            assert!(Instant::now() < deadline, "expected {count} Events, got {bodies:#?}");
            pause();
        }
    }

    /// Returns a sample of the agent's metrics.
    pub(crate) fn counted(&self, series: &str) -> u32 {
        let text = self.metrics.text();
        let sample = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        sample.map_or(0, |value| value.parse().expect("a number"))
    }

    /// Returns the names of the pod's saved records.
    pub(crate) fn attachments(&self, pod: &Pod) -> Vec<String> {
        let directory = Path::new("/run/detour/attachments").join(&pod.sandbox);
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

impl Tools for Pod {
    fn tool(&self, name: &str, args: &[&str], input: &str) -> String {
        Self::tool(self, name, args, input)
    }
}

impl Pod {
    /// Ends the pod without a DEL.
    pub(crate) fn go(&self) {
        let path = reach("/run/netns").join(&self.sandbox);
        umount(&path).expect("unmounted");
        fs::remove_file(path).expect("removed");
        self.pause.end();
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
            addresses: vec!["10.88.0.2".parse().expect("an address")],
            ..ObservedPod::default()
        }
    }

    /// Returns the pod after a failed validation.
    pub(crate) fn unvalidated(&self) -> Arc<ObservedPod> {
        Arc::new(ObservedPod { validation_failed: true, ..self.observed() })
    }
}
