//! Running pods, for the node's agent: which pod sandbox with saved state is a pod's, its live state, whether its network
//! namespace is gone, and which connections bypass the sidecar. Submodules repeat an ADD, and exclude containers. No CNI
//! call uses this module, and it does not use the cluster.

pub mod containers;
mod repeated_add;

pub use repeated_add::{Repeated, RepeatedAdd};

use crate::cni::{Code, DEFAULT_INTERFACE, Error};
use crate::firewall::nfnetlink::{Connection, NfSocket};
use crate::firewall::{AmbientRedirection, Arrival, Destination, LiveRuleset, Packet, RulesetView, Sender};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::{LockMode, NetnsId, OpenConnection, listens, open_connections};
use crate::plugin::check::differences;
use crate::plugin::del::remove;
use crate::plugin::inputs::AddInputs;
use crate::plugin::netns_state::{self, NetnsState};
use crate::plugin::record::{RecordPart, SandboxRecord, SandboxRecords, unless_damaged};
use crate::pod::{Pod, PodRef};
use crate::policy::{DnsCapture, InterceptionMode, Protocol, Redirect};
use crate::state::{Attachment, ROOT, Store};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The ports on which ztunnel listens in each pod: outbound, inbound, HBONE (istio/ztunnel, `ARCHITECTURE.md`).
const ZTUNNEL_PORTS: [u16; 3] = [15001, 15006, 15008];
/// Files change within the resolution of the file system's clock: what may have changed since it was read is read again.
const CLOCK_RESOLUTION: Duration = Duration::from_secs(1);

/// The maximum number of connections that are compared with the exclusions, and so counted.
const MAX_CONNECTIONS: usize = 1000;
/// The maximum number of DNS flows whose conntrack entries are deleted.
const MAX_DNS_FLOWS: usize = 5000;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DNS_PORT: u16 = 53;

/// A pod sandbox with saved state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Its ID: `CNI_CONTAINERID`.
    pub container_id: String,
    pod: PodRef,
    /// The path of its network namespace in the runtime, and its identity.
    netns: Option<(PathBuf, NetnsId)>,
    added_since_boot: u64,
}

/// The pod sandboxes of the node by ID, each with the modification time of its directory, if every later change has another.
#[derive(Debug, Default)]
pub struct Sandboxes(BTreeMap<String, (Option<SystemTime>, Option<Sandbox>)>);

/// Returns the pods whose saved policy has a guard, as NAMESPACE/NAME. A pod sandbox that can't be read is skipped.
#[must_use]
pub fn guarded_pods(store: &Store) -> BTreeSet<String> {
    let guarded = |id: String| {
        let records = SandboxRecords::read_all(store, &id, None).ok()?;
        let (_, record) = records.attachments.iter().find(|(_, record)| record.policy.guard.is_some())?;
        let pod = AddInputs::read(record.inputs.as_ref()?)?.pod;
        Some(format!("{}/{}", pod.namespace, pod.name))
    };
    store.sandboxes().unwrap_or_default().into_iter().filter_map(guarded).collect()
}

impl Sandboxes {
    /// Reads what has changed in the saved state, one sandbox at a time. A damaged record is logged, and its sandbox is
    /// skipped.
    ///
    /// # Errors
    /// The saved state can't be read.
    pub fn refresh(&mut self) -> Result<(), Error> {
        let store = Store::new(ROOT);
        let ids = store.sandboxes()?;
        self.0.retain(|id, _| ids.contains(id));
        for id in ids {
            let modified = fs::metadata(Path::new(ROOT).join(&id)).and_then(|it| it.modified()).ok();
            if modified.is_some() && self.0.get(&id).is_some_and(|(known, _)| *known == modified) {
                continue;
            }
            let sandbox = unless_damaged(Sandbox::read(&store, &id))?;
            let is_settled = |at: &SystemTime| at.elapsed().is_ok_and(|age| age > CLOCK_RESOLUTION);
            self.0.insert(id, (modified.filter(is_settled), sandbox));
        }
        Ok(())
    }

    /// Returns the sandbox of a pod on the node at `root`; `None` without saved state. While a previous sandbox is removed,
    /// there are two, and the newer one is the pod's.
    #[must_use]
    pub fn of(&self, pod: &Pod, root: &HostRoot) -> Option<&Sandbox> {
        let is_named = |sandbox: &&Sandbox| {
            let named = &sandbox.pod;
            (&named.namespace, &named.name) == (&pod.namespace, &pod.name) && pod.matches(named)
        };
        let of_pod = self.0.values().filter_map(|(_, sandbox)| sandbox.as_ref()).filter(is_named);
        of_pod.filter(|sandbox| sandbox.is_present(root)).max_by_key(|sandbox| sandbox.added_since_boot)
    }
}

