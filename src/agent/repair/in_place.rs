//! Repair in place: the pod keeps running and gets its rules from the plugin, by its ADD or from its saved state.

use super::action::{RepairCase, RepairOutcome};
use super::decision::Cause;
use crate::agent::facts::ObservedPod;
use crate::cni::{Code, DEFAULT_INTERFACE, Error, Request};
use crate::netns::find::FoundNetns;
use crate::plugin::{self, ContainerStatus};
use std::time::Duration;

/// How long another call of the plugin in the same network namespace is waited for.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Restores the pod's desired rules, and reads them back from the kernel. Each call of the plugin has its own timeout.
///
/// # Errors
/// The rules can't be restored. Then no partial change is left.
pub(super) fn repair(case: &RepairCase<'_>, found: &FoundNetns) -> Result<RepairOutcome, Error> {
    let RepairCase { observed, suspicion, cause, .. } = case;
    let evidence = &found.evidence;
    let Some(container_id) = found.container_id.as_deref() else {
        let msg = format!("can't call ADD: the container ID of the pod sandbox is unknown ({evidence})");
        return Err(Error::new(Code::InvalidNetns, msg));
    };
    confirm(found, observed, LOCK_TIMEOUT)?;
    let before = plugin::container_status(container_id, &found.netns, LOCK_TIMEOUT)?;
    if !before.drift.is_empty() {
        plugin::restore(container_id, &found.netns)?;
    } else if before.redirected && before.attachments.is_empty() {
        let msg = "another tool redirects the pod, and its rules are not changed; check which tool created them";
        return Err(Error::new(Code::ForeignRules, msg));
    } else if before.redirected || *cause == Cause::Drift {
        return Ok(RepairOutcome::NothingToDo);
    } else if !suspicion.redirectable {
        let msg = "with this node's configuration, the plugin would not redirect the pod; run detour explain";
        return Err(Error::new(Code::InvalidConfig, msg));
    } else {
        add(case, found, container_id, &before)?;
    }
    let after = plugin::container_status(container_id, &found.netns, LOCK_TIMEOUT)?;
    if let Some(difference) = after.drift.first() {
        return Err(Error::new(Code::Drift, "the pod's rules still differ after the repair").with_details(difference));
    }
    if *cause != Cause::Drift && !after.redirected {
        return Err(Error::new(Code::Drift, "the pod is not redirected after a successful ADD; run detour explain"));
    }
    match plugin::bypassing(container_id, &found.netns, LOCK_TIMEOUT) {
        Ok(0) => Ok(RepairOutcome::Repaired),
        Ok(older) => Ok(RepairOutcome::RepairedForNew { older }),
        Err(error) => {
            let pod = &observed.pod;
            tracing::warn!(
                "pod {}/{}: can't count the connections that bypass the sidecar: {error}",
                pod.namespace,
                pod.name
            );
            Ok(RepairOutcome::Repaired)
        }
    }
}

/// Checks that the network namespace has one of the pod's addresses. A sandbox that was found may be a previous one, and
/// the addresses are those of the previous sandbox until all ADD calls for the new one have returned. Waits for the
/// namespace's lock as [`plugin::container_status`] does.
///
/// # Errors
/// The network namespace has none of the addresses, the pod has no address yet, or the namespace can't be read.
pub(super) fn confirm(found: &FoundNetns, observed: &ObservedPod, lock_timeout: Duration) -> Result<(), Error> {
    if found.has_any_address(&observed.addresses, lock_timeout)? {
        return Ok(());
    }
    let msg = format!("the network namespace that was found has none of the pod's addresses: {}", found.evidence);
    Err(Error::new(Code::InvalidNetns, msg))
}

/// Calls the plugin's ADD as the runtime would.
fn add(case: &RepairCase<'_>, found: &FoundNetns, container_id: &str, before: &ContainerStatus) -> Result<(), Error> {
    let mut conf = case.installed.conf.clone();
    let attached = before.attachments.iter().find(|attachment| attachment.network == conf.name);
    let cached = found.attachments.iter().find(|cached| cached.network == conf.name);
    // The plugin would refuse the runtime's cached result if it had another version.
    let result = cached.map(|cached| &cached.result).filter(|result| result["cniVersion"] == conf.cni_version.as_str());
    conf.prev_result = result.cloned().or(conf.prev_result);
    let ifname = attached.map(|attachment| &attachment.ifname).or(cached.map(|cached| &cached.ifname));
    let pod = &case.observed.pod;
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
            // Required, and unused: the configuration has no executables.
            "CNI_PATH" => "/",
            _ => return None,
        };
        Some(value.to_owned())
    })?;
    plugin::run(&request, &conf).map(drop)
}
