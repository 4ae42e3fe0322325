//! Pods with several attachments, which `explain` combines as the primary plugin does in an ADD.

use crate::explain::{annotate, compare, pod};
use crate::run::{Run, detour, file};
use serde_json::{Value, json};

/// The node's configuration: the cluster network, a default network, and a sub-plugin chain for every pod.
fn node() -> Value {
    json!({
        "cniVersion": "1.1.0", "name": "node", "type": "detour",
        "clusterNetwork": "ovn-kubernetes", "defaultNetworks": ["audit"],
        "chain": [{ "type": "uid-exclude", "uids": ["77"] }]
    })
}

fn definition(namespace: &str, name: &str, config: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": { "namespace": namespace, "name": name }, "spec": { "config": config.to_string() }
    })
}

fn definitions() -> Vec<Value> {
    vec![
        definition("default", "istio-cni", &json!({"type": "istio-cni", "cniVersion": "0.3.1"})),
        definition("shop", "excludedns", &json!({"type": "excludedns"})),
        definition("shop", "storage", &json!({"type": "macvlan", "master": "eth1"})),
        definition("kube-system", "audit", &json!({"type": "audit-bridge"})),
        port("other-port", 16001),
        port("third-port", 16002),
    ]
}

fn port(name: &str, port: u16) -> Value {
    definition("shop", name, &json!({"type": "detour", "chain": [{"type": "istio-redirect", "proxy_port": port}]}))
}

/// The definition that uses the configuration of the node.
fn shared() -> Value {
    let mut shared = definition("default", "istio-cni", &Value::Null);
    shared.as_object_mut().expect("an object").remove("spec");
    shared
}

/// The configuration of an attachment, as it is installed for Multus.
fn attachment(name: &str, block: &Value) -> Value {
    json!({"name": name, "type": "detour", "kubernetes": {"kubeconfig": "/k"}, "chain": [block]})
}

fn redirect() -> Value {
    attachment("istio-cni", &json!({"type": "istio-redirect"}))
}

/// Runs a command about the pod with these networks and configurations, each in the file of its network. The user gives
/// these definitions.
fn run(command: &[&str], pod: &Value, networks: &str, configurations: &[&Value], definitions: &[Value]) -> Run {
    let mut pod = pod.clone();
    annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", networks);
    let write = |conf: &&Value| file(&format!("{}.conf", conf["name"].as_str().expect("a name")), &conf.to_string());
    let files: Vec<_> = configurations.iter().map(write).collect();
    let mut arguments = [command, &["-f", "-"]].concat();
    arguments.extend(files.iter().flat_map(|file| ["--config", file]));
    // One is in a file, the others in a directory that also contains a file without manifests.
    let texts: Vec<String> = definitions.iter().map(|one| format!("{one}\n---\n")).collect();
    let (first, others) = texts.split_first().map_or(("", &[][..]), |(first, others)| (first.as_str(), others));
    let (first, others) = (file("one.json", first), file("others.yaml", &others.concat()));
    let (directory, _) = others.rsplit_once('/').expect("a directory");
    std::fs::write(format!("{directory}/README"), "kind: [").expect("writable");
    if !definitions.is_empty() {
        arguments.extend(["--definitions", &first, "--definitions", directory]);
    }
    detour(&arguments, &pod.to_string(), &[])
}

/// Explains the pod; returns the exit code and the report.
fn explained(pod: &Value, networks: &str, configurations: &[&Value], definitions: &[Value]) -> (i32, Value) {
    let run = run(&["explain", "-o", "json"], pod, networks, configurations, definitions);
    (run.code, run.parsed())
}

#[test]
fn each_network_and_the_combined_policy_are_reported() {
    let networks = "default/istio-cni, excludedns, storage@data0";
    let run = run(&["explain"], &pod(), networks, &[&node()], &definitions());
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    compare("networks", &run.stdout);
    let (_, report) = explained(&pod(), networks, &[&node()], &definitions());
    let runs: Vec<_> = report["networks"].as_array().expect("networks").iter().map(|one| &one["runs"]).collect();
    assert_eq!(runs, ["delegate", "delegate", "in-process", "in-process", "delegate"]);
}

#[test]
fn the_order_of_networks_does_not_change_the_rules() {
    let [one, other] = ["default/istio-cni, excludedns", "excludedns, default/istio-cni"]
        .map(|networks| run(&["explain", "--rules", "nft"], &pod(), networks, &[&node()], &definitions()).stdout);
    assert!(one.contains("meta skuid { 77, 1337 }"), "{one}");
    assert_eq!(one, other);
}

