//! Checks of excluded containers: each precondition of a bypass, from the kernel and the runtime to the running
//! container. Nodes and pods that don't use `container-exclude` have none of these checks.

use super::checks;
use super::report::{AGENT_TIMEOUT, CheckOutcome, CheckTarget, CheckVerdict, Results};
use crate::cgroup::{self, CgroupHierarchy, enter_host_namespace};
use crate::cluster::agent::{BypassingContainer, ContainersStatus, excluded_containers};
use crate::cni::NetConf;
use crate::firewall::{ContainerElement, container_elements};
use crate::host_path::{HostPath, HostRoot};
use crate::inspect::elements::{ElementLine, scope_text};
use crate::inspect::explain::{Explained, Explanation, NOT_IN_CHAIN, Warning};
use crate::inspect::rules::{LOCK_TIMEOUT, LiveRules, RulesReport};
use crate::inspect::terminal::first_of;
use crate::netns::find::FoundNetns;
use crate::plugin::probe::{NOT_PERMITTED, try_container_rules};
use crate::pod::well_known::EXCLUDE_CONTAINERS;
use crate::policy::{ContainerExclusion, Policy};
use crate::sub_plugins::SubPlugin;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::thread;
use std::time::Duration;

/// The runtimes' default NRI socket, if the agent does not report another one.
const NRI_SOCKET: &str = "/var/run/nri/nri.sock";
/// How long a difference between the agent's answer and the elements must last: the agent removes and restores elements
/// within this time.
const SETTLING: Duration = Duration::from_secs(4);
/// The number of containers and elements that a finding names; the rest is counted.
const NAMED: usize = 3;

const MODULES: &str = "use kernel 5.13 or later with CONFIG_NFT_SOCKET and CONFIG_SOCK_CGROUP_DATA, and load its modules \
    on the node: modprobe -a nf_tables nft_socket nft_ct nft_nat";
const ENABLE_NRI: &str = "enable NRI in the runtime and restart it: containerd: disable = false in \
    [plugins.'io.containerd.nri.v1.nri']; CRI-O: enable_nri = true in [crio.nri]";
const SEE_AGENT: &str = "see the agent's log: kubectl logs -n NAMESPACE AGENT (kubectl get pods -A -o wide -l \
    app.kubernetes.io/component=agent lists the agents)";

/// What the checks of a pod have found.
pub(super) struct CheckedPod {
    pub(super) conf: Option<NetConf>,
    pub(super) found: Option<FoundNetns>,
    /// What an ADD would do now.
    pub(super) explained: Option<Explained>,
    pub(super) live: Option<(LiveRules, RulesReport)>,
}

impl CheckedPod {
    fn saved(&self) -> Option<&Policy> {
        self.live.as_ref().and_then(|(live, _)| live.desired.as_ref()).map(|desired| &desired.policy)
    }

    fn wanted(&self) -> Option<&Policy> {
        self.explained.as_ref().map(|explained| &explained.policy)
    }

    fn is_excluding(&self) -> bool {
        let has_elements = self.live.as_ref().is_some_and(|(_, report)| report.containers.is_some());
        has_elements || self.wanted().into_iter().chain(self.saved()).any(|policy| !policy.containers.is_empty())
    }

    /// Returns the verdict for an exclusion that the plugin ignores.
    fn ignored(&self) -> Option<CheckVerdict> {
        let Explanation { warnings, notes, .. } = &self.explained.as_ref()?.explanation;
        let is_about = |text: &str| text.contains(EXCLUDE_CONTAINERS);
        if let Some(Warning { what, next, .. }) =
            warnings.iter().find(|one| one.code == NOT_IN_CHAIN && is_about(&one.what))
        {
            return Some(CheckVerdict::fail(what.as_str(), format!("{next}, and delete the pod")));
        }
        let note = notes.iter().filter_map(|note| note.strip_prefix("warning: ")).find(|note| is_about(note))?;
        Some(CheckVerdict::fail(note, "correct the annotation in the pod template"))
    }
}

