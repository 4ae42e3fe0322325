//! The annotations of a pod that select networks, in the JSON form (an array of objects) or the shorthand. They are parsed
//! and checked before any network is added.

use crate::cluster::ObjectRef;
use crate::cni::{
    Code, Error, LIST_ITEMS, at_most, check_interface_name, excerpt, is_dns_label, is_dns_subdomain, json_error,
    parse_ip_net, wrong_type,
};
use crate::pod::Pod;
use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
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
        let (mut elements, mut warning, mut unknown) = (Vec::new(), None, 0);
        for (index, text) in texts.into_iter().enumerate() {
            // The element is a part of the annotation's text.
            let place = self.place(index + 1, text.get().as_ptr() as usize - self.text.as_ptr() as usize);
            let value: Value = serde_json::from_str(text.get()).map_err(|error| self.not_json(&error))?;
            let Value::Object(fields) = value else { return Err(wrong_type(&place, &value, ACCEPTED_JSON)) };
            let is_known = |key: &str| ACCEPTED_FIELDS.split(", ").any(|field| field.eq_ignore_ascii_case(key));
            for field in fields.keys().filter(|key| !is_known(key)) {
                unknown += 1;
                warning.get_or_insert_with(|| {
                    format!("{place}: {}: unknown field, ignored; expected one of {ACCEPTED_FIELDS}", excerpt(field))
                });
            }
            elements.push(Element { place, fields });
        }
        let more = if unknown > 1 { format!("; and {} more such fields", unknown - 1) } else { String::new() };
        Ok((elements, warning.map(|warning| warning + &more).into_iter().collect()))
    }

    fn not_json(&self, error: &serde_json::Error) -> Error {
        let before: usize = self.text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
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
    for (part, separator) in [(rest, '/'), (interface.unwrap_or_default(), '@')] {
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
const ACCEPTED_STRING: &str = "a string";

/// The fields of an element. ovn-kubernetes reads the last one from the annotation itself.
pub(super) const ACCEPTED_FIELDS: &str = "name, namespace, interface, interfaceRequest, ips, mac, infiniband-guid, \
    portMappings, bandwidth, deviceID, cni-args, default-route, ipam-claim-reference";

/// The fields that request something from the network's plugins (CONVENTIONS.md, "Dynamic Plugin specific fields").
const CAPABILITIES: [&str; 6] = ["portMappings", "bandwidth", "ips", "mac", "infiniband-guid", "deviceID"];

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
    /// Returns the selection of a network; `namespace` is the default.
    pub(super) fn selection(&self, namespace: &str) -> Result<Selection, Error> {
        let name = self.field("name").ok_or_else(|| {
            Error::new(Code::InvalidConfig, format!("{}: name: missing; expected {ACCEPTED_NAME}", self.place))
        })?;
        let interface = match self.read("interface", Field::interface)? {
            None => self.read("interfaceRequest", Field::interface)?,
            set => set,
        };
        let mut runtime_config = Map::new();
        for name in CAPABILITIES {
            let Some(field) = self.field(name) else { continue };
            let capability = if name == "infiniband-guid" { "infinibandGUID" } else { name };
            let is_requested = match name {
                "portMappings" => field.port_mappings()?,
                "bandwidth" => field.bandwidth()?,
                "ips" => !field.items("an address such as 10.0.0.9 or 10.0.0.9/24", ip)?.is_empty(),
                "deviceID" => field.text(ACCEPTED_STRING, |_| true)?.is_some(),
                _ => field.text("a hardware address such as 02:00:00:00:00:01", is_hardware_address)?.is_some(),
            };
            if is_requested {
                runtime_config.insert(capability.to_owned(), field.value.clone());
            }
        }
        let own_namespace = self.read("namespace", |field| field.text(ACCEPTED_NAMESPACE, is_dns_label))?;
        Ok(Selection {
            place: self.place.clone(),
            object: ObjectRef {
                namespace: own_namespace.unwrap_or(namespace).to_owned(),
                name: name.string(&accepted_name(name.value), is_dns_subdomain)?.to_owned(),
            },
            interface,
            runtime_config,
            cni_args: self.read("cni-args", |field| field.object().map(Some))?.cloned().unwrap_or_default(),
            default_route: self
                .read("default-route", |field| field.items("an IPv4 or IPv6 address", gateway).map(Some))?,
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

    /// Returns what `read` takes from a field, if that is set.
    fn read<'a, T>(
        &'a self,
        name: &str,
        read: impl FnOnce(&Field<'a>) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        self.field(name).map_or(Ok(None), |field| read(&field))
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

    /// Returns a string that is not empty.
    fn text(&self, accepted: &str, is_valid: fn(&str) -> bool) -> Result<Option<&'a str>, Error> {
        if self.value == "" { Ok(None) } else { self.string(accepted, is_valid).map(Some) }
    }

    fn array(&self) -> Result<impl Iterator<Item = Field<'a>>, Error> {
        let items = self.value.as_array().ok_or_else(|| self.reject("an array"))?;
        at_most(LIST_ITEMS, "items", &self.place, items.len())?;
        let place = self.place.clone();
        Ok(items.iter().enumerate().map(move |(i, value)| Field { value, place: format!("{place}[{i}]") }))
    }

    /// Returns the strings of an array as `parse` reads them.
    fn items<T>(&self, accepted: &str, parse: fn(&str) -> Option<T>) -> Result<Vec<T>, Error> {
        self.array()?.map(|item| item.value.as_str().and_then(parse).ok_or_else(|| item.reject(accepted))).collect()
    }

    fn object(&self) -> Result<&'a Map<String, Value>, Error> {
        self.value.as_object().ok_or_else(|| self.reject("an object"))
    }

    fn interface(&self) -> Result<Option<String>, Error> {
        let Some(name) = self.text(ACCEPTED_STRING, |_| true)? else { return Ok(None) };
        let rejected = |error| Error::new(Code::InvalidConfig, format!("{}: {:?}: {error}", self.place, excerpt(name)));
        check_interface_name(name).map(|()| Some(name.to_owned())).map_err(rejected)
    }

    /// Returns a member of this object that is set and not `null`.
    fn member(&self, object: &'a Map<String, Value>, name: &str) -> Option<Self> {
        let value = object.get(name).filter(|value| !value.is_null())?;
        Some(Field { value, place: format!("{}.{name}", self.place) })
    }

    /// Checks what the plugin `portmap` accepts (containernetworking/plugins, `plugins/meta/portmap`).
    fn port_mappings(&self) -> Result<bool, Error> {
        let mut is_requested = false;
        for mapping in self.array()? {
            is_requested = true;
            let object = mapping.object()?;
            for key in ["hostPort", "containerPort"] {
                let Some(port) = mapping.member(object, key) else {
                    return Err(mapping.reject("an object with hostPort and containerPort"));
                };
                if !port.value.as_u64().is_some_and(|port| (1..=u64::from(u16::MAX)).contains(&port)) {
                    return Err(port.reject("a port, 1 to 65535"));
                }
            }
            for text in ["protocol", "hostIP"].iter().filter_map(|key| mapping.member(object, key)) {
                text.string(ACCEPTED_STRING, |_| true)?;
            }
        }
        Ok(is_requested)
    }

    fn bandwidth(&self) -> Result<bool, Error> {
        let object = self.object()?;
        for key in ["ingressRate", "ingressBurst", "egressRate", "egressBurst"] {
            if let Some(rate) = self.member(object, key).filter(|rate| !rate.value.is_u64()) {
                return Err(rate.reject("a whole number of bits, or bits per second"));
            }
        }
        Ok(true)
    }
}

fn ip(text: &str) -> Option<()> {
    (text.parse::<IpAddr>().is_ok() || parse_ip_net(text).is_some()).then_some(())
}

/// As in Multus (Go's net.IP.To4), an IPv4-mapped IPv6 address is an IPv4 gateway.
fn gateway(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|gateway| gateway.to_canonical())
}

/// Returns whether `text` is a hexadecimal address in groups of two digits with `:` or `-`, or of four with dots, of 6, 8
/// or 20 octets: EUI-48, EUI-64, IP over InfiniBand (Go's `net.ParseMAC`, which Multus uses).
pub(super) fn is_hardware_address(text: &str) -> bool {
    let grouped = |separator: char, digits: usize| {
        let is_group = |group: &str| group.len() == digits && group.bytes().all(|byte| byte.is_ascii_hexdigit());
        text.split(separator).all(is_group) && [6, 8, 20].contains(&(text.split(separator).count() * digits / 2))
    };
    grouped(':', 2) || grouped('-', 2) || grouped('.', 4)
}

/// One network that an annotation selects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Where it was written, for messages: annotation, pod, element, character.
    pub place: String,
    /// The definition: `namespace` and `name`.
    pub object: ObjectRef,
    /// `interface`: the requested name of the interface.
    pub interface: Option<String>,
    /// The requests to the network's plugins by capability; a plugin gets only those that its configuration declares.
    pub runtime_config: Map<String, Value>,
    /// `cni-args`: added to `args.cni` of every plugin of the network.
    pub cni_args: Map<String, Value>,
    /// `default-route`: the gateways of the pod's default route, which moves to this network. If it is set, even to an
    /// empty list, all networks lose their own default routes.
    pub default_route: Option<Vec<IpAddr>>,
}

impl Selection {
    /// Returns the requests as `CNI_ARGS`, for plugins without capabilities.
    #[must_use]
    pub fn args(&self) -> Vec<(&'static str, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let list = |ips: &Value| ips.as_array().into_iter().flatten().map(text).collect::<Vec<_>>().join(",");
        let mac = self.runtime_config.get("mac").map(|mac| ("MAC", text(mac)));
        mac.into_iter().chain(self.runtime_config.get("ips").map(|ips| ("IP", list(ips)))).collect()
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
