//! What `explain` and `trace` say about pods with the guard.

use crate::explain::pod;
use crate::run::{Run, detour, file};
use serde_json::{Value, json};

const REJECTED: &str = "Guard: packets that neither the redirection nor an exclusion explains are rejected chain[";

/// A configuration with the guard and, with `redirects`, the redirection.
fn conf(redirects: bool) -> Value {
    let mut chain = vec![json!({ "type": "uid-exclude", "uids": [1337] })];
    chain.extend(redirects.then(|| json!({ "type": "istio-redirect" })));
    chain.push(json!({ "type": "mesh-guard", "exclude_namespace_selector": { "matchLabels": { "guard": "off" } } }));
    let kubernetes = json!({ "kubeconfig": "/k" });
    json!({ "cniVersion": "1.1.0", "name": "istio-cni", "type": "detour", "kubernetes": kubernetes, "chain": chain })
}

fn run(command: &str, pod: &Value, conf: &Value, more: &[&str]) -> Run {
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "shop" } });
    let (conf, namespace) = (file("c.conf", &conf.to_string()), file("namespace.yaml", &namespace.to_string()));
    let arguments = [command, "-f", "-", "--config", &conf, "--namespace-file", &namespace];
    detour(&[&arguments, more].concat(), &pod.to_string(), &[])
}

fn explained(pod: &Value, conf: &Value) -> (String, Value) {
    let text = run("explain", pod, conf, &[]).stdout;
    let words: Vec<&str> = text.split_whitespace().collect();
    (words.join(" "), run("explain", pod, conf, &["-o", "json"]).json())
}

fn ambient() -> Value {
    let mut pod = pod();
    drop(pod["spec"]["containers"].as_array_mut().expect("an array").pop());
    pod["metadata"]["annotations"] = json!({ "k8s.v1.cni.cncf.io/networks": "default/istio-cni" });
    pod["metadata"]["labels"] = json!({ "istio.io/dataplane-mode": "ambient" });
    pod
}

#[test]
fn explain_says_that_an_unexplained_packet_is_rejected() {
    for (pod, redirects, block) in [
        (pod(), true, "chain[2]"),
        (pod(), false, "chain[1]"),
        (ambient(), true, "chain[2]"),
        (ambient(), false, "chain[1]"),
    ] {
        let (text, report) = explained(&pod, &conf(redirects));
        assert!(text.contains(REJECTED) && text.contains(block), "{text}");
        assert_eq!(report["guard"], json!({ "unexplained": "rejected", "sources": [block] }), "{report:#}");
    }
}

#[test]
fn explain_says_nothing_of_a_guard_that_the_pod_does_not_have() {
    let mut without = conf(true);
    drop(without["chain"].as_array_mut().expect("an array").pop());
    let mut injected = pod();
    injected["metadata"]["labels"] = json!({ "sidecar.istio.io/inject": "false" });
    for (pod, conf) in [(pod(), without), (injected, conf(false))] {
        let (text, report) = explained(&pod, &conf);
        assert!(!text.contains(REJECTED), "{text}");
        assert_eq!(report["guard"], Value::Null, "{report:#}");
    }
}

#[test]
fn explain_names_istio_cni_as_the_way_out_for_a_pod_with_istio_init() {
    let mut pod = pod();
    pod["spec"]["initContainers"][0]["name"] = "istio-init".into();
    let (text, report) = explained(&pod, &conf(false));
    assert!(text.contains("the pod gets no guard") && text.contains("use Istio's CNI plugin"), "{text}");
    assert_eq!(report["guard"], Value::Null, "{report:#}");
}

/// Without the redirection of the configuration, another program redirects; if it does not, the packet ends at the guard.
#[test]
fn trace_ends_at_the_guard_where_no_redirection_is() {
    let packets = [
        ("uid=1000650000", "198.51.100.20:443/tcp", "sidecar:15001", "rejected", "GUARD_REJECT_OUTBOUND"),
        ("uid=1000650000", "[2001:db8::1]:443/tcp", "sidecar:15001", "rejected", "GUARD_REJECT_OUTBOUND"),
        ("uid=1000650000", "10.96.0.10:53/udp", "sidecar:15053", "rejected", "GUARD_REJECT_OUTBOUND"),
        ("inbound", "10.0.0.2:8080/tcp", "sidecar:15006", "rejected", "GUARD_REJECT_INBOUND"),
        ("uid=1337", "198.51.100.20:443/tcp", "direct", "direct", ""),
        ("uid=1000650000", "198.51.100.20:514/udp", "direct", "direct", ""),
        ("inbound", "10.0.0.2:15021/tcp", "direct", "direct", ""),
    ];
    for (from, to, redirected, missing, chain) in packets {
        let arguments = ["--from", from, "--to", to];
        for (redirects, expected) in [(true, redirected), (false, missing)] {
            let text = run("trace", &pod(), &conf(redirects), &arguments).stdout;
            assert!(text.lines().next().is_some_and(|line| line.ends_with(expected)), "{from} to {to}: {text}");
            let json = run("trace", &pod(), &conf(redirects), &[&arguments[..], &["-o", "json"]].concat()).json();
            assert_eq!(json["arrives_at"], expected, "{from} to {to}: {json:#}");
            if expected == "rejected" {
                assert_eq!(
                    (&json["decided_by"]["table"], &json["decided_by"]["chain"]),
                    (&json!("detour-exclusions"), &json!(chain))
                );
                assert!(text.contains(chain), "{text}");
            }
        }
    }
}
