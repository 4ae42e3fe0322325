//! Connects to the runtime's socket, and again after each failure.

use super::{NriHandler, NriStatus};
use std::os::fd::AsFd;
use std::path::Path;

/// Registers with the runtime at `socket`, and calls `handler` for what it reports, until `ended` is readable or its
/// other end is closed (as [`std::io::pipe`] whose writer is dropped). After a failure, it connects again, with a
/// backoff of at most 5 s. `report` gets each change of the status, first the result of the first attempt.
pub fn run(_socket: &Path, _handler: impl NriHandler, report: impl Fn(NriStatus), _ended: impl AsFd) {
    report(NriStatus::Disconnected("not implemented".into()));
}
