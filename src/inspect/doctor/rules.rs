//! Checks of the pod's network namespace: where it is, whether its live rules equal the desired ones, foreign rules that
//! precede them, missing addresses and routes, the interface with the default route, and the proxy's ports. A pod with its
//! own user namespace knows its users by other UIDs than this process.

use super::findings::Findings;
use super::report::CheckVerdict;
use crate::cni::{Code, Error};
use crate::firewall::DNS_PROXY_PORT;
use crate::inspect::nodes::node_hint;
use crate::inspect::rules::{LOCK_TIMEOUT, LiveRules, Mark, RuleLine, RulesReport};
use crate::inspect::terminal::{first_of, joined};
use crate::netns::{listening_ports, public_route_interfaces};
use crate::policy::{DnsCapture, Policy, Redirect};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// The number of rules that a finding names; the rest is counted.
const NAMED: usize = 3;
const REPAIR: &str = "delete the pod, or let the agent repair it (repair.enabled); compare the rules with detour rules";

/// Checks the rules, addresses and routes of the network namespace.
pub(super) fn equal(findings: &mut Findings<'_>) -> CheckVerdict {
    let Some(found) = findings.found() else {
        return CheckVerdict::not_checked("the pod's network namespace is not known");
    };
    match LiveRules::of_found(found, &findings.store()) {
        Ok(live) => {
            let report = live.report();
            let equal = as_desired(&report, findings.wanted());
            let verdict = CheckVerdict::merged([equal].into_iter().chain(fixtures(&live)).chain(guarded(&live)));
            findings.live = Some((live, report));
            verdict
        }
        Err(error) => {
            CheckVerdict::fail(error.to_string(), "run detour doctor as root on the node, or in the agent's pod")
        }
    }
}

fn as_desired(report: &RulesReport, wanted: Option<&Policy>) -> CheckVerdict {
    let wrong: Vec<&RuleLine> = report.rules.iter().filter(|line| line.is_drift()).collect();
    // Missing addresses and routes are reported by another check.
    let only_absent = wrong.is_empty() && !report.absent.is_empty();
    match report.as_asked.map(|as_asked| as_asked || only_absent) {
        Some(true) => {
            let own = report.rules.iter().filter(|line| line.mark == Mark::Fine).count();
            let what = match report.dialect {
                Some(format) => format!("{own} rules, the redirection in format {format}"),
                None => format!("{own} rules"),
            };
            CheckVerdict::pass(format!("{what}, for {}", report.attachments.join(", ")))
        }
        Some(false) => CheckVerdict::fail(first_of(wrong.iter().map(|line| line.described()), NAMED, "; "), REPAIR),
        None if wanted.is_some_and(|policy| !policy.is_empty()) => CheckVerdict::fail(
            "the plugin did not run for this pod: no attachment is recorded",
            "delete the pod: it started before the plugin was installed, or without the network in its annotation",
        ),
        None if wanted.is_some() => CheckVerdict::pass("no attachment is recorded, and no rules are desired"),
        None => CheckVerdict::not_checked("no attachment is recorded, and the desired rules are not known"),
    }
}

/// The reason if the saved state has no attachment of the pod.
pub(super) const NO_ATTACHMENT: &str = "no attachment has rules in this network namespace";

/// Checks for foreign rules that precede one of ours in the same netfilter chain.
pub(super) fn first(findings: &Findings<'_>) -> CheckVerdict {
    let Some((_, report)) = findings.live.as_ref().filter(|(live, _)| live.desired.is_some()) else {
        return CheckVerdict::not_checked(NO_ATTACHMENT);
    };
    let front = report.in_front();
    match front.is_empty() {
        true => CheckVerdict::pass("none"),
        false => CheckVerdict::fail(
            first_of(front.iter().map(|line| line.described()), NAMED, "; "),
            "if another plugin adds it on purpose, replace that plugin with uid-exclude or dns-exclude; otherwise delete the \
             rule in the network namespace",
        ),
    }
}

