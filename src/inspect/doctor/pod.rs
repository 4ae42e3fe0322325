//! Checks of a pod: its networks annotation, the definitions that it names, the configurations that these lead to, and
//! the decision about the pod, as in `explain`. Also checks of what was reported about it: Events, and the journal entries of
//! the runtime and of the kubelet. They show the messages of other programs as they are.

use super::findings::Findings;
use super::node::output;
use super::report::{CheckTarget, CheckVerdict, ReportLine};
use crate::cluster::Lookup;
use crate::cni::OWN_TYPES;
use crate::host_path::HostPath;
use crate::inspect::configurations::{NetworkLead, SelectedNetwork, selected_definitions};
use crate::inspect::explain::{Explanation, explain};
use crate::inspect::subject::Subject;
use crate::inspect::terminal::{counted, joined};
use crate::networks;
use crate::pod::PodRef;
use crate::pod::well_known::INIT_CONTAINER;
use crate::printable::{cut, without_passwords, without_secrets};
use k8s_openapi::api::core::v1::Event;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Reads the pod's facts, and evaluates the configuration for it.
pub(super) fn known(findings: &mut Findings<'_>) -> Option<CheckVerdict> {
    let pod = findings.target.pod.as_ref()?;
    let source = match findings.source() {
        Ok(source) => source,
        Err(why) => return Some(CheckVerdict::not_checked(why)),
    };
    let subject = source.facts(pod, true).and_then(|facts| {
        findings.definitions = selected_definitions(&facts.pod, &*source);
        Subject::given(&findings.configurations, facts, Some(&*source))
    });
    let found = subject.map(|subject| {
        findings.explained = Some(explain(&subject));
        let uid = &findings.subject.insert(subject).facts.pod.uid;
        format!("UID {}", uid.as_deref().unwrap_or("unknown"))
    });
    let next = format!("compare with kubectl get pod -n {} {}", pod.namespace, pod.name);
    Some(CheckVerdict::of(found, next))
}

/// Checks the annotation that names the pod's networks.
pub(super) fn annotation(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let subject = findings.subject.as_ref()?;
    let found = networks::networks(&subject.facts.pod).map(|selections| match selections.elements.is_empty() {
        true => "the annotation names no network".to_owned(),
        false => joined(subject.selected.iter().map(|one| &one.name)),
    });
    Some(CheckVerdict::of(found, "correct the annotation in the pod template, and delete the pod"))
}

/// Returns one verdict for the networks that the pod selects, from each one and its definition, if that can be read.
fn of_networks(
    Findings { subject, definitions, .. }: &Findings<'_>,
    verdict: impl Fn(&SelectedNetwork, Option<&Lookup>) -> CheckVerdict,
) -> Option<CheckVerdict> {
    let selected = &subject.as_ref()?.selected;
    let definition = |name: &str| definitions.iter().find(|(object, _)| object.to_string() == name);
    let verdicts = selected.iter().map(|one| verdict(one, definition(&one.name).map(|(_, lookup)| lookup)));
    (!selected.is_empty()).then(|| CheckVerdict::merged(verdicts))
}

/// Checks whether the definitions of the pod's networks exist.
pub(super) fn definition_found(findings: &Findings<'_>) -> Option<CheckVerdict> {
    of_networks(findings, |SelectedNetwork { name, .. }, definition| match definition {
        Some(Lookup::Found(_)) => CheckVerdict::pass(name),
        Some(Lookup::Missing(_)) => CheckVerdict::fail(
            format!("NetworkAttachmentDefinition {name} not found"),
            "create it (manifests/samples has an example), or correct the annotation: NAMESPACE/NAME names one of another \
             namespace",
        ),
        None => CheckVerdict::to_do(format!("{name} can't be read"), "run kubectl get net-attach-def -A"),
    })
}

/// Checks whether the definitions of the pod's networks lead to a configuration.
pub(super) fn definition_leads(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let subject = findings.subject.as_ref()?;
    of_networks(findings, |SelectedNetwork { name, leads_to }, definition| match (definition, leads_to) {
        (Some(Lookup::Found(definition)), NetworkLead::OnNode) => {
            if let Some(because) = findings.obstacle(&["configuration-present", "configuration-valid"]) {
                return because;
            }
            let found = networks::configuration(definition, &directory(findings.target, subject), &mut Vec::new());
            CheckVerdict::of(
                found.map(|found| format!("{name}: {}", joined(found.types()))),
                "give the configuration on the node the name of the definition (key name in the file of detour install \
                 --config), or add spec.config to the definition",
            )
        }
        (_, lead) => CheckVerdict::pass(format!("{name}: {}", lead.text())),
    })
}

