//! Checks of the pod's network namespace: where it is, whether its live rules equal the desired ones, foreign rules that
//! precede them, the interface with the default route, the proxy's ports, and each precondition of excluded containers,
//! from the kernel and the runtime to the running container. A pod with its own user namespace knows its users by other
//! UIDs than this process.

use super::findings::Findings;
use super::node::AS_ROOT;
use super::report::{AGENT_TIMEOUT, CheckOutcome, CheckTarget, CheckVerdict, NAMED};
use crate::cgroup::{self, CgroupHierarchy, enter_host_namespace};
use crate::cluster::agent::{BypassingContainer, ContainersStatus, excluded_containers};
use crate::cni::{Code, Error};
use crate::firewall::{ContainerElement, DNS_PROXY_PORT};
use crate::host_path::HostRoot;
use crate::inspect::nodes::node_hint;
use crate::inspect::rules::{LOCK_TIMEOUT, LiveRules, Mark, RuleLine, RulesReport};
use crate::inspect::terminal::{first_of, joined};
use crate::netns::{listening_ports, public_route_interfaces};
use crate::plugin::probe::try_container_rules;
use crate::policy::{DnsCapture, Policy, Redirect};
use crate::sub_plugins::SubPlugin;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::thread;

const REPAIR: &str = "delete the pod, or let the agent repair it (repair.enabled); compare the rules with detour rules";

/// Checks the rules, addresses and routes of the network namespace.
pub(super) fn equal(findings: &mut Findings<'_>) -> Option<CheckVerdict> {
    Some(match LiveRules::of_found(findings.found()?, &findings.store()) {
        Ok(live) => {
            let report = live.report();
            let equal = as_desired(&report, findings.wanted());
            let verdict = CheckVerdict::merged([equal].into_iter().chain(guarded(&live)));
            findings.live = Some((live, report));
            verdict
        }
        Err(error) => CheckVerdict::fail(error.to_string(), AS_ROOT),
    })
}

fn as_desired(report: &RulesReport, wanted: Option<&Policy>) -> CheckVerdict {
    match (report.as_asked, wanted.map(Policy::is_empty)) {
        (Some(true), _) => {
            let own = report.rules.iter().filter(|line| line.mark == Mark::Fine).count();
            let format = report.dialect.map_or_else(String::new, |name| format!(", the redirection in format {name}"));
            CheckVerdict::pass(format!("{own} rules{format}, for {}", report.attachments.join(", ")))
        }
        (Some(false), _) => {
            let drift = report.rules.iter().filter(|line| line.is_drift()).map(RuleLine::described);
            CheckVerdict::fail(first_of(drift.chain(report.absent.clone()), NAMED, "; "), REPAIR)
        }
        (None, Some(false)) => {
            CheckVerdict::fail("the plugin did not run for this pod: no attachment is recorded", REPAIR)
        }
        (None, Some(true)) => CheckVerdict::pass("no attachment is recorded, and no rules are desired"),
        (None, None) => CheckVerdict::not_checked("no attachment is recorded, and the desired rules are not known"),
    }
}

/// The reason if the saved state has no attachment of the pod.
pub(super) const NO_ATTACHMENT: &str = "no attachment has rules in this network namespace";

/// Checks for foreign rules that precede one of ours in the same netfilter chain.
pub(super) fn first(findings: &Findings<'_>) -> CheckVerdict {
    let Some((_, report)) = findings.live.as_ref().filter(|(live, _)| live.desired.is_some()) else {
        return CheckVerdict::not_checked(NO_ATTACHMENT);
    };
    let next = "if a plugin adds it on purpose, use uid-exclude or dns-exclude instead; otherwise delete the rule";
    CheckVerdict::unless(report.in_front().into_iter().map(RuleLine::described), "none", next)
}

/// Returns a warning if the guard has rejected packets.
fn guarded(live: &LiveRules) -> Option<CheckVerdict> {
    let rejected = live.live.rejected().filter(|rejected| rejected.is_any())?;
    Some(CheckVerdict::warn(
        format!("the guard (mesh-guard) rejected {rejected}, so these connections failed: no redirection took them"),
        "if the redirection is missing, the agent restores it (repair.enabled); in the ambient mesh, check istio-cni's agent on \
         this node",
    ))
}

