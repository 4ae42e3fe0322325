//! Checks of a pod: its networks annotation, the definitions that it names, the configurations that these lead to, and
//! the decision about the pod, as in `explain`. Also checks of what was reported about it: Events, the journal entries of
//! the runtime and of the kubelet, and the plugin's log file. They show the messages of other programs as they are.

use super::findings::Findings;
use super::node::output;
use super::report::{CheckTarget, CheckVerdict, ReportLine};
use crate::cluster::{Lookup, ObjectRef};
use crate::cni::OWN_TYPES;
use crate::host_path::HostPath;
use crate::inspect::configurations::{NetworkLead, SelectedNetwork, selected_definitions};
use crate::inspect::explain::{Explanation, explain};
use crate::inspect::subject::Subject;
use crate::inspect::terminal::{counted, joined};
use crate::pod::PodRef;
use crate::pod::well_known::INIT_CONTAINER;
use crate::printable::{cut, without_passwords, without_secrets};
use crate::{logging, networks, trusted_file};
use k8s_openapi::api::core::v1::Event;
use rustix::fs::OFlags;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The network name for the next step if no configuration has one.
const USUAL: &str = "istio-cni";

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
    Some(match subject {
        Ok(subject) => {
            let uid = subject.facts.pod.uid.as_deref().unwrap_or("unknown");
            let verdict = CheckVerdict::pass(format!("UID {uid}"));
            findings.explained = Some(explain(&subject));
            findings.subject = Some(subject);
            verdict
        }
        Err(error) => {
            let next = format!("compare with kubectl get pod -n {} {}", pod.namespace, pod.name);
            CheckVerdict::fail(error.to_string(), next)
        }
    })
}

/// Checks the annotation that names the pod's networks.
pub(super) fn annotation(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let subject = findings.subject.as_ref()?;
    Some(match networks::networks(&subject.facts.pod) {
        Ok(selections) if selections.elements.is_empty() => CheckVerdict::pass("the annotation names no network"),
        Ok(_) => CheckVerdict::pass(joined(subject.selected.iter().map(|one| &one.name))),
        Err(error) => {
            CheckVerdict::fail(error.to_string(), "correct the annotation in the pod template, and delete the pod")
        }
    })
}

/// Returns one verdict for the networks that the pod selects, from each one and its definition, if that can be read.
fn of_networks(
    findings: &Findings<'_>,
    verdict: impl Fn(&SelectedNetwork, &ObjectRef, Option<&Lookup>) -> CheckVerdict,
) -> Option<CheckVerdict> {
    let subject = findings.subject.as_ref()?;
    let elements = networks::networks(&subject.facts.pod).ok()?.elements;
    let objects = elements.iter().map(|one| &one.object);
    let verdicts = subject.selected.iter().zip(objects);
    let verdicts = verdicts.map(|(one, object)| verdict(one, object, findings.definitions.get(object)));
    (!subject.selected.is_empty()).then(|| CheckVerdict::merged(verdicts))
}

/// Checks whether the definitions of the pod's networks exist.
pub(super) fn definition_found(findings: &Findings<'_>) -> Option<CheckVerdict> {
    of_networks(findings, |SelectedNetwork { name, .. }, object, definition| match definition {
        Some(Lookup::Found(_)) => CheckVerdict::pass(name),
        Some(Lookup::Missing(_)) => CheckVerdict::fail(
            format!("NetworkAttachmentDefinition {name} not found"),
            "create it (manifests/samples has an example), or correct the annotation: NAMESPACE/NAME names one of another \
             namespace",
        ),
        None => CheckVerdict::to_do(
            format!("{name} can't be read"),
            format!("run kubectl get network-attachment-definitions -n {} {}", object.namespace, object.name),
        ),
    })
}