/// Returns the directory in which configurations are found by name: the primary plugin's `confDir`, or else the
/// directory of the plugin's own configuration.
fn directory(target: &CheckTarget, subject: &Subject) -> PathBuf {
    let named = subject.conf.primary.as_ref().and_then(|primary| target.reach_named(&primary.conf_dir).ok());
    let reached = named.unwrap_or_else(|| target.reach(&target.conf).unwrap_or_default());
    if reached.is_file() { reached.parent().map(Path::to_owned).unwrap_or_default() } else { reached }
}

/// The checks whose failure explains why the plugin does not run for the pod.
const OF_NETWORKS: [&str; 3] = ["annotation-valid", "definition-found", "definition-leads"];

/// Checks whether the plugin runs for the pod: for every pod, or because the pod selects one of its networks.
pub(super) fn attached(findings: &Findings<'_>) -> Option<CheckVerdict> {
    if let Some(because) = findings.failure(|line| OF_NETWORKS.contains(&&*line.id)) {
        return Some(because);
    }
    let subject = findings.subject.as_ref()?;
    if let Some(one) = findings.configurations.iter().find(|applied| !applied.as_attachment) {
        return Some(CheckVerdict::pass(format!("for every pod ({})", one.origin.places.join(", "))));
    }
    let is_own = |one: &&SelectedNetwork| match &one.leads_to {
        NetworkLead::File(_) => true,
        NetworkLead::Definition(types) => types.iter().any(|kind| OWN_TYPES.contains(&kind.as_str())),
        _ => false,
    };
    let own = joined(subject.selected.iter().filter(is_own).map(|one| &one.name));
    let network = findings.configurations.first().map_or("istio-cni", |applied| applied.conf.name.as_str());
    Some(match subject.facts.pod.proxy() {
        _ if !own.is_empty() => CheckVerdict::pass(own),
        None => CheckVerdict::not_checked("the pod has no sidecar"),
        Some(_) => CheckVerdict::fail(
            "the pod's annotation names no network of this plugin",
            format!(
                "add the annotation k8s.v1.cni.cncf.io/networks: default/{network} to the pod template, or to the sidecar \
                 injector's template for all pods (manifests/samples); without Multus, run detour install --chained=true"
            ),
        ),
    })
}

/// Checks the decision that an ADD would make.
pub(super) fn redirected(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let explains = |line: &ReportLine| line.id == "plugin-attached" || OF_NETWORKS.contains(&&*line.id);
    if let Some(because) = findings.failure(explains) {
        return Some(because);
    }
    Some(match findings.explained.as_ref()? {
        Ok(explained) => decision(findings.subject.as_ref()?, explained),
        Err(error) => CheckVerdict::fail(error.to_string(), "correct it; until then, the ADD of this pod fails"),
    })
}

fn decision(Subject { facts, .. }: &Subject, explanation: &Explanation) -> CheckVerdict {
    let (pod, Explanation { decision, policy, .. }) = (&facts.pod, explanation);
    let by_others = pod.all_containers().any(|container| container.name == INIT_CONTAINER);
    let ignored = explanation.notes.iter().filter(|note| note.starts_with("warning: "));
    let warnings = match explanation.warnings.len() + ignored.count() {
        0 => String::new(),
        count => format!("; {}, see detour explain", counted(count, "warning")),
    };
    if explanation.redirected || by_others || policy.ambient || (pod.proxy().is_some() && !policy.is_empty()) {
        return CheckVerdict::pass(format!("{decision}{warnings}"));
    }
    let next = "if the pod is meant to be redirected, change what decided, such as the label istio-injection of its namespace \
        or kubernetes.exclude_namespaces, and delete the pod; see detour explain";
    CheckVerdict::fail(decision.clone(), next)
}

/// Reasons of Events that report a failed pod sandbox (kubelet, `pkg/kubelet/events`; Multus).
const FAILURES: [&str; 3] = ["FailedCreatePodSandBox", "FailedCreatePodContainer", "NoNetworkFound"];
/// Directories of the journal on the node: permanent and volatile (systemd-journald.service(8)).
const JOURNALS: [&str; 2] = ["/var/log/journal", "/run/log/journal"];
/// Units of systemd that run the container runtime or the kubelet. The detected platform can be wrong, therefore all
/// are tried (docs.k3s.io, docs.rke2.io, docs.k0sproject.io, `MicroK8s`: "Configuring services", microshift.io).
const UNITS: &str = "crio, containerd, docker, cri-docker, kubelet, k3s, k3s-agent, rke2-server, rke2-agent, k0scontroller, \
    k0sworker, snap.microk8s.daemon-containerd, snap.microk8s.daemon-kubelite, microshift";
/// The maximum length of a line in a finding, in bytes.
const MAX_LINE: usize = 1000;

/// Checks the pod's Events. A failure counts only while the pod has no network namespace.
pub(super) fn events(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let pod = findings.target.pod.as_ref()?;
    let events = findings.api().and_then(|api| api.events(pod).map_err(|error| error.to_string()));
    Some(match events {
        Ok(events) => events_verdict(&events, findings.found().is_some()),
        Err(why) => CheckVerdict::to_do(why, format!("run kubectl describe pod -n {} {}", pod.namespace, pod.name)),
    })
}

