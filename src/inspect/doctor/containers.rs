//! Checks of excluded containers: each precondition of a bypass, from the kernel and the runtime to the running
//! container. Nodes and pods that don't use `container-exclude` have none of these checks.

use super::files::has_sub_plugin;
use super::findings::Findings;
use super::report::{AGENT_TIMEOUT, CheckOutcome, CheckTarget, CheckVerdict};
use super::rules::NO_ATTACHMENT;
use crate::cgroup::{self, CgroupHierarchy, enter_host_namespace};
use crate::cluster::agent::{BypassingContainer, ContainersStatus, excluded_containers};
use crate::firewall::{ContainerElement, container_elements};
use crate::host_path::HostRoot;
use crate::inspect::elements::ElementLine;
use crate::inspect::rules::LOCK_TIMEOUT;
use crate::inspect::terminal::first_of;
use crate::plugin::probe::{NOT_PERMITTED, try_container_rules};
use crate::policy::Policy;
use crate::sub_plugins::SubPlugin;
use std::thread;

/// The number of containers and elements that a finding names; the rest is counted.
const NAMED: usize = 3;

const MODULES: &str = "use kernel 5.13 or later with CONFIG_NFT_SOCKET and CONFIG_SOCK_CGROUP_DATA, and load its modules \
    on the node: modprobe -a nf_tables nft_socket nft_ct nft_nat";
const CGROUP: &str = "run doctor as root on a node with cgroup v2; in the agent's pod, containerExclusion.enabled mounts the \
    node's /proc and /sys/fs/cgroup, and grants SYS_ADMIN and SYS_PTRACE";
const NRI: &str = "set the chart value containerExclusion.enabled=true (flag --nri-socket of the agent); enable NRI in the \
    runtime and restart it: containerd: disable = false in [plugins.'io.containerd.nri.v1.nri']; CRI-O: enable_nri = \
    true in [crio.nri]";
const DIFFERENT: &str = "the agent corrects it within 3 s; if it does not, see the agent's log; a process with \
    CAP_NET_ADMIN, possibly in the pod, added a foreign element: find it, and delete the pod";

/// Whether the pod excludes containers, or has elements of excluded ones.
fn is_excluding(findings: &Findings<'_>) -> bool {
    let has_elements = findings.live.as_ref().is_some_and(|(_, report)| report.containers.is_some());
    has_elements || findings.wanted().into_iter().chain(findings.policy()).any(|policy| !policy.containers.is_empty())
}

/// Asks the agent for its registration and for the containers of the pod.
fn status(findings: &Findings<'_>) -> Result<ContainersStatus, String> {
    let sandbox = findings.found().and_then(|found| found.container_id.as_deref()).unwrap_or_default();
    let socket = findings.agent_socket().ok_or("the configuration names no agent_socket")?;
    excluded_containers(&socket, sandbox, AGENT_TIMEOUT)
}

/// Checks the preconditions on the node, if its configuration or the pod excludes containers.
pub(super) fn ready(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let is_configured =
        findings.configurations.iter().any(|one| has_sub_plugin(&one.conf, SubPlugin::ContainerExclude));
    if !is_configured && !is_excluding(findings) {
        return None;
    }
    let node = CheckVerdict::merged([kernel(), cgroups(findings.target)]);
    Some(match findings.obstacle(&["agent-reachable"]) {
        // The parts that pass don't show that the agent is registered.
        Some(why) if node.outcome != CheckOutcome::Fail => CheckVerdict::not_checked(why),
        Some(_) => node,
        None => CheckVerdict::merged([node, registered(&status(findings))]),
    })
}

