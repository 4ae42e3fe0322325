//! The network namespace of a pod: opened (it must never be the one that the plugin runs in); its desired state (rules, and
//! the routes, policy rules and addresses that they need); and what the redirection constrains that it already has:
//! detour's, in its rule format, or another tool's.

use super::record::{SandboxRecord, SandboxRecords, fixtures, writes_ip6};
use crate::cni::{Code, Error, LIST_ITEMS, Request, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{ForeignRedirection, LiveRuleset, RuleFormat, Ruleset, legacy_tables};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::{self, Fixtures, NetNs, NetnsId, Routing};
use crate::policy::{Interception, Policy, Redirect};
use crate::state::{Attachment, Store};
use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// The desired state of a network namespace, from the saved state of its attachments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetnsState {
    /// The attachments in this network namespace.
    pub attachments: Vec<Attachment>,
    /// The union of their policies.
    pub policy: Policy,
    /// The desired rules.
    pub rules: Ruleset,
    /// The format of the redirection; the default without one.
    pub rule_format: RuleFormat,
    /// The routes, policy rules and addresses that the rules need.
    pub fixtures: Fixtures,
    /// The saved state.
    pub(super) records: SandboxRecords,
}

impl NetnsState {
    /// Finds the pod sandbox of `netns` and reads its attachments; `None` if there are none.
    ///
    /// # Errors
    /// The saved state can't be read, or the attachments contradict each other.
    pub fn find(store: &Store, netns: &NetNs) -> Result<Option<Self>, Error> {
        let owner = SandboxRecord::owner(store, netns)?;
        Ok(owner.map(|container_id| Self::of_sandbox(store, &container_id, netns)).transpose()?.flatten())
    }

    /// Reads the attachments of one pod sandbox in `netns`; `None` if there are none.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn of_sandbox(store: &Store, container_id: &str, netns: &NetNs) -> Result<Option<Self>, Error> {
        let mut records = SandboxRecords::read(store, container_id, netns, None)?;
        records.attachments.retain(|(_, record)| record.netns_id == Some(netns.id()));
        (!records.attachments.is_empty()).then(|| Self::new(records)).transpose()
    }

    /// Reads all attachments of a pod sandbox, also those that never had rules.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub(super) fn read(store: &Store, container_id: &str, netns: &NetNs) -> Result<Self, Error> {
        Self::new(SandboxRecords::read(store, container_id, netns, None)?)
    }

    fn new(records: SandboxRecords) -> Result<Self, Error> {
        let policy = records.policy()?;
        let (rules, fixtures) = (ruleset(&policy, records.ip6()), fixtures(&policy, records.ip6()));
        let rule_format = records.rule_format(None).unwrap_or_default();
        let attachments = records.attachments.iter().map(|(attachment, _)| attachment.clone()).collect();
        Ok(Self { attachments, policy, rules, rule_format, fixtures, records })
    }
}

/// The format that a configuration wants for a redirection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FormatPreference {
    /// The one that it sets; `None` for `auto`.
    pub(super) requested: Option<RuleFormat>,
    /// The one that `auto` tries first; `None` for the default, also if executables exclude traffic, because they insert
    /// rules into the tables of iptables.
    pub(super) auto: Option<RuleFormat>,
}

/// Chooses the format of a redirection. A pod never has redirections of detour in both formats, so the one `in_use` (in the
/// kernel, or by other attachments) takes precedence over preferences; `saved` is the one of this attachment.
///
/// # Errors
/// The setting conflicts with the existing redirection.
pub(super) fn choose_format(
    preference: FormatPreference,
    in_use: Option<RuleFormat>,
    saved: Option<RuleFormat>,
) -> Result<RuleFormat, Error> {
    match (preference.requested, in_use) {
        (Some(requested), Some(used)) if requested != used => {
            let (used, requested) = (used.name(), requested.name());
            let msg = format!(
                "rule_format: expected auto or {used}, got {requested}: the pod is already redirected in {used} format; set \
                 auto, or delete the pod"
            );
            Err(Error::new(Code::InvalidConfig, msg))
        }
        (_, Some(used)) => Ok(used),
        (Some(requested), None) => Ok(requested),
        (None, None) => Ok(saved.or(preference.auto).unwrap_or_default()),
    }
}

