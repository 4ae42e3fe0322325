//! Where platforms keep plugins and configurations: a table.

use super::HostPath;

/// What is known of a platform.
#[derive(Debug, PartialEq, Eq)]
pub struct Platform {
    /// What `--platform` calls it.
    pub name: &'static str,
    /// What else `--platform` accepts for it.
    pub aliases: &'static [&'static str],
    /// Where its runtime, or Multus, looks for plugins.
    pub bin_dir: &'static str,
    /// Where the configuration belongs.
    pub conf_dir: &'static str,
    /// Whether the plugin is a member of the cluster network's plugin list; else it has a file of
    /// its own, which an attachment names.
    pub chained: bool,
    /// Paths that every node of it has and no other: how it is known when nobody says.
    evidence: &'static [&'static str],
}

/// The platforms; the first whose evidence is there is the one, the last is every other.
///
/// Paths are those of Istio's platform profiles (`manifests/helm-profiles`), evidence is what the
/// platforms' own components write: OpenShift's machine-config daemon, k3s's server and agent.
pub const PLATFORMS: [Platform; 6] = [
    Platform {
        name: "openshift",
        aliases: &["ocp", "okd", "rosa", "aro"],
        bin_dir: "/var/lib/cni/bin",
        conf_dir: "/etc/cni/multus/net.d",
        chained: false,
        evidence: &["/etc/machine-config-daemon"],
    },
    Platform {
        name: "gke",
        aliases: &[],
        bin_dir: "/home/kubernetes/bin",
        conf_dir: "/etc/cni/net.d",
        chained: true,
        evidence: &["/home/kubernetes/bin"],
    },
    Platform {
        name: "k3d",
        aliases: &[],
        bin_dir: "/bin",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        chained: true,
        evidence: &["/bin/k3s", "/var/lib/rancher/k3s"],
    },
    Platform {
        name: "k3s",
        aliases: &[],
        bin_dir: "/var/lib/rancher/k3s/data/cni",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        chained: true,
        evidence: &["/var/lib/rancher/k3s"],
    },
    Platform {
        name: "microk8s",
        aliases: &[],
        bin_dir: "/var/snap/microk8s/current/opt/cni/bin",
        conf_dir: "/var/snap/microk8s/current/args/cni-network",
        chained: true,
        evidence: &["/var/snap/microk8s/current"],
    },
    Platform {
        name: "kubernetes",
        aliases: &["aks", "default", "eks", "iks", "kind", "kubeadm", "minikube", "rke1", "rke2"],
        bin_dir: "/opt/cni/bin",
        conf_dir: "/etc/cni/net.d",
        chained: true,
        evidence: &[],
    },
];

impl Platform {
    /// The platform of that name or alias.
    ///
    /// # Errors
    /// There is none; the text names those that there are.
    pub fn named(name: &str) -> Result<&'static Self, String> {
        let known = |platform: &&Self| platform.name == name || platform.aliases.contains(&name);
        PLATFORMS.iter().find(known).ok_or_else(|| {
            let names: Vec<_> = PLATFORMS.iter().flat_map(|p| [p.name].into_iter().chain(p.aliases.to_vec())).collect();
            format!("invalid value {name:?}; expected {}", names.join(", "))
        })
    }

    /// The platform of a node on which `exists` tells which paths there are.
    #[must_use]
    pub fn detect(exists: impl Fn(&HostPath) -> bool) -> &'static Self {
        let there = |path: &str| HostPath::new(path).is_some_and(|path| exists(&path));
        let [others @ .., fallback] = &PLATFORMS;
        others.iter().find(|platform| platform.evidence.iter().all(|path| there(path))).unwrap_or(fallback)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detected(paths: &[&str]) -> &'static str {
        Platform::detect(|path| paths.iter().any(|there| path.as_path() == std::path::Path::new(there))).name
    }

    #[test]
    fn each_platform_is_known_by_its_evidence() {
        for platform in &PLATFORMS {
            assert_eq!(detected(platform.evidence), platform.name);
        }
        // Nodes that have directories of others, too.
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
