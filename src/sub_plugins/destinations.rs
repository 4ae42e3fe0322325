//! The forms of `resolvers`: which resolvers' DNS is excluded.

use super::context::{PodContext, name_of};
use super::values;
use crate::cni::{Code, Error, ItemList, LIST_ITEMS, at_most};
use crate::policy::Ranges;
use ipnet::IpNet;
use std::fmt;
use std::net::IpAddr;

const ACCEPTED: &str = "all, *, IP addresses, CIDRs such as 10.96.0.10/32, resolv-conf, excluded-ranges";

/// A list of resolvers, as somebody wrote it down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Destinations {
    place: String,
    forms: Vec<DestinationForm>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum DestinationForm {
    All,
    Range(IpNet),
    ResolvConf,
    ExcludedRanges,
}

impl Destinations {
    /// Understands every item.
    pub(super) fn parse(list: &ItemList) -> Result<Self, Error> {
        Ok(Self { place: list.place.clone(), forms: list.distinct(ACCEPTED, DestinationForm::parse)? })
    }

    /// Where it stands, for messages.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// Where those resolvers are for one pod, each as [`crate::policy::Exclusion::destination`].
    pub(super) fn resolve(&self, scene: &PodContext<'_>) -> Result<Vec<Option<IpNet>>, Error> {
        let mut destinations = Vec::new();
        for form in &self.forms {
            match form {
                DestinationForm::All => destinations.push(None),
                DestinationForm::Range(range) => destinations.push(Some(*range)),
                DestinationForm::ResolvConf => {
                    destinations.extend(self.resolv_conf(scene)?.into_iter().map(|ip| Some(ip.into())))
                }
                DestinationForm::ExcludedRanges => {
                    scene.facts(&self.place, form)?;
                    match scene.excluded_ranges()? {
                        Ranges::All => destinations.push(None),
                        Ranges::List(ranges) => destinations.extend(ranges.into_iter().map(Some)),
                    }
                }
            }
        }
        Ok(destinations)
    }

    /// The nearest place that says which resolvers the pod's `/etc/resolv.conf` will have.
    fn resolv_conf(&self, scene: &PodContext<'_>) -> Result<Vec<IpAddr>, Error> {
        let known = scene.resolvers;
        if !known.runtime.is_empty() {
            return Ok(known.runtime.to_vec());
        }
        let of_pod = scene.facts.map(|facts| &facts.pod).filter(|pod| !pod.dns_nameservers.is_empty());
        if let Some(pod) = of_pod {
            let place = format!("dnsConfig.nameservers of pod {}", name_of(pod));
            let servers = ItemList { place, items: pod.dns_nameservers.clone() };
            at_most(LIST_ITEMS, "items", &servers.place, servers.items.len())?;
            return servers.distinct("IP addresses", |item| item.trim().parse().ok());
        }
        let farther = [known.cluster_dns, known.previous].into_iter().find(|addresses| !addresses.is_empty());
        farther.map(<[_]>::to_vec).ok_or_else(|| {
            let pod = match scene.facts {
                Some(facts) => format!("dnsConfig.nameservers of pod {}", name_of(&facts.pod)),
                None => "the pod's dnsConfig.nameservers (its facts have no source)".to_owned(),
            };
            let msg = format!(
                "{}: \"{}\": the pod's resolvers are not known: looked at runtimeConfig.dns, {pod}, \
                 kubernetes.cluster_dns and prevResult.dns; set kubernetes.cluster_dns",
                self.place,
                DestinationForm::ResolvConf
            );
            Error::new(Code::InvalidConfig, msg)
        })
    }
}

impl DestinationForm {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "all" | "*" => Self::All,
            "resolv-conf" => Self::ResolvConf,
            "excluded-ranges" => Self::ExcludedRanges,
            _ => Self::Range(values::range(text)?),
        })
    }
}

impl fmt::Display for DestinationForm {
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
    use super::super::Resolvers;
    use super::super::context::tests::scene;
    use super::super::scenario::{facts, meshed_pod};
    use super::*;
    use crate::pod::Facts;
    use crate::policy::Redirect;
    use proptest::prelude::*;

    fn of(text: &str) -> Destinations {
        Destinations::parse(&ItemList::from_text("k", text).expect("a list")).expect(text)
    }

