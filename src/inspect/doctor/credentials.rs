//! The kubeconfig that the configuration names.
//!
//! The node agent behind its socket.
//!
//! Whether the API answers, and what the plugin may there: exactly what it needs as it is configured.

use super::configuration;
use super::report::CheckGroup;
use super::report::CheckTarget;
use super::report::{Check, CheckVerdict, Results};
use crate::cluster::{ApiProbe, Authority, CredentialsSummary, KubeconfigSummary, Right};
use crate::cni::{Error, NetConf, NetworkStatus};
use crate::{cluster, sub_plugins};
use k8s_openapi::jiff::Timestamp;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub(super) const PRESENT: Check = Check::of(CheckGroup::Node, "kubeconfig-present", "the plugin's kubeconfig is there");
pub(super) const PRIVATE: Check = Check::of(CheckGroup::Node, "kubeconfig-private", "only root may read it");
pub(super) const VALID: Check = Check::of(CheckGroup::Node, "kubeconfig-valid", "it can be used");
pub(super) const TOKEN: Check = Check::of(CheckGroup::Node, "token-valid", "its token has not expired");
/// All of them.
pub(super) const ALL: [&Check; 4] = [&PRESENT, &PRIVATE, &VALID, &TOKEN];
/// Those that must hold before the API can be asked with it.
pub(super) const USABLE: [&Check; 3] = [&PRESENT, &VALID, &TOKEN];

const REWRITE: &str = "have it written again: detour install, or see why the agent on this node does not write it";

/// Looks at it. Where it is, as this process sees it, and what it says.
pub(super) fn examine_kubeconfig(
    case: &CheckTarget,
    conf: Option<&NetConf>,
    checkup: &mut Results,
) -> Option<(PathBuf, KubeconfigSummary)> {
    let Some(conf) = conf else {
        checkup.after(&[&configuration::PRESENT, &configuration::VALID], &PRESENT, || {
            CheckVerdict::not_checked("nothing names it")
        });
        return none(checkup);
    };
    let Some(path) = conf.kubernetes.kubeconfig.as_deref().filter(|path| !path.as_os_str().is_empty()) else {
        let why = match &conf.kubernetes.manifests_dir {
            Some(dir) => format!("facts come from the files in {}, not from an API", dir.display()),
            None => "the configuration names no kubeconfig: it goes by itself alone".to_owned(),
        };
        checkup.add(&PRESENT, CheckVerdict::not_checked(why));
        return None;
    };
    let shown = path.display();
    let reached = case.reach_named(path).and_then(|reached| Ok((fs::metadata(&reached)?, reached)));
    let (metadata, reached) = match reached {
        Ok((metadata, reached)) if metadata.is_file() => (metadata, reached),
        Ok(_) => {
            checkup.add(&PRESENT, CheckVerdict::fail(format!("{shown} is no regular file"), REWRITE));
            return none(checkup);
        }
        Err(why) => {
            checkup.add(&PRESENT, CheckVerdict::fail(format!("{shown}: {why}"), REWRITE));
            return none(checkup);
        }
    };
    checkup.add(&PRESENT, CheckVerdict::pass(shown.to_string()));
    let mode = metadata.permissions().mode() & 0o7777;
    checkup.add(
        &PRIVATE,
        match mode & 0o077 {
            0 => CheckVerdict::pass(format!("mode {mode:04o}")),
            _ => CheckVerdict::fail(
                format!("{shown} has mode {mode:04o}: others can take its token"),
                format!("chmod 0600 {shown}"),
            ),
        },
    );
    // On the node itself, who owns the links in the path counts as well.
    let named = if case.mount == Path::new("/") { path } else { &reached };
    match KubeconfigSummary::read(&case.mount, named) {
        Ok(summary) => {
            checkup.add(&VALID, valid(&summary));
            checkup.add(&TOKEN, token(&summary, Timestamp::now().as_second()));
            Some((reached, summary))
        }
        Err(error) => {
            checkup.add(&VALID, CheckVerdict::fail(error.to_string(), REWRITE));
            checkup.after(&[&VALID], &TOKEN, || CheckVerdict::pass(""));
            None
        }
    }
}

fn none<T>(checkup: &mut Results) -> Option<T> {
    for check in [&PRIVATE, &VALID, &TOKEN] {
        checkup.after(&[&PRESENT], check, || CheckVerdict::pass(""));
    }
    None
}

