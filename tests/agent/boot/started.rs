//! Pods that started without facts, with a primary plugin too: later calls, also after facts are available.

use crate::boot::scene::{Kind, Scene, api, call, has_rules, is_redirected, starts};
use crate::support::netns_pod::Pod;
use crate::support::private_node::left_in_state;
use crate::support::server::{Answer, Server, closed_port};
use serde_json::{Value, json};
use std::fs;

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
            call(&pod, "ADD", &scene.conf_with(&api(redirected)), &kind).done();
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
        let pod = Pod::new();
        call(&pod, "ADD", &scene.conf_with(&scene.api), &Kind::meshed()).done();
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
fn in_each_state(test: impl Fn(&Scene, u64, &str) + Sync) {
    let server = Server::plain(|_| Answer::text(401, "expired"));
    let of = |url: String| move |scene: &Scene| scene.write_kubeconfig(&json!({"server": url}));
    let (closed, expired) = (of(format!("http://{}", closed_port())), of(server.http()));
    type State<'a> = (&'a (dyn Fn(&Scene) + Sync), u64, &'a str);
    let states: [State<'_>; 4] = [
        (&closed, 11, "no usable answer"),
        (&expired, 101, "the credentials in"),
        (&|_| (), 11, "is not written yet"),
        (&|scene| fs::write(scene.kubeconfig(), "").expect("written"), 7, "/kubeconfig"),
    ];
    let test = &test;
    std::thread::scope(|scope| {
        for (prepare, code, part) in states {
            scope.spawn(move || {
                Scene::run(|scene| {
                    prepare(scene);
                    test(scene, code, part);
                });
            });
        }
    });
}

/// A pod with a sidecar or with networks fails with the cause, and so does each pod if the cluster network is a
/// definition, which only the API server has.
#[test]
fn a_pod_without_a_sidecar_gets_the_cluster_network_of_a_file() {
    in_each_state(|scene, code, part| {
        let of_file = conf(scene);
        let log = starts(&Kind::plain(), &of_file);
        assert!(log.contains("read from files, without definitions"), "{log}");
        starts(&Kind::agent(), &of_file);
        let default = Kind { annotations: Some(json!({"v1.multus-cni.io/default-network": "blue"})), ..Kind::plain() };
        for kind in [Kind::meshed(), Kind::unknown(), selecting("storage"), default] {
            waits(&kind, &of_file, code, &[part]);
        }
        let mut of_definition = of_file.clone();
        of_definition["clusterNetwork"] = "ovn".into();
        waits(&Kind::plain(), &of_definition, code, &[part, "networks of pod shop/web-0"]);

        // Attachments that each pod gets are evaluated with the facts of the pod.
        let mut attaching = of_file;
        attaching["delegates"] = json!([
            {"cniVersion": "1.0.0", "name": "cluster", "type": "loopback"},
            {"cniVersion": "1.0.0", "name": "istio-cni", "type": "istio-cni"},
        ]);
        attaching.as_object_mut().expect("an object").remove("clusterNetwork");
        let log = starts(&Kind::plain(), &attaching);
        assert!(log.contains("annotation sidecar.istio.io/status is missing"), "{log}");
        waits(&Kind::meshed(), &attaching, code, &[part]);
    });
}