    fn shown(text: &str, scene: &PodContext<'_>) -> Vec<String> {
        let show = |d: Option<IpNet>| d.map_or_else(|| "anywhere".to_owned(), |net| net.to_string());
        of(text).resolve(scene).expect(text).into_iter().map(show).collect()
    }

    fn ips(text: &str) -> Vec<IpAddr> {
        text.split(',').map(|ip| ip.parse().expect(ip)).collect()
    }

    #[test]
    fn forms_that_need_nothing() {
        let scene = scene(None);
        assert_eq!(shown("all", &scene), ["anywhere"]);
        assert_eq!(shown("*", &scene), ["anywhere"]);
        assert_eq!(shown("10.0.0.10, 10.1.2.3/16,fd00::a", &scene), ["10.0.0.10/32", "10.1.0.0/16", "fd00::a/128"]);
        assert!(shown("", &scene).is_empty());
        for text in ["every", "10.0.0.0/40", "kube-dns", "resolv_conf"] {
            let error = Destinations::parse(&ItemList::from_text("k", text).expect("a list")).expect_err(text);
            assert_eq!(error.msg, format!("k: invalid value {text:?}; expected {ACCEPTED}"));
        }
    }

    #[test]
    fn the_nearest_place_that_knows_the_pods_resolvers_counts() {
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
            let scene = PodContext { resolvers, ..scene(facts) };
            assert_eq!(shown("resolv-conf", &scene), expected);
        }
    }

    #[test]
    fn resolvers_that_nobody_knows_are_an_error_that_says_where_it_looked() {
        let facts = facts(meshed_pod(), &[]);
        for (facts, pod) in
            [(Some(&facts), "dnsConfig.nameservers of pod shop/cart-1"), (None, "its facts have no source")]
        {
            let error = of("resolv-conf").resolve(&scene(facts)).expect_err("nobody knows");
            assert_eq!(error.code, Code::InvalidConfig);
            for part in ["k: ", "\"resolv-conf\"", "runtimeConfig.dns", pod, "kubernetes.cluster_dns", "prevResult.dns"]
            {
                assert!(error.msg.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn a_nameserver_of_the_pod_that_is_no_address_is_refused_by_place() {
        let mut pod = meshed_pod();
        pod.dns_nameservers = vec!["dns.example".into()];
        let error = of("resolv-conf").resolve(&scene(Some(&facts(pod, &[])))).expect_err("no address");
        let start = "dnsConfig.nameservers of pod shop/cart-1: invalid value \"dns.example\"; ";
        assert!(error.msg.starts_with(start), "{error}");
    }

    fn annotated(ranges: &str) -> Facts {
        let mut pod = meshed_pod();
        pod.annotations.insert("traffic.sidecar.istio.io/excludeOutboundIPRanges".into(), ranges.into());
        facts(pod, &[])
    }

    #[test]
    fn excluded_ranges_are_this_chains_or_else_the_pods() {
        let facts = annotated("10.2.0.0/16,fd00::/8");
        assert_eq!(shown("excluded-ranges", &scene(Some(&facts))), ["10.2.0.0/16", "fd00::/8"]);
        let ranges = Ranges::List(vec!["10.9.0.0/16".parse().expect("a CIDR")]);
        let redirect = Redirect { outbound_ip_ranges_exclude: ranges, ..Redirect::default() };
        let ours = PodContext { redirect: Some(&redirect), ..scene(Some(&facts)) };
        assert_eq!(shown("excluded-ranges", &ours), ["10.9.0.0/16"]);
        assert_eq!(shown("excluded-ranges", &scene(Some(&annotated("*")))), ["anywhere"]);
        assert!(shown("excluded-ranges", &scene(Some(&super::super::scenario::facts(meshed_pod(), &[])))).is_empty());
        let error = of("excluded-ranges").resolve(&scene(None)).expect_err("no facts");
        assert!(error.msg.starts_with("k: \"excluded-ranges\" needs facts of the pod: "), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_again(address: IpAddr) {
            for form in [DestinationForm::All, DestinationForm::ResolvConf, DestinationForm::ExcludedRanges, DestinationForm::Range(address.into())] {
                prop_assert_eq!(DestinationForm::parse(&form.to_string()), Some(form));
            }
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9a-f:./*, -]{0,40}|.{0,20}") {
            let _ = ItemList::from_text("k", &text).and_then(|list| Destinations::parse(&list));
        }
    }
}
