//! The configuration of the OCI hook, which CRI-O reads from its directories `hooks.d` (oci-hooks(5)).

use crate::host_path::HostPath;
use crate::plugin::hook::HOOK_PROGRAM;
use serde_json::{Value, json};

/// The name of the file. Runtimes run hooks in the order of these names.
const FILE: &str = "90-detour.json";
/// The timeout of the hook in seconds. When it expires, the runtime does not start the container.
const TIMEOUT: u32 = 10;

/// Returns path and text of the hook's configuration in the directory `directory`, and the path of its program in
/// `bin_dir`.
#[must_use]
pub fn configuration(directory: &HostPath, bin_dir: &HostPath) -> (HostPath, String, HostPath) {
    let program = bin_dir.join(HOOK_PROGRAM);
    let text = json!({
        "version": "1.0.0",
        "hook": {"path": program, "args": [HOOK_PROGRAM], "timeout": TIMEOUT},
        // Conditions match only the pod's annotations, but its namespace and the node can exclude containers, too.
        "when": {"always": true},
        "stages": ["createRuntime", "poststop"],
    });
    (directory.join(FILE), format!("{text:#}\n"), program)
}

/// Returns the program that a hook's configuration runs; `None` if the text is not a hook's configuration.
pub(super) fn program(text: &str) -> Option<HostPath> {
    let configuration: Value = serde_json::from_str(text).ok()?;
    HostPath::new(configuration["hook"]["path"].as_str()?)
}
