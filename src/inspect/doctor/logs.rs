//! What has been said of the pod: by its Events, by the runtime, and by the plugin itself.

use super::target::CheckTarget;
use super::check::{Check, Results, CheckVerdict};
use super::pod::KNOWN;
use super::redact::Redactor;
use super::report::CheckGroup;
use super::{known_errors, tool};
use crate::cluster::{ApiProbe, ReportedEvent};
use crate::cni::NetConf;
use crate::logging;
use crate::pod::PodRef;
use crate::trusted_file;
use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::Command;

pub(super) const EVENTS: Check = Check::of(CheckGroup::Pod, "events", "no event tells that it could not be started");
const JOURNAL: Check = Check::of(CheckGroup::Logs, "runtime-log", "the runtime has no complaint about it");
const PLUGIN: Check = Check::of(CheckGroup::Logs, "plugin-log", "the plugin has no complaint about it");

/// Of events, those by which a runtime's failure to make a sandbox is told (kubelet, `pkg/kubelet/events`), and
/// Multus's own.
const FAILURES: [&str; 3] = ["FailedCreatePodSandBox", "FailedCreatePodContainer", "NoNetworkFound"];
/// Units that runtimes have.
const UNITS: [&str; 2] = ["crio", "containerd"];
/// How much of the plugin's log is read, from its end.
const TAIL: u64 = 1 << 20;
const REPLACE_LOG: &str = "set log_file to a path such as /var/log/detour.log";
/// How long a line may be that is shown.
const LONGEST: usize = 1000;

/// What the events of a pod say that is, or is not, `running` by now.
pub(super) fn events(inquiry: Option<&ApiProbe>, pod: &PodRef, running: bool, checkup: &mut Results) {
    let PodRef { namespace, name, .. } = pod;
    let by_hand =
        format!("look by hand: kubectl get events -n {namespace} --field-selector involvedObject.name={name}");
    checkup.after(&[&KNOWN], &EVENTS, || match inquiry.map(|inquiry| inquiry.events(pod)) {
        None => CheckVerdict::NotChecked("there is no API to ask".to_owned(), Some(by_hand)),
        Some(Err(error)) => CheckVerdict::NotChecked(error.to_string(), Some(by_hand)),
        Some(Ok(events)) => told(&events, running),
    });
}

fn told(events: &[ReportedEvent], running: bool) -> CheckVerdict {
    let failures: Vec<&ReportedEvent> = events.iter().filter(|event| event.warning && is_failure(event)).collect();
    let Some(last) = failures.last() else {
        return CheckVerdict::pass(match events.len() {
            0 => "there is none".to_owned(),
            count => format!("{count} events, none of them"),
        });
    };
    let times: u64 = failures.iter().map(|event| event.count).sum();
    let found = format!("{}, {times} times: {}", last.reason, shown(&last.message));
    if running {
        return CheckVerdict::pass(format!("it has a namespace since; before that: {found}"));
    }
    let next = known_errors::next(&last.message);
    CheckVerdict::fail(found, next.unwrap_or("what it says is the reason; see the runtime's log on the node, too"))
}

fn is_failure(event: &ReportedEvent) -> bool {
    FAILURES.contains(&event.reason.as_str()) || known_errors::next(&event.message).is_some()
}

/// The runtime's lines about the pod, where a journal can be read.
pub(super) fn journal(case: &CheckTarget, pod: &PodRef, container: Option<&str>, checkup: &mut Results) -> Vec<String> {
    let PodRef { name, .. } = pod;
    let by_hand = format!("look by hand on the node: journalctl -u crio -u containerd | grep {name}");
    let lines = read_journal(&case.mount);
    let about = |line: &&str| line.contains(name.as_str()) || container.is_some_and(|id| line.contains(id));
    let lines = lines.map(|text| text.lines().filter(about).map(str::to_owned).collect::<Vec<_>>());
    checkup.add(
        &JOURNAL,
        match &lines {
            Err(why) => CheckVerdict::NotChecked(why.clone(), Some(by_hand)),
            Ok(lines) => complaints(lines, "the journal of the last day"),
        },
    );
    lines.unwrap_or_default()
}

fn read_journal(mount: &Path) -> Result<String, String> {
    let directory =
        ["var/log/journal", "run/log/journal"].iter().map(|within| mount.join(within)).find(|dir| dir.is_dir());
    let directory = directory.ok_or("there is no journal here")?;
    let mut command = Command::new("journalctl");
    command.arg("--directory").arg(directory).args(["--no-pager", "--quiet", "--output=short-iso", "--since=-24h"]);
    command.args(UNITS.iter().flat_map(|unit| ["-u", unit]));
    let text = tool::output(&mut command).map_err(|why| format!("journalctl {why}"))?;
    // Half of a line, where it was too much to read, may be half of a secret, which is not known as one.
    Ok(text.rsplit_once('\n').map_or_else(String::new, |(whole, _)| whole.to_owned()))
}

