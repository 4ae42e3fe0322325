//! Where `trace` ends for pods with the guard. `explain` has cases of it in cases.yaml.

use crate::explain::Case;
use serde_json::{Value, json};

#[test]
fn the_report_has_the_guard_that_a_pod_has() {
    for (name, guard) in [
        ("guard", json!({ "unexplained": "rejected", "sources": ["chain[2]"] })),
        ("guard-alone", json!({ "unexplained": "rejected", "sources": ["chain[1]"] })),
        ("guard-of-a-pod-with-istio-init", Value::Null),
        ("guard-of-a-pod-without-injection", Value::Null),
    ] {
        assert_eq!(Case::named(name).report()["guard"], guard, "{name}");
    }
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
    let (redirects, alone) = (Case::named("guard"), Case::named("guard-alone"));
    for (from, to, redirected, missing, chain) in packets {
        for (case, expected) in [(&redirects, redirected), (&alone, missing)] {
            let text = case.trace(from, to, &["--pod-ip", "10.0.0.2"]).stdout;
            assert!(text.lines().next().is_some_and(|line| line.ends_with(expected)), "{from} to {to}: {text}");
            let json = case.trace(from, to, &["--pod-ip", "10.0.0.2", "-o", "json"]).json();
            assert_eq!(json["arrives_at"], expected, "{from} to {to}: {json:#}");
            if expected == "rejected" {
                let decided = (&json["decided_by"]["table"], &json["decided_by"]["chain"]);
                assert_eq!(decided, (&json!("detour-exclusions"), &json!(chain)));
                assert!(text.contains(chain), "{text}");
            }
        }
    }
}
