//! `dns-exclude`: DNS queries of certain processes, or to certain resolvers, bypass the sidecar.

use super::context::{AnnotationValue, ListAuthor, PodContext, RequestedExclusions, name_of};
use super::ids::{IdKind, IdList};
use super::sub_plugin::Note;
use super::{settings, values};
use crate::cni::{BlockReader, Code, Error, ItemList, LIST_ITEMS, at_most};
use crate::pod::Facts;
use crate::pod::well_known::EXCLUDE_DNS;
use crate::policy::{PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner};
use ipnet::IpNet;
use std::fmt;
use std::net::IpAddr;

/// The annotations of a pod or namespace that this sub-plugin reads.
pub(super) const ANNOTATIONS: [&str; 1] = [EXCLUDE_DNS];

const ACCEPTED: &str = "all, *, IP addresses, CIDRs such as 10.96.0.10/32, resolv-conf, excluded-ranges";
const DNS_PORT: u16 = 53;

/// The exclusions that one block, argument or annotation requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DnsExclude {
    pub(super) uids: Option<IdList>,
    pub(super) gids: Option<IdList>,
    pub(super) resolvers: Option<ResolverList>,
    pub(super) ports: Ports,
    /// The key `ports` as it was written.
    pub(super) written_ports: Option<ItemList>,
    protocols: Vec<Option<Protocol>>,
}

impl DnsExclude {
    /// Parses a block's keys.
    pub(super) fn parse(r: &BlockReader<'_>, author: ListAuthor) -> Result<Self, Error> {
        let ids = |key| r.list(key)?.map(|list| IdList::parse(&list, author)).transpose();
        let resolvers = r.list("resolvers")?.map(|list| ResolverList::parse(&list)).transpose()?;
        let written_ports = r.list("ports")?;
        let ports = written_ports.as_ref().map(values::parse_requested_ports).transpose()?;
        let protocols = r.list("protocols")?.map(|list| values::parse_protocols(&list)).transpose()?;
        Ok(Self {
            uids: ids("uids")?,
            gids: ids("gids")?,
            resolvers,
            ports: ports.unwrap_or_else(|| Ports::List(vec![PortRange::one(DNS_PORT)])),
            written_ports,
            protocols: protocols.unwrap_or_else(|| vec![Some(Protocol::Udp), Some(Protocol::Tcp)]),
        })
    }

    /// Parses the annotation: it applies to every process and to this block's ports.
    pub(super) fn of_annotation(&self, annotation: &AnnotationValue<'_>) -> Result<Self, Error> {
        let resolvers = Some(ResolverList::parse(&annotation.list()?)?);
        Ok(Self { uids: None, gids: None, resolvers, written_ports: None, ..self.clone() })
    }

    /// Returns the exclusions for one pod.
    pub(super) fn exclusions(
        &self,
        context: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<RequestedExclusions, Error> {
        let mut requested = RequestedExclusions::default();
        let Some(ports) = self.ports() else { return Ok(requested) };
        let destinations = match (&self.resolvers, &self.uids, &self.gids) {
            (Some(resolvers), _, _) => resolvers.destinations(context)?,
            (None, None, None) => return Ok(requested),
            (None, _, _) => vec![None],
        };
        let owners = self.owners(context, notes)?;
        let places = [self.resolvers.as_ref().map(ResolverList::place), self.uids.as_ref().map(IdList::place)];
        let place = places.into_iter().flatten().next().unwrap_or("gids");
        requested.add(place, &owners, &destinations, &self.protocols, &ports)?;
        Ok(requested)
    }

    fn owners(&self, context: &PodContext<'_>, notes: &mut Vec<Note>) -> Result<Vec<TrafficOwner>, Error> {
        if self.uids.is_none() && self.gids.is_none() {
            return Ok(vec![TrafficOwner::Any]);
        }
        let mut owners = Vec::new();
        for (ids, kind) in [(&self.uids, IdKind::User), (&self.gids, IdKind::Group)] {
            if let Some(ids) = ids {
                owners.extend(ids.owners(kind, context, notes)?);
            }
        }
        Ok(owners)
    }

    /// Returns the ports as [`crate::policy::Exclusion::ports`] has them, where an empty list is every port; `None` if
    /// the block's list is empty.
    fn ports(&self) -> Option<Vec<PortRange>> {
        match &self.ports {
            Ports::All => Some(Vec::new()),
            Ports::List(ranges) => (!ranges.is_empty()).then(|| values::merged(ranges.clone())),
        }
    }
}

/// A list of resolvers as it was written: the key `resolvers` or the annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResolverList {
    pub(super) place: String,
    pub(super) forms: Vec<ResolverForm>,
}

/// One item of a [`ResolverList`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ResolverForm {
    All,
    Range(IpNet),
    ResolvConf,
    ExcludedRanges,
}

