//! Networks of a pod, resolved from a configuration and annotations with a cluster that records requests and events.

use detour_cni::cluster::{Cluster, Definition, DefinitionQuery, Definitions, Event, Lookup, ObjectRef};
use detour_cni::cni::{CniCommand, Code, Error, NetConf, Primary};
use detour_cni::networks::{PodNetworks, resolve};
use detour_cni::pod::{Facts, Namespace, Pod, PodRef};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

/// Definitions by namespace and name.
#[derive(Default)]
struct Fake {
    definitions: Vec<Definition>,
    failure: Option<Error>,
    requests: RefCell<Vec<DefinitionQuery>>,
    events: RefCell<Vec<Event>>,
}

impl Fake {
    fn with(definitions: &[(&str, &str, &str)]) -> Self {
        let definition = |(namespace, name, config): &(&str, &str, &str)| Definition {
            object: object(namespace, name),
            config: (*config).to_owned(),
            ..Definition::default()
        };
        Self { definitions: definitions.iter().map(definition).collect(), ..Self::default() }
    }

    fn requested(&self) -> Vec<String> {
        let text = |query: &DefinitionQuery| format!("{}{}", query.object, if query.awaited { "" } else { "?" });
        self.requests.borrow().iter().map(text).collect()
    }
}

impl Definitions for Fake {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        self.requests.borrow_mut().extend_from_slice(wanted);
        let look_up = |query: &DefinitionQuery| match self.definitions.iter().find(|d| d.object == query.object) {
            Some(definition) => Lookup::Found(definition.clone()),
            None => Lookup::Missing(format!("looked for {}", query.object)),
        };
        self.failure.clone().map_or_else(|| Ok(wanted.iter().map(look_up).collect()), Err)
    }
}

impl Cluster for Fake {
    fn facts(&self, _: &PodRef, _: bool) -> Result<Facts, Error> {
        unreachable!("the pod is given")
    }

    fn namespace(&self, _: &PodRef) -> Result<Namespace, Error> {
        unreachable!("the pod is given")
    }

    fn probe(&self) -> Result<(), Error> {
        unreachable!("the cluster is given")
    }

    fn report(&self, _: &Pod, _: Option<&str>, events: &[Event]) -> Result<(), Error> {
        self.events.borrow_mut().extend_from_slice(events);
        Ok(())
    }
}

fn object(namespace: &str, name: &str) -> ObjectRef {
    ObjectRef { namespace: namespace.into(), name: name.into() }
}

/// Returns a pod of `shop` that selects networks and another default network.
fn pod(networks: &str, default: Option<&str>) -> Pod {
    let mut pod = Pod { namespace: "shop".into(), name: "web-0".into(), ..Pod::default() };
    pod.annotations.insert("k8s.v1.cni.cncf.io/networks".into(), networks.into());
    pod.annotations.extend(default.map(|text| ("v1.multus-cni.io/default-network".into(), text.into())));
    pod
}

fn primary(keys: &Value) -> Primary {
    let mut conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "detour"});
    conf.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("a configuration");
    conf.primary.expect("a primary plugin")
}

/// Returns a primary plugin with one static delegate.
fn delegate() -> Primary {
    primary(&json!({"delegates": [{"name": "ovn", "type": "ovn-k8s-cni-overlay"}]}))
}

/// Returns names and interfaces.
fn named(networks: &PodNetworks) -> Vec<(&str, &str)> {
    networks.networks.iter().map(|network| (&*network.name, &*network.interface)).collect()
}

/// Creates a directory with these configuration files.
fn directory(test: &str, files: &[(&str, &str)]) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("networks").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("a directory");
    for (name, text) in files {
        fs::write(dir.join(name), text).expect("a file");
    }
    dir
}

const BRIDGE: &str = r#"{"type":"bridge","name":"br"}"#;

