//! Checks of the policies of running pods: whether a pod has the rules that an ADD would make now. The agent reports the
//! node's pods; the decision about one pod is made here, so that it does not need the agent.

use super::checks;
use super::report::{AGENT_TIMEOUT, CheckTarget, CheckVerdict, Results};
use crate::cluster::agent::{PodPolicyStatus, PoliciesReport, pod_policies};
use crate::cni::NetConf;
use crate::netns::find::FoundNetns;
use crate::plugin::running::live_policy::{
    Assessment, Input, RunningPod, Verdict, applied_policy, assess, assess_changed, changes, follows_changes,
    policy_name, running_container,
};
use crate::pod::Facts;
use crate::pod::well_known::LIVE_POLICY;
use crate::policy::{LivePolicyScope, Policy};

/// The number of pods that have a line; the rest is counted.
const LISTED: usize = 10;
const SEE_AGENT: &str = "if this lasts, see the pod's Events and the agent's log";

/// Asks the node's agent for the policies of its pods. The error is the reason why they are unknown.
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
    let mut pods: Vec<&PodPolicyStatus> = report.pods.iter().collect();
    pods.sort_by(|a, b| (severity(&a.state), &a.pod).cmp(&(severity(&b.state), &b.pod)));
    for pod in pods.into_iter().take(LISTED) {
        results.add(checks::POD_POLICY, verdict(pod));
    }
}

fn severity(state: &str) -> u8 {
    match state {
        "none" => 0,
        "rejected" => 1,
        _ => 2,
    }
}

fn summary(report: &PoliciesReport) -> CheckVerdict {
    let PoliciesReport { scope, current, older, rejected, none, pods, .. } = report;
    if scope.is_empty() {
        return CheckVerdict::not_checked(
            "the agent does not compare policies (chart value livePolicy, flag --live-policy)",
        );
    }
    let counts = format!("{current} current, {older} older, {rejected} rejected, {none} without rules");
    let follows = match scope.parse() {
        Ok(LivePolicyScope::Off) => "; running pods follow no change (livePolicy is off)",
        Ok(LivePolicyScope::All) => "; running pods follow changes of exclusions and of the redirection's settings",
        Ok(LivePolicyScope::Exclusions) => "; running pods follow changes of exclusions",
        Err(_) => "",
    };
    let wrong = older.saturating_add(*rejected).saturating_add(*none);
    let listed = pods.len().min(LISTED);
    let more = usize::try_from(wrong).unwrap_or(usize::MAX).saturating_sub(listed);
    let more = if more > 0 { format!("; {more} of them are not listed") } else { String::new() };
    let found = format!("{counts}{follows}{more}");
    let next = "see the lines below; detour doctor -n NAMESPACE POD shows the difference";
    match (older, rejected.saturating_add(*none)) {
        (0, 0) => CheckVerdict::pass(found),
        (_, 0) => CheckVerdict::warn(found, next),
        _ => CheckVerdict::fail(found, next),
    }
}

/// Returns the verdict about a pod that is not current, as the agent reports it.
fn verdict(status: &PodPolicyStatus) -> CheckVerdict {
    let PodPolicyStatus { pod, state, applied, reason, needs_new_pod, .. } = status;
    let applied = if applied.is_empty() { String::new() } else { format!(" (policy {applied})") };
    let name = format!("{}/{}", pod.namespace, pod.name);
    let reason = reason.strip_prefix(&format!("pod {name}: ")).unwrap_or(reason);
    let found = format!("{name}: {state}{applied}: {reason}");
    match state.as_str() {
        "none" => CheckVerdict::fail(
            found,
            "delete the pod, or let the agent repair it (chart value repair.enabled); detour audit shows its traffic",
        ),
        "rejected" => CheckVerdict::fail(found, CORRECT),
        _ if *needs_new_pod => CheckVerdict::warn(found, recreate(&pod.namespace, &pod.name)),
        _ => CheckVerdict::warn(found, format!("wait some seconds; {SEE_AGENT}")),
    }
}

const CORRECT: &str = "correct the value, also in the pod template; until then, the pod keeps its rules";

/// A pod and what the earlier checks found about it.
pub(super) struct PodSubject<'a> {
    pub(super) found: Option<&'a FoundNetns>,
    pub(super) facts: Option<&'a Facts>,
    /// The configurations that are installed on the node.
    pub(super) installed: Vec<&'a NetConf>,
    /// The agent's answer about the node's pods.
    pub(super) report: Result<&'a PoliciesReport, &'a String>,
}

