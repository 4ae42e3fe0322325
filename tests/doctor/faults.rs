//! One thing wrong at a time: exactly the line about it fails, what needs it is not checked and says so, and
//! all others are as on a node that has everything. What was printed is in `tests/golden/doctor.md`.

use crate::api::{PROXY, event, token};
use crate::compare;
use crate::programs::OLDER;
use crate::scene::{BIN, CONF, KUBECONFIG, POD, Plan, Scene, scene};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// What is wrong, by its name in the golden file; the line that must fail; what is otherwise before the
/// installation, and after it.
type Fault = (&'static str, &'static str, fn(&mut Plan), fn(&Scene));

const AS_IS: fn(&mut Plan) = |_| ();
const NOTHING: fn(&Scene) = |_| ();

const PROGRAMS: [Fault; 7] = [
    ("program-of-another-user", "program-trusted", AS_IS, |scene| give(scene, "var/lib/cni/bin/detour")),
    ("program-directory-of-another-user", "program-trusted", AS_IS, |scene| give(scene, "var/lib/cni/bin")),
    ("binary-missing", "program-present", AS_IS, |scene| fs::remove_file(scene.path(BIN)).expect("removed")),
    ("binary-a-directory", "program-present", AS_IS, |scene| {
        fs::remove_file(scene.path(BIN)).expect("removed");
        fs::create_dir(scene.path(BIN)).expect("made");
    }),
    ("binary-not-executable", "program-present", AS_IS, |scene| mode(scene, BIN, 0o644)),
    ("binary-of-another-machine", "program-present", AS_IS, |scene| {
        let mut bytes = fs::read(scene.path(BIN)).expect("readable");
        // `e_machine` (elf.h): EM_S390.
        bytes[18] = 22;
        fs::write(scene.path(BIN), bytes).expect("written");
    }),
    ("binary-of-another-version", "program-present", AS_IS, |scene| scene.put_program(&OLDER)),
];

