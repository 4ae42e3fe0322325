//! The settings of `istio-redirect`. One table defines each setting: its key, its parser, its annotations, what the
//! proxy's container sets, and its JSON value in `explain`. Defaults are those of [`Redirect`].
//!
//! To add a setting, add a field to [`Redirect`], an entry to the table and a line to `istio_redirect::resolve`. To let
//! pods set it, add an annotation to [`crate::pod::well_known`] and to the entry.

use super::context::AnnotationValue;
use super::context::Requests;
use super::ids::IdKind;
use super::sub_plugin::Note;
use super::values::{self, parse_bool};
use crate::cni::{BlockReader, Error, ItemList, at_most};
use crate::pod::well_known::{
    DNS_CAPTURE, EXCLUDE_INBOUND_PORTS, EXCLUDE_INTERFACES, EXCLUDE_OUTBOUND_PORTS, EXCLUDE_OUTBOUND_RANGES,
    INCLUDE_INBOUND_PORTS, INCLUDE_OUTBOUND_PORTS, INCLUDE_OUTBOUND_RANGES, INTERCEPTION_MODE, INVALID_DROP,
    KUBEVIRT_INTERFACES, REROUTE_INTERFACES,
};
use crate::pod::{Container, Pod};
use crate::policy::{
    Combine, Conflict, DnsCapture, Groups, InterceptionMode, Ipv6, ListOrAll, Ports, Ranges, Redirect,
};
use ipnet::{IpNet, Ipv4Net};
use serde_json::{Value, json};
use std::fmt::Display;
use std::hash::Hash;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Limit of groups in one rule, as in Istio.
const MAX_GROUPS: usize = 64;

/// The values of `inbound_interception_mode` and of Istio's annotation. `None` is no interception.
const MODES: [(&str, Option<InterceptionMode>); 3] =
    [("REDIRECT", Some(InterceptionMode::Redirect)), ("TPROXY", Some(InterceptionMode::Tproxy)), ("NONE", None)];

/// The GID of a group of the host.
type GroupLookup<'a> = dyn Fn(&str) -> Option<u32> + 'a;
type Parse<T> = fn(&WrittenValue<'_>, &GroupLookup<'_>) -> Result<Option<T>, Error>;
type Read<T> = fn(&mut ProxyContainer<'_>) -> Result<Option<T>, Error>;

/// A setting in the table, without its type.
pub(super) struct SettingDefinition {
    /// The key in a block.
    pub key: &'static str,
    /// The annotations that set it; the first that is set takes precedence.
    pub annotations: &'static [&'static str],
    /// The key or variable of the proxy's container that sets it; at most one.
    pub container: &'static [&'static str],
    /// Returns its value in a redirection as JSON.
    pub value: fn(&Redirect) -> Value,
}

/// Defines [`Settings`] with one field per entry.
macro_rules! settings {
    ($($(#[$doc:meta])* $key:ident: $type:ty {
        parse: $parse:expr,
        value: $value:expr,
        $(annotations: [$($annotation:expr),+],)?
        $(container: $source:expr => $read:expr,)?
    })+) => {
        /// The settings that one layer sets: the blocks, the proxy's container, `args.cni` or the annotations.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub(super) struct Settings { $($(#[$doc])* pub $key: Option<$type>,)+ }

        impl Settings {
            /// The table.
            pub(super) const DEFINITIONS: [SettingDefinition; [$(stringify!($key)),+].len()] = [$(SettingDefinition {
                key: stringify!($key),
                annotations: &[$($($annotation),+)?],
                container: &[$($source)?],
                value: $value,
            }),+];

            /// The annotations of all settings.
            pub(super) const ANNOTATIONS: &[&str] = &[$($($($annotation,)+)?)+];

            fn parse_keys(r: &BlockReader<'_>, group_id: &GroupLookup<'_>) -> Result<Self, Error> {
                Ok(Self { $($key: ($parse as Parse<$type>)(&WrittenValue::Key(r, stringify!($key)), group_id)?,)+ })
            }

            /// Parses the pod's annotations. An empty value sets an empty list.
            pub(super) fn of_annotations(pod: &Pod, requests: &mut Requests<'_>) -> Result<Self, Error> {
                let keys = ($(annotated::<$type>(pod, &[$($($annotation),+)?], $parse),)+);
                let ($($key,)+) = keys;
                Ok(Self { $($key: requests.or_absent($key)?,)+ })
            }

            fn read_container(proxy: &mut ProxyContainer<'_>) -> Result<Self, Error> {
                Ok(Self { $($key: first([$(($read as Read<$type>)(proxy)?)?]),)+ })
            }

            /// Returns this layer, with unset keys from the layer below.
            pub(super) fn over(self, below: Self) -> Self {
                Self { $($key: self.$key.or(below.$key),)+ }
            }

            /// Unites two blocks key by key: lists are joined.
            ///
            /// # Errors
            /// A key with a single value has two.
            pub(super) fn union(&self, other: &Self) -> Result<Self, Conflict> {
                Ok(Self { $($key: unite(stringify!($key), self.$key.as_ref(), other.$key.as_ref())?,)+ })
            }

            /// Returns which of [`Self::DEFINITIONS`] are set.
            pub(super) const fn is_set(&self) -> [bool; Self::DEFINITIONS.len()] {
                [$(self.$key.is_some()),+]
            }
        }
    };
}