fn valid(summary: &KubeconfigSummary) -> CheckVerdict {
    let server = &summary.server;
    let by = match &summary.authority {
        Authority::Embedded => "its authority is in it".to_owned(),
        Authority::File(file) => format!("its authority is in {}", file.display()),
        Authority::System => "the node's own authorities are asked, for it names none".to_owned(),
        Authority::Nobody => {
            return CheckVerdict::fail(
                format!("{server}: insecure-skip-tls-verify is true, so that anybody can answer for it"),
                "write certificate-authority-data instead; detour install does",
            );
        }
    };
    let who = match &summary.credentials {
        CredentialsSummary::Token => "a token".to_owned(),
        CredentialsSummary::TokenFile(file) => format!("the token in {}", file.display()),
        CredentialsSummary::Certificate => "a client certificate".to_owned(),
        CredentialsSummary::Nothing => {
            return CheckVerdict::fail(format!("{server}: it has no credentials"), REWRITE);
        }
    };
    CheckVerdict::pass(format!("{server} with {who}; {by}"))
}

fn token(summary: &KubeconfigSummary, now: i64) -> CheckVerdict {
    let shown =
        |seconds: i64| Timestamp::from_second(seconds).map_or_else(|_| "for ever".to_owned(), |t| t.to_string());
    match (&summary.token, summary.expires) {
        (None, _) => CheckVerdict::not_checked("it has no token"),
        (Some(_), None) => CheckVerdict::pass("it says nothing of an end"),
        (Some(_), Some(end)) if end > now => CheckVerdict::pass(format!("valid until {}", shown(end))),
        (Some(_), Some(end)) => CheckVerdict::fail(
            format!("it expired at {}", shown(end)),
            "see whether the agent runs on this node, which renews it: kubectl get pods -A -o wide -l \
             app.kubernetes.io/component=agent; or install again with a new token",
        ),
    }
}

const AGENT: Check = Check::of(CheckGroup::Cluster, "agent-reachable", "the node agent answers, and knows");

/// Asks it whether it could tell facts now, as STATUS does.
pub(super) fn examine_agent(case: &CheckTarget, conf: Option<&NetConf>, checkup: &mut Results) {
    let socket = conf.and_then(|conf| Some((conf, conf.kubernetes.agent_socket.as_deref()?)));
    checkup.add(
        &AGENT,
        match socket {
            None => CheckVerdict::not_checked("the configuration names no agent_socket"),
            Some((conf, path)) => match case.reach_named(path).map(|reached| ask(conf, &reached)) {
                Ok(Ok(())) => CheckVerdict::pass(path.display().to_string()),
                Ok(Err(error)) => fail(path, &error.to_string()),
                Err(error) => fail(path, &error.to_string()),
            },
        },
    );
}

fn ask(conf: &NetConf, socket: &Path) -> Result<(), Error> {
    let mut alone = conf.kubernetes.clone();
    (alone.manifests_dir, alone.kubeconfig, alone.agent_socket) = (None, None, Some(socket.to_owned()));
    cluster::source(&alone).map_or(Ok(()), |agent| agent.probe())
}

fn fail(path: &Path, why: &str) -> CheckVerdict {
    CheckVerdict::fail(
        format!("{}: {why}", path.display()),
        "the plugin asks the API itself until it does; see whether the agent runs on this node: kubectl get pods -A -o wide \
         -l app.kubernetes.io/component=agent",
    )
}

pub(super) const API: Check = Check::of(CheckGroup::Cluster, "api-reachable", "the API server answers");
const GET_PODS: Check = Check::of(CheckGroup::Cluster, "right-get-pods", "the plugin may get pods");
const GET_NAMESPACES: Check = Check::of(CheckGroup::Cluster, "right-get-namespaces", "the plugin may get namespaces");
const GET_DEFINITIONS: Check =
    Check::of(CheckGroup::Cluster, "right-get-definitions", "the plugin may get definitions");
const PATCH_STATUS: Check =
    Check::of(CheckGroup::Cluster, "right-patch-pods-status", "the plugin may tell a pod's network status");
const CREATE_EVENTS: Check = Check::of(CheckGroup::Cluster, "right-create-events", "the plugin may tell of events");

