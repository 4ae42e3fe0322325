//! A virtual machine in the pod, as KubeVirt runs it: what it sends is forwarded by the pod.

use super::links::ip;
use super::place::Place;
use super::{Arrival, Family, Host, POD, Protocol, ROOT, World};
use std::net::SocketAddr;

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
