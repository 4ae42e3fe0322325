//! A bypass that is no longer permitted ends, whatever the pod's author writes, and what another tool does.

use super::*;

const UIDS: &str = "detour.io/exclude-uids";
const REDIRECTED: &str = "    sidecar.istio.io/status: '{\"revision\":\"default\"}'\n";

/// What the author of the pod writes, or does in it, before the configuration is tightened.
struct Variant {
    name: &'static str,
    annotations: Vec<(&'static str, String)>,
    label: &'static str,
    has_status: bool,
    rules: &'static str,
    /// A part of the reason that an Event names.
    absent: &'static str,
}

fn variants() -> Vec<Variant> {
    let usual =
        |name, absent| Variant { name, annotations: Vec::new(), label: "", has_status: true, rules: "", absent };
    let annotated = |name, key, value: &str| Variant { annotations: vec![(key, value.to_owned())], ..usual(name, "") };
    let many: Vec<String> = (0..8280).map(|number| (10_000 + 2 * number).to_string()).collect();
    let ports: Vec<String> = (0..1000).map(|number| (20_000 + 2 * number).to_string()).collect();
    let empty_chains = "add table ip nat\nadd chain ip nat ISTIO_X\nadd table inet istio-proxy-x\n";
    vec![
        usual("nothing", "outside the bounds"),
        annotated("annotation inject", "sidecar.istio.io/inject", "false"),
        Variant { label: "sidecar.istio.io/inject: \"false\"", ..usual("label inject", "") },
        annotated("mode NONE", "sidecar.istio.io/interceptionMode", "NONE"),
        Variant { has_status: false, ..usual("no status", "") },
        Variant { has_status: false, label: "istio.io/dataplane-mode: ambient", ..usual("ambient", "") },
        Variant { absent: "abc", ..annotated("invalid annotation", "detour.io/exclude-dns", "abc") },
        Variant {
            absent: "invalid value \"x\"",
            ..annotated("invalid ports", "traffic.sidecar.istio.io/excludeOutboundPorts", "80,x")
        },
        annotated(
            "too many exclusions",
            "detour.io/exclude-outbound-ports-for-uids",
            &format!("tcp:81:{}", many.join(",")),
        ),
        Variant {
            absent: "bytes of saved policies",
            ..annotated(
                "too much saved state",
                "detour.io/exclude-outbound-ports-for-uids",
                &format!("tcp:{}:{}", ports.join(","), many[..68].join(",")),
            )
        },
        Variant { rules: empty_chains, ..usual("names of another tool", "") },
    ]
}

in_both_dialects! {
    fn a_bypass_that_is_no_longer_permitted_ends(dialect) {
        let world = World::new(Families::Both);
        let state = |annotations: &[(&str, &str)], label: &str, has_status: bool| {
            let mut text = pod::manifest(false, PROXY, annotations);
            if !has_status {
                assert!(text.contains(REDIRECTED));
                text = text.replace(REDIRECTED, "");
            }
            let labels = format!("  labels: {{ {label} }}\n  annotations:");
            world.manifests(&[pod::NAMESPACE, &text.replace("  annotations:", &labels)])
        };
        let uid = APP_PROCESS.uid.to_string();
        let usual = state(&[(UIDS, &uid)], "", true);
        let sub_plugins = json!([{"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "dns-exclude"}]);
        world.add(&dialect.of(chain(&usual, sub_plugins.clone())));
        let installed = |allow: serde_json::Value| {
            let mut conf = chain(&usual, sub_plugins.clone());
            conf["allow"] = allow;
            NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("valid")
        };
        let (wide, tight) = (installed(json!({})), installed(json!({"uids": "10000-60000"})));
        for variant in variants() {
            repeat(&world, &facts(&usual), &[&wide]).expect(variant.name);
            tcp_is_direct(&world, APP_PROCESS);
            tool_in(&world.netns(), "nft", &["-f", "-"], variant.rules);
            let mut annotations = vec![(UIDS, uid.as_str())];
            annotations.extend(variant.annotations.iter().map(|(key, value)| (*key, value.as_str())));
            let changed = facts(&state(&annotations, variant.label, variant.has_status));
            let repeated = repeat(&world, &changed, &[&tight]).expect(variant.name);
            tcp_is_captured(&world, APP_PROCESS);
            let absent: Vec<&str> = repeated.absent.iter().map(|error| error.msg.as_str()).collect();
            for part in ["outside the bounds", variant.absent] {
                assert!(absent.iter().any(|msg| msg.contains(part)), "{}: {absent:?}", variant.name);
            }
        }
        world.call("DEL", &dialect.of(chain(&usual, sub_plugins))).run().done();
    }
}
