//! Checks of the rules of running pods: whether the pods have the rules of their policies, as the node's agent reports it.

use super::checks;
use super::report::{AGENT_TIMEOUT, CheckTarget, CheckVerdict, Results};
use crate::cluster::agent::{PodFinding, PoliciesReport, pod_policies};
use crate::cni::NetConf;
use crate::inspect::nodes::PolicyCounts;
use crate::pod::PodRef;

/// The number of pods that have a line; the rest is counted.
const LISTED: usize = 10;

/// Asks the node's agent for the rules of its pods. The error is the reason why they are unknown.
pub(super) fn ask(target: &CheckTarget, conf: Option<&NetConf>, results: &Results) -> Result<PoliciesReport, String> {
    match results.obstacle(checks::POLICIES.needs) {
        Some(why) => Err(why),
        None => pod_policies(&target.agent_socket(conf)?, AGENT_TIMEOUT),
    }
}

/// Adds the check of all pods of the node, and a line for each of the first pods that are not current.
pub(super) fn examine_node(report: Result<&PoliciesReport, &String>, results: &mut Results) {
    let report = match report {
        Ok(report) => report,
        Err(why) => return results.add(checks::POLICIES, CheckVerdict::not_checked(why.clone())),
    };
    results.add(checks::POLICIES, summary(report));
    let mut findings: Vec<&PodFinding> = report.findings.iter().collect();
    findings.sort_by_key(|finding| (finding.state != "none", &finding.pod));
    for finding in findings.into_iter().take(LISTED) {
        results.add(checks::POD_POLICY, verdict(finding));
    }
}

/// Adds the check of one pod.
pub(super) fn examine_pod(report: Result<&PoliciesReport, &String>, pod: &PodRef, results: &mut Results) {
    results.run(checks::POD_POLICY, || {
        let report = match report {
            Ok(report) => report,
            Err(why) => return CheckVerdict::not_checked(why.clone()),
        };
        let is_named =
            |finding: &&PodFinding| (&finding.pod.namespace, &finding.pod.name) == (&pod.namespace, &pod.name);
        match (report.follows, report.findings.iter().find(is_named)) {
            (None, _) => CheckVerdict::not_checked(NOT_READ),
            (Some(_), Some(finding)) => verdict(finding),
            (Some(true), None) => CheckVerdict::pass("the pod follows changes of its policy"),
            (Some(false), None) => CheckVerdict::pass("the pod follows no change (livePolicy is off)"),
        }
    });
}

const NOT_READ: &str = "the agent does not read the rules of pods (chart values livePolicy and repair.enabled)";

fn summary(report: &PoliciesReport) -> CheckVerdict {
    let PoliciesReport { follows, rejected, findings, .. } = report;
    let Some(follows) = follows else { return CheckVerdict::not_checked(NOT_READ) };
    let counts = PolicyCounts::of(report);
    let follows = if *follows { "" } else { "; running pods follow no change (livePolicy is off)" };
    let wrong = rejected.saturating_add(counts.lost());
    let more = usize::try_from(wrong).unwrap_or(usize::MAX).saturating_sub(findings.len().min(LISTED));
    let more = if more > 0 { format!("; {more} of them are not listed") } else { String::new() };
    let found = format!("{counts}{follows}{more}");
    let next = "see the lines below, and the Events of the pods";
    match (rejected, counts.lost()) {
        (0, 0) => CheckVerdict::pass(found),
        (_, 0) => CheckVerdict::warn(found, next),
        _ => CheckVerdict::fail(found, next),
    }
}

fn verdict(PodFinding { pod, state, reason }: &PodFinding) -> CheckVerdict {
    let name = format!("{}/{}", pod.namespace, pod.name);
    let reason = reason.strip_prefix(&format!("pod {name}: ")).unwrap_or(reason);
    let found = format!("{name}: {state}: {reason}");
    match state.as_str() {
        "rejected" => {
            CheckVerdict::warn(found, "correct the value, also in the pod template: a new pod does not start")
        }
        "none" => CheckVerdict::fail(
            found,
            "delete the pod, or let the agent repair it (chart value repair.enabled); detour audit shows its traffic",
        ),
        "outside" => CheckVerdict::fail(found, "see the istio-cni and ztunnel pods of the node, or recreate the pod"),
        _ => CheckVerdict::fail(found, "the agent retries; if this lasts, see its log"),
    }
}
