//! One element of an annotation that selects networks: its fields, whichever form it was written in.

use super::selection::Selection;
use crate::cni::{
    Code, Error, LIST_ITEMS, at_most, check_interface_name, excerpt, is_dns_label, is_dns_subdomain, wrong_type,
};
use ipnet::IpNet;
use serde_json::{Map, Value};
use std::net::IpAddr;

/// The names that [`is_dns_subdomain`] accepts.
const ACCEPTED_NAME: &str = "lower-case letters, digits, - and ., at most 253 (an RFC 1123 subdomain)";
/// The names that [`is_dns_label`] accepts.
const ACCEPTED_NAMESPACE: &str = "lower-case letters, digits and -, at most 63 (an RFC 1123 label)";
const ACCEPTED_HARDWARE_ADDRESS: &str = "a hardware address such as 02:00:00:00:00:01";
const ACCEPTED_STRING: &str = "a string";

/// The fields of an element. ovn-kubernetes reads the last one from the annotation itself.
pub(super) const ACCEPTED_FIELDS: &str = "name, namespace, interface, interfaceRequest, ips, mac, infiniband-guid, \
    portMappings, bandwidth, deviceID, cni-args, default-route, ipam-claim-reference";

/// An element of an annotation.
pub(super) struct Element {
    /// Annotation, pod, number and character, for messages.
    pub(super) place: String,
    pub(super) fields: Map<String, Value>,
}

/// A field that is set.
struct Field<'a> {
    value: &'a Value,
    /// Element and field, for messages.
    place: String,
}

impl Element {
    /// Returns the names of fields that are ignored.
    pub(super) fn unknown_fields(&self) -> impl Iterator<Item = &str> {
        let is_known = |key: &str| ACCEPTED_FIELDS.split(", ").any(|field| field.eq_ignore_ascii_case(key));
        self.fields.keys().map(String::as_str).filter(move |key| !is_known(key))
    }

    /// Returns the selection of a network; `namespace` is the default.
    pub(super) fn selection(&self, namespace: &str) -> Result<Selection, Error> {
        let name = self.field("name").ok_or_else(|| {
            Error::new(Code::InvalidConfig, format!("{}: name: missing; expected {ACCEPTED_NAME}", self.place))
        })?;
        let interface = match self.text("interface", ACCEPTED_STRING, |_| true)? {
            None => self.text("interfaceRequest", ACCEPTED_STRING, |_| true)?,
            set => set,
        };
        let owned = |field: Option<Field<'_>>| field.and_then(|field| field.value.as_str()).map(str::to_owned);
        let port_mappings = self.field("portMappings").map(|field| field.port_mappings()).transpose()?;
        let cni_args = self.field("cni-args").map(|field| field.object().cloned()).transpose()?;
        Ok(Selection {
            place: self.place.clone(),
            namespace: owned(self.text("namespace", ACCEPTED_NAMESPACE, is_dns_label)?)
                .unwrap_or_else(|| namespace.to_owned()),
            name: name.string(ACCEPTED_NAME, is_dns_subdomain)?.to_owned(),
            interface: interface.map(|field| field.interface()).transpose()?,
            ips: self.strings("ips", "an address such as 10.0.0.9 or 10.0.0.9/24", is_ip)?.unwrap_or_default(),
            mac: owned(self.text("mac", ACCEPTED_HARDWARE_ADDRESS, is_hardware_address)?),
            infiniband_guid: owned(self.text("infiniband-guid", ACCEPTED_HARDWARE_ADDRESS, is_hardware_address)?),
            port_mappings: port_mappings.unwrap_or_default(),
            bandwidth: self.field("bandwidth").map(|field| field.bandwidth()).transpose()?,
            device_id: owned(self.text("deviceID", ACCEPTED_STRING, |_| true)?),
            cni_args: cni_args.unwrap_or_default(),
            default_route: self.default_route()?,
        })
    }

    /// Returns a field that is set and not `null`. As Go's JSON, which Multus uses: a name in the right case takes
    /// precedence over other cases.
    fn field(&self, name: &str) -> Option<Field<'_>> {
        let in_other_case =
            || self.fields.iter().rfind(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        let value = self.fields.get(name).or_else(in_other_case).filter(|value| !value.is_null())?;
        Some(Field { value, place: format!("{}: {name}", self.place) })
    }

    /// Returns a string that is not empty and valid.
    fn text(&self, name: &str, accepted: &str, is_valid: fn(&str) -> bool) -> Result<Option<Field<'_>>, Error> {
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
            ("[{]", "", "invalid JSON at character 3: key must be a string; expected an array of objects"),
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
            assert!(is_hardware_address(text), "{text}");
        }
        for text in
            ["", "zz", "02:00:00:00:00", "02:00:00:00:00:1", "02-00:00-00-00-01", "020000000001", "02:00:00:00:00:0g"]
        {
            assert!(!is_hardware_address(text), "{text}");
        }
    }
}
