//! DEL, CHECK and GC work from the saved state; STATUS.

use crate::node::Node;
use crate::pod::call;
use crate::recorders::{Recorders, fails};
use crate::support::private_node::make_private;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Returns a node whose pod has the network `one` in addition to the default network, after ADD.
fn added(more: &Value) -> (Node, Value) {
    let node = Node::new();
    node.pod_selects("one");
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "name": "first", "type": "a", "x": [1.50, null]}));
    let conf = node.recording(more);
    node.done("ADD", &conf);
    (node, conf)
}

#[test]
fn del_needs_only_the_saved_state() {
    let (node, conf) = added(&json!({}));
    assert_eq!(fs::metadata(node.state_file()).expect("saved").permissions().mode() & 0o777, 0o600);
    fs::remove_dir_all(node.dir.join("manifests")).expect("removable");
    // Like after a reboot.
    fs::remove_dir_all(Path::new("/run/detour/attachments").join(&node.pod.name)).expect("removable");
    let mut environment = node.environment("DEL");
    environment.remove("CNI_NETNS");
    environment.remove("CNI_ARGS");
    let output = call(&environment, &conf);
    assert!(output.success, "{output:?}");
    assert_eq!(node.recorders.order()[2..], ["DEL a", "DEL default"]);
    let seen = node.recorders.seen();
    let wanted = json!({
        "cniVersion": "1.0.0", "name": "first", "type": "a", "x": [1.50, null], "prevResult": seen[2].stdin["prevResult"],
    });
    assert_eq!(seen[2].stdin, wanted);
    assert_eq!(seen[2].stdin["prevResult"]["ips"][0]["address"], "10.1.0.2/24");
    assert_eq!((&*seen[2].environment["CNI_IFNAME"], &*seen[2].environment["CNI_NETNS"]), ("net1", ""));
    assert_eq!(seen[2].environment["CNI_ARGS"], seen[1].environment["CNI_ARGS"]);
    assert!(!node.has_saved_state());

    let output = call(&environment, &conf);
    assert!(output.success, "{output:?}");
    assert_eq!(node.recorders.order()[4..], ["DEL default"], "the configuration's own");
}

#[test]
fn del_with_an_invalid_configuration_uses_the_saved_state() {
    let (node, mut conf) = added(&json!({}));
    conf["network_status"] = json!("sometimes");
    node.done("DEL", &conf);
    assert_eq!(node.recorders.order()[2..], ["DEL a", "DEL default"]);
    assert!(!node.has_saved_state());
}

#[test]
fn all_delegates_get_a_del_and_all_errors_are_reported() {
    for (retry, kept) in [(false, false), (true, true)] {
        let recorders = Recorders::new()
            .with("default", &fails("DEL", &json!({"code": 43, "msg": "stuck"})))
            .with("a", &fails("DEL", &json!({"code": 42, "msg": "busy"})));
        let node = Node::with(recorders);
        node.pod_selects("one");
        node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "a"}));
        let conf = node.recording(&json!({"retryDeleteOnError": retry}));
        node.done("ADD", &conf);
        let (code, text) = node.refused("DEL", &conf);
        assert!(code == 42 && text.contains("busy") && text.contains("network cluster (eth0)"), "{text}");
        assert!(text.contains("stuck"), "{text}");
        assert_eq!(node.recorders.order()[2..], ["DEL a", "DEL default"]);
        assert_eq!(node.state_file().exists(), kept);
    }
}

#[test]
fn check_calls_every_network_with_its_saved_result() {
    let (node, conf) = added(&json!({}));
    node.done("CHECK", &conf);
    let seen = node.recorders.seen();
    assert_eq!(node.recorders.order()[2..], ["CHECK default", "CHECK a"]);
    assert_eq!(seen[3].stdin["prevResult"]["ips"][0]["address"], "10.1.0.2/24");
    fs::remove_file(node.state_file()).expect("removable");
    let (code, text) = node.refused("CHECK", &conf);
    assert!(code == 104 && text.contains("no saved state of the"), "{text}");
}

fn gc(node: &Node, conf: &Value, valid: &Value) {
    let mut environment = node.environment("GC");
    for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
        environment.remove(name);
    }
    let mut conf = conf.clone();
    conf["cni.dev/valid-attachments"] = valid.clone();
    let output = call(&environment, &conf);
    assert!(output.success, "{output:?}");
}

