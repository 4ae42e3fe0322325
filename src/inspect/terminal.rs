//! The output formats of all reports: tables with optional color, JSON and YAML.

use crate::cni::{Code, Error};
use crate::printable::{Text, is_interpreted, line};
use clap::ValueEnum;
use serde::Serialize;
use serde_saphyr::ser_options;
use std::fmt::Display;

/// The meaning of a piece of text, which decides its color: the parameter of Select Graphic Rendition (ECMA-48, 8.3.117).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Ordinary text.
    Plain = 0,
    /// A heading or the most important text.
    Strong = 1,
    /// Secondary text.
    Faint = 2,
    /// A negative result.
    Bad = 31,
    /// A positive result.
    Good = 32,
    /// A result that needs attention.
    Notable = 33,
}

/// A cell of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    /// Escaped by [`line()`].
    text: String,
    tone: Tone,
}

impl Cell {
    /// Returns a cell with plain text.
    pub fn of(text: impl AsRef<str>) -> Self {
        Self { text: line(text.as_ref()).into_owned(), tone: Tone::Plain }
    }

    /// Returns the cell with another tone.
    #[must_use]
    pub fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A report that can be printed as a table.
pub trait TextReport {
    /// Writes the report.
    fn write(&self, screen: &mut Screen);
}

/// The text of a report in table format.
#[derive(Debug)]
pub struct Screen {
    color: bool,
    width: usize,
    text: Text,
}

impl Screen {
    /// Returns an empty text for tables of this width, in characters.
    #[must_use]
    pub fn new(color: bool, width: usize) -> Self {
        Self { color, width, text: Text::default() }
    }

    /// Returns an empty text of any width, without color.
    #[must_use]
    pub fn plain() -> Self {
        Self::new(false, usize::MAX)
    }

    /// Returns the text.
    #[must_use]
    pub fn into_text(self) -> Text {
        self.text
    }

    /// Writes a heading, after an empty line unless it is first.
    pub fn heading(&mut self, text: &str) {
        if !self.text.as_str().is_empty() {
            self.text.end_line();
        }
        self.line(&[Cell::of(text).tone(Tone::Strong)]);
    }

    /// Writes a table below a heading; nothing without rows.
    pub fn section(&mut self, title: &str, rows: impl IntoIterator<Item = Vec<Cell>>) {
        let rows: Vec<_> = rows.into_iter().collect();
        if !rows.is_empty() {
            self.heading(title);
            self.table(&rows);
        }
    }

    /// Writes a line of cells, separated by spaces.
    pub fn line(&mut self, cells: &[Cell]) {
        for (column, cell) in cells.iter().enumerate() {
            self.text.push(if column == 0 { "" } else { " " });
            self.paint(cell, 0);
        }
        self.text.end_line();
    }

    /// Writes a line of a label and a text.
    pub fn labeled(&mut self, label: impl AsRef<str>, text: impl AsRef<str>, tone: Tone) {
        self.line(&[Cell::of(label), Cell::of(text).tone(tone)]);
    }

    /// Writes why an ADD of a pod fails, if it does.
    pub(super) fn failure(&mut self, cause: Option<&str>) {
        if let Some(cause) = cause {
            self.line(&[Cell::of("an ADD fails:").tone(Tone::Bad), Cell::of(cause)]);
        }
    }

    /// Writes a line of one cell.
    pub fn text(&mut self, text: impl AsRef<str>, tone: Tone) {
        self.line(&[Cell::of(text).tone(tone)]);
    }

    /// Writes rows with aligned columns below the titles of the columns.
    pub fn titled_table<const N: usize>(&mut self, titles: [&str; N], rows: impl Iterator<Item = Vec<Cell>>) {
        let titles = titles.map(|title| Cell::of(title).tone(Tone::Faint)).to_vec();
        self.table(&[titles].into_iter().chain(rows).collect::<Vec<_>>());
    }

