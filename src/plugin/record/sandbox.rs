//! What the attachments of a pod sandbox share, and which pod sandbox a network namespace belongs to.

use crate::cni::{Code, Error};
use crate::firewall::CreatedTables;
use crate::netns::{Fixtures, NetNs, NetnsId};
use crate::state::{Attachment, Store};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The saved state that the attachments of a pod sandbox share. In 0.2.0, the record of each attachment had these keys; it
/// still has those that a rollback needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(in crate::plugin) struct SandboxRecord {
    /// The network namespace.
    pub(in crate::plugin) netns_id: Option<NetnsId>,
    /// Its path.
    #[serde(rename = "netns")]
    netns_path: Option<PathBuf>,
    /// When the first attachment was added to it, in nanoseconds since the node's boot; zero if unknown.
    #[serde(rename = "added_at")]
    pub(in crate::plugin) added_since_boot: u64,
    /// Whether there may be rules for IPv6.
    pub(super) ip6: bool,
    /// Tables and built-in chains that were created.
    #[serde(rename = "made")]
    pub(in crate::plugin) created_tables: CreatedTables,
    /// Routes, policy rules and addresses that were added.
    pub(in crate::plugin) fixtures: Fixtures,
}

impl SandboxRecord {
    /// The name of its file.
    const FILE: &str = ".sandbox";

    /// Reads the record of a pod sandbox; `None` if it is missing or damaged.
    ///
    /// # Errors
    /// The record can't be read now.
    fn read(store: &Store, container_id: &str) -> Result<Option<Self>, Error> {
        unless_damaged(store.read_shared(container_id, Self::FILE))
    }

    /// Reads the record of a pod sandbox in this network namespace; `None` if it is missing, damaged, or of another one.
    ///
    /// # Errors
    /// The record can't be read now.
    pub(super) fn in_netns(store: &Store, container_id: &str, netns: NetnsId) -> Result<Option<Self>, Error> {
        Ok(Self::read(store, container_id)?.filter(|found| found.netns_id == Some(netns)))
    }

    /// Writes the record of a pod sandbox.
    ///
    /// # Errors
    /// The file can't be written.
    pub(in crate::plugin) fn write(&self, store: &Store, container_id: &str) -> Result<(), Error> {
        store.write_shared(container_id, Self::FILE, self)
    }

    /// Records the network namespace of a pod sandbox without rules, unless it is recorded. Another ADD may record what
    /// it adds at the same time.
    ///
    /// # Errors
    /// The file can't be written.
    pub(in crate::plugin) fn claim(store: &Store, container_id: &str, path: &Path, id: NetnsId) -> Result<(), Error> {
        let mut own = Self::default();
        own.set_netns(path, id);
        if store.create_shared(container_id, Self::FILE, &own)? || Self::in_netns(store, container_id, id)?.is_some() {
            return Ok(());
        }
        own.write(store, container_id)
    }

    /// Sets the network namespace. Its path is updated only with it: the agent's path differs from the runtime's.
    pub(in crate::plugin) fn set_netns(&mut self, path: &Path, id: NetnsId) {
        if self.netns_id.replace(id) != Some(id) {
            self.netns_path = Some(path.to_owned());
            self.added_since_boot = since_boot();
        }
    }

    /// Returns the path and the identity of the network namespace.
    pub(in crate::plugin) fn location(self) -> Option<(PathBuf, NetnsId)> {
        self.netns_path.zip(self.netns_id)
    }

    /// Reads the location of an attachment's network namespace: from its record, or without rules from the record of the
    /// pod sandbox. Returns `None` if both are missing or damaged.
    ///
    /// # Errors
    /// A record can't be read now.
    pub(in crate::plugin) fn location_of(
        store: &Store,
        attachment: &Attachment,
    ) -> Result<Option<(PathBuf, NetnsId)>, Error> {
        match unless_damaged(store.read_part(attachment))?.and_then(Self::location) {
            Some(found) => Ok(Some(found)),
            None => Ok(Self::read(store, &attachment.container_id)?.and_then(Self::location)),
        }
    }

    /// Reads the record of a pod sandbox, or of 0.2.0 the newest of its attachments; `None` if there are none, or all are
    /// damaged.
    ///
    /// # Errors
    /// A record can't be read now.
    pub(in crate::plugin) fn find(store: &Store, container_id: &str) -> Result<Option<Self>, Error> {
        let mut newest = Self::read(store, container_id)?;
        if newest.is_none() {
            // Other programs may have files in the directory.
            for attachment in store.attachments_of(container_id).unwrap_or_default() {
                let found = unless_damaged(store.read_part(&attachment))?;
                newest = newest.into_iter().chain(found).max_by_key(|record| record.added_since_boot);
            }
        }
        Ok(newest)
    }

