//! The JSON form of a networks annotation: an array of network selection elements.

use super::selection::{NetworksAnnotation, Selection, Selections};
use super::shorthand::{ACCEPTED_NAME, ACCEPTED_NAMESPACE};
use crate::cni::json_spans::{elements, members};
use crate::cni::{
    Code, Error, LIST_ITEMS, at_most, check_interface_name, excerpt, is_dns_label, is_dns_subdomain, wrong_type,
};
use ipnet::IpNet;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::net::IpAddr;

const ACCEPTED: &str = r#"an array of objects such as [{"name": "a"}], or the shorthand such as a,ns/b@eth1"#;
const ACCEPTED_HARDWARE_ADDRESS: &str = "a hardware address such as 02:00:00:00:00:01";
const ACCEPTED_STRING: &str = "a string";

/// The fields of an element. ovn-kubernetes reads the last one from the annotation itself.
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

/// Parses the annotation.
pub(super) fn parse(annotation: &NetworksAnnotation<'_>) -> Result<Selections, Error> {
    let text = annotation.text;
    let whole: Vec<Value> = match serde_json::from_str(text) {
        Ok(Value::Array(whole)) => whole,
        Ok(_) => return Err(annotation.reject(&format!("JSON, but not an array; expected {ACCEPTED}"))),
        Err(error) => return Err(not_json(annotation, &error)),
    };
    annotation.check_count(whole.len())?;
    let (mut selections, mut ignored) = (Selections::default(), IgnoredFields::default());
    for (index, (span, value)) in elements(text, 0).into_iter().zip(&whole).enumerate() {
        let (number, at) = (index + 1, span.start);
        let Value::Object(fields) = value else {
            return Err(wrong_type(&annotation.place(number, at), value, ACCEPTED));
        };
        let places = members(text, span.start).into_iter().map(|member| (member.key, member.value.start)).collect();
        let element = Element { annotation, number, at, fields, places };
        element.collect_ignored(&mut ignored);
        selections.elements.push(element.selection()?);
    }
    selections.warnings.extend(ignored.warnings());
    Ok(selections)
}

fn not_json(annotation: &NetworksAnnotation<'_>, error: &serde_json::Error) -> Error {
    let before =
        annotation.text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
    let character = annotation.character(before + error.column().saturating_sub(1));
    let what = error.to_string();
    let what = what.split(" at line ").next().unwrap_or_default();
    annotation.reject(&format!("invalid JSON at character {character}: {what}; expected {ACCEPTED}"))
}

/// An element of the array.
struct Element<'a> {
    annotation: &'a NetworksAnnotation<'a>,
    /// The number of the element, counted from 1.
    number: usize,
    /// The byte of the annotation at which it starts.
    at: usize,
    fields: &'a Map<String, Value>,
    /// The fields in the order of the text, repeated ones included, with the byte at which the value starts.
    places: Vec<(String, usize)>,
}

/// Fields of an annotation that are ignored.
#[derive(Default)]
struct IgnoredFields {
    unknown: FieldCount,
    repeated: FieldCount,
}

/// The place of the first of some fields, and their number.
#[derive(Default)]
struct FieldCount {
    first: String,
    count: usize,
}

impl FieldCount {
    fn add(&mut self, place: impl Fn() -> String) {
        if self.count == 0 {
            self.first = place();
        }
        self.count += 1;
    }

    /// Returns a warning with the first place, the reason and the number of further fields.
    fn warning(&self, reason: &str) -> Option<String> {
        let more = match self.count {
            0 => return None,
            1 => String::new(),
            count => format!("; and {} more such fields", count - 1),
        };
        Some(format!("{}: {reason}{more}", self.first))
    }
}

impl IgnoredFields {
    fn warnings(&self) -> impl Iterator<Item = String> {
        let unknown = format!("unknown field, ignored; expected one of {}", FIELDS.join(", "));
        let repeated = self.repeated.warning("repeated field; only one value is used");
        self.unknown.warning(&unknown).into_iter().chain(repeated)
    }
}

