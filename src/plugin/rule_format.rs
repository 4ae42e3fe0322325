//! In which dialect a pod's rules are written: what is there already, and who redirects, count
//! before what is merely preferred. A pod never has rules of ours in both.

use super::foreign_redirection::ForeignRedirection;
use crate::cni::{self, Code, Error};
use crate::firewall::RuleFormat;

/// What is known of a pod when its dialect is chosen.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FormatFacts {
    /// The dialect of what the kernel holds of ours, or other attachments on the container have.
    pub(super) in_use: Option<RuleFormat>,
    /// The dialect that this attachment had before.
    pub(super) before: Option<RuleFormat>,
    /// Who else redirects the pod.
    pub(super) foreign: Option<ForeignRedirection>,
}

/// Chooses.
///
/// # Errors
/// The configuration demands a dialect that does not go with what is there.
pub(super) fn choose(asked: cni::RuleFormatSetting, known: FormatFacts) -> Result<RuleFormat, Error> {
    let wanted = match asked {
        cni::RuleFormatSetting::Auto => None,
        cni::RuleFormatSetting::Iptables => Some(RuleFormat::Iptables),
        cni::RuleFormatSetting::Nftables => Some(RuleFormat::Nftables),
    };
    let out_of_reach = known.foreign.is_some_and(|foreign| !foreign.in_iptables);
    match (wanted, known.in_use) {
        (Some(wanted), Some(used)) if wanted != used => {
            let msg = format!(
                "dialect: the pod's rules are written as {} already and can't be as {} too; delete the pod, or write auto",
                used.name(),
                wanted.name()
            );
            Err(Error::new(Code::InvalidConfig, msg))
        }
        (_, Some(used)) => Ok(used),
        (Some(RuleFormat::Iptables), None) if out_of_reach => {
            let msg = "dialect: another tool redirects the pod by rules of nftables or of iptables-legacy, which no rule \
                       of iptables-nft can exempt anything from; accepted: auto, nftables";
            Err(Error::new(Code::ForeignRules, msg))
        }
        (Some(wanted), None) => Ok(wanted),
        (None, None) if out_of_reach => Ok(RuleFormat::Nftables),
        (None, None) => Ok(known.before.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::RuleFormatSetting::{Auto, Iptables, Nftables};

    #[test]
    fn what_is_there_decides_before_what_is_preferred() {
        let nothing = FormatFacts::default();
        let used = |dialect| FormatFacts { in_use: Some(dialect), ..nothing };
        let by = |in_iptables| FormatFacts { foreign: Some(ForeignRedirection { in_iptables, captures_dns: true }), ..nothing };
        let table = [
            (Auto, nothing, Some(RuleFormat::Iptables)),
            (Iptables, nothing, Some(RuleFormat::Iptables)),
            (Nftables, nothing, Some(RuleFormat::Nftables)),
            (Auto, used(RuleFormat::Nftables), Some(RuleFormat::Nftables)),
            (Auto, FormatFacts { before: Some(RuleFormat::Nftables), ..nothing }, Some(RuleFormat::Nftables)),
            (Iptables, FormatFacts { before: Some(RuleFormat::Nftables), ..nothing }, Some(RuleFormat::Iptables)),
            (Iptables, used(RuleFormat::Nftables), None),
            (Nftables, used(RuleFormat::Iptables), None),
            (Auto, by(true), Some(RuleFormat::Iptables)),
            (Auto, by(false), Some(RuleFormat::Nftables)),
            (Iptables, by(false), None),
            (Nftables, by(false), Some(RuleFormat::Nftables)),
        ];
        for (asked, known, expected) in table {
            assert_eq!(choose(asked, known).ok(), expected, "{asked:?} {known:?}");
        }
    }

    #[test]
    fn an_error_names_both_dialects_and_the_way_out() {
        let known = FormatFacts { in_use: Some(RuleFormat::Nftables), ..FormatFacts::default() };
        let error = choose(Iptables, known).expect_err("not both");
        assert_eq!(error.code, Code::InvalidConfig);
        for word in ["nftables", "iptables", "delete the pod"] {
            assert!(error.msg.contains(word), "{error}");
        }
    }
}
