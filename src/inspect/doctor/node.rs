//! Checks of the node: the plugin's program, the installation as a whole, the kernel, and the rules of running pods as
//! the agent reports them.

use super::checks;
use super::report::{AGENT_TIMEOUT, CheckTarget, CheckVerdict, Installation, Results};
use crate::cluster::agent::{PodFinding, PoliciesReport, pod_policies};
use crate::cni::NetConf;
use crate::firewall::RuleFormat;
use crate::firewall::nfnetlink::NfSocket;
use crate::host_path::HostPath;
use crate::inspect::child::{ProgramOutput, run_program};
use crate::inspect::nodes::PolicyCounts;
use crate::inspect::socket_lb;
use crate::inspect::terminal::{first_of, joined};
use crate::plugin::probe::{NOT_PERMITTED, in_new_netns, refused_guard, try_redirection};
use crate::pod::PodRef;
use crate::trusted_file::{self, FileError, names_in};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

/// The number of untrusted files and of differences that a finding names; the rest is counted.
const NAMED: usize = 3;

const REINSTALL: &str =
    "run detour install from a static binary for this machine, or check why the agent on this node does not install it";

/// Checks the programs named `kinds` in each plugin directory, and the installed ones.
pub(super) fn examine_program(target: &CheckTarget, kinds: &BTreeSet<String>, results: &mut Results) {
    let in_dirs = target.bin_dirs.iter().flat_map(|dir| kinds.iter().map(|kind| dir.join(kind)));
    let wanted: BTreeSet<HostPath> = in_dirs.chain(target.installation.programs.iter().cloned()).collect();
    let directories = target.bin_dirs.iter().cloned().chain(wanted.iter().map(HostPath::parent)).collect();
    results.add(checks::PROGRAM_TRUSTED, trusted(target, &directories));
    results.run(checks::PROGRAM_PRESENT, || match wanted.is_empty() {
        true => CheckVerdict::not_checked("no configuration and no installation names the program"),
        false => CheckVerdict::merged(wanted.iter().map(|path| match version(target, path) {
            Ok(version) => CheckVerdict::pass(format!("{path}: {version}")),
            Err(why) => CheckVerdict::fail(format!("{path}: {why}"), REINSTALL),
        })),
    });
}

/// Checks who can change the plugin directories: the plugin runs programs from there as root.
fn trusted(target: &CheckTarget, directories: &BTreeSet<HostPath>) -> CheckVerdict {
    let wrong = directories.iter().filter_map(|directory| Some((directory.to_string(), untrusted(target, directory)?)));
    let (wrong, why): (Vec<_>, Vec<_>) = wrong.unzip();
    if wrong.is_empty() {
        return CheckVerdict::pass(joined(directories));
    }
    let wrong = wrong.join(" ");
    let next =
        format!("run chown -R root:root {wrong} && chmod -R go-w {wrong}; until then, plugins there are not executed");
    CheckVerdict::fail(why.join("; "), next)
}

/// Returns what another user can change: a directory, or files in it. A missing directory is reported by another check.
fn untrusted(target: &CheckTarget, directory: &HostPath) -> Option<String> {
    let reached = target.reach(directory).ok()?;
    let wrong: Vec<FileError> = match trusted_file::check(&reached) {
        Err(error) if error.is_not_found() => return None,
        Err(error) => vec![error],
        Ok(_) => {
            let names = names_in(&reached).unwrap_or_default();
            let files = names.iter().filter_map(|name| target.reach(&directory.join(name)).ok());
            files.filter(|file| file.is_file()).filter_map(|file| trusted_file::check(&file).err()).collect()
        }
    };
    let wrong = first_of(wrong.into_iter().map(|error| on_node(target, error)), NAMED, "; ");
    (!wrong.is_empty()).then_some(wrong)
}

/// Returns the error with the file's path on the node.
fn on_node(target: &CheckTarget, error: FileError) -> String {
    match error.below(&target.mount) {
        FileError::Owner { path, uid } => format!("{} is owned by UID {uid}; expected root", path.display()),
        FileError::Writable { path, mode } => format!("{} has mode {mode:04o}", path.display()),
        FileError::Io(error) => error.to_string(),
    }
}

