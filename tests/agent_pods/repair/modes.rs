//! Deleting pods, Events, and the limits of the queue and of deletions.

use crate::repair::scene::{event, one, scene, scene_with};
use crate::repair::server::Answer;
use detour_cni::agent::pods::{Cause, RepairOutcome};
use detour_cni::agent::{ObservedPod, RepairMode};
use detour_cni::pod::Container;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn a_pod_is_deleted_with_preconditions_and_only_if_it_has_a_controller() {
    scene(|scene| {
        let pod = scene.pod();
        let mut repair = scene.repair_by(RepairMode::Delete);
        let done = one(repair.run_pass(&[pod.unvalidated()], Instant::now()));
        assert_eq!((done.cause, done.outcome), (Cause::ValidationFailed, RepairOutcome::Deleted));
        let deleted = scene.request_bodies(&format!("DELETE /api/v1/namespaces/shop/pods/{}", pod.name()));
        assert_eq!(deleted[0]["preconditions"], json!({"uid": pod.uid, "resourceVersion": "7"}));
        assert_eq!(scene.events(1), [event("DetourDeleted", "Warning")]);

        let bare = scene.pod();
        let observed = Arc::new(ObservedPod { owned: false, ..ObservedPod::clone(&bare.unvalidated()) });
        let done = one(scene.repair_by(RepairMode::Delete).run_pass(&[observed], Instant::now()));
        assert!(matches!(done.outcome, RepairOutcome::Failed(why) if why.contains("no controller")));
        assert_eq!(scene.request_bodies("DELETE").len(), 1);
        assert_eq!(scene.events(2)[1], event("DetourRepairFailed", "Warning"));
    });
}

/// Its successor would have the same rules, and fail its validation too.
#[test]
fn a_pod_with_the_desired_rules_is_not_deleted() {
    scene(|scene| {
        let pod = scene.pod();
        pod.call(scene, "ADD");
        let mut repair = scene.repair_by(RepairMode::Delete);
        let without_address = ObservedPod { addresses: Vec::new(), ..ObservedPod::clone(&pod.unvalidated()) };
        assert_eq!(repair.run_pass(&[Arc::new(without_address)], Instant::now()), [], "its rules can't be read yet");
        let mut repair = scene.repair_by(RepairMode::Delete);
        let done = one(repair.run_pass(&[pod.unvalidated()], Instant::now()));
        assert_eq!(done.cause, Cause::ValidationFailed);
        assert!(
            matches!(&done.outcome, RepairOutcome::Failed(why) if why.contains("its rules are the desired ones")),
            "{done:?}"
        );
        assert!(scene.request_bodies("DELETE").is_empty());
        assert_eq!(scene.events(1)[0], event("DetourRepairFailed", "Warning"));
    });
}

#[test]
fn a_pod_that_changed_since_is_not_deleted() {
    let conflict = |request: &crate::repair::server::Request| {
        let status = if request.line.starts_with("DELETE") { 409 } else { 201 };
        Answer::json(status, &json!({"kind": "Status", "message": "the UID in the precondition"}))
    };
    scene_with(conflict, |scene| {
        let pod = scene.pod();
        let done = one(scene.repair_by(RepairMode::Delete).run_pass(&[pod.unvalidated()], Instant::now()));
        assert!(matches!(&done.outcome, RepairOutcome::Failed(why) if why.contains("409")), "{done:?}");
    });
}

#[test]
fn a_pod_that_can_not_be_repaired_keeps_running_and_the_first_and_last_failure_have_an_event() {
    scene(|scene| {
        let pod = scene.pod();
        pod.tool("ip", &["addr", "del", "10.88.0.2/24", "dev", "eth0"], "");
        let (mut repair, mut now, mut done) = (scene.repair(), Instant::now(), Vec::new());
        for _ in 0..7 {
            done.extend(repair.run_pass(&[pod.unvalidated()], now));
            now += Duration::from_secs(600);
        }
        assert!(
            done.len() == 5 && done.iter().all(|done| matches!(done.outcome, RepairOutcome::Failed(_))),
            "{done:?}"
        );
        assert!(scene.request_bodies("DELETE").is_empty());
        let failed = event("DetourRepairFailed", "Warning");
        assert_eq!(scene.events(2), [failed.clone(), failed]);
    });
}

