//! What a rule does with a packet that meets its conditions: one vocabulary for both rule formats.

use super::expression::NftVerdict;
use std::borrow::Cow;

/// Verdicts (linux/netfilter.h, linux/netfilter/nf_tables.h).
pub(super) const NF_DROP: u32 = 0;
pub(super) const NF_ACCEPT: u32 = 1;
const NFT_JUMP: u32 = -3_i32 as u32;
const NFT_GOTO: u32 = -4_i32 as u32;
const NFT_RETURN: u32 = -5_i32 as u32;

/// The target of a rule, as iptables and as nft call it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// `ACCEPT`, `accept`: ends the evaluation of this table, or of this base chain, in this hook.
    Accept,
    /// `RETURN`, `return`: continues in the calling chain.
    Return,
    /// `DROP`, `drop`.
    Drop,
    /// `-j CHAIN`, `jump`: evaluates a chain, which may return.
    Jump(Cow<'static, str>),
    /// `goto`, only native: evaluates a chain, which returns to the chain that called this one.
    Goto(Cow<'static, str>),
    /// `REDIRECT --to-ports`, `redirect to :PORT`.
    Redirect(u16),
    /// `CT --zone`, `ct zone set`.
    Zone(u16),
    /// `TPROXY --on-port … --tproxy-mark …/0xffffffff`, `tproxy to :PORT meta mark set MARK accept`. Without a listener,
    /// iptables drops the packet, and the evaluation of native rules continues.
    Tproxy {
        /// The proxy's port.
        port: u16,
        /// The mark that routes the packet to lo.
        mark: u32,
    },
    /// `MARK --set-mark`, `meta mark set`.
    SetMark(u32),
    /// `CONNMARK --save-mark`, `ct mark set meta mark`.
    SaveMark,
    /// `CONNMARK --restore-mark`, `meta mark set ct mark`.
    RestoreMark,
    /// `dnat ip to ip daddr`, only native: fixes the destination, so that no other table can change it.
    KeepDestination,
    /// `reject with tcp reset`, only native.
    Reset,
    /// `reject with icmpx port-unreachable`, only native.
    Reject,
}

impl Target {
    /// Returns the chain that a rule jumps to and that returns to it.
    pub(super) fn jump(&self) -> Option<&str> {
        if let Self::Jump(chain) = self { Some(chain) } else { None }
    }

    /// Returns the target as a verdict of nf_tables; `None` if it is none.
    pub(super) fn verdict(&self) -> Option<NftVerdict<'_>> {
        let (code, chain) = match self {
            Self::Accept => (NF_ACCEPT, None),
            Self::Return => (NFT_RETURN, None),
            Self::Drop => (NF_DROP, None),
            Self::Jump(chain) => (NFT_JUMP, Some(chain.as_ref())),
            Self::Goto(chain) => (NFT_GOTO, Some(chain.as_ref())),
            _ => return None,
        };
        Some(NftVerdict { code, chain })
    }

    /// Returns the target of a verdict; `None` for one that detour does not write.
    pub(super) fn of_verdict(NftVerdict { code, chain }: NftVerdict<'_>) -> Option<Self> {
        match (code, chain.map(|chain| chain.to_owned().into())) {
            (NF_ACCEPT, None) => Some(Self::Accept),
            (NFT_RETURN, None) => Some(Self::Return),
            (NF_DROP, None) => Some(Self::Drop),
            (NFT_JUMP, Some(chain)) => Some(Self::Jump(chain)),
            (NFT_GOTO, Some(chain)) => Some(Self::Goto(chain)),
            _ => None,
        }
    }
}
