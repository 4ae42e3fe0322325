//! The node and the pod to examine.

use crate::cni::NetConf;
use crate::host_path::{HostPath, HostRoot};
use crate::pod::PodRef;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

/// The node to examine, and optionally a pod.
#[derive(Debug, Clone)]
pub struct CheckTarget {
    /// The mount point of the node's file system in this process.
    pub mount: PathBuf,
    /// The node's name in the cluster, if known.
    pub node_name: Option<String>,
    /// The platform, a value of `--platform`.
    pub platform: String,
    /// Whether the plugin is part of the cluster network's configuration list on this platform.
    pub chained: bool,
    /// The directories of CNI plugins.
    pub bin_dirs: Vec<HostPath>,
    /// A configuration file, or the directory of configuration files.
    pub conf: HostPath,
    /// Other directories with configuration files of the plugin, which attachments have.
    pub other_conf_dirs: Vec<HostPath>,
    /// The installation according to its log.
    pub installation: Installation,
    /// The pod to examine.
    pub pod: Option<PodRef>,
    /// Whether to send packets in the pod's network namespace.
    pub probe: bool,
}

/// The installation on the node, read from its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    /// The installed programs.
    pub programs: Vec<HostPath>,
    /// The own lists, by their paths.
    pub own_lists: BTreeMap<HostPath, OwnList>,
    /// Multus's auxiliary chain, if one of the plugin's files is there.
    pub multus_chain: Option<MultusChain>,
    /// The types of the plugin's entries in configuration lists, by the path of the list.
    pub listed_types: BTreeMap<HostPath, BTreeSet<String>>,
    /// The differences between the node and the installation, one line each; `None` without an installation. The
    /// error is the reason why they are unknown.
    pub changed: Result<Option<Vec<String>>, String>,
}

/// The directory of Multus's auxiliary chain: Multus runs its plugins for every pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultusChain {
    /// The directory.
    pub directory: HostPath,
    /// The plugin's own files there.
    pub own_files: Vec<HostPath>,
    /// The files because of which Multus skips all plugins, each with the reason.
    pub invalid_files: Vec<String>,
}

/// An own list: the copy of the cluster network's configuration list that runtimes use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnList {
    /// The name of its source, a file in the same directory.
    pub source: String,
    /// The type of the plugin's entry.
    pub kind: String,
}

impl CheckTarget {
    /// Whether Multus runs the configuration at `path` for every pod, because it is in its auxiliary chain.
    pub(super) fn is_in_multus_chain(&self, path: &HostPath) -> bool {
        self.installation.multus_chain.as_ref().is_some_and(|chain| chain.directory == path.parent())
    }

    /// Returns the path in this process of the agent's socket.
    pub(super) fn agent_socket(&self, conf: Option<&NetConf>) -> Result<PathBuf, String> {
        let named = conf.and_then(|conf| conf.kubernetes.agent_socket.as_deref());
        let reached = named.and_then(|path| self.reach_named(path).ok());
        reached.ok_or_else(|| "the configuration names no agent_socket".to_owned())
    }

    /// Returns the path in this process of a path on the node.
    pub(super) fn reach(&self, path: &HostPath) -> io::Result<PathBuf> {
        HostRoot::new(&self.mount).reach(path)
    }

    /// Returns the path in this process of a path that a configuration contains.
    pub(super) fn reach_named(&self, path: &std::path::Path) -> io::Result<PathBuf> {
        let path = HostPath::new(path);
        let path = path.ok_or_else(|| io::Error::other("expected an absolute path without \"..\""))?;
        self.reach(&path)
    }
}