settings! {
    /// `None` within is `NONE`.
    inbound_interception_mode: Option<InterceptionMode> {
        parse: |written, _| written.word(&MODES),
        value: |redirect| json!(redirect.inbound_interception_mode.to_string()),
        annotations: [INTERCEPTION_MODE],
    }
    proxy_uid: Vec<u32> {
        parse: |written, _| written.list(values::parse_ids),
        value: |redirect| list(&redirect.proxy_uid),
        container: IdKind::User.key() => |proxy| proxy.id(IdKind::User),
    }
    proxy_gid: Vec<u32> {
        parse: |written, _| written.list(values::parse_ids),
        value: |redirect| list(&redirect.proxy_gid),
        container: IdKind::Group.key() => |proxy| proxy.id(IdKind::Group),
    }
    proxy_port: u16 {
        parse: |written, _| written.port(),
        value: |redirect| json!(redirect.proxy_port),
    }
    inbound_capture_port: u16 {
        parse: |written, _| written.port(),
        value: |redirect| json!(redirect.inbound_capture_port),
    }
    inbound_tunnel_port: u16 {
        parse: |written, _| written.port(),
        value: |redirect| json!(redirect.inbound_tunnel_port),
    }
    inbound_tproxy_mark: u32 {
        parse: |written, _| written.number(),
        value: |redirect| json!(redirect.inbound_tproxy_mark),
    }
    inbound_tproxy_route_table: u32 {
        parse: |written, _| written.route_table(),
        value: |redirect| json!(redirect.inbound_tproxy_route_table),
    }
    inbound_ports_include: Ports {
        parse: |written, _| written.list(values::parse_ports),
        value: |redirect| list_or_all(&redirect.inbound_ports_include),
        annotations: [INCLUDE_INBOUND_PORTS],
    }
    inbound_ports_exclude: Ports {
        parse: |written, _| written.list(values::parse_ports),
        value: |redirect| list_or_all(&redirect.inbound_ports_exclude),
        annotations: [EXCLUDE_INBOUND_PORTS],
    }
    outbound_ports_include: Ports {
        parse: |written, _| written.list(values::parse_ports),
        value: |redirect| list_or_all(&redirect.outbound_ports_include),
        annotations: [INCLUDE_OUTBOUND_PORTS],
    }
    outbound_ports_exclude: Ports {
        parse: |written, _| written.list(values::parse_ports),
        value: |redirect| list_or_all(&redirect.outbound_ports_exclude),
        annotations: [EXCLUDE_OUTBOUND_PORTS],
    }
    outbound_ip_ranges_include: Ranges {
        parse: |written, _| written.list(values::parse_ranges),
        value: |redirect| list_or_all(&redirect.outbound_ip_ranges_include),
        annotations: [INCLUDE_OUTBOUND_RANGES],
    }
    outbound_ip_ranges_exclude: Ranges {
        parse: |written, _| written.list(values::parse_ranges),
        value: |redirect| list_or_all(&redirect.outbound_ip_ranges_exclude),
        annotations: [EXCLUDE_OUTBOUND_RANGES],
    }
    owner_groups_include: Groups {
        parse: |written, group_id| written.list(|list| limited(list, values::parse_groups(list, group_id)?)),
        value: |redirect| list_or_all(&redirect.owner_groups_include),
    }
    owner_groups_exclude: Groups {
        parse: |written, group_id| written.list(|list| values::parse_groups(list, group_id)),
        value: |redirect| list(&redirect.owner_groups_exclude),
    }
    reroute_virtual_interfaces: Vec<String> {
        parse: |written, _| written.list(values::parse_interfaces),
        value: |redirect| list(&redirect.reroute_virtual_interfaces),
        annotations: [REROUTE_INTERFACES, KUBEVIRT_INTERFACES],
    }
    exclude_interfaces: Vec<String> {
        parse: |written, _| written.list(values::parse_interfaces),
        value: |redirect| list(&redirect.exclude_interfaces),
        annotations: [EXCLUDE_INTERFACES],
    }
    redirect_dns: bool {
        parse: |written, _| written.boolean(),
        value: |redirect| json!(redirect.dns != DnsCapture::Off),
        container: DNS_CAPTURE => |proxy| Ok(proxy.boolean(DNS_CAPTURE)),
    }
    capture_all_dns: bool {
        parse: |written, _| written.boolean(),
        value: |redirect| json!(redirect.dns == DnsCapture::All),
    }
    dns_servers_v4: Vec<Ipv4Addr> {
        parse: |written, _| written.list(|list| addresses(list, "IPv4 addresses")),
        value: |redirect| match &redirect.dns {
            DnsCapture::Servers { v4, .. } => list(v4),
            DnsCapture::Off | DnsCapture::All => json!([]),
        },
    }
    dns_servers_v6: Vec<Ipv6Addr> {
        parse: |written, _| written.list(|list| addresses(list, "IPv6 addresses")),
        value: |redirect| match &redirect.dns {
            DnsCapture::Servers { v6, .. } => list(v6),
            DnsCapture::Off | DnsCapture::All => json!([]),
        },
    }
    capture_secondary_networks: bool {
        parse: |written, _| written.boolean(),
        value: |redirect| json!(redirect.capture_secondary_networks),
    }
    drop_invalid: bool {
        parse: |written, _| written.boolean(),
        value: |redirect| json!(redirect.drop_invalid),
        container: INVALID_DROP => |proxy| Ok(proxy.boolean(INVALID_DROP)),
    }
    enable_ipv6: bool {
        parse: |written, _| written.boolean(),
        value: |redirect| match redirect.ipv6 {
            Ipv6::Auto => json!("where the pod has an IPv6 address"),
            Ipv6::On => json!(true),
            Ipv6::Off => json!(false),
        },
    }
    host_ipv4_loopback_cidr: Ipv4Net {
        parse: |written, _| written.ip4_net(),
        value: |redirect| json!(redirect.host_ipv4_loopback_cidr.to_string()),
    }
}

