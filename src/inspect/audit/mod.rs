//! `audit`: the pods of a node whose traffic bypasses the mesh, in whole or in part, with the reason and the counters of
//! the live rules.

mod bypass;
mod candidate;
mod containers;
mod report;
mod source;

pub use report::{AuditReport, AuditedPod, Bypass, CountedUnit};

use super::doctor::{CheckTarget, node_setup};
use super::explain::application_containers;
use super::rules::{LiveRules, RuleLine, RulesReport};
use super::subject::AppliedConf;
use crate::cluster::{NodeApi, ScheduledPod};
use crate::cni::{Code, Error};
use crate::firewall::native::set::Spans;
use crate::firewall::rule::Family;
use crate::firewall::{AmbientRedirection, RulesetView};
use crate::netns::find::NodeSnapshot;
use crate::pod::well_known::AMBIENT_BYPASS_INBOUND;
use crate::pod::{Facts, Namespace, Pod};
use crate::state::Store;
use crate::sub_plugins::{EnrolledBy, bypasses_inbound};
use bypass::{FoundBypass, ProxyIds, scan};
use candidate::{Candidate, candidate};
use source::Requests;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Limit for the bypasses of a pod that are listed; the rest is counted.
const MAX_BYPASSES: usize = 50;
/// Limit for the differences of a pod that are listed; the rest is counted.
const MAX_DRIFT: usize = 10;

/// Which pods of a node the report lists.
#[derive(Debug, Clone, Copy, Default)]
pub struct AuditScope<'a> {
    /// The namespace; `None` for all.
    pub namespace: Option<&'a str>,
    /// Whether to list all pods with a sidecar, and exclusions whose rules have counted nothing.
    pub all: bool,
}

/// The data about the node.
struct Node<'a> {
    api: &'a NodeApi,
    configurations: Vec<AppliedConf>,
    namespaces: BTreeMap<String, Namespace>,
    snapshot: NodeSnapshot,
    store: Store,
}

/// Examines the pods of the node `target`.
///
/// # Errors
/// The node's name or the API server is unknown, the pods can't be listed, or the node's processes can't be read. An
/// error about one pod is part of the report.
pub fn audit(target: &CheckTarget, scope: AuditScope<'_>) -> Result<AuditReport, Error> {
    let unknown = |msg: &str| Error::new(Code::Environment, msg);
    let name = target.node_name.clone().ok_or_else(|| unknown("unknown name of the Node object; add --node-name"))?;
    let setup = node_setup(target);
    let api = setup.api.map_err(|why| unknown(&why))?;
    let pods = api.pods_of_node(&name, scope.namespace)?;
    let namespaces = api.namespaces(scope.namespace)?;
    let node = Node {
        configurations: setup.configurations,
        namespaces: namespaces.into_iter().map(|one| (one.name.clone(), one)).collect(),
        snapshot: NodeSnapshot::take(&target.mount)?,
        store: setup.store,
        api: &api,
    };
    let mut report = AuditReport { node: name, ..AuditReport::default() };
    for pod in &pods {
        if let Some(audited) = node.audit(pod, scope.all) {
            report.checked += 1;
            report.pods.extend((scope.all || audited.is_listed()).then_some(audited));
        }
    }
    report.pods.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
    Ok(report)
}

impl Node<'_> {
    /// Examines a pod; `None` if the report is not about it, or it has not started yet.
    fn audit(&self, scheduled: &ScheduledPod, all: bool) -> Option<AuditedPod> {
        let pod = &scheduled.pod;
        let namespace = self.namespaces.get(&pod.namespace);
        let of = |reason: String| AuditedPod {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            reason,
            ..AuditedPod::default()
        };
        let enrolled_by = match candidate(scheduled, namespace)? {
            Candidate::WithoutSidecar(reason) => return Some(of(reason)),
            Candidate::WithSidecar if pod.host_network => {
                return Some(of("not redirected: the pod uses the host network (hostNetwork)".to_owned()));
            }
            Candidate::WithSidecar => None,
            Candidate::Ambient(enrolled_by) => Some(enrolled_by),
        };
        let unread = |error: String| AuditedPod { error: Some(error), ..of("unknown".to_owned()) };
        let live = match self.snapshot.of_pod(pod) {
            Ok(None) if scheduled.phase == "Pending" => return None,
            Ok(None) => Err("network namespace not found on this node".to_owned()),
            Ok(Some(found)) => {
                LiveRules::of_found(&found, &self.store).map(|live| (live, found)).map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        let facts = Facts { pod: pod.clone(), namespace: namespace.cloned() };
        Some(match live {
            Err(error) => unread(error),
            Ok((live, found)) => {
                let requests = Requests::of(&self.configurations, &facts, self.api.cluster());
                let report = live.report(&found.netns);
                let saved = found.container_id.as_deref().map(|id| self.store.attachments_of(id));
                let was_called = saved.is_some_and(|saved| saved.is_ok_and(|attachments| !attachments.is_empty()));
                let (live, report, requests) = (&live, &report, &requests);
                let findings = PodFindings { pod, enrolled_by, live, report, requests, was_called, all };
                findings.fill(of(String::new()))
            }
        })
    }
}

/// The data about a pod with a sidecar or in the ambient mesh.
struct PodFindings<'a> {
    pod: &'a Pod,
    /// The label that enrolls it in the ambient mesh.
    enrolled_by: Option<EnrolledBy>,
    live: &'a LiveRules,
    report: &'a RulesReport,
    requests: &'a Result<Requests, Error>,
    /// Whether the saved state contains an ADD of this pod, perhaps without rules.
    was_called: bool,
    all: bool,
}

