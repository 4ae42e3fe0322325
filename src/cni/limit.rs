//! Limits on what others than the node's administrator write down, and how much of it messages quote.

use super::{Code, Error};

/// The most items of a list: of an annotation, of `args.cni`, or of a key of the configuration.
pub const LIST_ITEMS: usize = 2000;
/// The longest text of a list, in bytes.
pub(super) const LIST_BYTES: usize = 64 * 1024;
/// So much of a value is quoted, in characters.
const QUOTED: usize = 80;

/// Refuses more than `limit` of what is at `place`.
///
/// # Errors
/// [`Code::InvalidConfig`] with the place, the limit and the number.
pub fn at_most(limit: usize, what: &str, place: &str, got: usize) -> Result<(), Error> {
    if got <= limit {
        return Ok(());
    }
    Err(Error::new(Code::InvalidConfig, format!("{place}: expected at most {limit} {what}, got {got}")))
}

/// Returns the start of `text`, up to as much as messages quote of a value.
#[must_use]
pub fn excerpt(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_over_the_limit_is_refused_with_both_numbers() {
        assert_eq!(at_most(2, "items", "k", 2), Ok(()));
        let error = at_most(2, "items", "k", 3).expect_err("too many");
        assert_eq!(error, Error::new(Code::InvalidConfig, "k: expected at most 2 items, got 3"));
    }

    #[test]
    fn quotes_are_cut_between_characters() {
        assert_eq!(excerpt("short"), "short");
        let long = "ä".repeat(100_000);
        assert_eq!(excerpt(&long), "ä".repeat(QUOTED) + "…");
    }
}
