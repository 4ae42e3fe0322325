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
mod saved_state;

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

/// Reads a record, and the readable part of an object.
#[cfg(any(test, fuzzing))]
pub(super) fn recover(text: &[u8], fields: &serde_json::Map<String, Value>) {
    use saved_state::SavedState;
    if let Ok(state) = crate::state::format::parse::<SavedState>(text) {
        let text = crate::state::format::print(&state).expect("an object");
        assert_eq!(crate::state::format::parse::<SavedState>(&text).expect("its own text"), state);
    }
    assert_eq!(SavedState::recover(fields), SavedState::recover(fields));
}
