//! Reports about all nodes, merged from the reports of their agents. An agent's output is input of another machine: it
//! is parsed into these types, and limited.

mod audit;
mod check;

pub use audit::{NodesAudit, PodOfNode};
pub use check::{FailedCheck, NodeCheck, NodeResult, NodesCheck, PolicyCounts};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The start of an output that is not a report, in a message.
const MAX_SHOWN: usize = 300;
/// The limit for each text of an agent's report, in bytes.
const MAX_TEXT: usize = 4 << 10;
/// The limit for each list of an agent's report: a node has at most 256 pods by default (kubelet, `maxPods`: 110).
const MAX_ITEMS: usize = 2000;

/// What a command prints in place of its report.
#[derive(Deserialize)]
struct FailedCommand {
    #[serde(deserialize_with = "short")]
    error: String,
}

/// Parses an agent's report.
fn parse<T: DeserializeOwned>(stdout: &[u8], stderr: &[u8]) -> Result<T, String> {
    serde_json::from_slice(stdout).map_err(|error| {
        if let Ok(FailedCommand { error }) = serde_json::from_slice(stdout) {
            return error;
        }
        let text = [stderr, stdout].map(String::from_utf8_lossy).concat();
        let shown = crate::printable::cut(text.trim(), MAX_SHOWN).into_owned();
        format!("expected a report, got {shown:?} ({error})")
    })
}

/// Deserializes a text, cut at [`MAX_TEXT`].
fn short<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text: Option<String> = Option::deserialize(deserializer)?;
    Ok(crate::printable::cut(&text.unwrap_or_default(), MAX_TEXT).into_owned())
}
