//! One look at all pods after the other: who is due waits in the queue, is looked at and, where needed,
//! repaired. Nothing here ends the agent.

use super::action::{self, Mode, Outcome};
use super::queue::{LENGTH, Queue};
use super::watched::{Place, Watched};
use super::{Case, Cause, KnownPod, Pods, Settings, diagnose, in_place, suspect};
use crate::agent::Metrics;
use crate::agent::install::{Installed, Node};
use crate::cluster::ServiceAccount;
use crate::cni::{Code, Error};
use crate::plugin::{self, Standing};
use crate::sandbox::find::{self, Found};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Without a change, and where rules are not looked at from time to time, it looks up this often.
const IDLE: Duration = Duration::from_secs(600);
/// Where the plugin isn't installed yet, as it is when an agent starts, it looks again after so long.
const NOT_INSTALLED: Duration = Duration::from_secs(5);

/// The worker.
#[derive(Debug)]
pub struct Repair {
    settings: Settings,
    /// Where the plugin is installed.
    node: Node,
    /// Who changes objects of the cluster.
    account: ServiceAccount,
    metrics: Metrics,
    queue: Queue,
    /// By UID.
    watched: BTreeMap<String, Watched>,
    /// What was wrong with the configuration, lest it be said at each look.
    said: Option<String>,
    /// Whether a pod has gone since what is kept was tidied up.
    tidy: bool,
}

/// What was done for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// `NAMESPACE/NAME`.
    pub pod: String,
    /// Why.
    pub cause: Cause,
    /// How.
    pub mode: Mode,
    /// With what result.
    pub outcome: Outcome,
}

impl Repair {
    /// One that has not looked yet.
    #[must_use]
    pub fn new(settings: Settings, node: Node, account: ServiceAccount, metrics: Metrics) -> Self {
        let (queue, watched) = (Queue::new(LENGTH), BTreeMap::new());
        Self { settings, node, account, metrics, queue, watched, said: None, tidy: true }
    }