/// Returns the version that a program reports; it is run, as the runtime would.
fn version(target: &CheckTarget, path: &HostPath) -> Result<String, String> {
    let ours = env!("CARGO_PKG_VERSION");
    let reached = target.reach(path).map_err(|why| why.to_string())?;
    let metadata = fs::metadata(&reached).map_err(|why| why.to_string())?;
    let mode = metadata.permissions().mode() & 0o7777;
    if !metadata.is_file() || mode & 0o111 == 0 {
        let got = if metadata.is_dir() { "a directory".to_owned() } else { format!("mode {mode:04o}") };
        return Err(format!("expected an executable file, got {got}"));
    }
    let reported = output(Command::new(reached).args(["version", "-o", "json"]).env_clear());
    let reported = reported.map_err(|why| format!("expected detour {ours} for this machine: {why}"))?;
    let reported: Value = serde_json::from_str(&reported).unwrap_or_default();
    match reported["version"].as_str() {
        Some(theirs) if theirs == ours => Ok(theirs.to_owned()),
        Some(theirs) => Err(format!("expected version {ours}, got {theirs}")),
        None => Err(format!("expected detour {ours}, got another program, or a version that does not report itself")),
    }
}

/// Compares the node with the installation's record. Differences that another check reports are not repeated.
pub(super) fn examine_installation(target: &CheckTarget, results: &mut Results) {
    let verdict = match results.failed_in("node") {
        Some(id) => CheckVerdict::not_checked(format!("because {id} failed")),
        None => installation_verdict(&target.installation),
    };
    results.add(checks::INSTALLATION, verdict);
}

fn installation_verdict(Installation { changed, .. }: &Installation) -> CheckVerdict {
    const RECORD: &str = "/var/lib/cni/detour/install.json";
    match changed {
        Ok(None) => {
            CheckVerdict::not_checked(format!("{RECORD} not found: detour was not installed by detour install"))
        }
        Ok(Some(changed)) if changed.is_empty() => {
            CheckVerdict::pass(format!("nothing has changed since {RECORD} was written"))
        }
        Ok(Some(changed)) => {
            let named = first_of(changed.iter().cloned(), NAMED, "; ");
            CheckVerdict::fail(named, "run detour install --dry-run to see the corrections")
        }
        Err(why) => CheckVerdict::fail(why.clone(), "run detour install again, which writes a new record"),
    }
}

const MODULES: &str = "load the modules on the node: modprobe -a nf_tables nft_compat nft_nat nft_ct nf_nat nf_conntrack \
    xt_owner xt_REDIRECT xt_multiport xt_CT";

/// Tries the rules of a pod in a new network namespace.
pub(super) fn examine_kernel(conf: Option<&NetConf>, results: &mut Results) {
    let verdict = match in_new_netns(try_kernel) {
        Ok(tried) => {
            let redirection = redirection(&tried, conf.and_then(|conf| conf.rule_format));
            CheckVerdict::merged([redirection].into_iter().chain(guard(conf)))
        }
        Err(why) if why == NOT_PERMITTED => CheckVerdict::to_do(
            "this needs root (CAP_SYS_ADMIN)",
            "run detour doctor as root on the node, or in the agent's pod",
        ),
        Err(why) => CheckVerdict::fail(
            format!("can't create a network namespace: {why}"),
            "enable CONFIG_NET_NS in the kernel, and set user.max_net_namespaces above 0",
        ),
    };
    results.add(checks::KERNEL_RULES, verdict);
}

/// Returns a failure if a configuration uses the guard, and the kernel refuses its rules.
fn guard(conf: Option<&NetConf>) -> Option<CheckVerdict> {
    let why = refused_guard(&conf?.chain)?;
    let next = "load the modules on the node: modprobe -a nft_reject_inet nft_fib_inet; or remove mesh-guard";
    Some(CheckVerdict::fail(format!("the rules of mesh-guard: {why}"), next))
}

/// Checks whether eBPF programs replace Service addresses before netfilter sees them. Nodes whose BPF file system is not
/// visible to this process have no such check.
pub(super) fn examine_socket_lb(target: &CheckTarget, results: &mut Results) {
    let Some(products) = socket_lb::products(&target.mount) else { return };
    results.run(checks::SOCKET_LB, || match products {
        products if products.is_empty() => CheckVerdict::pass("no programs of Cilium or Calico are attached"),
        products => CheckVerdict::warn(
            format!(
                "{}: a process connects to a backend instead of the Service's address, so the sidecar does not route by \
                 Service, and an exclusion of a ClusterIP has no effect",
                joined(products.iter().map(|product| product.name))
            ),
            products.iter().map(|product| product.setting).collect::<Vec<_>>().join("; "),
        ),
    });
}

