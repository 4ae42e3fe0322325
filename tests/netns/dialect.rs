//! Tests that run in both rule formats.

use serde_json::{Value, json};

/// The configuration key `dialect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Iptables,
    Nftables,
}

impl Dialect {
    /// Returns the configuration with this dialect.
    pub(crate) fn of(self, mut configuration: Value) -> Value {
        configuration["dialect"] = match self {
            Self::Iptables => json!("iptables"),
            Self::Nftables => json!("nftables"),
        };
        configuration
    }
}

/// Makes two tests of each function, one for each rule format.
macro_rules! in_both_dialects {
    ($($(#[$doc:meta])* fn $name:ident($dialect:ident) $scenario:block)+) => { $(
        $(#[$doc])*
        mod $name {
            use super::*;

            fn scenario($dialect: crate::dialect::Dialect) $scenario

            #[test]
            fn iptables() {
                scenario(crate::dialect::Dialect::Iptables);
            }

            #[test]
            fn nftables() {
                scenario(crate::dialect::Dialect::Nftables);
            }
        }
    )+ };
}
