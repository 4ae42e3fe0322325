//! Finding the network namespace of a pod or container on a simulated node. Needs root, writable control groups, `ip`
//! and `unshare`.

mod command;

use crate::support::simulated_node as node;

use detour_cni::cni::Error;
use detour_cni::netns::find::{FoundNetns, NodeSnapshot};
use node::{Node, Process, Where, id, scene, uid};
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A pod as containerd runs it: its pause process and the cached result of its ADD.
struct Pod {
    uid: String,
    sandbox: String,
    pause: Process,
}

fn group(uid: &str, container: &str) -> String {
    let uid = uid.replace('-', "_");
    format!(
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/cri-containerd-{container}.scope"
    )
}

impl Pod {
    fn new(node: &Node) -> Self {
        let (uid, sandbox) = (uid(), id("a"));
        let pause = node.process("pause", &group(&uid, &sandbox), Where::New);
        Self { uid, sandbox, pause }
    }

    fn with_cached_result(self, node: &Node) -> Self {
        node.pin(&self.sandbox, &self.pause);
        node.keep("results", ("cluster", "eth0"), &self.sandbox, ("web-0", &self.uid), &self.sandbox);
        self
    }
}

fn of_pod(root: &Path, pod: &detour_cni::pod::Pod) -> Result<Option<FoundNetns>, Error> {
    NodeSnapshot::take(root)?.of_pod(pod)
}

fn of_uid(root: &Path, uid: &str) -> Result<Option<FoundNetns>, Error> {
    NodeSnapshot::take(root)?.of_uid(uid)
}

fn of_name(root: &Path, namespace: &str, name: &str) -> Result<Option<FoundNetns>, Error> {
    NodeSnapshot::take(root)?.of_name(namespace, name)
}

fn of_container(root: &Path, id: &str) -> Result<Option<FoundNetns>, Error> {
    NodeSnapshot::take(root)?.of_container(id)
}

#[track_caller]
fn found(node: &Node, uid: &str) -> FoundNetns {
    of_uid(&node.root, uid).expect("no error").expect("found")
}

#[track_caller]
fn is_in(found: &FoundNetns, process: &Process) {
    let of = |path| std::fs::metadata(path).map(|m| std::os::unix::fs::MetadataExt::ino(&m)).expect("it is there");
    assert_eq!(of(found.netns.clone()), of(process.netns()), "{found:?}");
}

#[track_caller]
fn refused(result: Result<Option<FoundNetns>, Error>, parts: &[&str]) {
    let error = result.expect_err("refused");
    assert!(parts.iter().all(|part| error.msg.contains(part)), "{error}");
}

#[test]
fn a_pod_is_found_by_cached_result_and_process() {
    scene(|node| {
        let pod = Pod::new(node).with_cached_result(node);
        node.keep("multus/results", ("istio-cni", "net1"), &pod.sandbox, ("web-0", &pod.uid), &pod.sandbox);
        node.keep("results", ("a-loopback", "lo"), &pod.sandbox, ("web-0", &pod.uid), &pod.sandbox);
        let found = found(node, &pod.uid);
        is_in(&found, &pod.pause);
        assert_eq!(found.netns, node.root.join("run/netns").join(&pod.sandbox));
        assert_eq!(found.container_id.as_deref(), Some(pod.sandbox.as_str()));
        let attachments: Vec<_> = found.attachments.iter().map(|a| (a.network.as_str(), a.ifname.as_str())).collect();
        assert_eq!(attachments, [("cluster", "eth0"), ("istio-cni", "net1"), ("a-loopback", "lo")]);
        assert_eq!(found.attachments[0].result["interfaces"][0]["name"], "eth0");
        for part in ["/var/lib/cni/results/cluster-", &pod.sandbox, "(pause) is in it"] {
            assert!(found.evidence.contains(part), "{found:?}");
        }
    });
}

#[test]
fn a_pod_is_found_by_cached_result_or_process_alone() {
    scene(|node| {
        let pod = Pod::new(node);
        let by_process = found(node, &pod.uid);
        is_in(&by_process, &pod.pause);
        assert_eq!(by_process.container_id.as_deref(), Some(pod.sandbox.as_str()));
        let pod = pod.with_cached_result(node);
        let other = node.process("cat", "detour-find-no-pod", Where::With(&pod.pause));
        pod.pause.end();
        let by_result = found(node, &pod.uid);
        is_in(&by_result, &other);
        assert_eq!(by_result.container_id.as_deref(), Some(pod.sandbox.as_str()));
        assert_eq!(of_uid(&node.root, &uid()).expect("no error"), None);
    });
}

