//! Checks of what others reported about the pod: Events, the runtime's journal, and the plugin's log file; with a table
//! of known error messages and the next step for each.

use super::kernel;
use super::pod::KNOWN;
use super::redact::Redactor;
use super::report::{Check, CheckGroup, CheckTarget, CheckVerdict, Results};
use crate::cluster::{ApiProbe, ReportedEvent};
use crate::cni::NetConf;
use crate::pod::PodRef;
use crate::{logging, trusted_file};
use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::Command;

pub(super) const EVENTS: Check = Check::of(CheckGroup::Pod, "events", "no Event reports a failed start");
const JOURNAL: Check = Check::of(CheckGroup::Logs, "runtime-log", "the runtime logged no error about the pod");
const PLUGIN: Check = Check::of(CheckGroup::Logs, "plugin-log", "the plugin logged no error about the pod");

/// Reasons of Events that report a failed pod sandbox (kubelet, `pkg/kubelet/events`; Multus).
const FAILURES: [&str; 3] = ["FailedCreatePodSandBox", "FailedCreatePodContainer", "NoNetworkFound"];
/// The systemd units of runtimes.
const UNITS: [&str; 2] = ["crio", "containerd"];
/// The number of bytes that are read from the end of the plugin's log.
const TAIL: u64 = 1 << 20;
const REPLACE_LOG: &str = "set log_file to a path such as /var/log/detour.log";
/// The maximum length of a line in a finding.
const MAX_LINE: usize = 1000;

/// Checks the pod's Events. A failure counts only while the pod is not `running`.
pub(super) fn events(api: Option<&ApiProbe>, pod: &PodRef, running: bool, results: &mut Results) {
    let PodRef { namespace, name, .. } = pod;
    let by_hand = format!("run kubectl get events -n {namespace} --field-selector involvedObject.name={name}");
    results.after(&[&KNOWN], &EVENTS, || match api.map(|api| api.events(pod)) {
        None => CheckVerdict::NotChecked("no API server is known".to_owned(), Some(by_hand)),
        Some(Err(error)) => CheckVerdict::NotChecked(error.to_string(), Some(by_hand)),
        Some(Ok(events)) => events_verdict(&events, running),
    });
}

fn events_verdict(events: &[ReportedEvent], running: bool) -> CheckVerdict {
    let failures: Vec<&ReportedEvent> = events.iter().filter(|event| event.warning && is_failure(event)).collect();
    let Some(last) = failures.last() else {
        return CheckVerdict::pass(match events.len() {
            0 => "no Events".to_owned(),
            count => format!("{count} Events, none reports a failure"),
        });
    };
    let times: u64 = failures.iter().map(|event| event.count).sum();
    let found = format!("{}, {times} times: {}", last.reason, shown(&last.message));
    if running {
        return CheckVerdict::pass(format!("the pod started since; before that: {found}"));
    }
    let next = next(&last.message);
    CheckVerdict::fail(found, next.unwrap_or("see the reason in the message, and the runtime's log on the node"))
}

fn is_failure(event: &ReportedEvent) -> bool {
    FAILURES.contains(&event.reason.as_str()) || next(&event.message).is_some()
}

/// Checks the runtime's journal. Returns the lines about the pod.
pub(super) fn journal(
    target: &CheckTarget,
    pod: &PodRef,
    container: Option<&str>,
    results: &mut Results,
) -> Vec<String> {
    let PodRef { name, .. } = pod;
    let by_hand = format!("run on the node: journalctl -u crio -u containerd | grep {name}");
    let lines = read_journal(&target.mount);
    let about = |line: &&str| line.contains(name.as_str()) || container.is_some_and(|id| line.contains(id));
    let lines = lines.map(|text| text.lines().filter(about).map(str::to_owned).collect::<Vec<_>>());
    results.add(
        &JOURNAL,
        match &lines {
            Err(why) => CheckVerdict::NotChecked(why.clone(), Some(by_hand)),
            Ok(lines) => last_line_verdict(lines, "the journal of the last day"),
        },
    );
    lines.unwrap_or_default()
}

