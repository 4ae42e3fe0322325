//! Istio's annotations on a pod.

use super::annotation::AnnotationValue;
use super::settings::{MODES, Settings};
use super::{interfaces, ports, ranges};
use crate::cni::{Error, ItemList};
use crate::pod::Pod;
use crate::policy::{InterceptionMode, Ranges};

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
    let interfaces = match annotated_list(pod, REROUTE_INTERFACES, interfaces::parse_interfaces)? {
        None => annotated_list(pod, KUBEVIRT_INTERFACES, interfaces::parse_interfaces)?,
        named => named,
    };
    Ok(Settings {
        inbound_interception_mode: mode(pod)?,
        outbound_ip_ranges_include: annotated_list(pod, INCLUDE_OUTBOUND_RANGES, ranges::parse_ranges)?,
        outbound_ip_ranges_exclude: excluded_ranges(pod)?,
        inbound_ports_include: annotated_list(pod, INCLUDE_INBOUND_PORTS, ports::parse_ports)?,
        inbound_ports_exclude: annotated_list(pod, EXCLUDE_INBOUND_PORTS, ports::parse_ports)?,
        outbound_ports_include: annotated_list(pod, INCLUDE_OUTBOUND_PORTS, ports::parse_ports)?,
        outbound_ports_exclude: annotated_list(pod, EXCLUDE_OUTBOUND_PORTS, ports::parse_ports)?,
        exclude_interfaces: annotated_list(pod, EXCLUDE_INTERFACES, interfaces::parse_interfaces)?,
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
    annotated_list(pod, EXCLUDE_OUTBOUND_RANGES, ranges::parse_ranges)
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