    /// Reads which pod sandboxes have a record of `netns`. The kernel reuses the identity of a namespace that is gone, and
    /// a runtime may reuse its path; so two sandboxes can have one.
    ///
    /// # Errors
    /// The saved state can't be read now.
    fn all_of(store: &Store, netns: &NetNs) -> Result<Vec<(String, Self)>, Error> {
        let mut all = Vec::new();
        for container_id in store.sandboxes()? {
            let found = Self::find(store, &container_id)?.filter(|found| found.netns_id == Some(netns.id()));
            all.extend(found.map(|found| (container_id, found)));
        }
        Ok(all)
    }

    /// Returns the pod sandbox of a network namespace; `None` if no record has it.
    ///
    /// # Errors
    /// As [`Self::all_of`].
    pub(in crate::plugin) fn owner(store: &Store, netns: &NetNs) -> Result<Option<String>, Error> {
        let all = Self::all_of(store, netns)?.into_iter();
        let newest = all.max_by_key(|(_, found)| (found.leads_to(netns), found.added_since_boot));
        Ok(newest.map(|(container_id, _)| container_id))
    }

    /// Returns whether `netns` is not, or no longer, that of the attachment: a DEL may come so late that its path leads to the
    /// network namespace of another pod sandbox. A namespace belongs to the sandbox that was added last, unless the path in
    /// that record does not lead to it: then the DEL of that sandbox never came.
    ///
    /// # Errors
    /// As [`Self::all_of`].
    pub(in crate::plugin) fn is_of_another(
        store: &Store,
        attachment: &Attachment,
        netns: &NetNs,
    ) -> Result<bool, Error> {
        if Self::location_of(store, attachment)?.is_some_and(|(_, own)| own != netns.id()) {
            return Ok(true);
        }
        let (all, is_own) = (Self::all_of(store, netns)?, |id: &String| *id == attachment.container_id);
        let own = all.iter().find(|(id, _)| is_own(id)).map_or(0, |(_, own)| own.added_since_boot);
        let mut others = all.iter().filter(|(id, _)| !is_own(id));
        Ok(others.any(|(_, other)| other.added_since_boot >= own && other.leads_to(netns)))
    }

    /// Returns whether the path in the record leads to `netns`. In the agent's container, such paths may lead nowhere.
    fn leads_to(&self, netns: &NetNs) -> bool {
        let found = self.netns_path.as_deref().and_then(|path| NetNs::open(path).ok().flatten());
        found.is_some_and(|found| found.id() == netns.id())
    }
}

/// Returns what was read; `None` for a damaged record, which is logged.
pub(in crate::plugin) fn unless_damaged<T>(read: Result<Option<T>, Error>) -> Result<Option<T>, Error> {
    match read {
        Err(error) if error.code == Code::State => {
            tracing::debug!("{error}");
            Ok(None)
        }
        other => other,
    }
}

/// Returns the time since the node's boot, in nanoseconds. Changes of the wall clock do not affect it.
pub(in crate::plugin) fn since_boot() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Directory;

    /// A record of an attachment can have megabytes of exclusions.
    #[test]
    fn who_owns_a_network_namespace_is_answered_without_the_records_of_attachments() {
        let directory = Directory::new("record-owner");
        let store = Store::new(directory.join("attachments"));
        let netns = NetNs::open(Path::new("/proc/self/ns/net")).expect("readable").expect("a namespace");
        let attachment =
            |id: &str| Attachment { container_id: id.to_owned(), network: "n".to_owned(), ifname: "net1".to_owned() };
        let mut record = SandboxRecord::default();
        record.set_netns(netns.path(), netns.id());
        record.added_since_boot = 7;
        store.write(&attachment("other"), &record).expect("writable");
        let is_of_another = || SandboxRecord::is_of_another(&store, &attachment("own"), &netns).expect("readable");
        assert!(is_of_another(), "a record of 0.2.0");
        let claim = |sandbox, id| SandboxRecord::claim(&store, sandbox, netns.path(), id).expect("writable");
        claim("other", NetnsId { inode: 1, ..netns.id() });
        assert!(!is_of_another(), "the record of the sandbox takes precedence");
        claim("other", netns.id());
        assert!(is_of_another());
        claim("own", netns.id());
        assert!(!is_of_another(), "it was added later");
        let location = SandboxRecord::location_of(&store, &attachment("own")).expect("readable");
        assert_eq!(location, Some((netns.path().to_owned(), netns.id())), "of an attachment without rules");
        assert_eq!(SandboxRecord::owner(&store, &netns).expect("readable").as_deref(), Some("own"));
    }
}
