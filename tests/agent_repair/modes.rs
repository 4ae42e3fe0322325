//! Deleting and labelling, what the cluster is told of it, and more pods than can wait.

use crate::scene::{event, one, scene, scene_with, settings};
use crate::server::Answer;
use detour_cni::agent::ObservedPod;
use detour_cni::agent::repair::{Cause, RepairMode, RepairOutcome, RepairSettings};
use detour_cni::pod::Container;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn a_pod_is_deleted_as_it_is_known_and_if_somebody_makes_a_new_one() {
    scene(|scene| {
        let pod = scene.pod();
        let mut repair = scene.repair_by(&settings(RepairMode::Delete));
        let done = one(repair.look(&[pod.unvalidated()], Instant::now()));
        assert_eq!((done.cause, done.outcome), (Cause::ValidationFailed, RepairOutcome::Deleted));
        let deleted = scene.told(&format!("DELETE /api/v1/namespaces/shop/pods/{}", pod.name()));
        assert_eq!(deleted[0]["preconditions"], json!({"uid": pod.uid, "resourceVersion": "7"}));
        assert_eq!(scene.events(), [event("DetourDeleted", "Warning")]);

        let bare = scene.pod();
        let known = Arc::new(ObservedPod { owned: false, ..ObservedPod::clone(&bare.unvalidated()) });
        let done = one(scene.repair_by(&settings(RepairMode::Delete)).look(&[known], Instant::now()));
        assert!(matches!(done.outcome, RepairOutcome::Failed(why) if why.contains("no controller")));
        assert_eq!(scene.told("DELETE").len(), 1);
        assert_eq!(scene.events()[1], event("DetourRepairFailed", "Warning"));
    });
}

/// Its successor would have the same rules, and fail its validation too.
#[test]
fn a_pod_whose_rules_are_right_is_not_deleted() {
    scene(|scene| {
        let pod = scene.pod();
        pod.call(scene, "ADD");
        let without_address = ObservedPod { addresses: Vec::new(), ..ObservedPod::clone(&pod.unvalidated()) };
        for known in [pod.unvalidated(), Arc::new(without_address)] {
            let done = one(scene.repair_by(&settings(RepairMode::Delete)).look(&[known], Instant::now()));
            assert_eq!(done.cause, Cause::ValidationFailed);
            assert!(
                matches!(&done.outcome, RepairOutcome::Failed(why) if why.contains("what they should be")),
                "{done:?}"
            );
        }
        assert!(scene.told("DELETE").is_empty());
        assert_eq!(scene.events()[0], event("DetourRepairFailed", "Warning"));
    });
}

#[test]
fn a_pod_that_changed_meanwhile_is_not_deleted() {
    let conflict = |request: &crate::server::Request| {
        let status = if request.line.starts_with("DELETE") { 409 } else { 201 };
        Answer::json(status, &json!({"kind": "Status", "message": "the UID in the precondition"}))
    };
    scene_with(conflict, |scene| {
        let pod = scene.pod();
        let done = one(scene.repair_by(&settings(RepairMode::Delete)).look(&[pod.unvalidated()], Instant::now()));
        assert!(matches!(&done.outcome, RepairOutcome::Failed(why) if why.contains("409")), "{done:?}");
    });
}

#[test]
fn a_pod_is_labelled_once() {
    scene(|scene| {
        let pod = scene.pod();
        let mut repair = scene.repair_by(&settings(RepairMode::Label));
        let start = Instant::now();
        assert_eq!(one(repair.look(&[pod.unvalidated()], start)).outcome, RepairOutcome::Labelled);
        let patches = scene.told(&format!("PATCH /api/v1/namespaces/shop/pods/{}/status", pod.name()));
        let wanted = json!({"metadata": {
            "uid": pod.uid, "resourceVersion": "7", "labels": {"cni.istio.io/uninitialized": "true"},
        }});
        assert_eq!(patches, [wanted]);
        let mut labelled = ObservedPod::clone(&pod.unvalidated());
        labelled.pod.labels.insert("cni.istio.io/uninitialized".into(), "true".into());
        let done = one(repair.look(&[Arc::new(labelled)], start + Duration::from_secs(60)));
        assert_eq!(done.outcome, RepairOutcome::NothingToDo);
        assert_eq!(scene.told("PATCH").len(), 1);
        assert_eq!(scene.events(), [event("DetourLabelled", "Warning")]);
    });
}

#[test]
fn what_can_not_be_repaired_in_place_is_deleted_in_the_end() {
    scene(|scene| {
        let pod = scene.pod();
        pod.tool("ip", &["addr", "del", "10.88.0.2/24", "dev", "eth0"], "");
        let mut settings = settings(RepairMode::InPlace);
        settings.otherwise = Some(RepairMode::Delete);
        let (mut repair, mut now, mut done) = (scene.repair_by(&settings), Instant::now(), Vec::new());
        for _ in 0..5 {
            done.extend(repair.look(&[pod.unvalidated()], now));
            now += Duration::from_secs(600);
        }
        let modes: Vec<RepairMode> = done.iter().map(|done| done.mode).collect();
        assert_eq!(
            modes,
            [RepairMode::InPlace, RepairMode::InPlace, RepairMode::InPlace, RepairMode::InPlace, RepairMode::Delete]
        );
        assert_eq!(done[4].outcome, RepairOutcome::Deleted);
        assert_eq!(scene.events(), [event("DetourRepairFailed", "Warning"), event("DetourDeleted", "Warning")]);
    });
}

