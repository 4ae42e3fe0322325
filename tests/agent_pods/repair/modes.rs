//! Deleting pods, Events, late passes, the limit of deletions, pods that are not repaired, the node's taint, and a whole agent.

use crate::repair::scene::{Repair, assert_is, event, on_event_loop, one, scene};
use crate::support::kernel::Kernel;
use crate::support::server::{Answer, Request, Server};
use crate::support::wait::until;
use detour_cni::agent::taint::TaintController;
use detour_cni::agent::{ObservedPod, RepairMode};
use detour_cni::pod::Container;
use serde_json::{Value, json};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Builder;

#[test]
fn a_pod_is_deleted_with_preconditions_and_only_if_it_has_a_controller() {
    scene(|scene| {
        let pod = scene.pod();
        let mut repair = scene.repair_by(RepairMode::Delete);
        let done = one(repair.run_pass(&[pod.unvalidated()], Instant::now()));
        assert_is(&done, "DetourDeleted", "its init container found");
        let deleted = scene.api.bodies_of(&format!("DELETE /api/v1/namespaces/shop/pods/{}", pod.name));
        assert_eq!(deleted[0]["preconditions"], json!({"uid": pod.uid, "resourceVersion": "7"}));
        assert_eq!(scene.wait_for_events(1), [event("DetourDeleted", "Warning")]);

        let bare = scene.pod();
        let observed = Arc::new(ObservedPod { owned: false, ..ObservedPod::clone(&bare.unvalidated()) });
        let done = one(scene.repair_by(RepairMode::Delete).run_pass(&[observed], Instant::now()));
        assert_is(&done, "DetourRepairFailed", "no controller");
        assert_eq!(scene.api.bodies_of("DELETE").len(), 1);
        assert_eq!(scene.wait_for_events(2)[1], event("DetourRepairFailed", "Warning"));
    });
}

/// Its successor would have the same rules, and fail its validation too.
#[test]
fn a_pod_with_the_desired_rules_is_not_deleted() {
    scene(|scene| {
        let pod = scene.pod();
        scene.call(&pod, "ADD");
        let mut repair = scene.repair_by(RepairMode::Delete);
        let without_address = ObservedPod { addresses: Vec::new(), ..ObservedPod::clone(&pod.unvalidated()) };
        assert_eq!(repair.run_pass(&[Arc::new(without_address)], Instant::now()), [], "its rules can't be read yet");
        let mut repair = scene.repair_by(RepairMode::Delete);
        let start = Instant::now();
        assert_eq!(repair.run_pass(&[pod.unvalidated()], start), [], "the kubelet repeats the validation");
        let done = one(repair.run_pass(&[pod.unvalidated()], start + Duration::from_secs(660)));
        assert_is(&done, "DetourRepairFailed", "its rules are the desired ones");
        assert!(scene.api.bodies_of("DELETE").is_empty());
        assert_eq!(scene.wait_for_events(1)[0], event("DetourRepairFailed", "Warning"));
    });
}

#[test]
fn a_pod_that_changed_since_is_not_deleted() {
    scene(|scene| {
        let pod = scene.pod();
        scene.api.refuse_writes(Some(409));
        let done = one(scene.repair_by(RepairMode::Delete).run_pass(&[pod.unvalidated()], Instant::now()));
        assert_is(&done, "DetourRepairFailed", "409");
    });
}

#[test]
fn a_pod_that_can_not_be_repaired_keeps_running_and_has_one_event_an_hour() {
    scene(|scene| {
        let pod = scene.pod();
        pod.tool("ip", &["addr", "del", "10.88.0.2/24", "dev", "eth0"], "");
        let (mut repair, mut now, mut done) = (scene.repair(), Instant::now(), Vec::new());
        for _ in 0..8 {
            done.extend(repair.run_pass(&[pod.unvalidated()], now));
            now += Duration::from_secs(600);
        }
        assert_eq!(scene.counted("detour_repairs_total{type=\"repair\",result=\"failed\"}"), 8);
        assert_eq!(done.len(), 2, "one an hour: {done:?}");
        assert!(scene.api.bodies_of("DELETE").is_empty());
        let failed = event("DetourRepairFailed", "Warning");
        assert_eq!(scene.wait_for_events(2), [failed.clone(), failed]);
    });
}

