//! `istio-redirect`: redirection to the sidecar, from four layers of settings. Each layer overrides the ones after it:
//! the pod's annotations, `args.cni`, the proxy's container, the blocks of the sub-plugin chain.

use super::chain::ParsedBlock;
use super::context::Requests;
use super::context::name_of;
use super::ids::IdKind;
use super::pod_networks::PodInterfaces;
use super::settings::Settings;
use super::sub_plugin::Note;
use super::sub_plugin::{SettingSource, SubPlugin};
use super::values;
use crate::cni::{Code, Error};
use crate::pod::{Container, Pod};
use crate::policy::{DnsCapture, Groups, Interception, Ipv6, Redirect, united};
use std::collections::HashSet;

/// The layers that override the `istio-redirect` blocks.
pub(super) struct OverridingLayers<'a> {
    pub pod: &'a Pod,
    /// The pod's container istio-proxy.
    pub proxy: &'a Container,
    /// The block in `args.cni`.
    pub args: Option<Settings>,
    /// Whether the pod's annotations and the values of the proxy's container apply.
    pub pod_overrides: bool,
    /// Whether the pod is new: the mode of a running pod does not change.
    pub is_new: bool,
}

/// Returns the redirection of all `blocks` and appends the source of each setting to `origins`. The blocks are united
/// before the other layers apply, so that a key that one block does not set never conflicts with another block.
///
/// # Errors
/// A setting is invalid, or two blocks contradict each other.
pub(super) fn interception(
    blocks: &[ParsedBlock<Settings>],
    overriding: OverridingLayers<'_>,
    requests: &mut Requests<'_>,
    origins: &mut Vec<(&'static str, SettingSource)>,
    notes: &mut Vec<Note>,
) -> Result<Interception, Error> {
    let OverridingLayers { pod, proxy, pod_overrides, is_new, .. } = overriding;
    let settings: Vec<_> = blocks.iter().map(|block| (block.path.as_str(), &block.parsed)).collect();
    let united =
        united(&settings, Settings::union).map_err(|contradiction| contradiction.into_error().naming_network())?;
    let paths: Vec<&str> = blocks.iter().map(|block| block.path.as_str()).collect();
    let layers = Layers {
        blocks,
        pod,
        annotations: if pod_overrides { Settings::of_annotations(pod, requests)? } else { Settings::default() },
        args: overriding.args.unwrap_or_default(),
        container: if pod_overrides {
            requests.or_absent(Settings::of_container(pod, proxy, notes))?
        } else {
            Settings::default()
        },
        united,
    };
    layers.add_origins(origins);
    let path = paths.join(" and ");
    let mut settings = layers.settings();
    settings.inbound_interception_mode = settings.inbound_interception_mode.filter(|mode| is_new || mode.is_some());
    let mut interception = resolve(&path, settings, notes)?;
    if let (false, Interception::On(redirect)) = (pod_overrides, &interception) {
        notes.extend(foreign_proxy(&path, redirect, pod, proxy));
    }
    if let Interception::On(redirect) = &mut interception
        && !redirect.capture_secondary_networks
    {
        let mut excluded: HashSet<String> = redirect.exclude_interfaces.iter().cloned().collect();
        PodInterfaces { secondary: redirect.secondary_interfaces, default: redirect.default_interfaces } =
            PodInterfaces::of(pod);
        redirect.secondary_interfaces.retain(|name| excluded.insert(name.clone()));
        redirect.exclude_interfaces.extend_from_slice(&redirect.secondary_interfaces);
    }
    Ok(interception)
}

/// The layers of settings in descending order of precedence.
struct Layers<'a> {
    blocks: &'a [ParsedBlock<Settings>],
    pod: &'a Pod,
    annotations: Settings,
    args: Settings,
    container: Settings,
    /// The settings of all blocks.
    united: Settings,
}

impl Layers<'_> {
    /// Appends the source of each setting's value.
    fn add_origins(&self, origins: &mut Vec<(&'static str, SettingSource)>) {
        let [annotations, args, container, united] =
            [&self.annotations, &self.args, &self.container, &self.united].map(Settings::is_set);
        origins.reserve(Settings::DEFINITIONS.len());
        for (index, definition) in Settings::DEFINITIONS.iter().enumerate() {
            let key = definition.key;
            if annotations[index] {
                let annotation = definition.annotations.iter().find(|key| self.pod.annotations.contains_key(**key));
                origins.extend(annotation.map(|annotation| (key, SettingSource::Pod(annotation))));
            } else if args[index] {
                origins.push((key, SettingSource::Argument(SubPlugin::IstioRedirect)));
            } else if container[index] {
                origins.extend(definition.container.iter().map(|source| (key, SettingSource::Container(source))));
            } else if united[index] {
                let blocks = self.blocks.iter().filter(|block| block.parsed.is_set()[index]);
                let source = |path| SettingSource::Configuration(format!("{path}.{key}"));
                origins.extend(blocks.map(|block| (key, source(&block.path))));
            } else {
                origins.push((key, SettingSource::Default));
            }
        }
    }

    /// Returns the settings of all layers.
    fn settings(self) -> Settings {
        self.annotations.over(self.args).over(self.container).over(self.united)
    }
}

