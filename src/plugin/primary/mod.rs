//! The primary plugin: the plugin that the runtime calls for the whole network of a pod. It runs networks as
//! [`crate::delegate`]s, applies the redirection rules in this process, and merges all results into one.

mod add;
mod call;
mod commands;
mod invocation;
mod lazy_pod;
mod mesh;
mod networks;
mod optional_definitions;
mod plan;
mod readiness;
pub(crate) mod saved_state;

pub(super) use call::PrimaryCall;
pub use mesh::{InProcessAttachment, united};
pub use plan::{NetworkRunner, Preview, PreviewedNetwork, preview};

use crate::cni::{CniCommand, Error};
use serde_json::Value;

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
