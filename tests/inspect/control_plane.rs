//! The parts of Istio's injected pods that detour depends on (conf/README.md), item by item, with pods from the
//! injectors of several minor versions (`tests/golden/injected`).

use crate::run::detour;
use detour_cni::networks;
use detour_cni::pod::Pod;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const VERSIONS: [&str; 4] = ["1.26", "1.27", "1.28", "1.31"];
const PLATFORMS: [&str; 2] = ["openshift", "kubernetes"];

fn read(within: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(within);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn injected(version: &str, platform: &str) -> Value {
    let text = read(&format!("tests/golden/injected/{version}-{platform}.yaml"));
    serde_saphyr::from_str(&text).expect("a manifest")
}

fn all_pods() -> impl Iterator<Item = (String, Value)> {
    let names = PLATFORMS.iter().flat_map(|platform| VERSIONS.map(|version| (version, *platform)));
    names.map(|(version, platform)| (format!("{version}-{platform}"), injected(version, platform)))
}

/// The sample configuration in a configuration list, so that it applies to every pod.
static CONFIGURATION: LazyLock<PathBuf> = LazyLock::new(|| {
    let plugin: Value = serde_json::from_str(&read("conf/openshift-istio-cni.conf")).expect("JSON");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("control-plane.conflist");
    let list = json!({"cniVersion": "0.3.1", "name": "node", "plugins": [plugin]});
    std::fs::write(&path, list.to_string()).expect("writable");
    path
});

fn explain(pod: &Value) -> Value {
    let configuration = CONFIGURATION.display().to_string();
    detour(&["explain", "-o", "json", "-f", "-", "--config", &configuration], &pod.to_string(), &[]).json()
}

/// Returns a setting's value and its sources.
fn setting(report: &Value, key: &str) -> (Value, Vec<Value>) {
    let mut settings = report["settings"].as_array().expect("settings").iter();
    let setting = settings.find(|setting| setting["key"] == key).unwrap_or_else(|| panic!("{key} in {report}"));
    (setting["value"].clone(), setting["sources"].as_array().expect("sources").clone())
}

/// Finds a container or an init container.
fn container<'a>(pod: &'a mut Value, name: &str) -> &'a mut Value {
    let spec = pod["spec"].as_object_mut().expect("a spec");
    let lists = spec.iter_mut().filter(|(key, _)| ["containers", "initContainers"].contains(&key.as_str()));
    let mut containers = lists.flat_map(|(_, list)| list.as_array_mut().expect("a list"));
    containers.find(|container| container["name"] == name).unwrap_or_else(|| panic!("no container {name}"))
}

fn proxy_env(pod: &mut Value, name: &str, value: &str) {
    let env = container(pod, "istio-proxy")["env"].as_array_mut().expect("a list");
    env.retain(|variable| variable["name"] != name);
    env.push(json!({ "name": name, "value": value }));
}

