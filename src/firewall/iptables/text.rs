//! Rules as `iptables-save` prints them, without `-A CHAIN`, and the rules of a redirection for `iptables-restore`.

use crate::firewall::rule::{CtState, Family, Hook, Is, Match, Name, Rule, Ruleset, Table};
use crate::firewall::target::Target;
use crate::policy::PortRange;
use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter, Write as _};

impl Display for Rule {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        let mut option = |flag: &str, value: Option<Is<Name>>| {
            if let Some(Is { not, value }) = value {
                words.push(format!("{}{flag} {value}", bang(not)));
            }
        };
        let net =
            |n: &Option<Is<ipnet::IpNet>>| n.as_ref().map(|n| Is { not: n.not, value: n.value.to_string().into() });
        option("-s", net(&self.source));
        option("-d", net(&self.destination));
        option("-i", self.in_interface.clone());
        option("-o", self.out_interface.clone());
        if let Some(protocol) = self.protocol {
            words.push(format!("-p {protocol}"));
        }
        words.extend(self.matches.iter().map(|m| self.match_text(m)));
        words.push(self.target_text());
        f.write_str(&words.join(" "))
    }
}

const fn bang(not: bool) -> &'static str {
    if not { "! " } else { "" }
}

fn ports(range: PortRange) -> String {
    if range.first == range.last { range.first.to_string() } else { format!("{}:{}", range.first, range.last) }
}

impl Rule {
    fn match_text(&self, condition: &Match) -> String {
        let protocol = self.protocol.map(|p| p.to_string()).unwrap_or_default();
        match condition {
            Match::DestinationPort(p) => format!("-m {protocol} {}--dport {}", bang(p.not), ports(p.value)),
            Match::SourcePort(p) => format!("-m {protocol} {}--sport {}", bang(p.not), ports(p.value)),
            Match::DestinationPorts(list) => {
                let all: Vec<String> = list.value.iter().map(|p| ports(*p)).collect();
                format!("-m multiport {}--dports {}", bang(list.not), all.join(","))
            }
            Match::Uid(id) => format!("-m owner {}--uid-owner {}", bang(id.not), id.value),
            Match::Gid(id) => format!("-m owner {}--gid-owner {}", bang(id.not), id.value),
            Match::CtState(CtState::Invalid) => "-m conntrack --ctstate INVALID".to_owned(),
            Match::CtState(CtState::RelatedOrEstablished) => "-m conntrack --ctstate RELATED,ESTABLISHED".to_owned(),
            Match::Mark(mark) => format!("-m mark {}--mark {:#x}", bang(mark.not), mark.value),
            Match::Connmark(mark) => format!("-m connmark --mark {mark:#x}"),
        }
    }

    fn target_text(&self) -> String {
        match &self.target {
            Target::Accept => "-j ACCEPT".to_owned(),
            Target::Return => "-j RETURN".to_owned(),
            Target::Drop => "-j DROP".to_owned(),
            Target::Jump(chain) => format!("-j {chain}"),
            Target::Redirect(port) => format!("-j REDIRECT --to-ports {port}"),
            Target::Zone(zone) => format!("-j CT --zone {zone}"),
            Target::Tproxy { port, mark } => {
                let any = if self.is_ip6() { "::" } else { "0.0.0.0" };
                format!("-j TPROXY --on-port {port} --on-ip {any} --tproxy-mark {mark:#x}/0xffffffff")
            }
            Target::SetMark(mark) => format!("-j MARK --set-xmark {mark:#x}/0xffffffff"),
            Target::SaveMark => "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
            Target::RestoreMark => "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
            Target::Goto(_) | Target::KeepDestination | Target::Reset | Target::Reject => "(native)".to_owned(),
        }
    }

    fn is_ip6(&self) -> bool {
        [&self.source, &self.destination].into_iter().flatten().any(|n| n.value.addr().is_ipv6())
    }
}

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
    use crate::firewall::rule::{is, not};
    use crate::policy::{IdRange, Interception, Policy};

    #[test]
    fn conditions_are_printed_in_the_order_of_iptables_save() {
        let lo = "127.0.0.1/32".parse().expect("a CIDR");
        let rule = Rule::jump("ISTIO_IN_REDIRECT")
            .out_interface(is("lo"))
            .destination(not(lo))
            .tcp()
            .matching(Match::DestinationPorts(not(vec![PortRange::one(53), PortRange { first: 8000, last: 8010 }])))
            .matching(Match::Uid(is(IdRange { first: 5, last: 9 })));
        assert_eq!(
            rule.to_string(),
            "! -d 127.0.0.1/32 -o lo -p tcp -m multiport ! --dports 53,8000:8010 -m owner --uid-owner 5-9 -j ISTIO_IN_REDIRECT"
        );
        let rule = Rule::new(Target::Return).tcp().matching(Match::DestinationPort(not(PortRange::one(15008))));
        assert_eq!(rule.to_string(), "-p tcp -m tcp ! --dport 15008 -j RETURN");
    }

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
