//! Checks of the node: the plugin's program, the installation as a whole, the kernel, and the rules of running pods as
//! the agent reports them.

use super::checks;
use super::report::{AGENT_TIMEOUT, CheckTarget, CheckVerdict, Results};
use crate::cluster::agent::{PodFinding, PoliciesReport, pod_policies};
use crate::cni::NetConf;
use crate::firewall::RuleFormat;
use crate::host_path::HostPath;
use crate::inspect::child::{ProgramOutput, run_program};
use crate::inspect::nodes::PolicyCounts;
use crate::inspect::socket_lb;
use crate::inspect::terminal::{first_of, joined};
use crate::plugin::probe::{NOT_PERMITTED, in_new_netns, refused_guard, try_redirection};
use crate::pod::PodRef;
use crate::trusted_file::{self, names_in};
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

/// The number of untrusted files and of differences that a finding names; the rest is counted.
const NAMED: usize = 3;

const REINSTALL: &str =
    "run detour install from a static binary for this machine, or check why the agent on this node does not install it";

/// Checks the programs named `kinds` in each plugin directory, and the installed ones.
pub(super) fn examine_program(target: &CheckTarget, kinds: &BTreeSet<String>, results: &mut Results) {
    let in_dirs = target.bin_dirs.iter().flat_map(|dir| kinds.iter().map(|kind| dir.join(kind)));
    let wanted: BTreeSet<HostPath> = in_dirs.chain(target.programs.iter().cloned()).collect();
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
    let wrong: Vec<String> = directories.iter().flat_map(|directory| untrusted(target, directory)).collect();
    match wrong.is_empty() {
        true => CheckVerdict::pass(joined(directories)),
        false => CheckVerdict::fail(
            first_of(wrong, NAMED, "; "),
            "run the named commands; until then, plugins there are not executed",
        ),
    }
}

/// Returns what another user can change: a directory, or files in it. A missing directory is reported by another check.
fn untrusted(target: &CheckTarget, directory: &HostPath) -> Vec<String> {
    let Ok(reached) = target.reach(directory) else { return Vec::new() };
    let names = names_in(&reached).unwrap_or_default();
    let files = names.iter().filter_map(|name| target.reach(&directory.join(name)).ok()).filter(|file| file.is_file());
    let wrong = [reached].into_iter().chain(files).filter_map(|path| trusted_file::check(&path).err());
    let wrong = wrong.filter(|error| !error.is_not_found()).map(|error| error.below(&target.mount).to_string());
    BTreeSet::from_iter(wrong).into_iter().collect()
}

/// Returns the version that a program reports; it is run, as the runtime would.
fn version(target: &CheckTarget, path: &HostPath) -> Result<String, String> {
    let ours = env!("CARGO_PKG_VERSION");
    let reached = target.reach(path).map_err(|why| why.to_string())?;
    let reported = output(Command::new(reached).args(["version", "-o", "json"]).env_clear())?;
    let reported: Value = serde_json::from_str(&reported).unwrap_or_default();
    match reported["version"].as_str() {
        Some(theirs) if theirs == ours => Ok(theirs.to_owned()),
        theirs => Err(format!("expected detour {ours}, got {}", theirs.unwrap_or("another program"))),
    }
}

/// Compares the node with the installation's record. Differences that another check reports are not repeated.
pub(super) fn examine_installation(target: &CheckTarget, results: &mut Results) {
    let verdict = match (results.failed_in("node"), &target.changed) {
        (Some(id), _) => CheckVerdict::not_checked(format!("because {id} failed")),
        (None, Ok(None)) => CheckVerdict::not_checked("detour was not installed by detour install"),
        (None, Ok(Some(changed))) if changed.is_empty() => CheckVerdict::pass("nothing has changed"),
        (None, Ok(Some(changed))) => CheckVerdict::fail(
            first_of(changed.iter().cloned(), NAMED, "; "),
            "run detour install --dry-run to see the corrections",
        ),
        (None, Err(why)) => CheckVerdict::fail(why, "run detour install again, which writes a new record"),
    };
    results.add(checks::INSTALLATION, verdict);
}

const MODULES: &str = "load the modules on the node: modprobe -a nf_tables nft_compat nft_nat nft_ct nf_nat nf_conntrack \
    xt_owner xt_REDIRECT xt_multiport xt_CT";

/// Tries the rules of a pod in a new network namespace. Exclusions are native; the redirection needs the format that the
/// configuration sets, or one of both.
pub(super) fn examine_kernel(conf: Option<&NetConf>, results: &mut Results) {
    let tried = in_new_netns(|| [RuleFormat::Iptables, RuleFormat::Nftables].map(try_redirection));
    let needs_iptables = conf.is_some_and(|conf| conf.rule_format == Some(RuleFormat::Iptables));
    let verdict = match tried {
        Ok([_, Err(why)]) => CheckVerdict::fail(format!("rules in format nftables, as all exclusions: {why}"), MODULES),
        Ok([Err(why), Ok(())]) if needs_iptables => CheckVerdict::fail(
            format!("rules in format iptables: {why}"),
            format!("set \"dialect\": \"nftables\" or \"auto\"; or {MODULES}"),
        ),
        Ok([Err(why), Ok(())]) => {
            CheckVerdict::pass(format!("rules in format nftables; not in format iptables: {why}"))
        }
        Ok([Ok(()), Ok(())]) => CheckVerdict::pass("rules in both formats, for IPv4 and IPv6"),
        Err(why) if why == NOT_PERMITTED => CheckVerdict::to_do(
            "this needs root (CAP_SYS_ADMIN)",
            "run detour doctor as root on the node, or in the agent's pod",
        ),
        Err(why) => CheckVerdict::fail(
            format!("can't create a network namespace: {why}"),
            "enable CONFIG_NET_NS in the kernel, and set user.max_net_namespaces above 0",
        ),
    };
    let guard = conf.and_then(|conf| refused_guard(&conf.chain)).map(|why| {
        let next = "load the modules on the node: modprobe -a nft_reject_inet nft_fib_inet; or remove mesh-guard";
        CheckVerdict::fail(format!("the rules of mesh-guard: {why}"), next)
    });
    results.add(checks::KERNEL_RULES, CheckVerdict::merged([verdict].into_iter().chain(guard)));
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
    let Some(follows) = report.follows else { return CheckVerdict::not_checked(NOT_READ) };
    let counts = PolicyCounts::of(report);
    let wrong = usize::try_from(counts.rejected.saturating_add(counts.lost())).unwrap_or(usize::MAX);
    let follows = if follows { "" } else { "; running pods follow no change (livePolicy is off)" };
    let more = wrong.saturating_sub(report.findings.len().min(LISTED));
    let more = if more > 0 { format!("; {more} of them are not listed") } else { String::new() };
    let found = format!("{counts}{follows}{more}");
    let next = "see the lines below, and the Events of the pods";
    match (wrong, counts.lost()) {
        (0, _) => CheckVerdict::pass(found),
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
        _ => CheckVerdict::fail(
            found,
            "the agent retries; if this lasts, delete the pod, or let the agent repair it (chart value repair.enabled); in \
             the ambient mesh, see the istio-cni and ztunnel pods of the node",
        ),
    }
}
