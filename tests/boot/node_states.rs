//! Each state of a node in which neither the agent nor the API server gives the facts of a pod.

use crate::private_node::SILENCE_MARK;
use crate::scene::{Kind, Scene, TIMEOUT, call, facts_of_shop, has_rules, starts, waits};
use crate::server::{Answer, Server, closed_port};
use nix::unistd::{Gid, Uid, chown};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, SystemTime};

const NO_AGENT: &str = "no agent listens on the socket";
const GET_POD: &str = "GET http";

#[test]
fn only_pods_with_a_sidecar_wait_if_the_api_server_refuses_connections() {
    Scene::run(|scene| {
        scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
        let parts = [NO_AGENT, GET_POD, "no usable answer", "check that this node can reach the API server"];
        scene.only_pods_with_a_sidecar_wait(11, &parts);
    });
}

#[test]
fn only_pods_with_a_sidecar_wait_if_the_api_server_does_not_answer() {
    Scene::run(|scene| {
        let server = Server::plain(|_| Answer::Hang);
        scene.write_kubeconfig(&json!({"server": server.http()}));
        scene.only_pods_with_a_sidecar_wait(11, &[NO_AGENT, GET_POD, SILENT]);
    });
}

/// After this time, an ADD gives up.
const SILENT: &str = "no answer within 1.9 s";
/// After this time, a pod without a sidecar starts if the mark is valid.
const SILENT_AGAIN: &str = "no answer within 0.2 s";

/// Sets the mark as if the sources had been silent at this time.
fn mark(age: Duration) {
    let file = fs::File::options().append(true).open(SILENCE_MARK).expect("a call has set it");
    file.set_modified(SystemTime::now() - age).expect("set");
}

#[test]
fn a_pod_without_a_sidecar_does_not_wait_for_sources_that_were_silent_a_moment_ago() {
    Scene::run(|scene| {
        let server = Server::plain(|_| Answer::Hang);
        for mut conf in [scene.conf(), without_agent(&scene.conf())] {
            scene.write_kubeconfig(&json!({"server": server.http()}));
            let first = starts(&Kind::plain(), &conf);
            assert!(first.contains(SILENT), "{first}");
            mark(Duration::ZERO);
            let second = starts(&Kind::plain(), &conf);
            assert!(second.contains(SILENT_AGAIN), "{second}");
            waits(&Kind::meshed(), &conf, 11, &[SILENT]);
            waits(&Kind::unknown(), &conf, 11, &[SILENT]);
            mark(Duration::from_secs(6));
            let late = starts(&Kind::plain(), &conf);
            assert!(late.contains(SILENT), "the mark has expired: {late}");
            // It is not extended by pods that hardly wait.
            let age = Duration::from_secs(3);
            mark(age);
            let set = || fs::metadata(SILENCE_MARK).and_then(|mark| mark.modified()).expect("there");
            let before = set();
            let log = starts(&Kind::plain(), &conf);
            assert_eq!(log.contains(SILENT_AGAIN), set() == before, "{log}");

            // Another user has set it.
            mark(Duration::ZERO);
            chown(SILENCE_MARK, Some(Uid::from_raw(12345)), None).expect("root");
            let foreign = starts(&Kind::plain(), &conf);
            assert!(foreign.contains(SILENT) && foreign.contains("remove the file first"), "{foreign}");
            fs::remove_file(SILENCE_MARK).expect("there");
            // The next call has facts.
            conf["kubernetes"]["timeout_seconds"] = 60.into();
            let answers = Server::plain(|request| facts_of_shop(request, true));
            scene.write_kubeconfig(&json!({"server": answers.http()}));
            let pod = crate::pod::Pod::new();
            call(&pod, "ADD", &conf, &Kind::meshed()).done();
            assert!(crate::scene::is_redirected(&pod) && !Path::new(SILENCE_MARK).exists());
            call(&pod, "DEL", &conf, &Kind::meshed()).done();
        }
    });
}