impl Sandbox {
    /// Reads a pod sandbox; `None` if no record names its pod.
    fn read(store: &Store, container_id: &str) -> Result<Option<Self>, Error> {
        let (shared, _, pod) = RecordPart::read_all(store, container_id)?;
        Ok(pod.map(|pod| Self {
            container_id: container_id.to_owned(),
            pod,
            added_since_boot: shared.added_since_boot,
            netns: shared.location(),
        }))
    }

    /// Returns whether its network namespace may exist. One that is unknown or not visible in this mount namespace may.
    fn is_present(&self, root: &HostRoot) -> bool {
        self.netns.as_ref().is_none_or(|(path, id)| !is_gone(root, path, *id))
    }
}

/// The live state of a container in its network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    /// The attachments with saved state; empty without an ADD.
    pub attachments: Vec<Attachment>,
    /// Whether its traffic is redirected to a sidecar, by rules of its attachments or of another tool.
    pub redirected: bool,
    /// The drift of the kernel from the desired state of the attachments, one line per difference.
    pub drift: Vec<String>,
}

impl ContainerStatus {
    /// Returns whether the container has neither attachments nor a redirection.
    #[must_use]
    pub const fn is_bare(&self) -> bool {
        self.attachments.is_empty() && !self.redirected
    }

    /// Returns whether the container is redirected by its own attachments, without drift.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.redirected && self.drift.is_empty() && !self.attachments.is_empty()
    }
}

/// Reads the live state of a container. Waits up to `timeout` for another call in its network namespace.
///
/// # Errors
/// [`Code::TryAgain`]: timeout. The network namespace is gone, can't be read, or is this process's own; the saved
/// state is unreadable.
pub fn container_status(container_id: &str, netns: &Path, timeout: Duration) -> Result<ContainerStatus, Error> {
    let (store, netns) = (Store::new(ROOT), netns_state::open_at(netns)?);
    netns.enter(timeout, || {
        let state = NetnsState::read(&store, container_id, &netns)?;
        let live = LiveRuleset::now()?;
        let is_recorded = !state.attachments.is_empty();
        let drift = if is_recorded { differences(&state, &live)? } else { Vec::new() };
        Ok(ContainerStatus {
            // Native tables with these names belong to detour, even without saved state.
            redirected: live.foreign_redirection(&state.records.known_rules()).is_some()
                || (state.policy.redirect().is_some() && drift.is_empty())
                || (!is_recorded && live.redirects_natively()),
            attachments: state.attachments,
            drift,
        })
    })
}

/// Removes the saved state of attachments whose network namespace is gone: runtimes make no DEL for attachments that
/// they did not add themselves, and Multus repeats no DEL that it missed. `root` is the mount point of the node's file
/// system. Returns the removed attachments.
///
/// # Errors
/// The saved state can't be read or removed.
pub fn forget_gone(root: &Path) -> Result<Vec<Attachment>, Error> {
    let store = Store::new(ROOT);
    let mut removed = Vec::new();
    for attachment in store.attachments()? {
        // A damaged record must not block the others.
        let Some((path, id)) = SandboxRecord::location_of(&store, &attachment)? else { continue };
        if is_gone(&HostRoot::new(root), &path, id) {
            remove(&store, &attachment, None)?;
            removed.push(attachment);
        }
    }
    Ok(removed)
}

/// Returns what the pod in the network namespace at `netns` lacks, in words; `None` if its traffic reaches ztunnel.
///
/// # Errors
/// [`Code::TryAgain`]: another call locks the network namespace longer than `timeout`. The
/// network namespace is gone, or its rules or listeners can't be read.
pub fn lacks_of_ambient(netns: &Path, timeout: Duration) -> Result<Option<String>, Error> {
    netns_state::open_at(netns)?.enter(timeout, || {
        let mut lacking = Vec::new();
        if AmbientRedirection::of(&LiveRuleset::now()?).is_none() {
            lacking.push("istio-cni's redirection".to_owned());
        }
        for port in ZTUNNEL_PORTS {
            if !listens(port)? {
                lacking.push(format!("ztunnel's listener on port {port}"));
            }
        }
        Ok((!lacking.is_empty()).then(|| lacking.join(", ")))
    })
}