/// The next step if no network namespace is found.
const GONE: &str = "the pod has ended or never started: see check events, and run crictl pods --name NAME on the node";

/// Checks the pod's location; for a pod on another node, the next step is the command to run there.
pub(super) fn netns(findings: &Findings<'_>) -> CheckVerdict {
    let target = findings.target;
    let pod = findings.pod();
    if pod.is_some_and(|pod| pod.host_network) {
        return CheckVerdict::not_checked("the pod uses the node's network namespace (hostNetwork)");
    }
    if let Some(found) = findings.found() {
        return CheckVerdict::pass(found.evidence.as_str());
    }
    if let Some(because) = findings.failure(|line| line.id == "events") {
        return because;
    }
    match (findings.place(), pod) {
        (Err(error), _) => CheckVerdict::fail(error.to_string(), GONE),
        (Ok(_), None) => CheckVerdict::not_checked("the pod is not known"),
        (Ok(_), Some(pod)) if pod.node_name.is_none() || pod.node_name != target.node_name => {
            let probe = if target.probe { " --probe" } else { "" };
            CheckVerdict::to_do("it does not run on this node", node_hint(pod, &format!("doctor{probe}")))
        }
        (Ok(_), Some(_)) => CheckVerdict::fail("this node has neither a CNI result nor a process of the pod", GONE),
    }
}

/// Checks whether the interface with the default route is captured, for a pod whose rules exclude interfaces.
pub(super) fn default_route(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let redirect = findings.policy()?.redirect().filter(|redirect| !redirect.exclude_interfaces.is_empty())?;
    if let Some(because) = findings.obstacle(&["rules-equal"]) {
        return Some(because);
    }
    let default = findings.found()?.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, public_route_interfaces));
    Some(default.map_or_else(|error| CheckVerdict::not_checked(error.to_string()), |all| captured(&all, redirect)))
}

fn captured(default: &BTreeSet<String>, redirect: &Redirect) -> CheckVerdict {
    let excluded = default.iter().filter(|name| redirect.exclude_interfaces.contains(name));
    CheckVerdict::unless(
        excluded.map(|name| format!("the rules exclude {name}: traffic over the default route bypasses the sidecar")),
        format!("default routes: {}", joined(default)),
        "remove the interface from exclude_interfaces and traffic.sidecar.istio.io/excludeInterfaces; if neither names \
         it, delete the pod: the default route moved after its start",
    )
}

/// A TCP port on which a process listens, and the UID of the process as the pod knows it.
type Listener = (u16, u32);

/// Checks whether the proxy listens on the ports that the rules redirect to, and as which user.
pub(super) fn listeners(findings: &Findings<'_>) -> CheckVerdict {
    let Some((found, redirect)) = findings.found().zip(findings.policy().and_then(Policy::redirect)) else {
        return CheckVerdict::not_checked("this plugin redirects nothing in the pod");
    };
    let listeners = || -> Result<Vec<Listener>, Error> {
        let root = root_of_pod()?;
        Ok(listening_ports()?.into_iter().map(|(port, uid)| (port, uid.checked_sub(root).unwrap_or(uid))).collect())
    };
    match found.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, listeners)) {
        Ok(listeners) => CheckVerdict::merged([listening(&listeners, redirect), user(&listeners, redirect)]),
        Err(error) => CheckVerdict::not_checked(error.to_string()),
    }
}

fn listening(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let dns = (redirect.dns != DnsCapture::Off).then_some(DNS_PROXY_PORT);
    let wanted = || [redirect.proxy_port, redirect.inbound_capture_port].into_iter().chain(dns);
    let missing = wanted().filter(|port| listeners.iter().all(|(own, _)| own != port));
    CheckVerdict::unless(
        missing.map(|port| format!("no process listens on {port}/tcp: redirected connections are refused")),
        joined(wanted().map(|port| format!("{port}/tcp"))),
        "see kubectl logs POD -c istio-proxy; the proxy starts after the init containers, whose traffic must be excluded \
         (see detour explain)",
    )
}

