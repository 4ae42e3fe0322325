//! What has been said of the pod: by its Events, by the runtime, and by the plugin itself.
//!
//! What runtimes, Multus and this plugin say when a pod does not come up, and what to do about it.

use super::kernel;
use super::pod::KNOWN;
use super::redact::Redactor;
use super::report::CheckGroup;
use super::report::CheckTarget;
use super::report::{Check, CheckVerdict, Results};
use crate::cluster::{ApiProbe, ReportedEvent};
use crate::cni::NetConf;
use crate::pod::PodRef;
use crate::{logging, trusted_file};
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
    let next = next(&last.message);
    CheckVerdict::fail(found, next.unwrap_or("what it says is the reason; see the runtime's log on the node, too"))
}

fn is_failure(event: &ReportedEvent) -> bool {
    FAILURES.contains(&event.reason.as_str()) || next(&event.message).is_some()
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
    let text = kernel::output(&mut command).map_err(|why| format!("journalctl {why}"))?;
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
        checkup
            .add(&PLUGIN, CheckVerdict::fail(format!("log_file: {why}; the plugin logs to stderr only"), REPLACE_LOG));
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
    let complaint = |line: &&String| line.contains("level=error") || next(line).is_some();
    let Some(last) = lines.last() else { return CheckVerdict::pass(format!("{place} has no line about it")) };
    match lines.iter().rfind(complaint) {
        Some(line) if line == last => {
            CheckVerdict::fail(shown(line), next(line).unwrap_or("what it says is the reason"))
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

/// What is said, and what to do.
struct KnownError {
    /// Every one of them is in the text.
    said: &'static [&'static str],
    next: &'static str,
}

const AGENT: &str = "see whether the agent runs on this node (kubectl get pods -A -o wide -l \
    app.kubernetes.io/component=agent)";

/// The first that fits counts. The words are those of CRI-O and containerd (libcni's `FindInPath`, ocicni, go-cni), of
/// Multus (`pkg/k8sclient`) and of this program (`cluster::query`, `networks`).
const KNOWN_ERRORS: [KnownError; 24] = [
    KnownError {
        said: &["failed to find plugin"],
        next: "the program is not in the runtime's directories: see program-present, and install it under the name that \
               is missing (detour install --name)",
    },
    KnownError { said: &["exec format error"], next: "the program is for another machine: see program-architecture" },
    KnownError {
        said: &["fork/exec", "permission denied"],
        next: "the program may not be executed: see program-executable, and SELinux's log (ausearch -m avc)",
    },
    KnownError {
        said: &["network-attachment-definition", "in namespace"],
        next: "see definition-found: the annotation names a definition that is not in that namespace",
    },
    KnownError {
        said: &["NetworkAttachmentDefinition", "in namespace"],
        next: "see definition-found: the annotation names a definition that is not in that namespace",
    },
    KnownError {
        said: &["there is no configuration with \"name\""],
        next: "see definition-leads: no file on the node has the definition's name",
    },
    KnownError {
        said: &["no network config found in"],
        next: "see definition-leads: no file on the node has the definition's name",
    },
    KnownError {
        said: &["no network available in the name"],
        next: "see definition-leads: no file on the node has the definition's name",
    },
    KnownError {
        said: &["Error loading CNI config file"],
        next: "see configuration-valid: Multus stops at the first file by name that it can't read, whosever that is",
    },
    KnownError {
        said: &["failed to unmarshal Spec.Config"],
        next: "see definition-leads: the definition's spec.config is not JSON",
    },
    KnownError {
        said: &["parsePodNetwork"],
        next: "see annotation-valid: the pod's networks annotation can't be read",
    },
    KnownError {
        said: &["network", "not found"],
        next: "see definition-found and definition-leads: a name leads nowhere",
    },
    KnownError {
        said: &["No CNI configuration file in"],
        next: "the cluster's own network is not up on this node: see its agent's pods",
    },
    KnownError {
        said: &["no networks found in"],
        next: "the cluster's own network is not up on this node: see its agent's pods",
    },
    KnownError { said: &["is not written yet"], next: AGENT },
    KnownError { said: &["are not accepted"], next: "see token-valid: the token in the kubeconfig is refused" },
    KnownError { said: &["Unauthorized"], next: "see token-valid: the token in the kubeconfig is refused" },
    KnownError { said: &["lack the right to"], next: "see the lines right-*: grant what is missing" },
    KnownError { said: &["is forbidden"], next: "see the lines right-*: grant what is missing" },
    KnownError {
        said: &["no usable answer in"],
        next: "see api-reachable: the node did not reach the API server in time",
    },
    KnownError {
        said: &["contradict each other"],
        next: "give both attachments the same value of the setting that is named",
    },
    KnownError { said: &["invalid value", "; expected"], next: "correct the key or annotation that is named" },
    // Messages of 0.1.0.
    KnownError { said: &["is not accepted"], next: "correct the key or annotation that is named" },
    KnownError {
        said: &["the kernel refused"],
        next: "see the lines kernel-*: the node's kernel lacks what the rules need",
    },
];

/// What to do about it; `None` where it is not known.
pub(super) fn next(text: &str) -> Option<&'static str> {
    KNOWN_ERRORS.iter().find(|known| known.said.iter().all(|part| text.contains(part))).map(|known| known.next)
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
        assert!(
            matches!(told(&events, true), CheckVerdict::Pass(found) if found.starts_with("it has a namespace since"))
        );
        assert!(matches!(told(&events[1..], false), CheckVerdict::Pass(_)));
    }

    #[test]
    fn only_the_last_word_counts() {
        let (bad, good) = ("level=error msg=no".to_owned(), "level=info msg=yes".to_owned());
        assert!(matches!(complaints(&[good.clone(), bad.clone()], "f"), CheckVerdict::Fail(..)));
        assert!(matches!(complaints(&[bad, good], "f"), CheckVerdict::Pass(_)));
        assert!(matches!(complaints(&[], "f"), CheckVerdict::Pass(_)));
    }

    #[test]
    fn what_the_others_say_is_recognised() {
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
                "pod shop/web-0: GET https://10.0.0.1:443/api/v1/namespaces/shop/pods/web-0 (kubeconfig /k): 403, the credentials in /k lack the right to get pods in namespace shop: grant it in a ClusterRole",
                "right-*",
            ),
            (
                "kubeconfig /k is not written yet: the node agent (detour's, or istio-cni's install-cni) writes it",
                "agent",
            ),
        ] {
            let found = next(text).unwrap_or_else(|| panic!("not recognised: {text}"));
            assert!(found.contains(wanted), "{text}: {found}");
        }
        assert_eq!(next("Back-off restarting failed container app"), None);
    }
}
