//! `audit`: the pods of a node that bypass the mesh, in whole or in part: those that are not redirected, those whose rules
//! differ from the desired ones, the exclusions that have matched packets, and rules of other programs before detour's.

mod report;

pub use report::{AuditReport, AuditedPod, Bypass, NodeError};

use super::doctor::{CheckTarget, node_setup};
use super::elements::TABLE;
use super::explain::{Explanation, explain};
use super::rules::{LOCK_TIMEOUT, LiveRules, Mark, RuleLine, RulesReport, compare};
use super::subject::{AppliedConf, Subject};
use super::terminal::joined;
use crate::cluster::{Api, ScheduledPod};
use crate::cni::{Code, Error};
use crate::firewall::native::EXCLUSIONS;
use crate::firewall::rule::Family;
use crate::firewall::{AmbientRedirection, Ruleset, RulesetView};
use crate::netns::find::{FoundNetns, NodeSnapshot};
use crate::plugin::netns_state::NetnsState;
use crate::plugin::running::lacks_of_ambient;
use crate::pod::well_known::INJECT;
use crate::pod::{Facts, Namespace, Pod};
use crate::policy::{Interception, Redirect};
use crate::state::Store;
use crate::sub_plugins::{EnrolledBy, SkipReason, enrolled_by, pod_skip_reason, requested_injection};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Limit for the bypasses of a pod that are listed; the rest is counted.
const MAX_BYPASSES: usize = 50;
/// Limit for the differences of a pod that are listed; the rest is counted.
const MAX_DRIFT: usize = 10;

/// The reason of a pod that an ADD would redirect now.
const NOT_RUN: &str = "not redirected: the plugin did not run for this pod, or the pod had no sidecar then or its facts \
    were unavailable; delete the pod, or let the agent repair it (repair.enabled)";

/// The data about the node.
struct Node<'a> {
    api: &'a Api,
    configurations: Vec<AppliedConf>,
    namespaces: Vec<Namespace>,
    snapshot: NodeSnapshot,
    store: Store,
}

/// Examines the pods of the node `target`, only those of `namespace` if it is set. The report lists pods that are not clean
/// and used exclusions; with `all`, all pods with a sidecar and all exclusions.
///
/// # Errors
/// The node's name or the API server is unknown, the pods can't be listed, or the node's processes can't be read. An
/// error about one pod is part of the report.
pub fn audit(target: &CheckTarget, namespace: Option<&str>, all: bool) -> Result<AuditReport, Error> {
    let unknown = |msg: &str| Error::new(Code::Environment, msg);
    let name = target.node_name.clone().ok_or_else(|| unknown("unknown name of the Node object; add --node-name"))?;
    let setup = node_setup(target);
    let api = setup.api().map_err(|why| unknown(&why))?;
    let pods = api.pods_of_node(&name, namespace)?;
    let node = Node {
        store: setup.store(),
        configurations: setup.configurations,
        namespaces: api.namespaces(namespace)?,
        snapshot: NodeSnapshot::take(&target.mount)?,
        api: &api,
    };
    let mut report = AuditReport { node: Some(name), ..AuditReport::default() };
    for pod in &pods {
        if let Some(audited) = node.audit(pod, all) {
            report.checked += 1;
            report.pods.extend((all || audited.is_listed()).then_some(audited));
        }
    }
    report.pods.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
    Ok(report)
}

