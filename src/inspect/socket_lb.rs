//! Socket load balancing: eBPF programs at the root control group that replace a Service's address when a process connects
//! or sends, before netfilter sees a packet. Their products pin the links of the programs in the BPF file system.

use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file::names_in;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

/// The mount point of the BPF file system.
const BPF: &str = "/sys/fs/bpf";

/// A product with socket load balancing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Product {
    /// Cilium (`pkg/socketlb`).
    Cilium,
    /// Calico's eBPF data plane (`felix/bpf/nat/connecttime.go`).
    Calico,
}

/// The directories of pinned links below [`BPF`], and the prefixes of the names of those for connect and sendmsg.
const PINS: [(Product, &str, &[&str]); 3] = [
    (
        Product::Cilium,
        "cilium/socketlb/links/cgroup",
        &["cil_sock4_connect", "cil_sock4_sendmsg", "cil_sock6_connect", "cil_sock6_sendmsg"],
    ),
    (Product::Calico, "ctlb", &["calico_connect_v", "calico_sendmsg_v"]),
    // Without IPv4.
    (Product::Calico, "", &["calico_connect_v", "calico_sendmsg_v"]),
];

impl Product {
    /// Returns its name, with the function.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cilium => "Cilium's socket load balancing",
            Self::Calico => "Calico's connect-time load balancing",
        }
    }

    /// Returns the setting that restricts it to the node's own processes, or disables it.
    #[must_use]
    pub const fn setting(self) -> &'static str {
        match self {
            Self::Cilium => "unless it is set already, set socketLB.hostNamespaceOnly=true in Cilium's chart",
            Self::Calico => "set bpfConnectTimeLoadBalancing: Disabled in the FelixConfiguration default",
        }
    }
}

/// Returns the products whose programs are attached on the node whose file system is mounted at `root`.
///
/// # Errors
/// The BPF file system of the node is not visible.
pub fn products(root: &Path) -> Result<BTreeSet<Product>, String> {
    // An agent's container has no mount of it; the root directory of the node's first process has it (proc_pid_root(5)).
    let of_first_process = root.join("proc/1/root").join(BPF.trim_start_matches('/'));
    let reached = HostPath::new(BPF).and_then(|path| HostRoot::new(root).reach(&path).ok());
    let places = reached.into_iter().chain([of_first_process]);
    let mut why = format!("{BPF} is not visible");
    for place in places {
        match names_in(&place) {
            Ok(_) => return Ok(PINS.into_iter().filter(|pins| has_pins(&place, *pins)).map(|(it, ..)| it).collect()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => why = format!("can't read {BPF}: {error}"),
        }
    }
    Err(why)
}

fn has_pins(place: &Path, (_, directory, prefixes): (Product, &str, &[&str])) -> bool {
    let is_pin = |name: &String| prefixes.iter().any(|prefix| name.starts_with(prefix));
    names_in(&place.join(directory)).is_ok_and(|names| names.iter().any(is_pin))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Directory;
    use std::fs;

    #[test]
    fn pinned_links_name_their_product() {
        for (pin, expected) in [
            ("sys/fs/bpf/cilium/socketlb/links/cgroup/cil_sock4_connect", Some(Product::Cilium)),
            ("sys/fs/bpf/cilium/socketlb/links/cgroup/cil_sock6_sendmsg", Some(Product::Cilium)),
            ("sys/fs/bpf/cilium/socketlb/links/cgroup/cil_sock_release", None),
            ("proc/1/root/sys/fs/bpf/ctlb/calico_connect_v46", Some(Product::Calico)),
            ("sys/fs/bpf/calico_connect_v6", Some(Product::Calico)),
            ("sys/fs/bpf/tc/globals/cali_v4_nat_fe", None),
        ] {
            let root = Directory::new("socket-lb");
            let path = root.join(pin);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, "").expect("a file");
            assert_eq!(products(&root), Ok(expected.into_iter().collect()), "{pin}");
        }
    }

    #[test]
    fn a_node_whose_programs_are_not_visible_is_not_one_without_programs() {
        let root = Directory::new("socket-lb-hidden");
        assert_eq!(products(&root), Err("/sys/fs/bpf is not visible".to_owned()));
    }
}
