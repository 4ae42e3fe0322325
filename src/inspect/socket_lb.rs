//! Socket load balancing: eBPF programs at the root control group that replace a Service's address when a process connects
//! or sends, before netfilter sees a packet. Their products pin the links of the programs in the BPF file system.

use crate::trusted_file::names_in;
use std::path::Path;

/// The mount point of the BPF file system.
const BPF: &str = "/sys/fs/bpf";

/// A product with socket load balancing.
#[derive(Debug, PartialEq, Eq)]
pub struct Product {
    /// Its name, with the function.
    pub name: &'static str,
    /// The setting that restricts it to the node's own processes, or disables it.
    pub setting: &'static str,
    /// The directories of pinned links below [`BPF`].
    directories: &'static [&'static str],
    /// The prefixes of the names of the links for connect and sendmsg.
    prefixes: &'static [&'static str],
}

/// Cilium (`pkg/socketlb`), and Calico's eBPF data plane (`felix/bpf/nat/connecttime.go`), whose second directory is that
/// of a node without IPv4.
static PRODUCTS: [Product; 2] = [
    Product {
        name: "Cilium's socket load balancing",
        setting: "unless it is set already, set socketLB.hostNamespaceOnly=true in Cilium's chart",
        directories: &["cilium/socketlb/links/cgroup"],
        prefixes: &["cil_sock4_connect", "cil_sock4_sendmsg", "cil_sock6_connect", "cil_sock6_sendmsg"],
    },
    Product {
        name: "Calico's connect-time load balancing",
        setting: "set bpfConnectTimeLoadBalancing: Disabled in the FelixConfiguration default",
        directories: &["ctlb", ""],
        prefixes: &["calico_connect_v", "calico_sendmsg_v"],
    },
];

/// Returns the products whose programs are attached on the node whose file system is mounted at `root`; `None` if the BPF
/// file system of the node is not visible.
#[must_use]
pub fn products(root: &Path) -> Option<Vec<&'static Product>> {
    // An agent's container has no mount of it; the root directory of the node's first process has it (proc_pid_root(5)).
    let of_first_process = root.join("proc/1/root");
    let places = [&*of_first_process, root].map(|root| root.join(BPF.trim_start_matches('/')));
    let place = places.into_iter().find(|place| names_in(place).is_ok())?;
    let is_attached = |product: &&Product| {
        let mut names =
            product.directories.iter().flat_map(|directory| names_in(&place.join(directory)).unwrap_or_default());
        names.any(|name| product.prefixes.iter().any(|prefix| name.starts_with(prefix)))
    };
    Some(PRODUCTS.iter().filter(is_attached).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Directory;
    use std::fs;

    #[test]
    fn pinned_links_name_their_product() {
        for (pin, expected) in [
            ("sys/fs/bpf/cilium/socketlb/links/cgroup/cil_sock4_connect", Some(0)),
            ("sys/fs/bpf/cilium/socketlb/links/cgroup/cil_sock6_sendmsg", Some(0)),
            ("sys/fs/bpf/cilium/socketlb/links/cgroup/cil_sock_release", None),
            ("proc/1/root/sys/fs/bpf/ctlb/calico_connect_v46", Some(1)),
            ("sys/fs/bpf/calico_connect_v6", Some(1)),
            ("sys/fs/bpf/tc/globals/cali_v4_nat_fe", None),
        ] {
            let root = Directory::new("socket-lb");
            let path = root.join(pin);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, "").expect("a file");
            let expected: Vec<&Product> = expected.map(|index: usize| &PRODUCTS[index]).into_iter().collect();
            assert_eq!(products(&root), Some(expected), "{pin}");
        }
    }

    #[test]
    fn a_node_whose_programs_are_not_visible_is_not_one_without_programs() {
        let root = Directory::new("socket-lb-hidden");
        assert_eq!(products(&root), None);
    }
}