fn events_verdict(events: &[Event], running: bool) -> CheckVerdict {
    let is_failure = |event: &&Event| event.reason.as_deref().is_some_and(|reason| FAILURES.contains(&reason));
    let Some(last) = events.iter().rfind(is_failure) else {
        return CheckVerdict::pass(format!("Events that report no failure: {}", events.len()));
    };
    let (reason, message) = (last.reason.as_deref().unwrap_or_default(), last.message.as_deref().unwrap_or_default());
    let found = format!("{reason}: {}", shown(message));
    if running {
        return CheckVerdict::pass(format!("the pod started since; before that: {found}"));
    }
    CheckVerdict::fail(found, "see the reason in the message, and the runtime's log on the node")
}

/// Checks the journal entries of the runtime and of the kubelet.
pub(super) fn runtime_log(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let PodRef { namespace, name, .. } = findings.target.pod.as_ref()?;
    let container = findings.found().and_then(|found| found.container_id.as_deref());
    // Runtimes write shop/web-0, shop_web-0, or namespace and name each with its key.
    let has = |line: &str, word: &str| {
        line.split(|c: char| !c.is_ascii_alphanumeric() && !"-.".contains(c)).any(|token| token == word)
    };
    let is_about =
        |line: &&str| container.is_some_and(|id| line.contains(id)) || (has(line, name) && has(line, namespace));
    Some(match read_journal(findings.target) {
        Ok(text) => {
            let lines: Vec<&str> = text.lines().filter(is_about).collect();
            match lines.first().map(|last| shown(last)) {
                None => CheckVerdict::pass("the journal of the last day has no line about this pod"),
                Some(last) if last.contains("level=error") => CheckVerdict::fail(last, "see the reason in the message"),
                Some(last) => CheckVerdict::pass(format!("lines of the last day: {}, the last: {last}", lines.len())),
            }
        }
        Err(why) => {
            let next = format!("run on the node: journalctl -u crio -u containerd -u kubelet | grep {name}");
            CheckVerdict::to_do(why, next)
        }
    })
}

/// Reads the journal entries of the last day, the newest first: the output is cut at its end.
fn read_journal(target: &CheckTarget) -> Result<String, String> {
    let reached = JOURNALS.iter().filter_map(|path| target.reach(&HostPath::new(path)?).ok());
    let directory = reached.into_iter().find(|path| path.is_dir());
    let directory = directory.ok_or_else(|| format!("no journal found in {}", JOURNALS.join(" and ")))?;
    let mut command = Command::new("journalctl");
    command.args(["--no-pager", "--quiet", "--output=short-iso", "--since=-24h", "--reverse", "--directory"]);
    command.arg(directory).args(UNITS.split(", ").flat_map(|unit| ["-u", unit]));
    let text = output(&mut command).map_err(|why| format!("the journal was not read: journalctl: {why}"))?;
    // A cut line is dropped: half of a secret may not be recognized as one.
    let (whole, _) =
        text.rsplit_once('\n').ok_or_else(|| format!("the journal has no entries of the units {UNITS}"))?;
    Ok(whole.to_owned())
}

/// Returns text of another program as one line, without secrets, because users share the report.
fn shown(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    cut(&without_passwords(&without_secrets(&line)), MAX_LINE).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::doctor::report::CheckOutcome;

    fn event(reason: &str, message: &str) -> Event {
        let (reason, message) = (Some(reason.to_owned()), Some(message.to_owned()));
        Event { type_: Some("Warning".to_owned()), reason, message, count: Some(2), ..Event::default() }
    }

    #[test]
    fn a_failed_start_is_a_failure_until_the_pod_runs() {
        let events =
            [event("FailedCreatePodSandBox", "failed to find plugin \"istio-cni\""), event("BackOff", "again")];
        let CheckVerdict { outcome, found, next } = events_verdict(&events, false);
        assert!(found.starts_with("FailedCreatePodSandBox: ") && outcome == CheckOutcome::Fail, "{found}");
        assert!(next.is_some_and(|next| next.contains("the runtime's log")));
        assert!(events_verdict(&events, true).found.starts_with("the pod started since"));
        assert_eq!(events_verdict(&events[1..], false).outcome, CheckOutcome::Pass);
    }

    /// Names and words in a message say nothing about its cause.
    #[test]
    fn an_event_of_another_reason_is_no_failed_start() {
        let messages = [
            "Failed to pull image \"registry/network-tools:1\": not found",
            "secret \"network-tls\" is forbidden",
            "pod shop/web-0: annotation \"detour.io/exclude-uids\": invalid UID \"abc\"; expected a number",
        ];
        for message in messages {
            assert_eq!(events_verdict(&[event("Failed", message)], false).outcome, CheckOutcome::Pass, "{message}");
        }
    }
}
