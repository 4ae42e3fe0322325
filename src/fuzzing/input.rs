//! An input as sections of text or as a sequence of choices, and what holds for every error and every printed text that it
//! leads to.

use crate::cni::{Code, Error};
use crate::printable::is_interpreted;
use std::str::Utf8Error;

/// The line that separates the sections of an input.
const SEPARATOR: &[u8] = b"\n====\n";

/// Returns the first `N` sections of an input; missing ones are empty. The last section contains the rest.
pub(crate) fn sections<const N: usize>(input: &[u8]) -> [&[u8]; N] {
    let mut rest = Some(input);
    std::array::from_fn(|index| {
        let whole = rest.take().unwrap_or_default();
        let at = whole.windows(SEPARATOR.len()).position(|window| window == SEPARATOR);
        match at.filter(|_| index + 1 < N) {
            Some(at) => {
                rest = Some(&whole[at + SEPARATOR.len()..]);
                &whole[..at]
            }
            None => whole,
        }
    })
}

/// Like [`sections`], for input of which every section is UTF-8.
pub(crate) fn text_sections<const N: usize>(input: &[u8]) -> Result<[&str; N], Utf8Error> {
    std::str::from_utf8(input)?;
    Ok(sections(input).map(|section| std::str::from_utf8(section).unwrap_or_default()))
}

/// The choices that the bytes of an input make; after the last byte, always the first of the possible ones.
#[derive(Debug)]
pub(crate) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self(input)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next bytes, at most `length`.
    pub(crate) fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Chooses a number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit
    }

    pub(crate) fn number(&mut self) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Chooses one of `all`.
    pub(crate) fn one<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    /// Chooses up to `limit` items.
    pub(crate) fn many<T>(&mut self, limit: usize, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let count = self.below(limit + 1);
        (0..count).map(|_| item(self)).collect()
    }
}

/// The maximum length of a text in an error object, in bytes.
const MAX_ERROR: usize = 4 << 10;

/// Checks an error: it has a message and a code of its own, and its JSON has one bounded line per text.
pub(crate) fn check_error(error: &Error) {
    assert!(!error.msg.is_empty(), "an error without a message: {error:?}");
    assert_ne!(error.code, Code::Internal, "{error}");
    assert!(error.to_string().len() <= 2 * MAX_ERROR + 2, "an error of {} bytes", error.to_string().len());
    let object = error.to_json("1.1.0");
    assert_eq!(object["code"], error.number());
    for key in ["msg", "details"] {
        let text = object[key].as_str().unwrap_or_default();
        assert!(text.len() <= MAX_ERROR && !text.contains(is_interpreted), "{key} of an error: {text:?}");
    }
}

/// Checks text for a terminal: only line breaks, tabs and colors are interpreted.
pub(crate) fn check_printed(text: &str) {
    let found = text.char_indices().find(|(_, c)| is_interpreted(*c) && !matches!(c, '\n' | '\t'));
    assert_eq!(found, None, "printed text contains a character that terminals interpret");
}

/// Checks the warnings about an input of `length` bytes: they are not much longer than the input.
pub(crate) fn check_warnings(warnings: &[String], length: usize) {
    let bytes: usize = warnings.iter().map(String::len).sum();
    assert!(bytes <= 100 * length + 4096, "{bytes} bytes of warnings about {length} bytes");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_end_at_separators_and_the_last_one_contains_the_rest() {
        assert_eq!(sections(b"a\n====\nb\n====\nc"), [&b"a"[..], b"b\n====\nc"]);
        assert_eq!(sections(b"a"), [&b"a"[..], b"", b""]);
        assert_eq!(text_sections(b"\n====\nb"), Ok(["", "b"]));
        assert!(text_sections::<1>(b"\xff").is_err());
    }
}
