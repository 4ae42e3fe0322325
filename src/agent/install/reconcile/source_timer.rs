//! How long the source of an own list is unusable.

use super::cluster_list::SOURCE_TIMEOUT;
use super::reconcile;
use crate::agent::install::error::InstallError;
use crate::agent::install::plan::InstallPlan;
use crate::agent::install::state::{DesiredState, FoundState};
use crate::agent::install::target;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A timer that runs while the source of the own list is unusable.
#[derive(Debug, Default)]
pub struct SourceTimer {
    since: Option<Instant>,
    left: Option<Duration>,
    /// The lists that were usable at the last look.
    usable: BTreeSet<String>,
    /// Those that became unusable since, and when.
    lost: BTreeMap<String, Instant>,
}

impl SourceTimer {
    /// Returns the plan of [`reconcile`]. While the source of the own list is unusable, the plan keeps the last copy. When
    /// the timer has expired, the plan may replace the source.
    ///
    /// # Errors
    /// As [`reconcile`].
    pub fn plan(&mut self, desired: &DesiredState, mut found: FoundState) -> Result<InstallPlan, InstallError> {
        let now = Instant::now();
        self.look(target::usable(&found.configurations), now);
        let mut plan = reconcile(desired, &found)?;
        if plan.source_timeout.is_none() {
            (self.since, self.left) = (None, None);
            return Ok(plan);
        }
        let left = self.remaining(now);
        if left.is_zero() {
            found.source_expired = true;
            plan = reconcile(desired, &found)?;
            // The timer of another source starts anew.
            self.since.take_if(|_| plan.waits_for.is_none());
        }
        self.left = Some(left).filter(|left| !left.is_zero());
        Ok(plan)
    }

    /// Records which lists are usable now.
    fn look(&mut self, usable: BTreeSet<String>, now: Instant) {
        self.lost.extend(self.usable.difference(&usable).map(|name| (name.clone(), now)));
        self.lost.retain(|name, lost| !usable.contains(name) && now.duration_since(*lost) < SOURCE_TIMEOUT);
        self.usable = usable;
    }

    /// Returns how long the last copy must stay: until the source, and each list that runtimes would prefer to the first
    /// usable one, has been unusable for [`SOURCE_TIMEOUT`]. Another process may just be writing it.
    fn remaining(&mut self, now: Instant) -> Duration {
        let since = *self.since.get_or_insert(now);
        let first = self.usable.first();
        let preferred = self.lost.iter().filter(|(name, _)| first.is_none_or(|first| *name < first));
        let latest = preferred.map(|(_, lost)| *lost).fold(since, Instant::max);
        SOURCE_TIMEOUT.saturating_sub(now.duration_since(latest))
    }

    /// Returns, once for each plan, the time after which the plan must be made again.
    pub fn take_left(&mut self) -> Option<Duration> {
        self.left.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::install::digest::Digest;
    use crate::agent::install::state::{ConfFile, ConfigurationTarget};
    use serde_json::json;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_list_that_is_just_being_written_is_not_passed_over() {
        let (mut timer, start) = (SourceTimer::default(), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        timer.look(names(&["05-a", "10-b", "87-c"]), start);
        // The source 05-a disappears. Before its time is over, 10-b is truncated for a moment.
        timer.look(names(&["10-b", "87-c"]), at(1000));
        assert_eq!(timer.remaining(at(1000)), SOURCE_TIMEOUT);
        timer.look(names(&["87-c"]), at(1400));
        assert_eq!(timer.remaining(at(1500)), Duration::from_millis(400), "87-c does not take over");
        timer.look(names(&["10-b", "87-c"]), at(1600));
        assert_eq!(timer.remaining(at(1600)), Duration::ZERO, "10-b does");
        timer.look(names(&["87-c"]), at(1700));
        timer.look(names(&["87-c"]), at(2200));
        assert_eq!(timer.remaining(at(2200)), Duration::ZERO, "10-b was away for too long");
    }

    #[test]
    fn a_first_own_list_waits_for_a_list_that_is_just_being_written() {
        let desired = DesiredState {
            installer: "a".into(),
            owner: None,
            program: Digest::of(b"program"),
            programs: Vec::new(),
            kubeconfig: None,
            node: None,
            configurations: vec![ConfigurationTarget::Listed {
                dir: "/net.d".parse().expect("a path"),
                file: None,
                entry: json!({"type": "detour"}),
                own_list: true,
            }],
            multus_chain: None,
            expired: None,
        };
        let file = |(name, text): (&str, &str)| ConfFile {
            name: name.into(),
            contents: text.into(),
            mode: 0o600,
            ..ConfFile::default()
        };
        let list = r#"{"name":"n","plugins":[{"type":"bridge"}]}"#;
        let found = |partial| FoundState {
            configurations: [("10-a.conflist", partial), ("87-b.conflist", list)].map(file).into(),
            ..FoundState::default()
        };
        for partial in ["", &list[..20]] {
            let mut timer = SourceTimer::default();
            let plan = timer.plan(&desired, found(partial)).expect("a plan");
            assert!(plan.actions.is_empty() && plan.waits_for.is_some(), "{plan:?}");
            assert!(timer.take_left().is_some_and(|left| left <= SOURCE_TIMEOUT));
            timer.since = timer.since.map(|since| since - SOURCE_TIMEOUT);
            let plan = timer.plan(&desired, found(partial)).expect("a plan");
            assert!(plan.actions.len() == 1 && plan.waits_for.is_none(), "the other list is copied: {plan:?}");
        }
        let invalid = SourceTimer::default().plan(&desired, found("[]")).expect("a plan");
        assert_eq!(invalid.actions.len(), 1, "this list is complete");
    }
}
