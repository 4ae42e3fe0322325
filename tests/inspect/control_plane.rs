//! The parts of Istio's injected pods that detour depends on (conf/README.md), item by item (control_plane.yaml), with
//! pods from the injectors of several minor versions (`tests/golden/injected`).

use crate::run::detour;
use detour_cni::networks;
use detour_cni::pod::Pod;
use serde::Deserialize;
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

/// A change to an injected pod.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    /// The annotation of the item's name; null removes it.
    Annotation(Value),
    /// The label of the item's name.
    Label(String),
    /// The variable of the item's name, of the proxy.
    Env(String),
    /// Keys of this container; null removes the container.
    Container(String, Value),
    MoveProxy,
}

/// The expected effect of a change.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Effect {
    /// The pod is not redirected, with this text in the reason.
    NotRedirected(String),
    /// A setting has this value, with the item as its source.
    Set(String, Value),
    /// The proxy has this UID and GID.
    Proxy(u32, u32),
    /// Nothing changes.
    None,
}

/// Returns the items by their names in conf/README.md.
fn items() -> Vec<(String, Change, Effect)> {
    serde_saphyr::from_str(include_str!("control_plane.yaml")).expect("YAML")
}

fn changed(pod: &Value, item: &str, change: &Change) -> Value {
    let mut pod = pod.clone();
    match change {
        Change::Annotation(Value::Null) => {
            pod["metadata"]["annotations"].as_object_mut().expect("annotations").remove(item);
        }
        Change::Annotation(value) => pod["metadata"]["annotations"][item] = value.clone(),
        Change::Label(value) => pod["metadata"]["labels"][item] = value.as_str().into(),
        Change::Env(value) => {
            let env = container(&mut pod, "istio-proxy")["env"].as_array_mut().expect("a list");
            env.retain(|variable| variable["name"] != item);
            env.push(json!({ "name": item, "value": value }));
        }
        Change::Container(name, Value::Null) => {
            let containers = pod["spec"]["initContainers"].as_array_mut().expect("a list");
            containers.retain(|container| container["name"] != *name);
        }
        Change::Container(name, keys) => {
            let container = container(&mut pod, name).as_object_mut().expect("a container");
            container.extend(keys.as_object().expect("keys").clone());
        }
        Change::MoveProxy => move_proxy(&mut pod),
    }
    pod
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
            let report = explain(&changed(&pod, &item, &change));
            match effect {
                Effect::NotRedirected(reason) => {
                    assert_eq!(report["redirected"], false, "{name}, {item}: {report}");
                    assert!(report["decision"].as_str().expect("text").contains(&reason), "{name}, {item}: {report}");
                }
                Effect::Set(key, value) => {
                    let (found, sources) = setting(&report, &key);
                    assert_eq!(found, value, "{name}, {item}");
                    let named = sources.iter().any(|source| source.as_str().is_some_and(|text| text.ends_with(&item)));
                    assert!(named, "{name}, {item}: {sources:?}");
                    assert_ne!(setting(&before, &key).0, value, "{name}, {item}: it changes nothing");
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
