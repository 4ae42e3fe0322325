//! Which pod sandbox of the saved state a pod has now.

use crate::agent::facts::ObservedPod;
use crate::host_path::HostRoot;
use crate::netns::find;
use crate::plugin::live_policy::RunningPod;
use crate::pod::PodRef;
use std::collections::BTreeMap;

/// The containers with saved state by the namespaces and names of their pods.
pub(super) type Sandboxes = BTreeMap<(String, String), Vec<RunningPod>>;

/// Returns the containers with saved state by the namespaces and names of their pods. `unnamed` has the pods of
/// containers whose records do not contain them, as far as they were searched.
pub(super) fn by_pod(
    running: Vec<RunningPod>,
    unnamed: &mut BTreeMap<String, Option<PodRef>>,
    root: &HostRoot,
) -> Sandboxes {
    let mut by_pod: BTreeMap<_, Vec<RunningPod>> = BTreeMap::new();
    let (mut known, mut found) = (std::mem::take(unnamed), None);
    for mut container in running {
        if container.pod.is_none() && container.has_rules() {
            let id = container.container_id.clone();
            // Read once for all of them, which are many after an upgrade.
            let mut find =
                || found.get_or_insert_with(|| find::sandbox_pods(root).unwrap_or_default()).get(&id).cloned();
            let pod = known.remove(&id).unwrap_or_else(&mut find);
            container.pod.clone_from(&pod);
            unnamed.insert(id, pod);
        }
        if let Some(PodRef { namespace, name, .. }) = container.pod.clone() {
            by_pod.entry((namespace, name)).or_default().push(container);
        }
    }
    by_pod
}

/// Returns the sandbox of a pod; `None` without saved state. While a previous sandbox is removed, there are two, and the
/// newer one is the pod's.
pub(super) fn current_sandbox<'a>(
    sandboxes: &'a Sandboxes,
    observed: &ObservedPod,
    root: &HostRoot,
) -> Option<&'a RunningPod> {
    let pod = &observed.pod;
    let of_name = sandboxes.get(&(pod.namespace.clone(), pod.name.clone())).into_iter().flatten();
    let of_pod = of_name.filter(|running| running.pod.as_ref().is_some_and(|named| pod.matches(named)));
    let present = of_pod.filter(|running| running.is_present(root));
    present.max_by_key(|running| running.added_since_boot())
}