/// The expected effect of a change to an injected pod.
enum Effect {
    /// The pod is not redirected, with this text in the reason.
    NotRedirected(&'static str),
    /// A setting has this value, with the item as its source.
    Set(&'static str, Value),
    /// The proxy has this UID and GID.
    Proxy(u32, u32),
    /// Nothing changes.
    None,
}

/// An item by its name in conf/README.md, a change to the pod, and the effect.
type Item<Change = Box<dyn Fn(&mut Value)>> = (&'static str, Change, Effect);

fn items() -> Vec<Item> {
    use Effect::{None, NotRedirected, Proxy, Set};
    let annotations: [(&str, &str, Effect); 11] = [
        ("sidecar.istio.io/interceptionMode", "NONE", NotRedirected("NONE")),
        ("sidecar.istio.io/interceptionMode", "TPROXY", Set("inbound_interception_mode", json!("TPROXY"))),
        (
            "traffic.sidecar.istio.io/includeOutboundIPRanges",
            "10.0.0.0/8",
            Set("outbound_ip_ranges_include", json!(["10.0.0.0/8"])),
        ),
        (
            "traffic.sidecar.istio.io/excludeOutboundIPRanges",
            "192.0.2.0/24",
            Set("outbound_ip_ranges_exclude", json!(["192.0.2.0/24"])),
        ),
        ("traffic.sidecar.istio.io/includeInboundPorts", "8080", Set("inbound_ports_include", json!(["8080"]))),
        (
            "traffic.sidecar.istio.io/excludeInboundPorts",
            "15020,9090",
            Set("inbound_ports_exclude", json!(["15020", "9090", "15021", "15090"])),
        ),
        ("traffic.sidecar.istio.io/includeOutboundPorts", "3306", Set("outbound_ports_include", json!(["3306"]))),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", "3306", Set("outbound_ports_exclude", json!(["3306"]))),
        ("traffic.sidecar.istio.io/excludeInterfaces", "net1", Set("exclude_interfaces", json!(["net1"]))),
        ("istio.io/reroute-virtual-interfaces", "tap0", Set("reroute_virtual_interfaces", json!(["tap0"]))),
        ("traffic.sidecar.istio.io/kubevirtInterfaces", "tap0", Set("reroute_virtual_interfaces", json!(["tap0"]))),
    ];
    let annotated = annotations.into_iter().map(|(key, value, effect)| -> Item {
        (key, Box::new(move |pod| pod["metadata"]["annotations"][key] = value.into()), effect)
    });
    let others: Vec<Item<fn(&mut Value)>> = vec![
        (
            "sidecar.istio.io/status",
            |pod| {
                pod["metadata"]["annotations"].as_object_mut().expect("some").remove("sidecar.istio.io/status");
            },
            NotRedirected("sidecar.istio.io/status"),
        ),
        (
            "sidecar.istio.io/inject",
            |pod| pod["metadata"]["labels"]["sidecar.istio.io/inject"] = "false".into(),
            NotRedirected("sidecar.istio.io/inject"),
        ),
        (
            "istio-proxy",
            |pod| container(pod, "istio-proxy")["name"] = "proxy".into(),
            NotRedirected("no container is named istio-proxy"),
        ),
        ("istio-proxy", move_proxy, None),
        ("args", |pod| container(pod, "istio-proxy")["args"] = json!(["proxy", "router"]), NotRedirected("router")),
        (
            "istio-init",
            |pod| container(pod, "istio-validation")["name"] = "istio-init".into(),
            NotRedirected("istio-init"),
        ),
        (
            "istio-validation",
            |pod| {
                let containers = pod["spec"]["initContainers"].as_array_mut().expect("a list");
                containers.retain(|container| container["name"] != "istio-validation");
            },
            None,
        ),
        (
            "runAsUser",
            |pod| container(pod, "istio-proxy")["securityContext"] = json!({"runAsUser": 77, "runAsGroup": 78}),
            Proxy(77, 78),
        ),
        (
            "runAsUser",
            |pod| container(pod, "istio-proxy")["securityContext"] = json!({"runAsUser": 0, "runAsGroup": 1337}),
            Proxy(1337, 1337),
        ),
        ("runAsUser", |pod| container(pod, "istio-proxy")["securityContext"] = json!({}), Proxy(1337, 1337)),
        (
            "ISTIO_META_DNS_CAPTURE",
            |pod| proxy_env(pod, "ISTIO_META_DNS_CAPTURE", "false"),
            Set("redirect_dns", json!(false)),
        ),
        ("INVALID_DROP", |pod| proxy_env(pod, "INVALID_DROP", "true"), Set("drop_invalid", json!(true))),
        ("DISABLE_ENVOY", |pod| proxy_env(pod, "DISABLE_ENVOY", "true"), NotRedirected("DISABLE_ENVOY")),
        ("ISTIO_META_INTERCEPTION_MODE", |pod| proxy_env(pod, "ISTIO_META_INTERCEPTION_MODE", "TPROXY"), None),
        ("ISTIO_DUAL_STACK", |pod| proxy_env(pod, "ISTIO_DUAL_STACK", "false"), None),
    ];
    let others = others.into_iter().map(|(item, change, effect)| -> Item { (item, Box::new(change), effect) });
    annotated.chain(others).collect()
}

/// Moves the proxy from the containers to the init containers, or back.
fn move_proxy(pod: &mut Value) {
    let proxy = container(pod, "istio-proxy").clone();
    let is_native = proxy.get("restartPolicy").is_some();
    for list in ["containers", "initContainers"] {
        let list = pod["spec"][list].as_array_mut().expect("a list");
        list.retain(|container| container["name"] != "istio-proxy");
    }
    let list = if is_native { "containers" } else { "initContainers" };
    pod["spec"][list].as_array_mut().expect("a list").push(proxy);
}

/// The parts of a report that decide about traffic.
fn outcome(report: &Value) -> [&Value; 5] {
    ["redirected", "decision", "proxy", "settings", "exempt"].map(|key| &report[key])
}

#[test]
fn all_versions_of_the_injector_have_the_same_outcome() {
    for platform in PLATFORMS {
        let oldest = explain(&injected(VERSIONS[0], platform));
        assert_eq!(oldest["redirected"], true, "{oldest}");
        for version in &VERSIONS[1..] {
            let report = explain(&injected(version, platform));
            assert_eq!(outcome(&report), outcome(&oldest), "{version} on {platform}");
        }
    }
}

#[test]
fn each_item_has_its_effect_in_every_version() {
    for (name, pod) in all_pods() {
        let before = explain(&pod);
        for (item, change, effect) in items() {
            let mut pod = pod.clone();
            change(&mut pod);
            let report = explain(&pod);
            match effect {
                Effect::NotRedirected(reason) => {
                    assert_eq!(report["redirected"], false, "{name}, {item}: {report}");
                    assert!(report["decision"].as_str().expect("text").contains(reason), "{name}, {item}: {report}");
                }
                Effect::Set(key, value) => {
                    let (found, sources) = setting(&report, key);
                    assert_eq!(found, value, "{name}, {item}");
                    let named = sources.iter().any(|source| source.as_str().is_some_and(|text| text.ends_with(item)));
                    assert!(named, "{name}, {item}: {sources:?}");
                    assert_ne!(setting(&before, key).0, value, "{name}, {item}: it changes nothing");
                }
                Effect::Proxy(uid, gid) => {
                    assert_eq!(
                        (&report["proxy"]["uid"], &report["proxy"]["gid"]),
                        (&json!([uid]), &json!([gid])),
                        "{name}"
                    );
                }
                Effect::None => assert_eq!(outcome(&report), outcome(&before), "{name}, {item}"),
            }
        }
    }
}

/// The flags of Istio's validation container describe the rules that it expects (istio, `tools/istio-iptables`).
#[test]
fn the_settings_agree_with_the_flags_of_istios_validation() {
    for (name, mut pod) in all_pods() {
        let report = explain(&pod);
        let args: Vec<String> =
            serde_json::from_value(container(&mut pod, "istio-validation")["args"].clone()).expect("args");
        let flags: BTreeMap<&str, &str> = args.windows(2).map(|pair| (pair[0].as_str(), pair[1].as_str())).collect();
        let as_text = |key: &str| match setting(&report, key).0 {
            Value::Array(items) => {
                let mut items: Vec<String> = items.iter().map(|item| item.as_str().expect("text").to_owned()).collect();
                items.sort();
                items.join(",")
            }
            Value::String(text) => text,
            other => other.to_string(),
        };
        for (flag, key) in [
            ("-p", "proxy_port"),
            ("-z", "inbound_capture_port"),
            ("-u", "proxy_uid"),
            ("-m", "inbound_interception_mode"),
            ("-i", "outbound_ip_ranges_include"),
            ("-x", "outbound_ip_ranges_exclude"),
            ("-b", "inbound_ports_include"),
            ("-d", "inbound_ports_exclude"),
            ("-o", "outbound_ports_exclude"),
        ] {
            let mut expected: Vec<&str> = flags[flag].split(',').collect();
            expected.sort_unstable();
            assert_eq!(as_text(key), expected.join(","), "{name}: {flag}");
        }
    }
}

#[test]
fn the_proxys_uid_is_the_last_of_the_namespaces_range_on_openshift_and_1337_on_kubernetes() {
    for (platform, uid) in [("openshift", 1_000_650_000 + 10_000 - 1), ("kubernetes", 1337)] {
        for version in VERSIONS {
            let proxy = &explain(&injected(version, platform))["proxy"];
            assert_eq!((&proxy["uid"], &proxy["gid"]), (&json!([uid]), &json!([uid])), "{version} on {platform}");
            assert_eq!(proxy["uid_sources"], json!(["container istio-proxy, runAsUser"]));
        }
    }
}

#[test]
fn the_networks_of_the_pod_and_of_the_injector_are_both_selected() {
    for version in VERSIONS {
        let mut pod = Pod { namespace: "shop".into(), ..Pod::default() };
        let injected = injected(version, "openshift");
        let networks_key = "k8s.v1.cni.cncf.io/networks";
        let networks_value = injected["metadata"]["annotations"][networks_key].as_str().expect("text");
        pod.annotations.insert(networks_key.into(), networks_value.into());
        let selected = networks::networks(&pod).expect("understood");
        let selected: Vec<_> =
            selected.elements.iter().map(|one| (one.object.namespace.as_str(), one.object.name.as_str())).collect();
        assert_eq!(selected, [("shop", "alt-net"), ("default", "istio-cni")], "{version}: {networks_value}");
    }
}

#[test]
fn the_document_contains_each_item() {
    let document = read("conf/README.md");
    let rows: Vec<&str> = document.lines().filter(|line| line.starts_with("| ")).collect();
    for (item, _, _) in items() {
        assert!(rows.iter().any(|row| row.contains(&format!("`{item}`"))), "{item}");
    }
    for version in VERSIONS {
        assert!(document.contains(version), "{version}");
    }
}