/// A field that is set.
struct Field<'a> {
    value: &'a Value,
    /// Element, character and field, for messages.
    place: String,
}

impl<'a> Element<'a> {
    fn selection(&self) -> Result<Selection, Error> {
        let name = self.field("name").ok_or_else(|| {
            let msg =
                format!("{}: name: missing; expected {ACCEPTED_NAME}", self.annotation.place(self.number, self.at));
            Error::new(Code::InvalidConfig, msg)
        })?;
        let interface = self.text("interface", ACCEPTED_STRING, |_| true)?;
        let interface =
            if interface.is_some() { interface } else { self.text("interfaceRequest", ACCEPTED_STRING, |_| true)? };
        let interface = interface.map(|field| field.interface()).transpose()?;
        let owned = |field: Option<Field<'a>>| field.and_then(|field| field.value.as_str()).map(str::to_owned);
        Ok(Selection {
            place: self.annotation.place(self.number, self.at),
            namespace: owned(self.text("namespace", ACCEPTED_NAMESPACE, is_dns_label)?)
                .unwrap_or_else(|| self.annotation.namespace.to_owned()),
            name: name.string(ACCEPTED_NAME, is_dns_subdomain)?.to_owned(),
            interface,
            ips: self.strings("ips", "an address such as 10.0.0.9 or 10.0.0.9/24", is_ip)?.unwrap_or_default(),
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

    /// Returns a field that is set and not `null`. As Go's JSON, which Multus uses: a name in the right case takes
    /// precedence over other cases, and the last of repeated fields is used.
    fn field(&self, name: &str) -> Option<Field<'a>> {
        let same = |key: &&String| key.eq_ignore_ascii_case(name);
        let key = self.fields.get_key_value(name).map(|(key, _)| key).or_else(|| self.fields.keys().rfind(same))?;
        let value = self.fields.get(key).filter(|value| !value.is_null())?;
        let at = self.places.iter().rfind(|(place, _)| place == key).map_or(self.at, |(_, at)| *at);
        Some(Field { value, place: format!("{}: {name}", self.annotation.place(self.number, at)) })
    }

    /// Returns a string that is not empty and valid.
    fn text(&self, name: &str, accepted: &str, is_valid: fn(&str) -> bool) -> Result<Option<Field<'a>>, Error> {
        let Some(field) = self.field(name).filter(|field| field.value != "") else { return Ok(None) };
        field.string(accepted, is_valid)?;
        Ok(Some(field))
    }

    /// Returns an array of valid strings.
    fn strings(&self, name: &str, accepted: &str, is_valid: fn(&str) -> bool) -> Result<Option<Vec<String>>, Error> {
        let Some(field) = self.field(name) else { return Ok(None) };
        let items = field.array()?.map(|item| item.string(accepted, is_valid).map(str::to_owned));
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

    fn collect_ignored(&self, ignored: &mut IgnoredFields) {
        let mut seen = HashSet::new();
        for (name, at) in &self.places {
            let place = || format!("{}: {}", self.annotation.place(self.number, *at), excerpt(name));
            match FIELDS.iter().find(|field| field.eq_ignore_ascii_case(name)) {
                None => ignored.unknown.add(place),
                Some(field) if !seen.insert(field) => ignored.repeated.add(place),
                Some(_) => {}
            }
        }
    }
}

impl<'a> Field<'a> {
    fn reject(&self, accepted: &str) -> Error {
        wrong_type(&self.place, self.value, accepted)
    }

    fn string(&self, accepted: &str, is_valid: fn(&str) -> bool) -> Result<&'a str, Error> {
        self.value.as_str().filter(|text| is_valid(text)).ok_or_else(|| self.reject(accepted))
    }

    fn array(&self) -> Result<impl Iterator<Item = Field<'a>>, Error> {
        let items = self.value.as_array().ok_or_else(|| self.reject("an array"))?;
        at_most(LIST_ITEMS, "items", &self.place, items.len())?;
        let place = self.place.clone();
        Ok(items.iter().enumerate().map(move |(i, value)| Field { value, place: format!("{place}[{i}]") }))
    }

