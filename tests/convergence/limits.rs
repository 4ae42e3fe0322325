//! Inputs whose size users choose: at a limit, calls succeed; above it, they are refused with the limit.

use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;
use serde_json::{Value, json};
use std::path::Path;

/// The settings of the pod and of the configuration.
#[derive(Debug, Clone, Default)]
struct Input {
    pod: Vec<(&'static str, String)>,
    chain: Option<Value>,
    native: bool,
}

impl Input {
    fn pod(annotations: &[(&'static str, &str)]) -> Self {
        Self { pod: annotations.iter().map(|(key, value)| (*key, (*value).to_owned())).collect(), ..Self::default() }
    }

    /// Returns the configuration; its manifests are in a directory called `name`.
    fn configuration(&self, name: &str) -> Value {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("limits").join(name);
        std::fs::create_dir_all(&directory).expect("writable");
        let mut annotations: Value =
            self.pod.iter().map(|(key, value)| ((*key).to_owned(), Value::from(value.as_str()))).collect();
        annotations["sidecar.istio.io/status"] = "{}".into();
        let containers = vec![json!({
            "name": "istio-proxy", "image": "proxyv2", "args": ["proxy", "sidecar"],
            "env": [{ "name": "ISTIO_META_DNS_CAPTURE", "value": "true" }],
        })];
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "spec": { "containers": containers },
            "metadata": { "name": "web-0", "namespace": "shop", "annotations": annotations },
        });
        let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "shop" } });
        std::fs::write(directory.join("pod.json"), pod.to_string()).expect("writable");
        std::fs::write(directory.join("namespace.json"), namespace.to_string()).expect("writable");
        let mut configuration = json!({
            "cniVersion": "1.1.0", "name": "limits", "type": "detour", "kubernetes": { "manifests_dir": directory },
            "dialect": if self.native { "nftables" } else { "auto" },
        });
        if let Some(chain) = &self.chain {
            configuration["chain"] = chain.clone();
        }
        configuration
    }
}

fn call(pod: &Pod, verb: &str, configuration: &Value) -> Answer {
    pod.call_with(verb, "net1", configuration, &pod.netns().display().to_string())
}

fn joined(items: impl IntoIterator<Item = String>, separator: &str) -> String {
    items.into_iter().collect::<Vec<_>>().join(separator)
}

/// Returns UIDs that are not adjacent.
fn uids(count: usize) -> String {
    joined((0..count).map(|i| (2 * i + 5000).to_string()), ",")
}

/// Returns addresses that are not adjacent.
fn addresses(count: usize) -> String {
    joined((0..count).map(|i| format!("10.{}.{}.{}", i / 10_000, i / 100 % 100, 2 * (i % 100))), ",")
}

/// Returns rules without common ports or UIDs.
fn rules(count: usize) -> String {
    joined((0..count).map(|i| format!("{},{}:{}", 2 * i + 1, 2 * i + 10_000, 2 * i + 5000)), ";")
}

#[test]
fn calls_with_inputs_at_a_limit_succeed() {
    let include = "traffic.sidecar.istio.io/includeOutboundIPRanges";
    let exclude = "traffic.sidecar.istio.io/excludeOutboundIPRanges";
    let inputs = [
        ("uids", false, Input::pod(&[("detour.io/exclude-uids", &uids(1500))])),
        ("resolvers", false, Input::pod(&[("detour.io/exclude-dns", &addresses(2000))])),
        ("rules", true, Input::pod(&[("detour.io/exclude-outbound-ports-for-uids", &rules(2000))])),
        ("ranges", true, Input::pod(&[(include, &addresses(2000)), (exclude, &addresses(2000))])),
    ];
    on_a_node(|| {
        for (name, native, input) in inputs {
            let pod = Pod::new();
            let before = Kernel::of(&pod);
            let configuration = Input { native, ..input }.configuration(name);
            for verb in ["ADD", "ADD", "CHECK", "DEL"] {
                assert_eq!(call(&pod, verb, &configuration), Answer::Done, "{name}, {verb}");
            }
            Kernel::of(&pod).assert_is(&before, "after DEL");
        }
    });
}

#[test]
fn inputs_above_a_limit_are_refused_with_place_limit_and_number() {
    let pod = |key, value: &str| Input::pod(&[(key, value)]);
    let inputs = [
        (
            pod("detour.io/exclude-uids", &uids(2001)),
            "annotation \"detour.io/exclude-uids\" of pod shop/web-0: expected at most 2000 items, got 2001",
        ),
        (
            pod("detour.io/exclude-outbound-ports-for-uids", &format!("{}:{}", uids(900), uids(900))),
            "of pod shop/web-0: expected at most 10000 exclusions, got 116100",
        ),
        (
            Input::pod(&[
                ("istio.io/reroute-virtual-interfaces", &joined((0..300).map(|i| format!("k{i}")), ",")),
                ("traffic.sidecar.istio.io/includeOutboundIPRanges", &addresses(300)),
            ]),
            "pod shop/web-0: the redirection with all exclusions, for IPv4 and IPv6: expected at most 16000 rules, got ",
        ),
        (
            Input { chain: Some(json!(vec![json!({ "type": "uid-exclude" }); 33])), ..Input::default() },
            "chain: expected at most 32 sub-plugins and executables, got 33",
        ),
    ];
    on_a_node(|| {
        for (index, (input, wanted)) in inputs.into_iter().enumerate() {
            let pod = Pod::new();
            let before = Kernel::of(&pod);
            let configuration = input.configuration(&format!("above-{index}"));
            let msg = call(&pod, "ADD", &configuration).refused(7);
            assert!(msg.contains(wanted) && msg.len() < 1000, "{msg}, not {wanted}");
            call(&pod, "DEL", &configuration).done();
            Kernel::of(&pod).assert_is(&before, "after DEL");
        }
    });
}

#[test]
fn too_many_attachments_of_a_container_are_refused() {
    on_a_node(|| {
        let pod = Pod::new();
        let configuration = |i: usize| {
            let mut configuration = Input::default().configuration("attachments");
            configuration["name"] = format!("limits-{i}").into();
            configuration["chain"] = json!([{ "type": "uid-exclude" }]);
            configuration
        };
        for i in 0..32 {
            call(&pod, "ADD", &configuration(i)).done();
        }
        let msg = call(&pod, "ADD", &configuration(32)).refused(7);
        assert!(msg.contains("pod shop/web-0: ") && msg.contains("expected at most 32 attachments, got 33"), "{msg}");
        call(&pod, "ADD", &configuration(31)).done();
        for i in 0..=32 {
            call(&pod, "DEL", &configuration(i)).done();
        }
    });
}
