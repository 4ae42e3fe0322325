//! One round: pods that are due are looked at and, where needed, repaired.

use super::action::{self, Mode, Outcome};
use super::deletions::Deletions;
use super::tries::Tries;
use super::watched::{Place, Watched};
use super::{Case, Cause, KnownPod, Settings, diagnose, in_place, suspect};
use crate::agent::Metrics;
use crate::agent::install::{Installed, Node};
use crate::cluster::{Event, ServiceAccount};
use crate::cni::{Code, Error};
use crate::plugin::{self, Standing};
use crate::sandbox::find::{self, Found};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A pod without rules must be so for this long: a runtime may be at work on it.
const CERTAIN: Duration = Duration::from_secs(3);
/// The same where it would be deleted or labelled. After its sandbox, another with the same address may be in
/// the making, while an ADD that comes before ours takes long.
const CERTAIN_TO_ACT: Duration = Duration::from_secs(30);
/// How long a look waits for another call in the same namespace: whoever is in there can hold its lock, and
/// keep all other pods waiting.
const PATIENCE: Duration = Duration::from_secs(1);

/// What repairs are made with.
#[derive(Debug)]
pub(super) struct Means {
    pub(super) settings: Settings,
    /// Where the plugin is installed.
    pub(super) node: Node,
    /// Who changes objects of the cluster.
    pub(super) account: ServiceAccount,
    pub(super) metrics: Metrics,
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

/// A round.
pub(super) struct Round<'a> {
    means: &'a Means,
    installed: &'a Installed,
    /// When it began, for the pods and by the clock.
    begun: (Instant, Instant),
    deletions: &'a mut Deletions,
    /// One look at the node serves all pods.
    node: Option<find::Node>,
    /// What is told when all is done: an API that is away keeps no pod waiting.
    news: Vec<(Arc<KnownPod>, Event)>,
    /// How many would have been deleted, had not so many been of late.
    put_off: usize,
}

impl<'a> Round<'a> {
    /// One that has not looked at any pod yet.
    pub(super) fn new(means: &'a Means, installed: &'a Installed, deletions: &'a mut Deletions, now: Instant) -> Self {
        Self { means, installed, begun: (now, Instant::now()), deletions, node: None, news: Vec::new(), put_off: 0 }
    }

    /// Looks at a pod, and gives what was done.
    pub(super) fn look_at(&mut self, watched: &mut Watched) -> Option<Done> {
        let known = Arc::clone(&watched.known);
        let Some(suspicion) = suspect(&self.means.settings.criteria, self.installed, &known) else {
            watched.rest();
            return None;
        };
        let stood = if suspicion.settled { self.stand(watched) } else { Ok(None) };
        // Pods before it, and its own look, may have taken long.
        let now = self.begun.0 + self.begun.1.elapsed();
        let error = stood.as_ref().err();
        watched.complain(error);
        watched.note_look(error, now);
        if let Some(error) = error {
            self.means.metrics.look_failure(error.code.name());
            if watched.is_to_be_reported(Some(error), now) {
                self.news.push((Arc::clone(&known), action::unreadable(error)));
            }
        }
        let cause = diagnose(suspicion, stood.ok().flatten().as_ref());
        let certain = if self.means.settings.mode == Mode::InPlace { CERTAIN } else { CERTAIN_TO_ACT };
        if !watched.note(cause, self.interval(&known), certain, now) {
            watched.postpone();
            return None;
        }
        let cause = cause?;
        if suspicion.redirectable
            && self.may_delete(&watched.tries)
            && let Some(then) = self.deletions.put_off(now)
        {
            self.put_off += 1;
            watched.wake(Some(then));
            return None;
        }
        if cause == Cause::Drift {
            self.means.metrics.drift();
        }
        watched.tries.note(cause, now);
        watched.wake(watched.tries.next());
        let case = Case { installed: self.installed, known: &known, suspicion, cause };
        let (mode, outcome) = self.act(&case, watched.tries.are_spent());
        if mode == Mode::Delete && known.owned && suspicion.redirectable {
            self.deletions.note(now);
        }
        if let Some(event) = action::event(cause, &outcome) {
            let pod = name(&known);
            match outcome {
                Outcome::Failed(_) => tracing::warn!(pod, "{}", event.message),
                _ => tracing::info!(pod, "{}", event.message),
            }
            // Of failures the first is told, and the last.
            let between = watched.tries.count() > 1 && !watched.tries.are_spent();
            if !(event.warning && between && matches!(outcome, Outcome::Failed(_))) {
                self.news.push((Arc::clone(&known), event));
            }
        }
        Some(Done { pod: name(&known), cause, mode, outcome })
    }

