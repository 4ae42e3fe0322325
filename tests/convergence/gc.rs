//! GC removes the attachments of this network that the runtime no longer has, and nothing else.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::expect::from_scratch;
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node};
use crate::pod::Pod;
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::path::Path;

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
fn gc_of_another_network_or_without_a_list_removes_nothing() {
    on_a_node(|| {
        let (one, two) = two_pods();
        gc("another", Some(&[])).done();
        gc("istio-cni", None).done();
        for pod in [&one, &two] {
            pod.check(REDIRECT).done();
            pod.check(EXCLUDE).done();
        }
        delete_all([&one, &two]);
    });
}

#[test]
fn the_saved_state_of_a_deleted_pod_is_removed() {
    on_a_node(|| {
        drop(two_pods());
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