fn user(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let excluded = joined(&redirect.proxy_uid);
    let own = listeners.iter().filter(|(port, _)| *port == redirect.proxy_port).map(|(_, uid)| uid);
    // Each of the proxy's threads has a listener.
    let others: BTreeSet<&u32> = own.filter(|uid| !redirect.proxy_uid.contains(uid)).collect();
    let wrong = others.into_iter().map(|uid| {
        format!("the proxy listens as UID {uid}, but the rules exclude UID {excluded}: its own traffic returns to it")
    });
    CheckVerdict::unless(
        wrong,
        format!("UID {excluded}"),
        "set runAsUser of istio-proxy, or proxy_uid in the configuration, so that they are equal, and delete the pod",
    )
}

/// A file whose owner is the root user of the user namespace that owns the thread's network namespace
/// (`net_ctl_set_ownership`, net/sysctl_net.c).
const OF_ROOT: &str = "/proc/sys/net/ipv4/ip_forward";

/// Returns the root user of the pod that owns the thread's network namespace, as this process knows it. With `hostUsers:
/// false`, the pod's UIDs and GIDs are counted from it (KEP-127).
///
/// # Errors
/// /proc/sys can't be read.
pub(super) fn root_of_pod() -> Result<u32, Error> {
    let of = fs::metadata(OF_ROOT);
    of.map(|of| of.uid()).map_err(|error| Error::new(Code::Io, format!("can't read the owner of {OF_ROOT}: {error}")))
}

/// The next steps for excluded containers.
const MODULES: &str = "use kernel 5.13 or later with CONFIG_NFT_SOCKET and CONFIG_SOCK_CGROUP_DATA, and load its modules \
    on the node: modprobe -a nf_tables nft_socket nft_ct nft_nat";
const CGROUP: &str = "run doctor as root on a node with cgroup v2; in the agent's pod, containerExclusion.enabled mounts the \
    node's /proc and /sys/fs/cgroup, and grants SYS_ADMIN and SYS_PTRACE";
const NRI: &str = "set the chart value containerExclusion.enabled=true (flag --nri-socket of the agent), enable NRI in the \
    runtime (containerd: disable = false; CRI-O: enable_nri = true), and restart it";
const DIFFERENT: &str = "the agent corrects it within 3 s; if it does not, see the agent's log, and delete the pod: a process \
    with CAP_NET_ADMIN, possibly in the pod, may have added an element";

/// Whether the pod excludes containers, or has elements of excluded ones.
fn is_excluding(findings: &Findings<'_>) -> bool {
    let has_elements = findings.live.as_ref().is_some_and(|(_, report)| report.containers.is_some());
    has_elements || findings.wanted().into_iter().chain(findings.policy()).any(|policy| !policy.containers.is_empty())
}

/// Asks the agent for its registration and for the containers of the pod; without an answer, an error says why.
fn status(findings: &Findings<'_>) -> ContainersStatus {
    let sandbox = findings.found().and_then(|found| found.container_id.as_deref()).unwrap_or_default();
    let answer = findings.agent_socket().ok_or_else(|| "the configuration names no agent_socket".to_owned());
    let answer = answer.and_then(|socket| excluded_containers(&socket, sandbox, AGENT_TIMEOUT));
    let mut status = answer.unwrap_or_else(|error| ContainersStatus { error, ..ContainersStatus::default() });
    if status.error.is_empty() && status.runtime.is_none() {
        "the agent does not use NRI".clone_into(&mut status.error);
    }
    status
}

/// Checks the preconditions of excluded containers on the node, if its configuration or the pod excludes containers.
pub(super) fn containers_ready(findings: &Findings<'_>) -> Option<CheckVerdict> {
    if findings.conf_with(SubPlugin::ContainerExclude).is_none() && !is_excluding(findings) {
        return None;
    }
    if let Some(because) = findings.obstacle(&["kernel-rules"]) {
        return Some(because);
    }
    let kernel = try_container_rules().map(|()| "rules by control group were committed and read back");
    let node = CheckVerdict::merged([CheckVerdict::of(kernel, MODULES), cgroups(findings.target)]);
    Some(match findings.obstacle(&["agent-reachable"]) {
        // The parts that pass don't show that the agent is registered.
        Some(because) if node.outcome != CheckOutcome::Fail => because,
        Some(_) => node,
        None => CheckVerdict::merged([node, registered(status(findings))]),
    })
}

