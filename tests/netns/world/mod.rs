//! A pod and the outside, as two network namespaces:
//!
//! ```text
//! pod  (app, sidecar)  eth0 10.88.0.2, fd88::2 ──── eth0 10.88.0.1, fd88::1  outside (resolvers, servers)
//! ```
//!
//! Every listener answers, so that a test can assert on the [`Arrival`] of a message.

use crate::example::*;
use crate::support::background::Running;
pub(crate) use crate::support::called::Called;
use crate::support::cgroup::Cgroup;
use crate::support::new_netns::in_netns;
use detour_cni::firewall::{ContainerElement, Destination, Sender, change_container_elements, container_elements};
use detour_cni::inspect::{LiveRules, Trace, trace};
use detour_cni::{policy, state};
use place::Place;
pub(crate) use place::{MACHINE_INTERFACE, Machine};
use places::Directory;
pub(crate) use places::*;
use plugin::Attachment;
pub(crate) use rules::{Family, Ruleset};
use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
pub(crate) use traffic::{Arrival, Connection, Entry};

mod place;
mod places;
mod plugin;
mod rules;
mod traffic;

/// The address families of the pod and the outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Families {
    V4,
    V6,
    Both,
}

impl Families {
    /// Returns the families.
    pub(crate) fn each(self) -> &'static [Family] {
        match self {
            Self::V4 => &[Family::V4],
            Self::V6 => &[Family::V6],
            Self::Both => &[Family::V4, Family::V6],
        }
    }
}

/// A sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl From<Process> for Sender {
    fn from(Process { uid, gid }: Process) -> Self {
        Self::Process { uid, gid: Some(gid), set: None }
    }
}

impl From<Protocol> for policy::Protocol {
    fn from(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::Tcp,
            Protocol::Udp => Self::Udp,
        }
    }
}

/// The mark of the packets that ztunnel sends.
const ZTUNNEL_MARK: u32 = 0x539;

pub(crate) const ROOT: Process = Process { uid: 0, gid: 0 };

/// The transport protocol of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

/// A pod and the outside. Dropping it removes everything, attachments first.
pub(crate) struct World {
    /// A unique name on this machine; the container ID of plugin calls.
    pub(crate) name: String,
    families: Families,
    attachments: RefCell<Vec<Attachment>>,
    pod: Place,
    outside: Place,
    directory: Directory,
}

impl World {
    pub(crate) fn new(families: Families) -> Self {
        Self::of(families, Place::new)
    }

    /// Creates a world whose pod has its own user namespace (`hostUsers: false`). UIDs of senders are those inside the
    /// pod.
    pub(crate) fn with_own_users(families: Families) -> Self {
        Self::of(families, Place::with_own_users)
    }

    /// Creates a world whose pod has ztunnel in place of a sidecar: its packets have a mark.
    pub(crate) fn with_ztunnel(families: Families) -> Self {
        let marked = |name: &str| {
            let pod = Place::new(name);
            pod.set_mark(Some(ZTUNNEL_MARK));
            pod
        };
        let world = Self::listening(families, marked, ROOT);
        world.pod.set_mark(None);
        world
    }

    fn of(families: Families, pod: impl FnOnce(&str) -> Place) -> Self {
        Self::listening(families, pod, PROXY)
    }

