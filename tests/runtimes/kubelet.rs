//! A stand-in for the kubelet: it starts pods all the time, and retries those that do not start.

use crate::cluster::{Cluster, detour};
use crate::node::{Node, until};
use crate::pod::{Class, Pod};
use crate::support::api::PODS;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

/// The pause before it starts a pod again. The kubelet waits longer.
const PAUSE: Duration = Duration::from_millis(50);

/// The kinds of pods: with a sidecar, with a sidecar and an excluded port, without a sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Meshed,
    Excluding,
    Plain,
}

impl Kind {
    fn pod(self, name: &str) -> Pod {
        let mut meshed = Pod::new(name, Class::Burstable, "").container("web");
        match self {
            Self::Meshed => {}
            Self::Excluding => meshed.annotate("traffic.sidecar.istio.io/excludeOutboundPorts", "9999"),
            Self::Plain => return Pod::plain("shop", name),
        }
        meshed
    }
}

/// What happened since the start of the node.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// When the pods had started, since the runtime was ready.
    started: BTreeMap<Kind, Vec<Duration>>,
    /// Pods with a sidecar that started without rules, or with other rules than expected; pods without a sidecar that
    /// started with rules.
    pub(crate) without_rules: Vec<String>,
    pub(crate) other_rules: Vec<String>,
    /// Errors of the runtime for attempts to start a pod.
    pub(crate) errors: Vec<String>,
}

impl Counts {
    /// How many pods with a sidecar started.
    pub(crate) fn meshed(&self) -> usize {
        [Kind::Meshed, Kind::Excluding].iter().filter_map(|kind| self.started.get(kind)).map(Vec::len).sum()
    }

    /// How many pods without a sidecar started.
    pub(crate) fn plain(&self) -> usize {
        self.started.get(&Kind::Plain).map_or(0, Vec::len)
    }

    /// When the first pod with a sidecar, or the first other pod, had started.
    pub(crate) fn first(&self, meshed: bool) -> Option<Duration> {
        let kinds = self.started.iter().filter(|(kind, _)| meshed == (**kind != Kind::Plain));
        kinds.filter_map(|(_, times)| times.first().copied()).min()
    }
}

/// The rules that each kind of pod must have.
pub(crate) type Expected = BTreeMap<Kind, Vec<String>>;

pub(crate) struct Kubelet<'a> {
    node: &'a Node,
    cluster: &'a Cluster,
    expected: &'a Expected,
    /// When the runtime was ready.
    pub(crate) begin: Instant,
    /// Locked for reading while a pod starts and is checked, for writing while the node is drained.
    starts: RwLock<()>,
    pub(crate) ended: AtomicBool,
    counts: Mutex<Counts>,
}

impl<'a> Kubelet<'a> {
    pub(crate) fn new(node: &'a Node, cluster: &'a Cluster, expected: &'a Expected) -> Self {
        let (starts, ended, counts) = (RwLock::default(), AtomicBool::default(), Mutex::default());
        Self { node, cluster, expected, begin: Instant::now(), starts, ended, counts }
    }

    /// How many pods with a sidecar have started.
    pub(crate) fn meshed(&self) -> usize {
        self.counts.lock().expect("no panic while locked").meshed()
    }

    /// How many pods without a sidecar have started.
    pub(crate) fn plain(&self) -> usize {
        self.counts.lock().expect("no panic while locked").plain()
    }

    pub(crate) fn counts(self) -> Counts {
        self.counts.into_inner().expect("no panic while locked")
    }

    /// Starts pods of this kind, one after the other, until the end. It leaves the last one.
    pub(crate) fn run(&self, kind: Kind) {
        let mut last: Option<(String, String)> = None;
        while !self.ended.load(Ordering::Relaxed) {
            let lock = self.starts.read();
            let started = self.start(kind);
            drop(lock);
            if let Some((sandbox, name)) = started.and_then(|started| last.replace(started)) {
                self.remove(&sandbox);
                self.cluster.api.delete(PODS, "shop", &name);
            }
        }
    }

    /// Removes all pods. Meanwhile, none starts.
    pub(crate) fn drain(&self) {
        let _lock = self.starts.write();
        self.remove_all(&self.sandboxes());
    }

    /// The IDs of all sandboxes.
    pub(crate) fn sandboxes(&self) -> Vec<String> {
        let answer = self.node.asked(json!({"op": "sandboxes"}));
        let all = answer["sandboxes"].as_array().into_iter().flatten();
        all.filter_map(|id| id.as_str().map(str::to_owned)).collect()
    }

