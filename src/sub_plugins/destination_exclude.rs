//! `destination-exclude`: outbound traffic to certain ports or addresses bypasses the mesh, as Istio's annotations
//! `excludeOutboundPorts` and `excludeOutboundIPRanges` do for pods with a sidecar only.

use super::context::{AnnotationValue, ListAuthor, PodContext, RequestedExclusions};
use super::ids::{IdKind, IdList};
use super::sub_plugin::Note;
use super::values;
use crate::cni::{BlockReader, Code, Error, ItemList};
use crate::pod::well_known::{
    EXCLUDE_DESTINATION_PORTS, EXCLUDE_DESTINATION_RANGES, EXCLUDE_INBOUND_PORTS, REJECTED_INBOUND_PORTS,
};
use crate::policy::{Exclusion, Ports, Ranges, TrafficOwner};
use ipnet::IpNet;

/// The annotations of a pod or namespace that this sub-plugin reads. The last one is rejected with a reason.
pub(super) const ANNOTATIONS: [&str; 3] =
    [EXCLUDE_DESTINATION_PORTS, EXCLUDE_DESTINATION_RANGES, REJECTED_INBOUND_PORTS];

/// The exclusions that one block, argument or annotation requests. Like Istio's annotations, each list applies on its
/// own: traffic to one of the ports, and traffic to one of the ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DestinationExclude {
    pub(super) ports: Option<(ItemList, Ports)>,
    pub(super) ip_ranges: Option<(ItemList, Ranges)>,
    /// `None` is every process.
    pub(super) uids: Option<IdList>,
}

impl DestinationExclude {
    /// Parses a block's keys.
    pub(super) fn parse(r: &BlockReader<'_>, author: ListAuthor) -> Result<Self, Error> {
        if r.value("inbound_ports").is_some() {
            return Err(inbound_is_rejected(&r.place("inbound_ports")));
        }
        let ports = r.list("ports")?.map(ports_of).transpose()?;
        let ip_ranges = r.list("ip_ranges")?.map(ranges_of).transpose()?;
        let uids = r.list("uids")?.map(|list| IdList::parse(&list, author)).transpose()?;
        Ok(Self { ports, ip_ranges, uids })
    }

    /// Parses one of [`ANNOTATIONS`]. It applies to every process.
    pub(super) fn of_annotation(key: &str, annotation: &AnnotationValue<'_>) -> Result<Self, Error> {
        match key {
            EXCLUDE_DESTINATION_PORTS => Ok(Self { ports: Some(ports_of(annotation.list()?)?), ..Self::default() }),
            EXCLUDE_DESTINATION_RANGES => {
                Ok(Self { ip_ranges: Some(ranges_of(annotation.list()?)?), ..Self::default() })
            }
            _ => Err(inbound_is_rejected(&annotation.place)),
        }
    }

