//! Rules as `iptables-save` prints them, without `-A CHAIN`.

use crate::firewall::rule::{CtState, Is, Match, Name, Rule, Target};
use crate::policy::PortRange;
use std::fmt::{self, Display, Formatter};

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
        }
    }

    fn is_ip6(&self) -> bool {
        [&self.source, &self.destination].into_iter().flatten().any(|n| n.value.addr().is_ipv6())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::rule::{is, not};
    use crate::policy::IdRange;

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
}
