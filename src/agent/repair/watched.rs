//! What is remembered of a pod between two looks.

use super::retry_budget::RetryBudget;
use super::{Cause, ObservedPod};
use crate::cni::{Code, Error};
use crate::netns::find::FoundNetns;
use crate::netns::{NetNs, NetnsId};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A pod that changes often, as one in a crash loop does, is not looked at more often than this.
const GAP: Duration = Duration::from_secs(5);
/// How long a pod is not looked at after its rules could not be; with each time in a row, twice as long.
const PAUSE: Duration = Duration::from_secs(15);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// How many times in a row are reported, if it may be a coincidence.
const LASTING: u32 = 5;
const BETWEEN_REPORTS: Duration = Duration::from_secs(3600);

/// A pod that is looked after.
#[derive(Debug)]
pub(super) struct WatchedPod {
    /// As it was known last.
    pub(super) known: Arc<ObservedPod>,
    /// When it is looked at next; `None`: when it changes.
    pub(super) due: Option<Instant>,
    looked: Option<Instant>,
    suspected: Option<Instant>,
    pub(super) tries: RetryBudget,
    pub(super) place: Option<NetnsLocation>,
    /// Why its rules could not be looked at the last time.
    said: Option<String>,
    /// How many times in a row they could not.
    failures: u32,
    /// It is not looked at before, even if it changes.
    not_before: Option<Instant>,
    /// When an event about that was recorded last.
    reported: Option<Instant>,
}

/// Where a pod's namespace was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NetnsLocation {
    pub(super) netns: PathBuf,
    pub(super) id: NetnsId,
    pub(super) container_id: String,
}

impl NetnsLocation {
    /// Where it is; `None` where its container is not known.
    pub(super) fn of(found: &FoundNetns) -> Option<Self> {
        let id = NetNs::open(&found.netns).ok().flatten()?.id();
        Some(Self { netns: found.netns.clone(), id, container_id: found.container_id.clone()? })
    }

    /// Whether what is there still is what was found.
    pub(super) fn is_there(&self) -> bool {
        NetNs::open(&self.netns).is_ok_and(|there| there.is_some_and(|there| there.id() == self.id))
    }
}

impl WatchedPod {
    /// One that is new.
    pub(super) fn new(known: Arc<ObservedPod>, due: Instant) -> Self {
        let tries = RetryBudget::default();
        Self {
            known,
            due: Some(due),
            looked: None,
            suspected: None,
            tries,
            place: None,
            said: None,
            failures: 0,
            not_before: None,
            reported: None,
        }
    }

