//! The primary plugin: the plugin that the runtime calls for the whole network of a pod. It runs networks as
//! [`crate::delegate`]s, applies the redirection rules in this process, and merges all results into one.

mod add;
mod commands;
mod invocation;
mod multus_record;
mod networks;
mod plan;
mod pod_policy;
pub(crate) mod saved_state;

pub use plan::{NetworkRunner, Preview, UNREAD, preview};
pub use pod_policy::{InProcessAttachment, united};

use crate::cluster::{self, Cluster};
use crate::cni::{CniCommand, Error, NetConf, Primary, Request};
use crate::delegate::Call;
use crate::plugin::record;
use crate::state::{Attachment, Store};
use serde_json::Value;

/// One call, with the keys that make this process the primary plugin.
pub(super) struct PrimaryCall<'a> {
    pub(super) request: &'a Request,
    pub(super) conf: &'a NetConf,
    pub(super) primary: &'a Primary,
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

/// Serves a call. Returns the result for stdout, for ADD only.
///
/// # Errors
/// The error for stdout.
pub(super) fn run(call: &PrimaryCall<'_>) -> Result<Option<Value>, Error> {
    match call.request.command {
        CniCommand::Add => add::run(call).map(Some),
        CniCommand::Check => commands::check(call).map(|()| None),
        CniCommand::Del => commands::del(call).map(|()| None),
        CniCommand::Gc => commands::gc(call).map(|()| None),
        CniCommand::Status => commands::status(call).map(|()| None),
    }
}
