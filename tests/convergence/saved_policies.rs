//! The saved policies of one pod sandbox: their size has a limit.

use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::{STATE, on_a_node};
use crate::pod::Pod;
use serde_json::{Value, json};
use std::path::Path;

/// Returns a configuration that excludes `count` × `count` × 2 kinds of DNS queries; those of different `first` UIDs differ.
fn excluding(count: usize, first: usize) -> Value {
    let uids: Vec<usize> = (0..count).map(|i| first + 2 * i).collect();
    let resolvers: Vec<String> = (0..count).map(|i| format!("10.0.{i}.7")).collect();
    json!({
        "cniVersion": "1.1.0", "name": "policies", "type": "detour", "dialect": "nftables",
        "chain": [{ "type": "dns-exclude", "uids": uids, "resolvers": resolvers }],
    })
}

fn call(pod: &Pod, verb: &str, ifname: &str, configuration: &Value) -> Answer {
    pod.call_with(verb, ifname, configuration, &pod.netns().display().to_string())
}

/// Returns the names of the files of the pod's saved state.
fn files(pod: &Pod) -> Vec<String> {
    let directory = Path::new(STATE).join("attachments").join(&pod.container_id);
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect()
}

/// The files are in memory: each attachment of a pod could fill it further.
#[test]
fn more_than_1_mib_of_saved_policies_are_refused() {
    on_a_node(|| {
        let pod = Pod::new();
        let ifnames = ["net1", "net2", "net3", "net4"];
        let refused =
            (0..).zip(ifnames).find_map(|(i, ifname)| match call(&pod, "ADD", ifname, &excluding(40, 5000 + 2 * i)) {
                Answer::Done => None,
                refused => Some((ifname, refused)),
            });
        let (ifname, refused) = refused.expect("4 lists of about 400 KB are too many");
        let error = refused.refused(7);
        assert!(error.contains("expected at most 1048576 bytes of saved policies, got "), "{error}");
        assert!(!files(&pod).iter().any(|name| name.contains(ifname)), "{:?}", files(&pod));
        call(&pod, "CHECK", "net1", &excluding(40, 5000)).done();
        for ifname in ifnames {
            call(&pod, "DEL", ifname, &excluding(40, 5000)).done();
        }
        assert!(!Kernel::of(&pod).has_rules());
    });
}
