//! All pods, one look after the other: who is due waits in the queue, and is looked at and repaired in a
//! round. Nothing here ends the agent.

use super::repair_pass::{RepairPass, RepairResult, RepairTools};
use super::retry_budget::Deletions;
use super::retry_budget::{LENGTH, RepairQueue};
use super::watched::WatchedPod;
use super::{ObservedPod, Pods, RepairSettings};
use crate::agent::Metrics;
use crate::agent::install::{HostPath, Installed, NodeFiles};
use crate::cluster::ServiceAccount;
use crate::plugin;
use crate::state::ROOT;
use crate::trusted_file::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

/// Without a change, and where rules are not looked at from time to time, it looks up this often.
const IDLE: Duration = Duration::from_secs(600);
/// Where the plugin isn't installed, it looks again after so long.
const NOT_INSTALLED: Duration = Duration::from_secs(5);

/// The worker.
#[derive(Debug)]
pub struct RepairWorker {
    means: RepairTools,
    queue: RepairQueue,
    deletions: Deletions,
    /// By UID.
    watched: BTreeMap<String, WatchedPod>,
    /// What was wrong with the configuration, lest it be said at each look.
    said: Option<String>,
    /// Whether a pod has gone since what is kept was tidied up.
    tidy: bool,
}

impl RepairWorker {
    /// One that has not looked yet.
    #[must_use]
    pub fn new(settings: RepairSettings, node: NodeFiles, account: ServiceAccount, metrics: Metrics) -> Self {
        let (queue, watched) = (RepairQueue::new(LENGTH), BTreeMap::new());
        let (means, deletions) = (RepairTools { settings, node, account, metrics }, Deletions::default());
        Self { means, queue, deletions, watched, said: None, tidy: true }
    }

    /// Looks after `pods`, on a thread of its own, once `installed` tells that the plugin has been seen
    /// to; never where it ends before that.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(mut self, mut pods: impl Pods + 'static, installed: Receiver<()>) -> io::Result<()> {
        let work = move || {
            if installed.recv().is_err() {
                return;
            }
            loop {
                pods.wait(self.pause(Instant::now()));
                self.look(&pods.pods(), Instant::now());
            }
        };
        thread::Builder::new().name("repair".into()).spawn(work).map(drop)
    }

    /// Looks after the pods that are due at `now`, and gives what was done.
    pub fn look(&mut self, pods: &[Arc<ObservedPod>], now: Instant) -> Vec<RepairResult> {
        self.update(pods, now);
        self.tidy_up();
        let mut done = Vec::new();
        if self.queue.is_empty() {
            return done;
        }
        let Some(installed) = self.installed() else {
            self.put_off(now + NOT_INSTALLED);
            return done;
        };
        let mut round = RepairPass::new(&self.means, &installed, &mut self.deletions, now);
        while let Some(uid) = self.queue.pop() {
            if let Some(watched) = self.watched.get_mut(&uid) {
                done.extend(round.look_at(watched));
            }
        }
        round.tell();
        done
    }

    /// Has those that wait be due later.
    fn put_off(&mut self, then: Instant) {
        while let Some(uid) = self.queue.pop() {
            if let Some(watched) = self.watched.get_mut(&uid) {
                watched.due = Some(then);
            }
        }
    }

    /// How long nothing will be due.
    fn pause(&self, now: Instant) -> Duration {
        let next = self.watched.values().filter_map(|watched| watched.due).min();
        next.map_or(IDLE, |next| next.saturating_duration_since(now)).min(IDLE)
    }

    /// Takes the pods as they are known now, and has those wait that are due.
    fn update(&mut self, pods: &[Arc<ObservedPod>], now: Instant) {
        let uid = |known: &ObservedPod| known.pod.uid.clone().unwrap_or_default();
        let present: BTreeSet<String> = pods.iter().map(|known| uid(known)).collect();
        let before = self.watched.len();
        self.watched.retain(|uid, _| present.contains(uid));
        self.tidy |= self.watched.len() < before;
        let mut dropped = 0_usize;
        for known in pods {
            let uid = uid(known);
            let watched = self.watched.entry(uid.clone()).or_insert_with(|| WatchedPod::new(Arc::clone(known), now));
            watched.update(known, now);
            if watched.is_due(now) && !self.queue.push(&uid) {
                dropped += 1;
                self.means.metrics.queue_overflow();
            }
        }
        if dropped > 0 {
            tracing::warn!("{dropped} pods are looked at later: {LENGTH} wait already");
        }
    }

    fn installed(&mut self) -> Option<Installed> {
        let found = state_is_the_nodes(&self.means.node).and_then(|()| self.means.node.installed());
        if let Err(why) = &found
            && self.said.as_ref() != Some(why)
        {
            tracing::warn!("no pod is repaired: {why}");
        }
        self.said = found.as_ref().err().cloned();
        found.ok().flatten()
    }

    /// Runtimes make no DEL for what they did not add: what is kept of pods that were repaired goes here.
    fn tidy_up(&mut self) {
        if !std::mem::take(&mut self.tidy) {
            return;
        }
        match plugin::forget_gone(self.means.node.root()) {
            Ok(forgotten) => forgotten.iter().for_each(|attachment| tracing::info!("forgot the {attachment}")),
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// What the plugin keeps of its calls must be what this process sees; else every pod would seem to be
/// somebody else's.
fn state_is_the_nodes(node: &NodeFiles) -> Result<(), String> {
    let directory = Path::new(ROOT).parent().unwrap_or(Path::new(ROOT));
    // Whoever keeps something there first would make it.
    let _ = fs::create_dir_all(directory);
    let id = |path: &Path| fs::metadata(path).ok().map(|metadata| FileId::of(&metadata));
    let of_node = HostPath::new(directory).and_then(|path| node.reach(&path).ok()).and_then(|path| id(&path));
    let same = of_node.is_some() && of_node == id(directory);
    same.then_some(()).ok_or_else(|| {
        let (here, root) = (directory.display(), node.root().display());
        format!("{here} is not the node's (below {root}): mount the node's {here} at both places")
    })
}