impl Node<'_> {
    /// Examines a pod; `None` if the report is not about it, or it has not started yet.
    fn audit(&self, scheduled: &ScheduledPod, all: bool) -> Option<AuditedPod> {
        let pod = &scheduled.pod;
        let namespace = self.namespaces.iter().find(|one| one.name == pod.namespace);
        let of = |reason: String| AuditedPod {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            reason,
            ..AuditedPod::default()
        };
        let enrolled_by = match redirected_by(scheduled, namespace)? {
            Ok(enrolled_by) => enrolled_by,
            Err(reason) => return Some(of(reason)),
        };
        let found = match self.snapshot.of_pod(pod) {
            Ok(None) if scheduled.is_pending => return None,
            found => {
                let missing = || Error::new(Code::InvalidNetns, "network namespace not found on this node");
                found.and_then(|found| found.ok_or_else(missing))
            }
        };
        let examined = found.and_then(|found| {
            let live = LiveRules::of_found(&found, &self.store)?;
            let report = live.report();
            let facts = || Facts { pod: pod.clone(), namespace: namespace.cloned() };
            let redirection = match enrolled_by {
                Some(enrolled_by) => to_ztunnel(&found, &live, enrolled_by)?,
                None => by_rules(&live, &report).map_err(|not| not.unwrap_or_else(|| self.without_rules(facts()))),
            };
            let redirected = redirection.is_ok();
            let (bypasses, left_out) = if redirected { bypasses(&live, &report, all) } else { (Vec::new(), 0) };
            let mut reason = redirection.unwrap_or_else(|reason| reason);
            if let Some(rejected) = live.live.rejected().filter(|rejected| rejected.is_any()) {
                reason += &format!("; the guard rejected {rejected}");
            }
            Ok(AuditedPod { redirected, bypasses, left_out, drift: drift(&report), ..of(reason) })
        });
        let unread = |error: Error| AuditedPod { error: Some(error.to_string()), ..of("unknown".to_owned()) };
        Some(examined.unwrap_or_else(unread))
    }

    /// Returns why a pod has no redirection, although none is missing according to the saved state.
    fn without_rules(&self, facts: Facts) -> String {
        let subject = Subject::given(&self.configurations, facts, Some(self.api));
        match subject.and_then(|subject| explain(&subject)) {
            Err(error) => format!("not redirected: an ADD of this pod would fail: {error}"),
            Ok(Explanation { redirected: false, decision, .. }) => decision,
            Ok(_) => NOT_RUN.to_owned(),
        }
    }
}

/// Returns what redirects a pod with a sidecar; the error is why nothing does, if the live rules show that.
fn by_rules(live: &LiveRules, report: &RulesReport) -> Result<String, Option<String>> {
    let redirects = |line: &RuleLine| {
        let targets = ["-j REDIRECT", "-j TPROXY", "redirect to", "tproxy "];
        line.mark == Mark::Fine && targets.iter().any(|target| line.rule.contains(target))
    };
    let none = Ruleset::default();
    let known = live.desired.as_ref().map_or(&none, |desired| &desired.rules);
    let desired = live.desired.as_ref().filter(|desired| desired.policy.redirect().is_some());
    let networks = desired.iter().flat_map(|desired| &desired.attachments).map(|one| &one.network);
    let networks = joined(networks.collect::<BTreeSet<_>>());
    if desired.is_some() && report.rules.iter().any(redirects) {
        return Ok(format!("redirected by detour, for network {networks}"));
    }
    if live.live.native_istio().is_some() || live.live.foreign_redirection(known).is_some() {
        return Ok("redirected by rules of another tool, such as istio-init or Istio's CNI plugin".to_owned());
    }
    let missing = desired.map(|_| format!("not redirected: the rules for network {networks} are missing"));
    let legacy =
        || Some(format!("not redirected: can't read the rules of iptables-legacy in {}", live.legacy.first()?));
    Err(missing.or_else(legacy))
}

/// Returns what redirects a pod of the ambient mesh; the inner error is why nothing does.
fn to_ztunnel(found: &FoundNetns, live: &LiveRules, enrolled_by: EnrolledBy) -> Result<Result<String, String>, Error> {
    let place = AmbientRedirection::of(&live.live).map_or("unknown rules", AmbientRedirection::place);
    Ok(match lacks_of_ambient(&found.netns, LOCK_TIMEOUT)? {
        None => Ok(format!("redirected to ztunnel by istio-cni: {place}")),
        Some(lacks) => Err(format!("not redirected: {enrolled_by}, but the pod lacks {lacks}")),
    })
}

/// Returns what bypasses the redirection, and the number of others. Rules of other programs come first, then the rules with
/// the most packets.
fn bypasses(live: &LiveRules, report: &RulesReport, all: bool) -> (Vec<Bypass>, usize) {
    let foreign = report.in_front().into_iter().map(|line| Bypass {
        source: format!("a rule of another program: {} {}", line.chain, line.rule),
        by_other_program: true,
        ..Bypass::of(line)
    });
    let Some(desired) = &live.desired else { return (foreign.collect(), 0) };
    let usual = usual_rules(desired);
    let is_exclusion = |line: &&RuleLine| {
        let equals = |one: &RuleLine| one.table == line.table && one.chain == line.chain && one.rule == line.rule;
        let is_usual = || usual.iter().any(equals);
        let ends = ["RETURN", "return", "ACCEPT", "accept"].iter().any(|verdict| line.rule.ends_with(verdict));
        let is_bypass = if line.table == TABLE { line.chain == EXCLUSIONS } else { ends && !is_usual() };
        line.mark == Mark::Fine && is_bypass && (all || line.packets.is_some_and(|packets| packets > 0))
    };
    let mut own: Vec<Bypass> = report.rules.iter().filter(is_exclusion).map(Bypass::of).collect();
    own.sort_by_key(|one| Reverse(one.packets));
    let mut bypasses: Vec<Bypass> = foreign.chain(own).collect();
    let left_out = bypasses.len().saturating_sub(MAX_BYPASSES);
    bypasses.truncate(MAX_BYPASSES);
    (bypasses, left_out)
}

