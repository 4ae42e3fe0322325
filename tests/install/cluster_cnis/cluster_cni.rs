//! The cluster CNIs of real clusters: which configuration each one writes, and how. The files are in
//! `tests/golden/own_list.md`, below `NAME/before`.

use crate::support::golden::cases;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

pub(crate) const GOLDEN: &str = "own_list.md";

/// How a program replaces a file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Method {
    /// Truncates the file and writes it in place.
    InPlace,
    /// Writes a file of this name in the same directory, and renames it.
    Rename(&'static str),
    /// Removes the file and creates it again.
    Recreate,
    /// The file is a symbolic link through `..data`, which is replaced, as the kubelet does in volumes.
    Symlink,
}

impl Method {
    /// Replaces the file `name` in `directory`.
    pub(crate) fn write(self, directory: &Path, name: &str, text: &str) {
        let path = directory.join(name);
        match self {
            Self::InPlace => fs::write(&path, text).expect("written"),
            Self::Rename(temporary) => {
                let temporary = directory.join(temporary);
                fs::write(&temporary, text).expect("written");
                let mode = fs::metadata(&path).map_or(0o644, |file| file.permissions().mode());
                fs::set_permissions(&temporary, Permissions::from_mode(mode)).expect("set");
                fs::rename(&temporary, &path).expect("renamed");
            }
            Self::Recreate => {
                fs::remove_file(&path).expect("removed");
                fs::write(&path, text).expect("written");
            }
            Self::Symlink => {
                let data = directory.join("..data");
                let earlier = fs::read_link(&data).ok();
                let number = earlier.as_ref().and_then(|name| name.to_str()?.strip_prefix("..v")?.parse::<u32>().ok());
                let next = format!("..v{}", number.unwrap_or(0) + 1);
                fs::create_dir(directory.join(&next)).expect("made");
                fs::write(directory.join(&next).join(name), text).expect("written");
                let temporary = directory.join("..data_tmp");
                symlink(&next, &temporary).expect("linked");
                fs::rename(&temporary, &data).expect("renamed");
                if earlier.is_none() {
                    let _ = fs::remove_file(&path);
                    symlink(Path::new("..data").join(name), &path).expect("linked");
                }
                if let Some(earlier) = earlier {
                    fs::remove_dir_all(directory.join(earlier)).expect("removed");
                }
            }
        }
    }
}

/// A cluster CNI.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClusterCni {
    /// Its name in the golden file.
    pub(crate) name: &'static str,
    /// The source code that writes the file: repository and commit, path, function.
    pub(crate) source: &'static str,
    /// The file that it writes.
    pub(crate) file: &'static str,
    /// The file's permission bits.
    pub(crate) mode: u32,
    /// How it writes the file.
    pub(crate) method: Method,
    /// A text in the file, and the text that an upgrade puts in its place.
    pub(crate) change: (&'static str, &'static str),
}

