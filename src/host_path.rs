//! A path as the node knows it, and where it is reached from here.

use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

/// An absolute path as processes of the node see it: what goes into configurations.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostPath(PathBuf);

impl HostPath {
    /// The path, where it is absolute and has no `..`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Option<Self> {
        let path = path.into();
        let plain = path.components().all(|part| !matches!(part, Component::ParentDir));
        (path.is_absolute() && plain).then_some(Self(path))
    }

    /// A file in this directory.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        Self(self.0.join(name))
    }

    /// The last part; empty for `/`.
    #[must_use]
    pub fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The directory that it is in; `/` is in itself.
    #[must_use]
    pub fn parent(&self) -> Self {
        Self(self.0.parent().unwrap_or(&self.0).to_owned())
    }

    /// The file of another name in the same directory.
    #[must_use]
    pub fn sibling(&self, name: &str) -> Self {
        Self(self.0.with_file_name(name))
    }

    /// The path as the node sees it.
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
        Self::new(text).ok_or_else(|| format!("{text:?} is not accepted; accepted: an absolute path without \"..\""))
    }
}

/// Where the node's file system is mounted, for this process: `/` on the node itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoot(PathBuf);

/// As many as the kernel follows (path_resolution(7)).
const MOST_LINKS: usize = 40;

impl HostRoot {
    /// The node's file system, mounted at `mount`.
    #[must_use]
    pub fn new(mount: impl Into<PathBuf>) -> Self {
        Self(mount.into())
    }

    /// The node's `/`.
    #[must_use]
    pub fn mount(&self) -> &Path {
        &self.0
    }

    /// Where this process finds what the node calls `path`. Links are followed as the node would
    /// follow them: an absolute one leads to a place below the mount, not to one of this process's
    /// own (`/var/run` is such a link on many nodes, `/var/snap/microk8s/current` a relative one).
    ///
    /// # Errors
    /// Links lead in a circle, or one can't be read.
    pub fn reach(&self, path: &HostPath) -> io::Result<PathBuf> {
        let mut left: Vec<PathBuf> = Self::parts(&path.0);
        let (mut within, mut links) = (PathBuf::new(), 0);
        while let Some(part) = left.pop() {
            if part.as_os_str() == ".." {
                within.pop();
                continue;
            }
            let here = self.0.join(within.join(&part));
            match fs::read_link(&here) {
                Ok(target) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(Errno::ELOOP.into());
                    }
                    if target.is_absolute() {
                        within.clear();
                    }
                    left.extend(Self::parts(&target));
                }
                // Not a link (EINVAL), or not there.
                Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::NotFound) => {
                    within.push(part);
                }
                Err(error) if error.kind() == ErrorKind::NotADirectory => within.push(part),
                Err(error) => return Err(error),
            }
        }
        Ok(self.0.join(within))
    }

    /// As [`Root::reach`], but the last part stays what it is, a link too: what is to be replaced.
    ///
    /// # Errors
    /// As [`Root::reach`].
    pub fn reach_entry(&self, path: &HostPath) -> io::Result<PathBuf> {
        Ok(self.reach(&path.parent())?.join(path.name()))
    }

    /// Names and `..`, the last one first.
    fn parts(path: &Path) -> Vec<PathBuf> {
        let wanted = |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
        let mut parts: Vec<_> = path.components().filter(wanted).map(|part| PathBuf::from(part.as_os_str())).collect();
        parts.reverse();
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn path(text: &str) -> HostPath {
        text.parse().expect("accepted")
    }

    #[test]
    fn links_lead_to_where_the_node_sees_them() {
        let mount = std::env::temp_dir().join(format!("detour-root-{}", std::process::id()));
        let _ = fs::remove_dir_all(&mount);
        fs::create_dir_all(mount.join("run/deep")).expect("made");
        fs::create_dir_all(mount.join("var/7")).expect("made");
        symlink("/run", mount.join("var/run")).expect("linked");
        symlink("7", mount.join("var/current")).expect("linked");
        symlink("../../..", mount.join("run/deep/up")).expect("linked");
        symlink("loop", mount.join("loop")).expect("linked");
        let root = HostRoot::new(&mount);
        for (asked, found) in [
            ("/var/run/detour/x", "run/detour/x"),
            ("/var/current/opt/cni/bin", "var/7/opt/cni/bin"),
            ("/run/deep/up/run", "run"),
            ("/nowhere/at/all", "nowhere/at/all"),
        ] {
            assert_eq!(root.reach(&path(asked)).expect("reached"), mount.join(found), "{asked}");
        }
        assert_eq!(root.reach_entry(&path("/var/run")).expect("reached"), mount.join("var/run"));
        let circle = root.reach(&path("/loop/x")).expect_err("a circle");
        assert_eq!(circle.raw_os_error(), Some(Errno::ELOOP as i32));
        fs::remove_dir_all(&mount).expect("removed");
    }

    #[test]
    fn a_path_of_the_node_is_absolute_and_leads_down() {
        for text in ["opt/cni/bin", "", "/opt/../etc"] {
            assert!(text.parse::<HostPath>().is_err(), "{text}");
        }
        assert_eq!(path("/opt/cni/bin/detour").sibling("istio-cni"), path("/opt/cni/bin/istio-cni"));
    }
}
