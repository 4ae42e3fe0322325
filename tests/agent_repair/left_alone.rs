//! Pods that are not repaired.

use crate::kernel::Kernel;
use crate::scene::{Repair, one, scene, scene_with};
use crate::server::{Answer, Request};
use detour_cni::agent::ObservedPod;
use detour_cni::agent::pods::RepairOutcome;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Checks the pod twice, the second time after the grace period. Returns the number of repairs.
fn repairs(repair: &mut Repair, observed: &Arc<ObservedPod>) -> usize {
    let start = Instant::now();
    let again = start + Duration::from_secs(5);
    repair.run_pass(&[Arc::clone(observed)], start).len() + repair.run_pass(&[Arc::clone(observed)], again).len()
}

#[test]
fn pods_without_netns_or_sidecar_ending_or_excluded_pods_are_skipped() {
    scene(|scene| {
        let pod = scene.pod();
        let with = |change: &dyn Fn(&mut Value)| {
            let mut manifest = pod.manifest();
            change(&mut manifest);
            ObservedPod {
                ended_init_containers: pod.unvalidated().ended_init_containers.clone(),
                ..pod.observed_as(&manifest)
            }
        };
        let others = [
            with(&|pod| pod["spec"]["hostNetwork"] = json!(true)),
            with(&|pod| pod["metadata"]["namespace"] = json!("kube-system")),
            with(&|pod| drop(pod["spec"]["containers"].as_array_mut().expect("a list").pop())),
            ObservedPod { ending: true, ..with(&|_| ()) },
        ];
        let before = Kernel::of(&pod);
        for observed in others {
            assert_eq!(repairs(&mut scene.repair(), &Arc::new(observed.clone())), 0, "{observed:?}");
        }
        Kernel::of(&pod).assert_is(&before, "untouched");
        assert!(scene.api.requests().is_empty() && scene.attachments(&pod).is_empty());
    });
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
        assert!(matches!(&done.outcome, RepairOutcome::Failed(why) if why.contains("another tool")), "{done:?}");
        Kernel::of(&pod).assert_is(&before, "untouched");
    });
}

#[test]
fn a_pod_without_addresses_or_without_redirection_is_skipped() {
    scene(|scene| {
        let pod = scene.pod();
        let unsettled = ObservedPod { addresses: Vec::new(), ..pod.observed() };
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(unsettled)), 0, "its ADD may still come");
        let mut manifest = pod.manifest();
        manifest["metadata"]["annotations"]["sidecar.istio.io/interceptionMode"] = json!("NONE");
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed_as(&manifest))), 0, "it wants none");
        scene.install(&json!([{"type": "uid-exclude", "uids": [7]}]));
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed())), 0, "the chain does not redirect");
        assert!(scene.attachments(&pod).is_empty());
    });
}

/// The pod selects a definition with the name of the installed configuration. If it has a configuration, Multus runs that.
#[test]
fn a_pod_whose_definition_has_its_own_configuration_is_left_alone() {
    for (config, repaired) in [("", 1), (r#"{"type": "macvlan"}"#, 0)] {
        let definition = json!({
            "metadata": {"namespace": "default", "name": "istio-cni"}, "spec": {"config": config},
        });
        let answer = move |request: &Request| match request.line.contains("network-attachment-definitions") {
            true => Answer::json(200, &definition),
            false => Answer::json(200, &json!({})),
        };
        scene_with(answer, |scene| {
            scene.install_attachment();
            let pod = scene.pod();
            let mut manifest = pod.manifest();
            manifest["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("default/istio-cni");
            assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed_as(&manifest))), repaired, "{config}");
            let lookups = scene.api.requests().into_iter().filter(|one| one.line.contains("definitions/istio-cni"));
            assert_eq!(lookups.count(), 1 + repaired, "one in each check");
        });
    }
}

#[test]
fn a_validation_that_failed_differently_or_succeeded_later_is_ignored() {
    scene(|scene| {
        let pod = scene.pod();
        pod.call(scene, "ADD");
        let with = |change: &dyn Fn(&mut detour_cni::agent::EndedContainer)| {
            let mut observed = ObservedPod::clone(&pod.unvalidated());
            change(&mut observed.ended_init_containers[0]);
            Arc::new(observed)
        };
        for observed in [
            with(&|ended| ended.succeeded = true),
            with(&|ended| ended.last_failure = Some(1)),
            with(&|ended| ended.last_failure = None),
            with(&|ended| ended.name = "other".into()),
        ] {
            assert_eq!(repairs(&mut scene.repair(), &observed), 0, "{observed:?}");
        }
    });
}
