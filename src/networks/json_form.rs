//! The JSON form: an array of network selection elements.
//!
//! Hardware addresses in text.

use super::json_text::{elements, members};
use super::selection::{NetworksAnnotation, Selection, Selections};
use super::shorthand::{NAME, NAMESPACE};
use crate::cni::{
    Code, Error, LIST_ITEMS, at_most, check_interface_name, excerpt, is_dns_label, is_dns_subdomain, wrong_type,
};
use ipnet::IpNet;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::net::IpAddr;

const ACCEPTED: &str = r#"an array of objects, as [{"name": "a"}], or the comma form, as a,ns/b@eth1"#;

/// The fields of an element. The last one only ovn-kubernetes reads, in the annotation itself.
const FIELDS: [&str; 13] = [
    "name",
    "namespace",
    "interface",
    "interfaceRequest",
    "ips",
    "mac",
    "infiniband-guid",
    "portMappings",
    "bandwidth",
    "deviceID",
    "cni-args",
    "default-route",
    "ipam-claim-reference",
];

/// Understands the annotation's text.
pub(super) fn parse(annotation: &NetworksAnnotation<'_>) -> Result<Selections, Error> {
    let text = annotation.text;
    let whole: Vec<Value> = match serde_json::from_str(text) {
        Ok(Value::Array(whole)) => whole,
        Ok(_) => return Err(annotation.refuse(&format!("it is JSON, but no array; accepted: {ACCEPTED}"))),
        Err(error) => return Err(no_json(annotation, &error)),
    };
    annotation.check_count(whole.len())?;
    let (mut selections, mut ignored) = (Selections::default(), Ignored::default());
    for (index, (span, value)) in elements(text).into_iter().zip(&whole).enumerate() {
        let (number, at) = (index + 1, span.start);
        let Value::Object(fields) = value else {
            let what = wrong_type(&annotation.place(number, at), value, ACCEPTED);
            return Err(what);
        };
        let places = members(&text[span]).into_iter().map(|(name, value)| (name, at + value.start)).collect();
        let element = Element { annotation, number, at, fields, places };
        element.look_for_ignored(&mut ignored);
        selections.elements.push(element.selection()?);
    }
    selections.warnings.extend(ignored.warnings());
    Ok(selections)
}

fn no_json(annotation: &NetworksAnnotation<'_>, error: &serde_json::Error) -> Error {
    let before =
        annotation.text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
    let character = annotation.character(before + error.column().saturating_sub(1));
    let what = error.to_string();
    let what = what.split(" at line ").next().unwrap_or_default();
    annotation.refuse(&format!("it is not JSON at character {character}: {what}; accepted: {ACCEPTED}"))
}

/// An object of the array.
struct Element<'a> {
    annotation: &'a NetworksAnnotation<'a>,
    /// Which one, counted from 1.
    number: usize,
    /// The byte of the annotation's text that it starts at.
    at: usize,
    fields: &'a Map<String, Value>,
    /// Where the fields' values start, for each time that one is written.
    places: Vec<(String, usize)>,
}

/// What of an annotation is ignored.
#[derive(Default)]
struct Ignored {
    unknown: UnknownFields,
    repeated: UnknownFields,
}

/// The first of some fields, and how many there are.
#[derive(Default)]
struct UnknownFields {
    first: String,
    count: usize,
}

impl UnknownFields {
    fn add(&mut self, place: impl Fn() -> String) {
        if self.count == 0 {
            self.first = place();
        }
        self.count += 1;
    }

    /// The first one with its place, what it is, and how many more there are of that.
    fn warning(&self, what: &str) -> Option<String> {
        let more = match self.count {
            0 => return None,
            1 => String::new(),
            count => format!("; and {} more such fields", count - 1),
        };
        Some(format!("{}: {what}{more}", self.first))
    }
}

