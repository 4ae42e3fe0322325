//! Scope `all`: established connections continue while the redirection itself changes.

use super::*;

const ROOT_PROXY: Process = Process { uid: 0, gid: 1337 };

/// Writes the manifests of the example pod in a state of this name.
fn state(world: &World, name: &str) -> PathBuf {
    const LISTS: [&str; 2] =
        ["traffic.sidecar.istio.io/includeInboundPorts", "traffic.sidecar.istio.io/includeOutboundIPRanges"];
    let annotations: &[(&str, &str)] = match name {
        "tproxy" => &[("sidecar.istio.io/interceptionMode", "TPROXY")],
        "none" => &[("sidecar.istio.io/interceptionMode", "NONE")],
        "without lists" => &LISTS.map(|key| (key, "")),
        _ => &[],
    };
    let text = pod::manifest(name == "dns", ROOT_PROXY, annotations);
    let text = if name == "not redirected" { text.replace("sidecar.istio.io/status", "other") } else { text };
    world.manifests(&[pod::NAMESPACE, &text])
}

/// Returns the configuration of the pod in this state; that with the name "ipv4" does not redirect IPv6.
fn configuration(world: &World, name: &str) -> serde_json::Value {
    let redirect = match name {
        "ipv4" => json!({"type": "istio-redirect", "enable_ipv6": false}),
        _ => json!({"type": "istio-redirect"}),
    };
    chain(&state(world, name), json!([redirect, {"type": "uid-exclude"}, {"type": "dns-exclude"}]))
}

/// Changes the pod to the state of this name, as the node's agent does. Returns whether its policy is the desired one.
fn change(world: &World, name: &str) -> bool {
    let text = configuration(world, name).to_string();
    let installed = NetConf::parse(text.as_bytes(), CniCommand::Add, "").expect("valid");
    let (pod, facts) = (running(world), facts(&state(world, name)));
    let desired = pod.desired(Path::new(NODE), &facts, &[&installed]).expect("valid").policies;
    pod.apply(Path::new(NODE), &pod.following(&facts, &desired, LivePolicyScope::All)).expect("applied");
    running(world).has_applied(&desired)
}

in_both_dialects! {
    fn long_connections_survive_each_change_of_the_redirection(dialect) {
        let world = World::new(Families::Both);
        world.add(&dialect.of(configuration(&world, "redirect")));
        let mut connections = long_connections(&world);
        // The pod keeps the policy "redirect" in the last three.
        for (name, follows) in [
            ("tproxy", true), ("without lists", true), ("dns", true), ("tproxy", true), ("dns", true),
            ("without lists", true), ("tproxy", true), ("redirect", true), ("ipv4", false), ("none", false),
            ("not redirected", false),
        ] {
            assert_eq!(change(&world, name), follows, "{name}");
            connections.iter().for_each(|connection| connection.wait_for(2));
            connections.extend(long_connections(&world));
        }
        tcp_is_captured(&world, APP_PROCESS);
        inbound_is_captured(&world);
        for connection in connections {
            let (arrivals, _) = connection.stop();
            assert_eq!(arrivals.len(), 1, "{arrivals:?}");
        }
    }

    /// Connections of before would be redirected with their next packet.
    fn long_connections_of_a_pod_without_redirection_remain_direct(dialect) {
        for name in ["none", "not redirected"] {
            let world = World::new(Families::Both);
            world.add(&dialect.of(configuration(&world, name)));
            let connections = long_connections(&world);
            for (name, follows) in [("redirect", false), ("tproxy", false), ("none", true), ("not redirected", true)] {
                assert_eq!(change(&world, name), follows, "{name}");
                connections.iter().for_each(|connection| connection.wait_for(2));
            }
            for connection in connections {
                let (arrivals, _) = connection.stop();
                assert!(matches!(arrivals[..], [Arrival::Direct { .. }]), "{arrivals:?}");
            }
        }
    }
}