impl Settings {
    /// Parses a block's keys.
    pub(super) fn of_block(r: &BlockReader<'_>, group_id: &GroupLookup<'_>) -> Result<Self, Error> {
        // Accepted for compatibility with Istio and without effect: the rules cover both families if the pod has both.
        r.boolean("dual_stack")?;
        Self::parse_keys(r, group_id)
    }

    /// Reads what Istio's injector configured in the proxy's container.
    pub(super) fn of_container(pod: &Pod, container: &Container, notes: &mut Vec<Note>) -> Result<Self, Error> {
        Self::read_container(&mut ProxyContainer { pod, container, notes })
    }
}

/// Returns the value of every setting in `redirect`, by key, in the order of `explain`.
pub fn setting_values(redirect: &Redirect) -> impl Iterator<Item = (&'static str, Value)> {
    Settings::DEFINITIONS.into_iter().map(|definition| (definition.key, (definition.value)(redirect)))
}

/// Returns the annotations that set `key`; the first that a pod has takes precedence.
#[must_use]
pub fn setting_annotations(key: &str) -> &'static [&'static str] {
    let definition = Settings::DEFINITIONS.into_iter().find(|definition| definition.key == key);
    definition.map_or(&[], |definition| definition.annotations)
}

/// Returns the destinations that the pod's annotation excludes. Its other annotations may be invalid.
pub(super) fn excluded_ranges(pod: &Pod) -> Result<Option<Ranges>, Error> {
    annotated(pod, &[EXCLUDE_OUTBOUND_RANGES], |written, _| written.list(values::parse_ranges))
}

/// Returns whether the pod's sidecar resolves DNS, whichever program redirects it there.
pub(super) fn captures_dns(pod: &Pod) -> bool {
    pod.proxy().and_then(|proxy| proxy.env(DNS_CAPTURE)).and_then(parse_bool) == Some(true)
}

