//! Pods that are not repaired.

use crate::repair::kernel::Kernel;
use crate::repair::scene::{Repair, assert_is, one, scene};
use detour_cni::agent::ObservedPod;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
        let mut manifest = pod.manifest();
        manifest["metadata"]["annotations"]["sidecar.istio.io/interceptionMode"] = json!("NONE");
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed_as(&manifest))), 0, "it wants none");
        scene.install(&json!([{"type": "uid-exclude", "uids": [7]}]));
        assert_eq!(repairs(&mut scene.repair(), &Arc::new(pod.observed())), 0, "the chain does not redirect");
        assert!(scene.attachments(&pod).is_empty());
    });
}