fn read_journal(mount: &Path) -> Result<String, String> {
    let directory =
        ["var/log/journal", "run/log/journal"].iter().map(|within| mount.join(within)).find(|dir| dir.is_dir());
    let directory = directory.ok_or("no journal found")?;
    let mut command = Command::new("journalctl");
    command.arg("--directory").arg(directory).args(["--no-pager", "--quiet", "--output=short-iso", "--since=-24h"]);
    command.args(UNITS.iter().flat_map(|unit| ["-u", unit]));
    let text = kernel::output(&mut command).map_err(|why| format!("journalctl: {why}"))?;
    // A cut line is dropped: half of a secret may not be recognized as one.
    Ok(text.rsplit_once('\n').map_or_else(String::new, |(whole, _)| whole.to_owned()))
}

/// Checks the plugin's log file. Returns the lines about the pod.
pub(super) fn plugin(target: &CheckTarget, conf: Option<&NetConf>, pod: &PodRef, results: &mut Results) -> Vec<String> {
    let PodRef { namespace, name, .. } = pod;
    let Some(file) = conf.and_then(|conf| conf.log_file.as_deref()) else {
        let why = "log_file is not set; the runtime logs the plugin's lines";
        let next = format!("run on the node: journalctl -u crio -u containerd | grep pod={namespace}/{name}");
        results.add(&PLUGIN, CheckVerdict::NotChecked(why.to_owned(), Some(next)));
        return Vec::new();
    };
    let shown = file.display();
    if let Err(why) = logging::check_log_file(file) {
        results
            .add(&PLUGIN, CheckVerdict::fail(format!("log_file: {why}; the plugin logs to stderr only"), REPLACE_LOG));
        return Vec::new();
    }
    let about = format!("pod={namespace}/{name}");
    let is_about = |line: &&str| line.split(' ').any(|word| word == about);
    let text = target.reach_named(file).and_then(|file| tail(&file));
    let lines = text.map(|text| text.lines().filter(is_about).map(str::to_owned).collect::<Vec<_>>());
    results.add(
        &PLUGIN,
        match &lines {
            Err(why) => CheckVerdict::not_checked(format!("{shown}: {why}")),
            Ok(lines) => last_line_verdict(lines, &shown.to_string()),
        },
    );
    lines.unwrap_or_default()
}

/// Checks whether the last line about the pod reports an error.
fn last_line_verdict(lines: &[String], place: &str) -> CheckVerdict {
    let is_error = |line: &&String| line.contains("level=error") || next(line).is_some();
    let Some(last) = lines.last() else { return CheckVerdict::pass(format!("{place} has no line about this pod")) };
    match lines.iter().rfind(is_error) {
        Some(line) if line == last => {
            CheckVerdict::fail(shown(line), next(line).unwrap_or("see the reason in the message"))
        }
        _ => CheckVerdict::pass(format!("log lines in {place}: {}, the last: {}", lines.len(), shown(last))),
    }
}

/// Returns text of another program as one line, without secrets, because users share these lists.
fn shown(text: &str) -> String {
    let line = Redactor::default().log(&text.split_whitespace().collect::<Vec<_>>().join(" "));
    let line = line.trim_end();
    if line.chars().count() <= MAX_LINE {
        line.to_owned()
    } else {
        line.chars().take(MAX_LINE).chain("…".chars()).collect()
    }
}

fn tail(file: &Path) -> std::io::Result<String> {
    let mut file = trusted_file::open(file, OpenOptions::new().read(true))?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    // A cut line is dropped: half of a secret may not be recognized as one.
    let whole = if length > TAIL { text.split_once('\n').map_or("", |(_, whole)| whole) } else { &text };
    Ok(whole.to_owned())
}

