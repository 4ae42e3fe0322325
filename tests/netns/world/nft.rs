//! The pod's native rules through the real tool.

use super::place::Place;
use std::process::Command;

pub(super) fn tables(pod: &Place) -> Vec<String> {
    let output = pod.run(Command::new("nft").args(["--stateless", "list", "ruleset"]), "");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut tables: Vec<String> =
        text.split("table inet ").skip(1).map(|table| format!("table inet {table}")).collect();
    tables.sort();
    tables
}

pub(super) fn load(pod: &Place, text: &str) {
    let output = pod.run(Command::new("nft").args(["-f", "-"]), text);
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
}