/// Checks the excluded containers of the pod.
pub(super) fn containers_bypass(findings: &Findings<'_>) -> Option<CheckVerdict> {
    if findings.target.pod.is_none() || !is_excluding(findings) {
        return None;
    }
    if let Some(because) = findings.obstacle(&["netns-found", "rules-equal"]) {
        return Some(because);
    }
    let (live, _) = findings.live.as_ref()?;
    let ContainersStatus { expected, error, .. } = status(findings);
    Some(match expected {
        Some(expected) => as_expected(&live.live.containers, &expected, &error),
        None if error.is_empty() => CheckVerdict::not_checked("the agent does not know the pod's containers"),
        None => CheckVerdict::not_checked(error),
    })
}

/// Compares the live elements with those that the agent expects for the running containers.
fn as_expected(live: &[ContainerElement], expected: &[BypassingContainer], error: &str) -> CheckVerdict {
    let text = |name: &str, cgroup: u64, scope| format!("{name} (control group {cgroup}), scope {scope}");
    let element = |ContainerElement { scope, cgroup, container }: &ContainerElement| {
        text(container.as_ref().map_or("an element without a container", |label| &label.name), *cgroup, *scope)
    };
    let live: BTreeSet<String> = live.iter().map(element).collect();
    let expected: BTreeSet<String> = expected.iter().map(|one| text(&one.name, one.cgroup, one.scope)).collect();
    let why = if error.is_empty() { String::new() } else { format!(" ({error})") };
    let missing = expected.difference(&live).map(|one| format!("captured, although excluded: {one}{why}"));
    let extra = live.difference(&expected).map(|one| format!("not excluded, or ended: {one}"));
    let fine = match expected.is_empty() {
        true => "no excluded container bypasses the sidecar now".to_owned(),
        false => first_of(expected.clone(), NAMED, "; "),
    };
    CheckVerdict::unless(missing.chain(extra), fine, DIFFERENT)
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
        Ok(found) => CheckVerdict::of(found.map(|()| "cgroup v2").map_err(|error| error.msg), CGROUP),
        Err(_) => CheckVerdict::not_checked("the thread panicked"),
    }
}

fn registered(ContainersStatus { runtime, error, .. }: ContainersStatus) -> CheckVerdict {
    let place = runtime.map(|runtime| format!("the agent is registered at {runtime}"));
    CheckVerdict::of(place.ok_or_else(|| format!("{error}; excluded containers start captured")), NRI)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excluded_interface_with_a_default_route_fails() {
        let redirect = Redirect { exclude_interfaces: vec!["net1".into(), "net2".into()], ..Redirect::default() };
        let verdict = |default: &[&str]| {
            let default = default.iter().map(|name| (*name).to_owned()).collect();
            captured(&default, &redirect)
        };
        assert_eq!(verdict(&["eth0", "ovn-udn1"]), CheckVerdict::pass("default routes: eth0, ovn-udn1"));
        assert!(verdict(&["eth0", "net2"]).found.contains("exclude net2:"));
    }

    #[test]
    fn each_missing_port_is_named_and_dns_only_where_it_is_captured() {
        let redirect = Redirect { dns: DnsCapture::All, ..Redirect::default() };
        let both = [(15001, 1337), (15006, 1337)];
        assert_eq!(listening(&both, &Redirect::default()), CheckVerdict::pass("15001/tcp, 15006/tcp"));
        let found = listening(&both, &redirect).found;
        assert!(found.contains("15053/tcp") && !found.contains("15001"), "{found}");
    }

    #[test]
    fn a_proxy_of_another_uid_is_named() {
        // A listener of each thread, for IPv4 and IPv6.
        let found = user(&[(15001, 7), (15001, 7)], &Redirect::default()).found;
        assert!(found.matches("UID 7").count() == 1 && found.contains("1337"), "{found}");
    }
}
