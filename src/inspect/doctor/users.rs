//! Users as a pod counts them, and as this process does: a pod may have a user namespace of its own.

use super::probe_socket::ProbeUser;
use crate::cni::{Code, Error};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// A file that belongs to who is root where the reading thread's network namespace is from
/// (`net_ctl_set_ownership`, net/sysctl_net.c).
const OF_ROOT: &str = "/proc/sys/net/ipv4/ip_forward";
/// How many users a pod with `hostUsers: false` has, from 0 on (KEP-127).
const OWN: u32 = 65536;

/// The users of a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Users {
    /// Whom this process knows as its root.
    root: ProbeUser,
}

impl Users {
    /// Those of the thread's network namespace.
    ///
    /// # Errors
    /// /proc/sys can't be read.
    pub(super) fn here() -> Result<Self, Error> {
        let root = fs::metadata(OF_ROOT).map(|of| ProbeUser { uid: of.uid(), gid: of.gid() });
        let root = root.map_err(|error| Error::new(Code::Io, format!("{OF_ROOT} can't be looked at: {error}")))?;
        Ok(Self { root })
    }

    /// As whom this process knows the pod's `user`; `None` where the pod has none such.
    pub(super) fn outside(self, user: ProbeUser) -> Option<ProbeUser> {
        let ProbeUser { uid, gid } = self.root;
        let is_own = |id: u32, root: u32| root == 0 || id < OWN;
        let is_there = is_own(user.uid, uid) && is_own(user.gid, gid);
        is_there.then(|| ProbeUser { uid: uid.saturating_add(user.uid), gid: gid.saturating_add(user.gid) })
    }

    /// As whom the pod knows this process's `uid`; who is none of its users stays.
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
