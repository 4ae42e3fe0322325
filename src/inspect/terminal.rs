//! Text for a terminal: headings, aligned columns, and colour where it is asked for.

use crate::printable::{Text, line};

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
