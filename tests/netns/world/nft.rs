//! The pod's native rules as `nft` shows them.

use super::place::Place;
use serde_json::Value;
use std::process::Command;

pub(super) fn tables(pod: &Place) -> Vec<String> {
    let output = pod.run(Command::new("nft").args(["--stateless", "list", "ruleset", "inet"]), "");
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

/// Returns how many packets matched an exclusion, counted in all chains that exclusions lead to.
pub(super) fn matched_exclusions(pod: &Place) -> u64 {
    let output = pod.run(Command::new("nft").args(["-j", "list", "table", "inet", "detour-exclusions"]), "");
    assert!(output.status.success(), "{output:?}");
    let listing: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rules = listing["nftables"].as_array().expect("an array").iter().filter_map(|object| object.get("rule"));
    let exclusions = rules.filter(|rule| ["DETOUR_DIRECT", "DETOUR_ZONE"].iter().any(|chain| rule["chain"] == *chain));
    let counters = exclusions.flat_map(|rule| rule["expr"].as_array().into_iter().flatten());
    counters.filter_map(|expression| expression["counter"]["packets"].as_u64()).sum()
}

/// Returns the rules of the pod's native tables, each as `TABLE CHAIN` and its handle.
pub(super) fn rules(pod: &Place) -> Vec<(String, u64)> {
    let output = pod.run(Command::new("nft").args(["-j", "list", "ruleset", "inet"]), "");
    assert!(output.status.success(), "{output:?}");
    let listing: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rules = listing["nftables"].as_array().expect("an array").iter().filter_map(|object| object.get("rule"));
    let text = |rule: &Value, key: &str| rule[key].as_str().expect("a name").to_owned();
    let place = |rule: &Value| format!("{} {}", text(rule, "table"), text(rule, "chain"));
    rules.map(|rule| (place(rule), rule["handle"].as_u64().expect("a handle"))).collect()
}