impl ResolverList {
    pub(super) fn parse(list: &ItemList) -> Result<Self, Error> {
        Ok(Self { place: list.place.clone(), forms: list.all(ACCEPTED, ResolverForm::parse)? })
    }

    fn place(&self) -> &str {
        &self.place
    }

    /// Returns whether this list, of a grant, permits an item of a request.
    pub(super) fn permits(&self, requested: &ResolverForm) -> bool {
        self.forms.iter().any(|granted| match (granted, requested) {
            (ResolverForm::All, _) => true,
            (ResolverForm::Range(granted), ResolverForm::Range(range)) => granted.contains(range),
            (granted, requested) => granted == requested,
        })
    }

    /// Returns the resolvers' addresses for one pod, each as [`crate::policy::Exclusion::destination`].
    pub(super) fn destinations(&self, context: &PodContext<'_>) -> Result<Vec<Option<IpNet>>, Error> {
        let mut destinations = Vec::new();
        for form in &self.forms {
            match form {
                ResolverForm::All => destinations.push(None),
                ResolverForm::Range(range) => destinations.push(Some(*range)),
                ResolverForm::ResolvConf => {
                    destinations.extend(self.resolv_conf(context)?.into_iter().map(|ip| Some(ip.into())))
                }
                ResolverForm::ExcludedRanges => match excluded_ranges(context, context.facts(&self.place, form)?)? {
                    Ranges::All => destinations.push(None),
                    Ranges::List(ranges) => destinations.extend(ranges.into_iter().map(Some)),
                },
            }
        }
        Ok(destinations)
    }

    /// Returns the resolvers that the pod's `/etc/resolv.conf` will have, from the first source that has them.
    fn resolv_conf(&self, context: &PodContext<'_>) -> Result<Vec<IpAddr>, Error> {
        let resolvers = context.resolvers;
        if !resolvers.runtime.is_empty() {
            return Ok(resolvers.runtime.to_vec());
        }
        let pod = context.facts.map(|facts| &facts.pod).filter(|pod| !pod.dns_nameservers.is_empty());
        if let Some(pod) = pod {
            let place = format!("dnsConfig.nameservers of pod {}", name_of(pod));
            let servers = ItemList { place, items: pod.dns_nameservers.clone() };
            let within = at_most(LIST_ITEMS, "items", &servers.place, servers.items.len());
            let addresses = within.and_then(|()| servers.distinct("IP addresses", |item| item.trim().parse().ok()));
            return addresses;
        }
        let fallback = [resolvers.cluster_dns, resolvers.previous].into_iter().find(|addresses| !addresses.is_empty());
        fallback.map(<[_]>::to_vec).ok_or_else(|| {
            let pod = match context.facts {
                Some(facts) => format!("dnsConfig.nameservers of pod {}", name_of(&facts.pod)),
                None => "the pod's dnsConfig.nameservers (no source of facts)".to_owned(),
            };
            let msg = format!(
                "{}: \"{}\": no resolvers of the pod found in runtimeConfig.dns, {pod}, kubernetes.cluster_dns and \
                 prevResult.dns; set kubernetes.cluster_dns",
                self.place,
                ResolverForm::ResolvConf
            );
            Error::new(Code::InvalidConfig, msg)
        })
    }
}

/// Returns the destinations that are not redirected: those of the same sub-plugin chain or, if another program redirects
/// the pod, those of the pod's annotation. A pinned block does not read it.
fn excluded_ranges(context: &PodContext<'_>, facts: &Facts) -> Result<Ranges, Error> {
    if let Some(redirect) = context.redirect {
        return Ok(redirect.outbound_ip_ranges_exclude.clone());
    }
    let annotated = if context.reads_annotations { settings::excluded_ranges(&facts.pod)? } else { None };
    Ok(annotated.unwrap_or_else(|| Redirect::default().outbound_ip_ranges_exclude))
}

impl ResolverForm {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "all" | "*" => Self::All,
            "resolv-conf" => Self::ResolvConf,
            "excluded-ranges" => Self::ExcludedRanges,
            _ => Self::Range(values::parse_range(text)?),
        })
    }
}

