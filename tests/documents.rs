//! What the documents say of the code is so.

use detour_cni::cni::Code;
use std::path::Path;

#[test]
fn every_error_code_is_in_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("conf/README.md");
    let text = std::fs::read_to_string(path).expect("readable");
    let (_, table) = text.split_once("## Error codes").expect("a section");
    for code in Code::ALL {
        let row = format!("\n| {} | `{}` |", code.number(), code.name());
        assert!(table.contains(&row), "{code:?} is not in the table");
    }
}