#[test]
fn the_nodes_chain_and_the_attachments_count_if_they_exist() {
    let (_, report) = explained(&pod(), "storage", &[&node()], &definitions());
    assert_eq!((&report["redirected"], &report["exempt"][0]["who"]), (&json!(false), &json!("uid 77")));
    assert_eq!(report["exempt"][0]["sources"][0], "configuration, chain[0]");
    let mut bare = node();
    bare.as_object_mut().expect("an object").remove("chain");
    let (_, report) = explained(&pod(), "storage", &[&bare], &definitions());
    assert_eq!((&report["exempt"], &report["considered"]), (&json!([]), &json!([])));
    assert!(report["decision"].as_str().is_some_and(|why| why.contains("neither the pod's networks nor")), "{report}");
    let (_, report) = explained(&pod(), "default/istio-cni, excludedns", &[], &definitions());
    assert_eq!(report["redirected"], true);
    assert_eq!((&report["exempt"][0]["who"], &report["exempt"][1]), (&json!("uid 1337"), &Value::Null));
}

/// Multus adds no network if one is missing.
#[test]
fn invalid_networks_fail_as_in_an_add() {
    let (node, redirect, exclude) = (node(), redirect(), attachment("excludedns", &json!({"type": "uid-exclude"})));
    let (known, shared) = (definitions(), [shared()]);
    let unknown = "NetworkAttachmentDefinition \"istio-cni\" not found in namespace \"shop\"";
    let hint = "or write NAMESPACE/istio-cni for one of another namespace: not found in the given objects";
    let absent = |object: &str| format!("selects NetworkAttachmentDefinition {object}, which does not exist");
    for (networks, configurations, definitions, parts) in [
        (
            "other-port, third-port",
            &[&node][..],
            &known[..],
            ["network shop/other-port, chain[0] and network shop/third-port, chain[0] contradict", "proxy_port"],
        ),
        ("istio-cni", &[&node], &known, [unknown, hint]),
        ("istio-cni", &[&redirect], &known, [&absent("shop/istio-cni"), ""]),
        ("pay/istio-cni", &[&redirect], &known, [&absent("pay/istio-cni"), ""]),
        ("pay/istio-cni, default/istio-cni", &[&redirect], &shared, [&absent("pay/istio-cni"), ""]),
        ("default/istio-cni, istio-cni", &[&redirect], &shared, [&absent("shop/istio-cni"), ""]),
        (
            "default/istio-cni, default/excluddns",
            &[&redirect, &exclude],
            &[],
            ["default/excluddns", "did you mean \"excludedns\"?"],
        ),
    ] {
        let (code, report) = explained(&pod(), networks, configurations, definitions);
        let cause = report["add_fails"].as_str().unwrap_or_default();
        assert!(code == 1 && parts.iter().all(|part| cause.contains(part)), "{networks}: {report:#}");
        let packet = ["trace", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"];
        let trace = run(&packet, &pod(), networks, configurations, definitions);
        assert!(trace.code == 1 && trace.stdout.starts_with("an ADD fails: "), "{trace:?}");
    }
}

/// Multus assigns the device. The primary plugin can't.
#[test]
fn a_definition_that_requests_a_device_does_not_prevent_an_explanation() {
    let mut sriov = definition("shop", "sriov", &json!({"type": "macvlan", "master": "eth1"}));
    sriov["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": "intel.com/sriov"});
    let (_, report) = explained(&pod(), "sriov, default/istio-cni", &[&redirect()], &[shared(), sriov]);
    assert_eq!(report["redirected"], true);
}

#[test]
fn definitions_count_beside_the_configuration_of_an_attachment() {
    let redirect = attachment("istio-cni", &json!({"type": "istio-redirect", "proxy_port": 16000}));
    // The definition default/istio-cni has its own configuration, with port 15001.
    let (_, report) = explained(&pod(), "default/istio-cni, excludedns", &[&redirect], &definitions());
    let mut settings = report["settings"].as_array().expect("settings").iter();
    let port = &settings.find(|one| one["key"] == "proxy_port").expect("the setting")["value"];
    assert_eq!((port, &report["exempt"][0]["who"]), (&json!(15001), &json!("uid 1337")));
    let storage = json!({"name": "storage", "type": "detour", "kubernetes": {"kubeconfig": "/k"}});
    let (_, report) = explained(&pod(), "storage", &[&storage], &definitions());
    let why = "not redirected: NetworkAttachmentDefinition shop/storage has its own configuration (plugins: macvlan)";
    assert_eq!((&report["decision"], &report["warnings"][0]["code"]), (&json!(why), &json!("network-not-selected")));
    let (code, report) = explained(&pod(), "default/istio-cni", &[&redirect], &[shared()]);
    assert_eq!((code, &report["redirected"]), (0, &json!(true)));
    // Multus added the networks of a running pod, although the definition is gone now.
    let mut running = pod();
    running["status"] = json!({ "podIPs": [{ "ip": "10.0.0.7" }] });
    let (_, report) = explained(&running, "pay/istio-cni", &[&redirect], &definitions()[2..3]);
    assert_eq!(report["redirected"], true);
    // The pod's attachments add to a configuration list, which applies to every pod.
    let list = json!({"name": "cluster", "plugins": [{"type": "bridge"}, self::redirect()]});
    let (_, report) = explained(&pod(), "excludedns", &[&list], &definitions());
    assert_eq!((&report["redirected"], &report["exempt"][0]["who"]), (&json!(true), &json!("uid 1337")));
}

