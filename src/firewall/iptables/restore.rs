//! The rules of a redirection as input for `iptables-restore` and `ip6tables-restore`.

use crate::firewall::rule::{Family, Hook, Rule, Ruleset, Table};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Returns the rules as text that `iptables-restore` and `ip6tables-restore` both accept.
///
/// A rule for only one of them starts with `-4` or `-6`, and the other tool skips it (iptables(8)). A rule for both is
/// listed once.
#[must_use]
pub fn restore_text(ruleset: &Ruleset) -> String {
    let tables: BTreeSet<Table> = ruleset.tables.keys().map(|(_, table)| *table).collect();
    let mut text = String::new();
    for table in tables {
        let mut chains: Vec<(String, bool)> = Vec::new();
        let mut add = |name: &str, built_in| {
            if !chains.iter().any(|(known, _)| known == name) {
                chains.push((name.to_owned(), built_in));
            }
        };
        let both = || Family::ALL.into_iter().filter_map(|family| ruleset.tables.get(&(family, table)));
        both().for_each(|rules| rules.hooks.keys().for_each(|hook| add(hook.chain(), true)));
        both().for_each(|rules| rules.chains.iter().for_each(|(name, _)| add(name, false)));
        let _ = writeln!(text, "*{}", table.name());
        for (name, built_in) in &chains {
            let _ = writeln!(text, ":{name} {} [0:0]", if *built_in { "ACCEPT" } else { "-" });
        }
        for (name, _) in &chains {
            let rules = |family| chain_rules(ruleset, family, table, name);
            chain_text(&mut text, name, rules(Family::Ip), rules(Family::Ip6));
        }
        text += "COMMIT\n";
    }
    text
}

fn chain_rules<'a>(ruleset: &'a Ruleset, family: Family, table: Table, chain: &str) -> &'a [Rule] {
    let Some(rules) = ruleset.tables.get(&(family, table)) else { return &[] };
    let hook = Hook::ALL.into_iter().find(|hook| hook.chain() == chain).and_then(|hook| rules.hooks.get(&hook));
    let own = || rules.chains.iter().find(|(name, _)| name == chain).map(|(_, rules)| rules);
    hook.or_else(own).map_or(&[], Vec::as_slice)
}

/// Writes a chain: rule by rule if both families have the same number of rules, otherwise family by family.
fn chain_text(text: &mut String, chain: &str, v4: &[Rule], v6: &[Rule]) {
    let mut line = |prefix: &str, rule: &Rule| {
        let _ = writeln!(text, "{prefix}-A {chain} {rule}");
    };
    if v4.len() != v6.len() {
        v4.iter().for_each(|rule| line("-4 ", rule));
        v6.iter().for_each(|rule| line("-6 ", rule));
        return;
    }
    for (four, six) in v4.iter().zip(v6) {
        if four == six {
            line("", four);
        } else {
            line("-4 ", four);
            line("-6 ", six);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Interception, Policy};

    #[test]
    fn rules_of_both_families_are_listed_once() {
        let on = Policy { interception: Interception::On(Box::default()), ..Policy::default() };
        let text = restore_text(&Ruleset::of(&on, &Family::ALL));
        let lines = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(lines("-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN"), 1);
        assert_eq!((lines("-4 -A ISTIO_OUTPUT -d 127.0.0.1/32"), lines("-6 -A ISTIO_OUTPUT -d ::1/128")), (1, 1));
        assert_eq!(lines("-4"), lines("-6"));
        assert!(text.starts_with("*nat\n:PREROUTING ACCEPT [0:0]\n") && text.ends_with("COMMIT\n"), "{text}");
        let one = restore_text(&Ruleset::of(&on, &[Family::Ip]));
        assert!(one.lines().all(|line| !line.starts_with("-6") && !line.starts_with("-A")), "{one}");
    }
}