/// Adds the checks of the node and, if it excludes containers, of the pod. `configurations` are the node's, and the one
/// that names the agent's socket.
pub(super) fn examine(
    target: &CheckTarget,
    (configurations, conf): (&[&NetConf], Option<&NetConf>),
    pod: Option<&CheckedPod>,
    results: &mut Results,
) {
    let ignored = pod.and_then(CheckedPod::ignored);
    let excludes = |conf: &NetConf| conf.chain.iter().any(|b| SubPlugin::of(b) == Some(SubPlugin::ContainerExclude));
    let of_pod = pod.and_then(|pod| pod.conf.as_ref());
    let is_configured = configurations.iter().copied().chain(of_pod).any(excludes);
    let pod = pod.filter(|pod| pod.is_excluding());
    if !is_configured && pod.is_none() {
        ignored.into_iter().for_each(|verdict| results.add(checks::CONTAINERS_BYPASS, verdict));
        return;
    }
    let sandbox = pod.and_then(|pod| pod.found.as_ref()?.container_id.as_deref()).unwrap_or_default();
    let ask = || excluded_containers(&target.agent_socket(conf)?, sandbox, AGENT_TIMEOUT);
    let kernel = match try_container_rules() {
        Ok(()) => CheckVerdict::pass("rules by control group were committed and read back"),
        Err(why) if why == NOT_PERMITTED => CheckVerdict::not_checked("this needs root (CAP_SYS_ADMIN)"),
        Err(why) => CheckVerdict::fail(why, MODULES),
    };
    let cgroups = match CgroupHierarchy::find(&HostRoot::new(&target.mount)) {
        Ok(_) => cgroup_namespace(target),
        Err(error) => CheckVerdict::fail(
            error.msg,
            "boot the node with cgroup v2 (kernel argument systemd.unified_cgroup_hierarchy=1); in the agent's pod, check \
             that containerExclusion.enabled mounts /sys/fs/cgroup",
        ),
    };
    let status = ask();
    let node = CheckVerdict::merged([kernel, cgroups, nri_socket(target, status.as_ref().ok())]);
    let ready = match results.obstacle(&[checks::AGENT_REACHABLE]) {
        // The parts that pass don't show that the agent is registered.
        Some(why) if node.outcome != CheckOutcome::Fail => CheckVerdict::not_checked(why),
        Some(_) => node,
        None => CheckVerdict::merged([node, registered(&status)]),
    };
    results.add(checks::CONTAINERS_READY, ready);
    match (pod, ignored) {
        (_, Some(ignored)) => results.add(checks::CONTAINERS_BYPASS, ignored),
        (Some(pod), None) => results.run(checks::CONTAINERS_BYPASS, || examine_pod(pod, ask)),
        (None, None) => {}
    }
}

/// Enters the node's cgroup namespace with a thread that ends afterwards.
fn cgroup_namespace(target: &CheckTarget) -> CheckVerdict {
    let root = HostRoot::new(&target.mount);
    let entered = thread::spawn(move || {
        enter_host_namespace(&root)?;
        cgroup::require()
    });
    match entered.join() {
        Ok(Ok(())) => CheckVerdict::pass("entered"),
        Ok(Err(error)) => CheckVerdict::fail(
            error.msg,
            "run detour doctor as root on the node; in the agent's pod, check that containerExclusion.enabled mounts the \
             node's /proc, and grants SYS_ADMIN and SYS_PTRACE",
        ),
        Err(_) => CheckVerdict::not_checked("the thread panicked"),
    }
}

/// Checks the runtime's socket, to which the agent may be connected.
fn nri_socket(target: &CheckTarget, status: Option<&ContainersStatus>) -> CheckVerdict {
    if let Some(runtime) = status.and_then(|status| status.runtime.as_ref()) {
        return CheckVerdict::pass(format!("the agent is connected to {runtime}"));
    }
    let why = status.filter(|status| !status.error.is_empty());
    let why = why.map_or_else(String::new, |status| format!("; the agent reports: {}", status.error));
    let socket = status.and_then(|status| status.socket.as_deref()).unwrap_or(NRI_SOCKET);
    let reached = HostPath::new(socket).map(|path| target.reach(&path)).transpose();
    match reached.and_then(|path| path.map(fs::metadata).transpose()) {
        Ok(Some(metadata)) if metadata.file_type().is_socket() => CheckVerdict::pass(socket),
        Ok(_) => CheckVerdict::fail(format!("{socket}: expected a socket{why}"), ENABLE_NRI),
        Err(error) => CheckVerdict::fail(format!("{socket}: {error}{why}"), ENABLE_NRI),
    }
}

fn registered(status: &Result<ContainersStatus, String>) -> CheckVerdict {
    match status {
        Ok(ContainersStatus { runtime: Some(runtime), .. }) => CheckVerdict::pass(format!("at {runtime}")),
        Ok(ContainersStatus { error, socket, .. }) => {
            let why = if error.is_empty() { "the agent does not use NRI" } else { error };
            let next = match socket {
                Some(_) => "check that the container runtime runs",
                None => "set the chart value containerExclusion.enabled=true (flag --nri-socket of the agent)",
            };
            CheckVerdict::fail(format!("{why}; excluded containers start captured"), format!("{next}; {SEE_AGENT}"))
        }
        Err(why) => CheckVerdict::fail(
            why.clone(),
            format!("check that the agent runs and has the plugin's version; {SEE_AGENT}"),
        ),
    }
}

