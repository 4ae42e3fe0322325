//! One network namespace with its listener and the commands that run in it.

use super::places::ip;
use super::{Arrival, Connection, Family, Host, POD, Process, Protocol, ROOT, World};
use crate::support::background::Running;
use crate::support::cgroup::command_in;
use crate::support::new_netns::netns_with_users;
use netns_rs::NetNs;
use nix::mount::{MsFlags, mount, umount};
use std::cell::{Cell, RefCell};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;

pub(super) struct Place {
    name: String,
    /// Taken out when it is removed.
    netns: Option<NetNs>,
    listener: Option<Child>,
    /// The UID and GID outside that root in this namespace has.
    first_id: u32,
    /// The directory of the control group of processes that send.
    cgroup: RefCell<Option<PathBuf>>,
    /// The mark of the packets of processes that send or listen.
    mark: Cell<Option<u32>>,
}

/// The number of UIDs in a pod's user namespace, enough for OpenShift's UIDs.
const IDS: u32 = 2_000_000_000;
/// The first UID outside of a pod's user namespace.
const FIRST_OWN_ID: u32 = 100_000;

impl Place {
    pub(super) fn new(name: &str) -> Self {
        // The first `ip netns add` makes /run/netns a mount point, which must not happen twice.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let netns = NetNs::new(name).unwrap_or_else(|e| panic!("make network namespace {name} (are you root?): {e}"));
        let (name, netns) = (name.to_owned(), Some(netns));
        Self { name, netns, listener: None, first_id: 0, cgroup: RefCell::default(), mark: Cell::default() }
    }

    /// Creates a network namespace that belongs to its own user namespace.
    pub(super) fn with_own_users(name: &str) -> Self {
        let owned = netns_with_users(FIRST_OWN_ID, IDS);
        let mut place = Self::new(name);
        drop(place.netns.take());
        let (path, owned) = (place.path(), PathBuf::from(format!("/proc/self/fd/{}", owned.as_raw_fd())));
        umount(&path).expect("it is mounted");
        mount(Some(&owned), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted");
        place.netns = Some(NetNs::get(name).expect("it is mounted"));
        place.first_id = FIRST_OWN_ID;
        place
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of the network namespace as runtimes pass it.
    pub(super) fn path(&self) -> PathBuf {
        Path::new("/var/run/netns").join(&self.name)
    }

    /// Starts the listener; [`Self::wait_until_ready`] waits for it.
    pub(super) fn listen(&mut self, label: &str, process: Process, endpoints: &[String]) {
        let mut command = Command::new(probe());
        command.args(["serve", "--label", label]).args(self.as_user(process)).args(endpoints);
        self.listener = Some(self.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped())));
    }

    pub(super) fn wait_until_ready(&mut self) {
        let stdout = self.listener.as_mut().and_then(|l| l.stdout.as_mut()).expect("the listener has been started");
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("read from probe");
        assert_eq!(line.trim(), "ready", "{}: probe could not listen, see its stderr", self.name);
    }

    /// Returns the PID of the listener.
    pub(super) fn pid(&self) -> u32 {
        self.listener.as_ref().expect("the listener has been started").id()
    }

    pub(super) fn send(&self, process: Process, protocol: Protocol, to: SocketAddr) -> Arrival {
        let scheme = match protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        let mut command = self.probe();
        command.arg("send").args(self.as_user(process)).arg(format!("{scheme}:{to}"));
        let output = self.run(&mut command, "");
        Arrival::parse(&output.stdout).unwrap_or_else(|e| panic!("probe send {scheme}:{to}: {e}: {output:?}"))
    }

