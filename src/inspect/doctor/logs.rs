//! Checks of the reports about the pod: Events, the journal entries of the runtime and of the kubelet, and the plugin's
//! log file, as they are: the words of other programs are not interpreted.

use super::report::{CheckTarget, CheckVerdict, Results};
use super::{checks, node};
use crate::cluster::Api;
use crate::cni::NetConf;
use crate::host_path::HostPath;
use crate::pod::PodRef;
use crate::printable::{without_passwords, without_tokens, without_userinfo};
use crate::{logging, trusted_file};
use k8s_openapi::api::core::v1::Event;
use rustix::fs::OFlags;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::Command;

/// Reasons of Events that report a failed pod sandbox (kubelet, `pkg/kubelet/events`; Multus).
const FAILURES: [&str; 3] = ["FailedCreatePodSandBox", "FailedCreatePodContainer", "NoNetworkFound"];
/// Directories of the journal on the node: permanent and volatile (systemd-journald.service(8)).
const JOURNALS: [&str; 2] = ["/var/log/journal", "/run/log/journal"];
/// Units of systemd that run the container runtime or the kubelet. The detected platform can be wrong, therefore all
/// are tried (docs.k3s.io, docs.rke2.io, docs.k0sproject.io, `MicroK8s`: "Configuring services", microshift.io).
const UNITS: [&str; 14] = [
    "crio",
    "containerd",
    "docker",
    "cri-docker",
    "kubelet",
    "k3s",
    "k3s-agent",
    "rke2-server",
    "rke2-agent",
    "k0scontroller",
    "k0sworker",
    "snap.microk8s.daemon-containerd",
    "snap.microk8s.daemon-kubelite",
    "microshift",
];
/// The number of bytes that are read from the end of a log file.
const TAIL: u64 = 1 << 20;
const REPLACE_LOG: &str = "set log_file to a path such as /var/log/detour.log";
/// The maximum length of a line in a finding.
const MAX_LINE: usize = 1000;

/// Checks the pod's Events. A failure counts only while the pod is not `running`.
pub(super) fn events(api: Option<&Api>, pod: &PodRef, running: bool, results: &mut Results) {
    let PodRef { namespace, name, .. } = pod;
    let by_hand = format!("run kubectl get events -n {namespace} --field-selector involvedObject.name={name}");
    results.run(checks::EVENTS, || match api.map(|api| api.events(pod)) {
        None => CheckVerdict::to_do("no API server is known", by_hand),
        Some(Err(error)) => CheckVerdict::to_do(error.to_string(), by_hand),
        Some(Ok(events)) => events_verdict(&events, running),
    });
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
pub(super) fn runtime(target: &CheckTarget, pod: &PodRef, container: Option<&str>, results: &mut Results) {
    let PodRef { namespace, name, .. } = pod;
    // Runtimes write shop/web-0, shop_web-0, or each with its key.
    let has = |line: &str, word: &str| {
        line.split(|c: char| !c.is_ascii_alphanumeric() && !"-.".contains(c)).any(|token| token == word)
    };
    let is_about = |line: &&str| {
        container.is_some_and(|id| line.contains(id)) || (has(line, name.as_str()) && has(line, namespace.as_str()))
    };
    let verdict = match read_journal(target) {
        Ok((units, text)) => {
            let mut lines: Vec<&str> = text.lines().filter(is_about).collect();
            lines.reverse();
            last_line_verdict(&lines, &format!("the journal of the last day ({})", units.join(", ")))
        }
        Err(why) => CheckVerdict::to_do(why, by_hand(name)),
    };
    results.add(checks::RUNTIME_LOG, verdict);
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
        node::output(&mut command).map_err(|why| format!("the journal was not read: journalctl: {why}"))
    };
    let logged = journalctl(&["--field=_SYSTEMD_UNIT"])?;
    let is_logged = |unit: &&str| logged.lines().any(|line| line.strip_suffix(".service") == Some(unit));
    let units: Vec<&str> = UNITS.into_iter().filter(is_logged).collect();
    if units.is_empty() {
        return Err(format!("the journal has no entries of the units {}", UNITS.join(", ")));
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
pub(super) fn plugin(target: &CheckTarget, conf: Option<&NetConf>, pod: &PodRef, results: &mut Results) {
    let PodRef { namespace, name, .. } = pod;
    let Some(file) = conf.and_then(|conf| conf.log_file.as_deref()) else {
        let why = "log_file is not set; the runtime logs the plugin's lines";
        let next = by_hand(&format!("pod={namespace}/{name}"));
        return results.add(checks::PLUGIN_LOG, CheckVerdict::to_do(why, next));
    };
    let shown = file.display();
    if let Err(why) = logging::check_log_file(file) {
        let found = format!("log_file: {why}; the plugin logs to stderr only");
        return results.add(checks::PLUGIN_LOG, CheckVerdict::fail(found, REPLACE_LOG));
    }
    let about = format!("pod={namespace}/{name}");
    let is_about = |line: &&str| line.split(' ').any(|word| word == about);
    let text = target.reach_named(file).and_then(|file| tail(&file));
    let verdict = match text {
        Err(why) => CheckVerdict::not_checked(format!("{shown}: {why}")),
        Ok(text) => last_line_verdict(&text.lines().filter(is_about).collect::<Vec<_>>(), &shown.to_string()),
    };
    results.add(checks::PLUGIN_LOG, verdict);
}

/// Checks whether the last line about the pod reports an error.
fn last_line_verdict(lines: &[&str], place: &str) -> CheckVerdict {
    match lines.last() {
        None => CheckVerdict::pass(format!("{place} has no line about this pod")),
        Some(last) if last.contains("level=error") => CheckVerdict::fail(shown(last), "see the reason in the message"),
        Some(last) => CheckVerdict::pass(format!("log lines in {place}: {}, the last: {}", lines.len(), shown(last))),
    }
}

/// Returns text of another program as one line, without secrets, because users share these lists.
fn shown(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = without_passwords(&without_tokens(&without_userinfo(&line)));
    if line.chars().count() <= MAX_LINE {
        line.to_owned()
    } else {
        line.chars().take(MAX_LINE).chain("…".chars()).collect()
    }
}

/// Reads the last part of a file.
fn tail(file: &Path) -> std::io::Result<String> {
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
