//! Paths of the node, and how this process reaches them through a mount of the node's file system.

use crate::links;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

/// An absolute path as processes of the node see it, and as it is written into configurations.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostPath(PathBuf);

impl HostPath {
    /// Returns the path if it is absolute and does not contain `..`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Option<Self> {
        let path = path.into();
        let plain = path.components().all(|part| !matches!(part, Component::ParentDir));
        (path.is_absolute() && plain).then_some(Self(path))
    }

    /// Returns `/`.
    #[must_use]
    pub fn root() -> Self {
        Self(PathBuf::from("/"))
    }

    /// Returns the path of the entry `name` in this directory.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        Self(self.0.join(name))
    }

    /// Returns the last part of the path; empty for `/`.
    #[must_use]
    pub fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns the directory that contains the entry; for `/`, `/` itself.
    #[must_use]
    pub fn parent(&self) -> Self {
        Self(self.0.parent().unwrap_or(&self.0).to_owned())
    }

    /// Returns the path of the entry `name` in the same directory.
    #[must_use]
    pub fn sibling(&self, name: &str) -> Self {
        Self(self.0.with_file_name(name))
    }

    /// Returns the path as the node sees it.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        &self.0
    }
}

impl fmt::Display for HostPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl std::str::FromStr for HostPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::new(text).ok_or_else(|| format!("invalid value {text:?}; expected an absolute path without \"..\""))
    }
}

/// The mount point of the node's file system in this process: `/` on the node itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoot(PathBuf);

impl HostRoot {
    /// Returns the node's file system that is mounted at `mount`.
    #[must_use]
    pub fn new(mount: impl Into<PathBuf>) -> Self {
        Self(mount.into())
    }

    /// Returns the path of the node's `/`.
    #[must_use]
    pub fn mount(&self) -> &Path {
        &self.0
    }

    /// Returns the path in this process of the node's `path`.
    ///
    /// Symbolic links are resolved as on the node: an absolute one starts at the mount, not at this process's own
    /// `/`. Many nodes have such links: `/var/run` is absolute, `/var/snap/microk8s/current` relative.
    ///
    /// # Errors
    /// The links form a loop, or one can't be read.
    pub fn reach(&self, path: &HostPath) -> io::Result<PathBuf> {
        links::resolve(&self.0, &path.0, |part, _| match fs::read_link(part) {
            Ok(target) => Ok(Some(target)),
            // Not a link (EINVAL), or missing.
            Err(error) => match error.kind() {
                ErrorKind::InvalidInput | ErrorKind::NotFound | ErrorKind::NotADirectory => Ok(None),
                _ => Err(error),
            },
        })
    }

    /// Returns the path as [`HostRoot::reach`] does, of a file that may not be mounted in an agent's container: the root
    /// directory of the node's first process has it, too (proc_pid_root(5)).
    #[must_use]
    pub fn find(&self, path: &HostPath) -> PathBuf {
        let of_first_process = self.0.join("proc/1/root").join(path.0.strip_prefix("/").unwrap_or(&path.0));
        self.reach(path).ok().filter(|path| path.exists()).unwrap_or(of_first_process)
    }

    /// Returns the path as [`HostRoot::reach`] does, but does not resolve a link in the last part: for an entry that
    /// is created, replaced or removed.
    ///
    /// # Errors
    /// As [`HostRoot::reach`].
    pub fn reach_entry(&self, path: &HostPath) -> io::Result<PathBuf> {
        Ok(self.reach(&path.parent())?.join(path.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;
    use std::os::unix::fs::symlink;

    fn path(text: &str) -> HostPath {
        text.parse().expect("accepted")
    }

    #[test]
    fn links_are_resolved_below_the_mount() {
        let mount = std::env::temp_dir().join(format!("detour-root-{}", std::process::id()));
        let _ = fs::remove_dir_all(&mount);
        fs::create_dir_all(mount.join("run/deep")).expect("made");
        fs::create_dir_all(mount.join("var/7")).expect("made");
        symlink("/run", mount.join("var/run")).expect("linked");
        symlink("7", mount.join("var/current")).expect("linked");
        symlink("../../..", mount.join("run/deep/up")).expect("linked");
        symlink("loop", mount.join("loop")).expect("linked");
        let root = HostRoot::new(&mount);
        for (path_on_node, found) in [
            ("/var/run/detour/x", "run/detour/x"),
            ("/var/current/opt/cni/bin", "var/7/opt/cni/bin"),
            ("/run/deep/up/run", "run"),
            ("/nowhere/at/all", "nowhere/at/all"),
        ] {
            assert_eq!(root.reach(&path(path_on_node)).expect("reached"), mount.join(found), "{path_on_node}");
        }
        assert_eq!(root.reach_entry(&path("/var/run")).expect("reached"), mount.join("var/run"));
        let circle = root.reach(&path("/loop/x")).expect_err("a circle");
        assert_eq!(circle.raw_os_error(), Some(Errno::ELOOP as i32));
        fs::remove_dir_all(&mount).expect("removed");
    }

    #[test]
    fn a_relative_path_or_one_with_parent_directories_is_refused() {
        for text in ["opt/cni/bin", "", "/opt/../etc"] {
            assert!(text.parse::<HostPath>().is_err(), "{text}");
        }
        assert_eq!(path("/opt/cni/bin/detour").sibling("istio-cni"), path("/opt/cni/bin/istio-cni"));
    }
}
