//! What is kept of a pod in `cniDir` for as long as it lives: with it DEL, CHECK and GC need neither
//! the cluster nor the configuration of today.

use super::PrimaryCall;
use super::invocation::Invocation;
use crate::cni::{Code, Error};
use crate::delegate::Call;
use crate::netns::{NetNs, NetnsId};
use crate::plugin::{del, record};
use crate::state::{Attachment, Store, format};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// All that was, or is about to be, run for a pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedState {
    /// Where the pod's network namespace was.
    #[serde(default)]
    netns: PathBuf,
    /// Which one that was.
    sandbox: Option<NetnsId>,
    /// In the order in which they were added: the default network, the others, the members of the
    /// chain. Every version writes them: a default would hide damage.
    pub(super) members: Vec<Invocation>,
}

impl SavedState {
    /// Of a pod in this namespace.
    pub(super) fn of(sandbox: &NetNs, members: Vec<Invocation>) -> Self {
        Self { netns: sandbox.path().to_owned(), sandbox: Some(sandbox.id()), members }
    }

    /// Reads a record to remove what it describes: of a damaged or newer one, as much as is understood.
    ///
    /// # Errors
    /// It can't be read now, or nothing of it is understood.
    pub(super) fn read_to_remove(store: &Store, attachment: &Attachment) -> Result<Option<Self>, Error> {
        store.read(attachment).or_else(|error| {
            let fields = if error.code == Code::State { store.read_part(attachment).ok().flatten() } else { None };
            let kept: Option<Self> = fields.as_ref().and_then(Self::understood);
            let Some(kept) = kept else { return Err(error) };
            tracing::warn!("removed as far as the record is understood: {error}");
            Ok(Some(kept))
        })
    }

    fn understood(fields: &Map<String, Value>) -> Option<Self> {
        let members = fields.get("members")?.as_array()?;
        let members = members.iter().filter_map(|member| Invocation::deserialize(member).ok()).collect();
        Some(Self { members, ..format::understood(fields) })
    }

    /// Of a pod whose namespace is not known.
    pub(super) fn without_namespace(members: Vec<Invocation>) -> Self {
        Self { members, ..Self::default() }
    }

    /// The path of the pod's namespace, where that is still there; another pod's may have taken its
    /// place.
    pub(super) fn netns(&self) -> Option<PathBuf> {
        let sandbox = NetNs::open(&self.netns).ok().flatten()?;
        (Some(sandbox.id()) == self.sandbox).then(|| self.netns.clone())
    }

    /// Takes everything away in the reverse order of ADD: the chain's members, the mesh's rules with
    /// `mesh`, the networks. All are tried.
    ///
    /// # Errors
    /// What failed.
    pub(super) fn del(&self, base: &Call, mesh: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let (chain, networks): (Vec<_>, Vec<_>) = self.members.iter().rev().partition(|member| member.in_chain);
        let mut results: Vec<_> = chain.iter().map(|member| member.del(base)).collect();
        results.push(mesh());
        results.extend(networks.iter().map(|member| member.del(base)));
        Error::all(results)
    }
}

impl PrimaryCall<'_> {
    /// The attachment of the call.
    pub(super) fn attachment(&self) -> Attachment {
        record::attachment(self.request, &self.conf.name)
    }

    /// Takes away all that `kept` speaks of.
    ///
    /// # Errors
    /// What failed; all is tried.
    pub(super) fn take_away(&self, kept: &SavedState) -> Result<(), Error> {
        kept.del(&self.call(), || del::run(self.request, self.conf).map(drop))
    }
}
