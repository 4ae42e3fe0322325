//! Control groups (cgroups(7)) of the node: their IDs in the unified hierarchy (v2), and the cgroup namespace of this
//! thread.

use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use std::path::{Path, PathBuf};

/// The node's unified hierarchy of control groups.
#[derive(Debug, Clone)]
pub struct CgroupHierarchy {
    mount: PathBuf,
}

impl CgroupHierarchy {
    /// Finds the mount of the unified hierarchy on the node: `/sys/fs/cgroup`, or `/sys/fs/cgroup/unified` beside
    /// version 1.
    ///
    /// # Errors
    /// The node has no unified hierarchy.
    pub fn find(_root: &HostRoot) -> Result<Self, Error> {
        Err(Error::new(Code::Internal, "not implemented"))
    }

    /// Returns where the hierarchy is mounted.
    #[must_use]
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// Returns the ID of the control group at `path` below the hierarchy's root: the number that the kernel compares
    /// in `socket cgroupv2`.
    ///
    /// # Errors
    /// The control group does not exist, or `path` contains `..`.
    pub fn id(&self, path: &str) -> Result<u64, Error> {
        Err(Error::new(Code::Internal, format!("not implemented: {} {path}", self.mount.display())))
    }
}

/// Returns the path below the hierarchy's root of a runtime's `cgroups_path` (OCI runtime specification,
/// config-linux.md): a path, or `SLICE:PREFIX:NAME` of the systemd driver; `None` if it is neither.
#[must_use]
pub fn path_of(_cgroups_path: &str) -> Option<String> {
    None
}

/// Enters the node's cgroup namespace with the calling thread, unless it is there already. The kernel counts levels of
/// control groups from the namespace of the process that writes a rule.
///
/// # Errors
/// The node's namespace is not reachable.
pub fn enter_host_namespace(_root: &HostRoot) -> Result<(), Error> {
    Err(Error::new(Code::Internal, "not implemented"))
}
