//! Checks of the node: the plugin's program, the installation as a whole, the kernel, and the rules of running pods as
//! the agent reports them. Also checks of the plugin's access to facts: its kubeconfig, the node agent's socket, the API
//! server, and exactly the permissions that the plugin needs with this configuration.

use super::checks;
use super::report::{AGENT_TIMEOUT, CheckTarget, CheckVerdict, Results};
use crate::cluster::agent::{PodFinding, PoliciesReport, broken_watches, pod_policies};
use crate::cluster::{Api, KubeconfigSummary, Permission};
use crate::cni::{Error, NetConf, NetworkStatus};
use crate::firewall::RuleFormat;
use crate::host_path::HostPath;
use crate::inspect::child::{ProgramOutput, run_program};
use crate::inspect::socket_lb;
use crate::inspect::terminal::{first_of, joined};
use crate::inspect::validate::kubeconfig_warning;
use crate::plugin::probe::{NOT_PERMITTED, in_new_netns, refused_guard, try_redirection};
use crate::pod::PodRef;
use crate::trusted_file::{self, names_in};
use crate::{cluster, sub_plugins};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

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
    let counts = report.counts;
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

const REWRITE: &str = "run detour install again, or check why the agent on this node does not write it";

/// Runs the check of the kubeconfig. Returns its path in this process.
pub(super) fn examine_kubeconfig(
    target: &CheckTarget,
    conf: Option<&NetConf>,
    results: &mut Results,
) -> Option<PathBuf> {
    let named = conf.and_then(|conf| conf.kubernetes.kubeconfig.as_deref());
    let Some(path) = named.filter(|path| !path.as_os_str().is_empty()) else {
        let why = "no configuration names a kubeconfig: facts come from the agent or from files";
        results.run(checks::KUBECONFIG_VALID, || CheckVerdict::not_checked(why));
        return None;
    };
    let shown = path.display();
    let failed = |why: io::Error| format!("{shown}: {why}");
    let read = || {
        let reached = target.reach_named(path).map_err(failed)?;
        let mode = fs::metadata(&reached).map_err(failed)?.permissions().mode() & 0o7777;
        // On the node itself, the owners of symbolic links in the path count as well.
        let followed = if target.mount == Path::new("/") { path } else { &*reached };
        let summary = KubeconfigSummary::read(&target.mount, followed).map_err(|error| error.to_string())?;
        let private = match mode & 0o077 {
            0 => CheckVerdict::pass(format!("mode {mode:04o}")),
            _ => CheckVerdict::fail(
                format!("{shown} has mode {mode:04o}: other users can read its token"),
                format!("chmod 0600 {shown}"),
            ),
        };
        let verdict = CheckVerdict::merged([private, valid(&summary), token(&summary, Timestamp::now().as_second())]);
        Ok::<_, String>((reached, verdict))
    };
    let (reached, verdict) = match read() {
        Ok((reached, verdict)) => (Some(reached), verdict),
        Err(why) => (None, CheckVerdict::fail(why, REWRITE)),
    };
    results.add(checks::KUBECONFIG_VALID, verdict);
    reached
}

fn valid(summary: &KubeconfigSummary) -> CheckVerdict {
    let server = &summary.server;
    let Some(by) = &summary.authority else {
        let next = "use certificate-authority-data instead; detour install writes it";
        return CheckVerdict::warn(kubeconfig_warning(summary).unwrap_or_default(), next);
    };
    match &summary.credentials {
        Some(who) => CheckVerdict::pass(format!("{server} with {who}; {by}")),
        None => CheckVerdict::fail(format!("{server}: no credentials"), REWRITE),
    }
}

fn token(summary: &KubeconfigSummary, now: i64) -> CheckVerdict {
    let shown =
        |seconds: i64| Timestamp::from_second(seconds).map_or_else(|_| "an unknown time".to_owned(), |t| t.to_string());
    match (&summary.token, summary.expires) {
        (None, _) => CheckVerdict::not_checked("no token"),
        (Some(_), None) => CheckVerdict::pass("the token has no expiry"),
        (Some(_), Some(end)) if end > now => CheckVerdict::pass(format!("valid until {}", shown(end))),
        (Some(_), Some(end)) => CheckVerdict::fail(
            format!("expired at {}", shown(end)),
            "check whether the agent, which renews the token, runs on this node: kubectl get pods -A -o wide -l \
             app.kubernetes.io/component=agent; or run detour install again with a new token",
        ),
    }
}

/// Checks whether the agent answers and has current facts, as STATUS does.
pub(super) fn examine_agent(target: &CheckTarget, conf: Option<&NetConf>, results: &mut Results) {
    let verdict = match conf.zip(target.agent_socket(conf).ok()) {
        None => CheckVerdict::not_checked("the configuration names no agent_socket"),
        Some((conf, socket)) => match ask(conf, &socket) {
            Ok(broken) if broken.is_empty() => CheckVerdict::pass("it answers at its socket"),
            Ok(broken) => CheckVerdict::fail(
                broken.join("; "),
                "grant the agent the permissions in SECURITY.md; if an object is too large, make it smaller; see the \
                 agent's log. Until then, the agent does not repair pods, and running pods follow no change",
            ),
            Err(error) => CheckVerdict::fail(
                error.to_string(),
                "check whether the agent runs on this node: kubectl get pods -A -o wide -l \
                 app.kubernetes.io/component=agent; until then, pods with a sidecar do not start, unless the plugin has a \
                 kubeconfig",
            ),
        },
    };
    results.add(checks::AGENT_REACHABLE, verdict);
}

