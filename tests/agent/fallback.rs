//! The plugin's fallback to the API server if the agent does not answer correctly.

use crate::listener::{Listening, foreign_listener, listener, that_accepts_nothing};
use crate::scene::{Scene, UID};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const GET_POD: &str = "GET /api/v1/namespaces/shop/pods/web-0";

/// Checks that the API server answers an ADD because of the agent's failure, which is logged.
#[track_caller]
fn falls_back(scene: &Scene, why: &str) {
    let called = scene.done("ADD", &scene.conf(), Some(UID));
    assert!(called.stderr.contains(why), "{why}: {}", called.stderr);
    assert!(scene.is_redirected());
    assert!(scene.api.requests().contains(&GET_POD.to_owned()), "{:?}", scene.api.requests());
}

#[test]
fn without_an_agent_the_api_server_answers() {
    Scene::run(|scene| {
        falls_back(scene, "no agent listens");
        let (code, text) = scene.call("ADD", &scene.conf_of_agent_alone(), Some(UID)).refused();
        let socket = scene.socket().display().to_string();
        assert!(code == 11 && text.contains(&socket) && text.contains("kubernetes.kubeconfig"), "{code}: {text}");
    });
}

#[test]
fn with_a_killed_agent_the_api_server_answers() {
    Scene::run(|scene| {
        scene.agent().end(Signal::SIGKILL);
        assert!(scene.socket().exists());
        falls_back(scene, "no agent listens");
    });
}

#[test]
fn with_a_stuck_agent_the_api_server_answers() {
    Scene::run(|scene| {
        let agent = scene.agent();
        agent.freeze();
        let started = Instant::now();
        falls_back(scene, "stuck");
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    });
}

#[test]
fn with_half_an_answer_of_the_agent_the_api_server_answers() {
    Scene::run(|scene| {
        let listening = listener(&scene.socket(), |mut stream| {
            stream.write_all(b"{\"version\":\"x\",\"facts\":1}\n{\"answer\":\"fa").expect("sent");
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let started = Instant::now();
        falls_back(scene, "stuck or too slow");
        assert!(started.elapsed() < Duration::from_secs(5), "half of the wait: {:?}", started.elapsed());
        drop(listening);
    });
}

#[test]
fn with_a_full_queue_of_connections_the_api_server_answers() {
    Scene::run(|scene| {
        let listening = that_accepts_nothing(&scene.socket());
        falls_back(scene, "does not answer");
        drop(listening);
    });
}

#[test]
fn with_a_socket_of_another_user_the_api_server_answers() {
    Scene::run(|scene| {
        let listening = foreign_listener(&scene.socket());
        falls_back(scene, "expected root as listener");
        drop(listening);
    });
}

/// Starts an agent that answers every request with these lines.
fn answering(scene: &Scene, lines: &[&str]) -> Listening {
    let text = lines.join("\n") + "\n";
    listener(&scene.socket(), move |mut stream| {
        let mut question = [0; 4096];
        let _ = stream.read(&mut question).and_then(|_| stream.write_all(text.as_bytes()));
    })
}

#[test]
fn with_a_malformed_answer_the_api_server_answers() {
    const HELLO: &str = "{\"facts\":1}";
    let of_another = json!({"answer": "facts", "pod": {"namespace": "shop", "name": "web-0", "uid": "uid-7"},
        "namespace": {"name": "shop"}})
    .to_string();
    let no_namespace =
        json!({"answer": "facts", "pod": {"namespace": "shop", "name": "web-0", "uid": UID}}).to_string();
    for (lines, why) in [
        (vec!["SSH-2.0-OpenSSH_9.2"], "no greeting"),
        (vec!["{}", ""], "earlier version"),
        (vec![HELLO, "[1, 2"], "no answer"),
        (vec![HELLO], "closed the connection"),
        (vec![HELLO, "{\"answer\":\"later\"}"], "version"),
        (vec![HELLO, "{\"answer\":\"done\"}"], "another request"),
        (vec![HELLO, &of_another], "another request"),
        (vec![HELLO, &no_namespace], "another request"),
        (vec![HELLO, "{\"answer\":\"failed\",\"code\":101,\"msg\":\"no right\"}"], "no right"),
    ] {
        Scene::run(|scene| {
            let listening = answering(scene, &lines);
            falls_back(scene, why);
            drop(listening);
        });
    }
}

#[test]
fn unknown_keys_of_a_later_agent_are_ignored() {
    let pod = json!({"namespace": "shop", "name": "web-0", "uid": UID, "later": [1], "containers": [
        {"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"], "later": {}},
    ], "annotations": {"sidecar.istio.io/status": "{}"}});
    let answer = json!({"answer": "facts", "later": 1, "pod": pod, "namespace": {"name": "shop", "later": 1}});
    Scene::run(|scene| {
        let listening = answering(scene, &["{\"version\":\"9\",\"facts\":9,\"later\":1}", &answer.to_string()]);
        scene.done("ADD", &scene.conf(), Some(UID));
        assert!(scene.is_redirected());
        assert_eq!(scene.api.requests(), [""; 0]);
        drop(listening);
    });
}

#[test]
fn the_agent_survives_malformed_requests() {
    Scene::run(|scene| {
        let _agent = scene.agent();
        let unknown: Value =
            serde_json::from_str(&scene.ask(b"{\"ask\":{\"about\":\"weather\"},\"wait_ms\":1000}\n")).expect("JSON");
        assert_eq!(unknown["answer"], "unknown");
        let nonsense = [b"GET / HTTP/1.1\r\n".to_vec(), b"\n".to_vec(), vec![b'x'; 1 << 20], vec![0xff; 64]];
        for nonsense in nonsense {
            scene.ask(&nonsense);
        }
        // Silent clients, one less than the limit of connections.
        let silent: Vec<_> =
            (0..63).map(|_| std::os::unix::net::UnixStream::connect(scene.socket()).expect("it listens")).collect();
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        assert_eq!(scene.api.requests(), [""; 0]);
        drop(silent);
    });
}
