//! The three forms in which every report can be had.

use super::page::{Page, Sheet};
use crate::cni::{Code, Error};
use serde::Serialize;

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
pub fn render<R: Serialize + Sheet>(report: &R, format: Format) -> Result<String, Error> {
    let failed = |error: &dyn std::fmt::Display| Error::new(Code::Internal, format!("the report has no text: {error}"));
    match format {
        Format::Table { colour } => {
            let mut page = Page::new(colour);
            report.write(&mut page);
            Ok(page.into_text())
        }
        Format::Json => serde_json::to_string_pretty(report).map(|text| text + "\n").map_err(|error| failed(&error)),
        Format::Yaml => serde_saphyr::to_string(report).map_err(|error| failed(&error)),
    }
}
