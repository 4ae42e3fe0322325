//! Repair in place: the kernel has the same state as after an ordinary ADD, and a later DEL removes all of it.

use crate::repair::scene::{Scene, assert_is, event, one, scene};
use crate::support::agent_node::reach;
use crate::support::kernel::Kernel;
use crate::support::node_pod::NodePod as Pod;
use detour_cni::agent::{ObservedPod, RepairMode};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Returns the kernel's state after an ordinary ADD of such a pod.
fn plain(scene: &Scene<'_>) -> Kernel {
    let pod = scene.pod();
    scene.call(&pod, "ADD");
    Kernel::of(&pod)
}

/// Checks the rules, calls CHECK and DEL, and checks that nothing is left.
#[track_caller]
fn is_as_plain_until_deleted(scene: &Scene<'_>, pod: &Pod) {
    Kernel::of(pod).assert_is(&plain(scene), "after the repair");
    scene.call(pod, "CHECK");
    scene.call(pod, "DEL");
    assert!(!Kernel::of(pod).has_rules());
    assert!(scene.attachments(pod).is_empty());
}

#[test]
fn flushed_rules_are_restored() {
    scene(|scene| {
        let pod = scene.pod();
        scene.call(&pod, "ADD");
        let (mut repair, observed, start) = (scene.repair(), Arc::new(pod.observed()), Instant::now());
        assert_eq!(repair.run_pass(&[Arc::clone(&observed)], start), [], "all is well");
        pod.tool("nft", &["flush", "ruleset"], "");
        assert_eq!(repair.run_pass(&[Arc::clone(&observed)], start + SECOND), [], "not due");
        let done = one(repair.run_pass(&[Arc::clone(&observed)], start + 60 * SECOND));
        assert_is(&done, "DetourRepaired", "its rules had drifted");
        assert_eq!(scene.wait_for_events(1), [event("DetourRepaired", "Normal")]);
        assert_eq!(scene.counted("detour_drift_total"), 1);
        assert_eq!(scene.counted("detour_repairs_total{type=\"repair\",result=\"done\"}"), 1);
        is_as_plain_until_deleted(scene, &pod);
    });
}

/// What a process in the pod can add without redirecting it: a rule for some packets, names of other tools' chains and
/// tables, and of detour's own ones.
const LURES: [&str; 6] = [
    "nft 'table ip cache { chain out { type nat hook output priority -90; udp dport 53 redirect to :5353; }; }'",
    "iptables -t nat -N ISTIO_X",
    "ip6tables -t raw -N ISTIO_OUTPUT_DNS",
    "nft add table inet istio-proxy-x",
    "nft add table inet detour-nat; nft add chain inet detour-nat ISTIO_OUTPUT",
    "iptables-legacy -t nat -L",
];

#[test]
fn names_without_rules_neither_remove_a_redirection_nor_prevent_its_repair() {
    scene(|scene| {
        for lure in LURES {
            let pod = scene.pod();
            scene.call(&pod, "ADD");
            pod.tool("sh", &["-c", lure], "");
            pod.tool("iptables", &["-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT"], "");
            let done = one(scene.repair().run_pass(&[Arc::new(pod.observed())], Instant::now()));
            assert_is(&done, "DetourRepaired", "traffic is redirected to the sidecar again: its rules had drifted");
            pod.tool("iptables", &["-t", "nat", "-C", "OUTPUT", "-j", "ISTIO_OUTPUT"], "");
            scene.call(&pod, "CHECK");

            let bare = scene.pod();
            bare.tool("sh", &["-c", lure], "");
            let (mut repair, observed, start) = (scene.repair(), Arc::new(bare.observed()), Instant::now());
            repair.run_pass(&[Arc::clone(&observed)], start);
            let done = one(repair.run_pass(&[Arc::clone(&observed)], start + 5 * SECOND));
            assert_is(
                &done,
                "DetourRepaired",
                "traffic is redirected to the sidecar again: it had a sidecar and no rules",
            );
            bare.tool(
                "sh",
                &["-c", "nft list ruleset | grep -q 'redirect to :15001\\|--to-ports 15001\\|REDIRECT'"],
                "",
            );
        }
    });
}

#[test]
fn without_the_nodes_state_directory_no_pod_is_repaired() {
    scene(|scene| {
        let pod = scene.pod();
        nix::mount::umount(&reach("/run/detour")).expect("unmounted");
        assert_eq!(scene.repair().run_pass(&[pod.unvalidated()], Instant::now()), []);
        assert!(!Kernel::of(&pod).has_rules());
    });
}

#[test]
fn a_missing_rule_is_restored_in_each_mode_and_without_a_source_of_facts() {
    scene(|scene| {
        let pod = scene.pod();
        scene.call(&pod, "ADD");
        std::fs::remove_dir_all(reach("/manifests")).expect("removed");
        for mode in [RepairMode::InPlace, RepairMode::Delete] {
            pod.tool("iptables", &["-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT"], "");
            let done = one(scene.repair_by(mode).run_pass(&[Arc::new(pod.observed())], Instant::now()));
            assert_is(&done, "DetourRepaired", "traffic is redirected to the sidecar again: its rules had drifted");
            scene.call(&pod, "CHECK");
        }
        assert!(scene.api.bodies_of("DELETE").is_empty());
    });
}

