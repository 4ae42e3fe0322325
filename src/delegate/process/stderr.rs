//! Forwards a child's stderr to the stderr of this process, line by line and up to a size limit. Control characters
//! except tabs are escaped.

use crate::printable::Text;
use std::io::Write;

/// The maximum length of a line in bytes; the rest of the line is omitted.
const MAX_LINE: usize = 8 << 10;
/// The maximum number of bytes that are forwarded; the rest is omitted.
const MAX_TOTAL: usize = 1 << 20;
/// The size of the tail that error messages quote, in bytes.
const MAX_TAIL: usize = 500;

/// Forwards text to `to` and keeps its tail.
#[derive(Debug)]
pub(super) struct Relay<W> {
    to: W,
    line: Vec<u8>,
    forwarded: usize,
    tail: Vec<u8>,
}

impl<W: Write> Relay<W> {
    pub(super) const fn new(to: W) -> Self {
        Self { to, line: Vec::new(), forwarded: 0, tail: Vec::new() }
    }

    /// Forwards the complete lines of the text so far.
    pub(super) fn forward(&mut self, chunk: &[u8]) {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            let room = MAX_LINE.saturating_sub(self.line.len());
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            self.line.extend(&text[..text.len().min(room)]);
            if text.len() < part.len() {
                self.write_line();
            }
        }
    }

    /// Forwards the rest and returns the tail.
    pub(super) fn finish(&mut self) -> String {
        if !self.line.is_empty() {
            self.write_line();
        }
        String::from_utf8_lossy(&self.tail).trim().to_owned()
    }

    fn write_line(&mut self) {
        self.line.push(b'\n');
        self.tail.extend(&self.line);
        self.tail.drain(..self.tail.len().saturating_sub(MAX_TAIL));
        if self.forwarded < MAX_TOTAL {
            let mut text = Text::lines(&String::from_utf8_lossy(&self.line));
            self.forwarded += text.as_str().len();
            if self.forwarded >= MAX_TOTAL {
                text.push("(the rest of the plugin's stderr is omitted)");
                text.end_line();
            }
            // An error means that stderr is closed.
            let _ = self.to.write_all(text.as_str().as_bytes());
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relayed(pieces: &[&[u8]]) -> (String, String) {
        let mut relay = Relay::new(Vec::new());
        pieces.iter().for_each(|piece| relay.forward(piece));
        let tail = relay.finish();
        (String::from_utf8(relay.to).expect("text"), tail)
    }

    #[test]
    fn split_lines_are_joined_and_the_last_line_is_terminated() {
        let (text, tail) = relayed(&[b"a", b"b\nc\n", b"\nd"]);
        assert_eq!((text.as_str(), tail.as_str()), ("ab\nc\n\nd\n", "ab\nc\n\nd"));
        assert_eq!(relayed(&[]), (String::new(), String::new()));
    }

    #[test]
    fn control_characters_are_escaped() {
        let (text, _) = relayed(&[b"a\tb\x1b[2J\r\x07", "\u{202e}\u{9b}\n".as_bytes(), b"\xff\n"]);
        assert_eq!(text, "a\tb\\u{1b}[2J\\r\\u{7}\\u{202e}\\u{9b}\n\u{fffd}\n");
    }

    #[test]
    fn a_long_line_is_truncated_and_the_next_one_is_complete() {
        let (text, tail) = relayed(&[&[b'x'; MAX_LINE], b"y", b"\nnext\n"]);
        assert_eq!(text, format!("{}\nnext\n", "x".repeat(MAX_LINE)));
        assert_eq!(tail.len(), MAX_TAIL - "\n".len());
    }

    #[test]
    fn the_total_is_limited_and_the_tail_is_kept() {
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        let mut pieces = vec![&line[..]; 3 * MAX_TOTAL / line.len()];
        pieces.push(b"why\n");
        let (text, tail) = relayed(&pieces);
        assert!(text.ends_with("is omitted)\n") && text.len() < MAX_TOTAL + 2048, "{}", text.len());
        assert!(tail.ends_with("\nwhy"), "{tail}");
    }
}