/// Without a kubeconfig, only an agent that is stuck costs time.
#[test]
fn pods_do_not_wait_one_after_another_for_a_stuck_agent_without_a_kubeconfig() {
    Scene::run(|scene| {
        fs::create_dir_all(scene.socket().parent().expect("a directory")).expect("made");
        let _stuck = UnixListener::bind(scene.socket()).expect("free");
        let again = "no greeting, as a moment ago";
        let first = starts(&Kind::plain(), &scene.conf());
        assert!(first.contains("no greeting") && !first.contains(again), "{first}");
        let second = starts(&Kind::plain(), &scene.conf());
        assert!(second.contains(again), "{second}");
        waits(&Kind::meshed(), &scene.conf(), 11, &["is not written yet"]);
    });
}

fn without_agent(conf: &Value) -> Value {
    let mut conf = conf.clone();
    conf["kubernetes"].as_object_mut().expect("an object").remove("agent_socket");
    conf
}

/// An API server that reports an error answers, so that the pod may have its facts soon.
#[test]
fn a_pod_with_a_sidecar_waits_for_an_api_server_that_answers_with_an_error() {
    Scene::run(|scene| {
        let server = Server::plain(|_| Answer::text(503, "starting"));
        scene.write_kubeconfig(&json!({"server": server.http()}));
        let pod = crate::pod::Pod::new();
        let called = call(&pod, "ADD", &scene.conf(), &Kind::meshed());
        assert_eq!(called.refused().0, 11);
        assert!(called.took > TIMEOUT - Duration::from_secs(1), "{:?}", called.took);
        call(&pod, "DEL", &scene.conf(), &Kind::meshed()).done();
        assert!(!Path::new(SILENCE_MARK).exists());
    });
}

/// Each status: the code of the error, and what its message contains.
#[test]
fn only_pods_with_a_sidecar_wait_if_the_api_server_answers_with_an_error() {
    let table: [(u16, u64, &str); 6] = [
        (401, 101, "the credentials in"),
        (403, 101, "lack the permission to get"),
        (404, 100, "not found in"),
        (429, 11, "no usable answer"),
        (500, 11, "no usable answer"),
        (503, 11, "no usable answer"),
    ];
    std::thread::scope(|scope| {
        for (status, code, part) in table {
            scope.spawn(move || {
                Scene::run(|scene| {
                    let server =
                        Server::plain(move |_| Answer::Reply(status, "Retry-After: 1\r\n".into(), b"no".into()));
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
        let mut conf = scene.conf();
        conf["kubernetes"].as_object_mut().expect("an object").remove("kubeconfig");
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
                    let (pod, kind) =
                        (crate::pod::Pod::new(), Kind { annotations: Some(annotations), ..Kind::plain() });
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

#[test]
fn facts_of_a_slow_api_server_still_apply_to_a_pod_with_a_sidecar() {
    Scene::run(|scene| {
        let server = Server::plain(|request| {
            crate::server::takes(Duration::from_millis(700));
            facts_of_shop(request, true)
        });
        scene.write_kubeconfig(&json!({"server": server.http()}));
        let (pod, mut conf) = (crate::pod::Pod::new(), scene.conf());
        conf["kubernetes"]["timeout_seconds"] = 60.into();
        call(&pod, "ADD", &conf, &Kind::meshed()).done();
        assert!(crate::scene::is_redirected(&pod));
        call(&pod, "DEL", &conf, &Kind::meshed()).done();
    });
}

#[test]
fn the_log_states_why_a_pod_started_without_rules() {
    Scene::run(|scene| {
        scene.write_kubeconfig(&json!({"server": format!("http://{}", closed_port())}));
        let pod = crate::pod::Pod::new();
        let log = call(&pod, "ADD", &scene.conf(), &Kind::plain()).done().stderr;
        let line = log.lines().find(|line| line.contains("annotation sidecar.istio.io/status is missing"));
        let line = line.unwrap_or_else(|| panic!("{log}"));
        assert!(
            line.contains("level=info") && line.contains("container runtime") && line.contains("GET http"),
            "{line}"
        );
        call(&pod, "DEL", &scene.conf(), &Kind::plain()).done();
    });
}
