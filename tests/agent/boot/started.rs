//! Pods that started without facts, with a primary plugin too: later calls, also after facts are available.

use crate::boot::pod::Pod;
use crate::boot::private_node::left_in_state;
use crate::boot::scene::{Kind, Scene, call, facts_of_shop, has_rules, is_redirected, starts};
use crate::boot::server::{Answer, Server, closed_port};
use serde_json::{Value, json};
use std::fs;

/// An API server that knows the pod with a sidecar.
fn knows(with_annotation: bool) -> Server {
    Server::plain(move |request| facts_of_shop(request, with_annotation))
}

/// Starts a pod without facts. It has a saved record.
fn started(scene: &Scene) -> Pod {
    scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
    let pod = Pod::new();
    call(&pod, "ADD", &scene.conf(), &Kind::plain()).done();
    assert_eq!(records(&pod), 1);
    assert!(!has_rules(&pod));
    pod
}

fn records(pod: &Pod) -> usize {
    let is_record = |path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "json");
    let of_pod = |path: &std::path::PathBuf| path.display().to_string().contains(&pod.container_id) && is_record(path);
    left_in_state().iter().filter(|path| of_pod(path)).count()
}

/// The pod has a container istio-proxy that Istio's injector did not add: without facts, its exclusions are missing.
#[test]
fn an_add_with_facts_applies_what_the_first_one_missed() {
    Scene::run(|scene| {
        for (kind, redirected) in [(Kind::meshed(), true), (Kind::unknown(), false)] {
            let pod = started(scene);
            let server = knows(redirected);
            scene.write_kubeconfig(&json!({"server": server.http()}));
            call(&pod, "ADD", &scene.conf(), &kind).done();
            assert_eq!((is_redirected(&pod), has_rules(&pod)), (redirected, true));
            call(&pod, "CHECK", &scene.conf(), &kind).done();
            call(&pod, "DEL", &scene.conf(), &kind).done();
            assert!(!has_rules(&pod));
        }
    });
}

/// A failed ADD does not remove the rules of an earlier one.
#[test]
fn a_repeated_add_of_a_pod_with_a_sidecar_keeps_its_rules_while_facts_are_unavailable() {
    Scene::run(|scene| {
        let (pod, server) = (Pod::new(), knows(true));
        scene.write_kubeconfig(&json!({"server": server.http()}));
        call(&pod, "ADD", &scene.conf(), &Kind::meshed()).done();
        assert!(is_redirected(&pod));
        scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
        assert_eq!(call(&pod, "ADD", &scene.conf(), &Kind::meshed()).refused().0, 11);
        assert!(is_redirected(&pod));
        call(&pod, "CHECK", &scene.conf(), &Kind::meshed()).done();
        call(&pod, "DEL", &scene.conf(), &Kind::meshed()).done();
        assert!(!has_rules(&pod));
    });
}

/// A primary plugin whose cluster network is the loopback device, by a file in confDir.
fn conf(scene: &Scene) -> Value {
    let directory = scene.root.join("net.d");
    fs::create_dir_all(&directory).expect("made");
    let network = r#"{"cniVersion": "1.0.0", "name": "cluster", "type": "loopback"}"#;
    fs::write(directory.join("cluster.conf"), network).expect("written");
    let mut conf = scene.conf();
    let more = json!({
        "name": "primary", "clusterNetwork": "cluster", "confDir": directory, "cniDir": scene.root.join("state"),
        "binDir": "/usr/lib/cni",
    });
    conf.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    conf
}

fn waits(kind: &Kind, conf: &Value, code: u64, parts: &[&str]) {
    let pod = Pod::new();
    let (found, text) = call(&pod, "ADD", conf, kind).refused();
    assert_eq!(found, code, "{text}");
    for part in ["shop/web-0"].iter().chain(parts) {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!has_rules(&pod));
    call(&pod, "DEL", conf, kind).done();
}

fn selecting(networks: &str) -> Kind {
    let key = "k8s.v1.cni.cncf.io/networks";
    Kind { annotations: Some(json!({"kubernetes.io/config.source": "api", key: networks})), ..Kind::plain() }
}

/// Runs `test` in each state of a node without a source of facts, with the code and a part of the errors.
fn in_each_state(test: impl Fn(&Scene, u64, &str) + Send + Sync + Copy) {
    std::thread::scope(|scope| {
        scope.spawn(move || {
            Scene::run(|scene| {
                scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
                test(scene, 11, "no usable answer");
            });
        });
        scope.spawn(move || {
            Scene::run(|scene| {
                let server = Server::plain(|_| Answer::text(401, "expired"));
                scene.write_kubeconfig(&json!({"server": server.http()}));
                test(scene, 101, "the credentials in");
            });
        });
        scope.spawn(move || {
            Scene::run(|scene| test(scene, 11, "is not written yet"));
        });
        scope.spawn(move || {
            Scene::run(|scene| {
                fs::write(scene.kubeconfig(), "").expect("written");
                test(scene, 7, &scene.kubeconfig().display().to_string());
            });
        });
    });
}

#[test]
fn a_pod_without_a_sidecar_gets_the_cluster_network_of_a_file() {
    in_each_state(|scene, _, _| {
        let log = starts(&Kind::plain(), &conf(scene));
        assert!(log.contains("read from files, without definitions"), "{log}");
        starts(&Kind::agent(), &conf(scene));
    });
}

#[test]
fn a_pod_with_a_sidecar_or_with_networks_fails_with_the_cause() {
    in_each_state(|scene, code, part| {
        let conf = conf(scene);
        for kind in [Kind::meshed(), Kind::unknown(), selecting("storage")] {
            waits(&kind, &conf, code, &[part]);
        }
        let default = Kind { annotations: Some(json!({"v1.multus-cni.io/default-network": "blue"})), ..Kind::plain() };
        waits(&default, &conf, code, &[part]);
    });
}

/// The cluster network is a definition, which only the API server has.
#[test]
fn without_a_file_a_pod_fails_with_the_error_of_the_source() {
    in_each_state(|scene, code, part| {
        let mut conf = conf(scene);
        conf["clusterNetwork"] = "ovn".into();
        waits(&Kind::plain(), &conf, code, &[part, "networks of pod shop/web-0"]);
    });
}

/// Attachments that each pod gets are evaluated with the facts of the pod.
#[test]
fn an_attachment_of_each_pod_needs_no_facts_of_a_pod_without_a_sidecar() {
    in_each_state(|scene, code, part| {
        let mut conf = conf(scene);
        conf["delegates"] = json!([
            {"cniVersion": "1.0.0", "name": "cluster", "type": "loopback"},
            {"cniVersion": "1.0.0", "name": "istio-cni", "type": "istio-cni"},
        ]);
        conf.as_object_mut().expect("an object").remove("clusterNetwork");
        let log = starts(&Kind::plain(), &conf);
        assert!(log.contains("annotation sidecar.istio.io/status is missing"), "{log}");
        waits(&Kind::meshed(), &conf, code, &[part]);
    });
}