fn examine_pod(pod: &CheckedPod, ask: impl Fn() -> Result<ContainersStatus, String>) -> CheckVerdict {
    let Some((found, saved)) = pod.found.as_ref().zip(pod.saved()) else {
        return CheckVerdict::not_checked("no attachment has rules in this network namespace");
    };
    let elements = || found.open()?.enter(LOCK_TIMEOUT, container_elements);
    let live = CheckVerdict::settled(SETTLING, || match elements() {
        Err(error) => CheckVerdict::not_checked(error.to_string()),
        Ok(elements) => as_expected(&elements, saved, ask()),
    });
    CheckVerdict::merged([requested(saved, pod.wanted()), live])
}

/// Returns the first names, and the number of the others.
fn listed(names: &[String]) -> String {
    first_of(names.iter().cloned(), NAMED, "; ")
}

/// Compares the saved exclusions, from which the rules are made, with those that an ADD would have now.
fn requested(saved: &Policy, wanted: Option<&Policy>) -> CheckVerdict {
    let text = |one: &ContainerExclusion| format!("{} ({})", one.name, scope_text(one.scope));
    let all: Vec<String> = saved.containers.iter().map(text).collect();
    let none = BTreeSet::new();
    let wanted = wanted.map(|policy| &policy.containers);
    let missing: Vec<String> = wanted.unwrap_or(&none).difference(&saved.containers).map(text).collect();
    if !missing.is_empty() {
        return CheckVerdict::fail(
            format!("requested now, but not when the pod started: {}", listed(&missing)),
            "delete the pod: the plugin reads annotations and configurations when a pod starts",
        );
    }
    let old = wanted.is_some_and(|wanted| saved.containers.iter().any(|one| !wanted.contains(one)));
    let old = if old { "; some of them are no longer requested" } else { "" };
    CheckVerdict::pass(format!("{}{old}", listed(&all)))
}

/// Compares the live elements with the policy and, if the agent knows the running containers, with them.
fn as_expected(
    elements: &[ContainerElement],
    saved: &Policy,
    status: Result<ContainersStatus, String>,
) -> CheckVerdict {
    let lines = elements.iter().map(|element| ElementLine::of(element, Some(saved)));
    let foreign: Vec<String> = lines.filter(|line| line.foreign).map(|line| line.described()).collect();
    if !foreign.is_empty() {
        return CheckVerdict::fail(
            format!("foreign: {}", listed(&foreign)),
            "a process with CAP_NET_ADMIN added the element, possibly in the pod; find it, and delete the pod",
        );
    }
    let status = match status {
        Ok(status) => status,
        Err(why) => return CheckVerdict::not_checked(why),
    };
    let Some(expected) = status.expected else {
        let why = if status.error.is_empty() { "the agent does not know the pod's containers" } else { &status.error };
        return CheckVerdict::not_checked(why);
    };
    let is_of = |one: &BypassingContainer, element: &ContainerElement| {
        (one.scope, one.cgroup) == (element.scope, element.cgroup)
    };
    let is_missing = |one: &&BypassingContainer| !elements.iter().any(|element| is_of(one, element));
    let named = |one: &BypassingContainer| format!("{} (control group {})", one.name, one.cgroup);
    let missing: Vec<String> = expected.iter().filter(is_missing).map(named).collect();
    if !missing.is_empty() {
        let why = if status.error.is_empty() { String::new() } else { format!(": {}", status.error) };
        return CheckVerdict::fail(
            format!("captured, although excluded: {}{why}", listed(&missing)),
            format!("the agent restores a missing element within 2 s; if it does not, {SEE_AGENT}"),
        );
    }
    let is_stale = |element: &&ContainerElement| !expected.iter().any(|one| is_of(one, element));
    let stale: Vec<String> =
        elements.iter().filter(is_stale).map(|element| ElementLine::of(element, Some(saved)).described()).collect();
    if !stale.is_empty() {
        return CheckVerdict::fail(
            format!("elements of containers that do not run, or are no longer excluded: {}", listed(&stale)),
            format!("the agent removes such an element within 3 s; if it does not, {SEE_AGENT}"),
        );
    }
    match expected.as_slice() {
        [] => CheckVerdict::pass("no excluded container bypasses the sidecar now"),
        all => CheckVerdict::pass(listed(&all.iter().map(named).collect::<Vec<_>>())),
    }
}
