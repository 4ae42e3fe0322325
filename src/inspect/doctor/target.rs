//! Whom the doctor looks at, and where things are.

use crate::host_path::{HostPath, HostRoot};
use crate::pod::PodRef;
use std::io;
use std::path::PathBuf;

/// A node, and perhaps a pod.
#[derive(Debug, Clone)]
pub struct CheckTarget {
    /// Where this process finds the node's file system.
    pub mount: PathBuf,
    /// The name by which the cluster knows this node, where that is known.
    pub node_name: Option<String>,
    /// The platform's name, as `--platform` calls it.
    pub platform: String,
    /// Whether the plugin is a member of the cluster network's list there.
    pub chained: bool,
    /// Where programs are looked for.
    pub bin_dirs: Vec<HostPath>,
    /// A configuration, or the directory with those among which it is.
    pub conf: HostPath,
    /// What is known of the installation.
    pub installation: Installation,
    /// The kubeconfig of whoever asks, as this process sees it; else the plugin's own is used.
    pub kubeconfig: Option<PathBuf>,
    /// The pod.
    pub pod: Option<PodRef>,
    /// Whether packets may be sent in its namespace.
    pub probe: bool,
}

/// What the log of the installation says of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    /// The log.
    pub log: HostPath,
    /// The programs that were installed.
    pub programs: Vec<HostPath>,
    /// How the node differs from what was installed, one line each; `None` where nothing was. An
    /// error says why that can't be told.
    pub changed: Result<Option<Vec<String>>, String>,
}

impl CheckTarget {
    /// Where this process finds what the node calls `path`.
    pub(super) fn reach(&self, path: &HostPath) -> io::Result<PathBuf> {
        HostRoot::new(&self.mount).reach(path)
    }

    /// The same for a path that a configuration names.
    pub(super) fn reach_named(&self, path: &std::path::Path) -> io::Result<PathBuf> {
        let path = HostPath::new(path);
        let path = path.ok_or_else(|| io::Error::other("accepted: an absolute path without \"..\""))?;
        self.reach(&path)
    }
}
