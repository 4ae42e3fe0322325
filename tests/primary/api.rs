//! Requests to the API: pods, definitions, network status and Events.

use crate::node::{Node, annotations, definition_object, istio_cni, made, pod_object};
use crate::recorders::{Recorders, add_prints};
use crate::server::{Answer, Request, Server};
use crate::support::api::kubeconfig_of;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const POD: &str = "GET /api/v1/namespaces/shop/pods/web-0 HTTP/1.1";
const DEFINITION: &str =
    "GET /apis/k8s.cni.cncf.io/v1/namespaces/default/network-attachment-definitions/istio-cni HTTP/1.1";
const STATUS: &str = "PATCH /api/v1/namespaces/shop/pods/web-0/status? HTTP/1.1";
const EVENTS: &str = "POST /api/v1/namespaces/shop/events? HTTP/1.1";
/// More than a loaded machine needs for a call.
const TIMEOUT: Duration = Duration::from_secs(120);

fn script(networks: &str) -> impl Fn(&Request) -> Answer + Send + Sync + 'static {
    let pod = pod_object(networks);
    move |request| match request.line.as_str() {
        POD => Answer::json(200, &pod),
        DEFINITION => Answer::json(200, &definition_object("default", "istio-cni", &istio_cni().to_string())),
        STATUS | EVENTS => Answer::json(200, &json!({})),
        _ => Answer::json(404, &json!({"kind": "Status", "message": "no such thing"})),
    }
}

fn conf(node: &Node, server: &Server, more: &Value) -> Value {
    let kubeconfig = node.dir.join("kubeconfig");
    fs::write(&kubeconfig, kubeconfig_of(&json!({"server": server.http()}), &json!(null))).expect("writable");
    let mut conf = node.recording(more);
    conf["kubernetes"] = json!({"kubeconfig": kubeconfig});
    conf
}

/// Returns a node and a configuration with [`TIMEOUT`].
fn with_timeout(server: &Server) -> (Node, Value) {
    let node = Node::new();
    let mut conf = conf(&node, server, &json!({}));
    conf["kubernetes"]["timeout_seconds"] = TIMEOUT.as_secs().into();
    (node, conf)
}

fn from_runtime(annotations: &Value) -> Value {
    json!({"runtimeConfig": {"io.kubernetes.cri.pod-annotations": annotations}})
}

#[test]
fn a_pod_without_networks_and_sidecar_needs_no_request() {
    let (node, server) = (Node::new(), Server::plain(script("")));
    let mut conf = conf(&node, &server, &from_runtime(&json!({"a": "b"})));
    conf["chain"] = json!([{"type": "istio-redirect"}]);
    node.done("ADD", &conf);
    node.done("CHECK", &conf);
    node.done("DEL", &conf);
    assert_eq!(server.lines(), [""; 0]);
    conf["runtimeConfig"]["io.kubernetes.cri.pod-annotations"] = json!({"sidecar.istio.io/status": "{}"});
    node.done("ADD", &conf);
    assert_eq!(server.lines(), [POD], "for the settings of the sidecar");
}

#[test]
fn a_meshed_pod_needs_each_request_once() {
    for from_runtime in [from_runtime(&annotations("default/istio-cni")), json!({})] {
        let (node, server) = (Node::new(), Server::plain(script("default/istio-cni")));
        let conf = conf(&node, &server, &from_runtime);
        node.done("ADD", &conf);
        assert_eq!(server.lines(), [POD, DEFINITION, STATUS, EVENTS]);
        let asked = server.requests().len();
        node.done("CHECK", &conf);
        node.done("DEL", &conf);
        assert_eq!(server.requests().len(), asked, "no further request");
    }
}

#[test]
fn the_network_status_has_the_standard_format() {
    let (node, server) = (Node::new(), Server::plain(script("default/istio-cni")));
    node.done("ADD", &conf(&node, &server, &json!({})));
    let body = |line: &str| -> Value {
        let requests = server.requests();
        let request = requests.iter().find(|request| request.line == line).expect("it was sent");
        serde_json::from_slice(&request.body).expect("JSON")
    };
    let status = &body(STATUS)["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"];
    let wanted = "[{\n    \"name\": \"cluster\",\n    \"interface\": \"eth0\",\n    \"ips\": [\n        \"10.0.0.2\"\n    ],\n    \"default\": true,\n    \"dns\": {}\n}]";
    assert_eq!(status, wanted);
    assert_eq!(body(EVENTS)["message"], "Add eth0 [10.0.0.2/24] from cluster");
}

