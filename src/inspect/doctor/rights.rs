//! Whether the API answers, and what the plugin may there: exactly what it needs as it is configured.

use super::check::{Check, Results, CheckVerdict};
use super::kubeconfig;
use super::report::CheckGroup;
use crate::sub_plugins;
use crate::cluster::{ApiProbe, Right};
use crate::cni::{NetConf, NetworkStatus};

pub(super) const API: Check = Check::of(CheckGroup::Cluster, "api-reachable", "the API server answers");
const GET_PODS: Check = Check::of(CheckGroup::Cluster, "right-get-pods", "the plugin may get pods");
const GET_NAMESPACES: Check = Check::of(CheckGroup::Cluster, "right-get-namespaces", "the plugin may get namespaces");
const GET_DEFINITIONS: Check = Check::of(CheckGroup::Cluster, "right-get-definitions", "the plugin may get definitions");
const PATCH_STATUS: Check =
    Check::of(CheckGroup::Cluster, "right-patch-pods-status", "the plugin may tell a pod's network status");
const CREATE_EVENTS: Check = Check::of(CheckGroup::Cluster, "right-create-events", "the plugin may tell of events");

/// Asks, where there is a kubeconfig to ask with.
pub(super) fn examine_rights(inquiry: Option<&ApiProbe>, conf: Option<&NetConf>, checkup: &mut Results) {
    let (Some(inquiry), Some(conf)) = (inquiry, conf) else {
        let why = checkup.obstacle(&kubeconfig::USABLE).unwrap_or_else(|| "because there is no kubeconfig".to_owned());
        return checkup.add(&API, CheckVerdict::not_checked(why));
    };
    checkup.after(&kubeconfig::USABLE, &API, || match inquiry.version() {
        Ok(version) => CheckVerdict::pass(format!("Kubernetes {version}")),
        Err(error) => CheckVerdict::fail(
            error.to_string(),
            "see whether the server runs and whether this node reaches it; a firewall or a wrong address are usual",
        ),
    });
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
