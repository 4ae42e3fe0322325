//! The settings of the redirection as `explain` shows them: key, value, sources; and the traffic that they exclude:
//! ports, ranges, groups and interfaces. What Istio excludes by default is not listed.

use super::exclusions::{ExcludedTraffic, sources_of};
use crate::inspect::terminal::joined;
use crate::policy::{Groups, IdRange, Ports, Ranges, Redirect, TrafficOwner};
use crate::sub_plugins::{SettingSource, setting_values};
use serde::Serialize;
use serde_json::Value;

/// A setting of the redirection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The key in an `istio-redirect` block.
    pub key: &'static str,
    /// The value in effect: a list of strings or `*`, a number, a boolean or a word.
    pub value: Value,
    /// The sources of the value; `default` if it is not set.
    pub sources: Vec<String>,
}

impl Setting {
    /// Returns whether the setting has Istio's default because it is not set.
    pub(super) fn is_default(&self) -> bool {
        self.sources.iter().all(|source| *source == SettingSource::Default.to_string())
    }

    /// Whether the value differs from that of Istio's and this program's default. The default of one setting can depend on
    /// another one.
    pub(super) fn differs(&self) -> bool {
        !self.is_default()
            && setting_values(&Redirect::default()).any(|(key, value)| key == self.key && value != self.value)
    }

    /// Returns the value in one line.
    pub(super) fn shown(&self) -> String {
        match &self.value {
            Value::Array(items) if items.is_empty() => "none".to_owned(),
            Value::Array(items) => joined(items.iter().map(plain)),
            other => plain(other),
        }
    }
}

