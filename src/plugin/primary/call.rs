//! One call of the primary plugin.

use crate::cluster::{self, Cluster};
use crate::cni::{NetConf, Primary, Request};
use crate::delegate::Call;
use crate::plugin::record;
use crate::state::{Attachment, Store};

/// One call, with the keys that make this process the primary plugin.
pub(in crate::plugin) struct PrimaryCall<'a> {
    pub(in crate::plugin) request: &'a Request,
    pub(in crate::plugin) conf: &'a NetConf,
    pub(in crate::plugin) primary: &'a Primary,
}

impl PrimaryCall<'_> {
    /// Returns the call as it is forwarded to delegates, before the changes for each of them.
    pub(super) fn delegate_call(&self) -> Call {
        Call::forward(self.request, self.conf)
    }

    /// Returns the source of pods and definitions: the configured one, otherwise the API server that the environment
    /// of this process names. `None` if there is neither.
    pub(super) fn cluster(&self) -> Option<Box<dyn Cluster>> {
        cluster::source_or_in_cluster(&self.conf.kubernetes)
    }

    /// Returns the store of the pod's saved state, in `cniDir`.
    pub(super) fn store(&self) -> Store {
        Store::durable(&self.primary.cni_dir)
    }

    /// Returns the attachment of the call.
    pub(super) fn attachment(&self) -> Attachment {
        record::attachment(self.request, &self.conf.name)
    }
}
