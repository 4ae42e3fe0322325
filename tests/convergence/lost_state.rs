//! Saved state that is gone or stale, GC, and network namespaces that are gone or replaced. `faults` has damaged state.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node};
use crate::pod::Pod;
use crate::sequences::from_scratch;
use serde_json::{Map, Value, json};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const DETOUR: Attachment = Slot::Detour.with(Facts::DnsCaptured);
const OTHER: Attachment = Slot::ExcludeDns.with(Facts::Plain);

fn record_path(pod: &Pod, attachment: Attachment) -> PathBuf {
    let name = format!("{}@{}.json", attachment.slot.network(), attachment.slot.ifname());
    Path::new(STATE).join("attachments").join(&pod.container_id).join(name)
}

#[test]
fn a_container_in_a_new_namespace_starts_without_rules() {
    on_a_node(|| {
        let first = Pod::new();
        first.add(DETOUR).done();
        first.add(OTHER).done();
        let second = first.replaced();
        second.check(DETOUR).refused(104);
        second.add(DETOUR).done();
        let alone = from_scratch(None, &[DETOUR].into()).expect("accepted");
        Kernel::of(&second).assert_is(&alone, "without what another namespace had");
        second.check(DETOUR).done();
        second.del(OTHER).done();
        Kernel::of(&second).assert_is(&alone, "after the DEL of what another namespace had");
        second.del(DETOUR).done();
        assert!(!Kernel::of(&second).has_rules());
    });
}

/// The path of a late DEL may be that of another pod's network namespace.
#[test]
fn a_del_in_the_namespace_of_another_pod_removes_nothing_from_it() {
    on_a_node(|| {
        let (gone, live) = (Pod::new(), Pod::new());
        gone.add(OTHER).done();
        live.add(OTHER).done();
        let netns = live.netns().display().to_string();
        for _ in ["of what was added elsewhere", "of what was never added"] {
            gone.call_with("DEL", OTHER.slot.ifname(), &OTHER.configuration(), &netns).done();
            live.check(OTHER).done();
        }
        assert!(!record_path(&gone, OTHER).exists());
        live.del(OTHER).done();
    });
}

/// Like after a reboot, or after a runtime lost the ADD.
#[test]
fn without_state_del_removes_only_chains_with_detours_names() {
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(DETOUR).done();
        let redirected: Vec<_> =
            Kernel::of(&pod).rules.into_iter().filter(|(chain, _)| chain.contains("ISTIO_")).collect();
        std::fs::remove_dir_all(Path::new(STATE).join("attachments")).expect("there is some");
        pod.del(DETOUR).done();
        let left = Kernel::of(&pod);
        assert!(!left.has_exclusions(), "{left:?}");
        assert_eq!(
            left.rules.into_iter().filter(|(chain, _)| chain.contains("ISTIO_")).collect::<Vec<_>>(),
            redirected
        );
        assert_eq!(pod.del(DETOUR), Answer::Done);
    });
}

