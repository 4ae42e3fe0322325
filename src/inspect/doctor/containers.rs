//! Checks of excluded containers: each precondition of a bypass, from the kernel and the runtime to the running
//! container. Nodes and pods that don't use `container-exclude` have none of these checks.

use super::checks;
use super::configuration::{foremost, has_sub_plugin};
use super::report::{AGENT_TIMEOUT, CheckOutcome, CheckTarget, CheckVerdict, Results};
use crate::cgroup::{self, CgroupHierarchy, enter_host_namespace};
use crate::cluster::agent::{BypassingContainer, ContainersStatus, excluded_containers};
use crate::firewall::{ContainerElement, container_elements};
use crate::host_path::HostRoot;
use crate::inspect::elements::{ElementLine, scope_text};
use crate::inspect::explain::{Explanation, NOT_IN_CHAIN, Warning};
use crate::inspect::rules::{LOCK_TIMEOUT, LiveRules, RulesReport};
use crate::inspect::subject::AppliedConf;
use crate::inspect::terminal::first_of;
use crate::netns::find::FoundNetns;
use crate::plugin::probe::{NOT_PERMITTED, try_container_rules};
use crate::pod::well_known::EXCLUDE_CONTAINERS;
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

/// What the checks of a pod have found.
pub(super) struct CheckedPod {
    pub(super) found: Option<FoundNetns>,
    /// What an ADD would do now.
    pub(super) explained: Option<Explanation>,
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
        let Explanation { warnings, notes, .. } = self.explained.as_ref()?;
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

/// Adds the checks of the node and, if it excludes containers, of the pod.
pub(super) fn examine(
    target: &CheckTarget,
    configurations: &[AppliedConf],
    pod: Option<&CheckedPod>,
    results: &mut Results,
) {
    let ignored = pod.and_then(CheckedPod::ignored);
    let is_configured = configurations.iter().any(|one| has_sub_plugin(&one.conf, SubPlugin::ContainerExclude));
    let pod = pod.filter(|pod| pod.is_excluding());
    if is_configured || pod.is_some() {
        let sandbox = pod.and_then(|pod| pod.found.as_ref()?.container_id.as_deref()).unwrap_or_default();
        let socket = target.agent_socket(foremost(configurations));
        let status = socket.and_then(|socket| excluded_containers(&socket, sandbox, AGENT_TIMEOUT));
        let node = CheckVerdict::merged([kernel(), cgroups(target)]);
        let ready = match results.obstacle(&[checks::AGENT_REACHABLE]) {
            // The parts that pass don't show that the agent is registered.
            Some(why) if node.outcome != CheckOutcome::Fail => CheckVerdict::not_checked(why),
            Some(_) => node,
            None => CheckVerdict::merged([node, registered(&status)]),
        };
        results.add(checks::CONTAINERS_READY, ready);
        if let (Some(pod), None) = (pod, &ignored) {
            results.run(checks::CONTAINERS_BYPASS, || examine_pod(pod, status));
        }
    }
    ignored.into_iter().for_each(|verdict| results.add(checks::CONTAINERS_BYPASS, verdict));
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

fn examine_pod(pod: &CheckedPod, status: Result<ContainersStatus, String>) -> CheckVerdict {
    let Some((found, saved)) = pod.found.as_ref().zip(pod.saved()) else {
        return CheckVerdict::not_checked("no attachment has rules in this network namespace");
    };
    let elements = found.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, container_elements));
    let live = elements.map_or_else(
        |error| CheckVerdict::not_checked(error.to_string()),
        |elements| as_expected(&elements, saved, status),
    );
    CheckVerdict::merged([requested(saved, pod.wanted()), live])
}

/// Compares the saved exclusions, from which the rules are made, with those that an ADD would have now.
fn requested(saved: &Policy, wanted: Option<&Policy>) -> CheckVerdict {
    let missing = wanted.into_iter().flat_map(|wanted| wanted.containers.difference(&saved.containers));
    let missing: Vec<String> = missing.map(|one| format!("{} ({})", one.name, scope_text(one.scope))).collect();
    match missing.is_empty() {
        true => CheckVerdict::pass("as requested"),
        false => CheckVerdict::fail(
            format!("requested now, but not when the pod started: {}", first_of(missing, NAMED, "; ")),
            "delete the pod: the plugin reads annotations and configurations when a pod starts",
        ),
    }
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