#[test]
fn an_unavailable_api_server_delays_no_repair() {
    scene(|scene| {
        let pod = scene.pod();
        scene.api.go_down();
        let done = one(scene.repair().run_pass(&[pod.unvalidated()], Instant::now()));
        assert_is(&done, "DetourRepaired", "traffic is redirected to the sidecar again");
    });
}

#[test]
fn passes_that_are_late_are_counted() {
    scene(|scene| {
        let pod = [Arc::new(scene.pod().observed())];
        let (mut repair, start) = (scene.repair_by(RepairMode::Off), Instant::now());
        for (second, late) in [(0, 0), (70, 0), (200, 1)] {
            repair.run_pass(&pod, start + Duration::from_secs(second));
            assert_eq!(scene.counted("detour_repair_queue_overflows_total"), late);
        }
    });
}

#[test]
fn a_new_sandbox_is_skipped_until_its_addresses_are_known() {
    scene(|scene| {
        let pod = scene.pod();
        let of_the_last = ObservedPod { addresses: vec!["10.88.0.99".parse().expect("an address")], ..pod.observed() };
        let (mut repair, start) = (scene.repair_by(RepairMode::Delete), Instant::now());
        for minute in 0..3 {
            let observed = Arc::new(of_the_last.clone());
            assert_eq!(
                repair.run_pass(&[observed], start + Duration::from_secs(60 * minute)),
                [],
                "a runtime is at work"
            );
        }
        assert_eq!(repair.run_pass(&[Arc::new(pod.observed())], start + Duration::from_secs(180)), []);
        assert_eq!(repair.run_pass(&[Arc::new(pod.observed())], start + Duration::from_secs(200)), []);
        let done = one(repair.run_pass(&[Arc::new(pod.observed())], start + Duration::from_secs(220)));
        assert_is(&done, "DetourDeleted", "it had a sidecar and no rules");
    });
}

/// A new pod would be the same, and would be deleted again.
#[test]
fn a_pod_whose_replacement_would_not_be_redirected_is_never_deleted() {
    scene(|scene| {
        let annotations = [
            ("sidecar.istio.io/interceptionMode", "NONE"),
            ("sidecar.istio.io/interceptionMode", "wrong"),
            ("sidecar.istio.io/inject", "false"),
            ("traffic.sidecar.istio.io/excludeOutboundPorts", "http"),
        ];
        let mut pods: Vec<_> = annotations
            .map(|(key, value)| {
                let pod = scene.pod();
                scene.annotate(&pod, key, value);
                pod.unvalidated()
            })
            .into();
        let mut by_istio_init = ObservedPod::clone(&scene.pod().unvalidated());
        by_istio_init.pod.init_containers.push(Container { name: "istio-init".into(), ..Container::default() });
        pods.push(Arc::new(by_istio_init));
        for observed in &pods {
            let done = one(scene.repair_by(RepairMode::Delete).run_pass(&[Arc::clone(observed)], Instant::now()));
            assert_is(&done, "DetourRepairFailed", "would not redirect");
        }
        assert!(scene.api.bodies_of("DELETE").is_empty());
        assert!(scene.wait_for_events(5).iter().all(|found| *found == event("DetourRepairFailed", "Warning")));
    });
}

/// It is redirected although its saved state is lost.
#[test]
fn a_pod_with_native_rules_and_without_saved_state_is_not_deleted() {
    scene(|scene| {
        let pod = scene.pod();
        scene.call_in("nftables", &pod, "ADD");
        std::fs::remove_dir_all(format!("/run/detour/attachments/{}", pod.sandbox)).expect("there is some");
        let (mut repair, mut now) = (scene.repair_by(RepairMode::Delete), Instant::now());
        for _ in 0..4 {
            assert_eq!(repair.run_pass(&[Arc::new(pod.observed())], now), []);
            now += Duration::from_secs(600);
        }
        assert!(scene.api.bodies_of("DELETE").is_empty());
        scene.call(&pod, "DEL");
    });
}

