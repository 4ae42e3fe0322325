//! The report of `explain` for each decision, compared with `tests/golden/explain.md`. Set `UPDATE_GOLDEN` to
//! write it, and read the differences before you commit it.

use crate::run::{detour, file};
use serde_json::{Value, json};

/// A pod as OpenShift and Istio's injector modify it.
pub(crate) fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web-0", "namespace": "shop",
            "annotations": { "sidecar.istio.io/status": "{}", "k8s.v1.cni.cncf.io/networks": "default/istio-cni" }
        },
        "spec": {
            "initContainers": [{ "name": "vault-agent-init", "securityContext": { "runAsUser": 1337 } }],
            "containers": [
                { "name": "web", "securityContext": { "runAsUser": 1000650000 } },
                {
                    "name": "istio-proxy", "args": ["proxy", "sidecar"],
                    "env": [{ "name": "ISTIO_META_DNS_CAPTURE", "value": "true" }],
                    "securityContext": { "runAsUser": 1000659999, "runAsGroup": 1000659999 }
                }
            ]
        }
    })
}

fn namespace(name: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {
            "name": name,
            "annotations": {
                "openshift.io/sa.scc.uid-range": "1000650000/10000",
                "detour.io/exclude-gids": "55"
            }
        }
    })
}

pub(crate) fn conf() -> Value {
    json!({
        "cniVersion": "1.1.0", "name": "istio-cni", "type": "detour",
        "kubernetes": { "kubeconfig": "/k", "exclude_namespaces": ["kube-system"], "agent_namespace": "mesh" },
        "chain": [
            { "type": "istio-redirect" },
            { "type": "uid-exclude", "uids": ["1337"] },
            { "type": "dns-exclude", "uids": ["1337"] }
        ]
    })
}

