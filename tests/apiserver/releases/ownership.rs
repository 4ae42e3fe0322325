//! Who owns a NetworkAttachmentDefinition, and what install, upgrade and uninstall do to one of another owner.

use super::{Helm, cluster, definition_of, inventory, istio_chart, objects_of};
use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::shipped::NAMESPACE;
use serde_json::{Value, json};

/// A step of a test case.
type Action<'a> = &'a dyn Fn();

const OPENSHIFT: [&str; 2] = ["--set", "global.platform=openshift"];

/// Installs Istio's chart, or a stand-in for its part that matters here. Returns what helm reports.
fn install_istio(plane: &ControlPlane, helm: &Helm, arguments: &[&str]) -> Result<String, String> {
    let chart = istio_chart(&plane.directory, "istio-cni");
    let mut all = vec!["install", "istio-cni", chart.as_str(), "-n", "shop"];
    all.extend(arguments);
    helm.run(&all)
}

fn live(admin: &Client, name: &str) -> Option<Value> {
    admin.get(&definition_of("default", name)).ok()
}

fn owner(definition: &Value) -> (&str, &str) {
    let annotation = |key: &str| definition["metadata"]["annotations"][key].as_str().unwrap_or_default();
    (annotation("meta.helm.sh/release-namespace"), annotation("meta.helm.sh/release-name"))
}