fn fixtures(live: &LiveRules) -> Option<CheckVerdict> {
    (!live.unfixed.is_empty()).then(|| CheckVerdict::fail(live.unfixed.join("; "), REPAIR))
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
        (Err(error), _) => CheckVerdict::fail(
            error.to_string(),
            "run crictl inspectp on the node for the runtime's view of the sandbox",
        ),
        (Ok(_), None) => CheckVerdict::not_checked("the pod is not known"),
        (Ok(_), Some(pod)) if pod.node_name.is_none() || pod.node_name != target.node_name => {
            let probe = if target.probe { " --probe" } else { "" };
            CheckVerdict::to_do("it does not run on this node", node_hint(pod, &format!("doctor{probe}")))
        }
        (Ok(_), Some(_)) => CheckVerdict::fail(
            "this node has neither a cached CNI result nor a process of the pod",
            "the pod has ended or never started: see check events, and run crictl pods --name NAME on the node",
        ),
    }
}

/// Checks whether the interface with the default route is captured, for a pod whose rules exclude interfaces.
pub(super) fn default_route(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let redirect = findings.policy()?.redirect().filter(|redirect| !redirect.exclude_interfaces.is_empty())?;
    if let Some(why) = findings.obstacle(&["rules-equal"]) {
        return Some(CheckVerdict::not_checked(why));
    }
    let default = findings.found()?.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, public_route_interfaces));
    Some(match default {
        Ok(default) => captured(&default, redirect),
        Err(error) => CheckVerdict::not_checked(error.to_string()),
    })
}

fn captured(default: &BTreeSet<String>, redirect: &Redirect) -> CheckVerdict {
    let (excluded, captured): (Vec<&str>, Vec<&str>) =
        default.iter().map(String::as_str).partition(|name| redirect.exclude_interfaces.iter().any(|one| one == name));
    match (excluded.as_slice(), captured.as_slice()) {
        ([], []) => CheckVerdict::pass("the pod has no default route"),
        ([], _) => CheckVerdict::pass(captured.join(", ")),
        _ => CheckVerdict::fail(
            format!("the rules exclude {}: traffic over the default route bypasses the sidecar", excluded.join(", ")),
            "remove the interface from exclude_interfaces and from the annotation \
             traffic.sidecar.istio.io/excludeInterfaces; if neither names it, delete the pod: it started with an \
             earlier version, or the default route moved later",
        ),
    }
}

/// A TCP port on which a process listens, and the UID of the process as the pod knows it.
type Listener = (u16, u32);

/// Checks whether the proxy listens on the ports that the rules redirect to, and as which user.
pub(super) fn listeners(findings: &Findings<'_>) -> CheckVerdict {
    let Some((found, redirect)) = findings.found().zip(findings.policy().and_then(Policy::redirect)) else {
        return CheckVerdict::not_checked("this plugin redirects nothing in the pod");
    };
    let listeners = || -> Result<Vec<Listener>, Error> {
        let users = Users::here()?;
        Ok(listening_ports()?.into_iter().map(|(port, uid)| (port, users.inside(uid))).collect())
    };
    match found.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, listeners)) {
        Ok(listeners) => CheckVerdict::merged([listening(&listeners, redirect), user(&listeners, redirect)]),
        Err(error) => CheckVerdict::not_checked(error.to_string()),
    }
}

fn listening(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let dns = (redirect.dns != DnsCapture::Off).then_some(DNS_PROXY_PORT);
    let wanted = [redirect.proxy_port, redirect.inbound_capture_port].into_iter().chain(dns);
    let (there, missing): (Vec<u16>, Vec<u16>) = wanted.partition(|port| listeners.iter().any(|one| one.0 == *port));
    let spelled = |ports: Vec<u16>| joined(ports.iter().map(|port| format!("{port}/tcp")));
    if missing.is_empty() {
        return CheckVerdict::pass(spelled(there));
    }
    CheckVerdict::fail(
        format!("no process listens on {}: redirected connections are refused", spelled(missing)),
        "see kubectl logs POD -c istio-proxy; the proxy starts after the init containers, whose traffic must be excluded \
         (see detour explain)",
    )
}

