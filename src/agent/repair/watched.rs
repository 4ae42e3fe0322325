//! What is remembered of a pod between two looks.

use super::tries::Tries;
use super::{Cause, KnownPod};
use crate::cni::Error;
use crate::sandbox::find::Found;
use crate::sandbox::{Id, Sandbox};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A pod that changes often, as one in a crash loop does, is not looked at more often than this.
const GAP: Duration = Duration::from_secs(5);
/// A pod that is looked after.
#[derive(Debug)]
pub(super) struct Watched {
    /// As it was known last.
    pub(super) known: Arc<KnownPod>,
    /// When it is looked at next; `None`: when it changes.
    pub(super) due: Option<Instant>,
    looked: Option<Instant>,
    suspected: Option<Instant>,
    pub(super) tries: Tries,
    pub(super) place: Option<Place>,
    /// Why its rules could not be looked at the last time.
    said: Option<String>,
}

/// Where a pod's namespace was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) netns: PathBuf,
    pub(super) id: Id,
    pub(super) container_id: String,
}

impl Place {
    /// Where it is; `None` where its container is not known.
    pub(super) fn of(found: &Found) -> Option<Self> {
        let id = Sandbox::open(&found.netns).ok().flatten()?.id();
        Some(Self { netns: found.netns.clone(), id, container_id: found.container_id.clone()? })
    }

    /// Whether what is there still is what was found.
    pub(super) fn is_there(&self) -> bool {
        Sandbox::open(&self.netns).is_ok_and(|there| there.is_some_and(|there| there.id() == self.id))
    }
}

impl Watched {
    /// One that is new.
    pub(super) fn new(known: Arc<KnownPod>, due: Instant) -> Self {
        let tries = Tries::default();
        Self { known, due: Some(due), looked: None, suspected: None, tries, place: None, said: None }
    }

    /// Takes it as it is known now. One that has changed is looked at soon.
    pub(super) fn update(&mut self, known: &Arc<KnownPod>, now: Instant) {
        if !Arc::ptr_eq(&self.known, known) {
            self.known = Arc::clone(known);
            let soon = self.looked.map_or(now, |looked| now.max(looked + GAP));
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
        let (now, known) = (Instant::now(), Arc::new(KnownPod::default()));
        let mut watched = Watched::new(Arc::clone(&known), now);
        assert!(watched.is_due(now) && !watched.note(None, MINUTE, CERTAIN, now));
        watched.update(&known, now + SECOND);
        assert!(!watched.is_due(now + 59 * SECOND) && watched.is_due(now + 60 * SECOND));
        for second in 1..4 {
            watched.update(&Arc::new(KnownPod::default()), now + second * SECOND);
        }
        assert!(!watched.is_due(now + 4 * SECOND) && watched.is_due(now + GAP));
    }

    #[test]
    fn one_without_rules_must_be_so_for_a_while() {
        let now = Instant::now();
        let mut watched = Watched::new(Arc::default(), now);
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