#[test]
fn a_definition_of_another_owner_is_used_and_left_unchanged() {
    let (plane, admin, helm) = cluster();
    let from_istio = || drop(install_istio(&plane, &helm, &[]).expect("installed"));
    let from_operator = || {
        let mut object = definition_of("default", "istio-cni");
        object["metadata"]["labels"] = json!({"app.kubernetes.io/managed-by": "sail-operator"});
        object["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "sailoperator.io/v1", "kind": "IstioCNI", "name": "default", "uid": "1"}]);
        admin.apply(&object).expect("accepted");
    };
    let from_kubectl = || {
        let mut object = definition_of("default", "istio-cni");
        object["spec"] = json!({"config": "{}"});
        admin.apply(&object).expect("accepted");
    };
    let remove = || admin.delete(&definition_of("default", "istio-cni")).expect("deleted");
    let cases: [(Action<'_>, &str, Action<'_>); 3] = [
        (&from_istio, "release \"istio-cni\" in namespace \"shop\"", &|| helm.uninstall("istio-cni", "shop")),
        (&from_operator, "\"IstioCNI default\"", &remove),
        (&from_kubectl, "not managed by Helm", &remove),
    ];
    for (create, owner, remove) in cases {
        create();
        let before = live(&admin, "istio-cni").expect("created");
        let notes = helm.upgrade("detour", &OPENSHIFT);
        let warning = format!("NetworkAttachmentDefinition default/istio-cni belongs to another owner ({owner})");
        assert!(notes.contains(&warning), "{notes}");
        assert_eq!(live(&admin, "istio-cni"), Some(before.clone()), "install");
        helm.upgrade("detour", &[&OPENSHIFT[..], &["--set", "logLevel=debug"]].concat());
        assert_eq!(live(&admin, "istio-cni"), Some(before.clone()), "upgrade");
        helm.upgrade("detour", &[&OPENSHIFT[..], &["--set", "definitions=never"]].concat());
        assert_eq!(live(&admin, "istio-cni"), Some(before.clone()), "definitions=never");
        helm.uninstall("detour", NAMESPACE);
        assert_eq!(live(&admin, "istio-cni"), Some(before), "uninstall");
        remove();
    }
    // The owner is uninstalled first.
    from_istio();
    helm.upgrade("detour", &OPENSHIFT);
    helm.uninstall("istio-cni", "shop");
    assert_eq!(live(&admin, "istio-cni"), None);
    let notes = helm.upgrade("detour", &OPENSHIFT);
    assert!(!notes.contains("Warning"), "{notes}");
    assert_eq!(owner(&live(&admin, "istio-cni").expect("created")), (NAMESPACE, "detour"));
    helm.uninstall("detour", NAMESPACE);
    assert_eq!(live(&admin, "istio-cni"), None);
}

#[test]
fn an_own_definition_is_refused_to_others_and_deleted_with_the_release() {
    let (plane, admin, helm) = cluster();
    helm.upgrade("detour", &OPENSHIFT);
    let created = live(&admin, "istio-cni").expect("created");
    assert_eq!(owner(&created), (NAMESPACE, "detour"));
    let refused = install_istio(&plane, &helm, &[]).expect_err("it belongs to detour");
    assert!(refused.contains("NetworkAttachmentDefinition \"istio-cni\" in namespace \"default\" exists"), "{refused}");
    // An upgrade leaves it, or creates it again.
    helm.upgrade("detour", &OPENSHIFT);
    assert_eq!(live(&admin, "istio-cni"), Some(created.clone()));
    admin.delete(&created).expect("deleted");
    helm.upgrade("detour", &OPENSHIFT);
    assert!(live(&admin, "istio-cni").is_some());
    helm.upgrade("detour", &[&OPENSHIFT[..], &["--set", "definitions=never"]].concat());
    assert_eq!(live(&admin, "istio-cni"), None, "never");
    helm.upgrade("detour", &OPENSHIFT);
    helm.uninstall("detour", NAMESPACE);
    assert_eq!(live(&admin, "istio-cni"), None, "uninstall");
}

/// Another release takes the definition with --take-ownership before this release has given it up.
#[test]
fn an_upgrade_does_not_delete_a_definition_that_another_owner_took() {
    let (plane, admin, helm) = cluster();
    let keep = json!({"metadata": {"annotations": {"helm.sh/resource-policy": "keep"}}});
    helm.upgrade("detour", &OPENSHIFT);
    install_istio(&plane, &helm, &["--take-ownership"]).expect("installed");
    let taken = live(&admin, "istio-cni").expect("taken");
    assert_eq!(owner(&taken), ("shop", "istio-cni"));
    let before = inventory(&admin);
    // Without the definition, helm would delete it.
    let in_list = "chained=true,cniConfDir=/etc/cni/net.d";
    for values in ["definitions=auto", "definitions=never", in_list, "attachments[0].name=excludedns"] {
        let refused = helm.try_upgrade("detour", &[&OPENSHIFT[..], &["--set", values]].concat()).expect_err(values);
        assert!(
            refused.contains(
                "NetworkAttachmentDefinition default/istio-cni: it belongs to another owner now \
            (release \"istio-cni\" in namespace \"shop\"), and this upgrade would delete it"
            ),
            "{values}: {refused}"
        );
        let command = "kubectl annotate net-attach-def -n default istio-cni helm.sh/resource-policy=keep";
        assert!(refused.contains(command), "{refused}");
    }
    assert_eq!(inventory(&admin), before, "a refused upgrade changes nothing");
    let kept = admin.merge(&taken, &keep).expect("annotated");
    let notes = helm.upgrade("detour", &OPENSHIFT);
    assert!(notes.contains("belongs to another owner"), "{notes}");
    assert_eq!(live(&admin, "istio-cni"), Some(kept.clone()));
    helm.run(&["rollback", "detour", "1", "-n", NAMESPACE]).expect_err("revision 1 contains the definition");
    assert_eq!(live(&admin, "istio-cni"), Some(kept.clone()));
    helm.upgrade("detour", &OPENSHIFT);
    helm.uninstall("detour", NAMESPACE);
    assert_eq!(live(&admin, "istio-cni"), Some(kept));
    helm.uninstall("istio-cni", "shop");
    assert_eq!(live(&admin, "istio-cni"), None, "the annotation does not keep it from its owner's uninstall");
}

#[test]
fn two_releases_with_the_same_attachment_are_refused_unless_one_has_no_definitions() {
    let (_plane, admin, helm) = cluster();
    let never = [&OPENSHIFT[..], &["--set", "definitions=never"]].concat();
    helm.upgrade("a-detour", &OPENSHIFT);
    let refused = helm.try_upgrade("b-detour", &OPENSHIFT).expect_err("both write istio-cni.conf");
    assert!(
        refused.contains(
            "it belongs to another release of detour (release \"a-detour\" in namespace \
        \"kube-system\"), and both would write istio-cni.conf on a node"
        ),
        "{refused}"
    );
    assert!(objects_of(&admin, "b-detour", NAMESPACE).is_empty());
    // The release without definitions is uninstalled first.
    helm.upgrade("b-detour", &never);
    let created = live(&admin, "istio-cni");
    helm.uninstall("b-detour", NAMESPACE);
    assert_eq!(live(&admin, "istio-cni"), created);
    // The release with the definition is uninstalled first.
    helm.upgrade("b-detour", &never);
    helm.uninstall("a-detour", NAMESPACE);
    assert_eq!(live(&admin, "istio-cni"), None);
    helm.upgrade("b-detour", &OPENSHIFT);
    assert_eq!(owner(&live(&admin, "istio-cni").expect("created")), (NAMESPACE, "b-detour"));
}

#[test]
fn a_release_has_a_definition_in_each_namespace_of_its_attachments() {
    let (_plane, admin, helm) = cluster();
    let mut foreign = definition_of("shop", "excludedns");
    foreign["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "A\u{1b}[31m", "name": "b", "uid": "1"}]);
    let foreign = admin.apply(&foreign).expect("accepted");
    let values = "attachments[0].name=excludedns,attachments[0].namespaces={shop,kube-system},\
                  attachments[1].name=istio-cni,attachments[1].namespace=shop";
    let notes = helm.upgrade("detour", &["--set", values]);
    assert!(notes.contains(r#"shop/excludedns belongs to another owner ("A\x1b[31m b")"#), "{notes}");
    let found = objects_of(&admin, "detour", NAMESPACE);
    let definitions: Vec<_> = found.keys().filter(|name| name.starts_with("NetworkAttachmentDefinition")).collect();
    assert_eq!(
        definitions,
        [
            "NetworkAttachmentDefinition default/excludedns",
            "NetworkAttachmentDefinition kube-system/excludedns",
            "NetworkAttachmentDefinition shop/istio-cni",
        ]
    );
    // A namespace leaves the list, and then all attachments do.
    helm.upgrade("detour", &["--set", "attachments[0].name=excludedns"]);
    assert!(live(&admin, "excludedns").is_some());
    assert!(admin.get(&definition_of("shop", "istio-cni")).is_err());
    helm.upgrade("detour", &["--reset-values"]);
    assert_eq!(live(&admin, "excludedns"), None);
    assert_eq!(admin.get(&definition_of("shop", "excludedns")).expect("there"), foreign);
}