    /// Returns the exclusions for one pod.
    pub(super) fn exclusions(
        &self,
        context: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<RequestedExclusions, Error> {
        let owners = match &self.uids {
            Some(uids) => uids.owners(IdKind::User, context, notes)?,
            None => vec![TrafficOwner::Any],
        };
        let mut requested = RequestedExclusions::default();
        match &self.ports {
            Some((list, Ports::All)) => requested.add(&list.place, &owners, &[None], &[None], &[])?,
            Some((list, Ports::List(ports))) if !ports.is_empty() => {
                requested.add(&list.place, &owners, &[None], &[None], &values::merged(ports.clone()))?;
            }
            _ => {}
        }
        if let Some((list, ranges)) = &self.ip_ranges {
            let destinations: Vec<Option<IpNet>> = match ranges {
                Ranges::All => vec![None],
                Ranges::List(ranges) => ranges.iter().copied().map(Some).collect(),
            };
            requested.add(&list.place, &owners, &destinations, &[None], &[])?;
        }
        Ok(requested)
    }

    /// Returns whether this block, or an annotation in addition to it, can request the exclusion.
    pub(super) fn may_request(&self, exclusion: &Exclusion) -> bool {
        let is_owner = match exclusion.owner {
            TrafficOwner::Any => true,
            TrafficOwner::Uid(_) => self.uids.is_some(),
            TrafficOwner::Gid(_) => false,
        };
        is_owner && exclusion.protocol.is_none() && (exclusion.destination.is_none() || exclusion.ports.is_empty())
    }
}

/// Parses ports, and keeps how they were written.
fn ports_of(list: ItemList) -> Result<(ItemList, Ports), Error> {
    let ports = values::parse_requested_ports(&list)?;
    Ok((list, ports))
}

/// Parses IP ranges, and keeps how they were written.
fn ranges_of(list: ItemList) -> Result<(ItemList, Ranges), Error> {
    let ranges = values::parse_requested_ranges(&list)?;
    Ok((list, ranges))
}

/// A rule in the pod can't tell the ports behind ztunnel's tunnel apart, and must not open a port to plaintext peers.
fn inbound_is_rejected(place: &str) -> Error {
    let msg = format!(
        "{place}: not supported: peers in the ambient mesh reach every port through ztunnel's port 15008, encrypted \
         with its destination, so only plaintext peers would bypass ztunnel and its authorization; remove it (with a \
         sidecar, use {EXCLUDE_INBOUND_PORTS})"
    );
    Error::new(Code::InvalidConfig, msg)
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::chain;
    use super::*;
    use serde_json::json;

    #[test]
    fn each_list_excludes_on_its_own() {
        for (keys, expected) in [
            (json!({}), vec![]),
            (json!({"uids": [7]}), vec![]),
            (json!({"ports": [443, "8000-8010"]}), vec!["any 443 8000-8010"]),
            (json!({"ip_ranges": "10.0.0.1/8, fd00::1"}), vec!["any to 10.0.0.0/8", "any to fd00::1/128"]),
            (json!({"ports": "25", "ip_ranges": ["192.0.2.7"]}), vec!["any 25", "any to 192.0.2.7/32"]),
            (json!({"ports": "25", "uids": "7-9,12"}), vec!["uid 7-9 25", "uid 12 25"]),
            (json!({"ip_ranges": "*", "uids": [7]}), vec!["uid 7"]),
            (json!({"ports": "*"}), vec!["any"]),
            (json!({"ports": "", "ip_ranges": []}), vec![]),
            (json!({"ports": "25", "uids": []}), vec![]),
        ] {
            let mut block = keys.clone();
            block["type"] = "destination-exclude".into();
            assert_eq!(chain(json!([block])).exclusions(), expected, "{keys}");
        }
    }

    #[test]
    fn annotations_of_the_pod_and_its_namespace_apply_to_every_process() {
        let scenario = chain(json!([{"type": "destination-exclude", "uids": [7], "ports": [22]}]));
        for (key, value, added) in [
            (EXCLUDE_DESTINATION_PORTS, "25, 9000-9001", "any 25 9000-9001"),
            (EXCLUDE_DESTINATION_RANGES, "192.0.2.0/24", "any to 192.0.2.0/24"),
        ] {
            let expected = [added, "uid 7 22"];
            assert_eq!(scenario.clone().annotated(key, value).exclusions(), expected);
            assert_eq!(scenario.clone().namespace(key, value).exclusions(), expected);
            let overridden = scenario.clone().namespace(key, "x").annotated(key, "");
            assert_eq!(overridden.exclusions(), ["uid 7 22"]);
        }
    }

    #[test]
    fn an_error_names_the_place_and_the_accepted_values() {
        let block = chain(json!([{"type": "destination-exclude", "ports": "0"}])).error();
        assert_eq!(
            block,
            "chain[0].ports: invalid value \"0\"; expected ports from 1 to 65535, ranges such as 8000-8010, or *"
        );
        let annotated = |key, value| chain(json!([{"type": "destination-exclude"}])).annotated(key, value).error();
        let error = annotated(EXCLUDE_DESTINATION_RANGES, "10.0.0.0/33");
        assert!(
            error.starts_with("annotation \"detour.io/exclude-outbound-ip-ranges\" of pod shop/cart-1: "),
            "{error}"
        );
        assert!(error.ends_with("; expected IP addresses, CIDRs such as 10.0.0.0/8 or fd00::/8, or *"), "{error}");
    }

    #[test]
    fn inbound_ports_are_rejected_with_the_reason() {
        for error in [
            chain(json!([{"type": "destination-exclude", "inbound_ports": [80]}])).error(),
            chain(json!([{"type": "destination-exclude"}])).annotated(REJECTED_INBOUND_PORTS, "80").error(),
        ] {
            assert!(
                error.contains("inbound") && error.contains(": not supported: ") && error.contains("15008"),
                "{error}"
            );
        }
    }
}