/// Returns the policy without its redirection: another tool's remains, and only exclusions are added.
pub(super) fn beside(foreign: ForeignRedirection, mut policy: Policy) -> Policy {
    if policy.redirect().is_some() {
        tracing::warn!("another tool already redirects the pod: the plugin adds only exclusions");
        policy.interception = Interception::Unset;
    }
    policy.dns_captured_elsewhere = Some(foreign.captures_dns);
    policy
}

/// Excludes the interfaces of secondary networks that exist already, if the policy does not capture such networks. An
/// interface with a route to public addresses, or the default one according to the pod's annotations, is no secondary one:
/// the pod's traffic leaves over it. Only a setting that names it excludes it.
pub(super) fn exclude_secondary_networks(policy: &mut Policy) -> Result<(), Error> {
    let Interception::On(redirect) = &mut policy.interception else { return Ok(()) };
    if redirect.capture_secondary_networks {
        return Ok(());
    }
    let (secondary, mut default) = (netns::secondary_interfaces()?, netns::public_route_interfaces()?);
    default.extend(redirect.default_interfaces.iter().cloned());
    at_most(LIST_ITEMS, "interfaces", "the pod's network namespace", secondary.len())?;
    let known: HashSet<String> = redirect.exclude_interfaces.iter().cloned().collect();
    for name in secondary.into_iter().filter(|name| !known.contains(name)) {
        redirect.secondary_interfaces.push(name.clone());
        redirect.exclude_interfaces.push(name);
    }
    let found: HashSet<&String> = redirect.secondary_interfaces.iter().collect();
    redirect.exclude_interfaces.retain(|name| !default.contains(name) || !found.contains(name));
    Ok(())
}

/// Warns about tables of iptables-legacy in a pod that detour redirects. Call it in the network namespace.
pub(super) fn warn_of_legacy() {
    let tables = legacy_tables();
    if !tables.is_empty() {
        let all: Vec<String> = tables.iter().map(|(family, table)| format!("{} {table}", family.name())).collect();
        let all = all.join(", ");
        tracing::warn!("the pod also has tables of iptables-legacy ({all}): their rules apply in addition to detour's");
    }
}

/// Returns the rules for `policy` in a pod with or without IPv6. The rules for IPv4 are written in every pod, as
/// Istio does.
pub(super) fn ruleset(policy: &Policy, ip6: bool) -> Ruleset {
    Ruleset::of(policy, if writes_ip6(policy, ip6) { &Family::ALL } else { &[Family::Ip] })
}

/// Returns the fixtures of detour's native tables without saved state: the routing of the mark that these rules set.
/// If no policy rule has this mark, the default routing table is assumed.
///
/// # Errors
/// The kernel's policy rules can't be read.
pub(super) fn unrecorded_fixtures(live: &LiveRuleset) -> Result<Fixtures, Error> {
    let mut routing = BTreeSet::new();
    if let Some(mark) = live.native_tproxy_mark() {
        routing = Routing::of_mark(mark)?;
        if routing.is_empty() {
            routing.insert(Routing { mark, table: Redirect::default().inbound_tproxy_route_table, ip6: true });
        }
    }
    Ok(Fixtures { proxy_loopback: live.redirects_natively(), routing })
}

/// Opens the network namespace of a call.
///
/// # Errors
/// [`Code::InvalidNetns`]: `CNI_NETNS` is not the path of a network namespace.
pub(super) fn open_of_request(request: &Request) -> Result<NetNs, Error> {
    existing("CNI_NETNS ", request.netns.as_deref().unwrap_or_else(|| Path::new("")))
}

fn existing(variable: &str, path: &Path) -> Result<NetNs, Error> {
    let missing = || format!("{variable}{}: no network namespace at this path", path.display());
    NetNs::open(path)?.ok_or_else(|| Error::new(Code::InvalidNetns, missing()))
}

/// Opens the network namespace `id` whose path in the runtime is `path`, on the node at `root`. If nothing is mounted
/// below `root`, the path may be visible in this mount namespace. Returns `None` if the network namespace is gone, not
/// visible here, or replaced by another one.
///
/// # Errors
/// As [`open_on_node`].
pub(super) fn open_recorded(root: &HostRoot, path: &Path, id: NetnsId) -> Result<Option<NetNs>, Error> {
    // The identity proves that the path leads to the same network namespace.
    let is_same = |netns: &NetNs| netns.id() == id;
    let found = open_on_node(root, path)?.filter(is_same);
    Ok(found.or_else(|| NetNs::open(path).ok().flatten().filter(is_same)))
}