/// A test case: its name in the golden file, and a function that changes the pod and the configuration above.
pub(crate) type Case = (&'static str, fn(&mut Value, &mut Value));

pub(crate) fn annotate(pod: &mut Value, key: &str, value: &str) {
    pod["metadata"]["annotations"][key] = value.into();
}

pub(crate) const CASES: [Case; 21] = [
    ("redirected", |_, _| ()),
    ("warnings", |pod, _| {
        annotate(pod, "traffic.sidecar.istio.io/excludeOutboundIPRanges", "203.0.113.0/24");
        annotate(pod, "traffic.sidecar.istio.io/excludeOutboundPorts", "9090");
        annotate(pod, "traffic.sidecar.istio.io/excludeInboundPorts", "9090");
        annotate(pod, "detour.io/exclude-uids", "1000650000");
        annotate(pod, "traffic.sidecar.istio.io/excludeInboundPort", "8080");
        pod["metadata"]["labels"] = json!({ "sidecar.istio.io/inject": "yess" });
        let init = json!({ "name": "migrate", "securityContext": { "runAsUser": 7 } });
        pod["spec"]["initContainers"].as_array_mut().expect("an array").push(init);
    }),
    ("tproxy-by-annotation", |pod, conf| {
        annotate(pod, "sidecar.istio.io/interceptionMode", "TPROXY");
        conf["chain"][0]["outbound_ports_exclude"] = "22,6379".into();
        conf["args"] = json!({ "cni": { "istio-redirect": { "exclude_interfaces": "net1" } } });
    }),
    ("namespace-excluded", |pod, _| pod["metadata"]["namespace"] = "kube-system".into()),
    ("agents-own", |pod, _| {
        (pod["metadata"]["namespace"], pod["metadata"]["name"]) = ("mesh".into(), "detour-agent-x".into());
    }),
    ("not-in-chain", |_, conf| drop(conf["chain"].as_array_mut().expect("an array").remove(0))),
    ("without-a-source-of-facts", |pod, conf| {
        drop(pod["spec"]["containers"].as_array_mut().expect("an array").pop());
        drop(conf["chain"].as_array_mut().expect("an array").remove(0));
        conf["kubernetes"]["kubeconfig"] = Value::Null;
    }),
    ("host-network", |pod, _| pod["spec"]["hostNetwork"] = true.into()),
    ("istio-init", |pod, _| pod["spec"]["initContainers"][0]["name"] = "istio-init".into()),
    ("no-proxy", |pod, _| drop(pod["spec"]["containers"].as_array_mut().expect("an array").pop())),
    ("envoy-disabled", |pod, _| {
        pod["spec"]["containers"][1]["env"][0] = json!({ "name": "DISABLE_ENVOY", "value": "true" });
    }),
    ("not-a-sidecar", |pod, _| pod["spec"]["containers"][1]["args"][1] = "router".into()),
    ("injection-refused", |pod, _| pod["metadata"]["labels"] = json!({ "sidecar.istio.io/inject": "false" })),
    ("not-injected", |pod, _| {
        drop(pod["metadata"]["annotations"].as_object_mut().expect("annotations").remove("sidecar.istio.io/status"))
    }),
    ("not-selected", |pod, _| annotate(pod, "k8s.v1.cni.cncf.io/networks", "shop/alt-net, storage@data0")),
    // Istio's injector makes the sidecar the first init container.
    ("native-sidecar", |pod, conf| {
        let mut proxy = pod["spec"]["containers"].as_array_mut().expect("an array").pop().expect("a proxy");
        proxy["restartPolicy"] = "Always".into();
        let init = ["migrate", "log"].map(|name| json!({ "name": name, "securityContext": { "runAsUser": 7 } }));
        let [migrate, mut log] = init;
        log["restartPolicy"] = "Always".into();
        let init = pod["spec"]["initContainers"].as_array_mut().expect("an array");
        init.splice(0..0, [json!({ "name": "early" }), json!({ "name": "permissions" }), proxy]);
        init.extend([migrate, log]);
        conf["chain"]
            .as_array_mut()
            .expect("an array")
            .push(json!({ "type": "container-exclude", "containers": "permissions" }));
    }),
    ("excluded-by-istio", |pod, _| {
        annotate(pod, "traffic.sidecar.istio.io/excludeOutboundPorts", "25,465");
        annotate(pod, "traffic.sidecar.istio.io/excludeInboundPorts", "9000");
        annotate(pod, "traffic.sidecar.istio.io/includeOutboundIPRanges", "10.0.0.0/8");
        annotate(pod, "traffic.sidecar.istio.io/excludeInterfaces", "net1");
    }),
    ("destinations", |pod, conf| {
        annotate(pod, "detour.io/exclude-outbound-ports", "3306");
        annotate(pod, "detour.io/exclude-outbound-ip-ranges", "10.20.0.0/16, fd20::/16");
        conf["chain"].as_array_mut().expect("an array").push(json!({ "type": "destination-exclude" }));
    }),
    ("outside-the-bounds", |pod, conf| {
        annotate(pod, "detour.io/exclude-uids", "1000650000,0-9");
        annotate(pod, "detour.io/exclude-dns", "resolv-conf");
        conf["allow"] = json!([{"gids": 55}, {"uids": "namespace-range", "namespaces": "shop"}]);
        conf["chain"][2]["allow"] = json!({});
        conf["outside_bounds"] = json!("ignore");
        conf["kubernetes"]["cluster_dns"] = json!(["10.96.0.10"]);
    }),
    ("ambient", ambient),
    ("mode-none", |pod, _| annotate(pod, "sidecar.istio.io/interceptionMode", "NONE")),
];

/// A pod in the ambient mesh that excludes UID 0, a port and a container.
pub(crate) fn ambient(pod: &mut Value, conf: &mut Value) {
    drop(pod["spec"]["containers"].as_array_mut().expect("an array").pop());
    pod["metadata"]["annotations"] = json!({
        "detour.io/exclude-outbound-ports": "3306",
        "traffic.sidecar.istio.io/excludeOutboundPorts": "3306",
        "k8s.v1.cni.cncf.io/networks": "default/istio-cni",
    });
    pod["metadata"]["labels"] = json!({ "istio.io/dataplane-mode": "ambient" });
    conf["chain"] = json!([
        { "type": "uid-exclude", "uids": [0] },
        { "type": "container-exclude", "containers": "init-containers" },
        { "type": "destination-exclude" },
    ]);
}

/// With ztunnel in place of the sidecar.
#[test]
fn the_picture_and_traces_of_an_ambient_pod_show_ztunnel() {
    let svg = explain("ambient-picture", ambient, &["--format", "svg"]).stdout;
    for text in [">ztunnel<", ">15001<", ">15053<", ">15006<", "port 3306"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    assert!(!svg.contains("istio-proxy"), "{svg}");
    let (mut pod, mut conf) = (pod(), conf());
    ambient(&mut pod, &mut conf);
    let conf = file("ambient.conf", &conf.to_string());
    for (from, to, expected) in [
        ("uid=1000650000", "192.0.2.1:443/tcp", "ztunnel:15001"),
        ("uid=1000650000", "10.96.0.10:53/udp", "ztunnel:15053"),
        ("uid=1000650000", "192.0.2.1:3306/tcp", "direct"),
        ("uid=0", "[2001:db8::1]:443/tcp", "direct"),
        ("inbound", "10.88.0.2:8080/tcp", "ztunnel:15006"),
        ("inbound", "10.88.0.2:8080/tcp", "direct"),
    ] {
        if (from, expected) == ("inbound", "direct") {
            annotate(&mut pod, "ambient.istio.io/bypass-inbound-capture", "true");
        }
        let arguments = ["trace", "-f", "-", "--config", &conf, "--from", from, "--to", to, "-o", "json"];
        let trace = detour(&arguments, &pod.to_string(), &[]).json();
        assert_eq!(trace["arrives_at"], expected, "{from} {to}: {trace:#}");
    }
    let bypass = |pod: &mut Value, conf: &mut Value| {
        ambient(pod, conf);
        annotate(pod, "ambient.istio.io/bypass-inbound-capture", "true");
    };
    let svg = explain("ambient-inbound", bypass, &["--format", "svg"]).stdout;
    assert!(svg.contains(">15001<") && !svg.contains(">15006<"), "{svg}");
    let notes = explain("ambient-inbound", bypass, &["-o", "json"]).json()["notes"].to_string();
    assert!(notes.contains("bypass-inbound-capture is true: inbound connections bypass ztunnel"), "{notes}");
}

/// Multus runs a file in the directory of its network's name for every pod.
#[test]
fn a_file_of_multus_chain_applies_to_pods_that_select_no_network() {
    let (mut pod, mut conf) = (pod(), conf());
    annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", "other/network");
    conf["name"] = json!("vendor-cni-chain");
    let conf = |place: &str| file(place, &conf.to_string());
    for (place, redirected) in [("vendor-cni-chain/detour.conf", true), ("elsewhere/detour.conf", false)] {
        let report = detour(&["explain", "-f", "-", "--config", &conf(place), "-o", "json"], &pod.to_string(), &[]);
        assert_eq!(report.json()["redirected"], redirected, "{place}: {report:?}");
        assert_eq!(report.stdout.contains("--config vendor-cni-chain/FILE.conf"), !redirected, "{report:?}");
    }
}

pub(crate) fn explain(name: &str, case: fn(&mut Value, &mut Value), more: &[&str]) -> crate::run::Run {
    let (mut pod, mut conf) = (pod(), conf());
    case(&mut pod, &mut conf);
    let (conf, namespace) = (
        file(&format!("{name}.conf"), &conf.to_string()),
        file("namespace.json", &namespace(&pod["metadata"]["namespace"]).to_string()),
    );
    let arguments = ["explain", "-f", "-", "--config", &conf, "--namespace-file", &namespace];
    detour(&[&arguments, more].concat(), &pod.to_string(), &[])
}

#[track_caller]
pub(crate) fn compare(case: &str, found: &str) {
    crate::support::golden::compare("explain.md", "redirected", case, &without_directories(found));
}

/// Returns the text without the directories of temporary files.
fn without_directories(text: &str) -> String {
    let start = std::env::temp_dir().join("detour-inspect-").display().to_string();
    let mut parts = text.split(&start);
    let first = parts.next().unwrap_or_default().to_owned();
    first + &parts.map(|part| part.split_once('/').map_or(part, |(_, rest)| rest)).collect::<String>()
}

#[test]
fn every_decision_is_explained() {
    for (name, case) in CASES {
        let run = explain(name, case, &[]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{name}");
        compare(name, &run.stdout);
    }
}

#[test]
fn json_and_yaml_have_the_same_content() {
    let (name, case) = CASES[1];
    let json = explain(name, case, &["-o", "json"]);
    // The directory of the configuration differs in each run.
    let place = |report: &Value| report["configuration"]["places"][0].as_str().expect("a path").to_owned();
    let mut report = json.json();
    compare("warnings.json", &json.stdout.replace(&place(&report), "warnings.conf"));
    let yaml = explain(name, case, &["-o", "yaml"]);
    let read: Value = serde_saphyr::from_str(&yaml.stdout).expect("YAML");
    report["configuration"]["places"][0] = place(&read).into();
    report["networks"][0]["leads_to"] = place(&read).into();
    assert_eq!(read, report);
}

#[test]
fn only_the_last_condition_can_be_unmet() {
    for (name, case) in CASES {
        let report = explain(name, case, &["-o", "json"]).json();
        let holds: Vec<bool> =
            report["considered"].as_array().expect("rules").iter().map(|rule| rule["holds"] == true).collect();
        let (last, before) = holds.split_last().expect("a rule");
        assert!(before.iter().all(|holds| *holds), "{name}: {report}");
        assert_eq!(*last, report["redirected"] == true, "{name}: {report}");
        assert_eq!(
            report["settings"].as_array().expect("settings").is_empty(),
            report["redirected"] == false,
            "{name}"
        );
    }
}

#[test]
fn invalid_annotations_fail_as_in_an_add() {
    let run = explain("wrong", |pod, _| annotate(pod, "detour.io/exclude-uids", "root"), &[]);
    let mut invalid = pod();
    annotate(&mut invalid, "detour.io/exclude-uids", "root");
    assert_eq!((run.code, run.stderr.as_str()), (1, ""));
    let cause = "annotation \"detour.io/exclude-uids\" of pod shop/web-0: invalid value \"root\"; ";
    assert!(run.stdout.starts_with(&format!("an ADD fails: {cause}")), "{}", run.stdout);
    assert!(run.stdout.contains("\nPod shop/web-0 is not redirected: it does not start\n"), "{}", run.stdout);
    let (pod, conf) = (invalid.to_string(), file("invalid.conf", &conf().to_string()));
    let run = detour(&["explain", "-f", "-", "--config", &conf, "-o", "json"], &pod, &[]);
    let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
    assert!(run.code == 1 && report["add_fails"].as_str().is_some_and(|why| why.starts_with(cause)), "{run:?}");
    let svg = detour(&["explain", "-f", "-", "--config", &conf, "--format", "svg"], &pod, &[]);
    assert!(svg.code == 1 && svg.stdout.contains(">an ADD fails: annotation"), "{svg:?}");
    let packet = ["trace", "-f", "-", "--config", &conf, "--from", "uid=1", "--to", "1.2.3.4:5/tcp"];
    let trace = detour(&packet, &pod, &[]);
    assert!(trace.code == 1 && trace.stdout.starts_with(&format!("an ADD fails: {cause}")), "{trace:?}");
}

#[test]
fn dialect_iptables_fails_for_a_pod_with_its_own_users() {
    let own_users: fn(&mut Value, &mut Value) = |pod, conf| {
        pod["spec"]["hostUsers"] = false.into();
        conf["dialect"] = "iptables".into();
    };
    let run = explain("own-users", own_users, &["-o", "json"]);
    let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
    assert_eq!((run.code, &report["warnings"][0]["code"]), (1, &json!("add-fails")));
    let any: fn(&mut Value, &mut Value) = |pod, _| pod["spec"]["hostUsers"] = false.into();
    assert_eq!(explain("own-users-any", any, &[]).code, 0);
}

#[test]
fn a_configuration_without_a_source_of_facts_fails_as_in_an_add() {
    let without: fn(&mut Value, &mut Value) = |_, conf| conf["kubernetes"]["kubeconfig"] = Value::Null;
    let run = explain("without-source", without, &["-o", "json"]);
    let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
    assert_eq!((run.code, run.stderr.as_str(), &report["redirected"]), (1, "", &json!(true)));
    assert_eq!(report["warnings"][0]["code"], "add-fails");
    let what = "the configuration has no source of pod facts";
    assert_eq!(report["warnings"][0]["what"], what);
    for more in [["--rules", "nft"], ["--format", "svg"]] {
        let run = explain("without-source", without, &more);
        assert!(run.code == 1 && !run.stdout.is_empty() && run.stderr.contains(what), "{run:?}");
    }
    let several = json!({ "kind": "List", "items": [pod(), pod()] }).to_string();
    let conf = file("none.conf", &json!({ "name": "istio-cni", "type": "detour" }).to_string());
    assert_eq!(detour(&["explain", "-f", "-", "--config", &conf], &several, &[]).code, 1);
    assert_eq!(detour(&["explain", "-f", "-"], &several, &[]).code, 0, "the built-in defaults are not a configuration");
}

/// The answer first, and no setting that has its default.
#[test]
fn the_report_about_a_pod_fits_on_a_screen_with_the_answer_first() {
    let conf = |name: &str| format!("{}/conf/{name}", env!("CARGO_MANIFEST_DIR"));
    let (pod, config) = (conf("openshift-vault-pod.yaml"), conf("openshift-vault.conf"));
    let of = |more: &[&str], columns: &str| {
        let run = detour(&[&["explain", "-f", &pod, "--config", &config], more].concat(), "", &[("COLUMNS", columns)]);
        assert_eq!(run.code, 0, "{run:?}");
        run.stdout
    };
    let text = of(&[], "80");
    assert!(text.lines().count() <= 25, "{text}");
    assert!(
        text.starts_with("Pod shop/web-0 is redirected: the pod has an injected sidecar\nConfiguration: "),
        "{text}"
    );
    assert!(!text.contains("  default\n") && text.contains("--all"), "{text}");
    let place = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
    assert!(place("Bypasses the sidecar") < place("Init containers"), "{text}");
    assert!(place("Init containers") < place("Settings that differ"), "{text}");
    let all = of(&["--all"], "10000");
    assert!(all.contains("  proxy_port") && all.contains("\nWhy\n") && all.contains("\nRequests\n"), "{all}");
}

#[test]
fn many_exclusions_are_one_line_and_an_id_of_no_container_is_named() {
    let many: fn(&mut Value, &mut Value) = |_, conf| {
        let uids: Vec<String> = (0..1500).map(|index| (2000 + 2 * index).to_string()).collect();
        conf["chain"][1]["uids"] = json!(uids);
    };
    let text = explain("many", many, &[]).stdout;
    assert!(text.contains("  1,500 UIDs: 2000, 2002, 2004, … (--all)"), "{text}");
    assert!(explain("many-all", many, &["--all"]).stdout.contains("uid 4998"));
    let unknown: fn(&mut Value, &mut Value) = |_, conf| conf["chain"][1]["uids"] = json!(["4711", "1337", "5000-5009"]);
    let text = explain("unknown-id", unknown, &[]).stdout;
    let line = |who: &str| text.lines().find(|line| line.contains(who)).unwrap_or_else(|| panic!("{who}: {text}"));
    for who in ["uid 4711", "uid 5000-5009"] {
        assert!(line(who).contains("no container has this ID"), "{text}");
    }
    assert!(!line("uid 1337").contains("no container"), "{text}");
}

#[test]
fn the_rule_format_is_that_of_an_add() {
    for (change, format, hop) in [
        ((|_, _| ()) as fn(&mut Value, &mut Value), "iptables, the default, if the kernel has it", "-j ISTIO_OUTPUT"),
        (|_, conf| conf["dialect"] = "nftables".into(), "nftables, set by dialect", "jump ISTIO_OUTPUT"),
        (
            |pod, _| pod["spec"]["hostUsers"] = false.into(),
            "nftables, because the pod has its own",
            "jump ISTIO_OUTPUT",
        ),
    ] {
        let text = explain("format", change, &[]).stdout;
        assert!(text.contains(&format!("\nRule format: {format}")), "{text}");
        let (mut pod, mut conf) = (pod(), conf());
        change(&mut pod, &mut conf);
        let conf = file("format.conf", &conf.to_string());
        let arguments = ["trace", "-f", "-", "--config", &conf, "--from", "uid=7", "--to", "1.2.3.4:5/tcp"];
        let trace = detour(&arguments, &pod.to_string(), &[]).stdout;
        assert!(trace.contains(hop), "{trace}");
    }
}

#[test]
fn a_trace_ends_with_the_deciding_rule_and_gives_the_reason_of_a_direct_packet() {
    let conf = file("reason.conf", &conf().to_string());
    let of = |pod: &Value, from: &str| {
        detour(
            &["trace", "-f", "-", "--config", &conf, "--from", from, "--to", "10.96.0.10:53/udp"],
            &pod.to_string(),
            &[],
        )
    };
    let captured = of(&pod(), "uid=7").stdout;
    let last = captured.lines().rfind(|line| line.starts_with("  ") && !line.contains("zone")).expect("rules");
    assert!(last.contains("»"), "{captured}");
    let mut without = pod();
    without["spec"]["containers"].as_array_mut().expect("a list").truncate(1);
    let direct = of(&without, "uid=7").stdout;
    assert!(direct.contains("→ direct\nReason: not redirected: no container is named istio-proxy\n"), "{direct}");
    let mut host = pod();
    host["spec"]["hostNetwork"] = true.into();
    let direct = of(&host, "uid=7").stdout;
    assert!(direct.starts_with("10.96.0.10:53/udp from uid 7, gid 0 → direct\n"), "{direct}");
}

/// And the warning about the init container does not advise to add the annotation again.
#[test]
fn a_request_without_its_sub_plugin_is_a_warning_with_the_line_to_add() {
    for (key, value, sub_plugin) in [
        ("detour.io/exclude-containers", "vault-agent-init", "container-exclude"),
        ("detour.io/exclude-uids", "8, 7", "uid-exclude"),
    ] {
        let (mut pod, mut conf) = (pod(), conf());
        pod["spec"]["initContainers"][0]["securityContext"]["runAsUser"] = 7.into();
        annotate(&mut pod, key, value);
        conf["chain"] = json!([{"type": "istio-redirect"}]);
        let conf = file("ignored.conf", &conf.to_string());
        let arguments = ["explain", "-f", "-", "--config", &conf, "-o", "json"];
        let report = detour(&arguments, &pod.to_string(), &[]).json();
        let warnings = report["warnings"].as_array().expect("warnings");
        let of = |code: &str| warnings.iter().find(|one| one["code"] == code).unwrap_or_else(|| panic!("{report:#}"));
        let (ignored, early) = (of("not-in-chain"), of("init-container-too-early"));
        let what = ignored["what"].as_str().unwrap_or_default();
        let why = format!("the sub-plugin chain has no {sub_plugin}");
        assert!(what.contains(key) && what.ends_with(&why), "{report:#}");
        let line = format!("add {{\"type\": \"{sub_plugin}\"}} to the sub-plugin chain of the configuration");
        assert_eq!(ignored["next"], line);
        let next = format!("annotation {key} names it already: see the warning about this annotation");
        assert_eq!(early["next"], next);
        assert!(!report["notes"].to_string().contains(key), "{report:#}");
    }
}
