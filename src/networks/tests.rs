//! Tests of the annotations that select networks, in both forms.

use super::annotations::{default_network, networks};
use super::{Selection, Selections, annotations};
use crate::cluster::ObjectRef;
use crate::cni::{Code, Error};
use crate::pod::Pod;
use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};
use proptest::prelude::*;
use serde_json::{Value, json};

fn pod(key: &str, text: &str) -> Pod {
    let annotations = [(key.to_owned(), text.to_owned())].into();
    Pod { namespace: "shop".into(), name: "web-0".into(), annotations, ..Pod::default() }
}

/// Returns the networks of a pod with this annotation.
fn parsed(text: &str) -> Result<Selections, Error> {
    networks(&pod(NETWORKS, text))
}

/// Asserts that the text is rejected with annotation and pod, then the place, then the cause.
fn assert_rejected(text: &str, place: &str, what: &str) {
    let error = parsed(text).expect_err(text);
    let wanted = format!("annotation {NETWORKS:?} of pod shop/web-0: {place}{what}");
    assert!(error.code == Code::InvalidConfig && error.to_string().starts_with(&wanted), "{text}: {error}");
}

#[test]
fn a_missing_or_empty_annotation_selects_nothing() {
    assert_eq!(networks(&Pod::default()), Ok(Selections::default()));
    assert_eq!(parsed(""), Ok(Selections::default()));
    assert_eq!(parsed(" \n"), Ok(Selections::default()));
    assert_eq!(parsed("[]"), Ok(Selections::default()));
}

#[test]
fn the_default_network_is_a_single_one_with_its_own_default_namespace() {
    let default = |text: &str| default_network(&pod(DEFAULT_NETWORK, text), "kube-system");
    assert_eq!(default_network(&Pod::default(), "x"), Ok(Selections::default()));
    for text in ["ovn", "[{\"name\": \"ovn\"}]"] {
        let elements = default(text).expect("accepted").elements;
        assert_eq!((&*elements[0].object.namespace, &*elements[0].object.name), ("kube-system", "ovn"));
    }
    assert_eq!(default("other/ovn@eth9").expect("accepted").elements[0].object.namespace, "other");
    for (text, count) in [("a,b", 2), ("", 0), ("[]", 0)] {
        let error = default(text).expect_err("not one");
        let wanted =
            format!("annotation {DEFAULT_NETWORK:?} of pod shop/web-0: expected exactly one network, got {count}");
        assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
    }
}

/// Namespace, name and interface of each element.
fn elements(text: &str) -> Vec<(String, String, String)> {
    let selections = parsed(text).unwrap_or_else(|error| panic!("{error}"));
    assert!(selections.warnings.is_empty(), "{:?}", selections.warnings);
    let named = |s: Selection| (s.object.namespace, s.object.name, s.interface.unwrap_or_default());
    selections.elements.into_iter().map(named).collect()
}

#[test]
fn every_part_is_parsed_without_surrounding_blanks() {
    type Row<'a> = (&'a str, &'a [(&'a str, &'a str, &'a str)]);
    let rows: [Row<'_>; 7] = [
        ("a", &[("shop", "a", "")]),
        ("a,b", &[("shop", "a", ""), ("shop", "b", "")]),
        ("a,a", &[("shop", "a", ""), ("shop", "a", "")]),
        ("default/istio-cni, excludedns@x0", &[("default", "istio-cni", ""), ("shop", "excludedns", "x0")]),
        (" ns1 / noname @ foo0 ", &[("ns1", "noname", "foo0")]),
        ("v1.2-istio,\n b@eth0.100", &[("shop", "v1.2-istio", ""), ("shop", "b", "eth0.100")]),
        ("null", &[("shop", "null", "")]),
    ];
    for (text, wanted) in rows {
        let wanted: Vec<_> = wanted.iter().map(|(a, b, c)| ((*a).into(), (*b).into(), (*c).into())).collect();
        assert_eq!(elements(text), wanted, "{text}");
    }
}

