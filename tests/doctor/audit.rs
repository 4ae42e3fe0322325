//! `detour audit`: real packets, real rules, and what the report says about them.

use crate::api::PROXY;
use crate::compare;
use crate::faults::{add_entry, chained, istio_cni};
use crate::pod::Netns;
use crate::programs::DETOUR;
use crate::scene::{CONF, Plan, Scene, scene};
use detour_cni::inspect::audit::{AuditReport, AuditedPod, Bypass};
use serde_json::{Value, json};
use std::process::Command;

const APP: u32 = 1_000_650_000;
const EXCLUDED_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";

#[track_caller]
fn audit(scene: &Scene, arguments: &[&str]) -> AuditReport {
    let output = scene.command("audit", &[arguments, &["-o", "json"]].concat());
    let report: AuditReport = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert_eq!(output.status.code(), Some(i32::from(!report.is_clean())), "{report:#?}");
    report
}

#[track_caller]
fn only_pod(report: &AuditReport) -> &AuditedPod {
    assert_eq!(report.pods.len(), 1, "{report:#?}");
    &report.pods[0]
}

#[track_caller]
fn bypass<'a>(pod: &'a AuditedPod, traffic: &str) -> &'a Bypass {
    let found = pod.bypasses.iter().find(|bypass| bypass.traffic.contains(traffic));
    found.unwrap_or_else(|| panic!("no {traffic:?} in {pod:#?}"))
}

#[track_caller]
fn assert_counted(pod: &AuditedPod, traffic: &str, packets: u64, source: &str) {
    let found = bypass(pod, traffic);
    assert_eq!((found.packets, found.source.as_str()), (Some(packets), source), "{pod:#?}");
    assert!(found.bytes.is_some_and(|bytes| bytes >= 20 * packets), "{found:?}");
}

/// Returns a copy of the scene's pod under another name, with its own UID.
fn another(pod: &Value, namespace: &str, name: &str) -> Value {
    let mut pod = pod.clone();
    for (key, value) in [("namespace", namespace), ("name", name), ("uid", &format!("uid-of-{name}"))] {
        pod["metadata"][key] = value.into();
    }
    pod
}

#[test]
fn exclusions_have_the_connections_that_they_let_pass() {
    for (dialect, table) in [("iptables", "ip nat"), ("nftables", "inet detour-nat")] {
        let mut plan = Plan::new();
        plan.config["dialect"] = dialect.into();
        // The guard's own rules for the same traffic are no exclusions.
        plan.config["chain"].as_array_mut().expect("a chain").push(json!({"type": "mesh-guard"}));
        plan.cluster.annotate(EXCLUDED_PORTS, "3306");
        plan.cluster.annotate("detour.io/exclude-uids", "2000,3000");
        scene(plan, |scene| {
            assert_eq!(
                audit(scene, &[]),
                AuditReport { node: Some("node-1".into()), checked: 1, ..AuditReport::default() }
            );
            for _ in 0..3 {
                scene.netns.connect(2000, "192.0.2.1:80");
            }
            scene.netns.connect(APP, "192.0.2.1:3306");
            // Captured, and the sidecar's own.
            scene.netns.connect(APP, "192.0.2.1:80");
            scene.netns.connect(PROXY, "192.0.2.1:80");
            let report = audit(scene, &[]);
            let pod = only_pod(&report);
            assert_eq!((pod.namespace.as_str(), pod.pod.as_str(), pod.redirected), ("shop", "web-0", true));
            assert_eq!(pod.reason, "redirected by detour, for network istio-cni");
            assert_eq!((pod.bypasses.len(), &pod.drift, &pod.error), (2, &Vec::new(), &None), "{pod:#?}");
            // One rule for all UIDs has one counter.
            assert_counted(pod, "meta skuid { 1337, 2000, 3000 }", 3, "inet detour-exclusions DETOUR_OUTPUT");
            assert_counted(pod, "dport 3306 ", 1, &format!("{table} ISTIO_OUTPUT"));
            assert!(pod.bypasses.iter().all(|one| one.counts == "connections"));
            assert_eq!(audit(scene, &["-n", "shop"]), report);
            let all = audit(scene, &["--all"]);
            let unused = only_pod(&all).bypasses.iter().filter(|one| one.packets == Some(0)).count();
            assert_eq!(only_pod(&all).bypasses.len(), unused + 2, "{all:#?}");
            if dialect == "iptables" {
                let text = String::from_utf8(scene.command("audit", &[]).stdout).expect("text");
                compare("audit", &text);
            }
        });
    }
}

