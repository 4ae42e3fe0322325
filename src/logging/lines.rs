//! How many lines a call may log, and how much of each: what others write down must not fill a disk.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tracing::Level;

/// The most lines of levels info and warn of one call.
const MOST_LINES: usize = 100;
/// So much of a line's message, of all its other values, and of each value of its context is logged, in
/// bytes: together 4 KiB.
pub(super) const MESSAGE: usize = 2500;
pub(super) const OTHERS: usize = 800;
pub(super) const CONTEXT: usize = 120;

/// Counts the lines of one call. Errors are always logged, and so are details at level debug, which the
/// administrator has asked for.
#[derive(Debug, Clone, Default)]
pub struct Lines(Arc<AtomicUsize>);

impl Lines {
    /// Whether a line of this level is still logged.
    pub(super) fn admit(&self, level: Level) -> bool {
        !matches!(level, Level::INFO | Level::WARN) || self.0.fetch_add(1, Relaxed) < MOST_LINES
    }

    /// Says how many lines were left out, where any were; lines after that are counted anew.
    pub fn finish(&self) {
        let more = self.0.swap(0, Relaxed).saturating_sub(MOST_LINES);
        if more > 0 {
            tracing::warn!("{more} more lines of this call are not logged (at most {MOST_LINES} are)");
        }
    }
}

/// Returns `value` as far as it fits into `room` bytes with every escape that it needs.
pub(super) fn cut(value: &str, room: usize) -> Cow<'_, str> {
    /// No byte becomes more than `\u{1b}`.
    const ESCAPED: usize = 6;
    if value.len() <= room / ESCAPED {
        return Cow::Borrowed(value);
    }
    let mut used = 0;
    let end = value.char_indices().find(|(_, c)| {
        used += c.escape_debug().map(char::len_utf8).sum::<usize>();
        used > room
    });
    end.map_or(Cow::Borrowed(value), |(end, _)| Cow::Owned(format!("{}…", &value[..end])))
}