impl fmt::Display for ResolverForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Range(range) => range.fmt(f),
            Self::ResolvConf => f.write_str("resolv-conf"),
            Self::ExcludedRanges => f.write_str("excluded-ranges"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::context::Resolvers;
    use super::super::tests::scenario::{self, Scenario, chain, context, facts, meshed_pod};
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn block(keys: Value) -> Scenario {
        let mut block = keys;
        block["type"] = "dns-exclude".into();
        chain(json!([block]))
    }

    #[test]
    fn a_block_without_owners_and_resolvers_only_adds_annotations() {
        for keys in [json!({}), json!({"ports": [53], "protocols": "udp"})] {
            assert!(block(keys).exclusions().is_empty());
        }
        let annotated = block(json!({})).annotated(EXCLUDE_DNS, "10.0.0.10");
        assert_eq!(annotated.exclusions(), ["any tcp 53 to 10.0.0.10/32", "any udp 53 to 10.0.0.10/32"]);
    }

    #[test]
    fn every_key_of_a_block_takes_effect() {
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
    fn an_empty_list_excludes_nothing() {
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
    fn the_annotation_applies_to_every_process_and_the_blocks_ports() {
        let scenario = block(json!({"uids": [1], "ports": [5353], "protocols": "udp", "resolvers": "10.0.0.1"}));
        let both = ["any udp 5353 to 10.0.0.2/32", "uid 1 udp 5353 to 10.0.0.1/32"];
        assert_eq!(scenario.clone().annotated(EXCLUDE_DNS, "10.0.0.2").exclusions(), both);
        assert_eq!(scenario.clone().namespace(EXCLUDE_DNS, "10.0.0.2").exclusions(), both);
        assert_eq!(
            scenario.clone().namespace(EXCLUDE_DNS, "10.0.0.2").annotated(EXCLUDE_DNS, "").exclusions(),
            [both[1]]
        );
        assert_eq!(scenario.annotated(EXCLUDE_DNS, "all").exclusions(), ["any udp 5353"]);
    }

    #[test]
    fn every_form_of_the_annotation_is_parsed() {
        let scenario = block(json!({"protocols": "udp"})).cluster_dns("10.96.0.10");
        assert_eq!(
            scenario.clone().annotated(EXCLUDE_DNS, "resolv-conf").exclusions(),
            ["any udp 53 to 10.96.0.10/32"]
        );
        let ranges = scenario.clone().annotated("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.0.0.0/8");
        let annotated = ranges.annotated(EXCLUDE_DNS, "excluded-ranges");
        assert_eq!(annotated.exclusions(), ["any udp 53 to 10.0.0.0/8"]);
        let msg = scenario.annotated(EXCLUDE_DNS, "10.0.0.1, corp-dns").error();
        let start = "annotation \"detour.io/exclude-dns\" of pod shop/cart-1: ";
        assert!(msg.starts_with(start) && msg.contains("\"corp-dns\"") && msg.contains(ACCEPTED), "{msg}");
    }

    #[test]
    fn a_pinned_block_does_not_follow_the_annotation_of_excluded_ranges() {
        let ranges = |pod_overrides: bool| {
            let keys = json!({"resolvers": "excluded-ranges", "protocols": "udp", "pod_overrides": pod_overrides});
            block(keys).annotated("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.0.0.0/8").exclusions()
        };
        assert_eq!((ranges(true), ranges(false)), (vec!["any udp 53 to 10.0.0.0/8".to_owned()], Vec::new()));
    }

    #[test]
    fn the_pods_argument_has_its_own_defaults() {
        let scenario = block(json!({"uids": [1], "ports": [5353], "protocols": "udp"}));
        let annotated = scenario.args(json!({"dns-exclude": {"uids": "2"}}));
        assert_eq!(annotated.exclusions(), ["uid 1 udp 5353", "uid 2 tcp 53", "uid 2 udp 53"]);
    }

    #[test]
    fn excluded_ranges_follow_the_redirection_of_the_same_sub_plugin_chain() {
        let redirect = json!({"type": "istio-redirect", "outbound_ip_ranges_exclude": "10.1.0.0/16"});
        let dns = json!({"type": "dns-exclude", "resolvers": "excluded-ranges", "protocols": "udp"});
        for blocks in [json!([redirect, dns]), json!([dns, redirect])] {
            let scenario = chain(blocks);
            assert_eq!(scenario.exclusions(), ["any udp 53 to 10.1.0.0/16"]);
            let annotated = scenario.annotated("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.2.0.0/16");
            assert_eq!(annotated.exclusions(), ["any udp 53 to 10.2.0.0/16"]);
        }
    }

    fn list(text: &str) -> ResolverList {
        ResolverList::parse(&ItemList::from_text("k", text).expect("a list")).expect(text)
    }

    fn shown(text: &str, pod: &PodContext<'_>) -> Vec<String> {
        let show = |d: Option<IpNet>| d.map_or_else(|| "anywhere".to_owned(), |net| net.to_string());
        list(text).destinations(pod).expect(text).into_iter().map(show).collect()
    }

    fn ips(text: &str) -> Vec<IpAddr> {
        text.split(',').map(|ip| ip.parse().expect(ip)).collect()
    }

    #[test]
    fn addresses_and_wildcards_need_no_facts() {
        let none = context(None);
        assert_eq!(shown("all", &none), ["anywhere"]);
        assert_eq!(shown("*", &none), ["anywhere"]);
        assert_eq!(shown("10.0.0.10, 10.1.2.3/16,fd00::a", &none), ["10.0.0.10/32", "10.1.0.0/16", "fd00::a/128"]);
        assert!(shown("", &none).is_empty());
        for text in ["every", "10.0.0.0/40", "kube-dns", "resolv_conf"] {
            let error = ResolverList::parse(&ItemList::from_text("k", text).expect("a list")).expect_err(text);
            assert_eq!(error, ItemList::from_text("k", text).expect("a list").reject(text, ACCEPTED));
        }
    }

    #[test]
    fn the_first_source_with_resolvers_takes_precedence() {
        let (runtime, cluster_dns, previous) = (ips("10.0.0.1,fd00::1"), ips("10.0.0.3"), ips("10.0.0.4"));
        let mut pod = meshed_pod();
        pod.dns_nameservers = vec!["10.0.0.2".into()];
        let with_own = facts(pod, &[]);
        let without = facts(meshed_pod(), &[]);
        let all = Resolvers { runtime: &runtime, cluster_dns: &cluster_dns, previous: &previous };
        let farther = Resolvers { runtime: &[], ..all };
        let farthest = Resolvers { cluster_dns: &[], ..farther };
        for (facts, resolvers, expected) in [
            (Some(&with_own), all, &["10.0.0.1/32", "fd00::1/128"][..]),
            (Some(&with_own), farther, &["10.0.0.2/32"]),
            (Some(&without), farther, &["10.0.0.3/32"]),
            (Some(&without), farthest, &["10.0.0.4/32"]),
            (None, farthest, &["10.0.0.4/32"]),
        ] {
            let pod = PodContext { resolvers, ..context(facts) };
            assert_eq!(shown("resolv-conf", &pod), expected);
        }
    }

    #[test]
    fn missing_resolvers_are_an_error_that_lists_all_sources() {
        let facts = facts(meshed_pod(), &[]);
        for (facts, pod) in [(Some(&facts), "dnsConfig.nameservers of pod shop/cart-1"), (None, "no source of facts")] {
            let error = list("resolv-conf").destinations(&context(facts)).expect_err("no source");
            assert_eq!(error.code, Code::InvalidConfig);
            for part in ["k: ", "\"resolv-conf\"", "runtimeConfig.dns", pod, "kubernetes.cluster_dns", "prevResult.dns"]
            {
                assert!(error.msg.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn an_invalid_nameserver_of_the_pod_is_rejected_with_its_place() {
        let mut pod = meshed_pod();
        pod.dns_nameservers = vec!["dns.example".into()];
        let error = list("resolv-conf").destinations(&context(Some(&facts(pod, &[])))).expect_err("no address");
        let start = "dnsConfig.nameservers of pod shop/cart-1: ";
        assert!(error.msg.starts_with(start) && error.msg.contains("\"dns.example\""), "{error}");
    }

    fn annotated(ranges: &str) -> Facts {
        let mut pod = meshed_pod();
        pod.annotations.insert("traffic.sidecar.istio.io/excludeOutboundIPRanges".into(), ranges.into());
        facts(pod, &[])
    }

    #[test]
    fn excluded_ranges_come_from_the_sub_plugin_chain_or_from_the_pod() {
        let facts = annotated("10.2.0.0/16,fd00::/8");
        assert_eq!(shown("excluded-ranges", &context(Some(&facts))), ["10.2.0.0/16", "fd00::/8"]);
        let ranges = Ranges::List(vec!["10.9.0.0/16".parse().expect("a CIDR")]);
        let redirect = Redirect { outbound_ip_ranges_exclude: ranges, ..Redirect::default() };
        let ours = PodContext { redirect: Some(&redirect), ..context(Some(&facts)) };
        assert_eq!(shown("excluded-ranges", &ours), ["10.9.0.0/16"]);
        assert_eq!(shown("excluded-ranges", &context(Some(&annotated("*")))), ["anywhere"]);
        assert!(shown("excluded-ranges", &context(Some(&scenario::facts(meshed_pod(), &[])))).is_empty());
        let error = list("excluded-ranges").destinations(&context(None)).expect_err("no facts");
        assert!(error.msg.starts_with("k: \"excluded-ranges\" needs facts of the pod: "), "{error}");
    }

    proptest! {
        #[test]
        fn displayed_items_parse_to_the_same_items(address: IpAddr) {
            for form in [ResolverForm::All, ResolverForm::ResolvConf, ResolverForm::ExcludedRanges, ResolverForm::Range(address.into())] {
                prop_assert_eq!(ResolverForm::parse(&form.to_string()), Some(form));
            }
        }

        #[test]
        fn no_text_causes_a_panic(text in "[0-9a-f:./*, -]{0,40}|.{0,20}") {
            let _ = ItemList::from_text("k", &text).and_then(|list| ResolverList::parse(&list));
        }
    }
}