#[test]
fn exclusions_in_the_settings_of_the_redirection_are_listed() {
    let mut plan = Plan::new();
    plan.config["chain"] = json!([{"type": "istio-redirect", "owner_groups_exclude": ["7"]}, {"type": "dns-exclude"}]);
    plan.config["dialect"] = "nftables".into();
    plan.cluster.annotate("detour.io/exclude-dns", "192.0.2.53");
    plan.cluster.annotate("traffic.sidecar.istio.io/excludeInterfaces", "net7");
    plan.cluster.annotate("traffic.sidecar.istio.io/excludeInboundPorts", "8080");
    plan.cluster.annotate("traffic.sidecar.istio.io/excludeOutboundIPRanges", "198.51.100.0/24");
    scene(plan, |scene| {
        scene.netns.connect(APP, "198.51.100.1:80");
        scene.netns.send(APP, "192.0.2.53:53");
        let report = audit(scene, &["--all"]);
        let pod = only_pod(&report);
        assert_counted(pod, "198.51.100.0/24", 1, "inet detour-nat ISTIO_OUTPUT");
        assert_counted(pod, "192.0.2.53", 1, "inet detour-exclusions DETOUR_OUTPUT");
        for part in ["meta skgid", "ifname \"net7\"", "8080"] {
            assert!(!bypass(pod, part).by_other_program, "{pod:#?}");
        }
    });
}

/// As beside Istio's CNI plugin in the cluster network's configuration list.
#[test]
fn an_entry_of_another_tool_in_the_configuration_list_does_not_hide_detours_configuration() {
    let mut plan = Plan::new();
    chained(&mut plan);
    plan.cluster.annotate(EXCLUDED_PORTS, "3306");
    scene(plan, |scene| {
        add_entry(scene, &istio_cni());
        scene.netns.connect(APP, "192.0.2.1:3306");
        let report = audit(scene, &[]);
        assert_counted(only_pod(&report), "--dport 3306 ", 1, "ip nat ISTIO_OUTPUT");
        scene.netns.run("iptables -t nat -F");
        let report = audit(scene, &[]);
        let reason = &only_pod(&report).reason;
        assert_eq!(reason, "not redirected: the rules for network c are missing");
    });
}

#[test]
fn every_packet_of_inbound_connections_is_counted_under_tproxy() {
    let mut plan = Plan::new();
    plan.cluster.annotate("sidecar.istio.io/interceptionMode", "TPROXY");
    plan.cluster.annotate("traffic.sidecar.istio.io/excludeInboundPorts", "8080");
    scene(plan, |scene| {
        let report = audit(scene, &["--all"]);
        assert_eq!(bypass(only_pod(&report), "8080").counts, "packets");
    });
}

#[test]
fn drift_is_listed() {
    scene(Plan::new(), |scene| {
        scene.netns.run("iptables -t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT");
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        assert!(!report.is_clean() && pod.redirected, "inbound connections are redirected: {pod:#?}");
        assert_eq!(pod.drift, ["missing: ip nat ISTIO_OUTPUT -j ISTIO_REDIRECT"]);

        scene.netns.run("iptables -t nat -F");
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        assert!(!pod.redirected && pod.drift.len() == 11, "{pod:#?}");
        assert_eq!(pod.reason, "not redirected: the rules for network istio-cni are missing");
        assert!(pod.drift[10].starts_with("and ") && pod.drift[10].ends_with(" more; see detour rules"), "{pod:#?}");
    });
}

/// Before any packet too: the first one bypasses the sidecar.
#[test]
fn a_rule_of_another_program_that_lets_traffic_bypass_is_not_clean() {
    let mut plan = Plan::new();
    plan.cluster.annotate(EXCLUDED_PORTS, "3306");
    scene(plan, |scene| {
        scene.netns.connect(APP, "192.0.2.1:3306");
        let report = audit(scene, &[]);
        assert!(report.is_clean() && !only_pod(&report).bypasses[0].by_other_program, "an exclusion: {report:#?}");
        scene.netns.run("iptables -t nat -I OUTPUT -p tcp -j ACCEPT");
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        assert!(!report.is_clean() && pod.redirected && pod.drift.is_empty(), "{report:#?}");
        let first = &pod.bypasses[0];
        assert!(first.by_other_program && first.packets == Some(0), "first, despite its packets: {pod:#?}");
        assert_eq!(first.source, "a rule of another program: OUTPUT -p tcp -j ACCEPT");
        assert!(pod.bypasses[1..].iter().all(|one| !one.by_other_program), "{pod:#?}");
        let text = String::from_utf8(scene.command("audit", &[]).stdout).expect("text");
        compare("audit-other-program", &text);
    });
}