/// Returns whether the network namespace `id` certainly no longer exists at the runtime's path, on the node at `root`. A
/// path that exists but is no namespace proves nothing: without mount propagation, every namespace below `root` looks like
/// that.
fn is_gone(root: &HostRoot, path: &Path, id: NetnsId) -> bool {
    let exists = |path: &HostPath| root.reach(path).and_then(|path| path.try_exists()).ok();
    let is_missing = |path: HostPath| exists(&path.parent()) == Some(true) && exists(&path) == Some(false);
    if netns_state::open_recorded(root, path, id).is_ok_and(|netns| netns.is_some()) {
        return false;
    }
    match netns_state::open_on_node(root, path) {
        Ok(Some(netns)) => netns.id() != id,
        Ok(None) => path.starts_with(root.mount()) || HostPath::new(path).is_some_and(is_missing),
        Err(_) => false,
    }
}

// NAT decides at the first packet of a connection, so a connection that the kernel tracked without the rules keeps bypassing
// the sidecar until it closes. Deleting its conntrack entry would not help: the kernel treats the next packet as a new
// connection and redirects it (`nf_conntrack_tcp_loose`), the proxy does not know the connection, and both ends get a reset
// (observed with 6.18). It does help for DNS queries over UDP.
/// Counts the container's established TCP connections that are older than the rules and bypass the sidecar although its
/// policy redirects them. If DNS is captured, also deletes the conntrack entries of DNS queries over UDP that bypass it.
/// Connections that are excluded by GID, by interface or by container are counted too: the kernel does not list these
/// properties.
///
/// # Errors
/// [`Code::TryAgain`]: another call locks the network namespace longer than `timeout`. The network namespace is gone,
/// or its connections can't be listed or are too many.
pub fn bypassing(container_id: &str, netns: &Path, timeout: Duration) -> Result<usize, Error> {
    let (store, netns) = (Store::new(ROOT), netns_state::open_at(netns)?);
    netns.enter_to(LockMode::Change, timeout, || {
        let NetnsState { policy, rules, rule_format, .. } = NetnsState::read(&store, container_id, &netns)?;
        let Some(redirect) = policy.redirect() else { return Ok(0) };
        let open: HashMap<_, _> =
            open_connections()?.into_iter().map(|open| ((open.local, open.remote), open)).collect();
        let find = |c: &Connection| {
            let outbound = open.get(&(c.source, c.destination)).map(|open| (open, true));
            let found = outbound.or_else(|| open.get(&(c.destination, c.source)).map(|open| (open, false)));
            found.filter(|(open, _)| may_be_redirected(redirect, open))
        };
        let is_dns =
            |c: &Connection| c.protocol == UDP && c.destination.port() == DNS_PORT && redirect.dns != DnsCapture::Off;
        let is_tcp = |c: &Connection| c.protocol == TCP && find(c).is_some();
        let failed = |error| {
            let msg = format!("can't read connection tracking: {}: {error}", netns.path().display());
            Error::new(Code::KernelRefused, msg)
        };
        let mut socket = NfSocket::open().map_err(failed)?;
        let is_tracked_without_rules = |c: &Connection| c.replies_from == c.destination && (is_dns(c) || is_tcp(c));
        let tracked = socket.connections(is_tracked_without_rules).map_err(failed)?;
        for query in tracked.iter().filter(|c| is_dns(c)).take(MAX_DNS_FLOWS) {
            socket.forget(query).map_err(failed)?;
        }
        let view = RulesetView::desired(&rules, rule_format);
        let found = tracked.iter().filter(|c| is_tcp(c)).take(MAX_CONNECTIONS).filter_map(find);
        Ok(found.filter(|(open, outbound)| is_redirected(&view, redirect, open, *outbound)).count())
    })
}

/// Returns whether a redirection may apply to the connection: it is not the proxy's own, and not within the pod.
fn may_be_redirected(redirect: &Redirect, open: &OpenConnection) -> bool {
    let OpenConnection { local, remote, uid } = open;
    !redirect.proxy_uid.contains(uid) && !remote.ip().is_loopback() && local.ip() != remote.ip()
}

