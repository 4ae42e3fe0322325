//! The commands of docs/install.md, in their order.

use super::{definition_of, difference, inventory, istio_chart, objects_of};
use crate::service_mesh::{Cluster, blocks_of};
use crate::shipped::{NAMESPACE, apply};
use serde_json::{Value, json};

const GUIDE: &str = include_str!("../../../docs/install.md");
const OPENSHIFT: [&str; 2] = ["--set", "global.platform=openshift"];

impl Cluster {
    fn with_namespace_of_istio_cni() -> Self {
        let cluster = Self::start();
        apply(&cluster.admin, &[json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "istio-cni"}})]);
        cluster
    }

    /// Runs a block of commands. `after` is called after each one.
    fn run_each(&self, block: &str, after: impl Fn(&str)) {
        let istio = istio_chart(&self.plane.directory, "istio-cni");
        for line in block.lines() {
            let (succeeded, output) = self.run(&line.replace("istio/cni", &istio));
            assert!(succeeded, "{line}: {output}");
            after(line);
        }
    }
}

/// Returns the blocks of commands in a section. A command is one line.
fn blocks(heading: &str) -> Vec<String> {
    blocks_of(GUIDE, &format!("### {heading}"), "sh")
}

fn owner(definition: Option<Value>) -> String {
    let definition = definition.expect("it exists");
    definition["metadata"]["annotations"]["meta.helm.sh/release-name"].as_str().unwrap_or_default().to_owned()
}

/// Returns the options in the second column of a section's table.
fn options(heading: &str) -> Vec<Vec<String>> {
    let (_, section) = GUIDE.split_once(&format!("### {heading}\n")).expect("a section");
    let rows = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let cells = rows.take_while(|line| line.starts_with('|')).map(|line| line.split('`').nth(1).expect("options"));
    cells.map(|cell| cell.split(' ').map(str::to_owned).collect()).collect()
}

#[test]
fn the_documented_commands_move_definitions_between_owners() {
    let [hand_over, take_over, adopt] = &blocks("Owners of definitions")[..] else { panic!("three blocks") };
    let scene = Cluster::with_namespace_of_istio_cni();
    let uid = |definition: Option<Value>| definition.expect("it exists")["metadata"]["uid"].clone();

    scene.helm.upgrade("detour", &OPENSHIFT);
    let created = uid(scene.definition());
    // A release of Istio's chart that does not contain the definition yet.
    let istio = istio_chart(&scene.plane.directory, "other");
    scene.helm.run(&["install", "istio-cni", &istio, "-n", "istio-cni"]).expect("installed");
    scene.run_each(hand_over, |line| assert_eq!(uid(scene.definition()), created, "{line}: not interrupted"));
    assert_eq!(owner(scene.definition()), "istio-cni");
    assert!(objects_of(&scene.admin, "detour", NAMESPACE).is_empty());

    scene.helm.upgrade("detour", &OPENSHIFT);
    assert_eq!(owner(scene.definition()), "istio-cni");
    scene.run_each(take_over, |_| ());
    assert_eq!(owner(scene.definition()), "detour");
    scene.helm.uninstall("detour", NAMESPACE);
    assert_eq!(scene.definition(), None);

    apply(&scene.admin, &[definition_of("default", "istio-cni")]);
    let created = uid(scene.definition());
    scene.helm.upgrade("detour", &OPENSHIFT);
    scene.run_each(adopt, |line| assert_eq!(uid(scene.definition()), created, "{line}: not interrupted"));
    assert_eq!(owner(scene.definition()), "detour");
    scene.helm.uninstall("detour", NAMESPACE);
    assert_eq!(scene.definition(), None);
}

#[test]
fn the_documented_release_for_exclusions_leaves_istios_objects_unchanged() {
    let scene = Cluster::with_namespace_of_istio_cni();
    let istio = istio_chart(&scene.plane.directory, "istio-cni");
    scene.helm.run(&["install", "istio-cni", &istio, "-n", "istio-cni"]).expect("installed");
    let before = inventory(&scene.admin);
    scene.run_each(&blocks("Exclusions beside istio-cni")[0], |_| ());
    let after = inventory(&scene.admin);
    assert!(before.iter().all(|(name, object)| after.get(name) == Some(object)));
    assert!(after.contains_key("NetworkAttachmentDefinition default/excludedns"));
    let config = &after["ConfigMap kube-system/excludedns-detour-agent"]["data"];
    let json = |key: &str| serde_json::from_str::<Value>(config[key].as_str().expect("text")).expect("JSON");
    assert_eq!(json("attachments.json"), json!([{"name": "excludedns"}]));
    let types: Vec<_> =
        json("config.json")["chain"].as_array().expect("a list").iter().map(|one| one["type"].clone()).collect();
    assert_eq!(types, ["uid-exclude", "dns-exclude"]);
    let notes = scene.helm.run(&["get", "notes", "excludedns", "-n", NAMESPACE]).expect("installed");
    for part in ["default/excludedns", "rollout status daemonset/excludedns-detour-agent", "kubectl detour check"] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    assert!(!notes.contains("istio-cni"), "{notes}");
    scene.helm.uninstall("excludedns", NAMESPACE);
    assert_eq!(difference(&before, &inventory(&scene.admin)), [""; 0]);
    // Other platforms.
    let [with_multus, without] = &options("Exclusions beside istio-cni")[..] else { panic!("two rows") };
    for (options, definitions, arguments) in [
        (with_multus, 1, ["--chained=false", "--conf-dir=/etc/cni/multus/net.d"]),
        (without, 0, ["--chained=true", "--conf-dir=/etc/cni/net.d"]),
    ] {
        let mut all = vec!["-f", "manifests/chart/values-excludedns.yaml"];
        all.extend(options.iter().map(String::as_str));
        scene.helm.upgrade("excludedns", &all);
        let objects = objects_of(&scene.admin, "excludedns", NAMESPACE);
        let found = objects.keys().filter(|name| name.starts_with("NetworkAttachmentDefinition")).count();
        assert_eq!(found, definitions, "{options:?}");
        let agent = &objects["DaemonSet kube-system/excludedns-detour-agent"]["spec"]["template"]["spec"];
        let given = agent["containers"][0]["args"].as_array().expect("arguments");
        assert!(arguments.iter().all(|argument| given.contains(&json!(argument))), "{options:?}: {given:?}");
        scene.helm.uninstall("excludedns", NAMESPACE);
    }
}