#[test]
fn gc_removes_pods_that_the_runtime_no_longer_has() {
    // A network of its own: GC removes the attachments that other tests have in this one.
    let (node, conf) = added(&json!({"name": "gc"}));
    let file = node.state_file().with_file_name("gc@eth0.json");
    let valid = json!([{"containerID": node.pod.name, "ifname": "eth0"}]);
    gc(&node, &conf, &valid);
    assert_eq!(node.recorders.order()[2..], ["GC default"]);
    assert_eq!(node.recorders.seen()[2].stdin["cni.dev/valid-attachments"], valid);
    assert!(file.exists());
    gc(&node, &conf, &json!([]));
    assert_eq!(node.recorders.order()[3..], ["DEL a", "DEL default", "GC default"]);
    let del = &node.recorders.seen()[3];
    assert_eq!(del.environment["CNI_NETNS"], node.pod.netns().display().to_string());
    assert_eq!(del.environment["CNI_CONTAINERID"], node.pod.name);
    assert!(!file.exists() && !node.has_saved_state());
}

/// The kernel gives the identity of a namespace that is gone to a new one, here with the path of the old one.
#[test]
fn a_late_del_or_gc_of_an_earlier_pod_leaves_the_network_namespace_of_the_new_one() {
    let (node, conf) = added(&json!({"name": "late"}));
    let file = node.state_file().with_file_name("late@eth0.json");
    let valid = json!([{"containerID": node.pod.name, "ifname": "eth0"}]);
    for late in ["DEL", "GC"] {
        let before = node.recorders.seen().len();
        let earlier = node.dir.join("state/earlier");
        fs::create_dir(&earlier).expect("writable");
        fs::copy(&file, earlier.join("late@eth0.json")).expect("copied");
        if late == "GC" {
            gc(&node, &conf, &valid);
        } else {
            let mut environment = node.environment("DEL");
            environment.insert("CNI_CONTAINERID".into(), "earlier".into());
            let output = call(&environment, &conf);
            assert!(output.success, "{output:?}");
        }
        let seen = node.recorders.seen();
        let dels: Vec<_> = seen[before..].iter().filter(|seen| seen.command == "DEL").collect();
        assert_eq!(dels.len(), 2, "{late}");
        assert!(dels.iter().all(|del| del.environment["CNI_NETNS"].is_empty()), "{late}");
        assert!(!earlier.exists() && file.exists(), "{late}");
    }
    node.done("DEL", &conf);
    let last = node.recorders.seen().pop().expect("called");
    assert_eq!(last.environment["CNI_NETNS"], node.pod.netns().display().to_string());
}

/// As after a node's Multus configuration got another `type`: Multus has a file with the name of our directory.
#[test]
fn a_pod_that_multus_started_is_removed_from_multus_own_record() {
    let node = Node::new();
    let directory = node.dir.join("state");
    removes_from_the_record_of_multus(&node, &directory);
}

/// The plugin's own default is another directory.
#[test]
fn the_record_in_the_default_directory_of_multus_is_found() {
    make_private("/var/lib/cni", "mode=755");
    removes_from_the_record_of_multus(&Node::new(), Path::new("/var/lib/cni/multus"));
}

fn removes_from_the_record_of_multus(node: &Node, directory: &Path) {
    let conf = node.recording(&json!({}));
    let (record, results) = (directory.join(&node.pod.name), directory.join("results"));
    fs::create_dir_all(&results).expect("writable");
    let delegate = |conf: &Value, interface: &str| {
        let mut delegate =
            json!({"Conf": {}, "ConfList": {}, "Name": "", "Bytes": BASE64_STANDARD.encode(conf.to_string())});
        if !interface.is_empty() {
            delegate["ifnameRequest"] = interface.into();
        }
        delegate
    };
    let delegates = json!([
        delegate(&json!({"cniVersion": "1.0.0", "name": "cluster", "type": "default"}), ""),
        delegate(&json!({"cniVersion": "1.0.0", "name": "first", "type": "a", "x": [1.50]}), ""),
        delegate(&json!({"cniVersion": "1.0.0", "name": "istio-cni", "type": "istio-cni"}), ""),
        delegate(&json!({"cniVersion": "1.0.0", "name": "second", "plugins": [{"type": "b"}]}), "extra0"),
    ]);
    fs::write(&record, delegates.to_string()).expect("writable");
    let cached = results.join(format!("first-{}-net1", node.pod.name));
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.9/24"}]});
    fs::write(&cached, json!({"kind": "cniCacheV1", "result": result}).to_string()).expect("writable");
    node.done("DEL", &conf);
    assert_eq!(node.recorders.order(), ["DEL b", "DEL a", "DEL default"]);
    let seen = node.recorders.seen();
    let ifnames: Vec<_> = seen.iter().map(|del| del.environment["CNI_IFNAME"].as_str()).collect();
    assert_eq!(ifnames, ["extra0", "net1", "eth0"]);
    assert_eq!((&seen[1].stdin["x"], &seen[1].stdin["prevResult"]), (&json!([1.50]), &result));
    assert!(!record.exists() && !cached.exists());
    node.done("DEL", &conf);
    assert_eq!(node.recorders.order()[3..], ["DEL default"], "the configuration's own");
}

