//! The node's taint, told of readiness as the agent is.

use crate::scene::{Scene, scene_with};
use crate::server::{Answer, Request};
use detour_cni::agent::taint::{Taint, TaintController};
use serde_json::{Value, json};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const KEY: &str = "cni.istio.io/not-ready";
const DEADLINE: Duration = Duration::from_secs(20);

/// A node's taints, as an API server keeps them; the first `conflicts` changes come too late.
fn node(taints: &Value, conflicts: usize) -> (impl Fn(&Request) -> Answer + Send + Sync + 'static, Receiver<Value>) {
    let (taints, (changed, changes)) = (Mutex::new((taints.clone(), 1_u32)), channel());
    let changed = Mutex::new(changed);
    let script = move |request: &Request| {
        let mut state = taints.lock().expect("unpoisoned");
        if request.line.starts_with("PATCH /api/v1/nodes/node-1") {
            let body: Value = serde_json::from_slice(&request.body).expect("JSON");
            if request.nth < conflicts {
                state.1 += 1;
            }
            if body["metadata"]["resourceVersion"] != json!(state.1.to_string()) {
                return Answer::json(409, &json!({"kind": "Status", "message": "the object has been modified"}));
            }
            *state = (body["spec"]["taints"].clone(), state.1 + 1);
            changed.lock().expect("unpoisoned").send(state.0.clone()).expect("somebody listens");
        } else if !request.line.starts_with("GET /api/v1/nodes/node-1") {
            return Answer::json(404, &json!({"kind": "Status", "message": "no such thing"}));
        }
        let metadata = json!({"name": "node-1", "resourceVersion": state.1.to_string()});
        Answer::json(200, &json!({"metadata": metadata, "spec": {"taints": state.0}}))
    };
    (script, changes)
}

fn keeper(scene: &Scene<'_>, node: &str) -> TaintController {
    Taint { key: KEY.into(), node: node.into(), account: scene.account() }.keep().expect("a thread")
}

#[test]
fn it_comes_and_goes_beside_foreign_ones() {
    let foreign = json!({"key": "other", "effect": "NoExecute", "value": "x", "timeAdded": "2026-01-01T00:00:00Z"});
    let ours = json!({"key": KEY, "effect": "NoSchedule"});
    let (script, changes) = node(&json!([foreign]), 1);
    let changes = Arc::new(Mutex::new(changes));
    scene_with(script, move |scene| {
        let changes = changes.lock().expect("unpoisoned");
        let keeper = keeper(scene, "node-1");
        keeper.tell(true);
        keeper.tell(false);
        assert_eq!(changes.recv_timeout(DEADLINE), Ok(json!([foreign, ours])), "the conflict is tried again");
        keeper.tell(false);
        keeper.tell(true);
        assert_eq!(changes.recv_timeout(DEADLINE), Ok(json!([foreign])));
        keeper.tell(false);
        assert_eq!(changes.recv_timeout(DEADLINE), Ok(json!([foreign, ours])));
        keeper.end();
        assert_eq!(changes.try_recv(), Ok(json!([foreign])), "the end has waited for it");
    });
}

#[test]
fn conflicts_do_not_add_up() {
    // With a pause that doubles after each, the last try would come after 25 s.
    let (script, changes) = node(&Value::Null, 8);
    let changes = Arc::new(Mutex::new(changes));
    scene_with(script, move |scene| {
        let keeper = keeper(scene, "node-1");
        keeper.tell(false);
        let wanted = Ok(json!([{"key": KEY, "effect": "NoSchedule"}]));
        assert_eq!(changes.lock().expect("unpoisoned").recv_timeout(DEADLINE), wanted);
    });
}

#[test]
fn a_node_that_has_none_and_is_ready_is_not_written_to() {
    let (script, changes) = node(&Value::Null, 0);
    let changes = Arc::new(Mutex::new(changes));
    scene_with(script, move |scene| {
        keeper(scene, "node-1").end();
        assert_eq!(scene.api.lines(), ["GET /api/v1/nodes/node-1 HTTP/1.1"]);
        assert!(changes.lock().expect("unpoisoned").try_recv().is_err());
    });
}

#[test]
fn a_missing_right_ends_nothing() {
    let (script, changes) = node(&Value::Null, 0);
    let changes = Arc::new(Mutex::new(changes));
    let granted_later = move |request: &Request| match request.nth {
        0 => Answer::json(403, &json!({"kind": "Status", "message": "nodes \"node-1\" is forbidden"})),
        _ => script(request),
    };
    scene_with(granted_later, move |scene| {
        let keeper = keeper(scene, "node-1");
        keeper.tell(false);
        let wanted = Ok(json!([{"key": KEY, "effect": "NoSchedule"}]));
        assert_eq!(changes.lock().expect("unpoisoned").recv_timeout(DEADLINE), wanted);
    });
}
