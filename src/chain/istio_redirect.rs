//! `istio-redirect`: the redirection to the sidecar, as its layers of settings have it.

use super::settings::Settings;
use super::{Note, istio_annotations, ports, proxy_container};
use crate::cni::{Code, Error};
use crate::pod::{Container, Pod};
use crate::policy::{DnsCapture, Groups, Interception, Ipv6, Redirect};

/// Ports of the proxy's own that are never captured: health, readiness and metrics.
const NEVER_INBOUND: [u16; 3] = [15020, 15021, 15090];

/// The layers above an `istio-redirect` block.
pub(super) struct Above<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its container istio-proxy.
    pub proxy: &'a Container,
    /// The block in `args.cni`.
    pub args: Option<Settings>,
    /// Whether the pod's annotations count.
    pub annotations: bool,
}

/// The redirection that `block`, which stands at `path`, asks for.
pub(super) fn interception(
    path: &str,
    block: &Settings,
    above: Above<'_>,
    notes: &mut Vec<Note>,
) -> Result<Interception, Error> {
    let annotated = if above.annotations { istio_annotations::settings(above.pod)? } else { Settings::default() };
    let settings = annotated
        .over(above.args.unwrap_or_default())
        .over(proxy_container::settings(above.pod, above.proxy, notes)?)
        .over(block.clone());
    resolve(path, settings, notes)
}

/// Settings with Istio's defaults for what they leave open.
fn resolve(path: &str, settings: Settings, notes: &mut Vec<Note>) -> Result<Interception, Error> {
    let default = Redirect::default();
    let Some(mode) = settings.inbound_interception_mode.unwrap_or(Some(default.inbound_interception_mode)) else {
        return Ok(Interception::Off);
    };
    let dns = dns(path, &settings, notes);
    let (owner_groups_include, owner_groups_exclude) = owner_groups(
        settings.owner_groups_include.unwrap_or(default.owner_groups_include),
        settings.owner_groups_exclude.unwrap_or(Groups::List(default.owner_groups_exclude)),
    );
    let redirect = Redirect {
        inbound_interception_mode: mode,
        proxy_uid: settings.proxy_uid.unwrap_or(default.proxy_uid),
        proxy_gid: settings.proxy_gid.unwrap_or(default.proxy_gid),
        proxy_port: settings.proxy_port.unwrap_or(default.proxy_port),
        inbound_capture_port: settings.inbound_capture_port.unwrap_or(default.inbound_capture_port),
        inbound_tunnel_port: settings.inbound_tunnel_port.unwrap_or(default.inbound_tunnel_port),
        inbound_tproxy_mark: settings.inbound_tproxy_mark.unwrap_or(default.inbound_tproxy_mark),
        inbound_tproxy_route_table: settings.inbound_tproxy_route_table.unwrap_or(default.inbound_tproxy_route_table),
        inbound_ports_include: settings.inbound_ports_include.unwrap_or(default.inbound_ports_include),
        inbound_ports_exclude: settings
            .inbound_ports_exclude
            .map_or(default.inbound_ports_exclude, |given| ports::with(given, &NEVER_INBOUND)),
        outbound_ports_include: settings.outbound_ports_include.unwrap_or(default.outbound_ports_include),
        outbound_ports_exclude: settings.outbound_ports_exclude.unwrap_or(default.outbound_ports_exclude),
        outbound_ip_ranges_include: settings.outbound_ip_ranges_include.unwrap_or(default.outbound_ip_ranges_include),
        outbound_ip_ranges_exclude: settings.outbound_ip_ranges_exclude.unwrap_or(default.outbound_ip_ranges_exclude),
        owner_groups_include,
        owner_groups_exclude,
        reroute_virtual_interfaces: settings.reroute_virtual_interfaces.unwrap_or(default.reroute_virtual_interfaces),
        exclude_interfaces: settings.exclude_interfaces.unwrap_or(default.exclude_interfaces),
        dns,
        drop_invalid: settings.drop_invalid.unwrap_or(default.drop_invalid),
        ipv6: settings.enable_ipv6.map_or(default.ipv6, |on| if on { Ipv6::On } else { Ipv6::Off }),
        host_ipv4_loopback_cidr: settings.host_ipv4_loopback_cidr.unwrap_or(default.host_ipv4_loopback_cidr),
    };
    if redirect.proxy_uid.is_empty() && redirect.proxy_gid.is_empty() {
        let msg = format!(
            "{path}: proxy_uid and proxy_gid are both empty, so that what the proxy sends would come back to it; \
             name at least one UID or GID"
        );
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    Ok(Interception::On(Box::new(redirect)))
}

fn dns(path: &str, settings: &Settings, notes: &mut Vec<Note>) -> DnsCapture {
    if settings.redirect_dns != Some(true) {
        return DnsCapture::Off;
    }
    let servers_named = settings.dns_servers_v4.is_some() || settings.dns_servers_v6.is_some();
    if settings.capture_all_dns.unwrap_or(!servers_named) {
        return DnsCapture::All;
    }
    let v4 = settings.dns_servers_v4.clone().unwrap_or_default();
    let v6 = settings.dns_servers_v6.clone().unwrap_or_default();
    if v4.is_empty() && v6.is_empty() {
        let msg = "redirect_dns captures nothing: neither capture_all_dns nor dns_servers_v4 nor dns_servers_v6 is set";
        notes.push(Note::warning(format!("{path}: {msg}")));
        return DnsCapture::Off;
    }
    DnsCapture::Servers { v4, v6 }
}

/// Exclusions count where all groups are included; all excluded is none included.
fn owner_groups(include: Groups, exclude: Groups) -> (Groups, Vec<u32>) {
    match (include, exclude) {
        (Groups::All, Groups::All) => (Groups::List(Vec::new()), Vec::new()),
        (include @ Groups::List(_), Groups::All) => (include, Vec::new()),
        (include, Groups::List(exclude)) => (include, exclude),
    }
}