/// The plugin's own lines about the pod.
pub(super) fn plugin(case: &CheckTarget, conf: Option<&NetConf>, pod: &PodRef, checkup: &mut Results) -> Vec<String> {
    let PodRef { namespace, name, .. } = pod;
    let Some(file) = conf.and_then(|conf| conf.log_file.as_deref()) else {
        let why = "log_file is not set: its lines go to the runtime";
        let next = format!("look by hand on the node: journalctl -u crio -u containerd | grep pod={namespace}/{name}");
        checkup.add(&PLUGIN, CheckVerdict::NotChecked(why.to_owned(), Some(next)));
        return Vec::new();
    };
    let shown = file.display();
    if let Err(why) = logging::accepted(file) {
        checkup.add(&PLUGIN, CheckVerdict::fail(format!("log_file: {why}; the plugin logs to stderr only"), REPLACE_LOG));
        return Vec::new();
    }
    let about = format!("pod={namespace}/{name}");
    let is_about = |line: &&str| line.split(' ').any(|word| word == about);
    let text = case.reach_named(file).and_then(|file| tail(&file));
    let lines = text.map(|text| text.lines().filter(is_about).map(str::to_owned).collect::<Vec<_>>());
    checkup.add(
        &PLUGIN,
        match &lines {
            Err(why) => CheckVerdict::not_checked(format!("{shown}: {why}")),
            Ok(lines) => complaints(lines, &shown.to_string()),
        },
    );
    lines.unwrap_or_default()
}

/// Whether the last word about the pod is a failure.
fn complaints(lines: &[String], place: &str) -> CheckVerdict {
    let complaint = |line: &&String| line.contains("level=error") || known_errors::next(line).is_some();
    let Some(last) = lines.last() else { return CheckVerdict::pass(format!("{place} has no line about it")) };
    match lines.iter().rfind(complaint) {
        Some(line) if line == last => {
            CheckVerdict::fail(shown(line), known_errors::next(line).unwrap_or("what it says is the reason"))
        }
        _ => CheckVerdict::pass(format!("{} lines in {place}, the last: {}", lines.len(), shown(last))),
    }
}

/// Text from elsewhere in one line, without what looks like a secret: a list may be shown to others.
fn shown(text: &str) -> String {
    let line = Redactor::default().log(&text.split_whitespace().collect::<Vec<_>>().join(" "));
    let line = line.trim_end();
    if line.chars().count() <= LONGEST {
        line.to_owned()
    } else {
        line.chars().take(LONGEST).chain("…".chars()).collect()
    }
}

fn tail(file: &Path) -> std::io::Result<String> {
    let mut file = trusted_file::open(file, OpenOptions::new().read(true))?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    // Half of a line may be half of a secret, which is not known as one.
    let whole = if length > TAIL { text.split_once('\n').map_or("", |(_, whole)| whole) } else { &text };
    Ok(whole.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(reason: &str, message: &str) -> ReportedEvent {
        let (reason, message) = (reason.to_owned(), message.to_owned());
        ReportedEvent { warning: true, reason, message, by: "kubelet".into(), last: 0, count: 2 }
    }

    #[test]
    fn a_failure_counts_as_long_as_the_pod_is_not_there() {
        let events =
            [event("FailedCreatePodSandBox", "failed to find plugin \"istio-cni\""), event("BackOff", "again")];
        let CheckVerdict::Fail(found, next) = told(&events, false) else { panic!("it failed") };
        assert!(found.starts_with("FailedCreatePodSandBox, 2 times: ") && next.contains("program-present"));
        assert!(matches!(told(&events, true), CheckVerdict::Pass(found) if found.starts_with("it has a namespace since")));
        assert!(matches!(told(&events[1..], false), CheckVerdict::Pass(_)));
    }

    #[test]
    fn only_the_last_word_counts() {
        let (bad, good) = ("level=error msg=no".to_owned(), "level=info msg=yes".to_owned());
        assert!(matches!(complaints(&[good.clone(), bad.clone()], "f"), CheckVerdict::Fail(..)));
        assert!(matches!(complaints(&[bad, good], "f"), CheckVerdict::Pass(_)));
        assert!(matches!(complaints(&[], "f"), CheckVerdict::Pass(_)));
    }
}