const CONFIGURATIONS: [Fault; 9] = [
    ("node-configuration-broken", "node-configuration", AS_IS, |scene| scene.write(NODE, "{")),
    ("node-configuration-of-another-user", "node-configuration", AS_IS, |scene| give(scene, NODE)),
    ("conf-missing", "configuration-present", AS_IS, |scene| fs::remove_file(scene.path(CONF)).expect("removed")),
    ("conf-not-json", "configuration-present", AS_IS, |scene| scene.write(CONF, "{\"type\": \"detour\",")),
    ("conf-wrong-key", "configuration-valid", AS_IS, |scene| edit(scene, |conf| conf["dialect"] = "pf".into())),
    ("conf-of-another-name", "definition-leads", |plan| plan.config["name"] = "other".into(), NOTHING),
    ("conf-edited", "installation", AS_IS, |scene| edit(scene, |conf| conf["log_level"] = "debug".into())),
    ("conf-not-picked", "configuration-picked", chained, |scene| {
        let other = json!({"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "bridge"}]});
        scene.write("etc/cni/multus/net.d/00-other.conflist", &other.to_string());
    }),
    ("ambient", "configuration-valid", |plan| plan.config["ambient_enabled"] = true.into(), NOTHING),
];

const NODE: &str = "var/lib/cni/detour/node.json";

fn give(scene: &Scene, path: &str) {
    std::os::unix::fs::chown(scene.path(path), Some(1001), None).expect("root");
}

const CLUSTER: [Fault; 9] = [
    ("kubeconfig-missing", "kubeconfig-valid", AS_IS, |scene| {
        fs::remove_file(scene.path(KUBECONFIG)).expect("removed")
    }),
    ("kubeconfig-open-to-all", "kubeconfig-valid", AS_IS, |scene| mode(scene, KUBECONFIG, 0o644)),
    ("kubeconfig-of-another-user", "kubeconfig-valid", AS_IS, |scene| {
        std::os::unix::fs::chown(scene.path(KUBECONFIG), Some(12345), None).expect("root")
    }),
    ("kubeconfig-broken", "kubeconfig-valid", AS_IS, |scene| scene.write(KUBECONFIG, "clusters: [")),
    ("token-expired", "kubeconfig-valid", |plan| plan.token = token(1_700_000_000), NOTHING),
    ("api-down", "api-reachable", |plan| (plan.api_is_up, plan.is_added) = (false, false), NOTHING),
    ("permission-missing", "permissions", |plan| plan.cluster.denied.push("get namespaces"), NOTHING),
    ("permission-to-pods-missing", "permissions", |plan| plan.cluster.denied.push("get pods"), NOTHING),
    (
        "agent-down",
        "agent-reachable",
        |plan| {
            plan.config["kubernetes"] = json!({"agent_socket": "/run/detour/no-agent.sock"});
        },
        NOTHING,
    ),
];

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";

const PODS: [Fault; 8] = [
    ("pod-unknown", "pod-known", AS_IS, |scene| {
        *scene.cluster.lock().expect("unpoisoned") = crate::api::Cluster::empty();
    }),
    ("reference-without-namespace", "definition-found", |plan| plan.cluster.annotate(NETWORKS, "istio-cni"), NOTHING),
    ("definition-missing", "definition-found", |plan| plan.cluster.definitions.clear(), NOTHING),
    (
        "annotation-syntax",
        "annotation-valid",
        |plan| plan.cluster.annotate(NETWORKS, "default/istio-cni, a/b/c"),
        NOTHING,
    ),
    ("annotation-missing", "plugin-attached", |plan| plan.cluster.annotate(NETWORKS, ""), NOTHING),
    (
        "namespace-excluded",
        "redirected",
        |plan| plan.config["kubernetes"]["exclude_namespaces"] = json!(["shop"]),
        NOTHING,
    ),
    (
        "not-injected",
        "redirected",
        |plan| {
            plan.cluster.pod["spec"]["containers"].as_array_mut().expect("an array").truncate(1);
        },
        NOTHING,
    ),
    (
        "never-started",
        "events",
        |plan| {
            plan.is_added = false;
            plan.cluster.pod["status"] = json!({"phase": "Pending"});
            plan.cluster.events = vec![event("FailedCreatePodSandBox", NEVER_STARTED)];
        },
        gone,
    ),
];

const NEVER_STARTED: &str = "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to create pod network \
    sandbox k8s_web-0_shop_0(1): error adding pod shop_web-0 to CNI network \"multus-cni-network\": [shop/web-0:istio-cni]: \
    error adding container to network \"istio-cni\": failed to find plugin \"istio-cni\" in path [/var/lib/cni/bin]";

const SANDBOXES: [Fault; 10] = [
    ("netns-gone", "netns-found", AS_IS, gone),
    ("rules-flushed", "rules-equal", AS_IS, |scene| scene.netns.run("nft flush ruleset")),
    ("rule-removed", "rules-equal", AS_IS, |scene| scene.netns.run("iptables -t nat -D ISTIO_OUTPUT 3")),
    ("rule-inserted-in-ours", "rules-equal", AS_IS, |scene| {
        scene.netns.run("iptables -t nat -I ISTIO_OUTPUT -p tcp --dport 9999 -j RETURN");
    }),
    ("rule-inserted-in-front", "rules-first", AS_IS, |scene| {
        scene.netns.run("iptables -t nat -I OUTPUT -p tcp --dport 3306 -j RETURN");
    }),
    (
        "fixture-removed",
        "rules-equal",
        |plan| plan.cluster.annotate("sidecar.istio.io/interceptionMode", "TPROXY"),
        |scene| {
            scene.netns.run("ip rule del fwmark 1337 lookup 133");
        },
    ),
    (
        "default-route-excluded",
        "default-route-captured",
        |plan| plan.cluster.annotate("traffic.sidecar.istio.io/excludeInterfaces", "eth0"),
        NOTHING,
    ),
    ("plugin-never-ran", "rules-equal", |plan| plan.is_added = false, NOTHING),
    ("proxy-not-listening", "proxy-listening", |plan| plan.proxy.1 = &[15006, 15053], NOTHING),
    ("proxy-of-another-user", "proxy-listening", |plan| plan.proxy.0 = PROXY - 1, NOTHING),
];

fn mode(scene: &Scene, within: &str, mode: u32) {
    fs::set_permissions(scene.path(within), fs::Permissions::from_mode(mode)).expect("changed");
}

pub(crate) fn edit(scene: &Scene, change: impl FnOnce(&mut Value)) {
    let mut conf = scene.json(CONF);
    change(&mut conf);
    scene.write(CONF, &conf.to_string());
}

/// As a member of a list, which is there already.
pub(crate) fn chained(plan: &mut Plan) {
    plan.lists
        .push(("10-cluster.conflist", json!({"cniVersion": "1.0.0", "name": "c", "plugins": [{"type": "bridge"}]})));
    plan.install.push("--chained=true".into());
    plan.cluster.annotate(NETWORKS, "");
}

pub(crate) const LIST: &str = "etc/cni/multus/net.d/10-cluster.conflist";

/// Returns an entry of Istio's CNI plugin, whose type is one of detour's too.
pub(crate) fn istio_cni() -> Value {
    json!({"type": "istio-cni", "log_level": "info", "kubernetes": {"exclude_namespaces": ["kube-system"]}})
}

/// Adds an entry of another tool to the cluster network's list.
pub(crate) fn add_entry(scene: &Scene, entry: &Value) {
    let mut list = scene.json(LIST);
    list["plugins"].as_array_mut().expect("a list").insert(1, entry.clone());
    scene.write(LIST, &list.to_string());
}

/// The namespace, and what is kept of it.
fn gone(scene: &Scene) {
    nix::mount::umount2(&scene.path("run/netns/pod"), nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
}

/// Outcome and text of each line, by its ID.
fn lines(report: &Value) -> BTreeMap<String, (String, String)> {
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
    let checks = report["checks"].as_array().expect("checks");
    checks.iter().map(|line| (text(line, "id"), (text(line, "outcome"), text(line, "found")))).collect()
}

/// Returns the IDs of the checks that fail, in the printed report.
pub(crate) fn failed(text: &str) -> Vec<&str> {
    let failed = text.split_once("\nFailed\n").into_iter().flat_map(|(_, list)| list.lines());
    failed.filter_map(|line| line.strip_prefix("  FAIL  ")?.split(' ').next()).collect()
}

fn play(faults: &[Fault]) {
    for (name, wanted, before, after) in faults {
        let mut plan = Plan::new();
        before(&mut plan);
        scene(plan, |scene| {
            after(scene);
            let text = scene.printed(&POD);
            assert_eq!(failed(&text), [*wanted], "{name}: {text}");
            assert!(text.contains("\n        next: "), "{name}: {text}");
            compare(name, &text);
        });
    }
}

#[test]
fn programs() {
    play(&PROGRAMS);
}

#[test]
fn configurations() {
    play(&CONFIGURATIONS);
}

#[test]
fn the_way_to_the_cluster() {
    play(&CLUSTER);
}

#[test]
fn pods() {
    play(&PODS);
}

#[test]
fn sandboxes() {
    play(&SANDBOXES);
}

/// Runtimes skip it.
#[test]
fn a_list_without_plugins_is_not_the_one_that_runtimes_use() {
    let mut plan = Plan::new();
    chained(&mut plan);
    scene(plan, |scene| {
        let list = r#"{"cniVersion": "1.0.0", "name": "other"}"#;
        scene.write("etc/cni/multus/net.d/00-other.conflist", list);
        assert_eq!(lines(&scene.report(&[]))["configuration-picked"].0, "pass");
    });
}

/// The directory is the runtime's, and the platform's default is a configuration list.
#[test]
fn a_plain_attachment_is_no_entry_of_the_cluster_networks_list() {
    let mut plan = Plan::new();
    plan.cluster.annotate(NETWORKS, "");
    scene(plan, |scene| {
        let found = lines(&scene.report(&POD));
        let line = |id: &str| (found[id].0.as_str(), found[id].1.as_str());
        assert_eq!(line("plugin-attached"), ("fail", "the pod's annotation names no network of this plugin"));
        assert_eq!(line("redirected"), ("not-checked", "because plugin-attached failed"));
    });
}

#[test]
fn a_chain_that_an_add_would_reject_makes_a_configuration_invalid() {
    let redirect = |on: bool| json!({"type": "istio-redirect", "drop_invalid": on});
    for (blocks, expected) in [
        (vec![json!({"type": "exclude-backup"})], None),
        (vec![json!({"type": "exclude-backups"})], Some("chain[3].type: \"exclude-backups\" is not a sub-plugin, and")),
        (
            vec![json!({"type": "istio-redirect", "owner_groups_include": ["no-such-group"]})],
            Some("chain[3].owner_groups_include: invalid value"),
        ),
        (vec![redirect(true), redirect(false)], Some(" contradict each other")),
    ] {
        let (outcome, text) = scene(Plan::new(), |scene| {
            scene.write("etc/group", "root:x:0:\n");
            scene.write("var/lib/cni/bin/exclude-backup", "");
            edit(scene, |conf| conf["chain"].as_array_mut().expect("an array").extend(blocks));
            lines(&scene.report(&[]))["configuration-valid"].clone()
        });
        assert_eq!(outcome, if expected.is_some() { "fail" } else { "pass" }, "{text}");
        assert!(text.contains(expected.unwrap_or_default()), "{text}");
    }
}

/// The installation record names the entry of detour; the others are those of other tools.
#[test]
fn only_the_recorded_entry_of_a_configuration_list_is_a_configuration() {
    let mut plan = Plan::new();
    chained(&mut plan);
    scene(plan, |scene| {
        let valid = || lines(&scene.report(&POD))["configuration-valid"].clone();
        let text = "network c, type detour in 10-cluster.conflist: istio-redirect, uid-exclude, dns-exclude";
        let expected = ("pass".to_owned(), text.to_owned());
        assert_eq!(valid(), expected);
        add_entry(scene, &istio_cni());
        assert_eq!(valid(), expected);
        let report = scene.report(&POD);
        assert_eq!(report["healthy"], true, "{report:#}");
    });
}