#[test]
fn drift_is_repaired_in_place_in_every_mode() {
    scene(|scene| {
        let pod = scene.pod();
        pod.call(scene, "ADD");
        pod.tool("nft", &["flush", "ruleset"], "");
        let done = one(scene.repair_by(RepairMode::Delete).run_pass(&[Arc::new(pod.observed())], Instant::now()));
        assert_eq!((done.cause, done.mode, done.outcome), (Cause::Drift, RepairMode::InPlace, RepairOutcome::Repaired));
        assert!(scene.request_bodies("DELETE").is_empty());
    });
}

#[test]
fn an_unavailable_api_server_delays_no_repair() {
    scene_with(
        |_| Answer::Close,
        |scene| {
            let pod = scene.pod();
            assert_eq!(
                one(scene.repair().run_pass(&[pod.unvalidated()], Instant::now())).outcome,
                RepairOutcome::Repaired
            );
        },
    );
}

#[test]
fn pods_beyond_the_queue_limit_are_checked_later() {
    scene(|scene| {
        let pod = scene.pod();
        let mut crowd: Vec<Arc<ObservedPod>> = (0..600)
            .map(|number| {
                let mut other = pod.observed();
                other.pod.uid = Some(format!("-{number}"));
                Arc::new(other)
            })
            .collect();
        crowd.push(pod.unvalidated());
        let (mut repair, start) = (scene.repair(), Instant::now());
        assert_eq!(repair.run_pass(&crowd, start), []);
        assert_eq!(scene.counted("detour_repair_queue_overflows_total"), 89);
        assert_eq!(one(repair.run_pass(&crowd, start)).outcome, RepairOutcome::Repaired);
    });
}

#[test]
fn only_a_deletion_waits_for_the_rate_limit() {
    scene(|scene| {
        let deleted: Vec<Arc<ObservedPod>> = (0..5).map(|_| scene.pod().unvalidated()).collect();
        let (mut repair, start) = (scene.repair_by(RepairMode::Delete), Instant::now());
        assert_eq!(repair.run_pass(&deleted, start).len(), 5);
        let drifted = scene.pod();
        drifted.call(scene, "ADD");
        drifted.tool("nft", &["flush", "ruleset"], "");
        let bare = ObservedPod { owned: false, ..ObservedPod::clone(&scene.pod().unvalidated()) };
        let waiting = scene.pod().unvalidated();
        let pods = [Arc::new(drifted.observed()), Arc::new(bare), waiting];
        let done = repair.run_pass(&pods, start + Duration::from_secs(1));
        let outcomes: Vec<_> = done.iter().map(|done| (done.cause, &done.outcome)).collect();
        assert!(
            matches!(
                outcomes[..],
                [(Cause::Drift, RepairOutcome::Repaired), (Cause::ValidationFailed, RepairOutcome::Failed(why))]
                    if why.contains("no controller")
            ),
            "{outcomes:?}"
        );
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
        assert_eq!((done.cause, done.outcome), (Cause::NoRules, RepairOutcome::Deleted));
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
                let mut pod = scene.pod();
                pod.annotate(scene, key, value);
                pod.unvalidated()
            })
            .into();
        let mut by_istio_init = ObservedPod::clone(&scene.pod().unvalidated());
        by_istio_init.pod.init_containers.push(Container { name: "istio-init".into(), ..Container::default() });
        pods.push(Arc::new(by_istio_init));
        for observed in &pods {
            let done = one(scene.repair_by(RepairMode::Delete).run_pass(&[Arc::clone(observed)], Instant::now()));
            assert!(
                matches!(&done.outcome, RepairOutcome::Failed(why) if why.contains("would not redirect")),
                "{done:?}"
            );
        }
        assert!(scene.request_bodies("DELETE").is_empty());
        assert!(scene.events(5).iter().all(|found| *found == event("DetourRepairFailed", "Warning")));
    });
}

/// It is redirected although its saved state is lost.
#[test]
fn a_pod_with_native_rules_and_without_saved_state_is_not_deleted() {
    scene(|scene| {
        let mut pod = scene.pod();
        pod.dialect = "nftables";
        pod.call(scene, "ADD");
        std::fs::remove_dir_all(format!("/run/detour/attachments/{}", pod.sandbox)).expect("there is some");
        let (mut repair, mut now) = (scene.repair_by(RepairMode::Delete), Instant::now());
        for _ in 0..4 {
            assert_eq!(repair.run_pass(&[Arc::new(pod.observed())], now), []);
            now += Duration::from_secs(600);
        }
        assert!(scene.request_bodies("DELETE").is_empty());
        pod.call(scene, "DEL");
    });
}
