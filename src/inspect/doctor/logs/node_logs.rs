//! The logs of the node: units of the systemd journal, and log files. Each distribution of Kubernetes has its own; all of
//! them are tried, because the detected platform can be wrong.

use super::tail;
use crate::host_path::HostPath;
use crate::inspect::doctor::kernel;
use crate::inspect::doctor::report::CheckTarget;
use crate::trusted_file::read_nofollow;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

/// The logs of a distribution: its name as in `--platform`, a directory that only its nodes have, units of systemd without
/// `.service` (the runtime and the kubelet, or what contains them), and log files on the node.
type Distribution = (&'static str, Option<&'static str>, &'static [&'static str], &'static [&'static str]);

/// Sources: docs.k3s.io and docs.rke2.io ("Logging"; with OpenRC, k3s logs to a file), docs.k0sproject.io, canonical.com
/// (`MicroK8s`, "Configuring services"), microshift.io, minikube's `logs` command.
const DISTRIBUTIONS: [Distribution; 7] = [
    ("kubernetes", None, &["containerd", "crio", "docker", "cri-docker", "kubelet"], &[]),
    ("openshift", None, &["crio", "kubelet"], &[]),
    (
        "k3s",
        Some("/var/lib/rancher/k3s"),
        &["k3s", "k3s-agent"],
        &["/var/lib/rancher/k3s/agent/containerd/containerd.log", "/var/log/k3s.log", "/var/log/k3s-agent.log"],
    ),
    (
        "rke2",
        Some("/var/lib/rancher/rke2"),
        &["rke2-server", "rke2-agent"],
        &["/var/lib/rancher/rke2/agent/containerd/containerd.log", "/var/lib/rancher/rke2/agent/logs/kubelet.log"],
    ),
    ("k0s", Some("/var/lib/k0s"), &["k0scontroller", "k0sworker"], &[]),
    (
        "microk8s",
        Some("/var/snap/microk8s"),
        &["snap.microk8s.daemon-containerd", "snap.microk8s.daemon-kubelite"],
        &[],
    ),
    ("microshift", Some("/var/lib/microshift"), &["crio", "microshift"], &[]),
];

/// Directories of the journal on the node: permanent and volatile (systemd-journald.service(8)).
const JOURNALS: [&str; 2] = ["/var/log/journal", "/run/log/journal"];

/// The lines about a pod in one log.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LogLines {
    /// The log, in words.
    pub place: String,
    /// The lines, the oldest first.
    pub lines: Vec<String>,
}

/// The logs of a node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeLogs {
    /// The logs that were read.
    pub read: Vec<LogLines>,
    /// Why others were not read, one line each. Files that do not exist are not mentioned.
    pub unread: Vec<String>,
}

/// Reads the lines for which `about` is true from all logs of the node.
pub(super) fn read(target: &CheckTarget, about: &dyn Fn(&str) -> bool) -> NodeLogs {
    let mut logs = NodeLogs::default();
    match read_journal(target, about) {
        Ok(log) => logs.read.push(log),
        Err(why) => logs.unread.push(why),
    }
    for file in DISTRIBUTIONS.iter().flat_map(|(.., files)| *files) {
        let text = target.reach_named(Path::new(file)).and_then(|path| tail(&path));
        match text {
            Ok(text) => {
                let lines = text.lines().filter(|line| about(line)).map(str::to_owned).collect();
                logs.read.push(LogLines { place: (*file).to_owned(), lines });
            }
            Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(why) => logs.unread.push(format!("{file} was not read: {why}")),
        }
    }
    logs
}

/// Reads the journal of the last day.
fn read_journal(target: &CheckTarget, about: &dyn Fn(&str) -> bool) -> Result<LogLines, String> {
    let reached = JOURNALS.iter().filter_map(|path| target.reach(&HostPath::new(path)?).ok());
    let directory = reached.into_iter().find(|path| path.is_dir());
    let directory = directory.ok_or_else(|| format!("no journal found in {}", JOURNALS.join(" and ")))?;
    let journalctl = |arguments: &[&str]| {
        let mut command = Command::new("journalctl");
        command.arg("--directory").arg(&directory).args(["--no-pager", "--quiet"]).args(arguments);
        kernel::output(&mut command).map_err(|why| format!("the journal was not read: journalctl: {why}"))
    };
    let logged = journalctl(&["--field=_SYSTEMD_UNIT"])?;
    let logged: BTreeSet<&str> = logged.lines().filter_map(|line| line.strip_suffix(".service")).collect();
    let mut units: Vec<&str> = Vec::new();
    for unit in DISTRIBUTIONS.iter().flat_map(|(_, _, units, _)| *units) {
        if !units.contains(unit) {
            units.push(unit);
        }
    }
    let (found, others): (Vec<&str>, Vec<&str>) = units.into_iter().partition(|unit| logged.contains(unit));
    if found.is_empty() {
        return Err(format!("the journal has no entries of the units {}", others.join(", ")));
    }
    // The newest first: the output is cut at its end.
    let mut arguments = vec!["--output=short-iso", "--since=-24h", "--reverse"];
    arguments.extend(found.iter().flat_map(|unit| ["-u", unit]));
    let text = journalctl(&arguments)?;
    // A cut line is dropped: half of a secret may not be recognized as one.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let mut lines: Vec<String> = whole.lines().filter(|line| about(line)).map(str::to_owned).collect();
    lines.reverse();
    let kind = if found.len() == 1 { "unit" } else { "units" };
    Ok(LogLines { place: format!("the journal of the last day ({kind} {})", found.join(", ")), lines })
}

/// The maximum size of /etc/os-release.
const MAX_OS_RELEASE: u64 = 64 << 10;

/// Whether the node runs Talos Linux, which has neither a shell nor a journal (os-release(5), `ID`).
fn is_talos(target: &CheckTarget) -> bool {
    let text = target.reach_named(Path::new("/etc/os-release")).and_then(|path| read_nofollow(&path, MAX_OS_RELEASE));
    text.is_ok_and(|text| text.split(|byte| *byte == b'\n').any(|line| line == b"ID=talos"))
}

/// Returns the commands that show the lines with `pattern` on the node.
pub(super) fn by_hand(target: &CheckTarget, pattern: &str) -> String {
    if is_talos(target) {
        return format!("run talosctl -n NODE logs cri | grep {pattern}, and the same for logs kubelet");
    }
    let is_directory = |path: &str| target.reach_named(Path::new(path)).is_ok_and(|path| path.is_dir());
    let marked = DISTRIBUTIONS.iter().find(|(_, marker, ..)| marker.is_some_and(is_directory));
    let own = marked.or_else(|| DISTRIBUTIONS.iter().find(|(platform, ..)| *platform == target.platform));
    let (_, _, units, files) = own.unwrap_or(&DISTRIBUTIONS[0]);
    let units: Vec<String> = units.iter().map(|unit| format!("-u {unit}")).collect();
    let journal = format!("run on the node: journalctl {} | grep {pattern}", units.join(" "));
    match files.is_empty() {
        true => journal,
        false => format!("{journal}; grep -s {pattern} {}", files.join(" ")),
    }
}