#[test]
fn processes_that_entered_another_namespace_are_ignored() {
    scene(|node| {
        let (pod, other) = (Pod::new(node), Pod::new(node).with_cached_result(node));
        let app = group(&pod.uid, &id("b"));
        let _own = node.process("app", &app, Where::With(&pod.pause));
        let _in_another_pod = node.process("nsenter", &app, Where::With(&other.pause));
        let _on_the_node = node.process("nsenter", &app, Where::Node);
        is_in(&found(node, &pod.uid), &pod.pause);
    });
}

#[test]
fn a_cached_result_that_contradicts_the_process_is_an_error() {
    scene(|node| {
        let (pod, other) = (Pod::new(node), Pod::new(node));
        node.pin("other", &other.pause);
        node.keep("results", ("cluster", "eth0"), &pod.sandbox, ("web-0", &pod.uid), "other");
        refused(
            of_uid(&node.root, &pod.uid),
            &[&pod.uid, "run/netns/other", "its oldest process", "(pause) is in another network namespace"],
        );
    });
}

#[test]
fn of_two_sandboxes_the_one_with_a_process_is_current() {
    scene(|node| {
        let pod = Pod::new(node).with_cached_result(node);
        let (old, before) = (id("c"), node.process("cat", "detour-find-no-pod", Where::New));
        node.pin(&old, &before);
        node.keep("results", ("cluster", "eth0"), &old, ("web-0", &pod.uid), &old);
        is_in(&found(node, &pod.uid), &pod.pause);
        assert_eq!(of_container(&node.root, &old).expect("no error"), None);
        pod.pause.end();
        refused(of_uid(&node.root, &pod.uid), &[&old, &pod.sandbox, "no running process shows which one is current"]);
    });
}

#[test]
fn a_pod_is_found_by_its_name_if_the_name_is_unique() {
    scene(|node| {
        let by_name = |namespace| of_name(&node.root, namespace, "web-0");
        assert_eq!(by_name("shop"), Ok(None));
        let pod = Pod::new(node).with_cached_result(node);
        is_in(&by_name("shop").expect("no error").expect("found"), &pod.pause);
        assert_eq!(by_name("bank"), Ok(None));
        let other = Pod::new(node).with_cached_result(node);
        refused(by_name("shop"), &["shop/web-0", &pod.uid, &other.uid]);
    });
}

/// Returns a pod of the namespace shop as the API has it.
fn object(name: &str, uid: &str, annotations: &[(&str, &str)]) -> detour_cni::pod::Pod {
    detour_cni::pod::Pod {
        namespace: "shop".into(),
        name: name.into(),
        uid: Some(uid.into()),
        annotations: annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..detour_cni::pod::Pod::default()
    }
}

#[test]
fn a_pod_with_the_uid_of_another_pod_in_an_annotation_is_not_found_there() {
    scene(|node| {
        let victim = Pod::new(node).with_cached_result(node);
        let hash = [("kubernetes.io/config.hash", victim.uid.as_str())];
        let mirror = [hash[0], ("kubernetes.io/config.mirror", victim.uid.as_str())];
        let of = |pod: &detour_cni::pod::Pod| of_pod(&node.root, pod);
        assert_eq!(of(&object("thief", &uid(), &hash)), Ok(None));
        refused(of(&object("thief", &uid(), &mirror)), &["shop/thief", &victim.uid, "of pod shop/web-0"]);
        is_in(&of(&object("web-0", &uid(), &mirror)).expect("no error").expect("found"), &victim.pause);
        is_in(&of(&object("web-0", &victim.uid, &[])).expect("no error").expect("found"), &victim.pause);
    });
}

#[test]
fn a_static_pod_is_not_found_by_its_process_alone() {
    scene(|node| {
        let pod = Pod::new(node);
        let mirror = [("kubernetes.io/config.hash", pod.uid.as_str()), ("kubernetes.io/config.mirror", "x")];
        refused(of_pod(&node.root, &object("web-0", &uid(), &mirror)), &["shop/web-0", &pod.uid, "no cached result"]);
        is_in(&of_pod(&node.root, &object("web-0", &pod.uid, &[])).expect("no error").expect("found"), &pod.pause);
    });
}

