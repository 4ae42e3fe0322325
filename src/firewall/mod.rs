//! From a policy to the kernel: policy → rules as values → the fewest changes → one netlink
//! transaction; and back, for CHECK. Nothing here forks or needs a tool on the host.

mod drift;
mod exclusions;
mod expression;
mod iptables;
mod istio;
mod live;
pub mod native;
pub mod nfnetlink;
mod plan;
mod removal;
pub mod rule;
mod rule_format;
mod text;

pub use drift::{Difference, Drift, foreign_rules};
pub use live::{Counter, LiveChain, LiveRule, LiveRuleset, NativeIstio, failed};
pub use live::{MOST_RULES, most_rules};
pub use plan::{CreatedTables, PlannedStep, Step};
pub use removal::remove;
pub use rule::{Ruleset, TableRules};
pub use rule_format::legacy_tables;
pub use rule_format::{RuleFormat, Transaction};
