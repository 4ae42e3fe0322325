//! The agents of two releases on one node.

use super::helm::Helm;
use super::inventory::objects_of;
use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::node::{LIST, Node, SETTLED, on_a_node, with_release};
use crate::removal::watches;
use crate::shipped::{NAMESPACE, prepare};
use serde_json::{Value, json};

const PROGRAM: &str = "var/lib/cni/bin/detour";
const MULTUS: &str = "etc/cni/multus/net.d";

fn objects(admin: &Client, release: &str) -> Vec<Value> {
    objects_of(admin, release, NAMESPACE).into_values().collect()
}

/// Returns the names of the sub-plugins in an attachment's file.
fn sub_plugins(node: &Node<'_>, attachment: &str) -> Vec<String> {
    let conf: Value = serde_json::from_str(&node.read(&format!("{MULTUS}/{attachment}.conf"))).expect("JSON");
    assert_eq!(conf["name"], attachment);
    let chain = conf["chain"].as_array().expect("a list").iter();
    chain.map(|block| block["type"].as_str().expect("text").to_owned()).collect()
}

/// Returns the names of the files that an agent installs.
fn installed(node: &Node<'_>) -> Vec<String> {
    let mut files = node.files();
    files.retain(|file| file.starts_with(MULTUS) || file == PROGRAM);
    files.sort_unstable();
    files
}

#[test]
fn the_agents_of_two_releases_install_and_remove_their_own_attachments() {
    let file = |name: &str| format!("{MULTUS}/{name}.conf");
    let program = || PROGRAM.to_owned();
    for (first, second, kept) in [("detour", "excludedns", "excludedns"), ("excludedns", "detour", "istio-cni")] {
        let plane = ControlPlane::start(&format!("agents-{first}"));
        let (admin, helm) = (plane.admin(), Helm::new(&plane));
        prepare(&admin);
        helm.upgrade("detour", &["--set", "global.platform=openshift"]);
        helm.upgrade("excludedns", &["-f", "manifests/chart/values-excludedns.yaml"]);
        let (one, two) = (objects(&admin, first), objects(&admin, second));
        on_a_node(&plane, &one, |node| {
            let agent = node.start_agent("one");
            agent.wait_for_log(SETTLED);
            with_release(&plane, &two, |other| {
                let other_agent = other.start_agent("two");
                other_agent.wait_for_log(SETTLED);
                assert_eq!(installed(node), [file("excludedns"), file("istio-cni"), program()]);
                assert_eq!(sub_plugins(node, "istio-cni"), ["istio-redirect", "uid-exclude", "dns-exclude"]);
                assert_eq!(sub_plugins(node, "excludedns"), ["uid-exclude", "dns-exclude"]);
                plane.until(|plane| watches(plane) >= 2);
                helm.uninstall(first, NAMESPACE);
                let (status, logged) = agent.end();
                assert!(status.success(), "{logged:#?}");
                assert_eq!(installed(other), [file(kept), program()], "{logged:#?}");
                helm.uninstall(second, NAMESPACE);
                let (status, logged) = other_agent.end();
                assert!(status.success(), "{logged:#?}");
                assert_eq!(installed(other), [""; 0], "{logged:#?}");
            });
        });
    }
}

/// Istio's own CNI agent wrote its file before.
#[test]
fn the_agent_of_excludedns_leaves_istio_cnis_file_unchanged() {
    const ISTIO: &str = "{\"cniVersion\": \"0.3.1\", \"name\": \"istio-cni\", \"type\": \"istio-cni\"}\n";
    let plane = ControlPlane::start("beside-istio-cni");
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    helm.upgrade("excludedns", &["-f", "manifests/chart/values-excludedns.yaml"]);
    on_a_node(&plane, &objects(&admin, "excludedns"), |node| {
        let conf = format!("{MULTUS}/istio-cni.conf");
        node.write(&conf, ISTIO);
        let agent = node.start_agent("a");
        agent.wait_for_log(SETTLED);
        assert_eq!(sub_plugins(node, "excludedns"), ["uid-exclude", "dns-exclude"]);
        assert_eq!(node.read(&conf), ISTIO);
        plane.until(|plane| watches(plane) > 0);
        helm.uninstall("excludedns", NAMESPACE);
        let (status, logged) = agent.end();
        assert!(status.success(), "{logged:#?}");
        assert_eq!((installed(node), node.read(&conf)), (vec![conf], ISTIO.to_owned()), "{logged:#?}");
    });
}

/// Without Multus, the exclusions are an entry of the plugin list after istio-cni's.
#[test]
fn the_agent_of_excludedns_adds_its_entry_to_a_list_with_istio_cni() {
    let plane = ControlPlane::start("listed-excludedns");
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let values = "global.platform=kubernetes,attachments=null";
    helm.upgrade("excludedns", &["-f", "manifests/chart/values-excludedns.yaml", "--set", values]);
    on_a_node(&plane, &objects(&admin, "excludedns"), |node| {
        let mut list: Value = serde_json::from_str(&node.read(LIST)).expect("JSON");
        let plugins = list["plugins"].as_array_mut().expect("a list");
        plugins.push(json!({"type": "istio-cni", "name": "istio-cni"}));
        let (before, text) = (plugins.clone(), format!("{list:#}\n"));
        node.write(LIST, &text);
        let agent = node.start_agent("a");
        agent.wait_for_log(SETTLED);
        let mut after: Value = serde_json::from_str(&node.read(LIST)).expect("JSON");
        let after = after["plugins"].as_array_mut().expect("a list");
        let own = after.pop().expect("an entry");
        assert_eq!((&*after, &own["type"]), (&before, &json!("detour")));
        let types: Vec<_> =
            own["chain"].as_array().expect("a list").iter().map(|block| block["type"].clone()).collect();
        assert_eq!(types, ["uid-exclude", "dns-exclude"]);
        plane.until(|plane| watches(plane) > 0);
        helm.uninstall("excludedns", NAMESPACE);
        assert!(agent.end().0.success());
        assert_eq!(node.read(LIST), text);
    });
}

/// Each attachment of the list has a file, besides the entry of the cluster network's plugin list.
#[test]
fn the_agent_installs_the_attachments_of_the_list_and_removes_those_that_leave_it() {
    let plane = ControlPlane::start("attachments");
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let values = json!({"attachments": [
        {"name": "excludedns", "chain": [{"type": "dns-exclude", "uids": ["1337"]}]}, {"name": "istio-cni"},
    ]});
    let path = plane.directory.join("values.yaml");
    std::fs::write(&path, values.to_string()).expect("writable");
    helm.upgrade("detour", &["-f", path.to_str().expect("UTF-8")]);
    let objects = |admin: &Client| objects(admin, "detour");
    on_a_node(&plane, &objects(&admin), |node| {
        let agent = node.start_agent("a");
        agent.wait_for_log(SETTLED);
        assert!(node.is_installed());
        assert_eq!(sub_plugins(node, "excludedns"), ["dns-exclude"]);
        assert_eq!(sub_plugins(node, "istio-cni"), ["istio-redirect", "uid-exclude", "dns-exclude"]);
        drop(agent);
        helm.upgrade("detour", &["--reset-values", "--set", "attachments[0].name=istio-cni"]);
        with_release(&plane, &objects(&plane.admin()), |node| {
            let agent = node.start_agent("b");
            plane.until(|_| !node.path(&format!("{MULTUS}/excludedns.conf")).exists());
            assert!(node.path(&format!("{MULTUS}/istio-cni.conf")).exists());
            drop(agent);
        });
    });
}
