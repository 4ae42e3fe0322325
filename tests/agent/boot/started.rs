//! Pods that started without facts: later calls, also after facts are available.

use crate::boot::pod::Pod;
use crate::boot::private_node::left_in_state;
use crate::boot::scene::{Kind, Scene, call, facts_of_shop, has_rules, is_redirected};
use crate::boot::server::{Server, closed_port};
use serde_json::{Value, json};

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

fn gc(scene: &Scene, pod: &Pod, valid: &Value) {
    let mut conf = scene.conf();
    conf["cni.dev/valid-attachments"] = valid.clone();
    call(pod, "GC", &conf, &Kind::unknown()).done();
}

#[test]
fn gc_keeps_the_pod_and_removes_it_when_the_runtime_has_deleted_it() {
    Scene::run(|scene| {
        let pod = started(scene);
        gc(scene, &pod, &json!([{"containerID": pod.container_id, "ifname": "eth0"}]));
        assert_eq!(records(&pod), 1);
        call(&pod, "CHECK", &scene.conf(), &Kind::plain()).done();
        gc(scene, &pod, &json!([]));
        assert_eq!(records(&pod), 0);
        assert_eq!(call(&pod, "CHECK", &scene.conf(), &Kind::plain()).refused().0, 104);
        call(&pod, "DEL", &scene.conf(), &Kind::plain()).done();
    });
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
