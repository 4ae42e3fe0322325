//! What helm prints after an installation.

use crate::helm::{notes, table};
use crate::support::golden::compare;
use serde_json::Value;

#[test]
fn the_notes_name_who_calls_the_plugin_what_has_no_effect_and_the_next_step() {
    for (case, values) in table::<(String, Value)>("notes") {
        compare("notes.md", "kubernetes", &case, &notes(&values).replace(env!("CARGO_PKG_VERSION"), "VERSION"));
    }
}