impl PodFindings<'_> {
    fn fill(&self, audited: AuditedPod) -> AuditedPod {
        let to_ztunnel = AmbientRedirection::of(&self.live.live);
        let view = RulesetView::live(&self.live.live);
        // Of what bypasses istio-cni's rules for the ambient mesh, they count nothing.
        let view = if to_ztunnel.is_some() { view.without_ambient() } else { view };
        let redirect = self.live.desired.as_ref().and_then(|desired| desired.policy.redirect());
        let proxy = ProxyIds::of(&view, redirect);
        let mut scan = scan(&view, &proxy, redirect);
        let by_rules = Family::ALL.into_iter().any(|family| scan.redirects(family));
        let redirected = by_rules || to_ztunnel.is_some() || self.unreadable().is_some();
        if by_rules {
            scan.add_uncaptured(&self.families());
        }
        let found = if redirected { scan.found } else { Vec::new() };
        let (mut bypasses, left_out) = self.bypasses(found, redirect.is_some());
        if redirected {
            if self.enrolled_by.is_none() {
                bypasses.extend(self.with_proxys_id(&proxy));
            }
            bypasses.extend(self.of_containers(&view));
            // As a rule of another program, a foreign element comes first.
            let (foreign, own): (Vec<_>, Vec<_>) = bypasses.into_iter().partition(|bypass| bypass.by_other_program);
            let inbound = to_ztunnel.filter(|found| !found.captures_inbound).map(|_| self.inbound());
            bypasses = [foreign, inbound.into_iter().collect(), own].concat();
        }
        let mut reason = self.reason(by_rules);
        if !redirected && !self.live.legacy.is_empty() {
            reason +=
                &format!("; the rules in tables of iptables-legacy ({}) can't be read", self.live.legacy.join(", "));
        }
        if let Some(rejected) = self.live.live.rejected().filter(|rejected| rejected.is_any()) {
            reason += &format!("; the guard rejected {rejected}");
        }
        AuditedPod { redirected, reason, bypasses, left_out, drift: self.drift(), ..audited }
    }

    /// Returns the families of the pod's addresses; both if it has no address.
    fn families(&self) -> Vec<Family> {
        let has = |family: &Family| {
            let is_own = |address: &IpAddr| address.is_ipv4() == (*family == Family::Ip);
            self.live.addresses.is_empty() || self.live.addresses.iter().any(is_own)
        };
        Family::ALL.into_iter().filter(has).collect()
    }

    /// Returns tables that redirect, and whose rules are not examined.
    fn unreadable(&self) -> Option<&'static str> {
        self.live.live.native_istio().map(|_| "tables inet istio-proxy-*")
    }

    /// Returns what redirects the pod, or why nothing does.
    fn reason(&self, by_rules: bool) -> String {
        let desired = self.live.desired.as_ref();
        let networks = || {
            let mut names: Vec<&str> =
                desired.iter().flat_map(|d| &d.attachments).map(|a| a.network.as_str()).collect();
            names.dedup();
            names.join(", ")
        };
        let is_desired = desired.is_some_and(|desired| desired.policy.redirect().is_some());
        if let Some(enrolled_by) = self.enrolled_by {
            return match AmbientRedirection::of(&self.live.live) {
                Some(redirection) => format!("redirected to ztunnel by istio-cni: {}", redirection.place()),
                None => format!("not redirected: {enrolled_by}, but istio-cni has not redirected the pod"),
            };
        }
        if let (false, Some(tables)) = (by_rules, self.unreadable()) {
            return format!("redirected by {tables}, whose rules can't be read");
        }
        match (by_rules, is_desired) {
            (true, true) => format!("redirected by detour, for network {}", networks()),
            (true, false) => "redirected by rules of another tool, such as istio-init or Istio's CNI plugin".to_owned(),
            (false, true) => format!("not redirected: the rules for network {} are missing", networks()),
            (false, false) => match self.requests {
                Err(error) => format!("not redirected: an ADD of this pod would fail: {error}"),
                Ok(requests) if requests.redirects && self.was_called => {
                    "not redirected: the plugin made no rules when the pod started, because the pod had no sidecar then \
                     or its facts were unavailable; delete the pod, or let the agent repair it (repair.enabled)"
                        .to_owned()
                }
                Ok(requests) if requests.redirects => {
                    "not redirected: the plugin did not run for this pod; delete the \
                     pod, or let the agent repair it (repair.enabled)"
                        .to_owned()
                }
                Ok(requests) => requests.decision.clone(),
            },
        }
    }

    /// Returns the bypasses with their sources and the number of others. Those by rules of other programs come first,
    /// then those with the most packets.
    fn bypasses(&self, found: Vec<FoundBypass>, by_detour: bool) -> (Vec<Bypass>, usize) {
        let mut merged: BTreeMap<_, FoundBypass> = BTreeMap::new();
        for one in found {
            let key = (one.traffic.clone(), one.cause.clone(), one.note, one.counts, one.by_other_program);
            match merged.get_mut(&key) {
                Some(same) => same.counter = same.counter.zip(one.counter).map(|(a, b)| a.plus(b)),
                None => drop(merged.insert(key, one)),
            }
        }
        let mut all: Vec<FoundBypass> = merged.into_values().collect();
        let packets = |one: &FoundBypass| one.counter.map_or(u64::MAX, |counter| counter.packets);
        all.retain(|one| self.all || one.by_other_program || packets(one) > 0);
        // Those that make the pod not clean must not be left out.
        all.sort_by_key(|one| std::cmp::Reverse((one.by_other_program, packets(one))));
        let left_out = all.len().saturating_sub(MAX_BYPASSES);
        all.truncate(MAX_BYPASSES);
        let unknown = Requests::default();
        let requests = self.requests.as_ref().unwrap_or(&unknown);
        let bypass = |one: FoundBypass| Bypass {
            source: requests.source(&one, self.pod, by_detour),
            traffic: one.traffic,
            packets: one.counter.map(|counter| counter.packets),
            bytes: one.counter.map(|counter| counter.bytes),
            counts: one.counts,
            note: one.note.map(str::to_owned),
            by_other_program: one.by_other_program,
            container: None,
        };
        (all.into_iter().map(bypass).collect(), left_out)
    }

    /// Returns the bypasses of excluded containers.
    fn of_containers(&self, view: &RulesetView) -> Vec<Bypass> {
        let unknown = Requests::default();
        let requests = self.requests.as_ref().unwrap_or(&unknown);
        let policy = self.live.desired.as_ref().map(|desired| &desired.policy);
        let elements = &self.live.live.containers;
        containers::bypasses((view, elements), policy, self.all, |exclusion| requests.source_of_container(exclusion))
    }

    /// Returns the containers whose traffic the rules treat as the sidecar's own, because they run with its UID or GID.
    fn with_proxys_id(&self, proxy: &ProxyIds) -> Vec<Bypass> {
        let is_in = |id: Option<u32>, ids: &Spans| id.is_some_and(|id| !ids.is_disjoint_from(&Spans::one(id)));
        let mut bypasses = Vec::new();
        for container in application_containers(self.pod).into_iter().filter(|container| !container.ends_before) {
            let ids = [("UID", container.uid(), &proxy.uids), ("GID", container.gid(), &proxy.gids)];
            let Some((kind, Some(id), _)) = ids.into_iter().find(|(_, id, ids)| is_in(*id, ids)) else { continue };
            bypasses.push(Bypass {
                traffic: format!("all outbound traffic of container {}", container.name()),
                source: format!("the container runs with the sidecar's {kind} {id}"),
                note: Some("counted as the sidecar's own traffic".to_owned()),
                ..Bypass::default()
            });
        }
        bypasses
    }

    /// Returns the bypass of a pod in the ambient mesh whose inbound connections istio-cni does not redirect.
    fn inbound(&self) -> Bypass {
        let requested = bypasses_inbound(self.pod).then(|| format!("pod, {AMBIENT_BYPASS_INBOUND}"));
        Bypass {
            traffic: "inbound tcp".to_owned(),
            source: requested.unwrap_or_else(|| "the rules of istio-cni".to_owned()),
            note: Some("no rule counts it".to_owned()),
            ..Bypass::default()
        }
    }

    /// Returns the differences between live and desired rules, one line each.
    fn drift(&self) -> Vec<String> {
        let differing = self.report.rules.iter().filter(|rule| rule.is_drift()).map(RuleLine::described);
        let omitted = self.report.left_out.iter().map(|one| one.rules).sum::<usize>();
        let absent = self.report.absent.iter().map(|line| format!("missing: {line}"));
        let mut lines: Vec<String> = differing.chain(absent).collect();
        let more = lines.len().saturating_sub(MAX_DRIFT);
        lines.truncate(MAX_DRIFT);
        if more + omitted > 0 && self.report.as_asked == Some(false) {
            lines.push(format!("and {} more; see detour rules", more + omitted));
        }
        lines
    }
}
