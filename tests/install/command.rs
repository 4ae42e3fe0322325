//! The commands `detour install` and `detour uninstall`.

use crate::agent_process::TOKEN;
use crate::scene::{CALICO, KUBECONFIG, LIST, NODE, Scene, program};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use detour_cni::agent::install::default_chain;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

const OPENSHIFT_CONF: &str = "etc/cni/multus/net.d/istio-cni.conf";

fn openshift(name: &str) -> Scene {
    let scene = Scene::with(name, "10-calico.conflist", CALICO);
    fs::create_dir_all(scene.path("etc/machine-config-daemon")).expect("made");
    scene
}

#[test]
fn install_writes_the_program_a_private_kubeconfig_and_an_entry_in_the_list() {
    let scene = Scene::with("chained", "10-calico.conflist", CALICO);
    let config = scene.config("c", &json!({"log_level": "debug", "kubernetes": {"agent_namespace": "istio-system"}}));
    let printed = scene.ok("install", &[&config]);
    assert!(printed.contains("copy this program to /opt/cni/bin/detour"), "{printed}");

    let installed = scene.path("opt/cni/bin/detour");
    let version = Command::new(&installed).env("CNI_COMMAND", "VERSION").output().expect("it runs");
    assert!(version.status.success());
    assert_eq!(fs::read(&installed).expect("read"), fs::read(program()).expect("read"));
    assert_eq!(scene.mode("opt/cni/bin/detour"), 0o755);

    let kubeconfig = scene.json(KUBECONFIG);
    let authority = BASE64_STANDARD.encode(scene.read("sa/ca.crt"));
    let cluster = json!({"server": "https://10.96.0.1:443", "certificate-authority-data": authority});
    assert_eq!(kubeconfig["clusters"][0]["cluster"], cluster);
    assert_eq!(kubeconfig["users"][0]["user"], json!({ "token": TOKEN }));
    assert_eq!(scene.mode(KUBECONFIG), 0o600);

    let list = scene.json(LIST);
    let entry = list["plugins"].as_array().expect("a list").last().expect("a member");
    let kubernetes = json!({
        "kubeconfig": "/var/lib/cni/detour/kubeconfig",
        "cni_bin_dir": "/opt/cni/bin",
        "exclude_namespaces": ["istio-system", "kube-system"],
        "agent_namespace": "istio-system",
    });
    let wanted = json!({
        "type": "detour", "log_level": "debug", "kubernetes": kubernetes, "chain": default_chain(),
        "capabilities": { "dns": true, "io.kubernetes.cri.pod-annotations": true },
    });
    assert_eq!(*entry, wanted);
    assert_eq!(scene.ok("install", &[&config]), "nothing to do\n");
}

#[test]
fn openshift_is_detected_and_gets_a_configuration_file_of_its_own() {
    let scene = openshift("openshift");
    let wanted = "platform openshift (detected): programs in /var/lib/cni/bin, configuration in /etc/cni/multus/net.d";
    scene.reports(0, "install", &["--dry-run"], &[wanted]);
    let wanted = "platform gke: programs in /home/kubernetes/bin";
    scene.reports(0, "install", &["--dry-run", "--platform=gke"], &[wanted]);
    let chain = json!([{"type": "uid-exclude", "uids": ["1337"]}]);
    scene.ok("install", &[&scene.config("c", &json!({"chain": chain, "cniVersion": "0.4.0"}))]);
    let conf = scene.json(OPENSHIFT_CONF);
    assert_eq!(
        (&conf["name"], &conf["type"], &conf["cniVersion"]),
        (&json!("istio-cni"), &json!("detour"), &json!("0.4.0"))
    );
    assert_eq!(conf["chain"], chain);
    assert_eq!(scene.mode(OPENSHIFT_CONF), 0o600);
    assert_eq!(scene.read(LIST), CALICO, "not touched");
    assert!(scene.path("var/lib/cni/bin/detour").exists());
}

#[test]
fn the_version_of_a_primary_configuration_has_check() {
    let scene = Scene::with("primary-version", "10-calico.conflist", CALICO);
    let config = scene.config("c", &json!({"clusterNetwork": "/etc/cni/net.d/10-calico.conflist"}));
    scene.ok("install", &["--chained=false", "--primary=true", "--conf-name=00-detour.conf", &config]);
    assert_eq!(scene.json("etc/cni/net.d/00-detour.conf")["cniVersion"], "1.0.0");
}