impl Ignored {
    fn warnings(&self) -> impl Iterator<Item = String> {
        let unknown = format!("unknown field, ignored; known: {}", FIELDS.join(", "));
        let repeated = self.repeated.warning("it is written more than once; one counts");
        self.unknown.warning(&unknown).into_iter().chain(repeated)
    }
}

/// A field that is there.
struct Field<'a> {
    value: &'a Value,
    /// Element, character and field, for messages.
    place: String,
}

impl<'a> Element<'a> {
    fn selection(&self) -> Result<Selection, Error> {
        let name = self.field("name").ok_or_else(|| {
            let msg = format!("{}: name: missing; expected {NAME}", self.annotation.place(self.number, self.at));
            Error::new(Code::InvalidConfig, msg)
        })?;
        let interface = self.text("interface", NOT_EMPTY, |_| true)?;
        let interface =
            if interface.is_some() { interface } else { self.text("interfaceRequest", NOT_EMPTY, |_| true)? };
        let interface = interface.map(|field| field.interface()).transpose()?;
        let owned = |field: Option<Field<'a>>| field.and_then(|field| field.value.as_str()).map(str::to_owned);
        Ok(Selection {
            place: self.annotation.place(self.number, self.at),
            namespace: owned(self.text("namespace", NAMESPACE, is_dns_label)?)
                .unwrap_or_else(|| self.annotation.namespace.to_owned()),
            name: name.string(NAME, is_dns_subdomain)?.to_owned(),
            interface,
            ips: self.strings("ips", "an address, as 10.0.0.9 or 10.0.0.9/24", is_ip)?.unwrap_or_default(),
            mac: owned(self.text("mac", ACCEPTED_HARDWARE_ADDRESS, is_hardware_address)?),
            infiniband_guid: owned(self.text("infiniband-guid", ACCEPTED_HARDWARE_ADDRESS, is_hardware_address)?),
            port_mappings: self
                .field("portMappings")
                .map(|field| field.port_mappings())
                .transpose()?
                .unwrap_or_default(),
            bandwidth: self.field("bandwidth").map(|field| field.bandwidth()).transpose()?,
            device_id: owned(self.text("deviceID", "a string", |_| true)?),
            cni_args: self.field("cni-args").map(|field| field.object().cloned()).transpose()?.unwrap_or_default(),
            default_route: self.default_route()?,
        })
    }

    /// A field that is there and not `null`. Go's JSON, by which Multus reads, takes names in any
    /// case where there is none in the right one, and of equal ones the last.
    fn field(&self, name: &str) -> Option<Field<'a>> {
        let same = |key: &&String| key.eq_ignore_ascii_case(name);
        let key = self.fields.get_key_value(name).map(|(key, _)| key).or_else(|| self.fields.keys().rfind(same))?;
        let value = self.fields.get(key).filter(|value| !value.is_null())?;
        let at = self.places.iter().rfind(|(place, _)| place == key).map_or(self.at, |(_, at)| *at);
        Some(Field { value, place: format!("{}: {name}", self.annotation.place(self.number, at)) })
    }

    /// A string that isn't empty and that `is_fine`.
    fn text(&self, name: &str, accepted: &str, is_fine: fn(&str) -> bool) -> Result<Option<Field<'a>>, Error> {
        let Some(field) = self.field(name).filter(|field| field.value != "") else { return Ok(None) };
        field.string(accepted, is_fine)?;
        Ok(Some(field))
    }

    /// An array of strings that are all fine.
    fn strings(&self, name: &str, accepted: &str, is_fine: fn(&str) -> bool) -> Result<Option<Vec<String>>, Error> {
        let Some(field) = self.field(name) else { return Ok(None) };
        let items = field.array()?.map(|item| item.string(accepted, is_fine).map(str::to_owned));
        items.collect::<Result<_, _>>().map(Some)
    }

    fn default_route(&self) -> Result<Option<Vec<IpAddr>>, Error> {
        let texts = self.strings("default-route", "an IPv4 or IPv6 address", |text| text.parse::<IpAddr>().is_ok())?;
        // As in Multus (Go's net.IP.To4), an IPv4-mapped IPv6 address is an IPv4 gateway.
        let gateways = |texts: Vec<String>| {
            texts.iter().filter_map(|text| text.parse().ok()).map(|gateway: IpAddr| gateway.to_canonical()).collect()
        };
        Ok(texts.map(gateways))
    }

    fn look_for_ignored(&self, ignored: &mut Ignored) {
        let mut known = HashSet::new();
        for (name, at) in &self.places {
            let place = || format!("{}: {}", self.annotation.place(self.number, *at), excerpt(name));
            match FIELDS.iter().find(|field| field.eq_ignore_ascii_case(name)) {
                None => ignored.unknown.add(place),
                Some(field) if !known.insert(field) => ignored.repeated.add(place),
                Some(_) => {}
            }
        }
    }
}