#[test]
fn a_damaged_record_of_multus_does_not_block_a_del_and_its_log_names_the_drain() {
    let node = Node::new();
    let conf = node.recording(&json!({}));
    fs::create_dir_all(node.dir.join("state")).expect("writable");
    fs::write(node.dir.join("state").join(&node.pod.name), "{").expect("writable");
    let output = node.call("DEL", &conf);
    assert!(output.success && output.stderr.contains("drain nodes before this plugin replaces Multus"), "{output:?}");
    assert_eq!(node.recorders.order(), ["DEL default"]);
}

#[test]
fn status_calls_the_default_network() {
    for (behaviour, wanted) in
        [("", None), (fails("STATUS", &json!({"code": 51, "msg": "soon"})).as_str(), Some("soon"))]
    {
        let node = Node::with(Recorders::new().with("default", behaviour));
        let mut environment = node.environment("STATUS");
        for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
            environment.remove(name);
        }
        let output = call(&environment, &node.recording(&json!({})));
        assert_eq!(output.success, wanted.is_none(), "{output:?}");
        if let Some(wanted) = wanted {
            assert!(output.stdout["msg"].as_str().is_some_and(|msg| msg.contains(wanted)), "{output:?}");
        }
        assert_eq!(node.recorders.order(), ["STATUS default"]);
        let missing = json!({"readinessindicatorfile": node.dir.join("ready")});
        let output = call(&environment, &node.recording(&missing));
        assert_eq!(output.stdout["code"], 50, "{output:?}");
    }
}

/// A record of 0.2.0 without an optional field, and one of a newer version: GC and DEL use the readable part.
#[test]
fn the_readable_part_of_a_record_of_another_version_is_removed() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/records/v0.2.0/primary.json");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let (node, conf) = added(&json!({"name": "versions"}));
        fs::copy(node.state_file().with_file_name("versions@eth0.json"), &golden).expect("written");
        node.done("DEL", &conf);
    }
    let golden: Value = serde_json::from_slice(&fs::read(golden).expect("a record")).expect("JSON");
    let mut lacking = golden.clone();
    for key in ["in_chain", "runtime_config", "args", "cni_args", "result"] {
        lacking["members"][1].as_object_mut().expect("a member").remove(key);
    }
    let mut newer = golden.clone();
    newer["version"] = json!(2);
    newer["members"].as_array_mut().expect("members").insert(1, json!({"kind": "new"}));
    for (record, is_newer) in [(golden, false), (lacking, false), (newer, true)] {
        for verb in ["DEL", "GC"] {
            let (node, conf) = added(&json!({"name": "versions"}));
            // GC also removes records of the same network from other tests.
            let file = node.state_file().with_file_name("versions@eth0.json");
            let saved: Value = serde_json::from_slice(&fs::read(&file).expect("saved")).expect("JSON");
            assert_eq!(saved["version"], 1);
            let mut record = record.clone();
            record["netns"] = saved["netns"].clone();
            record["netns_id"] = saved["netns_id"].clone();
            fs::write(&file, record.to_string()).expect("writable");
            let before = if is_newer {
                let (code, text) = node.refused("CHECK", &conf);
                assert!(code == 105 && text.contains("expected format 1 or older, got 2"), "{text}");
                2
            } else {
                node.done("CHECK", &conf);
                4
            };
            if verb == "DEL" {
                node.done("DEL", &conf);
            } else {
                gc(&node, &conf, &json!([]));
            }
            assert_eq!(node.recorders.order()[before..before + 2], ["DEL a", "DEL default"], "{verb} {record}");
            assert!(!file.exists(), "{verb}");
        }
    }
}

/// A record without `members` is damaged, not empty: DEL runs these invocations.
#[test]
fn a_damaged_record_is_refused_and_the_default_network_is_removed() {
    for damaged in ["{}", r#"{"version":1,"netns":"/run/netns/x","netns_id":null}"#, "", "{\"mem"] {
        for verb in ["DEL", "GC"] {
            let (node, conf) = added(&json!({"name": "damaged"}));
            let file = node.state_file().with_file_name("damaged@eth0.json");
            assert!(file.exists());
            fs::write(&file, damaged).expect("writable");
            let (code, text) = node.refused("CHECK", &conf);
            assert!(code == 105 && text.contains("delete the pod"), "{text}");
            if verb == "DEL" {
                node.done("DEL", &conf);
                assert_eq!(node.recorders.order()[2..], ["DEL default"], "{damaged:?}");
            } else {
                gc(&node, &conf, &json!([]));
                assert_eq!(node.recorders.order()[2..], ["GC default"], "{damaged:?}");
            }
            assert!(!file.exists(), "{verb} {damaged:?}");
        }
    }
}
