//! `dns-exclude`: DNS of a process, or to a resolver, leaves untouched.

use super::asked::RequestedExclusions;
use super::context::{ListAuthor, PodContext};
use super::destinations::Destinations;
use super::ids::{IdKind, IdList};
use super::values::AnnotationValue;
use super::{Note, SettingSource, values};
use crate::cni::{BlockReader, Error};
use crate::pod::Facts;
use crate::policy::{PortRange, Ports, Protocol, TrafficOwner};

const RESOLVERS: &str = "detour.io/exclude-dns";

/// Every annotation that counts here.
pub(super) const ANNOTATIONS: [&str; 1] = [RESOLVERS];

/// What one place asks for: a block, or the annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DnsExclude {
    uids: Option<IdList>,
    gids: Option<IdList>,
    resolvers: Option<Destinations>,
    ports: Ports,
    protocols: Vec<Option<Protocol>>,
}

impl DnsExclude {
    /// A block's keys.
    pub(super) fn parse(r: &BlockReader<'_>, author: ListAuthor) -> Result<Self, Error> {
        let ids = |key| r.list(key)?.map(|list| IdList::parse(&list, author)).transpose();
        let resolvers = r.list("resolvers")?.map(|list| Destinations::parse(&list)).transpose()?;
        let ports = r.list("ports")?.map(|list| values::parse_ports(&list)).transpose()?;
        let protocols = r.list("protocols")?.map(|list| values::parse_protocols(&list)).transpose()?;
        Ok(Self {
            uids: ids("uids")?,
            gids: ids("gids")?,
            resolvers,
            ports: ports.unwrap_or_else(|| Ports::List(vec![PortRange::one(53)])),
            protocols: protocols.unwrap_or_else(|| vec![Some(Protocol::Udp), Some(Protocol::Tcp)]),
        })
    }

    /// The annotation of the pod or its namespace: for every process, on this block's ports.
    pub(super) fn annotated(&self, facts: &Facts) -> Result<Option<(SettingSource, Self)>, Error> {
        let Some(annotation) = AnnotationValue::of_pod_or_namespace(facts, RESOLVERS) else { return Ok(None) };
        let resolvers = Some(Destinations::parse(&annotation.list()?)?);
        Ok(Some((annotation.source(RESOLVERS), Self { uids: None, gids: None, resolvers, ..self.clone() })))
    }

