//! The settings of `istio-redirect`, layer by layer: what a block says and what it leaves open.
//!
//! Istio's annotations on a pod.
//!
//! What the container istio-proxy says of itself: Istio's injector writes its choices there.

use super::ids::IdKind;
use super::values::{AnnotationValue, parse_bool};
use super::{Note, ids, values};
use crate::cni::{BlockReader, Error, ItemList, at_most};
use crate::pod::{Container, Pod};
use crate::policy::{Conflict, Groups, InterceptionMode, Ports, Ranges, Unite};
use ipnet::{IpNet, Ipv4Net};
use std::hash::Hash;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// What one layer says; the layers are in [`super::istio_redirect`].
macro_rules! layer {
    ($($(#[$doc:meta])* $key:ident: $type:ty,)+) => {
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub(super) struct Settings { $($(#[$doc])* pub $key: Option<$type>,)+ }

        impl Settings {
            /// This layer, and whatever it leaves open from the one below.
            pub(super) fn over(self, below: Self) -> Self {
                Self { $($key: self.$key.or(below.$key),)+ }
            }

            /// What both set, key by key: lists are united.
            ///
            /// # Errors
            /// A key that can have one value only has two.
            pub(super) fn union(&self, other: &Self) -> Result<Self, Conflict> {
                Ok(Self { $($key: both(stringify!($key), self.$key.as_ref(), other.$key.as_ref())?,)+ })
            }

            /// Every key.
            pub(super) const KEYS: [&str; [$(stringify!($key)),+].len()] = [$(stringify!($key)),+];

            /// Which of [`Self::KEYS`] this layer sets.
            pub(super) const fn says(&self) -> [bool; Self::KEYS.len()] {
                [$(self.$key.is_some()),+]
            }
        }
    };
}

layer! {
    /// `None` within is `NONE`.
    inbound_interception_mode: Option<InterceptionMode>,
    proxy_uid: Vec<u32>,
    proxy_gid: Vec<u32>,
    proxy_port: u16,
    inbound_capture_port: u16,
    inbound_tunnel_port: u16,
    inbound_tproxy_mark: u32,
    inbound_tproxy_route_table: u32,
    inbound_ports_include: Ports,
    inbound_ports_exclude: Ports,
    outbound_ports_include: Ports,
    outbound_ports_exclude: Ports,
    outbound_ip_ranges_include: Ranges,
    outbound_ip_ranges_exclude: Ranges,
    owner_groups_include: Groups,
    owner_groups_exclude: Groups,
    reroute_virtual_interfaces: Vec<String>,
    exclude_interfaces: Vec<String>,
    redirect_dns: bool,
    capture_all_dns: bool,
    dns_servers_v4: Vec<Ipv4Addr>,
    dns_servers_v6: Vec<Ipv6Addr>,
    capture_secondary_networks: bool,
    drop_invalid: bool,
    enable_ipv6: bool,
    host_ipv4_loopback_cidr: Ipv4Net,
}

fn both<T: Unite + Clone>(setting: &'static str, a: Option<&T>, b: Option<&T>) -> Result<Option<T>, Conflict> {
    match (a, b) {
        (Some(a), Some(b)) => {
            let conflict = || Conflict { setting, first: a.shown(), second: b.shown() };
            a.unite(b).map(Some).ok_or_else(conflict)
        }
        (a, b) => Ok(a.or(b).cloned()),
    }
}

/// What `inbound_interception_mode` and Istio's annotation accept.
pub(super) const MODES: [(&str, Option<InterceptionMode>); 3] =
    [("REDIRECT", Some(InterceptionMode::Redirect)), ("TPROXY", Some(InterceptionMode::Tproxy)), ("NONE", None)];

/// The most groups that fit into one rule (Istio's own limit).
const MOST_GROUPS: usize = 64;

impl Settings {
    /// A block's keys.
    pub(super) fn parse(r: &BlockReader<'_>, group_id: &dyn Fn(&str) -> Option<u32>) -> Result<Self, Error> {
        // Both families are always written where the pod has both.
        r.boolean("dual_stack")?;
        let groups = |list: &ItemList| values::parse_groups(list, group_id);
        Ok(Self {
            inbound_interception_mode: r.one_of("inbound_interception_mode", &MODES)?,
            proxy_uid: list(r, "proxy_uid", ids::numbers)?,
            proxy_gid: list(r, "proxy_gid", ids::numbers)?,
            proxy_port: r.port("proxy_port")?,
            inbound_capture_port: r.port("inbound_capture_port")?,
            inbound_tunnel_port: r.port("inbound_tunnel_port")?,
            inbound_tproxy_mark: r.number("inbound_tproxy_mark", 1, u32::MAX)?,
            inbound_tproxy_route_table: route_table(r, "inbound_tproxy_route_table")?,
            inbound_ports_include: list(r, "inbound_ports_include", values::parse_ports)?,
            inbound_ports_exclude: list(r, "inbound_ports_exclude", values::parse_ports)?,
            outbound_ports_include: list(r, "outbound_ports_include", values::parse_ports)?,
            outbound_ports_exclude: list(r, "outbound_ports_exclude", values::parse_ports)?,
            outbound_ip_ranges_include: list(r, "outbound_ip_ranges_include", values::parse_ranges)?,
            outbound_ip_ranges_exclude: list(r, "outbound_ip_ranges_exclude", values::parse_ranges)?,
            owner_groups_include: list(r, "owner_groups_include", |l| groups(l).and_then(|g| few(l, g)))?,
            owner_groups_exclude: list(r, "owner_groups_exclude", groups)?,
            reroute_virtual_interfaces: list(r, "reroute_virtual_interfaces", values::parse_interfaces)?,
            exclude_interfaces: list(r, "exclude_interfaces", values::parse_interfaces)?,
            redirect_dns: r.boolean("redirect_dns")?,
            capture_all_dns: r.boolean("capture_all_dns")?,
            dns_servers_v4: list(r, "dns_servers_v4", |l| addresses(l, "IPv4 addresses"))?,
            dns_servers_v6: list(r, "dns_servers_v6", |l| addresses(l, "IPv6 addresses"))?,
            capture_secondary_networks: r.boolean("capture_secondary_networks")?,
            drop_invalid: r.boolean("drop_invalid")?,
            enable_ipv6: r.boolean("enable_ipv6")?,
            host_ipv4_loopback_cidr: loopback(r, "host_ipv4_loopback_cidr")?,
        })
    }
}

fn list<T>(
    r: &BlockReader<'_>,
    key: &'static str,
    parse: impl Fn(&ItemList) -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    r.list(key)?.map(|list| parse(&list)).transpose()
}

fn few(list: &ItemList, groups: Groups) -> Result<Groups, Error> {
    if let Groups::List(gids) = &groups {
        at_most(MOST_GROUPS, "groups", &list.place, gids.len())?;
    }
    Ok(groups)
}

fn addresses<T: FromStr + Clone + Eq + Hash>(list: &ItemList, accepted: &str) -> Result<Vec<T>, Error> {
    list.distinct(accepted, |item| item.parse().ok())
}

/// Tables 253 to 255 are the kernel's own: default, main and local (ip-route(8)).
fn route_table(r: &BlockReader<'_>, key: &'static str) -> Result<Option<u32>, Error> {
    let table = r.number(key, 1, u32::MAX)?;
    match table {
        Some(own @ 253..=255) => {
            let list = ItemList { place: r.place(key), items: Vec::new() };
            Err(list.reject(&own.to_string(), "a routing table that is not the kernel's own (253 to 255)"))
        }
        _ => Ok(table),
    }
}

fn loopback(r: &BlockReader<'_>, key: &'static str) -> Result<Option<Ipv4Net>, Error> {
    let Some(text) = r.string(key)? else { return Ok(None) };
    match values::range(text.trim()) {
        Some(IpNet::V4(net)) => Ok(Some(net)),
        _ => {
            let list = ItemList { place: r.place(key), items: Vec::new() };
            Err(list.reject(text, "an IPv4 address or CIDR such as 127.0.0.1/32"))
        }
    }
}

const MODE: &str = "sidecar.istio.io/interceptionMode";
const INCLUDE_OUTBOUND_RANGES: &str = "traffic.sidecar.istio.io/includeOutboundIPRanges";
const EXCLUDE_OUTBOUND_RANGES: &str = "traffic.sidecar.istio.io/excludeOutboundIPRanges";
const INCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeInboundPorts";
const EXCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";
const INCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeOutboundPorts";
const EXCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";
const EXCLUDE_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";
const REROUTE_INTERFACES: &str = "istio.io/reroute-virtual-interfaces";
/// The former name of the one above, which wins.
const KUBEVIRT_INTERFACES: &str = "traffic.sidecar.istio.io/kubevirtInterfaces";

/// Every annotation that counts here.
pub(super) const ANNOTATIONS: [&str; 10] = [
    MODE,
    INCLUDE_OUTBOUND_RANGES,
    EXCLUDE_OUTBOUND_RANGES,
    INCLUDE_INBOUND_PORTS,
    EXCLUDE_INBOUND_PORTS,
    INCLUDE_OUTBOUND_PORTS,
    EXCLUDE_OUTBOUND_PORTS,
    EXCLUDE_INTERFACES,
    REROUTE_INTERFACES,
    KUBEVIRT_INTERFACES,
];

/// The layer of settings. An annotation whose value is empty sets an empty list.
pub(super) fn annotated_settings(pod: &Pod) -> Result<Settings, Error> {
    let interfaces = match annotated_list(pod, REROUTE_INTERFACES, values::parse_interfaces)? {
        None => annotated_list(pod, KUBEVIRT_INTERFACES, values::parse_interfaces)?,
        named => named,
    };
    Ok(Settings {
        inbound_interception_mode: mode(pod)?,
        outbound_ip_ranges_include: annotated_list(pod, INCLUDE_OUTBOUND_RANGES, values::parse_ranges)?,
        outbound_ip_ranges_exclude: excluded_ranges(pod)?,
        inbound_ports_include: annotated_list(pod, INCLUDE_INBOUND_PORTS, values::parse_ports)?,
        inbound_ports_exclude: annotated_list(pod, EXCLUDE_INBOUND_PORTS, values::parse_ports)?,
        outbound_ports_include: annotated_list(pod, INCLUDE_OUTBOUND_PORTS, values::parse_ports)?,
        outbound_ports_exclude: annotated_list(pod, EXCLUDE_OUTBOUND_PORTS, values::parse_ports)?,
        exclude_interfaces: annotated_list(pod, EXCLUDE_INTERFACES, values::parse_interfaces)?,
        reroute_virtual_interfaces: interfaces,
        ..Settings::default()
    })
}

/// The annotation by which the pod sets a key of `istio-redirect`.
pub(super) fn of_key(pod: &Pod, key: &str) -> &'static str {
    match key {
        "outbound_ip_ranges_include" => INCLUDE_OUTBOUND_RANGES,
        "outbound_ip_ranges_exclude" => EXCLUDE_OUTBOUND_RANGES,
        "inbound_ports_include" => INCLUDE_INBOUND_PORTS,
        "inbound_ports_exclude" => EXCLUDE_INBOUND_PORTS,
        "outbound_ports_include" => INCLUDE_OUTBOUND_PORTS,
        "outbound_ports_exclude" => EXCLUDE_OUTBOUND_PORTS,
        "exclude_interfaces" => EXCLUDE_INTERFACES,
        "reroute_virtual_interfaces" if pod.annotations.contains_key(REROUTE_INTERFACES) => REROUTE_INTERFACES,
        "reroute_virtual_interfaces" => KUBEVIRT_INTERFACES,
        _ => MODE,
    }
}

/// `excludeOutboundIPRanges` alone.
pub(super) fn excluded_ranges(pod: &Pod) -> Result<Option<Ranges>, Error> {
    annotated_list(pod, EXCLUDE_OUTBOUND_RANGES, values::parse_ranges)
}

/// Whether the pod wants no interception, whoever would do it.
pub(super) fn wants_none(pod: &Pod) -> bool {
    pod.annotations.get(MODE).is_some_and(|mode| mode == "NONE")
}

fn mode(pod: &Pod) -> Result<Option<Option<InterceptionMode>>, Error> {
    let Some(annotation) = AnnotationValue::of_pod(pod, MODE) else { return Ok(None) };
    let known = MODES.iter().find(|(word, _)| *word == annotation.value);
    let words = MODES.map(|(word, _)| word).join(", ");
    known.map(|(_, mode)| Some(*mode)).ok_or_else(|| annotation.reject(&words))
}

fn annotated_list<T>(pod: &Pod, key: &str, parse: impl Fn(&ItemList) -> Result<T, Error>) -> Result<Option<T>, Error> {
    AnnotationValue::of_pod(pod, key).map(|annotation| parse(&annotation.list()?)).transpose()
}

/// The variable that turns the proxy's own resolver on.
const DNS_CAPTURE: &str = "ISTIO_META_DNS_CAPTURE";

/// The variable that has packets dropped that connection tracking can't place.
const INVALID_DROP: &str = "INVALID_DROP";

/// The layer of settings. UID or GID 0 is none: under TPROXY the proxy is root with GID 1337,
/// and what root sends can't all be the proxy's.
pub(super) fn container_settings(pod: &Pod, proxy: &Container, notes: &mut Vec<Note>) -> Result<Settings, Error> {
    let id = |kind: IdKind| -> Result<_, Error> { Ok(kind.of(pod, proxy)?.filter(|id| *id != 0).map(|id| vec![id])) };
    Ok(Settings {
        proxy_uid: id(IdKind::User)?,
        proxy_gid: id(IdKind::Group)?,
        redirect_dns: boolean(proxy, DNS_CAPTURE, notes),
        drop_invalid: boolean(proxy, INVALID_DROP, notes),
        ..Settings::default()
    })
}

/// By what the container sets a key of `istio-redirect`.
pub(super) fn said_by(key: &str) -> &'static str {
    match key {
        "proxy_uid" => IdKind::User.key(),
        "proxy_gid" => IdKind::Group.key(),
        "redirect_dns" => DNS_CAPTURE,
        _ => INVALID_DROP,
    }
}

/// Whether the pod's sidecar answers DNS, whoever sends it there.
pub(super) fn captures_dns(pod: &Pod) -> bool {
    pod.proxy().and_then(|proxy| proxy.env(DNS_CAPTURE)).and_then(parse_bool) == Some(true)
}

/// A variable that is no boolean counts as false, as it does for Istio.
fn boolean(proxy: &Container, name: &str, notes: &mut Vec<Note>) -> Option<bool> {
    let text = proxy.env(name)?;
    let value = parse_bool(text);
    if value.is_none() {
        let msg = format!("{name} of container {} is {text:?}, not a boolean, and counts as false", proxy.name);
        notes.push(Note::warning(msg));
    }
    Some(value.unwrap_or(false))
}
