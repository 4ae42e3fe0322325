//! Each state of a node in which neither the agent nor the API server gives the facts of a pod.

use crate::boot::scene::{Kind, Scene, call, has_rules, starts, waits};
use crate::scene::without;
use crate::support::netns_pod::Pod;
use crate::support::server::{Answer, Server, closed_port};
use nix::unistd::{Gid, Uid, chown};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

const NO_AGENT: &str = "no agent listens on the socket";
const GET_POD: &str = "GET http";

#[test]
fn only_pods_with_a_sidecar_wait_if_the_api_server_refuses_connections() {
    Scene::run(|scene| {
        scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
        let parts = [NO_AGENT, GET_POD, "no usable answer", "check that this machine can reach the API server"];
        scene.only_pods_with_a_sidecar_wait(11, &parts);
    });
}

/// The API server is not asked for a pod without a sidecar, so it can't delay the pod.
#[test]
fn a_pod_without_a_sidecar_starts_without_a_request_to_the_api_server() {
    Scene::run(|scene| {
        let server = Server::plain(|_| Answer::Hang);
        scene.write_kubeconfig(&json!({"server": server.http()}));
        for conf in [scene.conf(), without("agent_socket", scene.conf())] {
            let log = starts(&Kind::plain(), &conf);
            let line = log.lines().find(|line| line.contains("annotation sidecar.istio.io/status is missing"));
            assert!(
                line.is_some_and(|line| line.contains("level=info") && line.contains("container runtime")),
                "{log}"
            );
        }
        assert_eq!(server.connections(), 0);
    });
}

/// An agent that is stuck has a fraction of a second, and no request at all if the chain excludes nothing.
#[test]
fn a_pod_without_a_sidecar_hardly_waits_for_a_stuck_agent() {
    Scene::run(|scene| {
        fs::create_dir_all(scene.socket().parent().expect("a directory")).expect("made");
        let stuck = UnixListener::bind(scene.socket()).expect("free");
        stuck.set_nonblocking(true).expect("set");
        let asked = || stuck.accept().is_ok();
        let log = starts(&Kind::plain(), &scene.conf());
        assert!(log.contains("no greeting: timeout; the agent is stuck or too slow") && asked(), "{log}");
        while asked() {}
        let mut conf = scene.conf();
        conf["chain"] = json!([{"type": "istio-redirect"}]);
        let pod = Pod::new();
        call(&pod, "ADD", &conf, &Kind::plain()).done();
        assert!(!has_rules(&pod));
        assert!(is_only_told(&stuck), "nothing is asked");
        call(&pod, "DEL", &conf, &Kind::plain()).done();
        waits(&Kind::meshed(), &scene.conf(), 11, &["is not written yet"]);
    });
}

/// Whether all connections of the last call are reports of its end.
fn is_only_told(agent: &UnixListener) -> bool {
    let mut received = Vec::new();
    while let Ok((mut stream, _)) = agent.accept() {
        stream.set_nonblocking(true).expect("set");
        let mut text = vec![0; 64 << 10];
        let length = stream.read(&mut text).unwrap_or(0);
        received.push(String::from_utf8_lossy(&text[..length]).into_owned());
    }
    received.iter().all(|text| text.contains("\"about\":\"called\""))
}

/// Each answer: the code of the error, and what its message contains.
#[test]
fn only_pods_with_a_sidecar_wait_if_the_api_server_answers_with_an_error_or_not_at_all() {
    let table: [(Option<u16>, u64, &str); 7] = [
        (Some(401), 101, "the credentials in"),
        (Some(403), 101, "lack the permission to get"),
        (Some(404), 100, "not found"),
        (Some(429), 11, "no usable answer"),
        (Some(500), 11, "no usable answer"),
        (Some(503), 11, "no usable answer"),
        // A server that accepts connections has the configured time.
        (None, 11, "no answer within "),
    ];
    std::thread::scope(|scope| {
        for (status, code, part) in table {
            scope.spawn(move || {
                Scene::run(|scene| {
                    let server = Server::plain(move |_| match status {
                        Some(status) => Answer::Reply(status, "Retry-After: 1\r\n".into(), b"no".into()),
                        None => Answer::Hang,
                    });
                    scene.write_kubeconfig(&json!({"server": server.http()}));
                    scene.only_pods_with_a_sidecar_wait(code, &[NO_AGENT, GET_POD, part]);
                });
            });
        }
    });
}