/// Fills unset settings with Istio's defaults.
fn resolve(path: &str, settings: Settings, notes: &mut Vec<Note>) -> Result<Interception, Error> {
    let mut redirect = Redirect { dns: dns_capture(path, &settings, notes), ..Redirect::default() };
    match settings.inbound_interception_mode {
        Some(None) => return Ok(Interception::Off),
        Some(Some(mode)) => redirect.inbound_interception_mode = mode,
        None => {}
    }
    macro_rules! set {
        ($($key:ident),+ $(,)?) => { $(if let Some(value) = settings.$key { redirect.$key = value; })+ };
    }
    set!(
        proxy_uid,
        proxy_gid,
        proxy_port,
        inbound_capture_port,
        inbound_tunnel_port,
        inbound_tproxy_mark,
        inbound_tproxy_route_table,
        inbound_ports_include,
        outbound_ports_include,
        outbound_ports_exclude,
        outbound_ip_ranges_include,
        outbound_ip_ranges_exclude,
        owner_groups_include,
        reroute_virtual_interfaces,
        exclude_interfaces,
        capture_secondary_networks,
        drop_invalid,
        host_ipv4_loopback_cidr,
    );
    // The proxy's ports for health, readiness and metrics are never captured.
    if let Some(ports) = settings.inbound_ports_exclude {
        redirect.inbound_ports_exclude = values::with_ports(ports, &redirect.inbound_ports_exclude);
    }
    // Excluded groups apply only if all groups are included. To exclude all is to include none.
    match settings.owner_groups_exclude {
        Some(Groups::List(excluded)) => redirect.owner_groups_exclude = excluded,
        Some(Groups::All) if redirect.owner_groups_include == Groups::All => {
            redirect.owner_groups_include = Groups::List(Vec::new());
        }
        Some(Groups::All) | None => {}
    }
    if let Some(on) = settings.enable_ipv6 {
        redirect.ipv6 = if on { Ipv6::On } else { Ipv6::Off };
    }
    if redirect.proxy_uid.is_empty() && redirect.proxy_gid.is_empty() {
        let msg = format!(
            "{path}: proxy_uid and proxy_gid are both empty: the rules would redirect the proxy's own traffic back to \
             it; set at least one UID or GID"
        );
        return Err(Error::new(Code::InvalidConfig, msg).naming_network());
    }
    Ok(Interception::On(Box::new(redirect)))
}

/// Returns a warning about pinned IDs with which the rules redirect the proxy's own traffic back to it. An ID that the pod
/// does not set is unknown.
fn foreign_proxy(path: &str, redirect: &Redirect, pod: &Pod, proxy: &Container) -> Option<Note> {
    let other_than = |kind: IdKind, pinned: &[u32]| {
        let id = kind.of_container(pod, proxy).ok()??;
        (!pinned.contains(&id)).then(|| format!("{} {id}", kind.key()))
    };
    let (uid, gid) = (other_than(IdKind::User, &redirect.proxy_uid)?, other_than(IdKind::Group, &redirect.proxy_gid)?);
    Some(Note::warning(format!(
        "{path}: pod_overrides is false, so {uid} and {gid} of container {} of pod {} do not count as the proxy's: its own \
         traffic returns to it; add one of them to proxy_uid or proxy_gid",
        proxy.name,
        name_of(pod)
    )))
}

fn dns_capture(path: &str, settings: &Settings, notes: &mut Vec<Note>) -> DnsCapture {
    if settings.redirect_dns != Some(true) {
        return DnsCapture::Off;
    }
    let has_servers = settings.dns_servers_v4.is_some() || settings.dns_servers_v6.is_some();
    if settings.capture_all_dns.unwrap_or(!has_servers) {
        return DnsCapture::All;
    }
    let v4 = settings.dns_servers_v4.clone().unwrap_or_default();
    let v6 = settings.dns_servers_v6.clone().unwrap_or_default();
    if v4.is_empty() && v6.is_empty() {
        let msg =
            "redirect_dns has no effect: capture_all_dns is false, and dns_servers_v4 and dns_servers_v6 are empty";
        notes.push(Note::warning(format!("{path}: {msg}")));
        return DnsCapture::Off;
    }
    DnsCapture::Servers { v4, v6 }
}

#[cfg(test)]
mod tests;