    /// Adds indented rows in columns that are as wide as their widest cell. If they are wider than the terminal, the widest
    /// columns are narrower, and their cells have several lines. A word is never broken.
    pub fn table(&mut self, rows: &[Vec<Cell>]) {
        let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
        let cells = |column: usize| rows.iter().filter_map(move |row| row.get(column));
        let widest = |column: usize| cells(column).map(|cell| cell.text.chars().count()).max().unwrap_or_default();
        let words =
            |column: usize| cells(column).flat_map(|cell| cell.text.split(' ')).map(|word| word.chars().count());
        let mut widths: Vec<usize> = (0..columns).map(widest).collect();
        let least: Vec<usize> = (0..columns).map(|column| words(column).max().unwrap_or_default()).collect();
        let mut excess = widths.iter().map(|width| width + 2).sum::<usize>().saturating_sub(self.width);
        while excess > 0 {
            let narrower = (0..columns).filter(|column| widths[*column] > least[*column]);
            let Some(column) = narrower.max_by_key(|column| widths[*column]) else { break };
            widths[column] -= 1;
            excess -= 1;
        }
        for row in rows {
            let cells: Vec<Vec<String>> =
                row.iter().zip(&widths).map(|(cell, width)| wrapped(&cell.text, *width)).collect();
            for line in 0..cells.iter().map(Vec::len).max().unwrap_or_default() {
                for ((parts, cell), width) in cells.iter().zip(row).zip(&widths) {
                    self.text.push("  ");
                    let text = parts.get(line).cloned().unwrap_or_default();
                    self.paint(&Cell { text, tone: cell.tone }, *width);
                }
                self.text.end_line();
            }
        }
    }

    fn paint(&mut self, Cell { text, tone }: &Cell, width: usize) {
        match self.color && !text.is_empty() && *tone != Tone::Plain {
            true => self.text.push_colored(*tone as u8, text),
            false => self.text.push(text),
        }
        self.text.push(&" ".repeat(width.saturating_sub(text.chars().count())));
    }
}

/// Returns the lines of a text in a column: words as long as they fit, at least one.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
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

/// From this number of items on, [`cut_list`] shows only the first ones.
const MAX_ITEMS: usize = 12;
const SHOWN_ITEMS: usize = 3;

/// Returns a list of items separated by commas; if there are many, only the first ones and the number.
pub(super) fn cut_list(text: &str) -> String {
    let items: Vec<&str> = text.split(", ").collect();
    match items.len() > MAX_ITEMS {
        true => format!("{}, … ({} in all: --all)", items[..SHOWN_ITEMS].join(", "), grouped(items.len() as u64)),
        false => text.to_owned(),
    }
}

/// Returns a number with a comma between groups of three digits.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let comma = |(index, digit): (usize, char)| {
        let is_group = index > 0 && (digits.len() - index).is_multiple_of(3);
        is_group.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(comma).collect()
}

