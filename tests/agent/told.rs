//! What the agent's log shows of the plugin's calls.

use crate::scene::{Scene, UID};
use serde_json::json;

fn field<'a>(line: &'a str, key: &str) -> &'a str {
    let start = line.find(&format!(" {key}=")).unwrap_or_else(|| panic!("no {key} in {line}")) + key.len() + 2;
    line[start..].split(' ').next().expect("a value")
}

#[test]
fn each_call_is_a_line() {
    Scene::run(|scene| {
        let agent = scene.agent();
        for verb in ["ADD", "CHECK", "DEL"] {
            scene.done(verb, &scene.conf(), Some(UID));
            let line = agent.says(&format!("command={verb}"));
            assert_eq!(field(&line, "pod"), "shop/web-0");
            assert_eq!((field(&line, "network"), field(&line, "ifname")), ("istio-cni", "net1"));
            assert_eq!(field(&line, "container"), scene.pod.container_id);
            let (wall, cpu) = (field(&line, "wall_ms"), field(&line, "cpu_ms"));
            assert!(wall.parse::<f64>().expect("a number") > 0.0 && cpu.parse::<f64>().expect("a number") > 0.0);
            assert_eq!(line.contains("facts=agent"), verb == "ADD", "{line}");
            assert!(line.contains("level=info"), "{line}");
        }
    });
}

#[test]
fn a_failure_is_told_with_its_code_and_text() {
    Scene::run(|scene| {
        let agent = scene.agent();
        let (code, _) = scene.call("ADD", &scene.conf(), Some("uid-9")).refused();
        let line = agent.says("command=ADD");
        assert_eq!(field(&line, "code"), code.to_string());
        assert!(line.contains("level=error") && line.contains("expected uid-9"), "{line}");
    });
}

#[test]
fn warnings_and_the_source_of_facts_are_told_whatever_is_logged() {
    Scene::run(|scene| {
        let agent = scene.agent();
        let mut conf = scene.conf();
        conf["log_level"] = json!("none");
        conf["kubernetes"]["nonsense"] = json!(1);
        let called = scene.done("ADD", &conf, None);
        assert_eq!(called.stderr, "");
        let line = agent.says("command=ADD");
        assert!(line.contains("kubernetes.nonsense: unknown key"), "{line}");
        assert_eq!(field(&line, "facts"), "agent");
    });
}

#[test]
fn what_is_about_the_node_is_told_where_it_is_rare() {
    Scene::run(|scene| {
        let agent = scene.agent();
        let mut conf = scene.conf();
        conf["cniVersion"] = json!("1.1.0");
        conf["cni.dev/valid-attachments"] = json!([]);
        for verb in ["STATUS", "GC", "DEL"] {
            scene.done(verb, &conf, Some(UID));
        }
        let line = agent.says("command=");
        assert!(line.contains("command=GC") && !line.contains("container=") && !line.contains("ifname="), "{line}");
        assert!(agent.says("command=").contains("command=DEL"));
    });
}

#[test]
fn a_call_without_a_pod_that_counts_is_told_as_well() {
    Scene::run(|scene| {
        let agent = scene.agent();
        let mut conf = scene.conf();
        conf["kubernetes"]["exclude_namespaces"] = json!(["shop"]);
        scene.done("ADD", &conf, Some(UID));
        assert!(!agent.says("command=ADD").contains("facts="));
    });
}