/// As those of VPN clients and virtual machine launchers: their chains run before the redirection.
#[test]
fn nat_chains_of_other_programs_before_the_redirection_are_not_clean() {
    for dialect in ["iptables", "nftables"] {
        for (hook, priority) in [("output", -150), ("output", -101), ("prerouting", -150), ("prerouting", -101)] {
            let mut plan = Plan::new();
            plan.config["dialect"] = dialect.into();
            scene(plan, |scene| {
                assert!(audit(scene, &[]).is_clean());
                scene.netns.run("nft add table ip vpn");
                let chain = format!("{{ type nat hook {hook} priority {priority} ; }}");
                scene.netns.run(&format!("nft -- add chain ip vpn first {chain}"));
                scene.netns.run("nft add rule ip vpn first tcp dport 80 dnat to 198.51.100.1:1194");
                let report = audit(scene, &[]);
                let pod = only_pod(&report);
                assert!(!report.is_clean() && pod.redirected, "{dialect}, {hook} {priority}: {report:#?}");
                let chain = format!("chain first of table ip vpn with priority {priority}");
                assert!(pod.drift.iter().any(|line| line.ends_with(&chain)), "{pod:#?}");
            });
        }
    }
}

#[test]
fn a_family_without_rules_differs_from_the_desired_rules() {
    let mut plan = Plan::new();
    plan.is_dual = true;
    scene(plan, |scene| {
        scene.netns.run("ip6tables -t nat -F");
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        assert!(!report.is_clean() && pod.drift[0].starts_with("missing: ip6 nat "), "{pod:#?}");
    });
}

/// The rules of istio-init with its defaults and `-o 3306`, as `iptables-save` prints them.
const ISTIO_INIT: &str = "*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15090 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp -m tcp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -p udp -m udp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
";

#[test]
fn rules_of_istio_init_are_audited_too() {
    let mut plan = Plan::new();
    plan.is_added = false;
    plan.cluster.annotate(EXCLUDED_PORTS, "3306");
    plan.cluster.pod["spec"]["initContainers"] = json!([{"name": "istio-init"}]);
    scene(plan, |scene| {
        scene.write("rules", ISTIO_INIT);
        scene.netns.run(&format!("iptables-restore {}", scene.path("rules").display()));
        scene.netns.connect(APP, "192.0.2.1:3306");
        let report = audit(scene, &["--all"]);
        let pod = only_pod(&report);
        assert!(report.is_clean() && pod.bypasses.is_empty(), "its exclusions are not known: {pod:#?}");
        assert_eq!(pod.reason, "redirected by rules of another tool, such as istio-init or Istio's CNI plugin");
    });
}

/// With the rules that Istio's own code writes.
#[test]
fn pods_in_the_ambient_mesh_need_the_rules_of_istio_cni_and_a_listener() {
    let mut plan = Plan::new();
    plan.config["chain"] = json!([{"type": "uid-exclude"}]);
    plan.cluster.annotate("detour.io/exclude-uids", "2000");
    plan.proxy.1 = &[];
    let pod = &mut plan.cluster.pod;
    pod["metadata"]["labels"] = json!({"istio.io/dataplane-mode": "ambient"});
    pod["metadata"]["annotations"].as_object_mut().expect("an object").remove("sidecar.istio.io/status");
    pod["spec"]["containers"].as_array_mut().expect("an array").retain(|one| one["name"] != "istio-proxy");
    scene(plan, |scene| {
        let enrolled = "not redirected: label istio.io/dataplane-mode of the pod is ambient, but ";
        let ports = [15001, 15006, 15008];
        let listeners = ports.map(|port| format!("ztunnel's listener on port {port}")).join(", ");
        let reason = || only_pod(&audit(scene, &["--all"])).reason.clone();
        assert_eq!(reason(), format!("{enrolled}the pod lacks istio-cni's redirection, {listeners}"));
        scene.write("changes.nft", include_str!("../golden/ambient.nft"));
        scene.netns.run(&format!("nft -f {}", scene.path("changes.nft").display()));
        assert_eq!(reason(), format!("{enrolled}the pod lacks {listeners}"));
        let listen = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).expect("it listens");
        let _ztunnel = scene.netns.within(|| ports.map(listen));
        scene.netns.connect(2000, "192.0.2.1:80");
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        assert!(report.is_clean() && pod.redirected && pod.drift.is_empty(), "{pod:#?}");
        assert_eq!(pod.reason, "redirected to ztunnel by istio-cni: tables inet istio-ambient-*");
        assert_counted(pod, "meta skuid 2000", 1, "inet detour-exclusions DETOUR_OUTPUT");
    });
}