/// The names of native tables identify them, and with them the fixtures of their rules.
#[test]
fn native_rules_without_state_are_removed_with_their_routing() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    on_a_node(|| {
        for (settings, again) in [
            ("{}", None),
            ("{}", Some("auto")),
            ("{}", Some("nftables")),
            (r#"{"inbound_tproxy_mark": 77, "inbound_tproxy_route_table": 1000}"#, None),
            (r#"{"inbound_tproxy_mark": 77, "inbound_tproxy_route_table": 1000}"#, Some("auto")),
        ] {
            let settings: Map<String, Value> = serde_json::from_str(settings).expect("JSON");
            let pod = Pod::new();
            let before = Kernel::of(&pod);
            let netns = pod.netns().display().to_string();
            let call = |verb, dialect: &str| {
                let mut configuration = attachment.configuration();
                configuration["dialect"] = dialect.into();
                if verb != "DEL" {
                    configuration["chain"][0].as_object_mut().expect("a block").extend(settings.clone());
                }
                pod.call_with(verb, attachment.slot.ifname(), &configuration, &netns).done();
            };
            call("ADD", "nftables");
            let right = Kernel::of(&pod);
            std::fs::remove_dir_all(Path::new(STATE).join("attachments")).expect("there is some");
            if let Some(again) = again {
                call("ADD", again);
                Kernel::of(&pod).assert_is(&right, "after the second ADD");
                call("CHECK", again);
            }
            call("DEL", "auto");
            Kernel::of(&pod).assert_is(&before, "after DEL");
        }
    });
}

const REDIRECT: Attachment = Slot::IstioCni.with(Facts::DnsCaptured);
const EXCLUDE: Attachment = Slot::ExcludeDns.with(Facts::Plain);

fn gc(network: &str, valid: Option<&[(&Pod, Attachment)]>) -> Answer {
    let mut configuration = json!({ "cniVersion": "1.1.0", "name": network, "type": "detour" });
    if let Some(valid) = valid {
        let known = |(pod, attachment): &(&Pod, Attachment)| json!({ "containerID": pod.container_id, "ifname": attachment.slot.ifname() });
        configuration["cni.dev/valid-attachments"] = valid.iter().map(known).collect::<Vec<Value>>().into();
    }
    Pod::new().call_with("GC", "", &configuration, "")
}

fn two_pods() -> (Pod, Pod) {
    let pods = (Pod::new(), Pod::new());
    for pod in [&pods.0, &pods.1] {
        pod.add(REDIRECT).done();
        pod.add(EXCLUDE).done();
    }
    pods
}

fn delete_all(pods: [&Pod; 2]) {
    for pod in pods {
        pod.del(REDIRECT).done();
        pod.del(EXCLUDE).done();
        assert!(!Kernel::of(pod).has_rules());
    }
}

fn only(attachments: &[Attachment]) -> Kernel {
    from_scratch(None, &attachments.iter().copied().collect()).expect("accepted")
}

#[test]
fn stale_attachments_are_removed_from_a_running_pod_and_valid_ones_remain() {
    on_a_node(|| {
        let (one, two) = two_pods();
        gc("istio-cni", Some(&[(&two, REDIRECT)])).done();
        Kernel::of(&one).assert_is(&only(&[EXCLUDE]), "the pod with a stale attachment");
        one.check(EXCLUDE).done();
        one.check(REDIRECT).refused(104);
        Kernel::of(&two).assert_is(&only(&[REDIRECT, EXCLUDE]), "the other pod");
        two.check(REDIRECT).done();
        delete_all([&one, &two]);
    });
}

#[test]
fn gc_of_another_network_or_without_a_list_removes_nothing_and_later_the_state_of_deleted_pods() {
    on_a_node(|| {
        let pods = two_pods();
        gc("another", Some(&[])).done();
        gc("istio-cni", None).done();
        for pod in [&pods.0, &pods.1] {
            pod.check(REDIRECT).done();
            pod.check(EXCLUDE).done();
        }
        drop(pods);
        gc("istio-cni", Some(&[])).done();
        gc("excludedns", Some(&[])).done();
    });
}

/// The path may be that of another pod's network namespace, which must not change.
#[test]
fn a_namespace_that_replaced_a_stale_one_is_not_changed() {
    on_a_node(|| {
        let (stale, live) = (Pod::new(), Pod::new());
        let path = Path::new(STATE).join("netns");
        symlink(stale.netns(), &path).expect("writable");
        let text = path.display().to_string();
        stale.call_with("ADD", "net1", &REDIRECT.configuration(), &text).done();
        live.add(EXCLUDE).done();
        std::fs::remove_file(&path).expect("exists");
        symlink(live.netns(), &path).expect("writable");
        gc("istio-cni", Some(&[])).done();
        live.check(EXCLUDE).done();
        live.del(EXCLUDE).done();
        std::fs::remove_file(&path).expect("exists");
    });
}

#[test]
fn an_unreadable_record_does_not_block_the_others() {
    on_a_node(|| {
        let (one, two) = two_pods();
        let broken = left_in_state().into_iter().find(|path| path.ends_with("istio-cni@net1.json")).expect("saved");
        std::fs::write(broken, "{").expect("writable");
        std::fs::write("/run/detour/attachments/stray", "").expect("writable");
        gc("istio-cni", Some(&[])).done();
        assert!(left_in_state().iter().all(|path| !path.ends_with("istio-cni@net1.json")), "{:?}", left_in_state());
        std::fs::remove_file("/run/detour/attachments/stray").expect("still there");
        for pod in [&one, &two] {
            pod.del(EXCLUDE).done();
        }
    });
}

/// The kernel gives the identity of a namespace that is gone to a new one, here with the path of the old one.
#[test]
fn a_late_del_or_gc_of_an_earlier_pod_with_the_same_path_and_inode_changes_nothing() {
    on_a_node(|| {
        let live = Pod::new();
        for late in ["DEL", "GC"] {
            live.add(REDIRECT).done();
            let before = Kernel::of(&live);
            let earlier = forged_earlier(&live);
            match late {
                "GC" => gc("istio-cni", Some(&[(&live, REDIRECT)])).done(),
                _ => earlier
                    .call_with("DEL", "net1", &REDIRECT.configuration(), &live.netns().display().to_string())
                    .done(),
            }
            Kernel::of(&live).assert_is(&before, late);
            live.check(REDIRECT).done();
            let of_earlier = Path::new(STATE).join("attachments").join(&earlier.container_id);
            assert!(!of_earlier.exists(), "the saved state of the deleted pod is removed");
            live.del(REDIRECT).done();
            assert!(!Kernel::of(&live).has_rules());
        }
    });
}

/// The DEL of an earlier pod never came, and the kernel gave the identity of its network namespace to a new one.
#[test]
fn a_stale_record_with_the_same_inode_does_not_keep_the_rules_of_a_running_pod() {
    let stale = [("another path", Some("/run/netns/of-an-earlier-pod")), ("the same path, but older", None)];
    on_a_node(|| {
        for (what, path) in stale {
            let live = Pod::new();
            live.add(REDIRECT).done();
            let earlier = forged_earlier(&live);
            let file = Path::new(STATE).join("attachments").join(&earlier.container_id).join("istio-cni@net1.json");
            let mut record: Value = serde_json::from_slice(&std::fs::read(&file).expect("saved")).expect("JSON");
            match path {
                Some(path) => record["netns"] = json!(path),
                None => record["added_at"] = json!(1),
            }
            std::fs::write(&file, record.to_string()).expect("writable");
            live.del(REDIRECT).done();
            assert!(!Kernel::of(&live).has_rules(), "{what}");
            earlier.del(REDIRECT).done();
        }
    });
}

/// Returns a pod whose saved state is that of `live`, as if its network namespace had had the same path and inode.
fn forged_earlier(live: &Pod) -> Pod {
    let earlier = Pod::new();
    let directory = |pod: &Pod| Path::new(STATE).join("attachments").join(&pod.container_id);
    std::fs::create_dir(directory(&earlier)).expect("writable");
    let file = "istio-cni@net1.json";
    std::fs::copy(directory(live).join(file), directory(&earlier).join(file)).expect("copied");
    earlier
}