    pub(super) fn connect(&self, process: Process, to: SocketAddr) -> Connection {
        let mut command = self.probe();
        command.arg("hold").args(self.as_user(process)).arg(format!("tcp:{to}"));
        Connection::new(self.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped())))
    }

    /// Sets the control group of processes that send from now on, and returns the one before.
    pub(super) fn set_cgroup(&self, directory: Option<PathBuf>) -> Option<PathBuf> {
        self.cgroup.replace(directory)
    }

    fn probe(&self) -> Command {
        self.cgroup.borrow().as_ref().map_or_else(|| Command::new(probe()), |group| command_in(group, probe()))
    }

    /// Starts another listener, which ends when it is dropped.
    pub(super) fn serve(&self, process: Process, endpoint: &str) -> Running {
        let mut command = Command::new(probe());
        command.args(["serve", "--label", "other"]).args(self.as_user(process)).arg(endpoint);
        let mut child = self.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("read from probe");
        assert_eq!(line.trim(), "ready", "{endpoint}: probe could not listen, see its stderr");
        Running(child)
    }

    /// Runs a command in this network namespace with `stdin`, and waits for its end.
    pub(super) fn run(&self, command: &mut Command, stdin: &str) -> Output {
        let mut child = self.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()));
        child.stdin.take().expect("it is piped").write_all(stdin.as_bytes()).expect("write to stdin");
        child.wait_with_output().expect("wait for a child")
    }

    /// Sets the mark of the packets of processes that send or listen from now on, and returns the one before.
    pub(super) fn set_mark(&self, mark: Option<u32>) -> Option<u32> {
        self.mark.replace(mark)
    }

    fn as_user(&self, process: Process) -> Vec<String> {
        let outside = |id: u32| self.first_id + id;
        let ids = [format!("--uid={}", outside(process.uid)), format!("--gid={}", outside(process.gid))];
        ids.into_iter().chain(self.mark.get().map(|mark| format!("--mark={mark}"))).collect()
    }

    fn spawn(&self, command: &mut Command) -> Child {
        let netns = self.netns.as_ref().expect("it is there until it is dropped");
        let child = netns.run(|_| command.spawn()).expect("enter a network namespace");
        child.unwrap_or_else(|e| panic!("run {}: {e}", command.get_program().display()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(mut listener) = self.listener.take() {
            let killed = listener.kill().and_then(|()| listener.wait());
            if let Err(error) = killed {
                eprintln!("{}: stop probe: {error}", self.name);
            }
        }
        if let Some(Err(error)) = self.netns.take().map(NetNs::remove) {
            eprintln!("{}: remove: {error}", self.name);
        }
    }
}

/// Returns the path of the example binary that sends and answers, built by `cargo test`.
fn probe() -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_detour")).with_file_name("examples").join("probe");
    assert!(path.exists(), "{} is missing: run `cargo build --examples`", path.display());
    path
}

/// The pod's interface of the machine.
pub(crate) const MACHINE_INTERFACE: &str = "vm0";
const MACHINE: Host = Host { v4: "10.99.0.2", v6: "fd99::2" };
const IN_POD: Host = Host { v4: "10.99.0.1", v6: "fd99::1" };

/// Stopped when it is dropped.
pub(crate) struct Machine(Place);

impl World {
    /// Starts a virtual machine in the pod.
    pub(crate) fn start_machine(&self) -> Machine {
        let machine = Place::new(&format!("{}-vm", self.name));
        let (pod, outside) = (&self.pod, &self.outside);
        let interface = MACHINE_INTERFACE;
        ip(
            &[],
            &[format!(
                "link add name {interface} netns {} type veth peer name eth0 netns {}",
                pod.name(),
                machine.name()
            )],
        );
        let mut in_pod = vec![format!("link set {interface} up")];
        let (mut in_machine, mut in_outside) = (vec!["link set eth0 up".to_owned()], Vec::new());
        for &family in self.families() {
            let (length, dad) = if family == Family::V4 { (24, "") } else { (64, "nodad") };
            in_pod.push(format!("addr add {}/{length} dev {interface} {dad}", IN_POD.ip(family)));
            in_machine.push(format!("addr add {}/{length} dev eth0 {dad}", MACHINE.ip(family)));
            in_machine.push(format!("route add default via {}", IN_POD.ip(family)));
            in_outside.push(format!("route add {} via {}", MACHINE.ip(family), POD.ip(family)));
        }
        ip(&["-n", pod.name()], &in_pod);
        ip(&["-n", machine.name()], &in_machine);
        ip(&["-n", outside.name()], &in_outside);
        self.in_netns(|| {
            for file in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
                std::fs::write(format!("/proc/sys/net/{file}"), "1").expect("writable");
            }
        });
        Machine(machine)
    }
}

impl Machine {
    /// Sends from the machine to `to`, and returns where the message arrived.
    pub(crate) fn sends(&self, protocol: Protocol, to: SocketAddr) -> Arrival {
        self.0.send(ROOT, protocol, to)
    }

    /// Returns the arrival at the destination itself.
    pub(crate) fn direct(to: SocketAddr) -> Arrival {
        let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
        Arrival::direct(to, MACHINE.ip(family))
    }
}