#[test]
fn pods_without_redirection_are_listed_with_the_reason() {
    scene(Plan::new(), |scene| {
        let mut namespaces = Vec::new();
        let mut add = |name: &str, change: &dyn Fn(&mut Value)| {
            let mut cluster = scene.cluster.lock().expect("unpoisoned");
            let mut pod = another(&cluster.pod, "shop", name);
            change(&mut pod);
            namespaces.push(Netns::new(&scene.path(&format!("run/netns/{name}")), false, 0));
            scene.keep_result_of(&pod, name);
            cluster.more_pods.push(pod);
        };
        add("late", &|_| ());
        add("mode-none", &|pod| {
            pod["metadata"]["annotations"]["sidecar.istio.io/interceptionMode"] = "NONE".into();
        });
        add("not-selected", &|pod| {
            drop(pod["metadata"]["annotations"].as_object_mut().expect("it").remove("k8s.v1.cni.cncf.io/networks"))
        });
        add("excluded", &|pod| pod["metadata"]["namespace"] = "kube-system".into());
        add("on-host", &|pod| pod["spec"]["hostNetwork"] = true.into());
        add("invalid", &|pod| pod["metadata"]["annotations"][EXCLUDED_PORTS] = "x".into());
        add("refused", &|pod| {
            pod["spec"]["containers"].as_array_mut().expect("a list").pop();
            pod["metadata"]["labels"] = json!({"sidecar.istio.io/inject": "false"});
        });
        add("elsewhere", &|pod| pod["spec"]["nodeName"] = "node-2".into());
        add("ended", &|pod| pod["status"]["phase"] = "Succeeded".into());
        let mut gone = another(&scene.cluster.lock().expect("unpoisoned").pod, "shop", "gone");
        gone["metadata"]["uid"] = "other".into();
        let mut pending = gone.clone();
        (pending["metadata"]["name"], pending["status"]["phase"]) = ("pending".into(), "Pending".into());
        {
            let mut cluster = scene.cluster.lock().expect("unpoisoned");
            cluster.more_pods.extend([gone, pending]);
            cluster.namespace["metadata"]["labels"] = json!({"istio-injection": "enabled"});
        }
        let report = audit(scene, &[]);
        let lines: Vec<String> = report
            .pods
            .iter()
            .map(|pod| format!("{}: {}", pod.pod, pod.error.as_deref().unwrap_or(&pod.reason)))
            .collect();
        let expected = [
            "excluded: not redirected: namespace kube-system is excluded",
            "gone: network namespace not found on this node",
            "invalid: not redirected: an ADD of this pod would fail: annotation \
             \"traffic.sidecar.istio.io/excludeOutboundPorts\"",
            "late: not redirected: the plugin did not run for this pod, or ",
            "mode-none: not redirected: the interception mode is NONE",
            "not-selected: not redirected: the pod does not select network istio-cni",
            "on-host: not redirected: the pod uses the host network (hostNetwork)",
            "refused: no sidecar: injection is requested (istio-injection=enabled), but the pod refuses it",
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:#?}");
        for (line, expected) in lines.iter().zip(expected) {
            assert!(line.starts_with(expected), "{line}\nexpected {expected}");
        }
        assert_eq!(report.checked, expected.len() + 1, "and web-0: {report:#?}");
        assert!(report.pods.iter().all(|pod| !pod.redirected && pod.bypasses.is_empty()));
    });
}

/// As after a boot without facts, or if the injector's annotation is added later: the saved state has no rules.
#[test]
fn a_pod_with_a_sidecar_that_started_without_rules_is_listed() {
    let mut plan = Plan::new();
    let annotations = plan.cluster.pod["metadata"]["annotations"].as_object_mut().expect("annotations");
    let status = annotations.remove("sidecar.istio.io/status").expect("it is injected");
    scene(plan, |scene| {
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        assert!(!pod.redirected && pod.reason.contains("annotation sidecar.istio.io/status is missing"), "{pod:#?}");
        scene.cluster.lock().expect("unpoisoned").annotate("sidecar.istio.io/status", status);
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        let wanted = "not redirected: the plugin did not run for this pod, or the pod had no sidecar then";
        assert!(!pod.redirected && pod.reason.starts_with(wanted), "{pod:#?}");
    });
}

#[test]
fn a_pod_without_rules_is_explained_with_all_attachments_of_its_node() {
    let mut plan = Plan::new();
    plan.is_added = false;
    scene(plan, |scene| {
        let mut other = scene.json(CONF);
        other["name"] = "other".into();
        scene.write("etc/cni/multus/net.d/other.conf", &other.to_string());
        let report = audit(scene, &[]);
        let pod = only_pod(&report);
        assert!(pod.reason.starts_with("not redirected: the plugin did not run for this pod"), "{pod:#?}");
    });
}

/// The process in the pod can add rules; neither their number nor their text affects other pods or the terminal.
#[test]
fn a_hostile_pod_does_not_hide_others_or_reach_the_terminal() {
    scene(Plan::new(), |scene| {
        let hostile = another(&scene.cluster.lock().expect("unpoisoned").pod, "shop", "hostile");
        let netns = Netns::new(&scene.path("run/netns/hostile"), false, 0);
        scene.keep_result_of(&hostile, "hostile");
        scene.cluster.lock().expect("unpoisoned").more_pods.push(hostile);
        let flood = format!("*nat\n{}COMMIT\n", "-A OUTPUT -p tcp --dport 1 -j ACCEPT\n".repeat(70_000));
        scene.write("flood", &flood);
        netns.run(&format!("iptables-restore {}", scene.path("flood").display()));

        scene.netns.run("iptables -t nat -I OUTPUT -o \u{1b}[31m+ -p tcp -j RETURN");
        scene.netns.run("iptables -t nat -I OUTPUT -p tcp --dport 9 -j RETURN");
        scene.netns.connect(APP, "192.0.2.1:9");
        let report = audit(scene, &["--all"]);
        let error = report.pods[0].error.as_deref().unwrap_or_default();
        assert!(report.pods.len() == 2 && error.contains("expected at most"), "{report:#?}");
        assert_counted(
            &report.pods[1],
            "--dport 9 ",
            1,
            "a rule of another program: OUTPUT -p tcp -m tcp --dport 9 -j RETURN",
        );
        let text = String::from_utf8(scene.command("audit", &["--all"]).stdout).expect("text");
        assert!(text.contains("\\u{1b}[31m") && !text.contains('\u{1b}'), "{text}");
    });
}

#[test]
fn errors_name_the_missing_right_name_or_server() {
    let run = |scene: &Scene, arguments: &[&str]| {
        let output = scene.command("audit", arguments);
        (output.status.code(), String::from_utf8(output.stderr).expect("text"))
    };
    let mut plan = Plan::new();
    plan.cluster.denied = vec!["list pods"];
    scene(plan, |scene| {
        for (arguments, right) in [(&[][..], "list pods"), (&["-n", "shop"], "list pods in namespace shop")] {
            let (code, error) = run(scene, arguments);
            assert!(code == Some(1) && error.contains("lack the permission to") && error.contains(right), "{error}");
        }
    });
    scene(Plan::new(), |scene| {
        std::fs::remove_file(scene.path("etc/hostname")).expect("removed");
        let (code, error) = run(scene, &[]);
        assert!(code == Some(1) && error.contains("add --node-name"), "{error}");
        let (code, error) = run(scene, &["--node-name", "a/b"]);
        assert!(code == Some(1) && error.contains("invalid object name \"a/b\""), "{error}");
        std::fs::remove_file(scene.path(crate::scene::KUBECONFIG)).expect("removed");
        let (code, error) = run(scene, &["--node-name", "node-1"]);
        assert!(code == Some(1) && error.contains("use kubectl detour"), "{error}");
        for arguments in [&["pod"][..], &["--conf", "/no/such"]] {
            assert_eq!(run(scene, arguments).0, Some(2), "{arguments:?}");
        }
    });
    let help = Command::new(&*DETOUR).args(["audit", "--help"]).output().expect("it starts");
    assert!(String::from_utf8_lossy(&help.stdout).contains("Exit codes: "), "{help:?}");
}

#[test]
fn every_field_is_documented() {
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reports.md")).expect("readable");
    let (_, section) = docs.split_once("\n## `audit`\n").expect("a section");
    let section = section.split("\n## ").next().expect("one at least");
    let report = AuditReport {
        pods: vec![AuditedPod { bypasses: vec![Bypass::default()], ..AuditedPod::default() }],
        ..AuditReport::default()
    };
    let report = serde_json::to_value(report).expect("JSON");
    for object in [&report, &report["pods"][0], &report["pods"][0]["bypasses"][0]] {
        for field in object.as_object().expect("an object").keys() {
            assert!(section.contains(&format!("`{field}`")), "docs/reports.md: {field}");
        }
    }
}
