//! Checks of the plugin's access to facts: its kubeconfig, the node agent's socket, the API server, and exactly the permissions
//! that the plugin needs with this configuration.

use super::checks;
use super::report::{AGENT_TIMEOUT, CheckTarget, CheckVerdict, Results};
use crate::cluster::agent::broken_watches;
use crate::cluster::{Api, KubeconfigSummary, Permission};
use crate::cni::{Error, NetConf, NetworkStatus};
use crate::inspect::validate::kubeconfig_warning;
use crate::{cluster, sub_plugins};
use k8s_openapi::jiff::Timestamp;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

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
    // An agent of an earlier version does not know them.
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