const NOT_EMPTY: &str = "a string";

impl<'a> Field<'a> {
    fn refuse(&self, accepted: &str) -> Error {
        wrong_type(&self.place, self.value, accepted)
    }

    fn string(&self, accepted: &str, is_fine: fn(&str) -> bool) -> Result<&'a str, Error> {
        self.value.as_str().filter(|text| is_fine(text)).ok_or_else(|| self.refuse(accepted))
    }

    fn array(&self) -> Result<impl Iterator<Item = Field<'a>>, Error> {
        let items = self.value.as_array().ok_or_else(|| self.refuse("an array"))?;
        at_most(LIST_ITEMS, "items", &self.place, items.len())?;
        let place = self.place.clone();
        Ok(items.iter().enumerate().map(move |(i, value)| Field { value, place: format!("{place}[{i}]") }))
    }

    fn object(&self) -> Result<&'a Map<String, Value>, Error> {
        self.value.as_object().ok_or_else(|| self.refuse("an object"))
    }

    fn interface(&self) -> Result<String, Error> {
        let name = self.string(NOT_EMPTY, |_| true)?;
        let refused = |error| Error::new(Code::InvalidConfig, format!("{}: {:?}: {error}", self.place, excerpt(name)));
        check_interface_name(name).map(|()| name.to_owned()).map_err(refused)
    }

    /// A member of this object, where it is there and not `null`.
    fn member(&self, object: &'a Map<String, Value>, name: &str) -> Option<Self> {
        let value = object.get(name).filter(|value| !value.is_null())?;
        Some(Field { value, place: format!("{}.{name}", self.place) })
    }

    /// What the plugin `portmap` takes (containernetworking/plugins, `plugins/meta/portmap`).
    fn port_mappings(&self) -> Result<Vec<Value>, Error> {
        let mapping = |field: Field<'a>| {
            let object = field.object()?;
            for key in ["hostPort", "containerPort"] {
                let Some(port) = field.member(object, key) else {
                    return Err(field.refuse("an object with hostPort and containerPort"));
                };
                if !port.value.as_u64().is_some_and(|port| (1..=u64::from(u16::MAX)).contains(&port)) {
                    return Err(port.refuse("a port, 1 to 65535"));
                }
            }
            for key in ["protocol", "hostIP"] {
                if let Some(text) = field.member(object, key) {
                    text.string("a string", |_| true)?;
                }
            }
            Ok(field.value.clone())
        };
        self.array()?.map(mapping).collect()
    }

    fn bandwidth(&self) -> Result<Value, Error> {
        let object = self.object()?;
        for key in ["ingressRate", "ingressBurst", "egressRate", "egressBurst"] {
            if let Some(rate) = self.member(object, key).filter(|rate| !rate.value.is_u64()) {
                return Err(rate.refuse("a whole number of bits, a second for rates"));
            }
        }
        Ok(self.value.clone())
    }
}

fn is_ip(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok() || text.parse::<IpNet>().is_ok()
}