/// Returns every setting of `redirect` that has a source.
pub(super) fn settings(redirect: &Redirect, origins: &[(&'static str, SettingSource)]) -> Vec<Setting> {
    let setting = |(key, value)| Setting { key, value, sources: sources_of(origins, |other| *other == key) };
    setting_values(redirect).map(setting).filter(|setting| !setting.sources.is_empty()).collect()
}

/// What the guard does with a packet that neither the redirection nor an exclusion explains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExplainedGuard {
    /// Where such a packet arrives, as `trace` says it: `rejected`.
    pub unexplained: &'static str,
    /// The blocks of `mesh-guard`.
    pub sources: Vec<String>,
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Returns the traffic that `redirect` does not capture, with the sources in `settings`.
pub(super) fn uncaptured(redirect: &Redirect, settings: &[Setting]) -> Vec<ExcludedTraffic> {
    let default = Redirect::default();
    let traffic = |direction, who: &str, protocol: &str, ports: Vec<String>, to: &str, keys: &[&str]| {
        let of_keys = settings.iter().filter(|setting| keys.contains(&setting.key) && !setting.is_default());
        ExcludedTraffic {
            direction,
            who: who.to_owned(),
            protocol: protocol.to_owned(),
            ports,
            to: to.to_owned(),
            sources: of_keys.flat_map(|setting| setting.sources.clone()).collect(),
            note: None,
            owner: TrafficOwner::Any,
        }
    };
    let outbound = |to: &str, keys: &[&str]| traffic("outbound", "every process", "tcp", Vec::new(), to, keys);
    let of_groups = |who: &str, keys: &[&str]| traffic("outbound", who, "everything", Vec::new(), "anywhere", keys);
    let inbound = |ports, to: &str, keys: &[&str]| traffic("inbound", "every client", "tcp", ports, to, keys);
    let mut all = Vec::new();
    let ports = excluded_ports(&redirect.outbound_ports_exclude, &default.outbound_ports_exclude);
    all.extend(ports.map(|ports| {
        traffic("outbound", "every process", "tcp and udp", ports, "anywhere", &["outbound_ports_exclude"])
    }));
    match &redirect.outbound_ip_ranges_exclude {
        Ranges::List(nets) if nets.is_empty() => {}
        Ranges::List(nets) => all.push(outbound(&joined(nets), &["outbound_ip_ranges_exclude"])),
        Ranges::All => all.push(outbound("anywhere", &["outbound_ip_ranges_exclude"])),
    }
    if let (Ranges::List(nets), Ports::List(ports)) =
        (&redirect.outbound_ip_ranges_include, &redirect.outbound_ports_include)
    {
        let ports = (!ports.is_empty()).then(|| format!("port {}", joined(ports)));
        let captured = joined(nets.iter().map(ToString::to_string).chain(ports));
        let to = if captured.is_empty() { "anywhere".to_owned() } else { format!("other than {captured}") };
        all.push(outbound(&to, &["outbound_ip_ranges_include", "outbound_ports_include"]));
    }
    all.extend(redirect.owner_groups_exclude.iter().map(|gid| {
        let owner = TrafficOwner::Gid(IdRange::one(*gid));
        ExcludedTraffic { owner, ..of_groups(&format!("gid {gid}"), &["owner_groups_exclude"]) }
    }));
    if let Groups::List(gids) = &redirect.owner_groups_include {
        let others = || format!("every gid other than {}", joined(gids));
        let who = if gids.is_empty() { "every process".to_owned() } else { others() };
        all.push(of_groups(&who, &["owner_groups_include", "owner_groups_exclude"]));
    }
    match &redirect.inbound_ports_include {
        Ports::All => {
            let ports = excluded_ports(&redirect.inbound_ports_exclude, &default.inbound_ports_exclude);
            all.extend(ports.map(|ports| inbound(ports, "the pod", &["inbound_ports_exclude"])));
        }
        Ports::List(ports) => {
            let except = (!ports.is_empty()).then(|| format!(" at ports other than {}", joined(ports)));
            let to = format!("the pod{}", except.unwrap_or_default());
            all.push(inbound(Vec::new(), &to, &["inbound_ports_include"]));
        }
    }
    if !redirect.exclude_interfaces.is_empty() {
        let keys = ["exclude_interfaces", "capture_secondary_networks"];
        let to = format!("anywhere through {}", redirect.exclude_interfaces.join(", "));
        all.push(traffic("both", "every process and client", "everything", Vec::new(), &to, &keys));
    }
    all
}

/// Returns excluded ports as [`ExcludedTraffic::ports`]; `None` for no port, and for those that Istio excludes by default.
pub(super) fn excluded_ports(ports: &Ports, default: &Ports) -> Option<Vec<String>> {
    match ports {
        ports if ports == default => None,
        Ports::All => Some(Vec::new()),
        Ports::List(ports) => (!ports.is_empty()).then(|| ports.iter().map(ToString::to_string).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PortRange;

    fn shown(change: impl FnOnce(&mut Redirect)) -> Vec<String> {
        let mut redirect = Redirect::default();
        change(&mut redirect);
        let line = |one: &ExcludedTraffic| format!("{}: {} {}", one.direction, one.who, one.what());
        uncaptured(&redirect, &[]).iter().map(line).collect()
    }

    fn ports(list: &[u16]) -> Ports {
        Ports::List(list.iter().map(|port| PortRange::one(*port)).collect())
    }

    fn ranges(text: &str) -> Ranges {
        Ranges::List(text.split(',').map(|net| net.parse().expect("a CIDR")).collect())
    }

    #[test]
    fn every_setting_that_excludes_traffic_is_listed() {
        assert!(shown(|_| ()).is_empty());
        assert!(shown(|r| r.outbound_ports_exclude = ports(&[])).is_empty());
        for (shown, expected) in [
            (
                shown(|r| r.outbound_ports_exclude = ports(&[25, 465])),
                "outbound: every process tcp and udp ports 25, 465 to anywhere",
            ),
            (shown(|r| r.outbound_ports_exclude = Ports::All), "outbound: every process tcp and udp to anywhere"),
            (
                shown(|r| r.outbound_ip_ranges_exclude = ranges("10.0.0.0/8,fd00::/8")),
                "outbound: every process tcp to 10.0.0.0/8, fd00::/8",
            ),
            (shown(|r| r.outbound_ip_ranges_exclude = Ranges::All), "outbound: every process tcp to anywhere"),
            (
                shown(|r| r.outbound_ip_ranges_include = ranges("10.0.0.0/8")),
                "outbound: every process tcp to other than 10.0.0.0/8",
            ),
            (
                shown(|r| r.outbound_ip_ranges_include = Ranges::List(Vec::new())),
                "outbound: every process tcp to anywhere",
            ),
            (
                shown(|r| {
                    (r.outbound_ip_ranges_include, r.outbound_ports_include) = (ranges("10.0.0.0/8"), ports(&[80]))
                }),
                "outbound: every process tcp to other than 10.0.0.0/8, port 80",
            ),
            (shown(|r| r.owner_groups_exclude = vec![7]), "outbound: gid 7 everything to anywhere"),
            (
                shown(|r| r.owner_groups_include = Groups::List(vec![7])),
                "outbound: every gid other than 7 everything to anywhere",
            ),
            (
                shown(|r| r.owner_groups_include = Groups::List(vec![])),
                "outbound: every process everything to anywhere",
            ),
            (
                shown(|r| r.inbound_ports_exclude = ports(&[15020, 15021, 15090, 22])),
                "inbound: every client tcp ports 15020, 15021, 15090, 22 to the pod",
            ),
            (shown(|r| r.inbound_ports_exclude = Ports::All), "inbound: every client tcp to the pod"),
            (
                shown(|r| r.inbound_ports_include = ports(&[80])),
                "inbound: every client tcp to the pod at ports other than 80",
            ),
            (shown(|r| r.inbound_ports_include = ports(&[])), "inbound: every client tcp to the pod"),
            (
                shown(|r| r.exclude_interfaces = vec!["net1".into()]),
                "both: every process and client everything to anywhere through net1",
            ),
        ] {
            assert_eq!(shown, [expected]);
        }
        let all =
            shown(|r| (r.outbound_ip_ranges_include, r.outbound_ports_include) = (ranges("10.0.0.0/8"), Ports::All));
        assert!(all.is_empty(), "every port is captured for every destination: {all:?}");
    }
}