#[test]
fn a_pod_that_started_before_the_plugin_gets_its_rules() {
    scene(|scene| {
        let pod = scene.pod();
        let (mut repair, observed, start) = (scene.repair(), Arc::new(pod.observed()), Instant::now());
        assert_eq!(repair.run_pass(&[Arc::clone(&observed)], start), [], "a runtime may be at work");
        let done = one(repair.run_pass(&[Arc::clone(&observed)], start + 5 * SECOND));
        assert_is(&done, "DetourRepaired", "traffic is redirected to the sidecar again: it had a sidecar and no rules");
        assert_eq!(scene.attachments(&pod), ["cluster@eth0.json"], "as the runtime would have it");
        assert_eq!(repair.run_pass(&[observed], start + 70 * SECOND), []);
        is_as_plain_until_deleted(scene, &pod);
    });
}

#[test]
fn a_process_in_another_pods_netns_does_not_redirect_the_repair() {
    scene(|scene| {
        let other = scene.pod();
        let before = Kernel::of(&other);
        let stray = other.stray(scene.node);
        let addresses = vec!["10.88.0.3".parse().expect("an address")];
        let observed = ObservedPod { addresses, ..ObservedPod::clone(&stray.unvalidated()) };
        let done = one(scene.repair().run_pass(&[Arc::new(observed)], Instant::now()));
        assert_is(&done, "DetourRepairFailed", "has none of the pod's addresses");
        Kernel::of(&other).assert_is(&before, "untouched");
        assert!(scene.attachments(&stray).is_empty());
    });
}

#[test]
fn a_pod_without_a_netns_gets_an_event() {
    scene(|scene| {
        let pod = scene.pod();
        let observed = pod.unvalidated();
        pod.go();
        let done = one(scene.repair().run_pass(&[observed], Instant::now()));
        assert_is(&done, "DetourRepairFailed", "network namespace");
        assert_eq!(scene.wait_for_events(1), [event("DetourRepairFailed", "Warning")]);
    });
}

#[test]
fn saved_state_of_a_repaired_pod_is_removed_with_its_netns() {
    scene(|scene| {
        let (pod, stays) = (scene.pod(), scene.pod());
        let (mut repair, start) = (scene.repair(), Instant::now());
        repair.run_pass(&[pod.unvalidated(), stays.unvalidated()], start);
        assert_eq!(scene.attachments(&pod).len(), 1);
        // An invalid record affects only its own pod.
        let broken = std::path::Path::new("/run/detour/attachments/0-broken");
        std::fs::create_dir(broken).expect("made");
        std::fs::write(broken.join("mesh@eth0.json"), "{").expect("written");
        pod.go();
        repair.run_pass(&[stays.unvalidated()], start + SECOND);
        assert!(scene.attachments(&pod).is_empty(), "there was no DEL");
        assert_eq!(scene.attachments(&stays).len(), 1);
    });
}

/// Multus calls DEL for the attachments in its cache; if that is lost, there is no DEL.
#[test]
fn saved_state_without_a_del_is_removed_with_the_netns_at_the_runtimes_path() {
    scene(|scene| {
        let directory = reach("/run/netns-of-test");
        std::fs::create_dir_all(&directory).expect("made");
        std::fs::write(directory.join("not-propagated"), "").expect("written");
        let kept_at = |netns: &str| {
            let pod = scene.pod();
            scene.call(&pod, "ADD");
            let state = std::path::Path::new("/run/detour/attachments").join(&pod.sandbox);
            let file = std::fs::read_dir(state).expect("saved").next().expect("a record").expect("readable").path();
            let text = std::fs::read(&file).expect("a record");
            let mut record: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
            record["netns"] = json!(netns);
            std::fs::write(file, record.to_string()).expect("writable");
            scene.repair().run_pass(&[], Instant::now());
            !scene.attachments(&pod).is_empty()
        };
        assert!(!kept_at("/run/netns-of-test/gone"));
        assert!(kept_at("/run/netns-of-test/not-propagated"));
        assert!(kept_at("/run/not-mounted/gone"));
    });
}

/// An ADD of the runtime would fail, but the pod runs already.
#[test]
fn a_pod_is_redirected_without_its_requests_outside_the_bounds() {
    scene(|scene| {
        scene.install(&json!([{"type": "istio-redirect"}, {"type": "uid-exclude"}]));
        let pod = scene.pod();
        scene.annotate(&pod, "detour.io/exclude-uids", "7000,*");
        let done = one(scene.repair().run_pass(&[pod.unvalidated()], Instant::now()));
        assert_is(&done, "DetourRepaired", "traffic is redirected to the sidecar again");
        let exclusions = pod.tool("nft", &["list", "chain", "inet", "detour-exclusions", "DETOUR_OUTPUT"], "");
        assert!(exclusions.contains("skuid 7000"), "{exclusions}");
        assert!(pod.tool("iptables-save", &["-t", "nat"], "").contains("--to-ports 15001"));
    });
}

/// A pod with CAP_NET_ADMIN takes a limited time of the agent.
#[test]
fn a_pod_that_holds_too_many_rules_does_not_delay_the_repair_of_others() {
    scene(|scene| {
        let (offender, pod) = (scene.pod(), scene.pod());
        scene.call(&offender, "ADD");
        scene.call(&pod, "ADD");
        let rules = (0..60_000).map(|n| format!("-A OUTPUT -d 10.1.{}.{}/32 -j ACCEPT\n", n / 256 % 256, n % 256));
        offender.tool("iptables-restore", &["--noflush"], &format!("*nat\n{}COMMIT\n", rules.collect::<String>()));
        pod.tool("nft", &["flush", "ruleset"], "");
        let both = [Arc::new(offender.observed()), Arc::new(pod.observed())];
        let done = scene.repair().run_pass(&both, Instant::now());
        let repaired = done.into_iter().filter(|event| event.reason == "DetourRepaired").collect();
        assert_is(&one(repaired), "DetourRepaired", "its rules had drifted");
        assert_eq!(scene.counted("detour_look_failures_total{reason=\"foreign-rules\"}"), 1);
    });
}
