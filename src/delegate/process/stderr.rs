//! What a child prints to stderr goes to ours, line by line and within bounds. Characters that terminals act
//! on are escaped, except tabs.

use crate::printable::Text;
use std::io::Write;

/// How long a line may be, in bytes; the rest of it is left out.
const LINE_LIMIT: usize = 8 << 10;
/// How much is passed on, in bytes; the rest is left out.
const TOTAL_LIMIT: usize = 1 << 20;
/// How much of the end an error's text can hold, in bytes.
const LAST_WORDS: usize = 500;

/// Passes text on to `to` and keeps the end of it.
#[derive(Debug)]
pub(super) struct Relay<W> {
    to: W,
    line: Vec<u8>,
    passed_on: usize,
    end: Vec<u8>,
}

impl<W: Write> Relay<W> {
    pub(super) const fn new(to: W) -> Self {
        Self { to, line: Vec::new(), passed_on: 0, end: Vec::new() }
    }

    /// Passes on the lines that are complete.
    pub(super) fn pass_on(&mut self, piece: &[u8]) {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            let room = LINE_LIMIT.saturating_sub(self.line.len());
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            self.line.extend(&text[..text.len().min(room)]);
            if text.len() < part.len() {
                self.write_line();
            }
        }
    }

    /// Passes on the rest, and gives the end of it all for a message.
    pub(super) fn finish(&mut self) -> String {
        if !self.line.is_empty() {
            self.write_line();
        }
        String::from_utf8_lossy(&self.end).trim().to_owned()
    }

    fn write_line(&mut self) {
        self.line.push(b'\n');
        self.end.extend(&self.line);
        self.end.drain(..self.end.len().saturating_sub(LAST_WORDS));
        if self.passed_on < TOTAL_LIMIT {
            let mut text = Text::lines(&String::from_utf8_lossy(&self.line));
            self.passed_on += text.as_str().len();
            if self.passed_on >= TOTAL_LIMIT {
                text.push("(the rest of the plugin's stderr is left out)");
                text.end_line();
            }
            // Where stderr is closed there is nobody to tell.
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
        pieces.iter().for_each(|piece| relay.pass_on(piece));
        let last_words = relay.finish();
        (String::from_utf8(relay.to).expect("text"), last_words)
    }

    #[test]
    fn lines_stay_whole_and_the_last_one_gets_its_end() {
        let (text, last_words) = relayed(&[b"a", b"b\nc\n", b"\nd"]);
        assert_eq!((text.as_str(), last_words.as_str()), ("ab\nc\n\nd\n", "ab\nc\n\nd"));
        assert_eq!(relayed(&[]), (String::new(), String::new()));
    }

    #[test]
    fn terminals_do_not_act_on_it() {
        let (text, _) = relayed(&[b"a\tb\x1b[2J\r\x07", "\u{202e}\u{9b}\n".as_bytes(), b"\xff\n"]);
        assert_eq!(text, "a\tb\\u{1b}[2J\\r\\u{7}\\u{202e}\\u{9b}\n\u{fffd}\n");
    }

    #[test]
    fn a_long_line_is_cut_and_the_next_one_is_whole() {
        let (text, last_words) = relayed(&[&[b'x'; LINE_LIMIT], b"y", b"\nnext\n"]);
        assert_eq!(text, format!("{}\nnext\n", "x".repeat(LINE_LIMIT)));
        assert_eq!(last_words.len(), LAST_WORDS - "\n".len());
    }

    #[test]
    fn the_whole_is_bounded_and_the_end_is_known() {
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        let mut pieces = vec![&line[..]; 3 * TOTAL_LIMIT / line.len()];
        pieces.push(b"why\n");
        let (text, last_words) = relayed(&pieces);
        assert!(text.ends_with("is left out)\n") && text.len() < TOTAL_LIMIT + 2048, "{}", text.len());
        assert!(last_words.ends_with("\nwhy"), "{last_words}");
    }
}
