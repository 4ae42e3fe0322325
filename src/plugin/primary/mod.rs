//! The primary plugin: the one that the runtime calls for a pod's whole network. Networks are run as
//! [`crate::delegate`]s, the mesh's rules are made in this process, and what both came to is one
//! result.
//!
//! | file | what it knows |
//! |---|---|
//! | `add`, `check`, `del`, `gc`, `status` | a verb each: what happens in which order |
//! | `readiness` | waiting for the cluster's network |
//! | `known_pod` | the pod, and what it costs to know it |
//! | `definitions` | which keys of a definition are the node's |
//! | `plan` | which of the pod's networks run where |
//! | `mesh` | the policy that attachments and node ask for together |
//! | `together` | what an ADD would ask for, without a call |
//! | `member`, `kept` | what is run, and what is kept of it for DEL, CHECK and GC |
//! | `outcome` | results: the default route, the one for the runtime |
//! | `report` | what the cluster is told |

mod add;
mod invocation;
mod lazy_pod;
mod mesh;
mod plan;
mod readiness;
mod saved_state;
mod verbs;

pub use mesh::{InProcessAttachment, about, united};
pub use plan::NetworkRunner;
pub use plan::{Preview, PreviewedNetwork, together};

use crate::cluster::{self, Cluster};
use crate::cni::{CniCommand, Error, NetConf, Primary, Request};
use crate::delegate::Call;
use crate::networks::PodNetworks;
use crate::state::Store;
use serde_json::Value;

/// One call, with the keys that make this the primary plugin.
pub(super) struct PrimaryCall<'a> {
    pub(super) request: &'a Request,
    pub(super) conf: &'a NetConf,
    pub(super) primary: &'a Primary,
}

/// Serves the call. The value, where there is one, goes to stdout.
///
/// # Errors
/// Why it could not be done, for stdout.
pub(super) fn run(context: &PrimaryCall<'_>) -> Result<Option<Value>, Error> {
    match context.request.command {
        CniCommand::Add => add::run(context).map(Some),
        CniCommand::Check => verbs::run_check(context).map(|()| None),
        CniCommand::Del => verbs::run_del(context).map(|()| None),
        CniCommand::Gc => verbs::run_gc(context).map(|()| None),
        CniCommand::Status => verbs::run_status(context).map(|()| None),
    }
}

impl PrimaryCall<'_> {
    /// The call as delegates get it, but for what differs from one to the next.
    fn call(&self) -> Call {
        Call::forward(self.request, self.conf)
    }

    /// Whom to ask: who the configuration names, else whoever the environment of a pod does.
    fn source(&self) -> Option<Box<dyn Cluster>> {
        cluster::source_or_in_cluster(&self.conf.kubernetes)
    }

    fn store(&self) -> Store {
        Store::durable(&self.primary.cni_dir)
    }

    /// The default network of pods that select no other, and `delegates` after the first: what is the
    /// same for all pods. Without a `cluster` only files and what is written in the configuration are
    /// looked at.
    ///
    /// # Errors
    /// What is named is not there, or wrong.
    fn common_networks(&self, cluster: Option<&dyn Cluster>) -> Result<PodNetworks, Error> {
        let primary = self.primary.without_default_networks();
        lazy_pod::networks(self.conf, &primary, cluster, None, &self.request.ifname)
    }
}