#[test]
fn rules_that_drifted_end_no_pod_while_they_can_be_put_right() {
    scene(|scene| {
        let pod = scene.pod();
        pod.call(scene, "ADD");
        pod.tool("nft", &["flush", "ruleset"], "");
        let done = one(scene.repair_by(&settings(RepairMode::Delete)).look(&[Arc::new(pod.known())], Instant::now()));
        assert_eq!((done.cause, done.mode, done.outcome), (Cause::Drift, RepairMode::InPlace, RepairOutcome::Repaired));
        assert!(scene.told("DELETE").is_empty());
    });
}

#[test]
fn an_api_that_is_away_keeps_no_pod_from_being_repaired() {
    scene_with(
        |_| Answer::Close,
        |scene| {
            let pod = scene.pod();
            assert_eq!(one(scene.repair().look(&[pod.unvalidated()], Instant::now())).outcome, RepairOutcome::Repaired);
        },
    );
}

#[test]
fn more_pods_than_can_wait_have_their_turn_later() {
    scene(|scene| {
        let pod = scene.pod();
        let mut crowd: Vec<Arc<ObservedPod>> = (0..600)
            .map(|number| {
                let mut other = pod.known();
                other.pod.uid = Some(format!("none-{number}"));
                Arc::new(other)
            })
            .collect();
        crowd.push(pod.unvalidated());
        let (mut repair, start) = (scene.repair(), Instant::now());
        assert_eq!(repair.look(&crowd, start), []);
        assert_eq!(scene.counted("detour_repair_queue_overflows_total"), 89);
        assert_eq!(one(repair.look(&crowd, start)).outcome, RepairOutcome::Repaired);
    });
}

#[test]
fn pods_are_not_deleted_all_at_once() {
    scene(|scene| {
        let pods: Vec<Arc<ObservedPod>> = (0..7).map(|_| scene.pod().unvalidated()).collect();
        let (mut repair, start) = (scene.repair_by(&settings(RepairMode::Delete)), Instant::now());
        assert_eq!(repair.look(&pods, start).len(), 5);
        let rest: Vec<_> = pods.into_iter().filter(|known| !scene.deleted(known)).collect();
        assert_eq!(repair.look(&rest, start + Duration::from_secs(50)), []);
        assert_eq!(repair.look(&rest, start + Duration::from_secs(70)).len(), 2);
    });
}

#[test]
fn a_new_sandbox_is_left_alone_until_its_addresses_are_known() {
    scene(|scene| {
        let pod = scene.pod();
        let of_the_last = ObservedPod { addresses: vec!["10.88.0.99".parse().expect("an address")], ..pod.known() };
        let (mut repair, start) = (scene.repair_by(&settings(RepairMode::Delete)), Instant::now());
        for minute in 0..3 {
            let known = Arc::new(of_the_last.clone());
            assert_eq!(repair.look(&[known], start + Duration::from_secs(60 * minute)), [], "a runtime is at work");
        }
        assert_eq!(repair.look(&[Arc::new(pod.known())], start + Duration::from_secs(180)), []);
        assert_eq!(repair.look(&[Arc::new(pod.known())], start + Duration::from_secs(200)), []);
        let done = one(repair.look(&[Arc::new(pod.known())], start + Duration::from_secs(220)));
        assert_eq!((done.cause, done.outcome), (Cause::NoRules, RepairOutcome::Deleted));
    });
}

/// A new pod would be the same: deleting it would not end.
#[test]
fn a_pod_whose_successor_would_not_be_redirected_either_is_never_deleted() {
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
        let in_the_end = RepairSettings { otherwise: Some(RepairMode::Delete), ..settings(RepairMode::InPlace) };
        for settings in [settings(RepairMode::Delete), in_the_end] {
            for known in &pods {
                let (mut repair, mut now, mut done) = (scene.repair_by(&settings), Instant::now(), Vec::new());
                for _ in 0..5 {
                    done.extend(repair.look(&[Arc::clone(known)], now));
                    now += Duration::from_secs(600);
                }
                let RepairOutcome::Failed(why) = &done.last().expect("a failure").outcome else { panic!("{done:?}") };
                assert!(why.contains("would not redirect"), "{why}");
            }
        }
        assert!(scene.told("DELETE").is_empty());
        assert!(scene.events().iter().all(|found| *found == event("DetourRepairFailed", "Warning")));
    });
}

/// Where its saved state is lost, it is redirected all the same.
#[test]
fn a_pod_with_native_rules_and_without_saved_state_is_not_deleted() {
    scene(|scene| {
        let mut pod = scene.pod();
        pod.dialect = "nftables";
        pod.call(scene, "ADD");
        std::fs::remove_dir_all(format!("/run/detour/attachments/{}", pod.sandbox)).expect("there is some");
        let (mut repair, mut now) = (scene.repair_by(&settings(RepairMode::Delete)), Instant::now());
        for _ in 0..4 {
            assert_eq!(repair.look(&[Arc::new(pod.known())], now), []);
            now += Duration::from_secs(600);
        }
        assert!(scene.told("DELETE").is_empty());
        pod.call(scene, "DEL");
    });
}

/// The rules are right, and a new pod would have the same ones.
#[test]
fn a_pod_whose_rules_are_right_is_not_deleted_in_the_end() {
    scene(|scene| {
        let pod = scene.pod();
        pod.call(scene, "ADD");
        let settings = RepairSettings { otherwise: Some(RepairMode::Delete), ..settings(RepairMode::InPlace) };
        let (mut repair, mut now, mut done) = (scene.repair_by(&settings), Instant::now(), Vec::new());
        for _ in 0..6 {
            done.extend(repair.look(&[pod.unvalidated()], now));
            now += Duration::from_secs(600);
        }
        assert!(
            done.iter()
                .any(|done| matches!(&done.outcome, RepairOutcome::Failed(why) if why.contains("init container")))
        );
        assert!(scene.told("DELETE").is_empty());
        pod.call(scene, "DEL");
    });
}