#[test]
fn errors_contain_the_element_and_the_character() {
    for (text, place, what) in [
        ("a,b,", "element 3 at character 5: ", "empty element; expected [NAMESPACE/]NAME[@INTERFACE]"),
        ("a,,b", "element 2 at character 3: ", "empty element"),
        ("a,  ,b", "element 2 at character 5: ", "empty element"),
        ("ä, B", "element 1 at character 1: ", "name: invalid value "),
        ("a, nB", "element 2 at character 4: ", "name: invalid value "),
        ("a, n / B", "element 2 at character 4: ", "name: invalid value "),
        ("ns/", "element 1 at character 1: ", "\"ns/\" has no name"),
        ("@eth1", "element 1 at character 1: ", "\"@eth1\" has no name"),
        ("a/b/c", "element 1 at character 1: ", "\"a/b/c\" has more than one /"),
        ("a@b/c", "element 1 at character 1: ", "namespace: invalid value "),
        ("a@b@c", "element 1 at character 1: ", "\"a@b@c\" has more than one @"),
        ("n/a@b/c", "element 1 at character 1: ", "\"n/a@b/c\" has more than one /"),
        ("n.s/a", "element 1 at character 1: ", "namespace: invalid value "),
        ("a..b", "element 1 at character 1: ", "name: invalid value "),
        ("../x", "element 1 at character 1: ", "namespace: invalid value "),
        ("a%2fb", "element 1 at character 1: ", "name: invalid value "),
        (
            "a@0123456789abcdef",
            "element 1 at character 1: ",
            "interface: \"0123456789abcdef\": interface name is too long",
        ),
        ("a@x y", "element 1 at character 1: ", "interface: \"x y\": interface name contains"),
        ("a@..", "element 1 at character 1: ", "interface: \"..\": interface name is . or .."),
        ("*", "element 1 at character 1: ", "name: invalid value "),
    ] {
        assert_rejected(text, place, what);
    }
}