/// Every attachment of the annotation is reported: the file or definition to which it leads.
#[test]
fn each_of_several_configurations_applies_to_the_attachment_of_its_name() {
    let exclude = attachment("excludedns", &json!({"type": "uid-exclude", "uids": ["4711"]}));
    let networks = "default/istio-cni, default/excludedns, storage";
    let (code, report) = explained(&pod(), networks, &[&redirect(), &exclude], &[]);
    assert_eq!((code, &report["redirected"], &report["exempt"][0]["who"]), (0, &json!(true), &json!("uid 4711")));
    let leads = |name: &str| {
        let networks = report["networks"].as_array().expect("a list");
        let found = networks.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}: {networks:?}"));
        found["leads_to"].as_str().unwrap_or_default().to_owned()
    };
    for name in ["istio-cni", "excludedns"] {
        assert!(leads(&format!("default/{name}")).ends_with(&format!("/{name}.conf")), "{report:#}");
    }
    assert!(leads("shop/storage").starts_with("unknown: "), "{}", leads("shop/storage"));
}

#[test]
fn a_request_is_ignored_only_if_no_attachment_has_its_sub_plugin() {
    let exclude = attachment("excludedns", &json!({"type": "uid-exclude"}));
    let mut pod = pod();
    annotate(&mut pod, "detour.io/exclude-uids", "8");
    for (networks, is_ignored) in [("default/istio-cni, default/excludedns", false), ("default/istio-cni", true)] {
        let (code, report) = explained(&pod, networks, &[&redirect(), &exclude], &[]);
        assert_eq!(code, 0, "{report:#}");
        let warnings = report["warnings"].as_array().expect("a list");
        assert_eq!(warnings.iter().any(|one| one["code"] == "not-in-chain"), is_ignored, "{networks}: {report:#}");
    }
}

#[test]
fn a_fault_of_the_pod_is_named_once_for_all_attachments() {
    let mut istio = redirect();
    istio["dialect"] = "iptables".into();
    let mut other = istio.clone();
    other["name"] = "other".into();
    let mut pod = pod();
    pod["spec"]["hostUsers"] = false.into();
    let (code, report) = explained(&pod, "default/istio-cni, default/other", &[&istio, &other], &[]);
    let warnings = report["warnings"].as_array().expect("a list").iter();
    let faults: Vec<&str> =
        warnings.filter(|one| one["code"] == "add-fails").filter_map(|one| one["what"].as_str()).collect();
    assert!(
        code == 1 && faults.len() == 1 && faults[0].starts_with("the pod has its own user namespace"),
        "{report:#}"
    );
}

#[test]
fn a_directory_and_a_root_select_configurations_as_on_the_node() {
    let conf = file("etc/cni/net.d/istio-cni.conf", &redirect().to_string());
    let root = conf.strip_suffix("/etc/cni/net.d/istio-cni.conf").expect("below a root").to_owned();
    std::fs::write(format!("{root}/etc/cni/net.d/90-other.conf"), r#"{"name": "x", "type": "macvlan"}"#)
        .expect("written");
    let mut pod = pod();
    annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", "default/istio-cni");
    for config in ["/etc/cni/net.d", "/etc/cni/net.d/istio-cni.conf"] {
        let run =
            detour(&["explain", "-f", "-", "--root", &root, "--config", config, "-o", "json"], &pod.to_string(), &[]);
        let report = run.json();
        assert_eq!(report["configuration"]["places"], json!(["/etc/cni/net.d/istio-cni.conf"]), "{config}");
        assert_eq!(report["redirected"], true, "{config}");
    }
}
