//! An agent that is stuck, and one with malformed requests. `tests/cluster/agent.rs` has the other faults of agents.

use crate::scene::{Scene, UID};
use serde_json::Value;
use std::os::unix::net::UnixStream;

#[test]
fn with_a_stuck_agent_the_api_server_answers() {
    Scene::run(|scene| {
        let agent = scene.agent();
        agent.freeze();
        let called = scene.done("ADD", &scene.conf(), Some(UID));
        assert!(called.stderr.contains("stuck"), "{}", called.stderr);
        assert!(scene.is_redirected());
        let requests = scene.api.requests();
        assert!(requests.iter().any(|line| line == "GET /api/v1/namespaces/shop/pods/web-0"), "{requests:?}");
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
        let silent: Vec<_> = (0..63).map(|_| UnixStream::connect(scene.socket()).expect("it listens")).collect();
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        assert_eq!(scene.api.requests(), [""; 0]);
        drop(silent);
    });
}