#[test]
fn the_networks_of_a_meshed_pod_on_openshift_are_resolved() {
    let istio = "{ \"name\": \"istio-cni\", \"type\": \"detour\" }";
    let dir = directory("openshift", &[("10-ovn.conf", r#"{"name":"ovn","type":"ovn"}"#), ("istio-cni.conf", istio)]);
    let conf = primary(&json!({"clusterNetwork": dir.join("10-ovn.conf"), "confDir": dir, "namespaceIsolation": true}));
    let cluster = Fake::with(&[("default", "istio-cni", ""), ("shop", "mac.vlan", BRIDGE)]);
    let pod = pod("default/istio-cni, mac.vlan@data0, default/istio-cni", None);
    let found = resolve(&conf, Some(&cluster), Some(&pod), "eth0", None).expect("networks");
    let wanted =
        [("ovn", "eth0"), ("default/istio-cni", "net1"), ("shop/mac.vlan", "data0"), ("default/istio-cni", "net3")];
    assert_eq!(named(&found), wanted);
    assert_eq!(found.networks[1].configuration.text, istio);
    assert_eq!(found.networks[2].configuration.text, BRIDGE);
    assert_eq!(found.networks[0].selection, None);
    assert_eq!(found.networks[2].selection.as_ref().map(|selection| &*selection.object.name), Some("mac.vlan"));
    assert_eq!(cluster.requested(), ["default/istio-cni", "shop/mac.vlan"], "each definition once");
}

#[test]
fn static_delegates_need_no_cluster() {
    let delegates =
        json!([{"name": "a", "type": "bridge"}, {"name": "b", "plugins": [{"type": "ptp"}, {"type": "x"}]}]);
    let found = resolve(&primary(&json!({"delegates": delegates})), None, None, "eth0", None).expect("networks");
    assert_eq!(named(&found), [("a", "eth0"), ("b", "net1")]);
    assert_eq!(found.networks[1].configuration.types().collect::<Vec<_>>(), ["ptp", "x"]);
    let error = resolve(&primary(&json!({"delegates": [{"name": "a", "type": "x/y"}]})), None, None, "eth0", None);
    assert!(error.expect_err("a path").msg.starts_with("delegates[0].type: "));
    let error = resolve(&delegate(), None, Some(&pod("a", None)), "eth0", None).expect_err("no API server");
    assert!(error.msg.contains("element 1 at character 1: shop/a: no API server to look up"), "{error}");
}

#[test]
fn a_name_in_the_configuration_refers_to_a_definition_or_a_file() {
    let dir = directory(
        "names",
        &[("a.conf", r#"{"name":"ovn","type":"file"}"#), ("b.conf", r#"{"name":"extra","type":"b"}"#)],
    );
    let conf = primary(
        &json!({"clusterNetwork": "ovn", "defaultNetworks": ["extra"], "confDir": dir, "multusNamespace": "net"}),
    );
    let cluster = Fake::with(&[("net", "ovn", r#"{"type":"definition"}"#)]);
    let found = resolve(&conf, Some(&cluster), Some(&pod("", None)), "eth0", None).expect("networks");
    assert_eq!(named(&found), [("net/ovn", "eth0"), ("extra", "net1")]);
    assert_eq!(found.networks[0].configuration.types().collect::<Vec<_>>(), ["definition"]);
    assert_eq!(cluster.requested(), ["net/extra?", "net/ovn?"], "a definition that may be a file is not awaited");

    let found = resolve(&conf, Some(&Fake::with(&[])), Some(&pod("", None)), "eth0", None).expect("networks");
    assert_eq!(found.networks[0].configuration.types().collect::<Vec<_>>(), ["file"]);
    let conf = primary(&json!({"clusterNetwork": "absent", "confDir": dir}));
    let error = resolve(&conf, Some(&Fake::with(&[])), None, "eth0", None).expect_err("neither");
    assert_eq!(error.code, Code::InvalidConfig);
    assert!(error.msg.starts_with("clusterNetwork: ") && error.msg.ends_with("found: ovn, extra"), "{error}");
    assert_eq!(error.details, "no NetworkAttachmentDefinition either: looked for kube-system/absent");
}

#[test]
fn system_namespaces_get_no_default_networks() {
    let dir = directory("system", &[("a.conf", r#"{"name":"ovn","type":"a"}"#)]);
    let keys = json!({"clusterNetwork": dir, "defaultNetworks": [dir], "systemNamespaces": ["shop"]});
    let cluster = Fake::with(&[("shop", "a", BRIDGE)]);
    let found = resolve(&primary(&keys), Some(&cluster), Some(&pod("a", None)), "eth0", None).expect("networks");
    assert_eq!(named(&found), [("ovn", "eth0"), ("shop/a", "net1")]);
    let other = Pod { namespace: "other".into(), ..pod("shop/a", None) };
    let found = resolve(&primary(&keys), Some(&cluster), Some(&other), "eth0", None).expect("networks");
    assert_eq!(named(&found), [("ovn", "eth0"), ("ovn", "net1"), ("shop/a", "net2")]);
}

#[test]
fn a_pod_can_select_another_default_network() {
    let conf = primary(&json!({"clusterNetwork": "/absent", "multusNamespace": "net", "namespaceIsolation": true}));
    let cluster = Fake::with(&[("net", "other", BRIDGE), ("shop", "a", BRIDGE)]);
    let found = resolve(&conf, Some(&cluster), Some(&pod("a", Some("other@ovn0"))), "eth0", None).expect("networks");
    assert_eq!(named(&found), [("net/other", "ovn0"), ("shop/a", "net1")]);
}

#[test]
fn a_missing_definition_is_an_error_with_a_hint_and_an_event() {
    let cluster =
        Fake::with(&[("default", "istio-cni", BRIDGE), ("infra", "istio-cni", BRIDGE), ("shop", "a", BRIDGE)]);
    let pod = pod("a, istio-cni", None);
    let error = resolve(&delegate(), Some(&cluster), Some(&pod), "eth0", Some(&cluster)).expect_err("missing");
    let place = r#"annotation "k8s.v1.cni.cncf.io/networks" of pod shop/web-0: element 2 at character 4"#;
    let missing = format!("{place}: NetworkAttachmentDefinition \"istio-cni\" not found in namespace \"shop\"");
    let hint = "; create it, or write NAMESPACE/istio-cni for one of another namespace";
    let wanted = Error::new(Code::InvalidConfig, format!("{missing}{hint}")).with_details("looked for shop/istio-cni");
    assert_eq!(error, wanted);
    let events = cluster.events.take();
    assert!(events.len() == 1 && events[0].warning && events[0].reason == "NoNetworkFound", "{events:?}");
    let message =
        "cannot find a network-attachment-definition (istio-cni) in namespace (shop): looked for shop/istio-cni";
    assert_eq!(events[0].message, message);
}

#[test]
fn invalid_annotations_are_rejected_without_a_request() {
    let isolated = primary(&json!({"delegates": [{"name": "ovn", "type": "a"}], "namespaceIsolation": true}));
    let routes = r#"[{"name": "a", "default-route": ["10.0.0.1"]}, {"name": "b", "default-route": ["10.0.0.2"]}]"#;
    for (conf, networks, wanted) in [
        (&delegate(), "a,,b", "element 2 at character 3: empty element"),
        (&delegate(), "a@eth0", "element 1 at character 1: interface name \"eth0\" (as requested) is already"),
        (&delegate(), "a@net2,b", "element 2 at character 8: interface name \"net2\" (by its position) is already"),
        (&delegate(), routes, "element 2 at character 48: default-route: 10.0.0.2 is the pod's second IPv4"),
        (&isolated, "a,other/b", "element 2 at character 3: other/b: namespaceIsolation forbids"),
    ] {
        let cluster = Fake::with(&[]);
        let error = resolve(conf, Some(&cluster), Some(&pod(networks, None)), "eth0", None).expect_err(networks);
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(error.msg.contains(&format!("pod shop/web-0: {wanted}")), "{error}");
        assert!(cluster.requested().is_empty() && cluster.events.take().is_empty());
    }
}

#[test]
fn invalid_definitions_are_rejected() {
    let mut sriov = Fake::with(&[("shop", "b", BRIDGE)]);
    sriov.definitions[0].annotations.insert("k8s.v1.cni.cncf.io/resourceName".into(), "intel.com/sriov".into());
    for (cluster, wanted) in [
        (Fake::with(&[("shop", "b", r#"{"type":"../x"}"#)]), "spec.config.type: "),
        (Fake::with(&[("shop", "b", "nonsense")]), "spec.config: invalid JSON"),
        (sriov, "annotation \"k8s.v1.cni.cncf.io/resourceName\" requests a device"),
    ] {
        let error = resolve(&delegate(), Some(&cluster), Some(&pod("b", None)), "eth0", None).expect_err(wanted);
        let wanted = format!("element 1 at character 1: NetworkAttachmentDefinition shop/b: {wanted}");
        assert!(error.code == Code::InvalidConfig && error.msg.contains(&wanted), "{error}");
    }
}