#[test]
fn too_many_elements_are_rejected_without_parsing_them() {
    let selected = |count: usize| parsed(&vec!["a"; count].join(","));
    assert_eq!(selected(100).expect("accepted").elements.len(), 100);
    let started = std::time::Instant::now();
    let error = selected(125_000).expect_err("too many");
    let of_pod = r#"annotation "k8s.v1.cni.cncf.io/networks" of pod shop/web-0"#;
    assert_eq!(error.msg, format!("{of_pod}: expected at most 100 elements, got 125000"));
    assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn a_long_invalid_name_is_shortened() {
    let error = parsed(&"A".repeat(200_000)).expect_err("no name");
    assert!(error.msg.len() < 400, "{}", error.msg.len());
}

#[test]
fn an_empty_namespace_or_interface_causes_a_warning() {
    for (text, character) in [("a, /b", 4), ("a,b@", 3)] {
        let selections = parsed(text).expect("accepted");
        assert_eq!((&*selections.elements[1].object.namespace, &*selections.elements[1].object.name), ("shop", "b"));
        assert_eq!(selections.elements[1].interface, None);
        let place = format!("element 2 at character {character}: no name");
        assert!(selections.warnings[0].contains(&place), "{:?}", selections.warnings);
    }
}

fn one(element: &Value) -> Selection {
    let selections = parsed(&json!([element]).to_string()).unwrap_or_else(|error| panic!("{error}"));
    assert!(selections.warnings.is_empty(), "{:?}", selections.warnings);
    selections.elements.into_iter().next().expect("an element")
}

#[test]
fn every_field_is_parsed() {
    let read = one(&json!({
        "name": "mac.vlan", "namespace": "ns1", "interface": "data0", "interfaceRequest": "ignored",
        "ips": ["10.0.0.9", "fd00::9/64"], "mac": "02:00:00:00:00:01", "infiniband-guid": "11:22:33:44:55:66:77:88",
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": ""}],
        "bandwidth": {"ingressRate": 1000, "ingressBurst": 800, "egressRate": 0}, "deviceID": "0000:00:01.0",
        "cni-args": {"uid-exclude": {"uids": [7]}}, "default-route": ["10.0.0.1", "fd00::1"],
        "ipam-claim-reference": "claim",
    }));
    let requests = json!({
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": ""}],
        "bandwidth": {"ingressRate": 1000, "ingressBurst": 800, "egressRate": 0}, "ips": ["10.0.0.9", "fd00::9/64"],
        "mac": "02:00:00:00:00:01", "infinibandGUID": "11:22:33:44:55:66:77:88", "deviceID": "0000:00:01.0",
    });
    let wanted = Selection {
        place: r#"annotation "k8s.v1.cni.cncf.io/networks" of pod shop/web-0: element 1 at character 2"#.into(),
        object: ObjectRef { namespace: "ns1".into(), name: "mac.vlan".into() },
        interface: Some("data0".into()),
        runtime_config: requests.as_object().expect("an object").clone(),
        cni_args: json!({"uid-exclude": {"uids": [7]}}).as_object().expect("an object").clone(),
        default_route: Some(vec!["10.0.0.1".parse().expect("IPv4"), "fd00::1".parse().expect("IPv6")]),
    };
    assert_eq!(read, wanted);
    assert_eq!(read.args(), [("MAC", "02:00:00:00:00:01".into()), ("IP", "10.0.0.9,fd00::9/64".into())]);
}

#[test]
fn null_and_empty_values_count_as_unset() {
    let bare = one(&json!({"name": "a"}));
    let keys = ["namespace", "interface", "interfaceRequest", "mac", "infiniband-guid", "deviceID"];
    let nulls = keys.into_iter().chain(["ips", "portMappings", "bandwidth", "cni-args", "default-route"]);
    for (key, value) in keys.map(|key| (key, json!(""))).into_iter().chain(nulls.map(|key| (key, Value::Null))) {
        assert_eq!(one(&json!({"name": "a", key: value})), bare, "{key}");
    }
    assert_eq!(one(&json!({"name": "a", "ips": [], "portMappings": []})), bare);
    assert!(bare.runtime_config.is_empty() && bare.args().is_empty());
    assert_eq!((&*bare.object.namespace, bare.default_route), ("shop", None));
    assert_eq!(one(&json!({"name": "a", "default-route": []})).default_route, Some(Vec::new()));
    let mapped = one(&json!({"name": "a", "default-route": ["::ffff:10.11.0.254"]}));
    assert_eq!(mapped.default_route, Some(vec!["10.11.0.254".parse().expect("IPv4")]));
}

#[test]
fn the_old_name_of_interface_applies_if_the_new_one_is_unset() {
    let read = one(&json!({"name": "a", "interface": "", "interfaceRequest": "x0"}));
    assert_eq!(read.interface.as_deref(), Some("x0"));
}

#[test]
fn field_names_are_case_insensitive() {
    let read = one(&json!({"Name": "a", "NameSpace": "b", "defaUlt-route": []}));
    assert_eq!((&*read.object.namespace, &*read.object.name, read.default_route), ("b", "a", Some(Vec::new())));
}

#[test]
fn many_unknown_fields_cause_one_warning_with_their_number() {
    let fields = (0..10_000).map(|i| format!("\"odd{i}\":1,")).collect::<String>();
    let started = std::time::Instant::now();
    let selections = parsed(&format!("[{{{fields}\"name\":\"a\"}}]")).expect("accepted");
    let [warning] = &selections.warnings[..] else { panic!("{:?}", selections.warnings) };
    assert!(warning.contains("shop/web-0: element 1 at character 2: odd0: unknown field"), "{warning}");
    assert!(warning.ends_with("; and 9999 more such fields"), "{warning}");
    let selections = parsed(&format!("[{{{}\"name\":\"a\"}}]", "\"ips\":[],".repeat(20_000))).expect("accepted");
    assert!(selections.warnings.is_empty(), "the last of repeated fields is used");
    assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn too_many_elements_or_items_are_rejected() {
    let elements = |count: usize| format!("[{}]", vec![r#"{"name":"a"}"#; count].join(","));
    assert_eq!(parsed(&elements(100)).expect("accepted").elements.len(), 100);
    let of_pod = r#"annotation "k8s.v1.cni.cncf.io/networks" of pod shop/web-0"#;
    let error = parsed(&elements(101)).expect_err("too many");
    assert_eq!(error.msg, format!("{of_pod}: expected at most 100 elements, got 101"));
    let ips = json!([{"name": "a", "ips": vec!["10.0.0.1"; 2001]}]).to_string();
    let error = parsed(&ips).expect_err("too many");
    assert!(error.msg.ends_with(": ips: expected at most 2000 items, got 2001"), "{error}");
    let error = parsed(&format!("[{}]", " ".repeat(256 * 1024))).expect_err("too long");
    assert_eq!(error.msg, format!("{of_pod}: expected at most 262144 bytes, got 262146"));
}

#[test]
fn errors_contain_element_character_and_field() {
    let first = "element 1 at character ";
    for (text, place, what) in [
        ("[{]", "", "invalid JSON at character 3: expected a key in double quotes; expected an array of objects"),
        ("[{\"name\": \"ä\"},\n {\"name\" 1}]", "", "invalid JSON at character 26: expected `:`"),
        ("[{\"name\": \"a\"}", "", "invalid JSON at character 14: EOF while parsing a list"),
        (r#"{"name": "a"}"#, "", "JSON, but not an array; expected an array of objects"),
        (r#""a""#, "", "JSON, but not an array"),
        (r#"a,"b""#, "", "invalid JSON at character 1: expected value"),
        (r#"[ "a", "b"]"#, first, "3: "),
        (r#"[{"name": "a"}, []]"#, "element 2 at character ", "17: "),
        ("[{}]", first, "2: name: missing; expected lower-case"),
        (r#"[{"name": ""}]"#, first, "2: name: "),
        (r#"[{"name": 7}]"#, first, "2: name: "),
        (
            r#"[{"name": "ns/x"}]"#,
            first,
            "2: name: invalid value \"ns/x\"; expected lower-case letters, digits, - and ., at most 253 (an RFC 1123 \
             subdomain); write the namespace in the field \"namespace\"",
        ),
        (
            r#"[{"name": "x@eth7"}]"#,
            first,
            "2: name: invalid value \"x@eth7\"; expected lower-case letters, digits, - and ., at most 253 (an RFC 1123 \
             subdomain); write the interface in the field \"interface\"",
        ),
        (r#"[{"name": "a", "ips": ["10.0.0.9/024"]}]"#, first, "2: ips[0]: invalid value \"10.0.0.9/024\""),
        (r#"[{"name": "ä/../b"}]"#, first, "2: name: "),
        (r#"[{"name": "a"}, {"name": "B"}]"#, "element 2 at character ", "17: name: "),
        (r#"[{"name": "a", "namespace": "x.y"}]"#, first, "2: namespace: "),
        (r#"[{"name": "a", "interface": "a/b"}]"#, first, r#"2: interface: "a/b": interface name contains"#),
        (r#"[{"name": "a", "interface": 1}]"#, first, "2: interface: "),
        (r#"[{"name": "a", "interfaceRequest": ".."}]"#, first, r#"2: interfaceRequest: "..": interface name is"#),
        (r#"[{"name": "a", "mac": "zz"}]"#, first, "2: mac: "),
        (r#"[{"name": "a", "infiniband-guid": 1}]"#, first, "2: infiniband-guid: "),
        (r#"[{"name": "a", "ips": ["1.2.3"]}]"#, first, "2: ips[0]: "),
        (r#"[{"name": "a", "ips": ["::1", "1.2.3.4/33"]}]"#, first, "2: ips[1]: "),
        (r#"[{"name": "a", "ips": "1.2.3.4"}]"#, first, "2: ips: "),
        (r#"[{"name": "a", "default-route": ["10.0.0.0/8"]}]"#, first, "2: default-route[0]: "),
        (r#"[{"name": "a", "cni-args": []}]"#, first, "2: cni-args: "),
        (r#"[{"name": "a", "deviceID": 1}]"#, first, "2: deviceID: "),
        (r#"[{"name": "a", "bandwidth": {"egressRate": -1}}]"#, first, "2: bandwidth.egressRate: "),
        (r#"[{"name": "a", "bandwidth": 7}]"#, first, "2: bandwidth: "),
        (r#"[{"name": "a", "portMappings": [{"hostPort": 1}]}]"#, first, "2: portMappings[0]: "),
        (
            r#"[{"name": "a", "portMappings": [{"hostPort": 1, "containerPort": 70000}]}]"#,
            first,
            "2: portMappings[0].containerPort: ",
        ),
    ] {
        assert_rejected(text, place, what);
    }
}

#[test]
fn hardware_addresses_are_octets_in_groups() {
    for text in ["02:00:00:00:00:aF", "02-00-00-00-00-01", "0200.0000.0001", "11:22:33:44:55:66:77:88"] {
        assert!(annotations::is_hardware_address(text), "{text}");
    }
    for text in
        ["", "zz", "02:00:00:00:00", "02:00:00:00:00:1", "02-00:00-00-00-01", "020000000001", "02:00:00:00:00:0g"]
    {
        assert!(!annotations::is_hardware_address(text), "{text}");
    }
}

fn selections() -> impl Strategy<Value = Vec<(Option<String>, String, Option<String>)>> {
    let element = (
        prop::option::of("[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?"),
        "[a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?(\\.[a-z0-9]{1,4}){0,2}",
        prop::option::of("[a-zA-Z0-9][a-zA-Z0-9_.-]{0,14}"),
    );
    prop::collection::vec(element, 1..6)
}

proptest! {
    #[test]
    fn no_text_causes_a_panic(text in "\\PC{0,40}", near in "[a-b/@, \\[\\]{}\":ä]{0,24}") {
        let _ = (parsed(&text), parsed(&near));
    }

    #[test]
    fn both_forms_select_the_same_networks(elements in selections(), blank in "[ \t\n]{0,2}") {
        let comma: Vec<String> = elements.iter().map(|(namespace, name, interface)| {
            let namespace = namespace.as_ref().map(|n| format!("{n}{blank}/")).unwrap_or_default();
            let interface = interface.as_ref().map(|i| format!("{blank}@{i}")).unwrap_or_default();
            format!("{blank}{namespace}{name}{interface}{blank}")
        }).collect();
        let json: Vec<Value> = elements.iter().map(|(namespace, name, interface)| {
            json!({"namespace": namespace, "name": name, "interface": interface})
        }).collect();
        let wanted: Vec<_> = elements.iter().map(|(namespace, name, interface)| {
            (namespace.clone().unwrap_or("shop".into()), name.clone(), interface.clone())
        }).collect();
        for text in [comma.join(","), Value::Array(json).to_string()] {
            let read = parsed(&text).map_err(|error| TestCaseError::fail(error.to_string()))?;
            let read: Vec<_> = read.elements.into_iter().map(|s| (s.object.namespace, s.object.name, s.interface)).collect();
            prop_assert_eq!(&read, &wanted, "{}", text);
        }
    }
}
