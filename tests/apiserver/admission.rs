//! The chart's admission policies: their verdicts about objects equal the plugin's, with messages for the author.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::shipped::{NAMESPACE, apply, chart_with_files, namespaces};
use crate::support::program::built;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

/// The same table as that of the plugin's test.
const CASES: &str = include_str!("../bounds/cases.yaml");
/// The label that binds an object of a test to the policies of one configuration.
const LABEL: &str = "configuration";

fn started() -> (ControlPlane, Client) {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    apply(&admin, &namespaces());
    for namespace in [NAMESPACE, "shop"] {
        let metadata = json!({"namespace": namespace, "name": "default"});
        apply(&admin, &[json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})]);
    }
    (plane, admin)
}

/// Applies the chart's policies for objects with the label `configuration: NAME`.
fn install(plane: &ControlPlane, admin: &Client, name: &str, values: &Value) {
    let mut values = values.clone();
    values["fullnameOverride"] = name.into();
    values["admissionPolicy"]["enabled"] = true.into();
    let file = plane.directory.join(format!("{name}.json"));
    fs::write(&file, values.to_string()).expect("writable");
    let mut policies = chart_with_files(&[&file], &[]);
    let names = ["bounds", "istio"].map(|part| format!("{name}-{part}"));
    policies.retain(|object| names.iter().any(|name| object["metadata"]["name"] == *name));
    assert!(!policies.is_empty(), "{values}");
    for policy in &mut policies {
        if policy["spec"]["matchConstraints"].is_object() {
            policy["spec"]["matchConstraints"]["objectSelector"] = json!({"matchLabels": {LABEL: name}});
        }
    }
    apply(admin, &policies);
}

/// Whether an object passes the admission. The error is the policy's message.
fn verdict(result: Result<Value, crate::client::Refused>) -> Result<(), String> {
    match result {
        Ok(_) => Ok(()),
        // The policies decided before the API server found the object.
        Err(refused) if refused.code == 409 => Ok(()),
        Err(refused) => {
            let (_, message) = refused.message.split_once("denied request: ").unwrap_or_else(|| panic!("{refused:?}"));
            Err(message.to_owned())
        }
    }
}

fn admitted(admin: &Client, object: &Value) -> Result<(), String> {
    verdict(admin.try_create(object))
}

fn pod(name: &str, annotations: &Value, spec: &Value) -> Value {
    let metadata = json!({"namespace": "shop", "name": "web", "labels": {LABEL: name}, "annotations": annotations});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}

fn sidecar() -> Value {
    json!({"containers": [{"name": "app", "image": "i"}, {"name": "istio-proxy", "image": "i"}]})
}

/// Returns an object of each kind whose pods have these annotations, and a namespace with them.
fn objects(name: &str, annotations: &Value, spec: &Value) -> Vec<Value> {
    let labels = json!({"app": "web"});
    let template = |restart: &str| {
        let mut spec = spec.clone();
        spec["restartPolicy"] = restart.into();
        json!({"metadata": {"labels": labels, "annotations": annotations}, "spec": spec})
    };
    let selector = json!({"matchLabels": labels});
    let job = json!({"template": template("Never")});
    let object = |version: &str, kind: &str, key: &str, value: Value| {
        let metadata = json!({"namespace": "shop", "name": "web", "labels": {LABEL: name}});
        json!({"apiVersion": version, "kind": kind, "metadata": metadata, key: value})
    };
    let apps = |kind| object("apps/v1", kind, "spec", json!({"selector": selector, "template": template("Always")}));
    let mut namespace = pod(name, annotations, &Value::Null);
    namespace["kind"] = "Namespace".into();
    namespace["metadata"].as_object_mut().expect("an object").remove("namespace");
    let cron = json!({"schedule": "* * * * *", "jobTemplate": {"spec": job}});
    vec![
        pod(name, annotations, spec),
        apps("Deployment"),
        apps("ReplicaSet"),
        apps("StatefulSet"),
        apps("DaemonSet"),
        object("batch/v1", "Job", "spec", job.clone()),
        object("batch/v1", "CronJob", "spec", cron),
        object("v1", "ReplicationController", "spec", json!({"selector": labels, "template": template("Always")})),
        object("v1", "PodTemplate", "template", template("Always")),
        namespace,
    ]
}

