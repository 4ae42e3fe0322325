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

/// Runs `explain` for the pod with these networks.
fn explain(networks: &str, conf: Option<&Value>, more: &[&str]) -> Run {
    let mut pod = pod();
    annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", networks);
    let all: Vec<String> = definitions().iter().map(|one| format!("{one}\n---\n")).collect();
    let (one, others) = all.split_first().expect("definitions");
    // --definitions gets a file, and a directory that also contains a file without manifests.
    let (one, others) = (file("one.json", one), file("others.yaml", &others.concat()));
    let directory = std::path::Path::new(&*others).parent().expect("a directory");
    std::fs::write(directory.join("README"), "kind: [").expect("writable");
    let directory = directory.display().to_string();
    let conf = conf.map(|conf| file("00-node.conf", &conf.to_string()));
    let mut arguments = vec!["explain", "-f", "-", "--definitions", &one, "--definitions", &directory];
    arguments.extend(conf.iter().flat_map(|conf| ["--config", conf]));
    detour(&[&arguments, more].concat(), &pod.to_string(), &[])
}

/// Runs a command about the pod with these configurations, each in the file of its network.
fn run(command: &[&str], pod: &Value, configurations: &[&Value]) -> Run {
    let write = |conf: &&Value| file(&format!("{}.conf", conf["name"].as_str().expect("a name")), &conf.to_string());
    let files: Vec<_> = configurations.iter().map(write).collect();
    let mut arguments = [command, &["-f", "-"]].concat();
    arguments.extend(files.iter().flat_map(|file| ["--config", file]));
    detour(&arguments, &pod.to_string(), &[])
}