#[test]
fn uninstall_removes_what_the_installation_wrote() {
    let scene = openshift("round-trip");
    let before = scene.files();
    scene.ok("install", &["--name=istio-cni", "--name=excludedns"]);
    scene.ok("install", &["--name=istio-cni", &scene.config("c", &json!({"log_level": "debug"}))]);
    assert!(!scene.path("var/lib/cni/bin/excludedns").exists(), "not asked for any more");
    assert!(scene.json(OPENSHIFT_CONF)["log_level"] == "debug");
    assert!(scene.path("var/lib/cni/bin/istio-cni").metadata().expect("there").len() > 1 << 20);
    let record = scene.json("var/lib/cni/detour/install.json");
    assert_eq!(record["platform"], "openshift");
    let roles: Vec<_> = record["files"].as_object().expect("files").values().map(|file| file["role"].clone()).collect();
    assert_eq!(roles, ["configuration", "program", "program", "kubeconfig", "node"]);
    assert!(scene.has_lock());
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files(), before);
    assert_eq!(scene.ok("uninstall", &[]), "nothing to do\n");
    assert!(!scene.has_lock(), "nothing is left");
}

/// A real istio-cni, the file of an operator, a list of the name of the own list, and a node configuration by hand.
#[test]
fn a_file_of_another_owner_is_never_replaced() {
    let foreign = [
        (OPENSHIFT_CONF, r#"{"cniVersion":"0.3.1","name":"istio-cni","type":"istio-cni"}"#, "IstioCNI of an operator"),
        (OPENSHIFT_CONF, r#"{"name":"istio-cni","type":"other"}"#, "a configuration of the plugin \"other\""),
        ("var/lib/cni/bin/istio-cni", "another's program", "install without this name"),
        ("var/lib/cni/detour/node.json", r#"{"pinned": "uid-exclude"}"#, "move its settings to the file of --config"),
    ];
    for (path, text, hint) in foreign {
        let scene = openshift("foreign");
        scene.write(path, text);
        let before = scene.files();
        let wanted = format!("can't write /{path}: it belongs to another owner: ");
        for arguments in [&["--name=istio-cni", "--dry-run"][..], &["--name=istio-cni"]] {
            let parts = [&wanted, hint, "uninstall that tool or remove the file, or "];
            scene.reports(1, "install", arguments, &parts);
        }
        assert_eq!(scene.files(), before, "{path}");
        // It arrives later: what is installed stays as it is.
        fs::remove_file(scene.path(path)).expect("removed");
        scene.ok("install", &["--name=istio-cni"]);
        if path.ends_with("node.json") {
            continue;
        }
        scene.write(path, text);
        let (installed, record) = (scene.files(), scene.read("var/lib/cni/detour/install.json"));
        scene.fails("install", &["--name=istio-cni", &scene.config("c", &json!({"log_level": "debug"}))]);
        assert_eq!(scene.read(path), text);
        let files = scene.files();
        assert_eq!(files.keys().collect::<Vec<_>>(), installed.keys().collect::<Vec<_>>(), "{record}");
        scene.reports(0, "uninstall", &[], &[&format!("/{path} is not reverted: it belongs to another owner now")]);
        let texts =
            |files: BTreeMap<PathBuf, (String, u32)>| files.into_values().map(|(text, _)| text).collect::<Vec<_>>();
        assert_eq!(texts(scene.files()), texts(before));
    }
}

/// Every new pod would fail: Multus waits for the file, or calls it.
#[test]
fn beside_multus_a_single_configuration_is_never_removed() {
    let single = r#"{"cniVersion": "0.4.0", "name": "ovn-kubernetes", "type": "ovn-k8s-cni-overlay"}"#;
    let path = "/etc/cni/net.d/10-ovn-kubernetes.conf";
    let conf = json!({"name": "multus-cni-network", "type": "multus-shim", "readinessindicatorfile": path});
    let conf = conf.to_string();
    for (file, text) in [("etc/cni/net.d/00-multus.conf", conf.as_str()), ("opt/cni/bin/multus-shim", "")] {
        let scene = Scene::with("named", "10-ovn-kubernetes.conf", single);
        scene.write(file, text);
        let before = scene.files();
        let wanted = format!("can't add the plugin to {path}: it is a single configuration");
        scene.reports(1, "install", &["--chained=true"], &[&wanted, "make it a list"]);
        assert_eq!(scene.files(), before, "{file}");
    }
}

/// No pod would start: the runtime would not find the program.
#[test]
fn another_directory_with_the_plugins_of_the_list_is_named_and_nothing_is_installed() {
    let scene = Scene::with("elsewhere", "10-calico.conflist", CALICO);
    scene.write("home/kubernetes/bin/portmap", "");
    let before = scene.files();
    for own_list in ["--own-list=false", "--own-list=true"] {
        let wanted = "has the plugins of /etc/cni/net.d/10-calico.conflist in /home/kubernetes/bin; select this";
        scene.reports(1, "install", &["--platform=kubernetes", own_list], &[wanted]);
        assert_eq!(scene.files(), before);
    }
    scene.ok("install", &["--platform=gke"]);
    scene.write("opt/cni/bin/calico", "");
    scene.ok("install", &["--platform=kubernetes"]);
}

/// As above: some directories of the node are not visible in the agent's pod.
#[test]
fn a_directory_with_other_plugins_but_none_of_the_list_is_refused() {
    let scene = Scene::with("none-of-the-list", "10-calico.conflist", CALICO);
    scene.write("opt/cni/bin/loopback", "");
    let before = scene.files();
    scene.reports(1, "install", &["--platform=kubernetes"], &["/opt/cni/bin has other plugins, but none of /etc/cni/net.d/10-calico.conflist (calico, portmap, bandwidth)", "--bin-dir, cniBinDir"]);
    assert_eq!(scene.files(), before);
    scene.write("opt/cni/bin/calico", "");
    scene.ok("install", &["--platform=kubernetes"]);
}

/// As an agent in a container that mounts other directories than an earlier one.
#[test]
fn what_cannot_be_reached_stays_in_the_record_and_is_named() {
    let scene = openshift("unreachable");
    let chain = "--multus-chain=/run/multus/cni/net.d/vendor-cni-chain";
    scene.ok("install", &[chain, "--bin-dir=/opt/one/bin"]);
    let hide = |hidden: bool| {
        for directory in ["run", "opt/one"] {
            let (shown, away) = (scene.path(directory), scene.root.with_extension(directory.replace('/', "-")));
            let (from, to) = if hidden { (&shown, &away) } else { (&away, &shown) };
            fs::rename(from, to).expect("renamed");
        }
    };
    hide(true);
    for command in [&["install", "--bin-dir=/opt/two/bin"][..], &["uninstall"]] {
        let output = scene.run(command[0], &command[1..]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let names = ["/run/multus/cni/net.d/vendor-cni-chain/detour.conf", "/opt/one/bin/detour"];
        for name in names {
            assert!(stderr.contains(&format!("{name} is not reverted: ")), "{command:?}: {stderr}");
        }
        let directory = "/run/multus/cni/net.d/vendor-cni-chain is not mounted here: mount this directory";
        assert!(stderr.contains(directory) && stderr.contains("`detour uninstall` on the node itself"), "{stderr}");
        let record = scene.json("var/lib/cni/detour/install.json");
        assert!(names.iter().all(|name| record["files"].get(name).is_some()), "{record}");
    }
    hide(false);
    scene.ok("uninstall", &[]);
    assert!(!scene.path("run/multus/cni/net.d/vendor-cni-chain/detour.conf").exists());
    assert!(!scene.path("opt/one/bin/detour").exists() && !scene.path("var/lib/cni/detour/install.json").exists());
}

#[test]
fn edits_of_other_parts_of_the_list_stay() {
    let scene = Scene::with("in-between", "10-calico.conflist", CALICO);
    scene.ok("install", &[]);
    let edited = scene.read(LIST).replace("\"mtu\": 0", "\"mtu\": 1400");
    scene.write(LIST, &edited);
    scene.ok("uninstall", &[]);
    let value = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    assert_eq!(scene.json(LIST), value(&CALICO.replace("\"mtu\": 0", "\"mtu\": 1400")));
}

#[test]
fn an_edited_entry_stays_with_the_files_that_it_needs() {
    let scene = Scene::with("changed", "10-calico.conflist", CALICO);
    scene.ok("install", &[]);
    let edited = scene.read(LIST).replace("\"exclude_namespaces\": [", "\"exclude_namespaces\": [ \"mine\",");
    assert_ne!(edited, scene.read(LIST));
    scene.write(LIST, &edited);
    let parts = [
        "10-calico.conflist is not reverted: another process changed the entry of the plugin \"detour\"",
        "/opt/cni/bin/detour is not reverted: a configuration that was not reverted needs it",
    ];
    scene.reports(1, "uninstall", &[], &parts);
    assert!(scene.has_lock(), "something is left");
    assert_eq!(scene.read(LIST), edited);
    assert!(scene.path("opt/cni/bin/detour").exists());
    scene.ok("install", &[]);
    scene.ok("uninstall", &[]);
    assert_eq!(scene.json(LIST), serde_json::from_str::<Value>(CALICO).expect("JSON"));
}

#[test]
fn a_dry_run_prints_a_patch_without_the_token_and_changes_nothing() {
    let scene = Scene::with("dry", "10-calico.conflist", CALICO);
    let before = scene.files();
    let shown = scene.ok("install", &["--dry-run"]);
    assert_eq!(scene.files(), before);
    assert!(!scene.path("var").exists(), "not even a directory");
    assert!(shown.contains("+      \"type\": \"detour\",\n"), "{shown}");
    assert!(shown.contains("# copy this program to /opt/cni/bin/detour\n"), "{shown}");
    assert!(shown.contains("# write /var/lib/cni/detour/kubeconfig (mode 0600, contents not shown)"), "{shown}");
    assert!(!shown.contains(TOKEN), "{shown}");

    scene.write("shown.patch", &shown);
    let patch = |file: &str| {
        let mut patch = Command::new("patch");
        patch.args(["-p1", "-s", "-i"]).arg(scene.path(file)).arg("-d").arg(&*scene.root);
        assert!(patch.status().expect("patch starts").success());
    };
    patch("shown.patch");
    let patched = scene.read(LIST);
    scene.write(LIST, CALICO);
    scene.ok("install", &[]);
    assert_eq!(scene.read(LIST), patched, "it would have done what it showed");
    scene.write("back.patch", &scene.ok("uninstall", &["--dry-run"]));
    patch("back.patch");
    assert_eq!(scene.json(LIST), serde_json::from_str::<Value>(CALICO).expect("JSON"));
}

#[test]
fn without_a_cluster_network_the_rest_is_installed_and_the_exit_code_is_1() {
    let scene = Scene::with("early", "10-calico.conflist", "{");
    scene.reports(
        1,
        "install",
        &[],
        &[
            "10-calico.conflist: skipped: invalid JSON",
            "missing: the cluster network's configuration in /etc/cni/net.d",
        ],
    );
    assert!(scene.path("opt/cni/bin/detour").exists());
    scene.reports(
        1,
        "install",
        &["--conf-name=20-other.conflist"],
        &["missing: a valid 20-other.conflist in /etc/cni/net.d"],
    );
    scene.write(LIST, CALICO);
    scene.ok("install", &[]);
}

#[test]
fn absolute_links_are_resolved_on_the_node() {
    let scene = Scene::with("links", "10-calico.conflist", CALICO);
    fs::rename(scene.path("etc/cni/net.d"), scene.path("real")).expect("moved");
    symlink("/real", scene.path("etc/cni/net.d")).expect("linked");
    scene.write("multi-call", "all of k3s's plugins");
    fs::create_dir_all(scene.path("opt/cni/bin")).expect("made");
    symlink("../../../multi-call", scene.path("opt/cni/bin/detour")).expect("linked");
    scene.ok("install", &[]);
    assert_eq!(scene.read("multi-call"), "all of k3s's plugins");
    assert_ne!(scene.read("real/10-calico.conflist"), CALICO);
    assert!(fs::symlink_metadata(scene.path("opt/cni/bin/detour")).expect("there").is_file());
}

#[test]
fn a_program_in_use_is_replaced() {
    let scene = Scene::with("busy", "10-calico.conflist", CALICO);
    fs::create_dir_all(scene.path("opt/cni/bin")).expect("made");
    let installed = scene.path("opt/cni/bin/detour");
    fs::copy("/bin/cat", &installed).expect("copied");
    let mut running = Command::new(&installed).stdin(std::process::Stdio::piped()).spawn().expect("it starts");
    scene.ok("install", &[]);
    assert_eq!(fs::read(&installed).expect("read"), fs::read(program()).expect("read"));
    drop(running.stdin.take());
    assert!(running.wait().expect("it ends").success(), "who ran goes on");
}

#[test]
fn owner_and_mode_of_a_list_are_preserved() {
    let scene = Scene::with("owner", "10-calico.conflist", CALICO);
    let list = scene.path(LIST);
    std::os::unix::fs::chown(&list, Some(1234), Some(4321)).expect("root");
    fs::set_permissions(&list, PermissionsExt::from_mode(0o640)).expect("set");
    scene.ok("install", &[]);
    let there = list.metadata().expect("there");
    let owner = (std::os::unix::fs::MetadataExt::uid(&there), std::os::unix::fs::MetadataExt::gid(&there));
    assert_eq!((owner, scene.mode(LIST)), ((1234, 4321), 0o640));
}

#[test]
fn invalid_input_is_reported_before_any_change() {
    let scene = Scene::with("wrong", "10-calico.conflist", CALICO);
    let before = scene.files();
    for (keys, part) in [
        (json!({"chain": [{"type": "uid-exclude", "uids": ["x"]}], "log_level": "loud"}), "log_level"),
        (json!({"type": "excludedns"}), "add --name excludedns"),
        (json!({"chain": [{"type": "uid-exclude", "uids": ["x"]}]}), "chain[0].uids: invalid value \"x\""),
        (json!({"chain": [{"type": "uid-exclud"}]}), "did you mean \"uid-exclude\"?"),
        (json!({"log_file": "/var/log/../../etc/passwd"}), "log_file: invalid value \"/var/log/../../etc/passwd\""),
    ] {
        scene.reports(2, "install", &[&scene.config("c", &keys)], &[part]);
    }
    scene.reports(2, "install", &["--config=/nowhere.json"], &["can't read --config"]);
    assert_eq!(scene.files(), before);
    let ends = |arguments: &[&str], part: &str| {
        let root = format!("--root={}", scene.root.display());
        let mut command = Command::new(program());
        let output = command.args(["install", &root]).args(arguments).env_clear().output().expect("it starts");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && stderr.contains(part), "{stderr}");
    };
    ends(&["--service-account=/nowhere", "--api-server=https://x"], "/nowhere/ca.crt");
    ends(&["--dry-run"], "--kubeconfig FILE");
}

#[test]
fn the_name_of_the_network_is_refused_where_it_has_no_effect() {
    let scene = openshift("network");
    let config = scene.config("c", &json!({"name": "mine"}));
    scene.ok("install", &[&config]);
    assert_eq!(scene.json(OPENSHIFT_CONF)["name"], "mine");
    scene.reports(
        2,
        "install",
        &[&config, "--chained=true", "--dry-run"],
        &["--config: name: it has an effect only with --chained=false"],
    );
}

#[test]
fn keys_that_select_sub_plugins_replace_the_default_chain() {
    let scene = Scene::with("chain", "10-calico.conflist", CALICO);
    for (keys, wanted) in [
        (json!({"log_file": "/var/log/detour.log"}), Some(default_chain())),
        (json!({"chain": null}), Some(default_chain())),
        (json!({"chain": []}), Some(json!([]))),
        (json!({"type": "excludedns"}), None),
        (json!({"clusterNetwork": "ovn"}), None),
    ] {
        scene.ok("install", &[&scene.config("c", &keys), "--name=excludedns"]);
        let list = scene.json(LIST);
        let own = list["plugins"].as_array().expect("a list").last().expect("a member").get("chain").cloned();
        assert_eq!(own, wanted, "{keys}");
    }
}

#[test]
fn the_node_configuration_has_the_node_wide_settings_of_the_plugins_configuration() {
    let scene = Scene::with("node", "10-calico.conflist", CALICO);
    let before = scene.files();
    let chain = json!([{"type": "istio-redirect", "pod_overrides": false}, {"type": "uid-exclude"}]);
    let kubernetes = json!({"agent_namespace": "istio-system"});
    let config = json!({"chain": &chain, "log_file": "/var/log/detour.log", "kubernetes": kubernetes});
    let config = scene.config("c", &config);
    let shown = scene.ok("install", &["--dry-run", &config]);
    assert!(shown.contains("+++ b/var/lib/cni/detour/node.json"), "{shown}");
    assert!(shown.contains("+    \"cni_bin_dir\": \"/opt/cni/bin\","), "{shown}");
    scene.ok("install", &[&config]);
    let wanted = json!({
        "log_file": "/var/log/detour.log", "delegate_timeout_seconds": 60,
        "kubernetes": {
            "kubeconfig": "/var/lib/cni/detour/kubeconfig", "cni_bin_dir": "/opt/cni/bin", "timeout_seconds": 10,
            "agent_namespace": "istio-system", "agent_pod_prefixes": ["detour-agent-", "istio-cni-node-"],
            "exclude_namespaces": ["istio-system", "kube-system"],
        },
        "chain": chain,
        "pinned": ["istio-redirect"], "attachments_may_exclude_namespaces": false, "primary": false,
    });
    assert_eq!((scene.json(NODE), scene.mode(NODE)), (wanted, 0o600));

    // Drift is repaired, and uninstall removes the file.
    scene.write(NODE, "{}");
    assert!(scene.ok("install", &[&config]).contains("write /var/lib/cni/detour/node.json"));
    assert_eq!(scene.json(NODE)["pinned"], json!(["istio-redirect"]));
    scene.ok("uninstall", &[]);
    assert_eq!(scene.files(), before);
}

#[test]
fn a_program_directory_of_another_user_causes_a_warning() {
    let scene = Scene::with("kubespray", "10-calico.conflist", CALICO);
    fs::create_dir_all(scene.path("opt/cni/bin")).expect("made");
    std::os::unix::fs::chown(scene.path("opt/cni/bin"), Some(1001), None).expect("root");
    scene.reports(
        0,
        "install",
        &[],
        &["opt/cni/bin is owned by UID 1001", "run on the node: chown -R root:root /opt/cni/bin"],
    );
}

#[test]
fn another_mesh_plugin_in_the_list_causes_a_warning() {
    let list = json!({"name": "n", "plugins": [{"type": "a"}, {"type": "istio-cni"}]}).to_string();
    let scene = Scene::with("both", "10-x.conflist", &list);
    scene.reports(0, "install", &[], &["plugin \"istio-cni\" in the same list also redirects traffic"]);
}

#[test]
fn the_installation_record_is_private_and_an_invalid_one_is_reported() {
    let scene = Scene::with("log", "10-calico.conflist", CALICO);
    scene.ok("install", &[]);
    assert_eq!(scene.mode("var/lib/cni/detour/install.json"), 0o600);
    let log: Value = scene.json("var/lib/cni/detour/install.json");
    assert_eq!(log["files"]["/etc/cni/net.d/10-calico.conflist"]["role"], "entry", "{log}");
    scene.write("var/lib/cni/detour/install.json", "{");
    scene.reports(1, "uninstall", &[], &["/var/lib/cni/detour/install.json: invalid installation record"]);
    scene.reports(0, "install", &[], &["the next installation replaces it"]);
    scene.ok("uninstall", &[]);
    assert_eq!(scene.json(LIST), serde_json::from_str::<Value>(CALICO).expect("JSON"));
}

#[test]
fn a_missing_root_is_refused_and_not_created() {
    let scene = Scene::new("root");
    let root = scene.path("misspelled");
    for command in ["install", "agent", "uninstall", "doctor"] {
        let output =
            Command::new(program()).args([command, "--root"]).arg(&root).env_clear().output().expect("it starts");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{command}: {stderr}");
        assert!(stderr.contains(&format!("--root {}: expected a directory", root.display())), "{command}: {stderr}");
        assert!(!root.exists(), "{command}");
    }
}
