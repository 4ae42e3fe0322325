//! The rules of a pod without saved state: the plugin's first ADD in its network namespace, or the deletion of the pod.

use super::suspicion::Suspicion;
use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::cni::{Code, DEFAULT_INTERFACE, Error, OutsideBounds, Request};
use crate::netns::find::FoundNetns;
use crate::plugin;
use crate::plugin::running::{self, ContainerStatus};
use std::path::Path;
use std::time::Duration;

/// How long another call of the plugin in a network namespace is waited for: a process in there can hold its lock.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Checks that the pod may be deleted.
///
/// # Errors
/// No controller would create a new pod, or the new one could not be redirected either.
pub(super) fn check_deletable(observed: &ObservedPod, suspicion: Suspicion) -> Result<(), Error> {
    let obstacle = if !suspicion.redirectable {
        "not deleted: with this node's configuration, the plugin would not redirect a new pod either; run detour explain"
    } else if !observed.owned {
        "not deleted: it has no controller that would create a new pod; delete it manually"
    } else {
        return Ok(());
    };
    Err(Error::new(Code::InvalidConfig, obstacle))
}

/// Calls the plugin's ADD in the network namespace that was found, and reads the rules back from the kernel. Returns the
/// number of older connections that bypass the sidecar.
///
/// # Errors
/// The rules can't be created. Then no partial change is left.
pub(super) fn add(
    observed: &ObservedPod,
    (installed, suspicion): (&Installed, Suspicion),
    (found, before): (Option<FoundNetns>, Option<ContainerStatus>),
) -> Result<usize, Error> {
    let missing = || Error::new(Code::InvalidNetns, "no network namespace of the pod was found on this node");
    let found = found.ok_or_else(missing)?;
    let (Some(container_id), Some(before)) = (found.container_id.as_deref(), before) else {
        let msg = format!("can't call ADD: the container ID of the pod sandbox is unknown ({})", found.evidence);
        return Err(Error::new(Code::InvalidNetns, msg));
    };
    if before.redirected {
        let msg = "another tool redirects the pod, and its rules are not changed; check which tool created them";
        return Err(Error::new(Code::ForeignRules, msg));
    }
    if !suspicion.redirectable {
        let msg = "with this node's configuration, the plugin would not redirect the pod; run detour explain";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    call_add(observed, installed, &found, container_id)?;
    let after = running::container_status(container_id, &found.netns, LOCK_TIMEOUT)?;
    if !after.is_right() {
        let error = Error::new(Code::Drift, "the pod is not redirected after a successful ADD; run detour explain");
        return Err(error.with_details(after.drift.join("; ")));
    }
    Ok(older_connections(observed, container_id, &found.netns))
}

/// Calls the plugin's ADD as the runtime would.
fn call_add(
    observed: &ObservedPod,
    installed: &Installed,
    found: &FoundNetns,
    container_id: &str,
) -> Result<(), Error> {
    let mut conf = installed.conf.clone();
    // A pod that runs already is redirected, without its requests outside the bounds.
    conf.bounds.outside = OutsideBounds::Ignore;
    let cached = found.attachments.iter().find(|cached| cached.network == conf.name);
    // The plugin would reject the runtime's cached result if it had another version.
    let result = cached.map(|cached| &cached.result).filter(|result| result["cniVersion"] == conf.cni_version.as_str());
    conf.prev_result = result.cloned().or(conf.prev_result);
    let pod = &observed.pod;
    let args = format!(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={container_id};K8S_POD_UID={}",
        pod.namespace,
        pod.name,
        pod.uid_on_node().unwrap_or_default()
    );
    let request = Request::parse(|name| {
        let value = match name {
            "CNI_COMMAND" => "ADD",
            "CNI_CONTAINERID" => container_id,
            "CNI_NETNS" => found.netns.to_str()?,
            "CNI_IFNAME" => cached.map_or(DEFAULT_INTERFACE, |cached| &cached.ifname),
            "CNI_ARGS" => &args,
            // Required, and unused: the configuration has no executables.
            "CNI_PATH" => "/",
            _ => return None,
        };
        Some(value.to_owned())
    })?;
    plugin::run(&request, &conf).map(drop)
}

/// Counts the connections that are older than the rules and bypass the sidecar.
pub(super) fn older_connections(observed: &ObservedPod, container_id: &str, netns: &Path) -> usize {
    running::bypassing(container_id, netns, LOCK_TIMEOUT).unwrap_or_else(|error| {
        let pod = observed.full_name();
        tracing::warn!("pod {pod}: can't count the connections that bypass the sidecar: {error}");
        0
    })
}