    /// Looks after `pods` from now on, on a thread of its own.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(mut self, mut pods: impl Pods + 'static) -> io::Result<()> {
        let work = move || loop {
            pods.wait(self.pause(Instant::now()));
            self.look(&pods.pods(), Instant::now());
        };
        thread::Builder::new().name("repair".into()).spawn(work).map(drop)
    }

    /// Looks after the pods that are due at `now`, and gives what was done.
    pub fn look(&mut self, pods: &[Arc<KnownPod>], now: Instant) -> Vec<Done> {
        self.update(pods, now);
        self.tidy_up();
        let mut done = Vec::new();
        if self.queue.is_empty() {
            return done;
        }
        let installed = self.installed();
        // One look at the node serves all.
        let mut node = None;
        while let Some(uid) = self.queue.pop() {
            let Some(mut watched) = self.watched.remove(&uid) else { continue };
            match &installed {
                Some(installed) => done.extend(self.look_at(&mut watched, installed, &mut node, now)),
                None => watched.due = Some(now + NOT_INSTALLED),
            }
            self.watched.insert(uid, watched);
        }
        done
    }

    /// How long nothing will be due.
    fn pause(&self, now: Instant) -> Duration {
        let next = self.watched.values().filter_map(|watched| watched.due).min();
        next.map_or(IDLE, |next| next.saturating_duration_since(now)).min(IDLE)
    }

    /// Takes the pods as they are known now, and has those wait that are due.
    fn update(&mut self, pods: &[Arc<KnownPod>], now: Instant) {
        let uid = |known: &KnownPod| known.pod.uid.clone().unwrap_or_default();
        let present: BTreeSet<String> = pods.iter().map(|known| uid(known)).collect();
        let before = self.watched.len();
        self.watched.retain(|uid, _| present.contains(uid));
        self.tidy |= self.watched.len() < before;
        let mut dropped = 0_usize;
        for known in pods {
            let uid = uid(known);
            let watched = self.watched.entry(uid.clone()).or_insert_with(|| Watched::new(Arc::clone(known), now));
            watched.update(known, now);
            if watched.is_due(now) && !self.queue.push(&uid) {
                dropped += 1;
                self.metrics.queue_overflow();
            }
        }
        if dropped > 0 {
            tracing::warn!("{dropped} pods are looked at later: {LENGTH} wait already");
        }
    }

    fn installed(&mut self) -> Option<Installed> {
        let found = self.node.installed();
        if let Err(why) = &found
            && self.said.as_ref() != Some(why)
        {
            tracing::warn!("no pod is repaired: {why}");
        }
        self.said = found.as_ref().err().cloned();
        found.ok().flatten()
    }

    fn look_at(
        &self,
        watched: &mut Watched,
        installed: &Installed,
        node: &mut Option<find::Node>,
        now: Instant,
    ) -> Option<Done> {
        let known = Arc::clone(&watched.known);
        let Some(suspicion) = suspect(&self.settings.criteria, installed, &known) else {
            watched.rest();
            return None;
        };
        let standing = if suspicion.settled { self.standing(watched, node) } else { None };
        let cause = diagnose(suspicion, standing.as_ref());
        if !watched.note(cause, self.interval(&known), now) {
            return None;
        }
        let cause = cause?;
        if cause == Cause::Drift {
            self.metrics.drift();
        }
        watched.tries.note(cause, now);
        let case = Case { installed, known: &known, suspicion, cause };
        let mut mode = self.settings.mode;
        let mut outcome = self.perform(mode, &case);
        if mode == Mode::InPlace && watched.tries.are_spent() {
            let after = outcome.after_all();
            if let (Outcome::Failed(_), Some(otherwise)) = (&after, self.settings.otherwise) {
                mode = otherwise;
                outcome = self.perform(mode, &case);
            } else {
                outcome = after;
            }
        }
        watched.wake(watched.tries.next());
        // The first failure is told, and the last.
        let is_news = !matches!(outcome, Outcome::Failed(_)) || watched.tries.are_spent() || watched.tries.count() == 1;
        self.tell(&known, cause, &outcome, is_news);
        Some(Done { pod: name(&known), cause, mode, outcome })
    }

    /// What the pod's namespace holds; `None` where it has none that is known.
    fn standing(&self, watched: &mut Watched, node: &mut Option<find::Node>) -> Option<Standing> {
        watched.place.take_if(|place| !place.is_there());
        let mut stand = || {
            if watched.place.is_none() {
                let node = match node {
                    Some(node) => node,
                    None => node.insert(find::Node::look(self.node.root())?),
                };
                let found = node.of_pod(watched.known.pod.uid_on_node().unwrap_or_default())?;
                watched.place = found.as_ref().and_then(Place::of);
            }
            watched.place.as_ref().map(|place| plugin::standing(&place.container_id, &place.netns)).transpose()
        };
        let stood: Result<_, Error> = stand();
        watched.complain(stood.as_ref().err());
        stood.ok().flatten()
    }

    fn find(&self, known: &KnownPod) -> Result<Found, Error> {
        let uid = known.pod.uid_on_node().unwrap_or_default();
        let unknown = || Error::new(Code::InvalidNetns, "no network namespace of the pod is known on this node");
        find::of_pod(self.node.root(), uid)?.ok_or_else(unknown)
    }

    fn perform(&self, mode: Mode, case: &Case<'_>) -> Outcome {
        let performed = match mode {
            // Found anew: what was found for a look may have gone since.
            Mode::InPlace => self.find(case.known).and_then(|found| in_place::repair(case, &found)),
            Mode::Delete => action::delete(&self.account, case.known),
            Mode::Label => action::label(&self.account, case.known, &self.settings.label),
        };
        let outcome = performed.unwrap_or_else(|error| Outcome::Failed(error.to_string()));
        self.metrics.repair(mode.name(), outcome.name());
        outcome
    }

    fn tell(&self, known: &KnownPod, cause: Cause, outcome: &Outcome, is_news: bool) {
        let Some(event) = action::event(cause, outcome) else { return };
        let pod = name(known);
        match outcome {
            Outcome::Failed(_) => tracing::warn!(pod, "{}", event.message),
            _ => tracing::info!(pod, "{}", event.message),
        }
        if is_news && let Err(error) = self.account.tell(&known.pod, &event) {
            tracing::warn!("{error}");
        }
    }

    /// Runtimes make no DEL for what they did not add: what is kept of pods that were repaired goes here.
    fn tidy_up(&mut self) {
        if !std::mem::take(&mut self.tidy) {
            return;
        }
        match plugin::forget_gone(self.node.root()) {
            Ok(forgotten) => forgotten.iter().for_each(|attachment| tracing::info!("forgot the {attachment}")),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// How long rules that are right are left alone: up to the whole interval, each pod another part of it,
    /// lest all be looked at at once.
    fn interval(&self, known: &KnownPod) -> Option<Duration> {
        let interval = Some(self.settings.interval).filter(|interval| !interval.is_zero())?;
        let part = BuildHasherDefault::<DefaultHasher>::default().hash_one(&known.pod.uid) % 1000;
        Some(interval / 2 + interval / 2 * u32::try_from(part).unwrap_or(0) / 1000)
    }
}

fn name(known: &KnownPod) -> String {
    format!("{}/{}", known.pod.namespace, known.pod.name)
}
