//! What each setting of the redirection resolved to, under the name that the configuration has
//! for it, and whose word that is.

use crate::policy::{DnsCapture, Groups, InterceptionMode, Ipv6, Ports, Ranges, Redirect};
use crate::sub_plugins::SettingSource;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Display;

/// One setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// Its key in an `istio-redirect` block.
    pub key: &'static str,
    /// What holds: a list of strings or `*`, a number, a boolean or a word.
    pub value: Value,
    /// Whose word it is, the places one by one; `default` where it is nobody's.
    pub sources: Vec<String>,
}

impl Setting {
    /// Whether nobody has set it.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.sources.iter().all(|source| *source == SettingSource::Default.to_string())
    }

    /// Its value in one line.
    #[must_use]
    pub fn shown(&self) -> String {
        match &self.value {
            Value::Array(items) if items.is_empty() => "none".to_owned(),
            Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
            other => plain(other),
        }
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Every setting of `redirect`.
pub(super) fn settings(redirect: &Redirect, origins: impl Iterator<Item = (&'static str, String)>) -> Vec<Setting> {
    let mut settings: Vec<Setting> = Vec::new();
    for (key, source) in origins {
        match settings.iter_mut().find(|setting| setting.key == key) {
            Some(known) if known.sources.contains(&source) => {}
            Some(known) => known.sources.push(source),
            None => settings.push(Setting { key, value: value(redirect, key), sources: vec![source] }),
        }
    }
    settings
}

fn value(redirect: &Redirect, key: &str) -> Value {
    match key {
        "inbound_interception_mode" => json!(match redirect.inbound_interception_mode {
            InterceptionMode::Redirect => "REDIRECT",
            InterceptionMode::Tproxy => "TPROXY",
        }),
        "proxy_uid" => list(&redirect.proxy_uid),
        "proxy_gid" => list(&redirect.proxy_gid),
        "proxy_port" => json!(redirect.proxy_port),
        "inbound_capture_port" => json!(redirect.inbound_capture_port),
        "inbound_tunnel_port" => json!(redirect.inbound_tunnel_port),
        "inbound_tproxy_mark" => json!(redirect.inbound_tproxy_mark),
        "inbound_tproxy_route_table" => json!(redirect.inbound_tproxy_route_table),
        "inbound_ports_include" => ports(&redirect.inbound_ports_include),
        "inbound_ports_exclude" => ports(&redirect.inbound_ports_exclude),
        "outbound_ports_include" => ports(&redirect.outbound_ports_include),
        "outbound_ports_exclude" => ports(&redirect.outbound_ports_exclude),
        "outbound_ip_ranges_include" => ranges(&redirect.outbound_ip_ranges_include),
        "outbound_ip_ranges_exclude" => ranges(&redirect.outbound_ip_ranges_exclude),
        "owner_groups_include" => match &redirect.owner_groups_include {
            Groups::All => json!("*"),
            Groups::List(gids) => list(gids),
        },
        "owner_groups_exclude" => list(&redirect.owner_groups_exclude),
        "reroute_virtual_interfaces" => list(&redirect.reroute_virtual_interfaces),
        "exclude_interfaces" => list(&redirect.exclude_interfaces),
        "redirect_dns" => json!(redirect.dns != DnsCapture::Off),
        "capture_all_dns" => json!(redirect.dns == DnsCapture::All),
        "dns_servers_v4" => match &redirect.dns {
            DnsCapture::Servers { v4, .. } => list(v4),
            DnsCapture::Off | DnsCapture::All => json!([]),
        },
        "dns_servers_v6" => match &redirect.dns {
            DnsCapture::Servers { v6, .. } => list(v6),
            DnsCapture::Off | DnsCapture::All => json!([]),
        },
        "capture_secondary_networks" => json!(redirect.capture_secondary_networks),
        "drop_invalid" => json!(redirect.drop_invalid),
        "enable_ipv6" => match redirect.ipv6 {
            Ipv6::Auto => json!("where the pod has an IPv6 address"),
            Ipv6::On => json!(true),
            Ipv6::Off => json!(false),
        },
        "host_ipv4_loopback_cidr" => json!(redirect.host_ipv4_loopback_cidr.to_string()),
        _ => Value::Null,
    }
}

fn list<T: Display>(items: &[T]) -> Value {
    items.iter().map(ToString::to_string).collect()
}

fn ports(ports: &Ports) -> Value {
    match ports {
        Ports::All => json!("*"),
        Ports::List(ranges) => list(ranges),
    }
}

fn ranges(ranges: &Ranges) -> Value {
    match ranges {
        Ranges::All => json!("*"),
        Ranges::List(nets) => list(nets),
    }
}
