//! What holds for every error and every printed text.

use crate::cni::{Code, Error};
use crate::printable::is_interpreted;

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