#[test]
fn the_policy_decides_as_the_plugin() {
    let (plane, admin) = started();
    // The table repeats a few pods in many cases.
    let options = serde_saphyr::options! { budget: None };
    let cases: Vec<Value> = serde_saphyr::from_str_with_options(CASES, options).expect("YAML");
    let sub_plugins = ["istio-redirect", "uid-exclude", "dns-exclude", "container-exclude", "destination-exclude"];
    let all = json!(sub_plugins.map(|name| json!({"type": name})));
    let mut configurations: BTreeMap<String, String> = BTreeMap::new();
    let mut by_namespace: BTreeMap<String, Vec<(&Value, String)>> = BTreeMap::new();
    for case in &cases {
        let mut config = json!({"chain": case.get("chain").unwrap_or(&all)});
        for key in ["allow", "outside_bounds"] {
            if let Some(value) = case.get(key) {
                config[key] = value.clone();
            }
        }
        let number = configurations.len();
        let name = configurations.entry(config.to_string()).or_insert_with(|| {
            let name = format!("c{number}");
            install(&plane, &admin, &name, &json!({"config": config}));
            name
        });
        by_namespace.entry(case["namespace"].to_string()).or_default().push((case, name.clone()));
    }
    // Each rejects what no configuration permits. One that ignores it admits every pod.
    let wrong = json!({"detour.io/exclude-uids": "?", "detour.io/exclude-dns": "?"});
    for name in configurations.iter().filter(|(config, _)| !config.contains("ignore")).map(|(_, name)| name) {
        plane.until(|| admitted(&admin, &pod(name, &wrong, &sidecar())).is_err());
    }
    // Admits a pod as soon as the policies see the namespace with the same label.
    let see = "object.metadata.labels.revision == namespaceObject.metadata.labels.revision";
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]});
    let constraints = json!({"resourceRules": [rule], "objectSelector": {"matchLabels": {LABEL: "revision"}}});
    let version = "admissionregistration.k8s.io/v1";
    apply(
        &admin,
        &[
            json!({
                "apiVersion": version, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": "revision"},
                "spec": {"matchConstraints": constraints, "validations": [{"expression": see}]},
            }),
            json!({
                "apiVersion": version, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": "revision"},
                "spec": {"policyName": "revision", "validationActions": ["Deny"]},
            }),
        ],
    );
    let probe = |revision: &str| {
        let mut pod = pod("revision", &json!({}), &sidecar());
        pod["metadata"]["labels"]["revision"] = revision.into();
        admitted(&admin, &pod)
    };
    plane.until(|| probe("none").is_err());
    let mut wrong = Vec::new();
    for (revision, (namespace, cases)) in by_namespace.into_iter().enumerate() {
        let namespace: Value = serde_json::from_str(&namespace).expect("JSON");
        let revision = format!("r{revision}");
        let mut metadata = namespace.clone();
        metadata["labels"]["revision"] = revision.as_str().into();
        apply(&admin, &[json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})]);
        plane.until(|| probe(&revision).is_ok());
        for (case, name) in cases {
            let (annotations, spec) = (&case["pod"]["annotations"], &case["pod"]["spec"]);
            let mut objects = objects(&name, annotations, spec);
            let own = objects.last_mut().expect("the namespace");
            own["metadata"]["name"] = namespace["name"].clone();
            for part in ["labels", "annotations"] {
                let own = own["metadata"][part].as_object_mut().expect("an object");
                own.extend(namespace[part].as_object().expect("an object").clone());
                own.extend(case["pod"][part].as_object().cloned().unwrap_or_default());
            }
            let permitted = case["permitted"] == true;
            let allow = case.get("allow").map(Value::to_string).unwrap_or_default();
            let of_namespace = namespace["annotations"].to_string().contains("detour.io");
            for object in objects {
                let wanted = match object["kind"].as_str().expect("text") {
                    "Pod" => permitted,
                    // Only its own annotations count.
                    "Deployment" if of_namespace && annotations.as_object().is_some_and(|own| own.is_empty()) => true,
                    "Deployment" => permitted,
                    // It has no containers: pods are decided.
                    "Namespace" if allow.contains("kinds") => true,
                    "Namespace"
                        if !allow.contains("container:")
                            && annotations.to_string().contains("container:")
                            && allow.contains("ids") =>
                    {
                        continue;
                    }
                    "Namespace" => permitted,
                    _ => continue,
                };
                let found = admitted(&admin, &object);
                if found.is_ok() != wanted {
                    wrong.push(format!("{} {}: expected {wanted}, got {found:?}", object["kind"], case["name"]));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn each_kind_is_rejected_with_a_message_that_names_item_and_bound() {
    let (plane, admin) = started();
    let allow = json!([
        {"uids": [1000, "2000-2010"], "containers": "vault*", "kinds": "init"},
        {"namespaces": ["cart", "shop"], "uids": "7", "resolvers": "kinds"},
        {"namespace_selector": {"matchLabels": {"tier": "batch"}}},
    ]);
    let chain = json!([
        {"type": "uid-exclude"}, {"type": "dns-exclude"}, {"type": "container-exclude"},
        {"type": "destination-exclude", "allow": []},
    ]);
    install(&plane, &admin, "kinds", &json!({"config": {"allow": allow, "chain": chain}}));
    let by_admin = "; an administrator of the cluster sets these bounds in Helm release kube-system/detour";
    let uids = "config.allow[0].uids: 1000, 2000-2010; config.allow[1].uids: 7 (namespaces cart, shop); \
                config.allow[2].uids: * (namespaces with certain labels)";
    let containers = "config.allow[0].containers: vault*, kinds init; config.allow[2].containers: * \
                      (namespaces with certain labels)";
    let outside = |key: &str, value: &str| json!({format!("detour.io/exclude-{key}"): value});
    let metadata = json!({"name": "market", "annotations": outside("uids", "8")});
    apply(&admin, &[json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})]);
    let account = json!({"namespace": "market", "name": "default"});
    apply(&admin, &[json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})]);
    plane.until(|| admitted(&admin, &pod("kinds", &outside("uids", "8"), &sidecar())).is_err());
    for object in objects("kinds", &outside("uids", "7,2000-2011,*"), &sidecar()) {
        let wanted = format!(
            "annotation \"detour.io/exclude-uids\": \"2000-2011\" is not permitted; expected items within {uids}{by_admin}"
        );
        // The grant for the namespace shop is not for this one.
        let other = object["kind"] == "Namespace";
        let wanted = if other { wanted.replace("2000-2011\" is", "7\" is") } else { wanted };
        let mut object = object;
        if other {
            object["metadata"]["name"] = "market".into();
        }
        assert_eq!(admitted(&admin, &object), Err(wanted), "{}", object["kind"]);
    }
    for object in objects("kinds", &outside("uids", "1000,2000-2010"), &sidecar()) {
        assert_eq!(admitted(&admin, &object), Ok(()), "{}", object["kind"]);
    }
    for (key, value, item, bounds) in [
        ("containers", "app", "\"app\"", containers),
        ("outbound-ports", "1-1024", "\"1-1024\"", "config.chain[3].allow, which permits none"),
        // Nothing that could control a terminal.
        ("outbound-ports", "\u{1b}[31m", "one item", "config.chain[3].allow, which permits none"),
        ("outbound-ports", &"9".repeat(200_000), "one item", "config.chain[3].allow, which permits none"),
    ] {
        let wanted = format!(
            "annotation \"detour.io/exclude-{key}\": {item} is not permitted; expected items within {bounds}{by_admin}"
        );
        assert_eq!(admitted(&admin, &pod("kinds", &outside(key, value), &sidecar())), Err(wanted));
    }
    // Above the API server's limit of cost, nothing passes unchecked.
    let permitted = |count: usize| {
        let many: Vec<String> = (0..count).map(|i| (2000 + i % 11).to_string()).collect();
        admitted(&admin, &pod("kinds", &outside("uids", &many.join(",")), &sidecar()))
    };
    assert_eq!(permitted(500), Ok(()));
    let costly = permitted(2000).expect_err("too many");
    assert!(costly.contains("cost limit exceeded"), "{costly}");
    // The namespace has an annotation from before. It applies to pods with a sidecar.
    let mut inherits = pod("kinds", &json!({}), &sidecar());
    inherits["metadata"]["namespace"] = "market".into();
    let wanted = format!(
        "annotation \"detour.io/exclude-uids\" of namespace market: \"8\" is not permitted; expected items within {uids}{by_admin}"
    );
    assert_eq!(admitted(&admin, &inherits), Err(wanted));
    inherits["metadata"]["annotations"]["detour.io/exclude-uids"] = "1000".into();
    assert_eq!(admitted(&admin, &inherits), Ok(()));
    inherits["metadata"]["annotations"] = Value::Null;
    inherits["spec"]["containers"].as_array_mut().expect("a list").pop();
    assert_eq!(admitted(&admin, &inherits), Ok(()));
    // excludeNamespaces
    let mut excluded = pod("kinds", &outside("uids", "*"), &sidecar());
    excluded["metadata"]["namespace"] = NAMESPACE.into();
    assert_eq!(admitted(&admin, &excluded), Ok(()));
}

