//! Checks of the node: the plugin's program, the installation as a whole, the kernel, and the rules of running pods as
//! the agent reports them. Also checks of the plugin's access to facts: its kubeconfig, the node agent's socket, the API
//! server, and exactly the permissions that the plugin needs with this configuration.

use super::findings::Findings;
use super::report::{AGENT_TIMEOUT, CheckTarget, CheckVerdict};
use crate::cluster::agent::{PodFinding, broken_watches, pod_policies};
use crate::cluster::{KubeconfigSummary, Permission};
use crate::cni::{Error, NetConf, NetworkStatus};
use crate::firewall::RuleFormat;
use crate::host_path::HostPath;
use crate::inspect::child::run_program;
use crate::inspect::socket_lb;
use crate::inspect::terminal::joined;
use crate::inspect::validate::kubeconfig_warning;
use crate::plugin::probe::{in_new_netns, refused_guard, try_redirection};
use crate::trusted_file::{self, names_in};
use crate::{cluster, sub_plugins};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;
use std::{fs, io};

/// The next step if a part of the installation is missing or wrong.
pub(super) const INSTALL: &str =
    "run detour install (see detour install --help), or see the log of the agent on this node";
/// The next step if this process lacks a capability.
pub(super) const AS_ROOT: &str = "run detour doctor as root on the node, or in the agent's pod";
/// The next step if the agent does not do its part.
const AGENT: &str = "check whether the agent runs on this node: kubectl get pods -A -o wide -l \
    app.kubernetes.io/component=agent";

/// Returns the paths of the programs: those that configurations name, in each plugin directory, and the installed ones.
fn programs(Findings { target, configurations, .. }: &Findings<'_>) -> BTreeSet<HostPath> {
    let kinds = configurations.iter().map(|applied| &applied.conf.kind);
    let in_dirs = kinds.flat_map(|kind| target.bin_dirs.iter().map(move |dir| dir.join(kind)));
    in_dirs.chain(target.programs.iter().cloned()).collect()
}

/// Checks who can change the plugin directories: the plugin runs programs from there as root.
pub(super) fn program_trusted(findings: &Findings<'_>) -> CheckVerdict {
    let target = findings.target;
    let mut directories = target.bin_dirs.clone();
    directories.extend(programs(findings).iter().map(HostPath::parent));
    let wrong: Vec<String> = directories.iter().flat_map(|directory| untrusted(target, directory)).collect();
    let next = "run the named commands; until then, plugins there are not executed";
    CheckVerdict::unless(wrong, joined(directories), next)
}

