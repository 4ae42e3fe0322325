//! How the doctor is called, what it prints, and the capabilities that it needs.

use crate::compare;
use crate::containers::{Containers, plan};
use crate::programs::DETOUR;
use crate::scene::{CONF, POD, Plan, Scene, line, scene};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

fn probed(scene: &Scene) -> Value {
    scene.report(&[&POD[..], &["--probe"]].concat())
}

#[track_caller]
fn found<'a>(report: &'a Value, id: &str, expected: &str) -> &'a str {
    let (outcome, found, _) = line(report, id);
    assert_eq!(outcome, expected, "{id}: {found}");
    found
}

#[test]
fn nothing_is_wrong_with_a_node_that_has_everything() {
    scene(Plan::new(), |scene| {
        compare("healthy", &scene.printed(&POD));
        compare("healthy-probed", &scene.printed(&[&POD[..], &["--probe"]].concat()));
    });
}

#[test]
fn the_node_is_looked_at_without_a_pod() {
    scene(Plan::new(), |scene| {
        let whole = scene.report(&POD);
        for arguments in [&[][..], &["--node"]] {
            let report = scene.report(arguments);
            assert_eq!(
                (&report["pod"], &report["node"], &report["healthy"]),
                (&Value::Null, &"node-1".into(), &true.into())
            );
            let checks = report["checks"].as_array().expect("checks");
            let groups: BTreeSet<&str> = checks.iter().filter_map(|c| c["group"].as_str()).collect();
            assert_eq!(groups, ["cluster", "kernel", "node", "policies"].into());
            // About a pod, the policies of other pods are not listed.
            let common: Vec<&Value> = checks.iter().filter(|c| c["group"] != "policies").collect();
            let all: Vec<&Value> = whole["checks"].as_array().expect("checks").iter().take(common.len()).collect();
            assert_eq!(common, all);
        }
    });
}

#[test]
fn the_nodes_keys_count_and_not_those_of_an_attachment() {
    scene(Plan::new(), |scene| {
        let redirected = || {
            let report = scene.report(&POD);
            let (outcome, found, _) = line(&report, "redirected");
            (outcome.to_owned(), found.to_owned())
        };
        let before = redirected();
        assert_eq!(before.0, "pass");
        let mut conf = scene.json(CONF);
        conf["kubernetes"]["exclude_namespaces"] = serde_json::json!(["shop"]);
        scene.write(CONF, &conf.to_string());
        assert_eq!(redirected(), before);
        fs::remove_file(scene.path("var/lib/cni/detour/node.json")).expect("it was installed");
        assert_ne!(redirected(), before, "without a node configuration they count");
    });
}

#[test]
fn real_packets_are_captured_and_spared_as_the_policy_wants() {
    for dialect in ["iptables", "nftables"] {
        let mut plan = Plan::new();
        plan.config["dialect"] = dialect.into();
        plan.is_dual = true;
        scene(plan, |scene| {
            let lines = probed(scene);
            let both = |id: &str, v4: &str, v6: &str| {
                let text = found(&lines, id, "pass");
                for wanted in ["to 192.0.2.", v4, "to [2001:db8::", v6] {
                    assert!(text.contains(wanted), "{dialect}: {id}: {wanted}: {text}");
                }
            };
            both("probe-captured", "went to 127.0.0.1:15001", "went to [::1]:15001");
            both("probe-captured", "went to 127.0.0.1:15053", "went to [::1]:15053");
            both("probe-excluded", "UID 1337, ", "went directly");
            both("probe-excluded", "went directly", "with 1 entry");
            assert!(!found(&lines, "probe-excluded", "pass").contains(" entries"), "{lines:?}");
        });
    }
}

