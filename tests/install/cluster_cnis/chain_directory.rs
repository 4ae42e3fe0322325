//! Networks with a directory of the network's name beside their configuration: runtimes with libcni 1.3 add the plugins of
//! its files to a list. The own list calls the same plugins, and the directory belongs to other tools.

use crate::cluster_cnis::agent_process::Agent;
use crate::cluster_cnis::golden::{DIRECTORY, FLAG};
use crate::cluster_cnis::runtime::{OWN_LIST, called, used};
use crate::cluster_cnis::scene::Scene;
use crate::support::wait::until;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const LIST: &str = r#"{"cniVersion": "1.0.0", "name": "podnet", "plugins": [{"type": "bridge"}, {"type": "portmap"}]}"#;
/// The files of other tools in directories beside the list: a plugin of the network, files that runtimes ignore, a plugin
/// of a network that is not used, and a directory with the name of a configuration.
const OTHERS: [(&str, &str); 5] = [
    ("podnet/10-mark.conf", r#"{"type": "mark"}"#),
    ("podnet/20-ignored.json", "{"),
    ("podnet/30-ignored.conflist", r#"{"name": "podnet", "plugins": [{"type": "ignored"}]}"#),
    ("unused/10-broken.conf", "{"),
    ("00-a.conflist/10-mark.conf", r#"{"type": "mark"}"#),
];

fn node(test: &str, name: &str, text: &str) -> Scene {
    let scene = Scene::with(&format!("own-list-directory-{test}"), name, text);
    OTHERS.iter().for_each(|(path, text)| scene.write(&format!("{DIRECTORY}/{path}"), text));
    scene
}

/// Returns the files of other tools.
fn others(directory: &Path) -> BTreeMap<&'static str, String> {
    OTHERS.map(|(path, _)| (path, fs::read_to_string(directory.join(path)).expect("there"))).into()
}

#[test]
fn a_pod_gets_the_plugins_that_it_got_without_the_plugin() {
    let inlined = LIST.replace(", \"plugins\"", ", \"loadOnlyInlinedPlugins\": true, \"plugins\"");
    let single = r#"{"cniVersion": "1.0.0", "name": "podnet", "type": "bridge"}"#;
    let rows: [(&str, &str, &str, &[&str]); 3] = [
        ("mixed", "10-podnet.conflist", LIST, &["bridge", "portmap", "detour", "mark"]),
        ("inlined", "10-podnet.conflist", &inlined, &["bridge", "portmap", "detour"]),
        // Beside a file with a single plugin, runtimes ignore the directory.
        ("single", "10-podnet.conf", single, &["bridge", "detour"]),
    ];
    for (test, name, text, expected) in rows {
        let scene = node(test, name, text);
        let directory = scene.path(DIRECTORY);
        let before = (scene.files(), called(&directory), others(&directory));
        let without_entry: Vec<_> = expected.iter().filter(|kind| **kind != "detour").collect();
        assert_eq!(before.1.iter().collect::<Vec<_>>(), without_entry, "{test}: before");
        // In a copy of the network's configuration, and in this configuration itself.
        for flag in [FLAG, "--own-list=false"] {
            scene.ok("install", &[flag]);
            assert_eq!(directory.join(OWN_LIST).exists(), flag == FLAG, "{test}");
            assert_eq!(called(&directory), expected, "{test}: {flag}");
            assert_eq!(others(&directory), before.2, "{test}: {flag}");
            scene.ok("uninstall", &[]);
            assert_eq!(
                (called(&directory), others(&directory)),
                (before.1.clone(), before.2.clone()),
                "{test}: {flag}"
            );
            // A single configuration became a list.
            if flag == FLAG || test != "single" {
                assert_eq!(scene.files(), before.0, "{test}: {flag}");
            }
        }
    }
}

#[test]
fn the_agent_follows_the_list_while_other_tools_write_into_the_directory() {
    let scene = node("agent", "10-podnet.conflist", LIST);
    let directory = scene.path(DIRECTORY);
    let agent = Agent::start(&scene, "a", &[FLAG]);
    agent.wait_for_log("the plugin is ready on this node");
    let copy = scene.read(&format!("{DIRECTORY}/{OWN_LIST}"));
    scene.write(&format!("{DIRECTORY}/podnet/10-mark.conf"), "{");
    fs::remove_dir_all(directory.join("unused")).expect("removed");
    fs::create_dir(directory.join("05-b.conflist")).expect("made");
    scene.write(&format!("{DIRECTORY}/podnet/10-mark.conf"), r#"{"type": "mark", "mtu": 1}"#);
    let changed = LIST.replace("portmap", "bandwidth");
    scene.write(&format!("{DIRECTORY}/10-podnet.conflist"), &changed);
    until("the change", || used(&directory) == Some(crate::cluster_cnis::runtime::compact(&changed)));
    assert_eq!(called(&directory), ["bridge", "bandwidth", "detour", "mark"]);
    assert_eq!(scene.read(&format!("{DIRECTORY}/{OWN_LIST}")), copy.replace("portmap", "bandwidth"));
    assert!(!agent.logged().iter().any(|line| line.contains("keeps reverting")), "{:?}", agent.logged());
}