/// Checks whether the definitions of the pod's networks lead to a configuration.
pub(super) fn definition_leads(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let subject = findings.subject.as_ref()?;
    of_networks(findings, |SelectedNetwork { name, leads_to }, _, definition| match (definition, leads_to) {
        (Some(Lookup::Found(definition)), NetworkLead::OnNode) => {
            if let Some(why) = findings.obstacle(&["configuration-present", "configuration-valid"]) {
                return CheckVerdict::not_checked(why);
            }
            match networks::configuration(definition, &directory(findings.target, subject), &mut Vec::new()) {
                Ok(found) => CheckVerdict::pass(format!("{name}: {}", joined(found.types()))),
                Err(error) => CheckVerdict::fail(
                    error.to_string(),
                    "give the configuration on the node the name of the definition (key name in the file of detour install \
                     --config), or add spec.config to the definition",
                ),
            }
        }
        (_, lead) => CheckVerdict::pass(format!("{name}: {}", lead.text())),
    })
}

/// Returns the directory in which configurations are found by name: the primary plugin's `confDir`, or else the
/// directory of the plugin's own configuration.
fn directory(target: &CheckTarget, subject: &Subject) -> PathBuf {
    let named = subject.conf.primary.as_ref().and_then(|primary| target.reach_named(&primary.conf_dir).ok());
    let own = || target.reach(&target.conf).unwrap_or_default();
    let reached = named.unwrap_or_else(own);
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
    let network = findings.configurations.first().map_or(USUAL, |applied| applied.conf.name.as_str());
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
    let next = match pod.proxy() {
        None => format!(
            "to add the pod to the mesh, label its namespace (kubectl label namespace {} istio-injection=enabled) and delete \
             the pod; otherwise nothing is wrong",
            pod.namespace
        ),
        Some(_) => {
            "if the pod is meant to be redirected, change what decided (kubernetes.exclude_namespaces, or see detour \
                    explain); otherwise nothing is wrong"
                .to_owned()
        }
    };
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
/// The number of bytes that are read from the end of a log file.
const TAIL: u64 = 1 << 20;
const REPLACE_LOG: &str = "set log_file to a path such as /var/log/detour.log";
/// The maximum length of a line in a finding, in bytes.
const MAX_LINE: usize = 1000;

/// Checks the pod's Events. A failure counts only while the pod has no network namespace.
pub(super) fn events(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let pod = findings.target.pod.as_ref()?;
    let events = findings.api().and_then(|api| api.events(pod).map_err(|error| error.to_string()));
    Some(match events {
        Ok(events) => events_verdict(&events, findings.found().is_some()),
        Err(why) => {
            let PodRef { namespace, name, .. } = pod;
            let next = format!("run kubectl get events -n {namespace} --field-selector involvedObject.name={name}");
            CheckVerdict::to_do(why, next)
        }
    })
}

fn events_verdict(events: &[Event], running: bool) -> CheckVerdict {
    let is_failure = |event: &&Event| {
        event.type_.as_deref() == Some("Warning")
            && event.reason.as_deref().is_some_and(|reason| FAILURES.contains(&reason))
    };
    let failures: Vec<&Event> = events.iter().filter(is_failure).collect();
    let Some(last) = failures.last() else {
        return CheckVerdict::pass(match events.len() {
            0 => "no Events".to_owned(),
            count => format!("{count} Events, none reports a failure"),
        });
    };
    let count = |event: &&Event| event.count.or_else(|| event.series.as_ref()?.count).map(i64::from);
    let times: i64 = failures.iter().map(|event| count(event).unwrap_or(1)).sum();
    let (reason, message) = (last.reason.as_deref().unwrap_or_default(), last.message.as_deref().unwrap_or_default());
    let found = format!("{reason}, {times} times: {}", shown(message));
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
        Ok((units, text)) => {
            let mut lines: Vec<&str> = text.lines().filter(is_about).collect();
            lines.reverse();
            last_line_verdict(&lines, &format!("the journal of the last day ({})", units.join(", ")))
        }
        Err(why) => CheckVerdict::to_do(why, by_hand(name)),
    })
}

