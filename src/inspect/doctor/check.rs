//! A check, what it came to, and the list of all.

use super::report::{CheckGroup, ReportLine, CheckOutcome};
use crate::printable::without_userinfo;

/// Something that is looked at.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Check {
    /// How programs know it; stable.
    pub(super) id: &'static str,
    pub(super) group: CheckGroup,
    /// What must hold.
    pub(super) holds: &'static str,
}

impl Check {
    pub(super) const fn of(group: CheckGroup, id: &'static str, holds: &'static str) -> Self {
        Self { id, group, holds }
    }
}

/// What a check came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckVerdict {
    /// It holds; what was found.
    Pass(String),
    /// It does not; what was found, and what to do.
    Fail(String, String),
    /// That can't be told; why, and what to do about that.
    NotChecked(String, Option<String>),
}

impl CheckVerdict {
    pub(super) fn pass(found: impl Into<String>) -> Self {
        Self::Pass(found.into())
    }

    pub(super) fn fail(found: impl Into<String>, next: impl Into<String>) -> Self {
        Self::Fail(found.into(), next.into())
    }

    /// Of several tries of one check: a failure counts, else what was found each time. `none` where
    /// there was no try.
    pub(super) fn all(verdicts: Vec<Self>, none: &str) -> Self {
        let (mut passed, mut failed, mut not_checked) = (Vec::new(), None, None);
        for verdict in verdicts {
            match verdict {
                Self::Pass(found) => passed.push(found),
                Self::Fail(..) => drop(failed.get_or_insert(verdict)),
                Self::NotChecked(..) => drop(not_checked.get_or_insert(verdict)),
            }
        }
        let passed = (!passed.is_empty()).then(|| Self::Pass(passed.join("; ")));
        failed.or(passed).or(not_checked).unwrap_or_else(|| Self::not_checked(none))
    }

    pub(super) fn not_checked(why: impl Into<String>) -> Self {
        Self::NotChecked(why.into(), None)
    }
}

/// The checks that were done, in their order.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) lines: Vec<ReportLine>,
}

impl Results {
    /// Notes what a check came to. A list may be shown to others, so URLs lose their users and passwords.
    pub(super) fn add(&mut self, check: &Check, verdict: CheckVerdict) {
        let (outcome, found, next) = match verdict {
            CheckVerdict::Pass(found) => (CheckOutcome::Pass, found, None),
            CheckVerdict::Fail(found, next) => (CheckOutcome::Fail, found, Some(next)),
            CheckVerdict::NotChecked(why, next) => (CheckOutcome::NotChecked, why, next),
        };
        let (found, next) =
            (without_userinfo(&found).into_owned(), next.map(|next| without_userinfo(&next).into_owned()));
        let Check { id, group, holds } = *check;
        self.lines.push(ReportLine { id, group, checked: holds, outcome, found, next });
    }

    /// Does a check that makes sense only where `needed` all hold.
    pub(super) fn after(&mut self, needed: &[&Check], check: &Check, verdict: impl FnOnce() -> CheckVerdict) {
        let verdict = match self.obstacle(needed) {
            Some(why) => CheckVerdict::not_checked(why),
            None => verdict(),
        };
        self.add(check, verdict);
    }

    /// Whether it was looked at and does not hold.
    pub(super) fn has_failed(&self, check: &Check) -> bool {
        self.lines.iter().any(|line| line.id == check.id && line.outcome == CheckOutcome::Fail)
    }

    /// The first of `needed` that was looked at and is not known to hold.
    pub(super) fn obstacle(&self, needed: &[&Check]) -> Option<String> {
        let bad = |check: &&Check| {
            let line = self.lines.iter().find(|line| line.id == check.id && line.outcome != CheckOutcome::Pass)?;
            let how = if line.outcome == CheckOutcome::Fail { "failed" } else { "was not checked" };
            Some(format!("because {} {how}", line.id))
        };
        needed.iter().find_map(bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Check = Check::of(CheckGroup::Node, "a", "a");
    const B: Check = Check::of(CheckGroup::Node, "b", "b");
    const C: Check = Check::of(CheckGroup::Node, "c", "c");

    #[test]
    fn one_failure_of_several_tries_counts() {
        let (pass, fail) = (|text: &str| CheckVerdict::pass(text), || CheckVerdict::fail("broken", "mend it"));
        let not = || CheckVerdict::not_checked("no route");
        assert_eq!(CheckVerdict::all(vec![pass("a"), fail(), pass("b")], "none"), fail());
        assert_eq!(CheckVerdict::all(vec![pass("a"), not(), pass("b")], "none"), pass("a; b"));
        assert_eq!(CheckVerdict::all(vec![not()], "none"), not());
        assert_eq!(CheckVerdict::all(Vec::new(), "none"), CheckVerdict::not_checked("none"));
    }

    #[test]
    fn urls_are_shown_without_their_user() {
        let mut checkup = Results::default();
        checkup.add(&A, CheckVerdict::fail("https://u:s3cr3t@a failed", "ask http://s3cr3t@b"));
        let line = &checkup.lines[0];
        let shown = (line.found.as_str(), line.next.as_deref());
        assert_eq!(shown, ("https://(redacted)@a failed", Some("ask http://(redacted)@b")));
    }

    #[test]
    fn what_needs_a_check_that_failed_is_not_done() {
        let mut checkup = Results::default();
        checkup.add(&A, CheckVerdict::pass("fine"));
        checkup.after(&[&A], &B, || CheckVerdict::fail("broken", "mend it"));
        checkup.after(&[&A, &B], &C, || unreachable!("b failed"));
        let outcomes: Vec<_> = checkup.lines.iter().map(|line| (line.outcome, line.found.as_str())).collect();
        let wanted = [(CheckOutcome::Pass, "fine"), (CheckOutcome::Fail, "broken"), (CheckOutcome::NotChecked, "because b failed")];
        assert_eq!(outcomes, wanted);
        assert_eq!(checkup.obstacle(&[&C]), Some("because c was not checked".to_owned()));
        assert_eq!(checkup.obstacle(&[&A]), None);
    }
}