/// A pod with `hostUsers: false`: what it calls uid 2000 is another user to the node.
#[test]
fn a_pods_own_users_are_counted_as_it_does() {
    let mut plan = Plan::new();
    plan.config["dialect"] = "auto".into();
    (plan.root_is, plan.proxy.0) = (200_000, 2000);
    let containers = &mut plan.cluster.pod["spec"]["containers"];
    for (container, uid) in [(0, 1000), (1, 2000)] {
        containers[container]["securityContext"] = serde_json::json!({"runAsUser": uid, "runAsGroup": uid});
    }
    scene(plan, |scene| {
        let report = probed(scene);
        for (id, wanted) in [
            ("proxy-listening", "UID 2000"),
            ("rules-equal", "format nftables"),
            ("probe-captured", "UID 1000, GID 1000"),
            ("probe-excluded", "UID 1337, "),
        ] {
            let found = found(&report, id, "pass");
            assert!(found.contains(wanted), "{id}: {found}");
        }
    });
}

#[test]
fn a_probe_needs_no_listening_proxy() {
    let mut plan = Plan::new();
    plan.proxy.1 = &[];
    plan.config["chain"] = json!([{"type": "istio-redirect"}]);
    scene(plan, |scene| {
        let lines = probed(scene);
        found(&lines, "probe-captured", "pass");
        // The sidecar's own traffic shows nothing about exclusions.
        found(&lines, "probe-excluded", "not-checked");
    });
}

#[test]
fn a_rule_that_lets_go_shows_in_real_packets() {
    scene(Plan::new(), |scene| {
        scene.netns.run("iptables -t nat -I OUTPUT -p tcp -j RETURN");
        let lines = probed(scene);
        let outbound = found(&lines, "probe-captured", "fail");
        assert!(outbound.contains("went directly") && outbound.ends_with("expected sidecar:15001"), "{outbound}");
        found(&lines, "probe-excluded", "pass");
    });
    // A chain before the exclusions.
    scene(Plan::new(), |scene| {
        scene.netns.run("nft add table ip early");
        scene.netns.run("nft add chain ip early out { type nat hook output priority -150; }");
        scene.netns.run("nft add rule ip early out meta skuid 4242 tcp dport 9 redirect to :9");
        let report = scene.report(&POD).to_string();
        assert!(report.contains("chain out of table ip early with priority -150"), "{report}");
        found(&probed(scene), "probe-excluded", "not-checked");
    });
}

#[test]
fn elsewhere_it_says_what_to_run_and_where() {
    let mut plan = Plan::new();
    plan.cluster.pod["spec"]["nodeName"] = "worker-7".into();
    plan.is_added = false;
    scene(plan, |scene| {
        fs::remove_dir_all(scene.path("var/lib/cni/results")).expect("removed");
        let report = scene.report(&POD);
        assert_eq!(report["healthy"], true, "{report:#}");
        let lines = report["checks"].as_array().expect("checks");
        let (outcome, found, next) = line(&report, "netns-found");
        assert_eq!((outcome, found), ("not-checked", "it does not run on this node"));
        assert!(next.contains("on node worker-7; run kubectl detour doctor -n shop web-0, "), "{next}");
        assert!(next.contains("oc debug node/worker-7 -- chroot /host DIR/detour doctor -n shop web-0"), "{next}");
        let of_sandbox = |l: &&Value| l["group"] == "sandbox";
        assert!(lines.iter().filter(of_sandbox).all(|l| l["outcome"] == "not-checked"), "{report:#}");
    });
}

