//! Text for a terminal: headings, aligned columns, and colour where it is asked for.

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
    const fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Strong => "1",
            Self::Good => "32",
            Self::Notable => "33",
            Self::Bad => "31",
            Self::Faint => "2",
        }
    }
}

/// One cell of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    /// What it says.
    pub text: String,
    /// What it is.
    pub tone: Tone,
}

impl Cell {
    /// A cell of text.
    pub fn of(text: impl Into<String>) -> Self {
        Self { text: text.into(), tone: Tone::Plain }
    }

    /// In this tone.
    #[must_use]
    pub fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A report that people can read.
pub trait Sheet {
    /// Writes it.
    fn write(&self, page: &mut Page);
}

/// A page that is being written.
#[derive(Debug)]
pub struct Page {
    colour: bool,
    text: String,
}

impl Page {
    /// An empty page.
    #[must_use]
    pub const fn new(colour: bool) -> Self {
        Self { colour, text: String::new() }
    }

    /// What is written on it.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }

    /// A heading, with an empty line before it.
    pub fn heading(&mut self, text: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.line(&[Cell::of(text).tone(Tone::Strong)]);
    }

    /// A line of cells, a blank between them.
    pub fn line(&mut self, cells: &[Cell]) {
        let painted: Vec<String> = cells.iter().map(|cell| self.paint(cell, 0)).collect();
        self.text += painted.join(" ").trim_end();
        self.text.push('\n');
    }

    /// Rows of cells, each column as wide as its widest cell; indented.
    pub fn table(&mut self, rows: &[Vec<Cell>]) {
        let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.text.chars().count()).max();
        for row in rows {
            let last = row.len().saturating_sub(1);
            let painted = row.iter().enumerate().map(|(column, cell)| {
                let width = if column == last { 0 } else { width(column).unwrap_or_default() };
                self.paint(cell, width)
            });
            let line = painted.collect::<Vec<_>>().join("  ");
            self.text += "  ";
            self.text += line.trim_end();
            self.text.push('\n');
        }
    }

    fn paint(&self, cell: &Cell, width: usize) -> String {
        let padding = " ".repeat(width.saturating_sub(cell.text.chars().count()));
        let code = cell.tone.code();
        if !self.colour || code.is_empty() || cell.text.is_empty() {
            return format!("{}{padding}", cell.text);
        }
        format!("\u{1b}[{code}m{}\u{1b}[0m{padding}", cell.text)
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
        let mut page = Page::new(false);
        page.heading("h");
        page.table(&rows());
        assert_eq!(page.into_text(), "h\n  é     x\n  long  x\n");
    }

    #[test]
    fn colour_takes_no_room() {
        let mut page = Page::new(true);
        page.table(&rows());
        assert_eq!(page.into_text(), "  \u{1b}[32mé\u{1b}[0m     x\n  long  x\n");
    }
}