impl PodSubject<'_> {
    /// Adds the check of the pod.
    pub(super) fn examine(&self, target: &CheckTarget, results: &mut Results) {
        results.run(checks::POD_POLICY, || {
            let container = self.found.and_then(|found| found.container_id.as_deref());
            match (container.map(running_container), self.facts) {
                (Some(Ok(Some(running))), Some(facts)) => self.compare(target, &running, facts),
                (Some(Err(error)), _) => CheckVerdict::not_checked(error.to_string()),
                _ => CheckVerdict::not_checked("the pod has no saved rules"),
            }
        });
    }

    fn compare(&self, target: &CheckTarget, running: &RunningPod, facts: &Facts) -> CheckVerdict {
        let desired = &running.desired(&target.mount, facts, &self.installed);
        let scope = self.report.map(|report| report.scope.parse().unwrap_or(LivePolicyScope::Off));
        let input = Input { running, facts, desired, scope: scope.unwrap_or(LivePolicyScope::Off) };
        let found = assess(&input);
        let Some(state) = found.verdict else {
            return CheckVerdict::not_checked("the pod has no rules, and needs none");
        };
        let applied = policy_name(&found.applied);
        let recreate = recreate(&facts.pod.namespace, &facts.pod.name);
        match state {
            Verdict::Current => CheckVerdict::pass(format!("{applied}, current{}", following(scope, facts))),
            Verdict::Rejected => {
                CheckVerdict::fail(format!("rejected: {}; the pod keeps {applied}", found.reason), CORRECT)
            }
            Verdict::Older | Verdict::None => {
                let older = older(&found);
                let (found, next) = match (&found.change, scope) {
                    (Some(change), _) => {
                        let words = changes(
                            &applied_policy(running),
                            &Policy::union_of(change.iter().map(|(_, policy)| policy)),
                        );
                        let after = assess_changed(&input, change);
                        let rest = if after.reason.is_empty() { String::new() } else { format!("; {}", after.reason) };
                        let next = match rest.is_empty() {
                            true => format!("wait some seconds; {SEE_AGENT}"),
                            false => recreate,
                        };
                        (format!("{older}; the agent applies: {words}{rest}"), next)
                    }
                    (None, Err(why)) if found.has_rules && !found.desired.is_empty() => {
                        let desired = desired.iter().flat_map(|desired| &desired.policies).map(|(_, policy)| policy);
                        let words = changes(&applied_policy(running), &Policy::union_of(desired));
                        (format!("{older}: {words}; no agent applies changes: {why}"), recreate)
                    }
                    (None, _) => (format!("{older}: {}", found.reason), recreate),
                };
                CheckVerdict::warn(found, next)
            }
        }
    }
}

/// Returns the policy of a pod that is not current, and the desired one unless its inputs are unknown.
fn older(Assessment { applied, desired, .. }: &Assessment) -> String {
    let desired = if desired.is_empty() { String::new() } else { format!("; a new pod gets {}", policy_name(desired)) };
    format!("older: {}{desired}", policy_name(applied))
}

/// Returns what a current pod follows in the future.
fn following(scope: Result<LivePolicyScope, &String>, facts: &Facts) -> String {
    match scope {
        Err(_) => String::new(),
        Ok(LivePolicyScope::Off) => "; the pod follows no change (livePolicy is off)".to_owned(),
        Ok(_) if follows_changes(facts) == Ok(false) => {
            format!("; the pod follows no change that adds a bypass (annotation {LIVE_POLICY} is false)")
        }
        Ok(LivePolicyScope::All) => {
            "; the pod follows changes of exclusions and of the redirection's settings".to_owned()
        }
        Ok(LivePolicyScope::Exclusions) => "; the pod follows changes of exclusions".to_owned(),
    }
}

fn recreate(namespace: &str, name: &str) -> String {
    format!("recreate the pod, so that it gets its current policy: kubectl delete pod -n {namespace} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_of_a_new_pod_is_named_only_if_it_is_known() {
        let of = |desired: &str| {
            let (applied, desired) = ("3f2a00000000".to_owned(), desired.to_owned());
            older(&Assessment { applied, desired, ..Assessment::default() })
        };
        assert_eq!(of(""), "older: policy 3f2a00000000");
        assert_eq!(of("af31cf3862f0"), "older: policy 3f2a00000000; a new pod gets policy af31cf3862f0");
    }
}
