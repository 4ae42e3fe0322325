//! In which dialect a pod's rules are written: what is there already, and who redirects, count
//! before what is merely preferred. A pod never has rules of ours in both.

use super::foreign::Redirection;
use crate::cni::{self, Code, Error};
use crate::firewall::Dialect;

/// What is known of a pod when its dialect is chosen.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Known {
    /// The dialect of what the kernel holds of ours, or other attachments on the container have.
    pub(super) in_use: Option<Dialect>,
    /// The dialect that this attachment had before.
    pub(super) before: Option<Dialect>,
    /// Who else redirects the pod.
    pub(super) foreign: Option<Redirection>,
}

/// Chooses.
///
/// # Errors
/// The configuration demands a dialect that does not go with what is there.
pub(super) fn choose(asked: cni::Dialect, known: Known) -> Result<Dialect, Error> {
    let wanted = match asked {
        cni::Dialect::Auto => None,
        cni::Dialect::Iptables => Some(Dialect::Iptables),
        cni::Dialect::Nftables => Some(Dialect::Nftables),
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
        (Some(Dialect::Iptables), None) if out_of_reach => {
            let msg = "dialect: another tool redirects the pod by rules of nftables or of iptables-legacy, which no rule \
                       of iptables-nft can exempt anything from; accepted: auto, nftables";
            Err(Error::new(Code::ForeignRules, msg))
        }
        (Some(wanted), None) => Ok(wanted),
        (None, None) if out_of_reach => Ok(Dialect::Nftables),
        (None, None) => Ok(known.before.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::Dialect::{Auto, Iptables, Nftables};

    #[test]
    fn what_is_there_decides_before_what_is_preferred() {
        let nothing = Known::default();
        let used = |dialect| Known { in_use: Some(dialect), ..nothing };
        let by = |in_iptables| Known { foreign: Some(Redirection { in_iptables, captures_dns: true }), ..nothing };
        let table = [
            (Auto, nothing, Some(Dialect::Iptables)),
            (Iptables, nothing, Some(Dialect::Iptables)),
            (Nftables, nothing, Some(Dialect::Nftables)),
            (Auto, used(Dialect::Nftables), Some(Dialect::Nftables)),
            (Auto, Known { before: Some(Dialect::Nftables), ..nothing }, Some(Dialect::Nftables)),
            (Iptables, Known { before: Some(Dialect::Nftables), ..nothing }, Some(Dialect::Iptables)),
            (Iptables, used(Dialect::Nftables), None),
            (Nftables, used(Dialect::Iptables), None),
            (Auto, by(true), Some(Dialect::Iptables)),
            (Auto, by(false), Some(Dialect::Nftables)),
            (Iptables, by(false), None),
            (Nftables, by(false), Some(Dialect::Nftables)),
        ];
        for (asked, known, expected) in table {
            assert_eq!(choose(asked, known).ok(), expected, "{asked:?} {known:?}");
        }
    }

    #[test]
    fn an_error_names_both_dialects_and_the_way_out() {
        let known = Known { in_use: Some(Dialect::Nftables), ..Known::default() };
        let error = choose(Iptables, known).expect_err("not both");
        assert_eq!(error.code, Code::InvalidConfig);
        for word in ["nftables", "iptables", "delete the pod"] {
            assert!(error.msg.contains(word), "{error}");
        }
    }
}