/// Lengths, in octets: EUI-48, EUI-64, InfiniBand's on IP (Go's `net.ParseMAC`, which Multus
/// validates with).
const OCTETS: [usize; 3] = [6, 8, 20];

/// What [`is_hardware_address`] takes, for messages.
pub(super) const ACCEPTED_HARDWARE_ADDRESS: &str = "a hardware address, as 02:00:00:00:00:01";

/// Whether `text` is octets in hexadecimal, two digits between `:` or `-`, or four between dots.
pub(super) fn is_hardware_address(text: &str) -> bool {
    let grouped = |separator: char, octets: usize| {
        let mut groups = 0;
        let fine = text.split(separator).all(|group| {
            groups += 1;
            group.len() == 2 * octets && group.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        fine && OCTETS.contains(&(groups * octets))
    };
    grouped(':', 1) || grouped('-', 1) || grouped('.', 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::networks::Selection;
    use crate::networks::selection::tests::{parse, refused};
    use serde_json::{Value, json};

    fn one(element: &Value) -> Selection {
        let selections = parse(&json!([element]).to_string()).unwrap_or_else(|error| panic!("{error}"));
        assert!(selections.warnings.is_empty(), "{:?}", selections.warnings);
        selections.elements.into_iter().next().expect("an element")
    }

    #[test]
    fn every_field_arrives() {
        let read = one(&json!({
            "name": "mac.vlan", "namespace": "ns1", "interface": "data0", "interfaceRequest": "ignored",
            "ips": ["10.0.0.9", "fd00::9/64"], "mac": "02:00:00:00:00:01", "infiniband-guid": "11:22:33:44:55:66:77:88",
            "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": ""}],
            "bandwidth": {"ingressRate": 1000, "ingressBurst": 800, "egressRate": 0}, "deviceID": "0000:00:01.0",
            "cni-args": {"uid-exclude": {"uids": [7]}}, "default-route": ["10.0.0.1", "fd00::1"],
            "ipam-claim-reference": "claim",
        }));
        let wanted = Selection {
            place: r#"annotation "k8s.v1.cni.cncf.io/networks" of pod shop/web-0: element 1 at character 2"#.into(),
            namespace: "ns1".into(),
            name: "mac.vlan".into(),
            interface: Some("data0".into()),
            ips: vec!["10.0.0.9".into(), "fd00::9/64".into()],
            mac: Some("02:00:00:00:00:01".into()),
            infiniband_guid: Some("11:22:33:44:55:66:77:88".into()),
            port_mappings: vec![json!({"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": ""})],
            bandwidth: Some(json!({"ingressRate": 1000, "ingressBurst": 800, "egressRate": 0})),
            device_id: Some("0000:00:01.0".into()),
            cni_args: json!({"uid-exclude": {"uids": [7]}}).as_object().expect("an object").clone(),
            default_route: Some(vec!["10.0.0.1".parse().expect("IPv4"), "fd00::1".parse().expect("IPv6")]),
        };
        assert_eq!(read, wanted);
    }

    #[test]
    fn what_is_null_or_empty_is_absent() {
        let bare = Selection { name: "a".into(), ..one(&json!({"name": "a"})) };
        let keys = ["namespace", "interface", "interfaceRequest", "mac", "infiniband-guid", "deviceID"];
        let nulls = keys.into_iter().chain(["ips", "portMappings", "bandwidth", "cni-args", "default-route"]);
        for (key, value) in keys.map(|key| (key, json!(""))).into_iter().chain(nulls.map(|key| (key, Value::Null))) {
            assert_eq!(one(&json!({"name": "a", key: value})), bare, "{key}");
        }
        assert_eq!((&*bare.namespace, bare.default_route), ("shop", None));
        assert_eq!(one(&json!({"name": "a", "default-route": []})).default_route, Some(Vec::new()));
        let mapped = one(&json!({"name": "a", "default-route": ["::ffff:10.11.0.254"]}));
        assert_eq!(mapped.default_route, Some(vec!["10.11.0.254".parse().expect("IPv4")]));
    }

    #[test]
    fn the_old_name_of_interface_counts_where_there_is_no_new_one() {
        let read = one(&json!({"name": "a", "interface": "", "interfaceRequest": "x0"}));
        assert_eq!(read.interface.as_deref(), Some("x0"));
    }

    #[test]
    fn names_of_fields_are_known_in_any_case() {
        let read = one(&json!({"Name": "a", "NameSpace": "b", "defaUlt-route": []}));
        assert_eq!((&*read.namespace, &*read.name, read.default_route), ("b", "a", Some(Vec::new())));
    }

    #[test]
    fn many_unknown_or_repeated_fields_are_one_warning_each_that_counts_them() {
        let fields = |name: &str| (0..10_000).map(|i| format!("\"{name}{i}\":1,")).collect::<String>();
        let started = std::time::Instant::now();
        let selections = parse(&format!("[{{{}\"name\":\"a\"}}]", fields("odd"))).expect("accepted");
        assert_eq!(selections.warnings.len(), 1, "{:?}", selections.warnings);
        let [first, more] = ["element 1 at character 10: odd0: unknown field", "; and 9999 more such fields"];
        assert!(selections.warnings[0].contains(first) && selections.warnings[0].ends_with(more), "{selections:?}");
        let selections = parse(&format!("[{{{}\"name\":\"a\"}}]", "\"ips\":[],".repeat(20_000))).expect("accepted");
        assert!(selections.warnings[0].contains("ips: it is written more than once; one counts; and 19998 more"));
        assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
    }

    #[test]
    fn too_many_elements_or_items_are_refused() {
        let elements = |count: usize| format!("[{}]", vec![r#"{"name":"a"}"#; count].join(","));
        assert_eq!(parse(&elements(100)).expect("accepted").elements.len(), 100);
        let of_pod = r#"annotation "k8s.v1.cni.cncf.io/networks" of pod shop/web-0"#;
        let error = parse(&elements(101)).expect_err("too many");
        assert_eq!(error.msg, format!("{of_pod}: expected at most 100 elements, got 101"));
        let ips = json!([{"name": "a", "ips": vec!["10.0.0.1"; 2001]}]).to_string();
        let error = parse(&ips).expect_err("too many");
        assert!(error.msg.ends_with(": ips: expected at most 2000 items, got 2001"), "{error}");
        let error = parse(&format!("[{}]", " ".repeat(256 * 1024))).expect_err("too long");
        assert_eq!(error.msg, format!("{of_pod}: expected at most 262144 bytes, got 262146"));
    }

    #[test]
    fn unknown_fields_and_repeated_ones_are_warnings() {
        let text = r#"[{"name": "a"}, {"name": "b", "nmae": 1, "ips": [], "ips": ["10.0.0.1"]}]"#;
        let selections = parse(text).expect("accepted");
        assert_eq!(selections.elements[1].ips, ["10.0.0.1"]);
        let [unknown, repeated] = &selections.warnings[..] else { panic!("{:?}", selections.warnings) };
        assert!(unknown.contains("shop/web-0: element 2 at character 39: nmae: unknown field"), "{unknown}");
        assert!(repeated.contains("element 2 at character 60: ips: it is written more than once"), "{repeated}");
    }

    #[test]
    fn errors_name_the_element_the_character_and_the_field() {
        let first = "element 1 at character ";
        for (text, place, what) in [
            ("[{]", "", "it is not JSON at character 3: key must be a string; accepted: an array of objects"),
            ("[{\"name\": \"ä\"},\n {\"name\" 1}]", "", "it is not JSON at character 26: expected `:`"),
            ("[{\"name\": \"a\"}", "", "it is not JSON at character 14: EOF while parsing a list"),
            (r#"{"name": "a"}"#, "", "it is JSON, but no array; accepted: an array of objects"),
            (r#""a""#, "", "it is JSON, but no array"),
            (r#"a,"b""#, "", "it is not JSON at character 1: expected value"),
            (r#"[ "a", "b"]"#, first, r#"3: invalid value "a"; expected an array of objects"#),
            (r#"[{"name": "a"}, []]"#, "element 2 at character ", "17: invalid value []"),
            ("[{}]", first, "2: name: missing; expected lower-case"),
            (r#"[{"name": ""}]"#, first, r#"11: name: invalid value ""; expected lower-case"#),
            (r#"[{"name": 7}]"#, first, "11: name: invalid value 7"),
            (r#"[{"name": "ä/../b"}]"#, first, r#"11: name: invalid value "ä/../b""#),
            (r#"[{"name": "a"}, {"name": "B"}]"#, "element 2 at character ", r#"26: name: invalid value "B""#),
            (r#"[{"name": "a", "namespace": "x.y"}]"#, first, r#"29: namespace: invalid value "x.y"; expected lower"#),
            (r#"[{"name": "a", "interface": "a/b"}]"#, first, r#"29: interface: "a/b": interface name contains"#),
            (r#"[{"name": "a", "interface": 1}]"#, first, "29: interface: invalid value 1; expected a string"),
            (r#"[{"name": "a", "interfaceRequest": ".."}]"#, first, r#"36: interfaceRequest: "..": interface name is"#),
            (r#"[{"name": "a", "mac": "zz"}]"#, first, r#"23: mac: invalid value "zz"; expected a hardware"#),
            (r#"[{"name": "a", "infiniband-guid": 1}]"#, first, "35: infiniband-guid: invalid value 1; expected a"),
            (r#"[{"name": "a", "ips": ["1.2.3"]}]"#, first, r#"23: ips[0]: invalid value "1.2.3"; expected an"#),
            (r#"[{"name": "a", "ips": ["::1", "1.2.3.4/33"]}]"#, first, r#"23: ips[1]: invalid value "1.2.3.4/33""#),
            (r#"[{"name": "a", "ips": "1.2.3.4"}]"#, first, r#"23: ips: invalid value "1.2.3.4"; expected an array"#),
            (
                r#"[{"name": "a", "default-route": ["10.0.0.0/8"]}]"#,
                first,
                r#"33: default-route[0]: invalid value "10.0.0.0/8""#,
            ),
            (r#"[{"name": "a", "cni-args": []}]"#, first, "28: cni-args: invalid value []; expected an object"),
            (r#"[{"name": "a", "deviceID": 1}]"#, first, "28: deviceID: invalid value 1; expected a string"),
            (
                r#"[{"name": "a", "bandwidth": {"egressRate": -1}}]"#,
                first,
                "29: bandwidth.egressRate: invalid value -1",
            ),
            (r#"[{"name": "a", "bandwidth": 7}]"#, first, "29: bandwidth: invalid value 7; expected an object"),
            (
                r#"[{"name": "a", "portMappings": [{"hostPort": 1}]}]"#,
                first,
                r#"32: portMappings[0]: invalid value {"hostPort":1}"#,
            ),
            (
                r#"[{"name": "a", "portMappings": [{"hostPort": 1, "containerPort": 70000}]}]"#,
                first,
                "32: portMappings[0].containerPort: invalid value 70000; expected a port, 1 to 65535",
            ),
        ] {
            refused(text, place, what);
        }
    }

    #[test]
    fn octets_in_groups() {
        for text in ["02:00:00:00:00:aF", "02-00-00-00-00-01", "0200.0000.0001", "11:22:33:44:55:66:77:88"] {
            assert!(is_hardware_address(text), "{text}");
        }
        for text in
            ["", "zz", "02:00:00:00:00", "02:00:00:00:00:1", "02-00:00-00-00-01", "020000000001", "02:00:00:00:00:0g"]
        {
            assert!(!is_hardware_address(text), "{text}");
        }
    }
}