    fn listening(families: Families, pod: impl FnOnce(&str) -> Place, proxy: Process) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("detour-test-{}-{number}", std::process::id());
        let mut pod = pod(&format!("{name}-pod"));
        let mut outside = Place::new(&format!("{name}-out"));
        join(&pod, &outside, families);
        pod.listen("pod", proxy, &pod_endpoints(families));
        outside.listen("outside", ROOT, &outside_endpoints(families));
        pod.wait_until_ready();
        outside.wait_until_ready();
        let directory = Directory::new(&name);
        Self { name, families, attachments: RefCell::default(), pod, outside, directory }
    }

    /// Returns the families of this world.
    pub(crate) fn families(&self) -> &'static [Family] {
        self.families.each()
    }

    /// Sends from `process` in the pod to `to`, and returns where the message arrived.
    pub(crate) fn pod_sends(&self, process: Process, protocol: Protocol, to: SocketAddr) -> Arrival {
        self.pod.send(process, protocol, to)
    }

    /// Runs `work`; processes in the pod that send meanwhile are in the control group.
    pub(crate) fn within<T>(&self, cgroup: &Cgroup, work: impl FnOnce() -> T) -> T {
        let before = self.pod.set_cgroup(Some(cgroup.directory().to_owned()));
        let outcome = work();
        self.pod.set_cgroup(before);
        outcome
    }

    /// Runs `work`; packets that ztunnel sends from the pod meanwhile have its mark.
    pub(crate) fn as_ztunnel<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.pod.set_mark(Some(ZTUNNEL_MARK));
        let outcome = work();
        self.pod.set_mark(before);
        outcome
    }

    /// Starts another listener of `process` in the pod, such as `udp:127.0.0.1:53`.
    pub(crate) fn pod_serves(&self, process: Process, endpoint: &str) -> Running {
        self.pod.serve(process, endpoint)
    }

    /// Removes and adds elements of the sets of excluded containers.
    pub(crate) fn change_containers(&self, remove: &[ContainerElement], add: &[ContainerElement]) {
        self.in_netns(|| change_container_elements(remove, add)).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Returns the elements of the sets of excluded containers.
    pub(crate) fn containers(&self) -> Vec<ContainerElement> {
        let mut elements = self.in_netns(container_elements).unwrap_or_else(|error| panic!("{error}"));
        elements.sort();
        elements
    }

    fn in_netns<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        in_netns(&self.netns(), work)
    }

    /// Opens a TCP connection of `process` in the pod.
    pub(crate) fn pod_connects(&self, process: Process, to: SocketAddr) -> Connection {
        self.pod.connect(process, to)
    }

    /// Sends from outside to `to`, and returns where the message arrived.
    pub(crate) fn outside_sends(&self, protocol: Protocol, to: SocketAddr) -> Arrival {
        self.outside.send(ROOT, protocol, to)
    }

    /// Opens a TCP connection from outside.
    pub(crate) fn outside_connects(&self, to: SocketAddr) -> Connection {
        self.outside.connect(ROOT, to)
    }

    /// Returns whether `to` answers an echo request from the pod.
    pub(crate) fn pod_pings(&self, to: IpAddr) -> bool {
        traffic::is_answered(&self.netns(), to)
    }

    /// Returns whether `to` answers an echo request from outside.
    pub(crate) fn outside_pings(&self, to: IpAddr) -> bool {
        traffic::is_answered(&self.outside_netns(), to)
    }

    /// Returns the pod's tracked connections.
    pub(crate) fn conntrack(&self) -> Vec<Entry> {
        traffic::conntrack(self.pod.pid())
    }

    /// Returns the tracked UDP flows whose first packet was sent to `to`.
    pub(crate) fn datagrams_to(&self, to: SocketAddr) -> Vec<Entry> {
        let is_for = |e: &Entry| e.protocol == "udp" && (e.destination, e.destination_port) == (to.ip(), to.port());
        self.conntrack().into_iter().filter(is_for).collect()
    }

    /// Returns the pod's rules as `iptables-save` or `ip6tables-save` prints them.
    pub(crate) fn iptables_save(&self, family: Family) -> Ruleset {
        rules::save(&self.pod, family)
    }

    /// Adds rules to the pod's with `iptables-restore --noflush`.
    pub(crate) fn iptables_restore(&self, family: Family, text: &str) {
        rules::restore(&self.pod, family, text);
    }

    /// Adds rules with `iptables-legacy-restore` or `ip6tables-legacy-restore`.
    pub(crate) fn legacy_restore(&self, family: Family, text: &str) {
        rules::legacy_restore(&self.pod, family, text);
    }

    /// Runs `iptables` or `ip6tables` in the pod; returns whether it succeeded, and its output.
    pub(crate) fn iptables(&self, family: Family, arguments: &[&str]) -> (bool, String) {
        rules::run(&self.pod, family, arguments)
    }

    /// Returns the pod's native tables as `nft` prints them without counters, sorted by name.
    pub(crate) fn native_tables(&self) -> Vec<String> {
        rules::tables(&self.pod)
    }

    /// Returns the pod's native tables except the one of exclusions.
    pub(crate) fn native_redirection(&self) -> Vec<String> {
        let is_of_exclusions = |table: &String| table.starts_with("table inet detour-exclusions ");
        self.native_tables().into_iter().filter(|table| !is_of_exclusions(table)).collect()
    }

    /// Returns how many packets matched an exclusion so far.
    pub(crate) fn matched_exclusions(&self) -> u64 {
        rules::matched_exclusions(&self.pod)
    }

    /// Adds native rules to the pod's.
    pub(crate) fn nft(&self, text: &str) {
        rules::load(&self.pod, text);
    }

    /// Runs `ip` in the pod, which must succeed, and returns its output.
    pub(crate) fn ip(&self, arguments: &[&str]) -> String {
        let output = self.pod.run(Command::new("ip").args(arguments), "");
        assert!(output.status.success(), "ip {arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs these commands of `ip` in the pod.
    pub(crate) fn ips(&self, commands: &[&str]) {
        for command in commands {
            self.ip(&command.split(' ').collect::<Vec<_>>());
        }
    }

    /// Returns the pod's live rules as the reports read them.
    pub(crate) fn live_rules(&self) -> LiveRules {
        LiveRules::read(&self.netns(), &state::Store::new(state::ROOT)).expect("readable")
    }

    /// Returns the trace of a connection or datagram through the live rules.
    pub(crate) fn traced(&self, from: impl Into<Sender>, protocol: Protocol, to: SocketAddr) -> Trace {
        let rules = self.live_rules();
        let to = Destination { address: to, protocol: protocol.into() };
        trace(&rules.view(), (from.into(), None), to, &rules.addresses, "eth0")
    }

    /// Returns the path of the pod's network namespace.
    pub(crate) fn netns(&self) -> PathBuf {
        self.pod.path()
    }

    /// Returns the path of the network namespace outside the pod.
    pub(crate) fn outside_netns(&self) -> PathBuf {
        self.outside.path()
    }

    /// Writes manifests to a new directory, for `manifests_dir`.
    pub(crate) fn manifests(&self, manifests: &[&str]) -> PathBuf {
        self.directory.write(manifests)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for attachment in self.attachments.take().iter().rev() {
            attachment.delete();
        }
    }
}