    /// Starts one pod, checks its rules and returns its sandbox and name; `None` at the end.
    fn start(&self, kind: Kind) -> Option<(String, String)> {
        static COUNTER: AtomicU32 = AtomicU32::new(1);
        let pod = kind.pod(&format!("pod-{}", COUNTER.fetch_add(1, Ordering::Relaxed)));
        self.cluster.has(&pod);
        let sandbox = self.retry(&pod)?;
        let time = self.begin.elapsed();
        let rules = sandbox.rules();
        let mut counts = self.counts.lock().expect("no panic while locked");
        counts.started.entry(kind).or_default().push(time);
        if rules != self.expected[&kind] {
            let wrong = format!("{time:?}: {kind:?} pod {}: {rules:#?}", pod.name);
            let bypasses = kind != Kind::Plain && !rules.iter().any(|rule| rule.contains("ISTIO"));
            if bypasses { counts.without_rules.push(wrong) } else { counts.other_rules.push(wrong) }
        }
        Some((sandbox.id.clone(), pod.name))
    }

    /// Starts a pod as often as necessary; `None` at the end.
    pub(crate) fn retry(&self, pod: &Pod) -> Option<crate::pod::Sandbox<'_>> {
        for attempt in 0.. {
            match pod.start_again(self.node, attempt) {
                Ok(sandbox) => return Some(sandbox),
                Err(error) => {
                    let error = format!("{:?}: {}: {error}", self.begin.elapsed(), pod.name);
                    self.counts.lock().expect("no panic while locked").errors.push(error);
                }
            }
            if self.ended.load(Ordering::Relaxed) {
                break;
            }
            thread::park_timeout(PAUSE);
        }
        None
    }

    fn remove(&self, sandbox: &str) {
        let mut refused = None;
        let mut is_removed = || {
            let error = self.node.ask(json!({"op": "drop", "sandbox": sandbox})).err();
            if error.is_some() && error != refused {
                println!("{:?}: {error:?}", self.begin.elapsed());
                refused.clone_from(&error);
            }
            error.is_none()
        };
        until("the runtime removes a sandbox", &mut is_removed);
    }

    /// Removes these sandboxes, as the kubelet removes those from before a reboot.
    pub(crate) fn remove_all(&self, sandboxes: &[String]) {
        sandboxes.iter().for_each(|sandbox| self.remove(sandbox));
    }
}

/// The rules of each kind of pod on a node whose agent is ready. They must be those that `detour explain` shows.
pub(crate) fn expected(node: &Node, cluster: &Cluster) -> Expected {
    let rules = |kind: Kind| {
        let pod = kind.pod(&format!("first-{kind:?}").to_lowercase());
        cluster.has(&pod);
        let sandbox = pod.start(node).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
        let rules = sandbox.rules();
        sandbox.remove();
        let mut appended: Vec<_> = rules.iter().filter(|rule| rule.starts_with("-A")).cloned().collect();
        appended.sort();
        assert_eq!(appended, if kind == Kind::Plain { Vec::new() } else { explained(node, &pod) });
        rules
    };
    let expected: Expected = [Kind::Meshed, Kind::Excluding, Kind::Plain].map(|kind| (kind, rules(kind))).into();
    assert_ne!(expected[&Kind::Meshed], expected[&Kind::Excluding]);
    expected
}

/// The rules of both families that `detour explain` shows for a pod, in alphabetical order.
fn explained(node: &Node, pod: &Pod) -> Vec<String> {
    let file = node.path("explained.json");
    fs::write(&file, pod.manifest().to_string()).expect("written");
    let mut lists: Vec<_> = fs::read_dir(node.path("net.d")).expect("it exists").flatten().map(|e| e.path()).collect();
    lists.sort();
    let paths = [file, lists.remove(0)].map(|path| path.display().to_string());
    let output = Command::new(detour())
        .args(["explain", "--rules", "iptables", "--file", &paths[0], "--config", &paths[1]])
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    let one = |rule: &str| vec![rule.to_owned()];
    let rule = |line: &str| match line.split_once(' ') {
        Some(("-4" | "-6", rule)) => one(rule),
        Some(("-A", _)) => [one(line), one(line)].concat(),
        _ => Vec::new(),
    };
    let mut rules: Vec<_> = text.lines().flat_map(rule).collect();
    rules.sort();
    rules
}