pub(super) fn program_present(findings: &Findings<'_>) -> CheckVerdict {
    let present = |path: HostPath| match version(findings.target, &path) {
        Ok(version) => CheckVerdict::pass(format!("{path}: {version}")),
        Err(why) => CheckVerdict::fail(format!("{path}: {why}"), INSTALL),
    };
    CheckVerdict::merged(programs(findings).into_iter().map(present))
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
pub(super) fn installation(findings: &Findings<'_>) -> CheckVerdict {
    if let Some(because) = findings.failure(|line| line.group == "node") {
        return because;
    }
    match &findings.target.changed {
        Ok(None) => CheckVerdict::not_checked("detour was not installed by detour install"),
        Ok(Some(changed)) => CheckVerdict::unless(
            changed.iter().cloned(),
            "nothing has changed",
            "run detour install --dry-run to see the corrections",
        ),
        Err(why) => CheckVerdict::fail(why, "run detour install again, which writes a new record"),
    }
}

const MODULES: &str = "load the modules on the node: modprobe -a nf_tables nft_compat nft_nat nft_ct nf_nat nf_conntrack \
    xt_owner xt_REDIRECT xt_multiport xt_CT; for mesh-guard also nft_reject_inet nft_fib_inet";

/// Tries the rules of a pod in a new network namespace. Exclusions are native; the redirection needs the format that the
/// configuration sets, or one of both.
pub(super) fn kernel(findings: &Findings<'_>) -> CheckVerdict {
    let conf = findings.conf();
    let tried = in_new_netns(|| [RuleFormat::Nftables, RuleFormat::Iptables].map(try_redirection));
    let [native, iptables] = match tried {
        Ok(tried) => tried,
        Err(why) => return CheckVerdict::to_do(format!("can't create a network namespace: {why}"), AS_ROOT),
    };
    let verdict = |rules: &str, tried: Result<(), String>| match tried {
        Ok(()) => CheckVerdict::pass(rules),
        Err(why) => CheckVerdict::fail(format!("{rules}: {why}"), MODULES),
    };
    let needs_iptables = conf.is_some_and(|conf| conf.rule_format == Some(RuleFormat::Iptables));
    let iptables = match iptables {
        Err(why) if !needs_iptables => CheckVerdict::pass(format!("not in format iptables: {why}")),
        tried => verdict("rules in format iptables", tried),
    };
    let guard =
        conf.and_then(|conf| refused_guard(&conf.chain)).map(|why| verdict("the rules of mesh-guard", Err(why)));
    CheckVerdict::merged([verdict("rules in format nftables", native), iptables].into_iter().chain(guard))
}

/// Checks whether eBPF programs replace Service addresses before netfilter sees them. Nodes whose BPF file system is not
/// visible to this process have no such check.
pub(super) fn socket_lb(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let products = socket_lb::products(&findings.target.mount)?;
    if products.is_empty() {
        return Some(CheckVerdict::pass("no programs of Cilium or Calico are attached"));
    }
    let (names, settings): (Vec<_>, Vec<_>) = products.iter().map(|product| (product.name, product.setting)).unzip();
    let found = format!(
        "{}: a process connects to a backend instead of the Service's address, so the sidecar does not route by \
         Service, and an exclusion of a ClusterIP has no effect",
        joined(names)
    );
    Some(CheckVerdict::warn(found, settings.join("; ")))
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
    let Output { stdout, status, .. } = run_program(command, MAX_OUTPUT, TIMEOUT)?;
    match status.success() || stdout.len() as u64 > MAX_OUTPUT {
        true => Ok(String::from_utf8_lossy(&stdout).into_owned()),
        false => Err(format!("failed ({status})")),
    }
}

/// The next step if the rules of a pod are missing or may be wrong.
const LOST: &str = "see the pod's Events; the agent retries; if this lasts, delete the pod, or let the agent repair it (chart \
    value repair.enabled); in the ambient mesh, see the istio-cni and ztunnel pods of the node";
/// The number of pods that the check of the policies names; all are counted.
const LISTED: usize = 10;

/// Checks the rules of the pod, or of all pods of the node: all are counted, and the first that are not current are named.
pub(super) fn policies(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let report = match findings.policies.as_ref()? {
        Ok(report) => report,
        Err(why) => return Some(CheckVerdict::not_checked(why)),
    };
    let follows = match report.follows {
        Some(true) => "running pods follow changes of their policies",
        Some(false) => "running pods follow no change (livePolicy is off)",
        None => {
            let why = "the agent does not read the rules of pods (chart values livePolicy and repair.enabled)";
            return Some(CheckVerdict::not_checked(why));
        }
    };
    let named = findings.target.pod.as_ref();
    let is_meant = |PodFinding { pod, .. }: &&PodFinding| {
        named.is_none_or(|named| (&named.namespace, &named.name) == (&pod.namespace, &pod.name))
    };
    let mut pods: Vec<&PodFinding> = report.findings.iter().filter(is_meant).collect();
    pods.sort_by_key(|finding| (finding.state != "none", &finding.pod));
    let verdict = |found, is_lost| match is_lost {
        true => CheckVerdict::fail(found, LOST),
        false => CheckVerdict::warn(found, "correct the value, also in the pod template: a new pod does not start"),
    };
    let found = format!("{}; {follows}", report.counts);
    let summary = match (report.counts.rejected, report.counts.lost()) {
        _ if named.is_some() => CheckVerdict::pass(follows),
        (0, 0) => CheckVerdict::pass(found),
        (_, lost) => verdict(found, lost > 0),
    };
    let of_pod = |PodFinding { pod, state, reason }: &PodFinding| {
        let name = format!("{}/{}", pod.namespace, pod.name);
        let reason = reason.strip_prefix(&format!("pod {name}: ")).unwrap_or(reason);
        verdict(format!("{name}: {state}: {reason}"), state != "rejected")
    };
    Some(CheckVerdict::merged([summary].into_iter().chain(pods.into_iter().take(LISTED).map(of_pod))))
}

/// Checks the kubeconfig, and records its path in this process.
pub(super) fn kubeconfig(findings: &mut Findings<'_>) -> CheckVerdict {
    let target = findings.target;
    let named = findings.conf().and_then(|conf| conf.kubernetes.kubeconfig.clone());
    let Some(path) = named.filter(|path| !path.as_os_str().is_empty()) else {
        let none = "no configuration names a kubeconfig: facts come from the agent or from files";
        let because = findings.obstacle(&["configuration-present", "configuration-valid"]);
        return because.unwrap_or_else(|| CheckVerdict::not_checked(none));
    };
    let shown = path.display();
    let failed = |why: io::Error| format!("{shown}: {why}");
    let mut read = || {
        let reached = target.reach_named(&path).map_err(failed)?;
        let mode = fs::metadata(&reached).map_err(failed)?.permissions().mode() & 0o7777;
        // On the node itself, the owners of symbolic links in the path count as well.
        let followed = if target.mount == Path::new("/") { &path } else { &reached };
        let summary = KubeconfigSummary::read(&target.mount, followed).map_err(|error| error.to_string())?;
        let open = (mode & 0o077 != 0).then(|| format!("{shown} has mode {mode:04o}: other users can read its token"));
        let private = CheckVerdict::unless(open, format!("mode {mode:04o}"), &format!("chmod 0600 {shown}"));
        findings.kubeconfig = Some(reached);
        Ok::<_, String>([private, valid(&summary), token(&summary, Timestamp::now())])
    };
    read().map_or_else(|why| CheckVerdict::fail(why, INSTALL), CheckVerdict::merged)
}

fn valid(summary: &KubeconfigSummary) -> CheckVerdict {
    let server = &summary.server;
    let Some(by) = &summary.authority else {
        let next = "use certificate-authority-data instead; detour install writes it";
        return CheckVerdict::warn(kubeconfig_warning(summary).unwrap_or_default(), next);
    };
    let who = summary.credentials.as_ref().ok_or_else(|| format!("{server}: no credentials"));
    CheckVerdict::of(who.map(|who| format!("{server} with {who}; {by}")), INSTALL)
}

fn token(summary: &KubeconfigSummary, now: Timestamp) -> CheckVerdict {
    match summary.expires.map(Timestamp::from_second) {
        Some(Ok(end)) if end > now => CheckVerdict::pass(format!("valid until {end}")),
        Some(Ok(end)) => CheckVerdict::fail(format!("expired at {end}"), INSTALL),
        _ => CheckVerdict::pass("no token that expires"),
    }
}

/// Checks whether the agent answers and has current facts, as STATUS does. If so, it is asked for the rules of the pods.
pub(super) fn agent(findings: &mut Findings<'_>) -> CheckVerdict {
    let Some((conf, socket)) = findings.conf().zip(findings.agent_socket()) else {
        return CheckVerdict::not_checked("the configuration names no agent_socket");
    };
    let broken = match ask(conf, &socket) {
        Ok(broken) => broken,
        Err(error) => {
            let next = "until then, pods with a sidecar do not start, unless the plugin has a kubeconfig";
            return CheckVerdict::fail(error.to_string(), format!("{AGENT}; {next}"));
        }
    };
    findings.policies = broken.is_empty().then(|| pod_policies(&socket, AGENT_TIMEOUT));
    let next = "grant the agent the permissions in SECURITY.md, and see its log; until then, it does not repair pods";
    CheckVerdict::unless(broken, "it answers at its socket", next)
}

/// Returns the agent's watches that are not synchronized.
fn ask(conf: &NetConf, socket: &Path) -> Result<Vec<String>, Error> {
    let mut alone = conf.kubernetes.clone();
    (alone.manifests_dir, alone.kubeconfig, alone.agent_socket) = (None, None, Some(socket.to_owned()));
    cluster::source(&alone).map_or(Ok(()), |agent| agent.probe())?;
    // An agent of an earlier version does not report them.
    Ok(broken_watches(socket, AGENT_TIMEOUT).unwrap_or_default())
}

/// Checks the API server with the plugin's kubeconfig.
pub(super) fn api_reachable(findings: &Findings<'_>) -> Option<CheckVerdict> {
    Some(CheckVerdict::of(
        findings.plugin_api()?.version().map(|version| format!("Kubernetes {version}")),
        "check whether the server runs and this node reaches it; usual causes are a firewall or a wrong address",
    ))
}

pub(super) fn permissions(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let api = findings.plugin_api()?;
    let may = |permission: Permission| match api.may(&permission) {
        Ok(true) => CheckVerdict::pass(permission.to_string()),
        Ok(false) => CheckVerdict::fail(
            format!("the plugin lacks the permission to {permission}"),
            "compare the ClusterRole with the one in manifests/, and its binding with kubectl get clusterrolebinding",
        ),
        Err(error) => CheckVerdict::not_checked(error.to_string()),
    };
    Some(CheckVerdict::merged(needed_permissions(findings.conf()?).into_iter().map(may)))
}

/// Returns the permissions that the plugin needs with this configuration.
fn needed_permissions(conf: &NetConf) -> Vec<Permission> {
    let permission = |verb, group, resource, subresource| Permission { verb, group, resource, subresource };
    let wants = sub_plugins::wants(&conf.chain);
    let primary = conf.primary.as_ref();
    let reports = primary.is_some_and(|primary| primary.network_status != NetworkStatus::Never);
    let all = [
        (wants.pod || primary.is_some(), permission("get", "", "pods", None)),
        (wants.namespace, permission("get", "", "namespaces", None)),
        (primary.is_some(), permission("get", "k8s.cni.cncf.io", "network-attachment-definitions", None)),
        (reports, permission("patch", "", "pods", Some("status"))),
        (reports, permission("create", "", "events", None)),
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
        let now = Timestamp::from_second(1000).expect("a time");
        let outcome = |expires| token(&summary(expires), now);
        assert_eq!(outcome(Some(4_102_444_800)), CheckVerdict::pass("valid until 2100-01-01T00:00:00Z"));
        assert_eq!(outcome(Some(1000)).found, "expired at 1970-01-01T00:16:40Z");
        assert_eq!(outcome(None), CheckVerdict::pass("no token that expires"));
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
        needed_permissions(&conf).iter().map(ToString::to_string).collect()
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
        let reports = with(json!({"delegates": [{"name": "d", "type": "bridge"}], "chain": [{"type": "uid-exclude"}]}));
        let wanted = ["get pods", "get namespaces", &definitions, "patch pods/status", "create events"];
        for (permission, wanted) in reports.iter().zip(wanted) {
            assert!(permission.starts_with(wanted), "{reports:?}");
        }
        assert_eq!(reports.len(), wanted.len());
    }
}