/// Whether the kernel accepts nf_tables and connection tracking, rules in format iptables, and rules in format nftables.
type Tried = [Result<(), String>; 3];

fn try_kernel() -> Tried {
    let netfilter = || {
        let mut socket = NfSocket::open()?;
        socket.generation()?;
        socket.connections(|_| false).map(drop)
    };
    let netfilter = netfilter().map_err(|error| error.to_string());
    [netfilter, try_redirection(RuleFormat::Iptables), try_redirection(RuleFormat::Nftables)]
}

/// Exclusions are native; the redirection needs the format that the configuration sets, or one of both.
fn redirection(tried: &Tried, format: Option<RuleFormat>) -> CheckVerdict {
    let refused = |what: &str, why: &str| CheckVerdict::fail(format!("{what}: {why}"), MODULES);
    match (tried, format) {
        ([Err(why), ..], _) => refused("nf_tables and connection tracking", why),
        ([_, Err(why), Ok(())], Some(RuleFormat::Iptables)) => CheckVerdict::fail(
            format!("rules in format iptables: {why}"),
            format!("set \"dialect\": \"nftables\" or \"auto\"; or {MODULES}"),
        ),
        ([.., Err(why)], _) => refused("rules in format nftables, as all exclusions", why),
        ([_, Err(why), _], _) => CheckVerdict::pass(format!("rules in format nftables; not in format iptables: {why}")),
        _ => CheckVerdict::pass("rules in both formats, for IPv4 and IPv6"),
    }
}

/// The timeout of a program.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum output of a program, in bytes.
const MAX_OUTPUT: u64 = 4 << 20;

/// Runs a program and returns its stdout, which may be cut.
///
/// # Errors
/// The program can't be started, fails, or exceeds the timeout.
pub(super) fn output(command: &mut Command) -> Result<String, String> {
    let ProgramOutput { stdout, status, .. } = run_program(command, MAX_OUTPUT, TIMEOUT)?;
    match status.success() || stdout.len() as u64 > MAX_OUTPUT {
        true => Ok(String::from_utf8_lossy(&stdout).into_owned()),
        false => Err(format!("failed ({status})")),
    }
}

/// The number of pods that have a line; the rest is counted.
const LISTED: usize = 10;

/// Asks the node's agent for the rules of its pods. The error is the reason why they are unknown.
pub(super) fn ask_policies(
    target: &CheckTarget,
    conf: Option<&NetConf>,
    results: &Results,
) -> Result<PoliciesReport, String> {
    match results.obstacle(checks::POLICIES.needs) {
        Some(why) => Err(why),
        None => pod_policies(&target.agent_socket(conf)?, AGENT_TIMEOUT),
    }
}

/// Adds the check of all pods of the node, and a line for each of the first pods that are not current.
pub(super) fn examine_policies(report: Result<&PoliciesReport, &String>, results: &mut Results) {
    let report = match report {
        Ok(report) => report,
        Err(why) => return results.add(checks::POLICIES, CheckVerdict::not_checked(why.clone())),
    };
    results.add(checks::POLICIES, summary(report));
    let mut findings: Vec<&PodFinding> = report.findings.iter().collect();
    findings.sort_by_key(|finding| (finding.state != "none", &finding.pod));
    for finding in findings.into_iter().take(LISTED) {
        results.add(checks::POD_POLICY, policy_verdict(finding));
    }
}

/// Adds the check of one pod.
pub(super) fn examine_policy(report: Result<&PoliciesReport, &String>, pod: &PodRef, results: &mut Results) {
    results.run(checks::POD_POLICY, || {
        let report = match report {
            Ok(report) => report,
            Err(why) => return CheckVerdict::not_checked(why.clone()),
        };
        let is_named =
            |finding: &&PodFinding| (&finding.pod.namespace, &finding.pod.name) == (&pod.namespace, &pod.name);
        match (report.follows, report.findings.iter().find(is_named)) {
            (None, _) => CheckVerdict::not_checked(NOT_READ),
            (Some(_), Some(finding)) => policy_verdict(finding),
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

fn policy_verdict(PodFinding { pod, state, reason }: &PodFinding) -> CheckVerdict {
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
