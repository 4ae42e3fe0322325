//! The annotations of a pod that select networks, in the JSON form (an array of objects) or the shorthand. They are parsed
//! and checked before any network is added.

use crate::cni::{
    Code, Error, LIST_ITEMS, at_most, check_interface_name, excerpt, is_dns_label, is_dns_subdomain, json_error,
    parse_ip_net, wrong_type,
};
use crate::pod::Pod;
use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::fmt;
use std::net::IpAddr;

/// Limit of elements in an annotation.
const MAX_ELEMENTS: usize = 100;
/// Limit of an annotation, in bytes: the limit of Kubernetes for all annotations of an object.
const MAX_BYTES: usize = 256 * 1024;
const ACCEPTED_JSON: &str = r#"an array of objects such as [{"name": "a"}], or the shorthand such as a,ns/b@eth1"#;
const ACCEPTED_SHORTHAND: &str = "[NAMESPACE/]NAME[@INTERFACE], separated by commas";

/// Returns the networks that the pod selects in addition to the default network. The default namespace is the pod's.
///
/// # Errors
/// [`Code::InvalidConfig`] with annotation, pod, element, character and the expected value.
pub fn networks(pod: &Pod) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(NETWORKS) else { return Ok(Selections::default()) };
    NetworksAnnotation { key: NETWORKS, pod, text }.selections(&pod.namespace)
}

/// Returns the default network that the pod selects instead of the configured one: none or one. The default namespace is
/// `namespace` (Multus's `multusNamespace`).
///
/// # Errors
/// As [`networks`]; the annotation does not select exactly one network.
pub fn default_network(pod: &Pod, namespace: &str) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(DEFAULT_NETWORK) else { return Ok(Selections::default()) };
    let annotation = NetworksAnnotation { key: DEFAULT_NETWORK, pod, text };
    let selections = annotation.selections(namespace)?;
    match selections.elements.len() {
        1 => Ok(selections),
        count => Err(annotation.reject(&format!("expected exactly one network, got {count}"))),
    }
}

/// An annotation of a pod that selects networks.
#[derive(Debug, Clone, Copy)]
struct NetworksAnnotation<'a> {
    key: &'static str,
    pod: &'a Pod,
    text: &'a str,
}

impl NetworksAnnotation<'_> {
    /// Returns the networks; `namespace` is that of an element without one.
    fn selections(&self, namespace: &str) -> Result<Selections, Error> {
        at_most(MAX_BYTES, "bytes", self, self.text.len())?;
        let (elements, warnings) = match self.text {
            empty if empty.trim().is_empty() => return Ok(Selections::default()),
            json if json.contains(['[', '{', '"']) => self.json_elements()?,
            _ => self.shorthand_elements()?,
        };
        let elements = elements.iter().map(|element| element.selection(namespace)).collect::<Result<_, _>>()?;
        Ok(Selections { elements, warnings })
    }

    /// Parses the JSON form. Returns its elements and warnings.
    fn json_elements(&self) -> Result<(Vec<Element>, Vec<String>), Error> {
        let texts: Vec<&RawValue> = match serde_json::from_str(self.text) {
            Ok(texts) => texts,
            Err(error) if error.is_data() => {
                return Err(self.reject(&format!("JSON, but not an array; expected {ACCEPTED_JSON}")));
            }
            Err(error) => return Err(self.not_json(&error)),
        };
        at_most(MAX_ELEMENTS, "elements", self, texts.len())?;
        let (mut elements, mut unknown) = (Vec::new(), Vec::new());
        for (index, text) in texts.into_iter().enumerate() {
            // The element is a part of the annotation's text.
            let place = self.place(index + 1, text.get().as_ptr() as usize - self.text.as_ptr() as usize);
            let value: Value = serde_json::from_str(text.get()).map_err(|error| self.not_json(&error))?;
            let Value::Object(fields) = value else { return Err(wrong_type(&place, &value, ACCEPTED_JSON)) };
            let element = Element { place, fields };
            unknown.extend(element.unknown_fields().map(|field| (element.place.clone(), excerpt(field))));
            elements.push(element);
        }
        let more = match unknown.len() {
            0 | 1 => String::new(),
            count => format!("; and {} more such fields", count - 1),
        };
        let warning = |(place, field): &(String, String)| {
            format!("{place}: {field}: unknown field, ignored; expected one of {ACCEPTED_FIELDS}{more}")
        };
        Ok((elements, unknown.first().map(warning).into_iter().collect()))
    }

    fn not_json(&self, error: &serde_json::Error) -> Error {
        let lines_before = error.line().saturating_sub(1);
        let before: usize = self.text.split_inclusive('\n').take(lines_before).map(str::len).sum();
        let character = self.character(before + error.column().saturating_sub(1));
        let what = json_error(error);
        let what = what.split(" at line ").next().unwrap_or_default();
        self.reject(&format!("invalid JSON at character {character}: {what}; expected {ACCEPTED_JSON}"))
    }

    /// Parses the shorthand: `[NAMESPACE/]NAME[@INTERFACE]`, separated by commas. Returns its elements and warnings.
    fn shorthand_elements(&self) -> Result<(Vec<Element>, Vec<String>), Error> {
        at_most(MAX_ELEMENTS, "elements", self, self.text.split(',').count())?;
        let (mut elements, mut warnings, mut start) = (Vec::new(), Vec::new(), 0);
        for (index, item) in self.text.split(',').enumerate() {
            let blanks = item.len() - item.trim_start().len();
            let place = self.place(index + 1, start + blanks);
            start += item.len() + 1;
            elements.push(shorthand(place, item.trim(), &mut warnings)?);
        }
        Ok((elements, warnings))
    }

    /// Returns the place of element `number`, counted from 1, at byte `at`, for messages.
    fn place(&self, number: usize, at: usize) -> String {
        format!("{self}: element {number} at character {}", self.character(at))
    }

    /// Returns the number of the character at byte `at`, counted from 1.
    fn character(&self, at: usize) -> usize {
        self.text[..self.text.ceil_char_boundary(at)].chars().count() + 1
    }

    fn reject(&self, why: &str) -> Error {
        Error::new(Code::InvalidConfig, format!("{self}: {why}"))
    }
}

