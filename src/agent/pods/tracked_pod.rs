//! A pod of the node: its observed state, and what is known about its rules.

use super::pod_state::{Finding, PodState};
use crate::agent::facts::ObservedPod;
use crate::pod::Namespace;
use std::sync::Arc;
use std::time::Instant;

/// A pod of the node.
#[derive(Debug)]
pub(super) struct TrackedPod {
    pub(super) observed: Arc<ObservedPod>,
    pub(super) namespace: Option<Arc<Namespace>>,
    /// `None` during a pass.
    pub(super) state: Option<PodState>,
    /// What the last pass found.
    pub(super) finding: Finding,
    /// Whether it has changed since the last pass began.
    has_changed: bool,
}

impl TrackedPod {
    /// Creates the state of a new pod.
    pub(super) fn new(observed: Arc<ObservedPod>, now: Instant) -> Self {
        Self {
            observed,
            namespace: None,
            state: Some(PodState::new(now)),
            finding: Finding::Nothing,
            has_changed: false,
        }
    }

    /// Updates the observed states. After a change, a pass is due.
    pub(super) fn update(&mut self, observed: &Arc<ObservedPod>, namespace: Option<Arc<Namespace>>, now: Instant) {
        if !Arc::ptr_eq(&self.observed, observed) || self.namespace != namespace {
            self.observed = Arc::clone(observed);
            self.namespace = namespace;
            self.wake(now);
        }
    }

    /// Ends a pass.
    pub(super) fn finish(&mut self, state: PodState, now: Instant) {
        let state = self.state.insert(state);
        self.finding.clone_from(&state.finding);
        if std::mem::take(&mut self.has_changed) {
            state.changed(now);
        }
    }

    /// Starts a pass soon, because an input has changed.
    pub(super) fn wake(&mut self, now: Instant) {
        match &mut self.state {
            Some(state) => state.changed(now),
            None => self.has_changed = true,
        }
    }

    /// Returns when the next pass is due; `None` to wait for a change.
    pub(super) fn due(&self) -> Option<Instant> {
        self.state.as_ref()?.due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_during_a_pass_leads_to_another_one() {
        let now = Instant::now();
        let mut pod = TrackedPod::new(Arc::default(), now);
        let mut state = pod.state.take().expect("no pass");
        pod.update(&Arc::new(ObservedPod { resource_version: "2".into(), ..ObservedPod::default() }), None, now);
        assert_eq!(pod.due(), None);
        state.rest();
        pod.finish(state, now);
        assert_eq!(pod.due(), Some(now));
    }
}
