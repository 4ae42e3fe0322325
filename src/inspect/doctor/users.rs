//! The users of a pod: maps UIDs between this process and a pod with its own user namespace.

use crate::cni::{Code, Error};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// The UID and GID that a probe is sent as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbeUser {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// A file whose owner is the root user of the user namespace that owns the thread's network namespace
/// (`net_ctl_set_ownership`, net/sysctl_net.c).
const OF_ROOT: &str = "/proc/sys/net/ipv4/ip_forward";
/// The number of UIDs of a pod with `hostUsers: false`, from 0 (KEP-127).
const OWN: u32 = 65536;

/// Maps UIDs between this process and the pod that owns a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Users {
    /// The pod's root user, as this process knows it.
    root: ProbeUser,
}

impl Users {
    /// Returns the mapping of the thread's network namespace.
    ///
    /// # Errors
    /// /proc/sys can't be read.
    pub(super) fn here() -> Result<Self, Error> {
        let root = fs::metadata(OF_ROOT).map(|of| ProbeUser { uid: of.uid(), gid: of.gid() });
        let root = root.map_err(|error| Error::new(Code::Io, format!("can't read the owner of {OF_ROOT}: {error}")))?;
        Ok(Self { root })
    }

    /// Returns the pod's `user` as this process knows it; `None` if the pod has no such user.
    pub(super) fn outside(self, user: ProbeUser) -> Option<ProbeUser> {
        let ProbeUser { uid, gid } = self.root;
        let is_own = |id: u32, root: u32| root == 0 || id < OWN;
        let is_there = is_own(user.uid, uid) && is_own(user.gid, gid);
        is_there.then(|| ProbeUser { uid: uid.saturating_add(user.uid), gid: gid.saturating_add(user.gid) })
    }

    /// Returns this process's `uid` as the pod knows it; unchanged if it is not one of the pod's.
    pub(super) fn inside(self, uid: u32) -> u32 {
        match uid.checked_sub(self.root.uid) {
            Some(own) if self.root.uid == 0 || own < OWN => own,
            _ => uid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_with_its_own_users_counts_them_from_its_root() {
        let of = |root| Users { root: ProbeUser { uid: root, gid: root } };
        let both = |id| ProbeUser { uid: id, gid: id };
        assert_eq!(of(200_000).outside(both(1337)), Some(both(201_337)));
        assert_eq!(of(200_000).outside(both(OWN)), None);
        assert_eq!((of(200_000).inside(201_337), of(200_000).inside(7)), (1337, 7));
        assert_eq!(of(0).outside(both(1_000_650_000)), Some(both(1_000_650_000)));
        assert_eq!(of(0).inside(1_000_650_000), 1_000_650_000);
    }
}