/// A known error message and the next step.
struct KnownError {
    /// Fragments that all occur in the message.
    fragments: &'static [&'static str],
    next: &'static str,
}

const AGENT: &str = "check whether the agent runs on this node (kubectl get pods -A -o wide -l \
    app.kubernetes.io/component=agent)";

/// The first match counts. The messages are those of CRI-O and containerd (libcni's `FindInPath`, ocicni, go-cni), of
/// Multus (`pkg/k8sclient`) and of this program (`cluster::api::call`, `networks`).
const KNOWN_ERRORS: [KnownError; 25] = [
    KnownError {
        fragments: &["failed to find plugin"],
        next: "see program-present: the program is not in the runtime's plugin directories; install it under the missing name \
               (detour install --name)",
    },
    KnownError {
        fragments: &["exec format error"],
        next: "see program-architecture: the program is built for another architecture",
    },
    KnownError {
        fragments: &["fork/exec", "permission denied"],
        next: "see program-executable, and the SELinux log (ausearch -m avc): the program can't be executed",
    },
    KnownError {
        fragments: &["network-attachment-definition", "in namespace"],
        next: "see definition-found: the annotation names a definition that is not in that namespace",
    },
    KnownError {
        fragments: &["NetworkAttachmentDefinition", "in namespace"],
        next: "see definition-found: the annotation names a definition that is not in that namespace",
    },
    KnownError {
        fragments: &["no configuration with \"name\""],
        next: "see definition-leads: no configuration file on the node has the definition's name",
    },
    KnownError {
        fragments: &["no network config found in"],
        next: "see definition-leads: no configuration file on the node has the definition's name",
    },
    KnownError {
        fragments: &["no network available in the name"],
        next: "see definition-leads: no configuration file on the node has the definition's name",
    },
    KnownError {
        fragments: &["Error loading CNI config file"],
        next: "see configuration-valid: Multus stops at the first file that it can't read, in the order of names",
    },
    KnownError {
        fragments: &["failed to unmarshal Spec.Config"],
        next: "see definition-leads: the definition's spec.config is invalid JSON",
    },
    KnownError {
        fragments: &["parsePodNetwork"],
        next: "see annotation-valid: the pod's networks annotation can't be read",
    },
    KnownError {
        fragments: &["network", "not found"],
        next: "see definition-found and definition-leads: a network is not found",
    },
    KnownError {
        fragments: &["No CNI configuration file in"],
        next: "check the pods of the cluster network on this node: it has not written its configuration yet",
    },
    KnownError {
        fragments: &["no networks found in"],
        next: "check the pods of the cluster network on this node: it has not written its configuration yet",
    },
    KnownError { fragments: &["is not written yet"], next: AGENT },
    KnownError {
        fragments: &["are not accepted"],
        next: "see token-valid: the API server refuses the token in the kubeconfig",
    },
    KnownError {
        fragments: &["Unauthorized"],
        next: "see token-valid: the API server refuses the token in the kubeconfig",
    },
    KnownError { fragments: &["lack the right to"], next: "see the checks right-*, and grant the missing rights" },
    KnownError { fragments: &["is forbidden"], next: "see the checks right-*, and grant the missing rights" },
    KnownError {
        fragments: &["no usable answer in"],
        next: "see api-reachable: the API server did not answer in time",
    },
    KnownError {
        fragments: &["contradict each other"],
        next: "set the named setting to the same value in both attachments",
    },
    KnownError { fragments: &["invalid ", "; expected"], next: "correct the named key or annotation" },
    KnownError { fragments: &["unknown ", "; expected"], next: "correct the named key or annotation" },
    // Messages of 0.1.0.
    KnownError { fragments: &["is not accepted"], next: "correct the named key or annotation" },
    KnownError {
        fragments: &["the kernel refused"],
        next: "see the checks kernel-*: the kernel lacks a feature that the rules need",
    },
];

