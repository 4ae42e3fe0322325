//! Waits for conditions.

use std::thread;
use std::time::{Duration, Instant};

/// Generous, for a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Waits for a condition.
#[track_caller]
pub(crate) fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(DEADLINE, what, holds);
}

/// The same with this limit.
#[track_caller]
pub(crate) fn until_within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {} s: {what}", limit.as_secs_f32());
        pause();
    }
}

/// Waits before a condition is checked again.
pub(crate) fn pause() {
    thread::park_timeout(Duration::from_millis(5));
}