#[test]
fn the_network_status_has_the_device_info_until_del() {
    const INFO: &str = r#"{"type":"pci","version":"1.0.0","pci":{"pci-address":"0000:01:00.0"}}"#;
    const ONE: &str = "GET /apis/k8s.cni.cncf.io/v1/namespaces/shop/network-attachment-definitions/one HTTP/1.1";
    let directory = Path::new("/var/run/k8s.cni.cncf.io/devinfo/cni");
    for (written, wanted) in
        [(INFO, serde_json::from_str(INFO).expect("JSON")), ("[1]", Value::Null), ("{", Value::Null)]
    {
        let behaviour = format!(
            "file={}/shop-one-${{CNI_CONTAINERID}}_$CNI_IFNAME
            if [ $CNI_COMMAND = ADD ]; then /bin/mkdir -p {}; printf '%s' '{written}' > $file; fi
            {}",
            directory.display(),
            directory.display(),
            add_prints(&made("net1", "10.1.0.2/24"))
        );
        let knows = script(&json!([{"name": "one", "deviceID": "0000:01:00.0"}]).to_string());
        let server = Server::plain(move |request| match request.line.as_str() {
            ONE => {
                let config = json!({"cniVersion": "1.0.0", "type": "device"}).to_string();
                Answer::json(200, &definition_object("shop", "one", &config))
            }
            _ => knows(request),
        });
        let mut node = Node::new();
        node.recorders = std::mem::replace(&mut node.recorders, Recorders::new()).with("device", &behaviour);
        let conf = conf(&node, &server, &json!({}));
        let log = node.call("ADD", &conf).stderr;
        let requests = server.requests();
        let status = requests.iter().find(|request| request.line == STATUS).expect("it was sent");
        let body: Value = serde_json::from_slice(&status.body).expect("JSON");
        let text = body["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"].as_str().expect("text");
        let networks: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!((&networks[0]["device-info"], &networks[1]["device-info"]), (&Value::Null, &wanted), "{written}");
        assert_eq!(log.contains("no device-info in network-status: /var/run/k8s"), wanted.is_null(), "{log}");
        let file = directory.join(format!("shop-one-{}_net1", node.pod.name));
        assert!(file.exists());
        node.done("DEL", &conf);
        assert!(!file.exists());
    }
}

#[test]
fn network_status_setting_decides_whether_the_status_is_written() {
    for (mode, networks, written) in [("always", "", true), ("auto", "", false), ("never", "default/istio-cni", false)]
    {
        let (node, server) = (Node::new(), Server::plain(script(networks)));
        node.done("ADD", &conf(&node, &server, &json!({"network_status": mode})));
        assert_eq!(server.lines().contains(&STATUS.to_owned()), written, "{mode}");
    }
}

#[test]
fn an_api_that_does_not_accept_the_status_delays_an_add_by_two_seconds_at_most() {
    let knows = script("default/istio-cni");
    let server = Server::plain(move |request| match request.line.as_str() {
        STATUS | EVENTS => Answer::Hang,
        _ => knows(request),
    });
    let (node, conf) = with_timeout(&server);
    let started = Instant::now();
    node.done("ADD", &conf);
    assert!(started.elapsed() < TIMEOUT, "{:?}", started.elapsed());
}

#[test]
fn without_a_kubeconfig_the_in_cluster_environment_is_used() {
    let node = Node::new();
    let mut environment = node.environment("ADD");
    environment.insert("KUBERNETES_SERVICE_HOST".into(), "127.0.0.1".into());
    environment.insert("KUBERNETES_SERVICE_PORT".into(), "1".into());
    let output = crate::pod::call(&environment, &node.recording(&json!({"kubernetes": {"timeout_seconds": 1}})));
    let text = output.stdout.to_string();
    assert!(text.contains("/var/run/secrets/kubernetes.io/serviceaccount"), "{output:?}");
    assert!(node.recorders.seen().is_empty());
}

#[test]
fn add_waits_for_the_file_and_names_it_in_the_error() {
    let node = Node::new();
    node.pod_selects("");
    let file = node.dir.join("net.d/ready.conf");
    let conf = node.recording(&json!({"readinessindicatorfile": file, "readiness_timeout_seconds": 1}));
    let (code, text) = node.refused("ADD", &conf);
    assert!(code == 11 && text.contains(&format!("{} does not exist after 1 s", file.display())), "{text}");
    assert!(node.recorders.seen().is_empty());

    // A tool that chains its plugin has replaced the file.
    fs::create_dir(node.dir.join("net.d")).expect("a directory");
    let list = file.with_extension("conflist");
    fs::write(&list, "{}").expect("writable");
    let (code, text) = node.refused("ADD", &conf);
    assert!(code == 11 && text.contains(&format!("{} is beside it; set this file", list.display())), "{text}");

    let conf = node.recording(&json!({"readinessindicatorfile": file, "readiness_timeout_seconds": 60}));
    std::thread::scope(|scope| {
        let add = scope.spawn(|| node.done("ADD", &conf));
        fs::write(&file, "").expect("writable");
        add.join().expect("it succeeds");
    });
}