#[test]
fn the_agent_repairs_watched_pods_and_checks_the_nodes_taint() {
    scene(|scene| {
        let (pod, plain) = (scene.pod(), scene.pod());
        scene.call(&plain, "ADD");
        scene.publish(&pod);
        // As the pod that it is compared with.
        scene.configure(r#"[{"type": "istio-redirect"}]"#);
        let agent = scene.start_agent("a", &["--taint=cni.istio.io/not-ready"]);
        agent.wait_for_log("traffic is redirected to the sidecar again: it had a sidecar and no rules");
        Kernel::of(&pod).assert_is(&Kernel::of(&plain), "after the race");
        pod.tool("nft", &["flush", "ruleset"], "");
        pod.label("changed", "yes");
        scene.publish(&pod);
        agent.wait_for_log("traffic is redirected to the sidecar again: its rules had drifted");
        Kernel::of(&pod).assert_is(&Kernel::of(&plain), "after the loss");
        // Other threads write the Event and the taint.
        until("an Event", || scene.api.bodies().iter().any(|body| body["reason"] == "DetourRepaired"));
        until("the taint", || scene.api.requests().contains(&"GET /api/v1/nodes/node-1".to_owned()));
    });
}

/// Checks the pod twice, the second time after the grace period. Returns the number of repairs.
fn repairs(repair: &mut Repair, observed: &Arc<ObservedPod>) -> usize {
    let start = Instant::now();
    let again = start + Duration::from_secs(5);
    repair.run_pass(&[Arc::clone(observed)], start).len() + repair.run_pass(&[Arc::clone(observed)], again).len()
}

#[test]
fn rules_of_another_tool_stay() {
    scene(|scene| {
        let pod = scene.pod();
        let foreign = "*nat\n:ISTIO_OUTPUT - [0:0]\n:ISTIO_REDIRECT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n\
                       -A ISTIO_OUTPUT -j ISTIO_REDIRECT\n-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n";
        pod.tool("iptables-restore", &["--noflush"], foreign);
        let before = Kernel::of(&pod);
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed())), 0, "it has rules");
        let done = one(scene.repair().run_pass(&[pod.unvalidated()], Instant::now()));
        assert_is(&done, "DetourRepairFailed", "another tool");
        Kernel::of(&pod).assert_is(&before, "untouched");
    });
}

#[test]
fn a_pod_without_addresses_or_without_redirection_is_skipped() {
    scene(|scene| {
        let pod = scene.pod();
        let unsettled = ObservedPod { addresses: Vec::new(), ..pod.observed() };
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(unsettled)), 0, "its ADD may still come");
        let mut manifest = pod.object();
        manifest["metadata"]["annotations"]["sidecar.istio.io/interceptionMode"] = json!("NONE");
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed_as(&manifest))), 0, "it wants none");
        scene.install(&json!([{"type": "uid-exclude", "uids": [7]}]));
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed())), 0, "the chain does not redirect");
        assert!(scene.attachments(&pod).is_empty());
    });
}

const KEY: &str = "cni.istio.io/not-ready";
/// How long the end waits for the last change.
const END_TIMEOUT: Duration = Duration::from_secs(3);
const DEADLINE: Duration = Duration::from_secs(60);

/// Returns an API server with a node, and the changes of its taints. The first change is refused.
fn node(taints: &Value) -> (impl Fn(&Request) -> Answer + Send + Sync + 'static, Receiver<Value>) {
    let (taints, (changed, changes)) = (Mutex::new((taints.clone(), 1_u32)), channel());
    let changed = Mutex::new(changed);
    let script = move |request: &Request| {
        let mut state = taints.lock().expect("unpoisoned");
        if request.line.starts_with("PATCH /api/v1/nodes/node-1") {
            let body: Value = serde_json::from_slice(&request.body).expect("JSON");
            if request.nth == 0 {
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

#[test]
fn the_taint_is_added_and_removed_and_others_stay() {
    let foreign = json!({"key": "other", "effect": "NoExecute", "value": "x", "timeAdded": "2026-01-01T00:00:00Z"});
    let ours = json!({"key": KEY, "effect": "NoSchedule"});
    let (script, changes) = node(&json!([foreign]));
    scene(move |scene| {
        let server = Server::plain(script);
        let account = scene.account_at(server.http());
        let taint = on_event_loop(move || TaintController::start(account.for_tasks(), "node-1".into(), KEY.into()));
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
