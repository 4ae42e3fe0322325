//! What is said of a pod for each reason, beside the files in `tests/golden/explain`. With
//! `UPDATE_GOLDEN` set these are written anew, to be looked at before they are committed.

use crate::run::{detour, file};
use serde_json::{Value, json};
use std::path::Path;

/// The pod of the story, as OpenShift and Istio's injector leave it.
pub(crate) fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web-0", "namespace": "shop",
            "annotations": { "sidecar.istio.io/status": "{}", "k8s.v1.cni.cncf.io/networks": "istio-cni" }
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

fn conf() -> Value {
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

/// A case: its golden file's name, and how pod and configuration differ from those above.
type Case = (&'static str, fn(&mut Value, &mut Value));

pub(crate) fn annotate(pod: &mut Value, key: &str, value: &str) {
    pod["metadata"]["annotations"][key] = value.into();
}

const CASES: [Case; 16] = [
    ("redirected", |_, _| ()),
    ("surprises", |pod, _| {
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
    ("mode-none", |pod, _| annotate(pod, "sidecar.istio.io/interceptionMode", "NONE")),
];

fn explain(name: &str, case: fn(&mut Value, &mut Value), more: &[&str]) -> crate::run::Run {
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
pub(crate) fn compare(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/explain").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, found).expect("writable");
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (found, wanted)) in (1..).zip(found.lines().zip(wanted.lines())) {
        assert_eq!(found, wanted, "{}:{number}", path.display());
    }
    assert_eq!(found.lines().count(), wanted.lines().count(), "{}", path.display());
}

#[test]
fn each_reason_is_told() {
    for (name, case) in CASES {
        let run = explain(name, case, &[]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{name}");
        compare(&format!("{name}.txt"), &run.stdout);
    }
}

#[test]
fn programs_get_the_same_as_people() {
    let (name, case) = CASES[1];
    let json = explain(name, case, &["-o", "json"]);
    compare("surprises.json", &json.stdout);
    let yaml = explain(name, case, &["-o", "yaml"]);
    let read: Value = serde_saphyr::from_str(&yaml.stdout).expect("YAML");
    assert_eq!(read, json.json());
}

#[test]
fn exactly_the_last_rule_that_was_looked_at_decides() {
    for (name, case) in CASES {
        let said = explain(name, case, &["-o", "json"]).json();
        let holds: Vec<bool> =
            said["considered"].as_array().expect("rules").iter().map(|rule| rule["holds"] == true).collect();
        let (last, before) = holds.split_last().expect("a rule");
        assert!(before.iter().all(|holds| *holds), "{name}: {said}");
        assert_eq!(*last, said["redirected"] == true, "{name}: {said}");
        assert_eq!(said["settings"].as_array().expect("settings").is_empty(), said["redirected"] == false, "{name}");
    }
}

#[test]
fn what_an_add_would_refuse_is_refused_in_the_same_words() {
    let run = explain("wrong", |pod, _| annotate(pod, "detour.io/exclude-uids", "root"), &[]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    let start = "detour: annotation \"detour.io/exclude-uids\" of pod shop/web-0: invalid value \"root\"; ";
    assert!(run.stderr.starts_with(start), "{}", run.stderr);
}

#[test]
fn the_picture_is_one_document_that_loads_nothing() {
    let run = explain("picture", CASES[0].1, &["--format", "svg"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.starts_with("<svg ") && run.stdout.trim_end().ends_with("</svg>"), "{}", run.stdout);
    for part in ["web", "vault-agent-init", "15001", "15006", "15053", "uid 1337", "prefers-color-scheme"] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
    for outside in ["href", "url(http", "@import", "<image", "<script"] {
        assert!(!run.stdout.contains(outside), "{outside}");
    }
}

#[test]
fn what_a_picture_has_no_room_for_is_shown_under_the_pointer() {
    let ports = (8000..8040).map(|port| port.to_string()).collect::<Vec<_>>();
    let (name, _) = CASES[0];
    let (mut pod, mut conf) = (pod(), conf());
    annotate(&mut pod, "traffic.sidecar.istio.io/excludeInboundPorts", &ports.join(","));
    annotate(&mut pod, "traffic.sidecar.istio.io/excludeOutboundPorts", &ports.join(","));
    pod["metadata"]["name"] = "n".repeat(200).into();
    conf["chain"][0]["redirect_dns"] = false.into();
    pod["spec"]["containers"][1]["env"] = json!([]);
    let conf = file(&format!("{name}-long.conf"), &conf.to_string());
    let svg = detour(&["explain", "-f", "-", "--config", &conf, "--format", "svg"], &pod.to_string(), &[]).stdout;
    let ports = ports.join(", ");
    for (line, whole) in [
        ("Pod shop/nnn", format!("Pod shop/{}", "n".repeat(200))),
        ("inbound, but not 8000", format!("inbound, but not {ports}")),
        ("port 8000", format!("port {ports}")),
    ] {
        let is_it = |drawn: &&str| drawn.starts_with("<text ") && drawn.contains(&format!(">{line}"));
        let drawn = svg.lines().find(is_it).expect(line);
        let (shown, rest) = drawn.split_once('>').and_then(|(_, text)| text.split_once("<title>")).expect(drawn);
        assert!(shown.chars().count() < 80 && rest.contains(&whole), "{drawn}");
    }
    assert!(svg.contains(">resolvers<") && !svg.contains("15053"), "DNS that is not captured goes straight: {svg}");
}

#[test]
fn the_picture_shows_what_istio_init_captures_and_needs_no_css_variables() {
    let istio_init: fn(&mut Value, &mut Value) = |pod, conf| {
        pod["spec"]["initContainers"].as_array_mut().expect("a list").push(json!({"name": "istio-init"}));
        conf["chain"] = json!([{"type": "istio-redirect"}]);
    };
    let svg = explain("istio-init-picture", istio_init, &["--format", "svg"]).stdout;
    assert!(svg.contains("captured by istio-init") && !svg.contains(">everything<"), "{svg}");
    assert!(!svg.contains("var("), "{svg}");
}