#[test]
fn a_namespace_that_no_longer_exists_is_not_found() {
    scene(|node| {
        let pod = Pod::new(node);
        // The mount point that remains when a bind mount is gone.
        std::fs::write(node.root.join("run/netns/gone"), "").expect("written");
        node.keep("results", ("cluster", "eth0"), &id("d"), ("web-0", &pod.uid), "gone");
        let found = found(node, &pod.uid);
        is_in(&found, &pod.pause);
        assert!(found.attachments.is_empty() && found.open().is_ok(), "{found:?}");
        pod.pause.end();
        assert!(found.open().expect_err("it has ended").msg.contains("no longer exists"));
        assert_eq!(of_uid(&node.root, &pod.uid).expect("no error"), None);
    });
}

#[test]
fn the_nodes_own_network_namespace_is_refused() {
    scene(|node| {
        let uid = uid();
        let host = node.process("pause", &group(&uid, &id("a")), Where::Node);
        refused(of_uid(&node.root, &uid), &["(pause)", "the node's own network namespace", "hostNetwork"]);
        node.pin("node", &host);
        node.keep("results", ("cluster", "eth0"), "c", ("web-0", "another"), "node");
        refused(of_uid(&node.root, "another"), &["/var/run/netns/node", "the node's own"]);
    });
}

#[test]
fn the_monitor_of_crio_is_ignored() {
    scene(|node| {
        let (uid, container) = (uid(), id("e"));
        let pod = format!("kubepods/burstable/pod{uid}");
        let _monitor = node.process("conmon", &format!("{pod}/crio-conmon-{container}"), Where::Node);
        let app = node.process("app", &format!("{pod}/crio-{container}"), Where::New);
        let found = found(node, &uid);
        is_in(&found, &app);
        assert_eq!(found.container_id, None, "an app's container is not the sandbox");
    });
}

#[test]
fn a_pod_in_its_own_user_namespace_is_found_with_its_addresses() {
    scene(|node| {
        let (uid, sandbox) = (uid(), id("f"));
        let pause = node.process("pause", &group(&uid, &sandbox), Where::OwnUsers);
        let timeout = Duration::from_secs(60);
        let found = wait_for(|| of_uid(&node.root, &uid).ok().flatten());
        is_in(&found, &pause);
        let added = found.open().expect("open").enter(timeout, || {
            let ip = |arguments: &[&str]| Command::new("ip").args(arguments).status().expect("run ip").success();
            Ok(ip(&["link", "add", "eth0", "type", "veth", "peer", "name", "other"])
                && ip(&["addr", "add", "10.9.8.7/24", "dev", "eth0"]))
        });
        assert!(added.expect("entered"));
        let holds = |address: &str| found.has_any_address(&[address.parse::<IpAddr>().expect("an address")], timeout);
        assert_eq!((holds("10.9.8.7"), holds("10.9.8.8")), (Ok(true), Ok(false)));
    });
}

/// Retries: `unshare` is in the node's network namespace until it has created its own.
fn wait_for(attempt: impl Fn() -> Option<FoundNetns>) -> FoundNetns {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        match attempt() {
            Some(found) => return found,
            None => assert!(std::time::Instant::now() < deadline, "not found in time"),
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_container_is_found_by_its_id_or_a_unique_prefix() {
    scene(|node| {
        let pod = Pod::new(node).with_cached_result(node);
        let container = id("b");
        let _app = node.process("app", &group(&pod.uid, &container), Where::With(&pod.pause));
        let of = |id: &str| of_container(&node.root, id);
        let by_pod = found(node, &pod.uid);
        for id in [&pod.sandbox, &container, &format!("containerd://{container}")] {
            assert_eq!(of(id).expect("no error").as_ref(), Some(&by_pod), "{id}");
        }
        let lone = id("0123456789");
        let outside = node.process("app", &format!("machine.slice/libpod-{lone}.scope"), Where::New);
        is_in(&of("0123456789").expect("no error").expect("found"), &outside);
        let second = id("0123456789");
        let _other = node.process("app", &format!("machine.slice/libpod-{second}.scope"), Where::New);
        refused(of("0123456789"), &[&lone, &second, "ambiguous"]);
        assert_eq!(of(&id("9")).expect("no error"), None);
    });
}

#[test]
fn a_container_outside_its_pods_namespace_is_refused() {
    scene(|node| {
        let pod = Pod::new(node).with_cached_result(node);
        let container = id("b");
        let _app = node.process("app", &group(&pod.uid, &container), Where::New);
        refused(of_container(&node.root, &container), &[&container, "(app) is not in its pod's network namespace"]);
    });
}