/// Reads the journal entries of the last day, the newest first: the output is cut at its end. Returns the units that it has,
/// and the entries.
fn read_journal(target: &CheckTarget) -> Result<(Vec<&'static str>, String), String> {
    let reached = JOURNALS.iter().filter_map(|path| target.reach(&HostPath::new(path)?).ok());
    let directory = reached.into_iter().find(|path| path.is_dir());
    let directory = directory.ok_or_else(|| format!("no journal found in {}", JOURNALS.join(" and ")))?;
    let journalctl = |arguments: &[&str]| {
        let mut command = Command::new("journalctl");
        command.arg("--directory").arg(&directory).args(["--no-pager", "--quiet"]).args(arguments);
        output(&mut command).map_err(|why| format!("the journal was not read: journalctl: {why}"))
    };
    let logged = journalctl(&["--field=_SYSTEMD_UNIT"])?;
    let is_logged = |unit: &&str| logged.lines().any(|line| line.strip_suffix(".service") == Some(unit));
    let units: Vec<&str> = UNITS.split(", ").filter(is_logged).collect();
    if units.is_empty() {
        return Err(format!("the journal has no entries of the units {UNITS}"));
    }
    let mut arguments = vec!["--output=short-iso", "--since=-24h", "--reverse"];
    arguments.extend(units.iter().flat_map(|unit| ["-u", unit]));
    let text = journalctl(&arguments)?;
    // A cut line is dropped: half of a secret may not be recognized as one.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    Ok((units, whole.to_owned()))
}

/// Returns the command that shows the entries with `pattern` on the node.
fn by_hand(pattern: &str) -> String {
    format!("run on the node: journalctl -u crio -u containerd -u kubelet | grep {pattern}")
}

/// Checks the plugin's log file.
pub(super) fn plugin_log(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let PodRef { namespace, name, .. } = findings.target.pod.as_ref()?;
    let about = format!("pod={namespace}/{name}");
    let Some(file) = findings.conf().and_then(|conf| conf.log_file.as_deref()) else {
        let why = "log_file is not set; the runtime logs the plugin's lines";
        return Some(CheckVerdict::to_do(why, by_hand(&about)));
    };
    if let Err(why) = logging::check_log_file(file) {
        return Some(CheckVerdict::fail(format!("log_file: {why}; the plugin logs to stderr only"), REPLACE_LOG));
    }
    let shown = file.display();
    let is_about = |line: &&str| line.split(' ').any(|word| word == about);
    Some(match findings.target.reach_named(file).and_then(|file| tail(&file)) {
        Err(why) => CheckVerdict::not_checked(format!("{shown}: {why}")),
        Ok(text) => last_line_verdict(&text.lines().filter(is_about).collect::<Vec<_>>(), &shown.to_string()),
    })
}

/// Checks whether the last line about the pod reports an error.
fn last_line_verdict(lines: &[&str], place: &str) -> CheckVerdict {
    match lines.last() {
        None => CheckVerdict::pass(format!("{place} has no line about this pod")),
        Some(last) if last.contains("level=error") => CheckVerdict::fail(shown(last), "see the reason in the message"),
        Some(last) => CheckVerdict::pass(format!("log lines in {place}: {}, the last: {}", lines.len(), shown(last))),
    }
}

/// Returns text of another program as one line, without secrets, because users share the report.
fn shown(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    cut(&without_passwords(&without_secrets(&line)), MAX_LINE).into_owned()
}

/// Reads the last part of a file.
fn tail(file: &Path) -> io::Result<String> {
    let mut file = trusted_file::open(file, OFlags::RDONLY)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    // A cut line is dropped: half of a secret may not be recognized as one.
    let whole = if length > TAIL { text.split_once('\n').map_or("", |(_, whole)| whole) } else { &text };
    Ok(whole.to_owned())
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
        assert!(found.starts_with("FailedCreatePodSandBox, 2 times: ") && outcome == CheckOutcome::Fail, "{found}");
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

    #[test]
    fn only_the_last_line_counts() {
        let (bad, good) = ("level=error msg=no", "level=info msg=yes");
        let outcome = |lines: &[&str]| last_line_verdict(lines, "f").outcome;
        assert_eq!(outcome(&[good, bad]), CheckOutcome::Fail);
        assert_eq!(outcome(&[bad, good]), CheckOutcome::Pass);
        assert_eq!(outcome(&[]), CheckOutcome::Pass);
    }
}
