//! Which pod sandbox of the saved state a pod has now.

use crate::agent::facts::ObservedPod;
use crate::host_path::HostRoot;
use crate::plugin::running::live_policy::RunningPod;
use std::collections::BTreeMap;

/// The pod sandboxes with saved state by the namespaces and names of their pods.
pub(super) struct Sandboxes(BTreeMap<(String, String), Vec<RunningPod>>);

impl Sandboxes {
    pub(super) fn new(running: Vec<RunningPod>) -> Self {
        let mut by_pod: BTreeMap<_, Vec<RunningPod>> = BTreeMap::new();
        for sandbox in running {
            if let Some(pod) = sandbox.pod.clone() {
                by_pod.entry((pod.namespace, pod.name)).or_default().push(sandbox);
            }
        }
        Self(by_pod)
    }

    /// Returns the sandbox of a pod; `None` without saved state. While a previous sandbox is removed, there are two, and
    /// the newer one is the pod's.
    pub(super) fn of(&self, observed: &ObservedPod, root: &HostRoot) -> Option<&RunningPod> {
        let pod = &observed.pod;
        let of_name = self.0.get(&(pod.namespace.clone(), pod.name.clone())).into_iter().flatten();
        let of_pod = of_name.filter(|running| running.pod.as_ref().is_some_and(|named| pod.matches(named)));
        let present = of_pod.filter(|running| running.is_present(root));
        present.max_by_key(|running| running.added_since_boot())
    }
}