#[test]
fn an_update_is_decided_only_if_it_changes_a_request() {
    let (plane, admin) = started();
    let request = |value: &str| json!({"detour.io/exclude-uids": value});
    let stored: Vec<Value> = objects("updates", &request("1-100000"), &sidecar())
        .into_iter()
        .map(|mut object| {
            object["metadata"]["name"] = "older".into();
            apply(&admin, &[object.clone()]);
            object
        })
        .collect();
    install(&plane, &admin, "updates", &json!({}));
    plane.until(|| admitted(&admin, &pod("updates", &request("*"), &sidecar())).is_err());
    for object in stored {
        let kind = object["kind"].as_str().expect("text");
        let annotations = |value: Value| {
            let template = json!({"metadata": {"annotations": {"detour.io/exclude-uids": value}}});
            match kind {
                "Pod" | "Namespace" => template,
                "PodTemplate" => json!({"template": template}),
                "CronJob" => json!({"spec": {"jobTemplate": {"spec": {"template": template}}}}),
                _ => json!({"spec": {"template": template}}),
            }
        };
        let update = |part: &Value| verdict(admin.merge(&object, part));
        assert_eq!(
            update(&json!({"metadata": {"labels": {"a": "b"}, "finalizers": ["example.com/f"]}})),
            Ok(()),
            "{kind}"
        );
        if ["Deployment", "StatefulSet", "ReplicaSet", "ReplicationController"].contains(&kind) {
            assert_eq!(update(&json!({"spec": {"replicas": 3}})), Ok(()), "{kind}");
        }
        // The template of a job never changes.
        if kind != "Job" {
            let denied = update(&annotations("1-100001".into())).expect_err(kind);
            assert!(
                denied.starts_with("annotation \"detour.io/exclude-uids\": \"1-100001\" is not permitted"),
                "{denied}"
            );
            assert_eq!(update(&annotations("1-10000".into())), Ok(()), "{kind}");
            assert_eq!(update(&annotations(Value::Null)), Ok(()), "{kind}");
        }
        assert_eq!(update(&json!({"metadata": {"finalizers": null}})), Ok(()), "{kind}");
        if kind == "Namespace" {
            let part = annotations("*".into());
            let denied = verdict(admin.merge_status(&object, &part)).expect_err("a namespace's status");
            assert!(denied.contains("\"*\" is not permitted"), "{denied}");
            let mut whole = admin.get(&object).expect("there");
            whole["metadata"]["annotations"]["detour.io/exclude-uids"] = "*".into();
            let denied = verdict(admin.replace_subresource(&whole, "finalize")).expect_err("its finalizers");
            assert!(denied.contains("\"*\" is not permitted"), "{denied}");
        }
    }
}