    /// Tells the cluster what was done.
    pub(super) fn tell(self) {
        if self.put_off > 0 {
            tracing::warn!("{} pods are deleted later, for many were of late: are new pods redirected?", self.put_off);
        }
        for (known, event) in self.news {
            match self.means.account.tell(&known.pod, &event) {
                Err(error) if error.code == Code::TryAgain => return tracing::warn!("events are lost: {error}"),
                Err(error) => tracing::warn!("{error}"),
                Ok(()) => {}
            }
        }
    }

    /// Does what is to be done, and in the last of all tries what is to be done otherwise. Drift is undone in
    /// place first: another version of the plugin may write the same rules differently, and no pod is to end
    /// for that.
    fn act(&self, case: &Case<'_>, is_last: bool) -> (Mode, Outcome) {
        let (mode, otherwise) = (self.means.settings.mode, self.means.settings.otherwise);
        if case.cause == Cause::Drift && mode != Mode::InPlace {
            let outcome = self.perform(Mode::InPlace, case);
            return match outcome {
                Outcome::Failed(_) => (mode, self.perform(mode, case)),
                outcome => (Mode::InPlace, outcome),
            };
        }
        let outcome = self.perform(mode, case);
        if mode != Mode::InPlace || !is_last {
            return (mode, outcome);
        }
        match (outcome.after_all(), otherwise) {
            // Rules that are right would be the same in a new pod.
            (failed, Some(Mode::Delete)) if outcome == Outcome::NothingToDo => (mode, failed),
            (Outcome::Failed(_), Some(otherwise)) => (otherwise, self.perform(otherwise, case)),
            (outcome, _) => (mode, outcome),
        }
    }

    fn perform(&self, mode: Mode, case: &Case<'_>) -> Outcome {
        let Means { settings, account, metrics, .. } = self.means;
        let performed = match mode {
            // Found anew: what was found for a look may have gone since.
            Mode::InPlace => self.find(case.known).and_then(|found| in_place::repair(case, &found)),
            Mode::Delete => action::delete(account, case),
            Mode::Label => action::label(account, case.known, &settings.label),
        };
        let outcome = performed.unwrap_or_else(|error| Outcome::Failed(error.to_string()));
        metrics.repair(mode.name(), outcome.name());
        outcome
    }

    fn find(&self, known: &KnownPod) -> Result<Found, Error> {
        let uid = known.pod.uid_on_node().unwrap_or_default();
        let unknown = || Error::new(Code::InvalidNetns, "no network namespace of the pod is known on this node");
        find::of_pod(self.means.node.root(), uid)?.ok_or_else(unknown)
    }

    /// Whether the next try may end the pod.
    fn may_delete(&self, tries: &Tries) -> bool {
        let Settings { mode, otherwise, .. } = &self.means.settings;
        *mode == Mode::Delete || (*otherwise == Some(Mode::Delete) && tries.is_last_next())
    }

    /// What the pod's namespace holds; `None` where it has none that is known.
    fn stand(&mut self, watched: &mut Watched) -> Result<Option<Standing>, Error> {
        watched.place.take_if(|place| !place.is_there());
        if watched.place.is_none() {
            let node = match &mut self.node {
                Some(node) => node,
                None => self.node.insert(find::Node::look(self.means.node.root())?),
            };
            let found = node.of_pod(watched.known.pod.uid_on_node().unwrap_or_default())?;
            found.as_ref().map(|found| in_place::confirm(found, &watched.known, PATIENCE)).transpose()?;
            watched.place = found.as_ref().and_then(Place::of);
        }
        watched.place.as_ref().map(|place| plugin::standing(&place.container_id, &place.netns, PATIENCE)).transpose()
    }

    /// How long rules that are right are left alone: up to the whole interval, each pod another part of it,
    /// lest all be looked at at once.
    fn interval(&self, known: &KnownPod) -> Option<Duration> {
        let interval = Some(self.means.settings.interval).filter(|interval| !interval.is_zero())?;
        let part = BuildHasherDefault::<DefaultHasher>::default().hash_one(&known.pod.uid) % 1000;
        Some(interval / 2 + interval / 2 * u32::try_from(part).unwrap_or(0) / 1000)
    }
}

fn name(known: &KnownPod) -> String {
    format!("{}/{}", known.pod.namespace, known.pod.name)
}
