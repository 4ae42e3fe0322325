//! Checks of the policies of running pods: whether each pod has the rules that an ADD would make now.

use super::credentials::AGENT;
use super::report::{Check, CheckGroup, CheckTarget, CheckVerdict, Results};
use crate::cluster::agent::{PodPolicyStatus, PoliciesReport, pod_policies};
use crate::cni::NetConf;
use crate::policy::LivePolicyScope;
use std::time::Duration;

const ALL: Check = Check::of(CheckGroup::Policies, "policies", "the node's pods have the rules of their policies");
const POD: Check = Check::of(CheckGroup::Policies, "pod-policy", "the pod has the rules of its policy");

/// The timeout of the request to the agent.
const AGENT_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of pods that have a line; the rest is counted.
const LISTED: usize = 10;
const SEE_AGENT: &str = "if this lasts, see the pod's Events and the agent's log";

/// Asks the node's agent for the policies of its pods. The error is the reason why they are unknown.
pub(super) fn ask(target: &CheckTarget, conf: Option<&NetConf>, results: &Results) -> Result<PoliciesReport, String> {
    if let Some(why) = results.obstacle(&[&AGENT]) {
        return Err(why);
    }
    let socket = conf.and_then(|conf| conf.kubernetes.agent_socket.as_deref());
    let socket = socket.and_then(|path| target.reach_named(path).ok());
    let socket = socket.ok_or_else(|| "the configuration names no agent_socket".to_owned())?;
    pod_policies(&socket, AGENT_TIMEOUT)
}

/// Adds the check of all pods of the node, and a line for each of the first pods that are not current.
pub(super) fn examine_node(report: Result<&PoliciesReport, &String>, results: &mut Results) {
    let report = match report {
        Ok(report) => report,
        Err(why) => return results.add(&ALL, CheckVerdict::not_checked(why.clone())),
    };
    results.add(&ALL, summary(report));
    let mut pods: Vec<&PodPolicyStatus> = report.pods.iter().collect();
    pods.sort_by(|a, b| (severity(&a.state), &a.pod).cmp(&(severity(&b.state), &b.pod)));
    for pod in pods.into_iter().take(LISTED) {
        results.add(&POD, verdict(pod));
    }
}

fn severity(state: &str) -> u8 {
    match state {
        "none" => 0,
        "refused" => 1,
        _ => 2,
    }
}

fn summary(report: &PoliciesReport) -> CheckVerdict {
    let PoliciesReport { scope, current, older, refused, none, pods } = report;
    if scope.is_empty() {
        return CheckVerdict::not_checked(
            "the agent does not compare policies (chart value livePolicy, flag --live-policy)",
        );
    }
    let counts = format!("{current} current, {older} older, {refused} refused, {none} without rules");
    let follows = match scope.parse() {
        Ok(LivePolicyScope::Off) => "; running pods follow no change (livePolicy is off)",
        Ok(LivePolicyScope::All) => "; running pods follow all changes",
        Ok(LivePolicyScope::Exclusions) => "; running pods follow changes of exclusions",
        Err(_) => "",
    };
    let wrong = older.saturating_add(*refused).saturating_add(*none);
    let listed = pods.len().min(LISTED);
    let more = usize::try_from(wrong).unwrap_or(usize::MAX).saturating_sub(listed);
    let more = if more > 0 { format!("; {more} of them are not listed") } else { String::new() };
    let found = format!("{counts}{follows}{more}");
    let next = "see the lines below; detour doctor -n NAMESPACE POD shows the difference";
    match (older, refused.saturating_add(*none)) {
        (0, 0) => CheckVerdict::pass(found),
        (_, 0) => CheckVerdict::warn(found, next),
        _ => CheckVerdict::fail(found, next),
    }
}

/// Returns the verdict about a pod that is not current, as the agent reports it.
fn verdict(PodPolicyStatus { pod, state, applied, reason, .. }: &PodPolicyStatus) -> CheckVerdict {
    let applied = if applied.is_empty() { String::new() } else { format!(" (policy {applied})") };
    let found = format!("{}/{}: {state}{applied}: {reason}", pod.namespace, pod.name);
    match state.as_str() {
        "none" => CheckVerdict::fail(
            found,
            "delete the pod, or let the agent repair it (chart value repair.enabled); detour audit shows its traffic",
        ),
        "refused" => CheckVerdict::fail(found, CORRECT),
        _ => CheckVerdict::warn(found, format!("recreate the pod if the reason says so; {SEE_AGENT}")),
    }
}

const CORRECT: &str = "correct the value, also in the pod template; until then, the pod keeps its rules";