fn user(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let excluded = joined(&redirect.proxy_uid);
    let own = listeners.iter().filter(|(port, _)| *port == redirect.proxy_port).map(|(_, uid)| uid);
    match own.into_iter().find(|uid| !redirect.proxy_uid.contains(uid)) {
        None => CheckVerdict::pass(format!("UID {excluded}")),
        Some(other) => CheckVerdict::fail(
            format!(
                "the proxy listens as UID {other}, but the rules exclude UID {excluded}: its own traffic returns to \
                 it"
            ),
            format!(
                "set runAsUser of istio-proxy to {excluded}, or proxy_uid in the configuration to {other}, and delete the \
                 pod"
            ),
        ),
    }
}

/// The UID and GID that a probe is sent as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbeUser {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// A file whose owner is the root user of the user namespace that owns the thread's network namespace
/// (`net_ctl_set_ownership`, net/sysctl_net.c).
const OF_ROOT: &str = "/proc/sys/net/ipv4/ip_forward";
/// The number of UIDs of a pod with `hostUsers: false`, from 0 (KEP-127).
const OWN: u32 = 65536;

/// Maps UIDs between this process and the pod that owns a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Users {
    /// The pod's root user, as this process knows it.
    root: ProbeUser,
}

impl Users {
    /// Returns the mapping of the thread's network namespace.
    ///
    /// # Errors
    /// /proc/sys can't be read.
    pub(super) fn here() -> Result<Self, Error> {
        let root = fs::metadata(OF_ROOT).map(|of| ProbeUser { uid: of.uid(), gid: of.gid() });
        let root = root.map_err(|error| Error::new(Code::Io, format!("can't read the owner of {OF_ROOT}: {error}")))?;
        Ok(Self { root })
    }

    /// Returns the pod's `user` as this process knows it; `None` if the pod has no such user.
    pub(super) fn outside(self, user: ProbeUser) -> Option<ProbeUser> {
        let ProbeUser { uid, gid } = self.root;
        let is_own = |id: u32, root: u32| root == 0 || id < OWN;
        let is_there = is_own(user.uid, uid) && is_own(user.gid, gid);
        is_there.then(|| ProbeUser { uid: uid.saturating_add(user.uid), gid: gid.saturating_add(user.gid) })
    }

    /// Returns this process's `uid` as the pod knows it; unchanged if it is not one of the pod's.
    pub(super) fn inside(self, uid: u32) -> u32 {
        match uid.checked_sub(self.root.uid) {
            Some(own) if self.root.uid == 0 || own < OWN => own,
            _ => uid,
        }
    }
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
        assert_eq!(verdict(&[]), CheckVerdict::pass("the pod has no default route"));
        assert_eq!(verdict(&["eth0", "ovn-udn1"]), CheckVerdict::pass("eth0, ovn-udn1"));
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
        let found = user(&[(15001, 7)], &Redirect::default()).found;
        assert!(found.contains("UID 7") && found.contains("1337"), "{found}");
    }

    #[test]
    fn a_pod_with_its_own_users_counts_them_from_its_root() {
        let of = |root| Users { root: ProbeUser { uid: root, gid: root } };
        let both = |id| ProbeUser { uid: id, gid: id };
        assert_eq!(of(200_000).outside(both(1337)), Some(both(201_337)));
        assert_eq!(of(200_000).outside(both(OWN)), None);
        assert_eq!((of(200_000).inside(201_337), of(200_000).inside(7)), (1337, 7));
        assert_eq!(of(0).outside(both(1_000_650_000)), Some(both(1_000_650_000)));
        assert_eq!(of(0).inside(1_000_650_000), 1_000_650_000);
    }
}
