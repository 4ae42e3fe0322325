//! The pod of `helm test`.

use crate::helm::{objects, of_kind};
use serde_json::{Value, json};

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().map(|item| item.as_str().expect("text")).collect()
}

#[test]
fn the_scc_admits_the_pod_which_has_fewer_rights_than_the_agent() {
    for repair in [true, false] {
        let objects = objects(&json!({"global": {"platform": "openshift"}, "repair": {"enabled": repair}}));
        let (scc, pod) = (of_kind(&objects, "SecurityContextConstraints"), &of_kind(&objects, "Pod")["spec"]);
        let agent = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
        let [context, of_agent] = [pod, agent].map(|spec| &spec["containers"][0]["securityContext"]);
        let [own, allowed] = [&context["capabilities"]["add"], &scc["allowedCapabilities"]].map(strings);
        assert!(own.len() < allowed.len() && own.iter().all(|name| allowed.contains(name)), "{own:?}: {allowed:?}");
        for key in
            ["privileged", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "seLinuxOptions", "seccompProfile"]
        {
            assert_eq!(context[key], of_agent[key], "{key}");
        }
        // The API server adds the type projected only for a token.
        assert_eq!(pod["automountServiceAccountToken"], false);
        for volume in pod["volumes"].as_array().expect("volumes") {
            assert!(volume["hostPath"].is_object() && strings(&scc["volumes"]).contains(&"hostPath"), "{volume}");
        }
        for key in ["serviceAccountName", "nodeSelector", "tolerations"] {
            assert_eq!(pod[key], agent[key], "{key}");
        }
        assert_eq!(pod["containers"][0]["image"], agent["containers"][0]["image"]);
    }
}

/// The controller of a DaemonSet adopts pods that its selector matches.
#[test]
fn no_selector_of_the_chart_matches_the_pod() {
    let everything = json!({"global": {"networkPolicy": {"enabled": true}}, "podMonitor": {"enabled": true}});
    let objects = objects(&everything);
    let labels = &of_kind(&objects, "Pod")["metadata"]["labels"];
    for (kind, selector) in [("DaemonSet", "selector"), ("PodMonitor", "selector"), ("NetworkPolicy", "podSelector")] {
        let selected = of_kind(&objects, kind)["spec"][selector]["matchLabels"].as_object().expect("labels");
        assert!(selected.iter().any(|(label, value)| labels[label] != *value), "{kind}");
    }
    assert_eq!(labels["app.kubernetes.io/part-of"], "detour");
}

#[test]
fn the_pod_mounts_the_directories_of_attachments_too() {
    let directories = |values: &Value| {
        let pod = of_kind(&objects(values), "Pod").clone();
        let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().expect("mounts").clone();
        mounts.iter().map(|mount| mount["mountPath"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    let multus = "/host/etc/cni/multus/net.d".to_owned();
    assert!(!directories(&json!({})).contains(&multus));
    assert!(directories(&json!({"attachments": [{"name": "a"}]})).contains(&multus));
    assert!(directories(&json!({"global": {"platform": "openshift"}})).contains(&multus));
}