    fn object(&self) -> Result<&'a Map<String, Value>, Error> {
        self.value.as_object().ok_or_else(|| self.reject("an object"))
    }

    fn interface(&self) -> Result<String, Error> {
        let name = self.string(ACCEPTED_STRING, |_| true)?;
        let rejected = |error| Error::new(Code::InvalidConfig, format!("{}: {:?}: {error}", self.place, excerpt(name)));
        check_interface_name(name).map(|()| name.to_owned()).map_err(rejected)
    }

    /// Returns a member of this object that is set and not `null`.
    fn member(&self, object: &'a Map<String, Value>, name: &str) -> Option<Self> {
        let value = object.get(name).filter(|value| !value.is_null())?;
        Some(Field { value, place: format!("{}.{name}", self.place) })
    }

    /// Checks what the plugin `portmap` accepts (containernetworking/plugins, `plugins/meta/portmap`).
    fn port_mappings(&self) -> Result<Vec<Value>, Error> {
        let mapping = |field: Field<'a>| {
            let object = field.object()?;
            for key in ["hostPort", "containerPort"] {
                let Some(port) = field.member(object, key) else {
                    return Err(field.reject("an object with hostPort and containerPort"));
                };
                if !port.value.as_u64().is_some_and(|port| (1..=u64::from(u16::MAX)).contains(&port)) {
                    return Err(port.reject("a port, 1 to 65535"));
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
                return Err(rate.reject("a whole number of bits, or bits per second"));
            }
        }
        Ok(self.value.clone())
    }
}

fn is_ip(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok() || text.parse::<IpNet>().is_ok()
}

/// Lengths of hardware addresses in octets: EUI-48, EUI-64, IP over InfiniBand (Go's `net.ParseMAC`, which Multus uses).
const OCTETS: [usize; 3] = [6, 8, 20];