/// Checks the excluded containers of the pod.
pub(super) fn bypass(findings: &Findings<'_>) -> Option<CheckVerdict> {
    if findings.target.pod.is_none() || !is_excluding(findings) {
        return None;
    }
    if let Some(why) = findings.obstacle(&["netns-found", "rules-equal"]) {
        return Some(CheckVerdict::not_checked(why));
    }
    let Some((found, saved)) = findings.found().zip(findings.policy()) else {
        return Some(CheckVerdict::not_checked(NO_ATTACHMENT));
    };
    let elements = found.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, container_elements));
    Some(match elements {
        Ok(elements) => as_expected(&elements, saved, status(findings)),
        Err(error) => CheckVerdict::not_checked(error.to_string()),
    })
}

fn kernel() -> CheckVerdict {
    match try_container_rules() {
        Ok(()) => CheckVerdict::pass("rules by control group were committed and read back"),
        Err(why) if why == NOT_PERMITTED => CheckVerdict::not_checked("this needs root (CAP_SYS_ADMIN)"),
        Err(why) => CheckVerdict::fail(why, MODULES),
    }
}

/// Enters the node's cgroup namespace with a thread that ends afterwards.
fn cgroups(target: &CheckTarget) -> CheckVerdict {
    let root = HostRoot::new(&target.mount);
    let entered = thread::spawn(move || {
        CgroupHierarchy::find(&root)?;
        enter_host_namespace(&root)?;
        cgroup::require()
    });
    match entered.join() {
        Ok(Ok(())) => CheckVerdict::pass("cgroup v2"),
        Ok(Err(error)) => CheckVerdict::fail(error.msg, CGROUP),
        Err(_) => CheckVerdict::not_checked("the thread panicked"),
    }
}

fn registered(status: &Result<ContainersStatus, String>) -> CheckVerdict {
    let why = match status {
        Ok(ContainersStatus { runtime: Some(runtime), .. }) => {
            return CheckVerdict::pass(format!("the agent is registered at {runtime}"));
        }
        Ok(ContainersStatus { error, .. }) if error.is_empty() => "the agent does not use NRI",
        Ok(ContainersStatus { error: why, .. }) | Err(why) => why,
    };
    CheckVerdict::fail(format!("{why}; excluded containers start captured"), NRI)
}

/// Compares the live elements with the policy and with the running containers, as the agent knows them.
fn as_expected(
    elements: &[ContainerElement],
    saved: &Policy,
    status: Result<ContainersStatus, String>,
) -> CheckVerdict {
    let (expected, error) = match status {
        Ok(ContainersStatus { expected: Some(expected), error, .. }) => (expected, error),
        Ok(ContainersStatus { error, .. }) if error.is_empty() => {
            return CheckVerdict::not_checked("the agent does not know the pod's containers");
        }
        Ok(ContainersStatus { error: why, .. }) | Err(why) => return CheckVerdict::not_checked(why),
    };
    let named = |one: &BypassingContainer| format!("{} (control group {})", one.name, one.cgroup);
    let is_of = |one: &BypassingContainer, element: &ContainerElement| {
        (one.scope, one.cgroup) == (element.scope, element.cgroup)
    };
    let missing = expected.iter().filter(|one| !elements.iter().any(|element| is_of(one, element)));
    let missing = missing.map(|one| format!("captured, although excluded: {}", named(one)));
    let extra = elements.iter().filter_map(|element| {
        let line = ElementLine::of(element, Some(saved));
        let is_wrong = line.foreign || !expected.iter().any(|one| is_of(one, element));
        is_wrong.then(|| {
            format!("{}: {}", if line.foreign { "foreign" } else { "not excluded, or ended" }, line.described())
        })
    });
    let different: Vec<String> = missing.chain(extra).collect();
    match (different.is_empty(), expected.as_slice()) {
        (false, _) => {
            let why = if error.is_empty() { error } else { format!(" ({error})") };
            CheckVerdict::fail(format!("{}{why}", first_of(different, NAMED, "; ")), DIFFERENT)
        }
        (true, []) => CheckVerdict::pass("no excluded container bypasses the sidecar now"),
        (true, all) => CheckVerdict::pass(first_of(all.iter().map(named), NAMED, "; ")),
    }
}