    /// What that exempts in one pod.
    pub(super) fn exclusions(
        &self,
        scene: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<RequestedExclusions, Error> {
        let mut asked = RequestedExclusions::default();
        let Some(ports) = self.ports() else { return Ok(asked) };
        let destinations = match (&self.resolvers, &self.uids, &self.gids) {
            (Some(resolvers), _, _) => resolvers.resolve(scene)?,
            (None, None, None) => return Ok(asked),
            (None, _, _) => vec![None],
        };
        let owners = self.owners(scene, notes)?;
        let places = [self.resolvers.as_ref().map(Destinations::place), self.uids.as_ref().map(IdList::place)];
        let place = places.into_iter().flatten().next().unwrap_or("gids");
        asked.add(place, &owners, &destinations, &self.protocols, &ports)?;
        Ok(asked)
    }

    fn owners(&self, scene: &PodContext<'_>, notes: &mut Vec<Note>) -> Result<Vec<TrafficOwner>, Error> {
        if self.uids.is_none() && self.gids.is_none() {
            return Ok(vec![TrafficOwner::Any]);
        }
        let mut owners = Vec::new();
        for (ids, kind) in [(&self.uids, IdKind::User), (&self.gids, IdKind::Group)] {
            if let Some(ids) = ids {
                owners.extend(ids.owners(kind, scene, notes)?);
            }
        }
        Ok(owners)
    }

    /// As in [`crate::policy::Exclusion::ports`], where none is every port; `None` where the list is empty.
    fn ports(&self) -> Option<Vec<PortRange>> {
        match &self.ports {
            Ports::All => Some(Vec::new()),
            Ports::List(ranges) => (!ranges.is_empty()).then(|| values::sorted(ranges.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scenario::{Scenario, chain};
    use super::*;
    use serde_json::{Value, json};

    fn block(keys: Value) -> Scenario {
        let mut block = keys;
        block["type"] = "dns-exclude".into();
        chain(json!([block]))
    }

    #[test]
    fn a_block_that_names_nobody_excludes_only_what_annotations_ask_for() {
        for keys in [json!({}), json!({"ports": [53], "protocols": "udp"})] {
            assert!(block(keys).exclusions().is_empty());
        }
        let asked = block(json!({})).annotated(RESOLVERS, "10.0.0.10");
        assert_eq!(asked.exclusions(), ["any tcp 53 to 10.0.0.10/32", "any udp 53 to 10.0.0.10/32"]);
    }

    #[test]
    fn each_key_of_a_block() {
        for (keys, expected) in [
            (json!({"uids": [1337]}), vec!["uid 1337 tcp 53", "uid 1337 udp 53"]),
            (json!({"gids": "7", "protocols": ["udp"]}), vec!["gid 7 udp 53"]),
            (json!({"uids": [1], "gids": [2], "protocols": ["tcp"]}), vec!["uid 1 tcp 53", "gid 2 tcp 53"]),
            (json!({"resolvers": "all", "protocols": "udp"}), vec!["any udp 53"]),
            (json!({"resolvers": "*", "ports": "53,5353-5355", "protocols": "udp"}), vec!["any udp 53 5353-5355"]),
            (json!({"resolvers": "all", "ports": "*", "protocols": "*"}), vec!["any"]),
            (
                json!({"uids": [1], "resolvers": ["10.0.0.1", "fd00::/8"], "protocols": "udp"}),
                vec!["uid 1 udp 53 to 10.0.0.1/32", "uid 1 udp 53 to fd00::/8"],
            ),
        ] {
            assert_eq!(block(keys.clone()).exclusions(), expected, "{keys}");
        }
    }

    #[test]
    fn an_empty_list_that_is_written_down_is_nobody_not_everybody() {
        for keys in [
            json!({"uids": []}),
            json!({"uids": "", "resolvers": "all"}),
            json!({"resolvers": []}),
            json!({"resolvers": "all", "ports": []}),
            json!({"resolvers": "all", "protocols": ""}),
        ] {
            assert!(block(keys.clone()).exclusions().is_empty(), "{keys}");
        }
    }

    #[test]
    fn the_annotation_holds_for_every_process_on_the_blocks_ports() {
        let scenario = block(json!({"uids": [1], "ports": [5353], "protocols": "udp", "resolvers": "10.0.0.1"}));
        let both = ["any udp 5353 to 10.0.0.2/32", "uid 1 udp 5353 to 10.0.0.1/32"];
        assert_eq!(scenario.clone().annotated(RESOLVERS, "10.0.0.2").exclusions(), both);
        assert_eq!(scenario.clone().namespace(RESOLVERS, "10.0.0.2").exclusions(), both);
        assert_eq!(scenario.clone().namespace(RESOLVERS, "10.0.0.2").annotated(RESOLVERS, "").exclusions(), [both[1]]);
        assert_eq!(scenario.annotated(RESOLVERS, "all").exclusions(), ["any udp 5353"]);
    }

    #[test]
    fn every_form_of_the_annotation() {
        let scenario = block(json!({"protocols": "udp"})).cluster_dns("10.96.0.10");
        assert_eq!(scenario.clone().annotated(RESOLVERS, "resolv-conf").exclusions(), ["any udp 53 to 10.96.0.10/32"]);
        let ranges = scenario.clone().annotated("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.0.0.0/8");
        let asked = ranges.annotated(RESOLVERS, "excluded-ranges");
        assert_eq!(asked.exclusions(), ["any udp 53 to 10.0.0.0/8"]);
        let msg = scenario.annotated(RESOLVERS, "10.0.0.1, corp-dns").error();
        let start = "annotation \"detour.io/exclude-dns\" of pod shop/cart-1: invalid value \"corp-dns\"; expected all";
        assert!(msg.starts_with(start), "{msg}");
    }

    #[test]
    fn the_pods_argument_has_defaults_of_its_own() {
        let scenario = block(json!({"uids": [1], "ports": [5353], "protocols": "udp"}));
        let asked = scenario.args(json!({"dns-exclude": {"uids": "2"}}));
        assert_eq!(asked.exclusions(), ["uid 1 udp 5353", "uid 2 tcp 53", "uid 2 udp 53"]);
    }

    #[test]
    fn excluded_ranges_follow_the_redirection_of_the_same_chain() {
        let redirect = json!({"type": "istio-redirect", "outbound_ip_ranges_exclude": "10.1.0.0/16"});
        let dns = json!({"type": "dns-exclude", "resolvers": "excluded-ranges", "protocols": "udp"});
        for blocks in [json!([redirect, dns]), json!([dns, redirect])] {
            let scenario = chain(blocks);
            assert_eq!(scenario.exclusions(), ["any udp 53 to 10.1.0.0/16"]);
            let annotated = scenario.annotated("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.2.0.0/16");
            assert_eq!(annotated.exclusions(), ["any udp 53 to 10.2.0.0/16"]);
        }
    }
}
