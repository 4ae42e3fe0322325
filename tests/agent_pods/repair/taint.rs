//! The node's taint.

use crate::repair::scene::{Scene, on_event_loop, scene_with};
use crate::repair::server::{Answer, Request};
use detour_cni::agent::taint::{Taint, TaintController};
use serde_json::{Value, json};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle};

const KEY: &str = "cni.istio.io/not-ready";
/// How long the end waits for the last change.
const END_TIMEOUT: Duration = Duration::from_secs(3);
const DEADLINE: Duration = Duration::from_secs(60);

/// Returns an API server with a node, and the changes of its taints. The first `conflicts` changes are refused.
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
            changed.lock().expect("unpoisoned").send(state.0.clone()).expect("the test listens");
        } else if !request.line.starts_with("GET /api/v1/nodes/node-1") {
            return Answer::json(404, &json!({"kind": "Status", "message": "no such thing"}));
        }
        let metadata = json!({"name": "node-1", "resourceVersion": state.1.to_string()});
        Answer::json(200, &json!({"metadata": metadata, "spec": {"taints": state.0}}))
    };
    (script, changes)
}

/// Starts the task of the taint.
fn start(scene: &Scene<'_>) -> TaintController {
    let account = scene.account();
    on_event_loop(|| {
        let account = account.on(Handle::current());
        Taint { key: KEY.into(), node: "node-1".into(), account }.start()
    })
}

#[test]
fn the_taint_is_added_and_removed_and_others_stay() {
    let foreign = json!({"key": "other", "effect": "NoExecute", "value": "x", "timeAdded": "2026-01-01T00:00:00Z"});
    let ours = json!({"key": KEY, "effect": "NoSchedule"});
    let (script, changes) = node(&json!([foreign]), 1);
    let changes = Arc::new(Mutex::new(changes));
    scene_with(script, move |scene| {
        let changes = changes.lock().expect("unpoisoned");
        let taint = start(scene);
        taint.set_ready(true);
        taint.set_ready(false);
        assert_eq!(changes.recv_timeout(DEADLINE), Ok(json!([foreign, ours])), "the conflict is tried again");
        taint.set_ready(false);
        taint.set_ready(true);
        assert_eq!(changes.recv_timeout(DEADLINE), Ok(json!([foreign])));
        taint.set_ready(false);
        assert_eq!(changes.recv_timeout(DEADLINE), Ok(json!([foreign, ours])));
        let started = Instant::now();
        let event_loop = Builder::new_current_thread().enable_time().build().expect("an event loop");
        event_loop.block_on(taint.remove());
        // On a slow machine, the end gives up before.
        let is_waited_for = started.elapsed() < END_TIMEOUT;
        let change = if is_waited_for { changes.try_recv().ok() } else { changes.recv_timeout(DEADLINE).ok() };
        assert_eq!(change, Some(json!([foreign])), "the end has waited for it: {is_waited_for}");
    });
}

#[test]
fn a_refused_request_is_retried() {
    let (script, changes) = node(&Value::Null, 0);
    let changes = Arc::new(Mutex::new(changes));
    let granted_later = move |request: &Request| match request.nth {
        0 => Answer::json(403, &json!({"kind": "Status", "message": "nodes \"node-1\" is forbidden"})),
        _ => script(request),
    };
    scene_with(granted_later, move |scene| {
        let taint = start(scene);
        taint.set_ready(false);
        let wanted = Ok(json!([{"key": KEY, "effect": "NoSchedule"}]));
        assert_eq!(changes.lock().expect("unpoisoned").recv_timeout(DEADLINE), wanted);
    });
}