/// A value as it was written: under a key of a block, or in an annotation.
enum WrittenValue<'a> {
    Key(&'a BlockReader<'a>, &'static str),
    Annotation(AnnotationValue<'a>),
}

impl WrittenValue<'_> {
    fn list<T>(&self, parse: impl Fn(&ItemList) -> Result<T, Error>) -> Result<Option<T>, Error> {
        let list = match self {
            Self::Key(r, key) => r.list(key)?,
            Self::Annotation(annotation) => Some(annotation.list()?),
        };
        list.map(|list| parse(&list)).transpose()
    }

    fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<Option<T>, Error> {
        match self {
            Self::Key(r, key) => r.one_of(key, words),
            Self::Annotation(annotation) => {
                let accepted = words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
                let value = words.iter().find(|(word, _)| *word == annotation.value).map(|(_, value)| Some(*value));
                value.ok_or_else(|| annotation.reject(&accepted))
            }
        }
    }

    /// Reads a value of a kind that no annotation sets.
    fn of_key<'a, T>(
        &'a self,
        read: impl Fn(&'a BlockReader<'a>, &'static str) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        match self {
            Self::Key(r, key) => read(r, key),
            Self::Annotation(_) => Ok(None),
        }
    }

    /// A whole number other than 0.
    fn number(&self) -> Result<Option<u32>, Error> {
        self.of_key(|r, key| r.number(key, 1, u32::MAX))
    }

    fn port(&self) -> Result<Option<u16>, Error> {
        self.of_key(|r, key| r.port(key))
    }

    fn boolean(&self) -> Result<Option<bool>, Error> {
        self.of_key(|r, key| r.boolean(key))
    }

    /// A routing table. Tables 253 to 255 are the kernel's: default, main and local (ip-route(8)).
    fn route_table(&self) -> Result<Option<u32>, Error> {
        self.of_key(|r, key| match r.number(key, 1, u32::MAX)? {
            Some(table @ 253..=255) => {
                Err(rejected(r.place(key), &table.to_string(), "a routing table other than the kernel's (253 to 255)"))
            }
            table => Ok(table),
        })
    }

    fn ip4_net(&self) -> Result<Option<Ipv4Net>, Error> {
        self.of_key(|r, key| {
            let Some(text) = r.string(key)? else { return Ok(None) };
            match values::parse_range(text.trim()) {
                Some(IpNet::V4(net)) if net.prefix_len() > 0 => Ok(Some(net)),
                _ => Err(rejected(r.place(key), text, "an IPv4 address or CIDR such as 127.0.0.1/32, not 0.0.0.0/0")),
            }
        })
    }
}

fn rejected(place: String, value: &str, accepted: &str) -> Error {
    ItemList { place, items: Vec::new() }.reject(value, accepted)
}

/// The proxy's container, where Istio's injector writes its settings.
struct ProxyContainer<'a> {
    pod: &'a Pod,
    container: &'a Container,
    notes: &'a mut Vec<Note>,
}

impl ProxyContainer<'_> {
    /// Returns the proxy's UID or GID. 0 counts as unset: under TPROXY the proxy runs as root with GID 1337, and not all
    /// of root's traffic is the proxy's.
    fn id(&self, kind: IdKind) -> Result<Option<Vec<u32>>, Error> {
        Ok(kind.of_container(self.pod, self.container)?.filter(|id| *id != 0).map(|id| vec![id]))
    }

    /// Returns a variable's value. A value that is not a boolean counts as false, as in Istio.
    fn boolean(&mut self, name: &str) -> Option<bool> {
        let text = self.container.env(name)?;
        let value = parse_bool(text);
        if value.is_none() {
            let container = &self.container.name;
            let msg = format!("{name} of container {container}: invalid boolean {text:?}, treated as false");
            self.notes.push(Note::warning(msg));
        }
        Some(value.unwrap_or(false))
    }
}

fn annotated<T>(pod: &Pod, keys: &[&str], parse: Parse<T>) -> Result<Option<T>, Error> {
    match keys.iter().find_map(|key| AnnotationValue::of_pod(pod, key)) {
        Some(annotation) => parse(&WrittenValue::Annotation(annotation), &|_| None),
        None => Ok(None),
    }
}

fn first<T, const N: usize>(values: [Option<T>; N]) -> Option<T> {
    values.into_iter().flatten().next()
}

fn unite<T: Combine + Clone>(setting: &'static str, a: Option<&T>, b: Option<&T>) -> Result<Option<T>, Conflict> {
    match (a, b) {
        (Some(a), Some(b)) => {
            let conflict = || Conflict { setting, first: a.to_text(), second: b.to_text() };
            a.unite(b).map(Some).ok_or_else(conflict)
        }
        (a, b) => Ok(a.or(b).cloned()),
    }
}

fn limited(list: &ItemList, groups: Groups) -> Result<Groups, Error> {
    if let Groups::List(gids) = &groups {
        at_most(MAX_GROUPS, "groups", &list.place, gids.len())?;
    }
    Ok(groups)
}

fn addresses<T: FromStr + Clone + Eq + Hash>(list: &ItemList, accepted: &str) -> Result<Vec<T>, Error> {
    list.distinct(accepted, |item| item.parse().ok())
}

fn list<T: Display>(items: &[T]) -> Value {
    items.iter().map(ToString::to_string).collect()
}

fn list_or_all<T: Display>(items: &ListOrAll<T>) -> Value {
    match items {
        ListOrAll::All => json!("*"),
        ListOrAll::List(items) => list(items),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_annotation_sets_two_settings() {
        let distinct: std::collections::BTreeSet<_> = Settings::ANNOTATIONS.iter().collect();
        assert_eq!((Settings::ANNOTATIONS.len(), distinct.len()), (10, 10));
        assert!(Settings::DEFINITIONS.iter().all(|definition| definition.container.len() <= 1));
    }
}