#[test]
fn ignored_requests_cause_a_warning() {
    let (plane, admin) = started();
    install(&plane, &admin, "ignored", &json!({"config": {"outside_bounds": "ignore"}}));
    let file = plane.directory.join("pod.json");
    fs::write(&file, pod("ignored", &json!({"detour.io/exclude-uids": "*"}), &sidecar()).to_string())
        .expect("writable");
    let kubeconfig = plane.kubeconfig();
    let warned = || {
        let mut kubectl = Command::new(built("kubectl"));
        kubectl.arg("--kubeconfig").arg(&kubeconfig).args(["create", "--dry-run=server", "-f"]).arg(&file);
        let output = kubectl.output().expect("it starts");
        let text = String::from_utf8(output.stderr).expect("text");
        output.status.success()
            && text.contains("Warning: ")
            && text.contains("annotation \"detour.io/exclude-uids\": \"*\" is not permitted")
    };
    plane.until(warned);
}

/// Returns the rows of admission.yaml.
pub(crate) fn rejected_pods() -> Vec<(String, Value, Value, String)> {
    serde_saphyr::from_str(include_str!("admission.yaml")).expect("YAML")
}

#[test]
fn istios_own_ways_around_the_sidecar_are_rejected_if_the_values_list_them() {
    let (plane, admin) = started();
    let redirect = json!({
        "type": "istio-redirect", "proxy_uid": ["1337", 1338], "proxy_gid": 1339, "outbound_ports_exclude": "3306",
    });
    let values = |parts: &[&str]| json!({"admissionPolicy": {"istio": parts}, "config": {"chain": [redirect]}});
    let parts = ["traffic", "injection", "proxyUser"];
    install(&plane, &admin, "istio", &values(&parts));
    for part in parts {
        install(&plane, &admin, &part.to_lowercase(), &values(&[part]));
    }
    let injected_spec = json!({
        "initContainers": [{"name": "istio-validation", "image": "i", "securityContext": {"runAsUser": 1337}}],
        "containers": [
            {"name": "app", "image": "i", "securityContext": {"runAsUser": 7}},
            {"name": "istio-proxy", "image": "i", "securityContext": {"runAsUser": 1337}},
        ],
    });
    let mut rejected = rejected_pods();
    rejected
        .iter_mut()
        .filter(|(_, _, own, _)| own.is_null())
        .for_each(|(_, _, own, _)| own.clone_from(&injected_spec));
    for name in ["istio", "traffic", "injection", "proxyuser"] {
        plane.until(|| {
            rejected.iter().any(|(_, annotations, spec, _)| admitted(&admin, &pod(name, annotations, spec)).is_err())
        });
    }
    for (part, annotations, spec, message) in &rejected {
        let two_kinds = |name: &str| {
            let mut objects = objects(name, annotations, spec);
            objects.truncate(2);
            objects
        };
        for object in two_kinds("istio") {
            let denied = admitted(&admin, &object).expect_err(message);
            assert!(denied.starts_with(message.as_str()) && denied.ends_with("admissionPolicy.istio"), "{denied}");
        }
        for other in parts {
            for object in two_kinds(&other.to_lowercase()) {
                assert_eq!(admitted(&admin, &object).is_err(), part == other, "{message}: {other}");
            }
        }
    }
    let mut labelled = pod("istio", &json!({}), &injected_spec);
    labelled["metadata"]["labels"]["sidecar.istio.io/inject"] = "false".into();
    assert!(admitted(&admin, &labelled).is_err());
    // What Istio's injector writes into each pod, with its own defaults and what the configuration excludes anyway.
    let injected = json!({
        "inject.istio.io/templates": "sidecar",
        "sidecar.istio.io/inject": "true",
        "sidecar.istio.io/interceptionMode": "REDIRECT",
        "traffic.sidecar.istio.io/includeOutboundIPRanges": "*",
        "traffic.sidecar.istio.io/includeInboundPorts": "*",
        "traffic.sidecar.istio.io/excludeInboundPorts": "15020",
        "traffic.sidecar.istio.io/excludeOutboundPorts": "3306",
        "ambient.istio.io/bypass-inbound-capture": "false",
    });
    let good = pod("istio", &injected, &injected_spec);
    assert_eq!(admitted(&admin, &good), Ok(()));
    // An ephemeral container is added to a running pod.
    admin.apply(&good).expect("accepted");
    let debug = |user: i64| {
        let name = format!("istio-{}", if user == 7 { "debug" } else { "init" });
        let container = json!({"name": name, "image": "i", "securityContext": {"runAsUser": user}});
        let part = json!({"spec": {"ephemeralContainers": [container]}});
        verdict(admin.merge_subresource(&good, "ephemeralcontainers", &part))
    };
    let denied = debug(1337).expect_err("the proxy's UID");
    assert!(denied.starts_with("container \"istio-init\": runAsUser is that of the sidecar"), "{denied}");
    assert_eq!(debug(7), Ok(()));
    assert_eq!(verdict(admin.merge(&good, &json!({"metadata": {"labels": {"a": "b"}}}))), Ok(()));
}
