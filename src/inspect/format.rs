//! The three forms in which every report can be had.

use super::terminal::{Screen, TextReport};
use crate::cni::{Code, Error};
use crate::printable::{Text, acts};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_saphyr::DoubleQuoted;

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