/// Returns whether `text` is a hexadecimal address in groups of two digits with `:` or `-`, or of four with dots.
fn is_hardware_address(text: &str) -> bool {
    let grouped = |separator: char, octets: usize| {
        let mut groups = 0;
        let valid = text.split(separator).all(|group| {
            groups += 1;
            group.len() == 2 * octets && group.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        valid && OCTETS.contains(&(groups * octets))
    };
    grouped(':', 1) || grouped('-', 1) || grouped('.', 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::networks::Selection;
    use crate::networks::annotations::tests::{assert_rejected, parsed};
    use serde_json::{Value, json};

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
    fn null_and_empty_values_count_as_unset() {
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
    fn the_old_name_of_interface_applies_if_the_new_one_is_unset() {
        let read = one(&json!({"name": "a", "interface": "", "interfaceRequest": "x0"}));
        assert_eq!(read.interface.as_deref(), Some("x0"));
    }

    #[test]
    fn field_names_are_case_insensitive() {
        let read = one(&json!({"Name": "a", "NameSpace": "b", "defaUlt-route": []}));
        assert_eq!((&*read.namespace, &*read.name, read.default_route), ("b", "a", Some(Vec::new())));
    }

    #[test]
    fn many_unknown_or_repeated_fields_cause_one_warning_with_their_number() {
        let fields = |name: &str| (0..10_000).map(|i| format!("\"{name}{i}\":1,")).collect::<String>();
        let started = std::time::Instant::now();
        let selections = parsed(&format!("[{{{}\"name\":\"a\"}}]", fields("odd"))).expect("accepted");
        assert_eq!(selections.warnings.len(), 1, "{:?}", selections.warnings);
        let [first, more] = ["element 1 at character 10: odd0: unknown field", "; and 9999 more such fields"];
        assert!(selections.warnings[0].contains(first) && selections.warnings[0].ends_with(more), "{selections:?}");
        let selections = parsed(&format!("[{{{}\"name\":\"a\"}}]", "\"ips\":[],".repeat(20_000))).expect("accepted");
        assert!(selections.warnings[0].contains("ips: repeated field; only one value is used; and 19998 more"));
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
    fn unknown_and_repeated_fields_cause_warnings() {
        let text = r#"[{"name": "a"}, {"name": "b", "nmae": 1, "ips": [], "ips": ["10.0.0.1"]}]"#;
        let selections = parsed(text).expect("accepted");
        assert_eq!(selections.elements[1].ips, ["10.0.0.1"]);
        let [unknown, repeated] = &selections.warnings[..] else { panic!("{:?}", selections.warnings) };
        assert!(unknown.contains("shop/web-0: element 2 at character 39: nmae: unknown field"), "{unknown}");
        assert!(repeated.contains("element 2 at character 60: ips: repeated field"), "{repeated}");
    }

    #[test]
    fn errors_contain_element_character_and_field() {
        let first = "element 1 at character ";
        for (text, place, what) in [
            ("[{]", "", "invalid JSON at character 3: key must be a string; expected an array of objects"),
            ("[{\"name\": \"ä\"},\n {\"name\" 1}]", "", "invalid JSON at character 26: expected `:`"),
            ("[{\"name\": \"a\"}", "", "invalid JSON at character 14: EOF while parsing a list"),
            (r#"{"name": "a"}"#, "", "JSON, but not an array; expected an array of objects"),
            (r#""a""#, "", "JSON, but not an array"),
            (r#"a,"b""#, "", "invalid JSON at character 1: expected value"),
            (r#"[ "a", "b"]"#, first, "3: "),
            (r#"[{"name": "a"}, []]"#, "element 2 at character ", "17: "),
            ("[{}]", first, "2: name: missing; expected lower-case"),
            (r#"[{"name": ""}]"#, first, "11: name: "),
            (r#"[{"name": 7}]"#, first, "11: name: "),
            (r#"[{"name": "ä/../b"}]"#, first, "11: name: "),
            (r#"[{"name": "a"}, {"name": "B"}]"#, "element 2 at character ", "26: name: "),
            (r#"[{"name": "a", "namespace": "x.y"}]"#, first, "29: namespace: "),
            (r#"[{"name": "a", "interface": "a/b"}]"#, first, r#"29: interface: "a/b": interface name contains"#),
            (r#"[{"name": "a", "interface": 1}]"#, first, "29: interface: "),
            (r#"[{"name": "a", "interfaceRequest": ".."}]"#, first, r#"36: interfaceRequest: "..": interface name is"#),
            (r#"[{"name": "a", "mac": "zz"}]"#, first, "23: mac: "),
            (r#"[{"name": "a", "infiniband-guid": 1}]"#, first, "35: infiniband-guid: "),
            (r#"[{"name": "a", "ips": ["1.2.3"]}]"#, first, "23: ips[0]: "),
            (r#"[{"name": "a", "ips": ["::1", "1.2.3.4/33"]}]"#, first, "23: ips[1]: "),
            (r#"[{"name": "a", "ips": "1.2.3.4"}]"#, first, "23: ips: "),
            (r#"[{"name": "a", "default-route": ["10.0.0.0/8"]}]"#, first, "33: default-route[0]: "),
            (r#"[{"name": "a", "cni-args": []}]"#, first, "28: cni-args: "),
            (r#"[{"name": "a", "deviceID": 1}]"#, first, "28: deviceID: "),
            (r#"[{"name": "a", "bandwidth": {"egressRate": -1}}]"#, first, "29: bandwidth.egressRate: "),
            (r#"[{"name": "a", "bandwidth": 7}]"#, first, "29: bandwidth: "),
            (r#"[{"name": "a", "portMappings": [{"hostPort": 1}]}]"#, first, "32: portMappings[0]: "),
            (
                r#"[{"name": "a", "portMappings": [{"hostPort": 1, "containerPort": 70000}]}]"#,
                first,
                "32: portMappings[0].containerPort: ",
            ),
        ] {
            assert_rejected(text, place, what);
        }
    }

    #[test]
    fn hardware_addresses_are_octets_in_groups() {
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