/// Asks, where there is a kubeconfig to ask with.
pub(super) fn examine_rights(inquiry: Option<&ApiProbe>, conf: Option<&NetConf>, checkup: &mut Results) {
    let (Some(inquiry), Some(conf)) = (inquiry, conf) else {
        let why = checkup.obstacle(&USABLE).unwrap_or_else(|| "because there is no kubeconfig".to_owned());
        return checkup.add(&API, CheckVerdict::not_checked(why));
    };
    checkup.after(&USABLE, &API, || reachable(inquiry));
    for (check, right) in rights(conf) {
        checkup.after(&[&API], check, || match inquiry.may(&right) {
            Ok(true) => CheckVerdict::pass(right.to_string()),
            Ok(false) => CheckVerdict::fail(
                format!("it may not {right}"),
                "grant it: the ClusterRole is in manifests/, and kubectl get clusterrolebinding shows whom it is bound to",
            ),
            Err(error) => CheckVerdict::not_checked(error.to_string()),
        });
    }
}

/// Asks with the kubeconfig that the user names, where the plugin itself reads files and asks no API.
pub(super) fn examine_api_of_user(inquiry: &ApiProbe, conf: Option<&NetConf>, checkup: &mut Results) {
    checkup.add(&API, reachable(inquiry));
    for (check, _) in conf.map(rights).unwrap_or_default() {
        checkup.add(check, CheckVerdict::not_checked("the plugin needs no right: kubernetes.manifests_dir is set"));
    }
}

fn reachable(inquiry: &ApiProbe) -> CheckVerdict {
    match inquiry.version() {
        Ok(version) => CheckVerdict::pass(format!("Kubernetes {version}")),
        Err(error) => CheckVerdict::fail(
            error.to_string(),
            "see whether the server runs and whether this node reaches it; a firewall or a wrong address are usual",
        ),
    }
}

/// What calls of the plugin ask of the API under this configuration.
fn rights(conf: &NetConf) -> Vec<(&'static Check, Right)> {
    let right = |verb, group, resource, subresource| Right { verb, group, resource, subresource, namespace: None };
    let wants = sub_plugins::wants(&conf.chain);
    let primary = conf.primary.as_ref();
    let tells = primary.is_some_and(|primary| primary.network_status != NetworkStatus::Never);
    let all = [
        (wants.pod || primary.is_some(), &GET_PODS, right("get", "", "pods", None)),
        (wants.namespace, &GET_NAMESPACES, right("get", "", "namespaces", None)),
        (primary.is_some(), &GET_DEFINITIONS, right("get", "k8s.cni.cncf.io", "network-attachment-definitions", None)),
        (tells, &PATCH_STATUS, right("patch", "", "pods", Some("status"))),
        (tells, &CREATE_EVENTS, right("create", "", "events", None)),
    ];
    all.into_iter().filter(|(needed, ..)| *needed).map(|(_, check, right)| (check, right)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::CniCommand;
    use serde_json::{Value, json};

    fn summary(expires: Option<i64>) -> KubeconfigSummary {
        let (authority, credentials) = (Authority::Embedded, CredentialsSummary::Token);
        KubeconfigSummary { server: "https://a".into(), authority, credentials, token: Some("t".into()), expires }
    }

    #[test]
    fn a_token_counts_until_its_end() {
        let outcome = |expires| token(&summary(expires), 1000);
        assert_eq!(outcome(Some(4_102_444_800)), CheckVerdict::pass("valid until 2100-01-01T00:00:00Z"));
        assert!(matches!(outcome(Some(1000)), CheckVerdict::Fail(found, _) if found.contains("1970-01-01T00:16:40Z")));
        assert_eq!(outcome(None), CheckVerdict::pass("it says nothing of an end"));
        assert!(matches!(token(&KubeconfigSummary { token: None, ..summary(None) }, 0), CheckVerdict::NotChecked(..)));
    }

    #[test]
    fn a_server_that_nobody_vouches_for_and_nobody_who_asks_are_failures() {
        assert!(matches!(valid(&summary(None)), CheckVerdict::Pass(_)));
        assert!(matches!(
            valid(&KubeconfigSummary { authority: Authority::Nobody, ..summary(None) }),
            CheckVerdict::Fail(..)
        ));
        assert!(matches!(
            valid(&KubeconfigSummary { credentials: CredentialsSummary::Nothing, ..summary(None) }),
            CheckVerdict::Fail(..)
        ));
    }

    fn of(conf: &Value) -> Vec<String> {
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("accepted");
        rights(&conf).into_iter().map(|(_, right)| right.to_string()).collect()
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
        for (right, wanted) in tells.iter().zip(wanted) {
            assert!(right.starts_with(wanted), "{tells:?}");
        }
        assert_eq!(tells.len(), wanted.len());
    }
}