/// Opens the network namespace at a path.
///
/// # Errors
/// [`Code::InvalidNetns`]: the path is not that of a network namespace, or it is this process's own.
pub(super) fn open_at(path: &Path) -> Result<NetNs, Error> {
    refuse_own(path)?;
    existing("", path)
}

/// Opens the network namespace at the runtime's path on the node at `root`; the path may already be below `root`.
/// Returns `None` if it does not exist, or is not visible here.
///
/// # Errors
/// [`Code::InvalidNetns`]: the file can't be opened or examined.
pub(super) fn open_on_node(root: &HostRoot, path: &Path) -> Result<Option<NetNs>, Error> {
    if path.starts_with(root.mount()) {
        return NetNs::open(path);
    }
    let Some(path) = HostPath::new(path) else { return Ok(None) };
    let reached = root.reach(&path).map_err(|error| {
        Error::new(Code::InvalidNetns, format!("network namespace {path}: can't be opened: {error}"))
    })?;
    NetNs::open(&reached)
}

/// Refuses the path of the network namespace that this process runs in, usually the host's, before anything is done there.
/// The reference library (`pkg/skel`) checks it only afterwards.
///
/// # Errors
/// [`Code::InvalidNetns`]: it is that path, or the file can't be examined.
pub(super) fn refuse_own(path: &Path) -> Result<(), Error> {
    let own = identity(Path::new("/proc/self/ns/net"))?;
    if own.is_some() && own == identity(path)? {
        // The wording of the reference library.
        let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
        return Err(Error::new(Code::InvalidNetns, msg));
    }
    Ok(())
}

/// Returns the file identity, which identifies a namespace (namespaces(7)), without opening it; `None` if no file has this
/// path.
///
/// # Errors
/// [`Code::InvalidNetns`]: the file can't be examined.
pub(super) fn identity(path: &Path) -> Result<Option<NetnsId>, Error> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(NetnsId::of(&metadata))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => {
            let msg = format!("network namespace {}: can't be examined: {error}", path.display());
            Err(Error::new(Code::InvalidNetns, msg))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const IPTABLES: Option<RuleFormat> = Some(RuleFormat::Iptables);
    const NFTABLES: Option<RuleFormat> = Some(RuleFormat::Nftables);

    #[test]
    fn an_existing_redirection_takes_precedence_over_preferences() {
        for (requested, in_use, saved, expected) in [
            (None, None, None, IPTABLES),
            (IPTABLES, None, None, IPTABLES),
            (NFTABLES, None, None, NFTABLES),
            (None, NFTABLES, None, NFTABLES),
            (None, None, NFTABLES, NFTABLES),
            (IPTABLES, None, NFTABLES, IPTABLES),
            (IPTABLES, NFTABLES, None, None),
            (NFTABLES, IPTABLES, None, None),
        ] {
            let preference = FormatPreference { requested, auto: None };
            assert_eq!(choose_format(preference, in_use, saved).ok(), expected, "{requested:?} {in_use:?} {saved:?}");
        }
    }

    #[test]
    fn the_nodes_format_is_only_for_new_pods_without_a_setting() {
        for (requested, in_use, saved, expected) in [
            (None, None, None, NFTABLES),
            (IPTABLES, None, None, IPTABLES),
            (None, IPTABLES, None, IPTABLES),
            (None, None, IPTABLES, IPTABLES),
        ] {
            let preference = FormatPreference { requested, auto: NFTABLES };
            assert_eq!(choose_format(preference, in_use, saved).ok(), expected, "{requested:?} {in_use:?} {saved:?}");
        }
    }

    #[test]
    fn a_format_conflict_names_both_formats_and_the_next_step() {
        let preference = FormatPreference { requested: IPTABLES, auto: None };
        let error = choose_format(preference, NFTABLES, None).expect_err("not both");
        assert_eq!(error.code, Code::InvalidConfig);
        for word in ["nftables", "iptables", "delete the pod"] {
            assert!(error.msg.contains(word), "{error}");
        }
    }
}
