//! Repair without harm: the pod runs on, and has its rules.

use super::{Cause, ObservedPod, RepairCase, RepairOutcome};
use crate::cni::{Code, DEFAULT_INTERFACE, Error, Request};
use crate::netns::find::FoundNetns;
use crate::plugin::{self, ContainerStatus};
use std::time::Duration;

/// How long a call of the plugin in the same namespace is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Makes the pod's rules what they should be, and reads them back. It takes as long as the calls of the plugin that it makes, each of which has a limit.
///
/// # Errors
/// Why they are not; then nothing of this is left.
pub(super) fn repair(case: &RepairCase<'_>, found: &FoundNetns) -> Result<RepairOutcome, Error> {
    let RepairCase { known, suspicion, cause, .. } = case;
    let evidence = &found.evidence;
    let Some(container_id) = found.container_id.as_deref() else {
        let msg =
            format!("the container ID of its sandbox is not known ({evidence}), so that no ADD can be made for it");
        return Err(Error::new(Code::InvalidNetns, msg));
    };
    confirm(found, known, PATIENCE)?;
    let before = plugin::container_status(container_id, &found.netns, PATIENCE)?;
    if !before.drift.is_empty() {
        plugin::restore(container_id, &found.netns)?;
    } else if before.redirected && before.attachments.is_empty() {
        let msg = "another tool redirects it, and its rules stay: see what made them";
        return Err(Error::new(Code::ForeignRules, msg));
    } else if before.redirected || *cause == Cause::Drift {
        return Ok(RepairOutcome::NothingToDo);
    } else if !suspicion.redirectable {
        let msg = "the plugin, as it is configured on this node, would not redirect it: see detour explain";
        return Err(Error::new(Code::InvalidConfig, msg));
    } else {
        add(case, found, container_id, &before)?;
    }
    let after = plugin::container_status(container_id, &found.netns, PATIENCE)?;
    if let Some(difference) = after.drift.first() {
        return Err(Error::new(Code::Drift, "its rules are not what they should be even now").with_details(difference));
    }
    if *cause != Cause::Drift && !after.redirected {
        return Err(Error::new(Code::Drift, "ADD has been made, and the pod is not redirected: see detour explain"));
    }
    match plugin::bypassing(container_id, &found.netns, PATIENCE) {
        Ok(0) => Ok(RepairOutcome::Repaired),
        Ok(older) => Ok(RepairOutcome::RepairedForNew { older }),
        Err(error) => {
            let pod = &known.pod;
            tracing::warn!(
                "pod {}/{}: connections that bypass the sidecar are not counted: {error}",
                pod.namespace,
                pod.name
            );
            Ok(RepairOutcome::Repaired)
        }
    }
}

/// Holds what was found against what the cluster says: a pod's sandbox may have gone, and the addresses
/// be those of the last one until all ADDs for the next are over. Waits as [`plugin::container_status`] does.
///
/// # Errors
/// Its namespace holds none of the pod's addresses, or can't be looked at.
pub(super) fn confirm(found: &FoundNetns, known: &ObservedPod, patience: Duration) -> Result<(), Error> {
    if known.addresses.is_empty() || found.holds(&known.addresses, patience)? {
        return Ok(());
    }
    let msg = format!("the network namespace that was found holds none of the pod's addresses: {}", found.evidence);
    Err(Error::new(Code::InvalidNetns, msg))
}

fn add(case: &RepairCase<'_>, found: &FoundNetns, container_id: &str, before: &ContainerStatus) -> Result<(), Error> {
    let mut conf = case.installed.conf.clone();
    let attached = before.attachments.iter().find(|attachment| attachment.network == conf.name);
    let kept = found.attachments.iter().find(|kept| kept.network == conf.name);
    // As the runtime would hand it over; another version's would be refused.
    let result = kept.map(|kept| &kept.result).filter(|result| result["cniVersion"] == conf.cni_version.as_str());
    conf.prev_result = result.cloned().or(conf.prev_result);
    let ifname = attached.map(|attachment| &attachment.ifname).or(kept.map(|kept| &kept.ifname));
    let pod = &case.known.pod;
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
            "CNI_IFNAME" => ifname.map_or(DEFAULT_INTERFACE, String::as_str),
            "CNI_ARGS" => &args,
            // No executable is run.
            "CNI_PATH" => "/",
            _ => return None,
        };
        Some(value.to_owned())
    })?;
    plugin::run(&request, &conf).map(drop)
}
