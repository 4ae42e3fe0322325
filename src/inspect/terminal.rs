//! Text for a terminal: headings, aligned columns, and colour where it is asked for.
//!
//! The three forms in which every report can be had.

use crate::cni::{Code, Error};
use crate::printable::{Text, acts, line};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_saphyr::DoubleQuoted;

/// What a piece of text is, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Text.
    Plain,
    /// A heading, or the one thing to look at.
    Strong,
    /// As it should be.
    Good,
    /// To be looked at.
    Notable,
    /// Wrong.
    Bad,
    /// Of little weight.
    Faint,
}

impl Tone {
    /// Select Graphic Rendition (ECMA-48, 8.3.117).
    const fn code(self) -> Option<u8> {
        match self {
            Self::Plain => None,
            Self::Strong => Some(1),
            Self::Good => Some(32),
            Self::Notable => Some(33),
            Self::Bad => Some(31),
            Self::Faint => Some(2),
        }
    }
}

/// One cell of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    /// What it says, as [`line`] writes it.
    text: String,
    tone: Tone,
}

impl Cell {
    /// A cell of text.
    pub fn of(text: impl AsRef<str>) -> Self {
        Self { text: line(text.as_ref()).into_owned(), tone: Tone::Plain }
    }

    /// In this tone.
    #[must_use]
    pub fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A report that people can read.
pub trait TextReport {
    /// Writes it.
    fn write(&self, page: &mut Screen);
}

/// A page that is being written.
#[derive(Debug)]
pub struct Screen {
    colour: bool,
    text: Text,
}

impl Screen {
    /// An empty page.
    #[must_use]
    pub fn new(colour: bool) -> Self {
        Self { colour, text: Text::default() }
    }

    /// What is written on it.
    #[must_use]
    pub fn into_text(self) -> Text {
        self.text
    }

    /// A heading, with an empty line before it.
    pub fn heading(&mut self, text: &str) {
        if !self.text.as_str().is_empty() {
            self.text.end_line();
        }
        self.line(&[Cell::of(text).tone(Tone::Strong)]);
    }

    /// A line of cells, a blank between them.
    pub fn line(&mut self, cells: &[Cell]) {
        for (column, cell) in cells.iter().enumerate() {
            self.text.push(if column == 0 { "" } else { " " });
            self.paint(cell, 0);
        }
        self.text.end_line();
    }

    /// Rows of cells, each column as wide as its widest cell; indented.
    pub fn table(&mut self, rows: &[Vec<Cell>]) {
        let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.text.chars().count()).max();
        let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
        for row in rows {
            for (cell, width) in row.iter().zip(&widths) {
                self.text.push("  ");
                self.paint(cell, *width);
            }
            self.text.end_line();
        }
    }

    fn paint(&mut self, Cell { text, tone }: &Cell, width: usize) {
        match tone.code().filter(|_| self.colour && !text.is_empty()) {
            Some(code) => self.text.push_colored(code, text),
            None => self.text.push(text),
        }
        self.text.push(&" ".repeat(width.saturating_sub(text.chars().count())));
    }
}

/// A form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Table {
        /// Whether it may be coloured.
        colour: bool,
    },
    /// For programs.
    Json,
    /// For programs, and people.
    Yaml,
}

/// A report in that form, a line break at its end.
///
/// # Errors
/// A value in it has no such form, which is a fault of this program.
pub fn render<R: Serialize + TextReport>(report: &R, format: Format) -> Result<Text, Error> {
    let failed = |error: &dyn std::fmt::Display| Error::new(Code::Internal, format!("the report has no text: {error}"));
    match format {
        Format::Table { colour } => {
            let mut page = Screen::new(colour);
            report.write(&mut page);
            Ok(page.into_text())
        }
        Format::Json => {
            serde_json::to_string_pretty(report).map(|text| Text::json(&(text + "\n"))).map_err(|error| failed(&error))
        }
        Format::Yaml => {
            let value = serde_json::to_value(report).map_err(|error| failed(&error))?;
            serde_saphyr::to_string(&Quoted(&value)).map(|text| Text::yaml(&text)).map_err(|error| failed(&error))
        }
    }
}

/// A value whose strings are in double quotes where YAML must escape a character.
struct Quoted<'a>(&'a Value);

impl Serialize for Quoted<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::String(text) if text.contains(acts) => DoubleQuoted(text).serialize(serializer),
            Value::Array(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                items.iter().try_for_each(|item| list.serialize_element(&Quoted(item)))?;
                list.end()
            }
            Value::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                members.iter().try_for_each(|(key, value)| map.serialize_entry(key, &Quoted(value)))?;
                map.end()
            }
            other => other.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::terminal::Cell;
    use serde_json::json;

    fn rows() -> Vec<Vec<Cell>> {
        let row = |a: &str, tone| vec![Cell::of(a).tone(tone), Cell::of("x"), Cell::of("")];
        vec![row("é", Tone::Good), row("long", Tone::Plain)]
    }

    #[test]
    fn columns_are_aligned_by_characters_and_nothing_trails() {
        let mut page = Screen::new(false);
        page.heading("h");
        page.table(&rows());
        assert_eq!(page.into_text().as_str(), "h\n  é     x\n  long  x\n");
    }

    #[test]
    fn colour_takes_no_room() {
        let mut page = Screen::new(true);
        page.table(&rows());
        assert_eq!(page.into_text().as_str(), "  \u{1b}[32mé\u{1b}[0m     x\n  long  x\n");
    }

    #[derive(Serialize)]
    struct Report(Value);

    impl TextReport for Report {
        fn write(&self, page: &mut Screen) {
            page.line(&[Cell::of(self.0.to_string())]);
        }
    }

    #[test]
    fn no_form_has_a_character_that_acts_and_programs_get_the_value() {
        let bad = "x\u{1b}[2J\u{7}\n\u{85}\u{9b}\u{202e}\u{200b}\u{2028}\u{feff}\u{e0041}\\\u{202e}'\": #";
        let report =
            Report(json!({"plain": "a: b", "list": [bad, {"deep": format!("{bad}\n")}], "n": [1, null, true]}));
        for format in [Format::Table { colour: false }, Format::Json, Format::Yaml] {
            let text = render(&report, format).expect("text");
            assert!(!text.as_str().chars().any(|c| acts(c) && c != '\n'), "{format:?}: {text}");
            let read: Option<Value> = match format {
                Format::Table { .. } => None,
                Format::Json => serde_json::from_str(text.as_str()).ok(),
                Format::Yaml => serde_saphyr::from_str(text.as_str()).ok(),
            };
            assert!(matches!(format, Format::Table { .. }) || read.as_ref() == Some(&report.0), "{format:?}: {text}");
        }
    }
}