/// Parses one item of the shorthand. A blank namespace or interface counts as absent, with a warning.
fn shorthand(place: String, item: &str, warnings: &mut Vec<String>) -> Result<Element, Error> {
    let reject = |why: &str| Error::new(Code::InvalidConfig, format!("{place}: {why}; expected {ACCEPTED_SHORTHAND}"));
    if item.is_empty() {
        return Err(reject("empty element"));
    }
    let (namespace, rest) = item.split_once('/').map_or((None, item), |(namespace, rest)| (Some(namespace), rest));
    let (name, interface) = rest.split_once('@').map_or((rest, None), |(name, interface)| (name, Some(interface)));
    for (part, separator) in [(name, '/'), (interface.unwrap_or_default(), '/'), (interface.unwrap_or_default(), '@')] {
        if part.contains(separator) {
            return Err(reject(&format!("{:?} has more than one {separator}", excerpt(item))));
        }
    }
    if name.trim().is_empty() {
        return Err(reject(&format!("{:?} has no name", excerpt(item))));
    }
    let mut fields = Map::from_iter([("name".to_owned(), name.trim().into())]);
    for (field, part, why) in [
        ("namespace", namespace, "no namespace before /, the default one is used"),
        ("interface", interface, "no name after @, the interface is named by its position"),
    ] {
        match part.map(str::trim) {
            Some("") => warnings.push(format!("{place}: {why}")),
            Some(part) => drop(fields.insert(field.to_owned(), part.into())),
            None => {}
        }
    }
    Ok(Element { place, fields })
}

impl fmt::Display for NetworksAnnotation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "annotation {:?} of pod {}/{}", self.key, self.pod.namespace, self.pod.name)
    }
}

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
struct Element {
    /// Annotation, pod, number and character, for messages.
    place: String,
    fields: Map<String, Value>,
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
            name: name.string(&accepted_name(name.value), is_dns_subdomain)?.to_owned(),
            interface: interface.map(|field| field.interface()).transpose()?,
            ips: self.items("ips", "an address such as 10.0.0.9 or 10.0.0.9/24", ip)?.unwrap_or_default(),
            mac: owned(self.text("mac", ACCEPTED_HARDWARE_ADDRESS, is_hardware_address)?),
            infiniband_guid: owned(self.text("infiniband-guid", ACCEPTED_HARDWARE_ADDRESS, is_hardware_address)?),
            port_mappings: port_mappings.unwrap_or_default(),
            bandwidth: self.field("bandwidth").map(|field| field.bandwidth()).transpose()?,
            device_id: owned(self.text("deviceID", ACCEPTED_STRING, |_| true)?),
            cni_args: cni_args.unwrap_or_default(),
            default_route: self.items("default-route", "an IPv4 or IPv6 address", gateway)?,
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

    /// Returns the strings of an array as `parse` reads them.
    fn items<T>(&self, name: &str, accepted: &str, parse: fn(&str) -> Option<T>) -> Result<Option<Vec<T>>, Error> {
        let Some(field) = self.field(name) else { return Ok(None) };
        let items = field.array()?.map(|item| item.value.as_str().and_then(parse).ok_or_else(|| item.reject(accepted)));
        items.collect::<Result<_, _>>().map(Some)
    }
}