    /// Takes it as it is known now. One that has changed is looked at soon.
    pub(super) fn update(&mut self, known: &Arc<ObservedPod>, now: Instant) {
        if !Arc::ptr_eq(&self.known, known) {
            self.known = Arc::clone(known);
            let soon = self.looked.map_or(now, |looked| now.max(looked + GAP));
            let soon = self.not_before.map_or(soon, |then| soon.max(then));
            self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
        }
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Notes a look that found `cause`; the next is after `interval`, or sooner where something is to be
    /// done. Gives whether that is to be done now: a pod without rules must be so for as long as `certain`.
    pub(super) fn note(
        &mut self,
        cause: Option<Cause>,
        interval: Option<Duration>,
        certain: Duration,
        now: Instant,
    ) -> bool {
        self.looked = Some(now);
        self.due = interval.map(|interval| now + interval);
        let Some(cause) = cause else {
            self.suspected = None;
            return false;
        };
        let since = *self.suspected.get_or_insert(now);
        if cause == Cause::NoRules && now < since + certain {
            self.due = Some(since + certain);
            return false;
        }
        let may = self.tries.may(now);
        if !may {
            self.wake(self.tries.next());
        }
        may
    }

    /// Nothing is to be done until it changes.
    pub(super) fn rest(&mut self) {
        (self.due, self.suspected) = (None, None);
    }

    /// Has it looked at by then.
    pub(super) fn wake(&mut self, then: Option<Instant>) {
        self.due = self.due.into_iter().chain(then).min();
    }

    /// Notes whether the rules could be looked at, as far as the pod's own processes decide that: then the
    /// pauses get longer, so that they can't take the time of other pods.
    pub(super) fn note_look(&mut self, error: Option<&Error>, now: Instant) {
        let is_its_own = error.is_some_and(|error| matches!(error.code, Code::TryAgain | Code::ForeignRules));
        self.failures = if is_its_own { self.failures.saturating_add(1) } else { 0 };
        self.not_before = is_its_own.then(|| now + (PAUSE * 2_u32.pow(self.failures.min(10) - 1)).min(LONGEST_PAUSE));
    }

    /// Has it looked at no sooner than its failures allow.
    pub(super) fn postpone(&mut self) {
        self.due = self.not_before.or(self.due);
    }

    /// Whether an event is to be recorded of what keeps the rules from being looked at.
    pub(super) fn is_to_be_reported(&mut self, error: Option<&Error>, now: Instant) -> bool {
        let too_many = error.is_some_and(|error| error.code == Code::ForeignRules);
        let is_due = self.reported.is_none_or(|reported| now.duration_since(reported) >= BETWEEN_REPORTS);
        let report = (too_many || self.failures >= LASTING) && is_due;
        if report {
            self.reported = Some(now);
        }
        report
    }

    /// Says why its rules can't be looked at, where that is news.
    pub(super) fn complain(&mut self, error: Option<&Error>) {
        let said = error.map(ToString::to_string);
        if let Some(why) = said.as_ref().filter(|_| said != self.said) {
            let pod = &self.known.pod;
            tracing::warn!("pod {}/{}: its rules can't be looked at: {why}", pod.namespace, pod.name);
        }
        self.said = said;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const CERTAIN: Duration = Duration::from_secs(3);
    const MINUTE: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn one_that_changes_often_is_looked_at_now_and_then() {
        let (now, known) = (Instant::now(), Arc::new(ObservedPod::default()));
        let mut watched = WatchedPod::new(Arc::clone(&known), now);
        assert!(watched.is_due(now) && !watched.note(None, MINUTE, CERTAIN, now));
        watched.update(&known, now + SECOND);
        assert!(!watched.is_due(now + 59 * SECOND) && watched.is_due(now + 60 * SECOND));
        for second in 1..4 {
            watched.update(&Arc::new(ObservedPod::default()), now + second * SECOND);
        }
        assert!(!watched.is_due(now + 4 * SECOND) && watched.is_due(now + GAP));
    }

    #[test]
    fn one_that_holds_too_much_is_looked_at_ever_more_rarely_even_if_it_changes() {
        let (start, error) = (Instant::now(), Error::new(Code::ForeignRules, "too many rules"));
        let (mut watched, mut now, mut pauses) = (WatchedPod::new(Arc::default(), start), start, Vec::new());
        for _ in 0..8 {
            watched.note_look(Some(&error), now);
            watched.note(None, MINUTE, CERTAIN, now);
            watched.postpone();
            watched.update(&Arc::new(ObservedPod::default()), now + SECOND);
            let next = watched.due.expect("it is looked at again");
            pauses.push((next - now).as_secs());
            now = next;
        }
        assert_eq!(pauses, [15, 30, 60, 120, 240, 480, 600, 600]);
        watched.note_look(None, now);
        watched.note(None, MINUTE, CERTAIN, now);
        watched.postpone();
        assert_eq!(watched.due, Some(now + 60 * SECOND));
    }

    #[test]
    fn what_keeps_rules_from_being_looked_at_is_reported_once_an_hour() {
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let (many, busy) = (Error::new(Code::ForeignRules, "too many"), Error::new(Code::TryAgain, "busy"));
        let mut watched = WatchedPod::new(Arc::default(), now);
        assert!(!watched.is_to_be_reported(None, now));
        assert!(watched.is_to_be_reported(Some(&many), now) && !watched.is_to_be_reported(Some(&many), now + SECOND));
        assert!(watched.is_to_be_reported(Some(&many), now + hour));
        let mut watched = WatchedPod::new(Arc::default(), now);
        let reports = (0..6).filter(|_| {
            watched.note_look(Some(&busy), now);
            watched.is_to_be_reported(Some(&busy), now)
        });
        assert_eq!(reports.count(), 1, "after several times in a row");
    }

    #[test]
    fn one_without_rules_must_be_so_for_a_while() {
        let now = Instant::now();
        let mut watched = WatchedPod::new(Arc::default(), now);
        assert!(!watched.note(Some(Cause::NoRules), None, CERTAIN, now) && watched.is_due(now + CERTAIN));
        assert!(!watched.note(None, None, CERTAIN, now + SECOND), "a runtime was at work");
        assert!(!watched.note(Some(Cause::NoRules), None, CERTAIN, now + CERTAIN));
        assert!(watched.note(Some(Cause::NoRules), None, CERTAIN, now + 2 * CERTAIN));
        assert!(
            watched.note(Some(Cause::Drift), None, CERTAIN, now + 2 * CERTAIN),
            "what is lost is given back at once"
        );
    }
}