pub(crate) const CLUSTER_CNIS: [ClusterCni; 12] = [
    ClusterCni {
        name: "calico",
        source: "projectcalico/calico 37e585c6, cni-plugin/pkg/install/install.go, writeCNIConfig, with the \
                 template of manifests/calico.yaml",
        file: "10-calico.conflist",
        mode: 0o644,
        method: Method::InPlace,
        change: ("\"mtu\": 1500", "\"mtu\": 1450"),
    },
    ClusterCni {
        name: "cilium",
        source: "cilium/cilium 01990e1c, daemon/cmd/cni/config.go, setupCNIConfFile (renameio)",
        file: "05-cilium.conflist",
        mode: 0o644,
        method: Method::Rename(".05-cilium.conflist483920"),
        change: ("\"enable-debug\": false", "\"enable-debug\": true"),
    },
    ClusterCni {
        name: "flannel",
        source: "flannel-io/flannel 49472241 (v0.28.5), cmd/install_conf/main.go; cp -f before",
        file: "10-flannel.conflist",
        mode: 0o644,
        method: Method::Rename(".10-flannel.conflist.tmp"),
        change: ("\"hairpinMode\": true", "\"hairpinMode\": false"),
    },
    ClusterCni {
        name: "kindnet",
        source: "kubernetes-sigs/kind 26637e29, images/kindnetd/cmd/kindnetd/cni.go, CNIConfigWriter",
        file: "10-kindnet.conflist",
        mode: 0o644,
        method: Method::Rename("10-kindnet.conflist.temp"),
        change: ("\"mtu\": 1500", "\"mtu\": 65535"),
    },
    ClusterCni {
        name: "aws",
        source: "aws/amazon-vpc-cni-k8s 0129baff, cmd/aws-vpc-cni/main.go and utils/cp/cp.go, CopyFile, after \
                 the IPAM daemon is ready",
        file: "10-aws.conflist",
        mode: 0o644,
        method: Method::Rename("10-aws.conflist.tmp"),
        change: ("\"mtu\": \"9001\"", "\"mtu\": \"1500\""),
    },
    ClusterCni {
        name: "azure",
        source: "Azure/azure-container-networking 19ac1335, cns/cniconflist/generator_linux.go, V4OverlayGenerator",
        file: "15-azure-swift-overlay.conflist",
        mode: 0o644,
        method: Method::Rename("15-azure-swift-overlay.conflist.tmp"),
        change: ("v4overlay", "dualStackOverlay"),
    },
    ClusterCni {
        name: "ovn-kubernetes",
        source: "ovn-org/ovn-kubernetes, go-controller/pkg/config/cni.go, WriteCNIConfig (os.CreateTemp). With Multus on \
                 OpenShift, this directory is Multus's",
        file: "10-ovn-kubernetes.conf",
        mode: 0o600,
        method: Method::Rename("ovnkube-1839203"),
        change: ("\"logLevel\":\"4\"", "\"logLevel\":\"5\""),
    },
    ClusterCni {
        name: "crio-bridge",
        source: "cri-o/cri-o, contrib/cni/10-crio-bridge.conflist and 99-loopback.conflist, installed by packages as \
                 100-crio-bridge.conflist and 200-loopback.conflist; administrators edit it with sed -i",
        file: "100-crio-bridge.conflist",
        mode: 0o644,
        method: Method::Rename("sedXa7Qp2"),
        change: ("10.85.0.0/16", "10.86.0.0/16"),
    },
    ClusterCni {
        name: "minikube",
        source: "kubernetes/minikube 0673d13a, pkg/minikube/cni/bridge.go, copied with scp; cni.go renames bridges of \
                 other tools to .mk_disabled",
        file: "1-k8s.conflist",
        mode: 0o644,
        method: Method::InPlace,
        change: ("10.244.0.0/16", "10.245.0.0/16"),
    },
    ClusterCni {
        name: "multus",
        source: "k8snetworkplumbingwg/multus-cni 0864e88c, pkg/server/config/manager.go: 00-multus.conf, beside the file \
                 of flannel, which Multus calls",
        file: "10-flannel.conflist",
        mode: 0o644,
        method: Method::Rename(".10-flannel.conflist.tmp"),
        change: ("\"hairpinMode\": true", "\"hairpinMode\": false"),
    },
    ClusterCni {
        name: "cilium-chaining",
        source: "cilium/cilium 01990e1c, daemon/cmd/cni/config.go, mergeExistingCNIConfig: with cni.chainingTarget=aws-cni, \
                 Cilium adds itself to the first list of this network name",
        file: "05-cilium.conflist",
        mode: 0o644,
        method: Method::Rename(".05-cilium.conflist483920"),
        change: ("\"enable-debug\": false", "\"enable-debug\": true"),
    },
    ClusterCni {
        name: "sorts-first",
        source: "a list of the administrator that sorts before 00-detour.conflist",
        file: "0-site.conflist",
        mode: 0o644,
        method: Method::Recreate,
        change: ("\"hairpinMode\": true", "\"hairpinMode\": false"),
    },
];

impl ClusterCni {
    /// Returns the cluster CNI of this name.
    pub(crate) fn named(name: &str) -> Self {
        *CLUSTER_CNIS.iter().find(|cni| cni.name == name).expect("a cluster CNI")
    }

    /// Returns the files of its directory.
    pub(crate) fn before(&self) -> BTreeMap<String, String> {
        cases(GOLDEN, &format!("{}/before/", self.name))
    }

    /// Returns the file that it writes.
    pub(crate) fn text(&self) -> String {
        self.before().remove(self.file).expect("a golden file")
    }

    /// Returns `text`, which the agent may have formatted, as an upgrade of the cluster CNI changes it.
    pub(crate) fn upgraded(&self, text: &str) -> String {
        let formatted = |text: &str| text.replace("\":\"", "\": \"");
        let (from, to) = self.change;
        let (from, to) =
            if text.contains(from) { (from.to_owned(), to.to_owned()) } else { (formatted(from), formatted(to)) };
        assert!(text.contains(&from), "{}: {from} is not in {text}", self.name);
        text.replace(&from, &to)
    }

    /// Creates its files in `directory`.
    pub(crate) fn install(&self, directory: &Path) {
        fs::create_dir_all(directory).expect("made");
        for (name, contents) in self.before() {
            let mode = if name == self.file { self.mode } else { 0o600 };
            fs::write(directory.join(&name), contents).expect("written");
            fs::set_permissions(directory.join(&name), Permissions::from_mode(mode)).expect("set");
        }
    }

    /// Replaces its file in its own manner.
    pub(crate) fn rewrite(&self, directory: &Path, text: &str) {
        self.method.write(directory, self.file, text);
    }
}

/// Returns the files of a directory.
pub(crate) fn files(directory: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(directory).expect("readable").map(|entry| entry.expect("readable").path());
    let read = |path: PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).expect("text"))
    };
    entries.map(read).collect()
}

/// Returns the files of a directory with their permission bits, to compare the directory byte for byte.
pub(crate) fn snapshot(directory: &Path) -> BTreeMap<String, (String, u32)> {
    let mode = |name: &str| fs::symlink_metadata(directory.join(name)).expect("there").permissions().mode() & 0o7777;
    files(directory).into_iter().map(|(name, text)| (name.clone(), (text, mode(&name)))).collect()
}