/// Returns the agent's watches that are not synchronized.
fn ask(conf: &NetConf, socket: &Path) -> Result<Vec<String>, Error> {
    let mut alone = conf.kubernetes.clone();
    (alone.manifests_dir, alone.kubeconfig, alone.agent_socket) = (None, None, Some(socket.to_owned()));
    cluster::source(&alone).map_or(Ok(()), |agent| agent.probe())?;
    // An agent of an earlier version does not report them.
    Ok(broken_watches(socket, AGENT_TIMEOUT).unwrap_or_default())
}

/// Checks the API server and the plugin's permissions with the plugin's kubeconfig.
pub(super) fn examine_rights(api: Option<&Api>, conf: Option<&NetConf>, results: &mut Results) {
    let (Some(api), Some(conf)) = (api, conf) else {
        let why = results
            .obstacle(checks::API_REACHABLE.needs)
            .unwrap_or_else(|| "because no kubeconfig is known".to_owned());
        return results.add(checks::API_REACHABLE, CheckVerdict::not_checked(why));
    };
    results.run(checks::API_REACHABLE, || reachable(api));
    let may = |permission: Permission| match api.may(&permission) {
        Ok(true) => CheckVerdict::pass(permission.to_string()),
        Ok(false) => CheckVerdict::fail(
            format!("the plugin lacks the permission to {permission}"),
            "compare the ClusterRole with the one in manifests/, and its binding with kubectl get clusterrolebinding",
        ),
        Err(error) => CheckVerdict::not_checked(error.to_string()),
    };
    results.run(checks::PERMISSIONS, || CheckVerdict::merged(permissions(conf).into_iter().map(may)));
}

fn reachable(api: &Api) -> CheckVerdict {
    match api.version() {
        Ok(version) => CheckVerdict::pass(format!("Kubernetes {version}")),
        Err(error) => CheckVerdict::fail(
            error.to_string(),
            "check whether the server runs and this node reaches it; usual causes are a firewall or a wrong address",
        ),
    }
}

/// Returns the permissions that the plugin needs with this configuration.
fn permissions(conf: &NetConf) -> Vec<Permission> {
    let permission = |verb, group, resource, subresource| Permission { verb, group, resource, subresource };
    let wants = sub_plugins::wants(&conf.chain);
    let primary = conf.primary.as_ref();
    let tells = primary.is_some_and(|primary| primary.network_status != NetworkStatus::Never);
    let all = [
        (wants.pod || primary.is_some(), permission("get", "", "pods", None)),
        (wants.namespace, permission("get", "", "namespaces", None)),
        (primary.is_some(), permission("get", "k8s.cni.cncf.io", "network-attachment-definitions", None)),
        (tells, permission("patch", "", "pods", Some("status"))),
        (tells, permission("create", "", "events", None)),
    ];
    all.into_iter().filter(|(needed, _)| *needed).map(|(_, permission)| permission).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::CniCommand;
    use crate::inspect::doctor::report::CheckOutcome;
    use serde_json::{Value, json};

    fn summary(expires: Option<i64>) -> KubeconfigSummary {
        let [authority, credentials] = ["a CA", "a token"].map(|text| Some(text.to_owned()));
        KubeconfigSummary { server: "https://a".into(), authority, credentials, token: Some("t".into()), expires }
    }

    #[test]
    fn a_token_counts_until_its_end() {
        let outcome = |expires| token(&summary(expires), 1000);
        assert_eq!(outcome(Some(4_102_444_800)), CheckVerdict::pass("valid until 2100-01-01T00:00:00Z"));
        assert_eq!(outcome(Some(1000)).found, "expired at 1970-01-01T00:16:40Z");
        assert_eq!(outcome(None), CheckVerdict::pass("the token has no expiry"));
        assert_eq!(
            token(&KubeconfigSummary { token: None, ..summary(None) }, 0),
            CheckVerdict::not_checked("no token")
        );
    }

    #[test]
    fn insecure_skip_tls_verify_is_a_warning_and_missing_credentials_are_a_failure() {
        let outcome = |summary: KubeconfigSummary| valid(&summary).outcome;
        assert_eq!(outcome(summary(None)), CheckOutcome::Pass);
        assert_eq!(outcome(KubeconfigSummary { authority: None, ..summary(None) }), CheckOutcome::Warn);
        assert_eq!(outcome(KubeconfigSummary { credentials: None, ..summary(None) }), CheckOutcome::Fail);
    }

    fn of(conf: &Value) -> Vec<String> {
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("accepted");
        permissions(&conf).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn no_more_is_asked_for_than_the_configuration_needs() {
        let with = |more: Value| {
            let mut conf = json!({"name": "n", "type": "detour"});
            conf.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            of(&conf)
        };
        let all = "in all namespaces";
        assert_eq!(with(json!({"type": "istio-cni"})), [format!("get pods {all}")]);
        assert_eq!(with(json!({})), [format!("get pods {all}"), format!("get namespaces {all}")]);
        assert!(with(json!({"chain": [{"type": "tuning"}]})).is_empty());
        let primary = json!({"delegates": [{"name": "d", "type": "bridge"}], "network_status": "never"});
        let definitions = format!("get network-attachment-definitions.k8s.cni.cncf.io {all}");
        assert_eq!(with(primary), [format!("get pods {all}"), definitions.clone()]);
        let tells = with(json!({"delegates": [{"name": "d", "type": "bridge"}], "chain": [{"type": "uid-exclude"}]}));
        let wanted = ["get pods", "get namespaces", &definitions, "patch pods/status", "create events"];
        for (permission, wanted) in tells.iter().zip(wanted) {
            assert!(permission.starts_with(wanted), "{tells:?}");
        }
        assert_eq!(tells.len(), wanted.len());
    }
}