/// Returns the next step for a known error message.
pub(super) fn next(text: &str) -> Option<&'static str> {
    KNOWN_ERRORS.iter().find(|known| known.fragments.iter().all(|part| text.contains(part))).map(|known| known.next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(reason: &str, message: &str) -> ReportedEvent {
        let (reason, message) = (reason.to_owned(), message.to_owned());
        ReportedEvent { warning: true, reason, message, by: "kubelet".into(), last: 0, count: 2 }
    }

    #[test]
    fn a_failed_start_is_a_failure_until_the_pod_runs() {
        let events =
            [event("FailedCreatePodSandBox", "failed to find plugin \"istio-cni\""), event("BackOff", "again")];
        let CheckVerdict::Fail(found, next) = events_verdict(&events, false) else { panic!("it failed") };
        assert!(found.starts_with("FailedCreatePodSandBox, 2 times: ") && next.contains("program-present"));
        assert!(
            matches!(events_verdict(&events, true), CheckVerdict::Pass(found) if found.starts_with("the pod started since"))
        );
        assert!(matches!(events_verdict(&events[1..], false), CheckVerdict::Pass(_)));
    }

    #[test]
    fn only_the_last_line_counts() {
        let (bad, good) = ("level=error msg=no".to_owned(), "level=info msg=yes".to_owned());
        assert!(matches!(last_line_verdict(&[good.clone(), bad.clone()], "f"), CheckVerdict::Fail(..)));
        assert!(matches!(last_line_verdict(&[bad, good], "f"), CheckVerdict::Pass(_)));
        assert!(matches!(last_line_verdict(&[], "f"), CheckVerdict::Pass(_)));
    }

    #[test]
    fn error_messages_of_other_programs_are_recognized() {
        for (text, wanted) in [
            (
                r#"Failed to create pod sandbox: rpc error: code = Unknown desc = failed to create pod network sandbox k8s_web-0_shop_1(2): error adding pod shop_web-0 to CNI network "multus-cni-network": plugin type="multus" name="multus-cni-network" failed (add): [shop/web-0/uid:istio-cni]: error adding container to network "istio-cni": failed to find plugin "istio-cni" in path [/opt/multus/bin /var/lib/cni/bin /usr/libexec/cni]"#,
                "program-present",
            ),
            (
                r#"Multus: [shop/web-0]: error getting k8s client: cannot find a network-attachment-definition (istio-cni) in namespace (shop): network-attachment-definitions.k8s.cni.cncf.io "istio-cni" not found"#,
                "definition-found",
            ),
            (
                r#"[shop/web-0/u:istio-cni]: error adding container: cniConfigFromNetworkResource: err in getCNIConfigFromFile: no network available in the name istio-cni in cni dir /etc/cni/multus/net.d"#,
                "definition-leads",
            ),
            (
                "Error loading CNI config file /etc/cni/multus/net.d/10-x.conf: no 'type'; perhaps this is a .conflist?",
                "configuration-valid",
            ),
            ("parsePodNetworkObjectName: Invalid network object (failed at '/')", "annotation-valid"),
            (r"fork/exec /var/lib/cni/bin/istio-cni: exec format error", "program-architecture"),
            (r"fork/exec /var/lib/cni/bin/istio-cni: permission denied", "program-executable"),
            (
                "pod shop/web-0: GET https://10.0.0.1:443/api/v1/namespaces/shop/pods/web-0 (kubeconfig /k): 403, the credentials in /k lack the right to get pods in namespace shop; grant it in a ClusterRole",
                "right-*",
            ),
            (
                "kubeconfig /k is not written yet; check that the pod of the agent that writes it (detour-agent, or istio-cni's install-cni) runs on this node, or correct kubernetes.kubeconfig",
                "agent",
            ),
        ] {
            let found = next(text).unwrap_or_else(|| panic!("not recognized: {text}"));
            assert!(found.contains(wanted), "{text}: {found}");
        }
        assert_eq!(next("Back-off restarting failed container app"), None);
    }
}