/// Joins items by commas.
pub(super) fn joined<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns a number of things, `1 pod` or `2 pods`.
pub(super) fn counted<N: Display + PartialEq + From<u8>>(count: N, thing: &str) -> String {
    if count == N::from(1) { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

/// Joins the first items, and counts the others: `a; b; and 3 more`.
pub(super) fn first_of(items: impl IntoIterator<Item = String>, limit: usize, separator: &str) -> String {
    let mut items: Vec<String> = items.into_iter().collect();
    let more = items.len().saturating_sub(limit);
    items.truncate(limit);
    items.extend((more > 0).then(|| format!("and {more} more")));
    items.join(separator)
}

/// An output format, a value of `-o`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table
    Table,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// Renders a report, with a line break at its end; a table on `screen`.
///
/// # Errors
/// A value can't be serialized, which is a bug.
pub fn render<R: Serialize + TextReport>(report: &R, format: Format, screen: Screen) -> Result<Text, Error> {
    let failed = |error: &dyn Display| Error::new(Code::Internal, format!("can't render the report: {error}"));
    let json = || serde_json::to_string_pretty(report).map(|text| text + "\n").map_err(|error| failed(&error));
    match format {
        Format::Table => {
            let mut screen = screen;
            report.write(&mut screen);
            Ok(screen.into_text())
        }
        Format::Json => Ok(Text::json(&json()?)),
        Format::Yaml => {
            let value = serde_json::to_value(report).map_err(|error| failed(&error))?;
            let options = ser_options! { prefer_block_scalars: false };
            let text = serde_saphyr::to_string_with_options(&value, options).map_err(|error| failed(&error))?;
            // YAML can escape a character only in double quotes. JSON, which is YAML too, has no other strings.
            let must_escape = text.contains(|c| c != '\n' && is_interpreted(c));
            Ok(Text::yaml(&if must_escape { json()? } else { text }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn rows() -> Vec<Vec<Cell>> {
        let row = |a: &str, tone| vec![Cell::of(a).tone(tone), Cell::of("x"), Cell::of("")];
        vec![row("é", Tone::Good), row("long", Tone::Plain)]
    }

    #[test]
    fn columns_are_aligned_by_characters_without_trailing_spaces() {
        let mut screen = Screen::plain();
        screen.heading("h");
        screen.table(&rows());
        assert_eq!(screen.into_text().as_str(), "h\n  é     x\n  long  x\n");
    }

    #[test]
    fn a_table_fits_the_width_and_keeps_words_whole() {
        let row = |a: &str, b: &str| vec![Cell::of(a), Cell::of(b)];
        let mut screen = Screen::new(false, 24);
        screen.table(&[row("first", "some words that are long"), row("b", "incomprehensibilities x")]);
        let text = screen.into_text();
        let expected = "  first  some words that are\n         long\n  b      incomprehensibilities\n         x\n";
        assert_eq!(text.as_str(), expected);
    }

    #[test]
    fn long_lists_are_cut_and_counted() {
        let list = |count: u32| joined(2000..2000 + count);
        assert_eq!(cut_list(&list(12)), list(12));
        assert_eq!(cut_list(&list(1500)), "2000, 2001, 2002, … (1,500 in all: --all)");
        assert_eq!([grouped(0), grouped(999), grouped(1_234_567)], ["0", "999", "1,234,567"]);
    }

    #[test]
    fn color_does_not_change_the_alignment() {
        let mut screen = Screen::new(true, usize::MAX);
        screen.table(&rows());
        assert_eq!(screen.into_text().as_str(), "  \u{1b}[32mé\u{1b}[0m     x\n  long  x\n");
    }

    #[derive(Serialize)]
    struct Report(Value);

    impl TextReport for Report {
        fn write(&self, screen: &mut Screen) {
            screen.line(&[Cell::of(self.0.to_string())]);
        }
    }

    #[test]
    fn all_formats_escape_control_characters_and_preserve_values() {
        let bad = "x\u{1b}[2J\u{7}\n\u{85}\u{9b}\u{202e}\u{200b}\u{2028}\u{feff}\u{e0041}\\\u{202e}'\": #";
        let hostile = json!({"plain": "a: b", "list": [bad, {"deep": format!("{bad}\n")}], "n": [1, null, true]});
        let lines = json!({"lines": "a\nb: c\n", "long": "word ".repeat(40)});
        for (report, format) in [
            (&hostile, Format::Table),
            (&hostile, Format::Json),
            (&hostile, Format::Yaml),
            (&lines, Format::Json),
            (&lines, Format::Yaml),
        ] {
            let text = render(&Report(report.clone()), format, Screen::plain()).expect("text");
            assert!(!text.as_str().chars().any(|c| is_interpreted(c) && c != '\n'), "{format:?}: {text}");
            assert!(!text.as_str().contains("\nb: c"), "{format:?}: {text}");
            let read: Option<Value> = match format {
                Format::Table => None,
                Format::Json => serde_json::from_str(text.as_str()).ok(),
                Format::Yaml => serde_saphyr::from_str(text.as_str()).ok(),
            };
            assert!(matches!(format, Format::Table) || read.as_ref() == Some(report), "{format:?}: {text}");
        }
    }
}