/// Explains the pod that selects these networks; returns the exit code and the report.
fn explained(mut pod: Value, networks: &str, configurations: &[&Value]) -> (i32, Value) {
    annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", networks);
    let run = run(&["explain", "-o", "json"], &pod, configurations);
    (run.code, serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {run:?}")))
}

#[test]
fn each_network_and_the_combined_policy_are_reported() {
    let run = explain("default/istio-cni, excludedns, storage@data0", Some(&node()), &[]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    compare("networks", &run.stdout);
    let json = explain("default/istio-cni, excludedns, storage@data0", Some(&node()), &["-o", "json"]).json();
    let said: Vec<_> = json["networks"].as_array().expect("networks").iter().map(|one| &one["runs"]).collect();
    assert_eq!(said, ["delegate", "delegate", "in-process", "in-process", "delegate"]);
    let excluded: Vec<_> = json["exempt"].as_array().expect("exclusions").iter().map(|one| &one["who"]).collect();
    assert!(excluded.contains(&&json!("uid 77")) && excluded.contains(&&json!("uid 1337")), "{excluded:?}");
}

#[test]
fn the_order_of_networks_does_not_change_the_rules() {
    let rules = |networks| explain(networks, Some(&node()), &["--rules", "nft"]).stdout;
    let one = rules("default/istio-cni, excludedns");
    assert!(one.contains("meta skuid { 77, 1337 }"), "{one}");
    assert_eq!(one, rules("excludedns, default/istio-cni"));
}

#[test]
fn without_attachments_only_the_nodes_chain_counts() {
    let said = explain("storage", Some(&node()), &["-o", "json"]).json();
    assert_eq!((&said["redirected"], &said["exempt"][0]["who"]), (&json!(false), &json!("uid 77")));
    assert_eq!(said["exempt"][0]["sources"][0], "configuration, chain[0]");
    let mut bare = node();
    bare.as_object_mut().expect("an object").remove("chain");
    let said = explain("storage", Some(&bare), &["-o", "json"]).json();
    assert_eq!((&said["exempt"], &said["considered"]), (&json!([]), &json!([])));
    assert!(said["decision"].as_str().is_some_and(|why| why.contains("neither the pod's networks nor")), "{said}");
}

#[test]
fn without_a_configuration_only_the_attachments_count() {
    let said = explain("default/istio-cni, excludedns", None, &["-o", "json"]).json();
    assert_eq!(said["redirected"], true);
    assert_eq!((&said["exempt"][0]["who"], &said["exempt"][1]), (&json!("uid 1337"), &Value::Null));
}

#[test]
fn invalid_networks_fail_as_in_an_add() {
    let run = explain("other-port, third-port", Some(&node()), &[]);
    let parts = ["network shop/other-port, chain[0] and network shop/third-port, chain[0] contradict", "proxy_port"];
    assert!(run.code == 1 && parts.iter().all(|part| run.stdout.contains(part)), "{run:?}");
    let run = explain("istio-cni", Some(&node()), &[]);
    let parts = [
        "NetworkAttachmentDefinition \"istio-cni\" not found in namespace \"shop\"",
        "or write NAMESPACE/istio-cni",
        "given",
    ];
    assert!(run.code == 1 && parts.iter().all(|part| run.stdout.contains(part)), "{run:?}");
}

/// The definition that uses the configuration of the node.
/// Multus assigns the device. The primary plugin can't.
#[test]
fn a_definition_that_requests_a_device_does_not_prevent_an_explanation() {
    let redirect = attachment(&json!([{"type": "istio-redirect"}]));
    let mut sriov = definitions()[2].clone();
    sriov["metadata"] = json!({
        "name": "sriov", "namespace": "shop", "annotations": {"k8s.v1.cni.cncf.io/resourceName": "intel.com/sriov"},
    });
    let (conf, shared) = (file("device.conf", &redirect.to_string()), file("device-shared.json", SHARED));
    let sriov = file("device-sriov.json", &sriov.to_string());
    let mut pod = pod();
    annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", "sriov, default/istio-cni");
    let definitions = ["--definitions", &shared, "--definitions", &sriov, "-o", "json"];
    let arguments = [&["explain", "-f", "-", "--config", &conf][..], &definitions].concat();
    assert_eq!(detour(&arguments, &pod.to_string(), &[]).json()["redirected"], true);
}

const SHARED: &str = r#"{"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
    "metadata": {"name": "istio-cni", "namespace": "default"}}"#;

/// The configuration of an attachment, as it is installed for Multus.
fn attachment(chain: &Value) -> Value {
    json!({"name": "istio-cni", "type": "detour", "kubernetes": {"kubeconfig": "/k"}, "chain": chain})
}

#[test]
fn definitions_count_beside_the_configuration_of_an_attachment() {
    let redirect = attachment(&json!([{"type": "istio-redirect", "proxy_port": 16000}]));
    let json = |networks: &str, conf: &Value| explain(networks, Some(conf), &["-o", "json"]);
    // The definition default/istio-cni has its own configuration, with port 15001.
    let port = |said: &Value| {
        let settings = said["settings"].as_array().expect("settings").clone();
        settings.into_iter().find(|one| one["key"] == "proxy_port").map(|one| one["value"].clone())
    };
    let said = json("default/istio-cni, excludedns", &redirect).json();
    assert_eq!(
        (&said["redirected"], port(&said), &said["exempt"][0]["who"]),
        (&json!(true), Some(json!(15001)), &json!("uid 1337"))
    );
    let storage = json!({"name": "storage", "type": "detour", "kubernetes": {"kubeconfig": "/k"}});
    let said = json("storage", &storage).json();
    let why = "not redirected: NetworkAttachmentDefinition shop/storage has its own configuration (plugins: macvlan)";
    assert_eq!((&said["decision"], &said["warnings"][0]["code"]), (&json!(why), &json!("network-not-selected")));
    for (networks, object) in [("istio-cni", "shop/istio-cni"), ("pay/istio-cni", "pay/istio-cni")] {
        let run = json(networks, &redirect);
        let why = format!(
            "annotation \"k8s.v1.cni.cncf.io/networks\" selects NetworkAttachmentDefinition {object}, which does not exist"
        );
        let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
        assert!(run.code == 1 && report["add_fails"].as_str().is_some_and(|text| text.contains(&why)), "{run:?}");
    }
    // One that exists beside it does not help: Multus adds no network then.
    let (conf, shared) = (file("beside.conf", &redirect.to_string()), file("shared.json", SHARED));
    let arguments = ["explain", "-f", "-", "--config", &conf, "--definitions", &shared, "-o", "json"];
    for (networks, code) in
        [("pay/istio-cni, default/istio-cni", 1), ("default/istio-cni, istio-cni", 1), ("default/istio-cni", 0)]
    {
        let mut pod = pod();
        annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", networks);
        let run = detour(&arguments, &pod.to_string(), &[]);
        assert_eq!((run.code, run.stdout.contains("which does not exist")), (code, code == 1), "{run:?}");
    }
    // Multus added the networks of a running pod, although the definition is gone now.
    let mut running = pod();
    annotate(&mut running, "k8s.v1.cni.cncf.io/networks", "pay/istio-cni");
    running["status"] = json!({ "podIPs": [{ "ip": "10.0.0.7" }] });
    let (conf, storage) =
        (file("running.conf", &redirect.to_string()), file("storage.json", &definitions()[2].to_string()));
    let arguments = ["explain", "-f", "-", "--config", &conf, "--definitions", &storage, "-o", "json"];
    assert_eq!(detour(&arguments, &running.to_string(), &[]).json()["redirected"], true);
    // The pod's attachments add to a configuration list, which applies to every pod.
    let list =
        json!({"name": "cluster", "plugins": [{"type": "bridge"}, attachment(&json!([{"type": "istio-redirect"}]))]});
    let run = explain("excludedns", Some(&list), &["-o", "json"]).json();
    assert_eq!((&run["redirected"], &run["exempt"][0]["who"]), (&json!(true), &json!("uid 1337")));
}

/// Every attachment of the annotation is reported: the file or definition to which it leads.
#[test]
fn each_of_several_configurations_applies_to_the_attachment_of_its_name() {
    let istio = attachment(&json!([{"type": "istio-redirect"}]));
    let exclude = json!({
        "name": "excludedns", "type": "detour", "kubernetes": {"kubeconfig": "/k"},
        "chain": [{"type": "uid-exclude", "uids": ["4711"]}],
    });
    let both = [&istio, &exclude];
    let (code, report) = explained(pod(), "default/istio-cni, default/excludedns, storage", &both);
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
    // A typo in the second network: Multus fails the pod.
    let (code, report) = explained(pod(), "default/istio-cni, default/excluddns", &both);
    let cause = report["add_fails"].as_str().unwrap_or_default();
    assert!(
        code == 1 && cause.contains("default/excluddns") && cause.contains("did you mean \"excludedns\"?"),
        "{cause}"
    );
    let mut typo = pod();
    annotate(&mut typo, "k8s.v1.cni.cncf.io/networks", "default/istio-cni, default/excluddns");
    let run = run(&["trace", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"], &typo, &both);
    assert!(run.code == 1 && run.stdout.starts_with("an ADD fails: "), "{run:?}");
}

#[test]
fn a_request_is_ignored_only_if_no_attachment_has_its_sub_plugin() {
    let istio = attachment(&json!([{"type": "istio-redirect"}]));
    let mut exclude = attachment(&json!([{"type": "uid-exclude"}]));
    exclude["name"] = "excludedns".into();
    for (networks, is_ignored) in [("default/istio-cni, default/excludedns", false), ("default/istio-cni", true)] {
        let mut pod = pod();
        annotate(&mut pod, "detour.io/exclude-uids", "8");
        let (code, report) = explained(pod, networks, &[&istio, &exclude]);
        assert_eq!(code, 0, "{report:#}");
        let warnings = report["warnings"].as_array().expect("a list");
        assert_eq!(warnings.iter().any(|one| one["code"] == "not-in-chain"), is_ignored, "{networks}: {report:#}");
    }
}

#[test]
fn a_fault_of_the_pod_is_named_once_for_all_attachments() {
    let mut istio = attachment(&json!([{"type": "istio-redirect"}]));
    istio["dialect"] = "iptables".into();
    let mut other = istio.clone();
    other["name"] = "other".into();
    let mut pod = pod();
    pod["spec"]["hostUsers"] = false.into();
    let (code, report) = explained(pod, "default/istio-cni, default/other", &[&istio, &other]);
    assert_eq!(code, 1);
    let warnings = report["warnings"].as_array().expect("a list").iter();
    let faults: Vec<_> = warnings.filter(|one| one["code"] == "add-fails").map(|one| &one["what"]).collect();
    assert_eq!(faults.len(), 1, "{report:#}");
    assert!(
        faults[0].as_str().is_some_and(|what| what.starts_with("the pod has its own user namespace")),
        "{faults:?}"
    );
}

#[test]
fn a_directory_and_a_root_select_configurations_as_on_the_node() {
    let conf = file("etc/cni/net.d/istio-cni.conf", &attachment(&json!([{"type": "istio-redirect"}])).to_string());
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
    let run = detour(&["explain", "-f", "-", "--root", "/no/such/root"], &pod.to_string(), &[]);
    assert!(run.code == 2 && run.stderr.contains("--root /no/such/root: "), "{run:?}");
}
