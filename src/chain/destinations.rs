//! The forms of `resolvers`: which resolvers' DNS is excluded.

use super::ranges;
use super::scene::{Scene, name_of};
use crate::cni::{Code, Error, List};
use crate::policy::Ranges;
use ipnet::IpNet;
use std::fmt;
use std::net::IpAddr;

const ACCEPTED: &str = "all, *, IP addresses, CIDRs such as 10.96.0.10/32, resolv-conf, excluded-ranges";

/// A list of resolvers, as somebody wrote it down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Destinations {
    place: String,
    forms: Vec<Form>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    All,
    Range(IpNet),
    ResolvConf,
    ExcludedRanges,
}

impl Destinations {
    /// Understands every item.
    pub(super) fn parse(list: &List) -> Result<Self, Error> {
        let form = |item: &String| Form::parse(item).ok_or_else(|| list.reject(item, ACCEPTED));
        let forms = list.items.iter().map(form).collect::<Result<_, _>>()?;
        Ok(Self { place: list.place.clone(), forms })
    }

    /// Where those resolvers are for one pod, each as [`crate::policy::Exclusion::destination`].
    pub(super) fn resolve(&self, scene: &Scene<'_>) -> Result<Vec<Option<IpNet>>, Error> {
        let mut destinations = Vec::new();
        for form in &self.forms {
            match form {
                Form::All => destinations.push(None),
                Form::Range(range) => destinations.push(Some(*range)),
                Form::ResolvConf => destinations.extend(self.resolv_conf(scene)?.into_iter().map(|ip| Some(ip.into()))),
                Form::ExcludedRanges => {
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
    fn resolv_conf(&self, scene: &Scene<'_>) -> Result<Vec<IpAddr>, Error> {
        let known = scene.resolvers;
        if !known.runtime.is_empty() {
            return Ok(known.runtime.to_vec());
        }
        let of_pod = scene.facts.map(|facts| &facts.pod).filter(|pod| !pod.dns_nameservers.is_empty());
        if let Some(pod) = of_pod {
            let place = format!("dnsConfig.nameservers of pod {}", name_of(pod));
            let servers = List { place, items: pod.dns_nameservers.clone() };
            let address = |item: &String| item.trim().parse().map_err(|_| servers.reject(item, "IP addresses"));
            return servers.items.iter().map(address).collect();
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
                Form::ResolvConf
            );
            Error::new(Code::InvalidConfig, msg)
        })
    }
}

impl Form {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "all" | "*" => Self::All,
            "resolv-conf" => Self::ResolvConf,
            "excluded-ranges" => Self::ExcludedRanges,
            _ => Self::Range(ranges::range(text)?),
        })
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Range(range) => range.fmt(f),
            Self::ResolvConf => f.write_str("resolv-conf"),
            Self::ExcludedRanges => f.write_str("excluded-ranges"),
        }
    }
}