/// Returns what the field `name` accepts. In JSON, the parts of the shorthand are fields of their own.
fn accepted_name(value: &Value) -> String {
    let hint = match value.as_str().unwrap_or_default() {
        text if text.contains('/') => "; write the namespace in the field \"namespace\"",
        text if text.contains('@') => "; write the interface in the field \"interface\"",
        _ => "",
    };
    format!("{ACCEPTED_NAME}{hint}")
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

fn ip(text: &str) -> Option<String> {
    (text.parse::<IpAddr>().is_ok() || parse_ip_net(text).is_some()).then(|| text.to_owned())
}

/// As in Multus (Go's net.IP.To4), an IPv4-mapped IPv6 address is an IPv4 gateway.
fn gateway(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|gateway| gateway.to_canonical())
}

/// Lengths of hardware addresses in octets: EUI-48, EUI-64, IP over InfiniBand (Go's `net.ParseMAC`, which Multus uses).
const OCTETS: [usize; 3] = [6, 8, 20];

/// Returns whether `text` is a hexadecimal address in groups of two digits with `:` or `-`, or of four with dots.
pub(super) fn is_hardware_address(text: &str) -> bool {
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

/// One network that an annotation selects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Where it was written, for messages: annotation, pod, element, character.
    pub place: String,
    /// `namespace` of the definition.
    pub namespace: String,
    /// `name` of the definition.
    pub name: String,
    /// `interface`: the requested name of the interface.
    pub interface: Option<String>,
    /// `ips`: addresses, each with or without a prefix length.
    pub ips: Vec<String>,
    /// `mac`.
    pub mac: Option<String>,
    /// `infiniband-guid`.
    pub infiniband_guid: Option<String>,
    /// `portMappings`: objects as in the CNI conventions.
    pub port_mappings: Vec<Value>,
    /// `bandwidth`: an object as in the CNI conventions.
    pub bandwidth: Option<Value>,
    /// `deviceID`.
    pub device_id: Option<String>,
    /// `cni-args`: added to `args.cni` of every plugin of the network.
    pub cni_args: Map<String, Value>,
    /// `default-route`: the gateways of the pod's default route, which moves to this network. If it is set, even to an
    /// empty list, all networks lose their own default routes.
    pub default_route: Option<Vec<IpAddr>>,
}

impl Selection {
    /// Returns the requests to the network's plugins by capability (CONVENTIONS.md, "Dynamic Plugin specific fields").
    /// A plugin gets only those that its configuration declares.
    #[must_use]
    pub fn runtime_config(&self) -> Map<String, Value> {
        let capabilities = [
            ("portMappings", (!self.port_mappings.is_empty()).then(|| json!(self.port_mappings))),
            ("bandwidth", self.bandwidth.clone()),
            ("ips", (!self.ips.is_empty()).then(|| json!(self.ips))),
            ("mac", self.mac.as_ref().map(|mac| json!(mac))),
            ("infinibandGUID", self.infiniband_guid.as_ref().map(|guid| json!(guid))),
            ("deviceID", self.device_id.as_ref().map(|id| json!(id))),
        ];
        capabilities.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    }

    /// Returns the requests as `CNI_ARGS`, for plugins without capabilities.
    #[must_use]
    pub fn args(&self) -> Vec<(&'static str, String)> {
        let ips = (!self.ips.is_empty()).then(|| ("IP", self.ips.join(",")));
        self.mac.iter().map(|mac| ("MAC", mac.clone())).chain(ips).collect()
    }
}

/// The networks that an annotation selects, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selections {
    /// The elements.
    pub elements: Vec<Selection>,
    /// Ignored parts of the annotation, one line each.
    pub warnings: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_reach_plugins_by_capability_and_in_cni_args() {
        let selection = Selection {
            ips: vec!["10.0.0.9/24".into(), "fd::9".into()],
            mac: Some("02:00:00:00:00:01".into()),
            infiniband_guid: Some("11:22:33:44:55:66:77:88".into()),
            device_id: Some("0000:00:01.0".into()),
            bandwidth: Some(json!({"ingressRate": 1})),
            port_mappings: vec![json!({"hostPort": 1})],
            ..Selection::default()
        };
        let wanted = json!({
            "portMappings": [{"hostPort": 1}], "bandwidth": {"ingressRate": 1}, "ips": ["10.0.0.9/24", "fd::9"],
            "mac": "02:00:00:00:00:01", "infinibandGUID": "11:22:33:44:55:66:77:88", "deviceID": "0000:00:01.0",
        });
        assert_eq!(Value::Object(selection.runtime_config()), wanted);
        assert_eq!(selection.args(), [("MAC", "02:00:00:00:00:01".into()), ("IP", "10.0.0.9/24,fd::9".into())]);
        assert!(Selection::default().runtime_config().is_empty() && Selection::default().args().is_empty());
    }
}