#[test]
fn only_pods_with_a_sidecar_wait_without_a_usable_kubeconfig() {
    Scene::run(|scene| {
        let kubeconfig = scene.kubeconfig();
        let name = kubeconfig.display().to_string();
        scene.only_pods_with_a_sidecar_wait(11, &[NO_AGENT, &name, "check that the pod of the agent"]);
        for text in ["", "apiVersion: v1\nclu", "{}"] {
            fs::write(&kubeconfig, text).expect("written");
            scene.only_pods_with_a_sidecar_wait(7, &[NO_AGENT, &name]);
        }
        scene.write_kubeconfig(&json!({"server": "http://127.0.0.1:1"}));
        chown(&kubeconfig, Some(Uid::from_raw(12345)), Some(Gid::from_raw(0))).expect("root");
        scene.only_pods_with_a_sidecar_wait(7, &[NO_AGENT, &name, "expected root"]);
        fs::remove_file(&kubeconfig).expect("there");
        fs::create_dir(&kubeconfig).expect("made");
        scene.only_pods_with_a_sidecar_wait(5, &[NO_AGENT, &name, "got a directory"]);
    });
}

#[test]
fn only_pods_with_a_sidecar_wait_if_the_configuration_names_no_kubeconfig() {
    Scene::run(|scene| {
        let conf = scene.conf_of_agent_alone();
        let socket = scene.socket().display().to_string();
        for kind in Kind::waiting() {
            waits(&kind, &conf, 11, &[NO_AGENT, &socket, "check that the agent's pod"]);
        }
        Kind::starting().iter().for_each(|kind| drop(starts(kind, &conf)));
    });
}

/// The file was damaged when the node lost power.
#[test]
fn only_pods_with_a_sidecar_wait_if_the_node_configuration_is_damaged() {
    Scene::run(|scene| {
        scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
        let file = scene.node_configuration();
        for (text, owner, part) in
            [("", 0, "invalid JSON"), ("{\"kub", 0, "invalid JSON"), ("{}", 12345, "expected root")]
        {
            fs::write(&file, text).expect("written");
            fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("set");
            chown(&file, Some(Uid::from_raw(owner)), None).expect("root");
            for kind in Kind::waiting() {
                waits(&kind, &scene.conf(), 7, &["node.json", part, "the agent on this node restores the file"]);
            }
            waits(&Kind::excluded(), &scene.conf(), 7, &["node.json", part]);
            starts(&Kind::plain(), &scene.conf());
            starts(&Kind::agent(), &scene.conf());
        }
    });
}

/// A runtime or another program passes something else than annotations.
#[test]
fn annotations_of_a_wrong_type_or_size_count_as_absent() {
    Scene::run(|scene| {
        scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
        let large = "x".repeat(600 << 10);
        let invalid =
            [json!([]), json!("a"), json!({"a": 1}), json!({"sidecar.istio.io/status": 1}), json!({"a": large})];
        std::thread::scope(|scope| {
            for annotations in invalid {
                scope.spawn(move || {
                    let (pod, kind) = (Pod::new(), Kind { annotations: Some(annotations), ..Kind::plain() });
                    let called = call(&pod, "ADD", &scene.conf(), &kind);
                    assert_eq!(called.refused().0, 11, "{called:?}");
                    let warning = "the annotations from the runtime are ignored";
                    assert!(called.stderr.contains(warning), "{}", called.stderr);
                    assert!(!has_rules(&pod));
                });
            }
        });
        // containerd passes `null` for a pod without annotations.
        starts(&Kind { annotations: Some(Value::Null), ..Kind::plain() }, &scene.conf());
    });
}