/// Returns the rules that the pod would have without exclusions in the settings of its redirection.
fn usual_rules(desired: &NetnsState) -> Vec<RuleLine> {
    let mut policy = desired.policy.clone();
    if let Interception::On(redirect) = &mut policy.interception {
        let usual = Redirect::default();
        redirect.inbound_ports_exclude = usual.inbound_ports_exclude;
        redirect.outbound_ports_exclude = usual.outbound_ports_exclude;
        redirect.outbound_ip_ranges_exclude = usual.outbound_ip_ranges_exclude;
        redirect.owner_groups_include = usual.owner_groups_include;
        redirect.owner_groups_exclude = usual.owner_groups_exclude;
        redirect.exclude_interfaces = usual.exclude_interfaces;
    }
    let view = RulesetView::desired(&Ruleset::of(&policy, &Family::ALL), desired.rule_format);
    compare(&view, Vec::new(), Vec::new())
}

/// Returns the differences between live and desired rules, one line each.
fn drift(report: &RulesReport) -> Vec<String> {
    let differing = report.rules.iter().filter(|rule| rule.is_drift()).map(RuleLine::described);
    let absent = report.absent.iter().map(|line| format!("missing: {line}"));
    let mut lines: Vec<String> = differing.chain(absent).collect();
    let more = lines.len().saturating_sub(MAX_DRIFT);
    lines.truncate(MAX_DRIFT);
    if more > 0 {
        lines.push(format!("and {more} more; see detour rules"));
    }
    lines
}

/// The labels with which Istio's injector selects namespaces and pods (istio.io, "Installing the Sidecar").
const INJECTION: &str = "istio-injection";
const REVISION: &str = "istio.io/rev";

/// Returns whether the pod has a sidecar, or what enrolls it in the ambient mesh; the error is why nothing redirects it,
/// although the mesh requests it. `None` if it has ended, is a gateway or is not part of the mesh.
fn redirected_by(
    ScheduledPod { pod, is_ending, .. }: &ScheduledPod,
    namespace: Option<&Namespace>,
) -> Option<Result<Option<EnrolledBy>, String>> {
    let enrolled_by = enrolled_by(pod, namespace);
    let on_own_network = || pod_skip_reason(&Pod { host_network: false, ..pod.clone() });
    match pod.proxy() {
        _ if *is_ending => None,
        _ if enrolled_by.is_some() => Some(Ok(enrolled_by)),
        None => missing_sidecar(pod, namespace).map(Err),
        // A gateway receives its traffic without redirection.
        Some(_) if matches!(on_own_network(), Some(SkipReason::NotASidecar(_))) => None,
        Some(_) if pod.host_network => {
            Some(Err("not redirected: the pod uses the host network (hostNetwork)".to_owned()))
        }
        Some(_) => Some(Ok(None)),
    }
}

