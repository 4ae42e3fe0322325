//! ADD waits for the readiness file.

use crate::node::Node;
use serde_json::json;
use std::fs;

#[test]
fn add_waits_for_the_file_and_names_it_in_the_error() {
    let node = Node::new();
    node.pod_selects("");
    let file = node.dir.join("net.d/ready.conf");
    let conf = node.recording(&json!({"readinessindicatorfile": file, "readiness_timeout_seconds": 1}));
    let (code, text) = node.refused("ADD", &conf);
    assert!(code == 11 && text.contains(&format!("{} does not exist after 1 s", file.display())), "{text}");
    assert!(node.recorders.seen().is_empty());

    // A tool that chains its plugin has replaced the file.
    fs::create_dir(node.dir.join("net.d")).expect("a directory");
    let list = file.with_extension("conflist");
    fs::write(&list, "{}").expect("writable");
    let (code, text) = node.refused("ADD", &conf);
    assert!(code == 11 && text.contains(&format!("{} is beside it; set this file", list.display())), "{text}");

    let conf = node.recording(&json!({"readinessindicatorfile": file, "readiness_timeout_seconds": 60}));
    std::thread::scope(|scope| {
        let add = scope.spawn(|| node.done("ADD", &conf));
        fs::write(&file, "").expect("writable");
        add.join().expect("it succeeds");
    });
}
