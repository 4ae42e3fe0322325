//! The directories of CNI plugins and configurations, by platform.

use crate::host_path::HostPath;
use crate::suggest::closest;

/// The properties of a platform.
#[derive(Debug, PartialEq, Eq)]
pub struct Platform {
    /// Its name for `--platform`.
    pub name: &'static str,
    /// Other names that `--platform` accepts.
    pub aliases: &'static [&'static str],
    /// The directory in which the runtime or Multus looks for plugins.
    pub bin_dir: &'static str,
    /// The directory of network configurations.
    pub conf_dir: &'static str,
    /// Whether the plugin is added to the cluster network's configuration list. Otherwise it has a configuration file
    /// of its own, which pods select as an attachment.
    pub chained: bool,
    /// Whether new pods get rules in format nftables, as with istio-cni there: RHEL 10 has nft_compat only in the package
    /// kernel-modules-extra, and OpenShift's network operator (iptables-alerter) reports each pod with iptables rules.
    pub nftables: bool,
    /// Paths that exist on every node of this platform and on no other, for detection. If empty, the platform is not
    /// detected; it has the same directories as the default.
    evidence: &'static [&'static str],
}

/// The platforms. Detection takes the first one whose evidence exists; the last one is the default.
///
/// Directories are from Istio's platform profiles (`manifests/helm-profiles`), from MicroShift's Multus and CRI-O
/// configuration, and from Bottlerocket's mount units. Evidence is written by the platforms' own components: OpenShift's
/// machine-config daemon, MicroShift, k3s's server and agent. `manifests/chart/platforms.yaml` has the same rows.
pub const PLATFORMS: [Platform; 9] = [
    Platform {
        name: "openshift",
        aliases: &["aro", "crc", "ocp", "okd", "rosa"],
        bin_dir: "/var/lib/cni/bin",
        conf_dir: "/etc/cni/multus/net.d",
        chained: false,
        nftables: true,
        evidence: &["/etc/machine-config-daemon"],
    },
    Platform {
        name: "microshift",
        bin_dir: "/run/cni/bin",
        conf_dir: "/etc/cni/multus/net.d",
        chained: false,
        nftables: true,
        evidence: &["/var/lib/microshift"],
        ..USUAL
    },
    Platform { name: "gke", bin_dir: "/home/kubernetes/bin", evidence: &["/home/kubernetes/bin"], ..USUAL },
    Platform {
        name: "k3d",
        bin_dir: "/bin",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        evidence: &["/bin/k3s", "/var/lib/rancher/k3s"],
        ..USUAL
    },
    Platform {
        name: "k3s",
        bin_dir: "/var/lib/rancher/k3s/data/cni",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        evidence: &["/var/lib/rancher/k3s"],
        ..USUAL
    },
    Platform {
        name: "microk8s",
        bin_dir: "/var/snap/microk8s/current/opt/cni/bin",
        conf_dir: "/var/snap/microk8s/current/args/cni-network",
        evidence: &["/var/snap/microk8s/current"],
        ..USUAL
    },
    Platform { name: "bottlerocket", ..USUAL },
    Platform { name: "minikube", ..USUAL },
    Platform {
        name: "kubernetes",
        aliases: &["aks", "default", "eks", "iks", "k0s", "kind", "kubeadm", "rke1", "rke2", "talos"],
        ..USUAL
    },
];

/// The usual properties, without a name.
const USUAL: Platform = Platform {
    name: "",
    aliases: &[],
    bin_dir: "/opt/cni/bin",
    conf_dir: "/etc/cni/net.d",
    chained: true,
    nftables: false,
    evidence: &[],
};

impl Platform {
    /// Returns the platform with this name or alias.
    ///
    /// # Errors
    /// Unknown name; the text lists all names.
    pub fn named(name: &str) -> Result<&'static Self, String> {
        let known = |platform: &&Self| platform.name == name || platform.aliases.contains(&name);
        PLATFORMS.iter().find(known).ok_or_else(|| match closest(name, Self::names()) {
            Some(similar) => format!("did you mean {similar:?}? expected {}", Self::names().join(", ")),
            None => format!("expected {}", Self::names().join(", ")),
        })
    }

    /// Returns all names and aliases, sorted.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        let mut names: Vec<_> = PLATFORMS.iter().flat_map(|p| [p.name].into_iter().chain(p.aliases.to_vec())).collect();
        names.sort_unstable();
        names
    }

    /// Detects the platform of a node; `exists` tells whether a path exists there.
    #[must_use]
    pub fn detect(exists: impl Fn(&HostPath) -> bool) -> &'static Self {
        let path_exists = |path: &str| HostPath::new(path).is_some_and(|path| exists(&path));
        let [others @ .., default] = &PLATFORMS;
        let is_detected =
            |platform: &&Self| !platform.evidence.is_empty() && platform.evidence.iter().all(|path| path_exists(path));
        others.iter().find(is_detected).unwrap_or(default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detected(paths: &[&str]) -> &'static str {
        Platform::detect(|path| paths.iter().any(|there| path.as_path() == std::path::Path::new(there))).name
    }

    #[test]
    fn each_platform_is_detected_by_its_evidence() {
        let [others @ .., default] = &PLATFORMS;
        for platform in others {
            let wanted = if platform.evidence.is_empty() { default } else { platform };
            assert_eq!(detected(platform.evidence), wanted.name);
            assert_eq!((wanted.bin_dir, wanted.conf_dir), (platform.bin_dir, platform.conf_dir), "{}", platform.name);
        }
        // Nodes that have directories of other platforms.
        assert_eq!(detected(&["/opt/cni/bin", "/etc/cni/net.d"]), "kubernetes");
        assert_eq!(detected(&["/bin/k3s", "/opt/cni/bin"]), "kubernetes");
    }

    #[test]
    fn every_name_and_alias_is_accepted_and_means_one_platform() {
        for platform in &PLATFORMS {
            for name in platform.aliases.iter().chain([&platform.name]) {
                assert_eq!(Platform::named(name).expect("accepted").name, platform.name);
            }
            assert!(HostPath::new(platform.bin_dir).is_some() && HostPath::new(platform.conf_dir).is_some());
        }
        let error = Platform::named("openshit").expect_err("a typing error");
        assert!(error.contains("openshift") && error.contains("eks"), "{error}");
    }
}