/// Returns why a pod has no sidecar although its namespace or the pod itself requests one.
fn missing_sidecar(pod: &Pod, namespace: Option<&Namespace>) -> Option<String> {
    let label = |key: &str| namespace.and_then(|namespace| namespace.labels.get(key)).map_or("", String::as_str);
    let (injection, revision, own) = (label(INJECTION), label(REVISION), requested_injection(pod));
    let by = match own {
        _ if injection == "disabled" => return None,
        Some(true) => format!("{INJECT}=true"),
        _ if injection == "enabled" => format!("{INJECTION}=enabled"),
        _ if !revision.is_empty() => format!("{REVISION}={revision}"),
        Some(false) => return None,
        None => format!("{REVISION}={}", pod.labels.get(REVISION)?),
    };
    let why = match own {
        Some(false) => "the pod refuses it (sidecar.istio.io/inject)",
        None if pod.host_network => "Istio does not inject one into pods with hostNetwork",
        _ => "Istio's injector did not add one; delete the pod",
    };
    Some(format!("no sidecar: injection is requested ({by}), but {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::Container;
    use std::collections::BTreeMap;

    /// A row: labels of the namespace, labels of the pod, whether it has hostNetwork, and a part of the reason.
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a [(&'a str, &'a str)], bool, Option<&'a str>);

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn pod(own: &[(&str, &str)], change: impl Fn(&mut Pod)) -> ScheduledPod {
        let mut pod = Pod { namespace: "shop".into(), name: "web".into(), labels: labels(own), ..Pod::default() };
        change(&mut pod);
        ScheduledPod { pod, ..ScheduledPod::default() }
    }

    fn proxy(args: &[&str]) -> Container {
        let args = args.iter().map(|&arg| arg.into()).collect();
        Container { name: "istio-proxy".into(), args, ..Container::default() }
    }

    #[test]
    fn pods_with_a_sidecar_are_examined_unless_they_ended_or_are_gateways() {
        let of = |scheduled: &ScheduledPod| redirected_by(scheduled, None);
        let meshed = pod(&[], |pod| pod.containers.push(proxy(&["proxy", "sidecar"])));
        assert_eq!(of(&meshed), Some(Ok(None)));
        let native = pod(&[], |pod| pod.init_containers.push(proxy(&[])));
        assert_eq!(of(&native), Some(Ok(None)));
        assert_eq!(of(&ScheduledPod { is_ending: true, ..meshed.clone() }), None);
        for host_network in [false, true] {
            let gateway = pod(&[], |pod| {
                pod.containers.push(proxy(&["proxy", "router"]));
                pod.host_network = host_network;
            });
            assert_eq!(of(&gateway), None);
        }
        assert_eq!(of(&pod(&[], |_| ())), None, "it is not part of the mesh");
    }

    #[test]
    fn an_enrolled_pod_without_a_sidecar_is_examined_whatever_the_injector_should_do() {
        let ambient = [("istio.io/dataplane-mode", "ambient")];
        let namespace = |dataplane_mode: Option<&str>| Namespace {
            dataplane_mode: dataplane_mode.map(str::to_owned),
            labels: labels(&[("istio.io/rev", "v1")]),
            ..Namespace::default()
        };
        let of = |own: &[(&str, &str)], mode| redirected_by(&pod(own, |_| ()), Some(&namespace(mode)));
        assert_eq!(of(&ambient, None), Some(Ok(Some(EnrolledBy::Pod))));
        assert_eq!(of(&[], Some("ambient")), Some(Ok(Some(EnrolledBy::Namespace))));
        assert!(matches!(of(&[], None), Some(Err(_))));
        let gone = ScheduledPod { is_ending: true, ..pod(&ambient, |_| ()) };
        assert_eq!(redirected_by(&gone, None), None);
    }

    #[test]
    fn a_missing_sidecar_is_reported_if_the_mesh_requests_it() {
        let enabled: &[(&str, &str)] = &[("istio-injection", "enabled")];
        let table: &[Row] = &[
            (enabled, &[], false, Some("requested (istio-injection=enabled), but Istio's injector did not add one")),
            (enabled, &[(INJECT, "false")], false, Some("(istio-injection=enabled), but the pod refuses it")),
            (enabled, &[], true, Some("hostNetwork")),
            (&[("istio.io/rev", "v1")], &[], false, Some("istio.io/rev=v1")),
            (&[("istio-injection", "disabled"), ("istio.io/rev", "v1")], &[(INJECT, "true")], false, None),
            (&[], &[(INJECT, "true")], false, Some("(sidecar.istio.io/inject=true), but Istio's injector ")),
            (&[], &[("istio.io/rev", "v1")], false, Some("(istio.io/rev=v1), but Istio's injector ")),
            (&[], &[(INJECT, "false")], false, None),
            (&[("istio.io/rev", "")], &[], false, None),
        ];
        for (namespace, own, host_network, expected) in table {
            let namespace = Namespace { labels: labels(namespace), ..Namespace::default() };
            let found = redirected_by(&pod(own, |pod| pod.host_network = *host_network), Some(&namespace));
            match (expected, found) {
                (None, None) => {}
                (Some(expected), Some(Err(reason))) => {
                    assert!(reason.starts_with("no sidecar: ") && reason.contains(expected), "{reason}");
                }
                (_, found) => panic!("{namespace:?} {own:?}: {found:?}"),
            }
        }
    }
}
