//! The saved state of a pod in `cniDir`, kept until DEL. With it, DEL, CHECK and GC need neither the cluster nor the
//! current configuration.

use super::PrimaryCall;
use super::invocation::Invocation;
use crate::cni::{Code, Error};
use crate::netns::{NetNs, NetnsId};
use crate::plugin::del;
use crate::plugin::record::SandboxRecord;
use crate::state::{Attachment, ROOT, Store, format};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The invocations of a pod: those that were run, and those that are about to be.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedState {
    /// The path of the pod's network namespace.
    #[serde(default, rename = "netns")]
    netns_path: PathBuf,
    /// The identity of the pod's network namespace.
    netns_id: Option<NetnsId>,
    /// In the order of ADD: the default network, the other networks, the chained plugins. Every version writes them: a
    /// default would hide damage.
    #[serde(rename = "members")]
    pub(super) invocations: Vec<Invocation>,
}

impl SavedState {
    /// Returns the state of a pod in this network namespace.
    pub(super) fn new(netns: &NetNs, invocations: Vec<Invocation>) -> Self {
        Self { netns_path: netns.path().to_owned(), netns_id: Some(netns.id()), invocations }
    }

    /// Returns the state of a pod whose network namespace is unknown.
    pub(super) fn without_netns(invocations: Vec<Invocation>) -> Self {
        Self { invocations, ..Self::default() }
    }

    /// Reads a record to remove what it describes; of a damaged or newer record, the readable part. Returns `None` for a
    /// missing record and if nothing of it is readable.
    ///
    /// # Errors
    /// The record can't be read now.
    pub(super) fn read_to_remove(store: &Store, attachment: &Attachment) -> Result<Option<Self>, Error> {
        store.read(attachment).or_else(|error| {
            if error.code != Code::State {
                return Err(error);
            }
            tracing::warn!("only the readable part of a damaged record is used: {error}");
            let fields = store.read_part(attachment).ok().flatten();
            Ok(fields.as_ref().and_then(Self::recover))
        })
    }

    pub(crate) fn recover(fields: &Map<String, Value>) -> Option<Self> {
        let invocations = fields.get("members")?.as_array()?;
        let invocations = invocations.iter().filter_map(|found| Invocation::deserialize(found).ok()).collect();
        Some(Self { invocations, ..format::parse_known_fields(fields) })
    }

    /// Returns the path of the pod's network namespace, if it exists; by now, it may be that of another pod.
    pub(super) fn netns(&self) -> Option<PathBuf> {
        (self.netns_id.is_some() && self.netns_path.exists()).then(|| self.netns_path.clone())
    }

    /// Returns whether a network namespace is that of another pod. If that can't be determined, it is not touched. The
    /// records in `cniDir` survive a reboot, after which the kernel starts with the same identities again; those in
    /// [`ROOT`] do not.
    fn is_of_another_pod(&self, netns: &NetNs, container_id: &str) -> bool {
        SandboxRecord::is_of_another(&Store::new(ROOT), container_id, self.netns_id, netns).unwrap_or_else(|error| {
            tracing::warn!("DEL of the networks leaves the network namespace unchanged: {error}");
            true
        })
    }
}

impl PrimaryCall<'_> {
    /// Removes everything in `saved` in the reverse order of ADD: the chained plugins, the rules of the call's attachment and
    /// of `attachments`, the networks. All steps are tried even if one fails.
    ///
    /// # Errors
    /// The steps that failed.
    pub(super) fn remove(&self, saved: &SavedState, attachments: &[Attachment]) -> Result<(), Error> {
        let mut call = self.delegate_call();
        let netns = NetNs::open(&call.netns).ok().flatten();
        if netns.as_ref().is_some_and(|netns| saved.is_of_another_pod(netns, &call.container_id)) {
            call.netns = PathBuf::new();
        }
        let store = Store::new(ROOT);
        let (chained, networks): (Vec<_>, Vec<_>) = saved.invocations.iter().rev().partition(|one| one.is_chained);
        let mut results: Vec<_> = chained.iter().map(|invocation| invocation.del(&call)).collect();
        results.extend(attachments.iter().map(|attachment| del::remove(&store, attachment, netns.as_ref())));
        results.push(del::run(self.request, self.conf));
        results.extend(networks.iter().map(|invocation| invocation.del(&call)));
        Error::all(results)
    }
}
