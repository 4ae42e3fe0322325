//! The agent's answers to the plugin, with a real API server.

use crate::control_plane::ControlPlane;
use crate::node::{SETTLED, meshed_pod, on_a_node};
use crate::shipped::{self, NAMESPACE, apply, cluster};
use detour_cni::cluster::{Api, DefinitionQuery, Lookup, ObjectRef};
use serde_json::json;
use std::fs;
use std::path::Path;

/// Returns the number of a service account's requests.
fn asked(plane: &ControlPlane, account: &str) -> usize {
    let user = format!("system:serviceaccount:{NAMESPACE}:{account}");
    plane.audit().iter().filter(|event| event["user"]["username"] == user.as_str()).count()
}

#[test]
fn a_resource_type_that_is_created_later_is_watched() {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    let (namespaces, types) = (shipped::namespaces(), shipped::types());
    let objects = shipped::chart(&["primaryPlugin.enabled=true"]);
    apply(&admin, &namespaces);
    apply(&admin, &objects);
    on_a_node(&plane, &objects, |node| {
        let agent = node.start_agent("a");
        agent.wait_for_log(SETTLED);
        apply(&admin, &types);
        shipped::established(&admin, &types);
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"namespace": "default", "name": "blue"}, "spec": {"config": "{}"},
        });
        admin.apply(&definition).expect("accepted");
        agent.wait_for_log("watching network attachment definitions");
        let object = ObjectRef { namespace: "default".into(), name: "blue".into() };
        let found = node.source().definitions(&[DefinitionQuery { object, awaited: false }]).expect("an answer");
        assert!(matches!(&found[..], [Lookup::Found(definition)] if definition.config == "{}"), "{found:?}");
        assert_eq!(asked(&plane, "detour-plugin"), 0);
    });
}

/// What `detour audit` asks, with the rights of the agent and with those of the plugin.
#[test]
fn the_agent_can_list_the_pods_of_a_node_and_all_namespaces() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    // More than a page.
    let mut names: Vec<String> = (1..45).map(|number| format!("web-{number}")).collect();
    for name in &names {
        let mut more = json!({"apiVersion": "v1", "kind": "Pod", "spec": pod["spec"]});
        more["metadata"] = json!({"namespace": "shop", "name": name});
        admin.apply(&more).expect("accepted");
    }
    let mut elsewhere = json!({"apiVersion": "v1", "kind": "Pod", "spec": pod["spec"]});
    elsewhere["metadata"] = json!({"namespace": "shop", "name": "elsewhere"});
    elsewhere["spec"]["nodeName"] = "another".into();
    admin.apply(&elsewhere).expect("accepted");
    let probe = |account: &str| {
        let path = plane.kubeconfig();
        let mut kubeconfig: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).expect("readable")).expect("JSON");
        kubeconfig["users"][0]["user"] = json!({"token": admin.token(NAMESPACE, account)});
        let path = path.with_file_name(account);
        fs::write(&path, kubeconfig.to_string()).expect("writable");
        Api::of_kubeconfig(Path::new("/"), path).within(Api::PROBE_TIMEOUT).once()
    };
    let agent = probe("detour-agent");
    let node = pod["spec"]["nodeName"].as_str().expect("a node");
    names.push("web-0".into());
    names.sort();
    for namespace in [None, Some("shop")] {
        let pods = agent.pods_of_node(node, namespace).expect("listed");
        let mut found: Vec<String> = pods.iter().map(|one| one.pod.name.clone()).collect();
        found.sort();
        assert_eq!(found, names);
        assert!(pods.iter().all(|one| one.is_pending && !one.is_ending && one.pod.proxy().is_some()));
    }
    assert!(agent.pods_of_node(node, Some("default")).expect("listed").is_empty());
    let namespaces = agent.namespaces(None).expect("listed");
    let shop = namespaces.iter().find(|one| one.name == "shop").expect("it exists");
    assert_eq!(shop.labels["kubernetes.io/metadata.name"], "shop");
    assert_eq!(agent.namespaces(Some("shop")).expect("found"), std::slice::from_ref(shop));
    let refused = probe("detour-plugin").pods_of_node(node, None).expect_err("it may only get pods");
    assert!(refused.msg.contains("lack the permission to list pods"), "{refused}");
}