#[test]
fn every_field_and_every_check_is_documented() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let read = |name: &str| fs::read_to_string(path.join(name)).expect("readable");
    let (reports, doctor) = (read("reports.md"), read("troubleshoot.md"));
    let (_, section) = reports.split_once("\n## `doctor`\n").expect("a section");
    let section = section.split("\n## ").next().expect("one at least");
    let mut plan = plan();
    plan.cluster.annotate("traffic.sidecar.istio.io/excludeInterfaces", "eth9");
    scene(plan, |scene| {
        let _containers = Containers::new(scene);
        let report = scene.report(&[&POD[..], &["--probe"]].concat());
        let line = report["checks"][0].as_object().expect("an object");
        for field in report.as_object().expect("an object").keys().chain(line.keys()) {
            assert!(section.contains(&format!("`{field}`")), "docs/reports.md: {field}");
        }
        let ids: BTreeSet<&str> =
            report["checks"].as_array().expect("checks").iter().filter_map(|check| check["id"].as_str()).collect();
        assert!(ids.contains("containers-bypass") && ids.len() <= 35, "{ids:?}");
        for check in report["checks"].as_array().expect("checks") {
            let id = check["id"].as_str().expect("text");
            assert!(doctor.contains(&format!("`{id}`")), "docs/troubleshoot.md: {id}");
            let group = check["group"].as_str().expect("text");
            assert!(section.contains(&format!("`{group}`")), "docs/reports.md: {group}");
        }
    });
}

/// As an earlier version installed it.
#[test]
fn a_log_file_elsewhere_is_a_warning() {
    scene(Plan::new(), |scene| {
        const NODE: &str = "var/lib/cni/detour/node.json";
        let mut conf = scene.json(NODE);
        conf["log_file"] = "/etc/hostname".into();
        scene.write(NODE, &conf.to_string());
        let report = scene.report(&POD);
        let found = found(&report, "configuration-valid", "warn");
        assert!(found.contains("log_file: ") && found.contains("expected a path below /var/log"), "{found}");
    });
}

/// As the agent's container has them.
fn shipped() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/openshift/rendered.yaml");
    let objects: Vec<Value> = serde_saphyr::from_multiple(&fs::read_to_string(path).expect("readable")).expect("YAML");
    let daemon_set = objects.iter().find(|object| object["kind"] == "DaemonSet").expect("a DaemonSet");
    let context = &daemon_set["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    serde_json::from_value(context["capabilities"]["add"].clone()).expect("names")
}

/// Returns the result of each check of a doctor with these capabilities.
fn outcomes(root: &Path, capabilities: &[String]) -> Vec<(String, String, String)> {
    let bounds = capabilities.iter().map(|name| format!(",+{}", name.to_lowercase())).collect::<String>();
    let output = Command::new("setpriv")
        .arg(format!("--bounding-set=-all{bounds}"))
        .arg(&*DETOUR)
        .args(["doctor", "--probe", "-o", "json", "--root"])
        .arg(root)
        .args(POD)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .output()
        .expect("setpriv starts");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
    let lines = report["checks"].as_array().expect("checks").iter();
    lines.map(|line| (text(line, "id"), text(line, "outcome"), text(line, "found"))).collect()
}

#[test]
fn the_agents_container_has_all_that_it_needs() {
    scene(Plan::new(), |scene| {
        let mut lines = outcomes(&scene.root, &shipped());
        // There is no journal, and nothing was sent before.
        lines.retain(|(id, ..)| id != "runtime-log");
        let others: Vec<_> = lines.iter().filter(|(_, outcome, _)| outcome != "pass").collect();
        assert!(others.is_empty() && lines.len() > 25, "{others:?}");
    });
}

#[test]
fn who_may_not_send_as_others_finds_no_fault_with_the_pod() {
    let capabilities: Vec<_> = shipped().into_iter().filter(|name| name != "SETUID" && name != "SETGID").collect();
    scene(Plan::new(), |scene| {
        let lines = outcomes(&scene.root, &capabilities);
        let failed: Vec<_> = lines.iter().filter(|(_, outcome, _)| outcome == "fail").collect();
        assert!(failed.is_empty(), "{failed:?}");
        let of = |id: &str| lines.iter().find(|(own, ..)| own == id).expect("a line");
        let (_, outcome, found) = of("probe-excluded");
        assert!(outcome == "not-checked" && found.contains("CAP_SETUID"), "{outcome}: {found}");
    });
}
