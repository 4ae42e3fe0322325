//! VERSION: which versions of the protocol are spoken here. Needs neither stdin nor logging.

use crate::cni::version::{NEWEST, SUPPORTED};
use serde_json::{Value, json};

/// SPEC.md, "VERSION"; like the reference library, without looking at the version on stdin.
pub(super) fn answer() -> Value {
    json!({"cniVersion": NEWEST, "supportedVersions": SUPPORTED})
}