/// Returns whether the rules redirect such a connection at its first packet.
fn is_redirected(view: &RulesetView, redirect: &Redirect, open: &OpenConnection, outbound: bool) -> bool {
    let OpenConnection { local, remote, uid } = *open;
    // TPROXY uses no NAT: its connections look the same as bypassing ones.
    let is_nat = outbound || redirect.inbound_interception_mode == InterceptionMode::Redirect;
    if !is_nat || !may_be_redirected(redirect, open) {
        return false;
    }
    let (sender, address) = match outbound {
        true => (Sender::Process { uid, gid: None, set: None }, remote),
        false => (Sender::Inbound(Some(remote.ip())), local),
    };
    let to = Destination { address, protocol: Protocol::Tcp };
    let packet = Packet::first(sender, to, &[], DEFAULT_INTERFACE);
    matches!(view.evaluate(packet).arrival, Arrival::Sidecar(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::RuleFormat;
    use crate::netns::NetNs;
    use crate::policy::{Exclusion, IdRange, Interception, Policy, PortRange, Ports, Ranges, TrafficOwner};
    use std::net::SocketAddr;

    /// Also if the node's file system is not mounted elsewhere.
    #[test]
    fn a_network_namespace_that_is_gone_is_not_present() {
        let (own, root) = (Path::new("/proc/thread-self/ns/net"), HostRoot::new("/"));
        let id = NetNs::open(own).expect("readable").expect("there").id();
        let is_present = |path: &str, id| {
            let netns = Some((path.into(), id));
            Sandbox { container_id: "c".into(), pod: PodRef::default(), netns, added_since_boot: 0 }.is_present(&root)
        };
        assert!(is_present("/proc/thread-self/ns/net", id));
        assert!(!is_present("/run/netns/detour-gone", id));
        // The mount point remains as a file, or another network namespace has the path.
        assert!(!is_present("/proc/thread-self/status", id));
        assert!(!is_present("/proc/thread-self/ns/net", NetnsId { inode: id.inode + 1, ..id }));
    }

    fn policy(change: impl FnOnce(&mut Redirect)) -> Policy {
        let mut redirect = Redirect::default();
        change(&mut redirect);
        let excluded = Exclusion {
            owner: TrafficOwner::Uid(IdRange { first: 10, last: 20 }),
            destination: None,
            protocol: None,
            ports: Vec::new(),
        };
        Policy {
            interception: Interception::On(Box::new(redirect)),
            exclusions: [excluded].into(),
            ..Policy::default()
        }
    }

    fn end(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn excluded_connections_are_not_counted() {
        let plain = || policy(|_| {});
        let narrow = || {
            policy(|r| {
                r.outbound_ip_ranges_include = Ranges::List(vec!["192.0.2.0/24".parse().expect("a range")]);
                r.outbound_ip_ranges_exclude = Ranges::List(vec!["192.0.2.128/25".parse().expect("a range")]);
                r.inbound_ports_include = Ports::List(vec![PortRange::one(80)]);
            })
        };
        let pod = "10.0.0.2:8080";
        let rows = [
            (plain(), pod, "192.0.2.9:443", 0, true, true),
            (plain(), "[fd00::2]:9", "[2001:db8::1]:443", 0, true, true),
            (plain(), pod, "192.0.2.9:443", 1337, true, false),
            (plain(), pod, "192.0.2.9:443", 15, true, false),
            (plain(), pod, "192.0.2.9:15020", 0, true, false),
            (plain(), pod, "127.0.0.1:443", 0, true, false),
            (plain(), pod, "10.0.0.2:443", 0, true, false),
            (plain(), pod, "192.0.2.9:4000", 15, false, true),
            (plain(), "10.0.0.2:15021", "192.0.2.9:4000", 0, false, false),
            (plain(), "10.0.0.2:15008", "192.0.2.9:4000", 0, false, false),
            (
                policy(|r| r.inbound_interception_mode = InterceptionMode::Tproxy),
                pod,
                "192.0.2.9:4000",
                0,
                false,
                false,
            ),
            (narrow(), pod, "192.0.2.9:443", 0, true, true),
            (narrow(), pod, "192.0.2.200:443", 0, true, false),
            (narrow(), pod, "198.51.100.1:443", 0, true, false),
            (narrow(), pod, "192.0.2.9:4000", 0, false, false),
            (narrow(), "10.0.0.2:80", "192.0.2.9:4000", 0, false, true),
            (Policy::default(), pod, "192.0.2.9:443", 0, true, false),
        ];
        for (policy, local, remote, uid, outbound, expected) in rows {
            let open = OpenConnection { local: end(local), remote: end(remote), uid };
            let redirect = policy.redirect().cloned().unwrap_or_default();
            for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
                let view = RulesetView::of_policy(&policy, format);
                assert_eq!(is_redirected(&view, &redirect, &open, outbound), expected, "{open:?} {outbound}");
            }
        }
    }
}
