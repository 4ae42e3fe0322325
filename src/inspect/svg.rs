//! The few shapes that a picture is made of, as SVG text. Colours are classes of `picture.css`.

use crate::printable::xml;
use std::fmt::Write as _;

/// What is being drawn; in pixels, from the upper left corner.
#[derive(Debug, Default)]
pub(super) struct Drawing {
    body: String,
}

/// A rectangle's place and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area {
    pub x: i32,
    pub y: i32,
    pub width: i32,
    pub height: i32,
}

impl Area {
    pub(super) const fn right(self) -> i32 {
        self.x + self.width
    }

    pub(super) const fn middle(self) -> i32 {
        self.y + self.height / 2
    }
}

impl Drawing {
    /// A box with round corners.
    pub(super) fn area(&mut self, class: &str, Area { x, y, width, height }: Area, radius: i32) {
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>"#
        );
    }

    /// A line of text by the beginning, or the middle, of its base line.
    pub(super) fn text(&mut self, class: &str, x: i32, y: i32, text: &str) {
        let _ = writeln!(self.body, r#"<text class="{class}" x="{x}" y="{y}">{}</text>"#, xml(text));
    }

    /// The same, shortened to `width` characters; the whole is shown where the pointer rests on it.
    pub(super) fn short_text(&mut self, class: &str, (x, y): (i32, i32), text: &str, width: usize) {
        self.text_of(class, (x, y), &shortened(text, width), text);
    }

    /// A line that stands for `whole`.
    pub(super) fn text_of(&mut self, class: &str, (x, y): (i32, i32), line: &str, whole: &str) {
        if line == whole {
            return self.text(class, x, y, line);
        }
        let (line, whole) = (xml(line), xml(whole));
        let _ = writeln!(self.body, r#"<text class="{class}" x="{x}" y="{y}">{line}<title>{whole}</title></text>"#);
    }

    /// An arrow in one of the four colours: `out`, `dns`, `in`, `free`.
    pub(super) fn arrow(&mut self, colour: &str, (x1, y1): (i32, i32), (x2, y2): (i32, i32)) {
        let bend = (x2 - x1) / 2;
        let (c1, c2) = (x1 + bend, x2 - bend);
        let _ = writeln!(
            self.body,
            r#"<path class="way {colour}" d="M{x1} {y1}C{c1} {y1} {c2} {y2} {x2} {y2}" marker-end="url(#to-{colour})"/>"#
        );
    }

    /// What an arrow carries, upon it; around its middle, in at most `width` characters.
    pub(super) fn tag(&mut self, (x, y): (i32, i32), text: &str, width: usize) {
        let shown = shortened(text, width);
        // Characters of a proportional font differ; this is about their mean width at 12 px.
        let width = 7 * i32::try_from(shown.chars().count()).unwrap_or_default() + 16;
        self.area("tag", Area { x: x - width / 2, y: y - 10, width, height: 20 }, 10);
        self.text_of("tagged mid", (x, y + 4), &shown, text);
    }

    /// A port as a pill around its middle.
    pub(super) fn port(&mut self, colour: &str, x: i32, y: i32, port: u16) {
        self.area(&format!("f-{colour}"), Area { x: x - 27, y: y - 11, width: 54, height: 22 }, 11);
        self.text("port", x, y + 4, &port.to_string());
    }

    /// The whole document.
    pub(super) fn finish(self, title: &str, width: i32, height: i32) -> String {
        let mut markers = String::new();
        for colour in ["out", "dns", "in", "free"] {
            let _ = writeln!(
                markers,
                r#"<marker id="to-{colour}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto-start-reverse"><path class="f-{colour}" d="M0 1L10 5L0 9z"/></marker>"#
            );
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\">\n<title>{}</title>\n<style>\n{}</style>\n<defs>\n{markers}</defs>\n\
             <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>\n{}</svg>\n",
            xml(title),
            include_str!("picture.css"),
            self.body
        )
    }
}

/// `text` in lines of at most `width` characters, broken at blanks.
pub(super) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// `text`, its end left out where it is longer than `width` characters.
fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_and_shortened() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!((shortened("abcd", 4).as_str(), shortened("abcde", 4).as_str()), ("abcd", "abc…"));
    }
}
