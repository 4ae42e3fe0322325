//! From a policy to the kernel: policy → rules as values → the fewest changes → one netlink
//! transaction; and back, for CHECK. Nothing here forks or needs a tool on the host.

mod commit;
mod exclusions;
mod rule_format;
mod drift;
mod expression;
mod iptables;
mod istio;
mod legacy;
mod live;
mod rule_limit;
pub mod native;
pub mod nfnetlink;
mod plan;
mod removal;
pub mod rule;
mod ruleset;
mod text;

pub use rule_format::{RuleFormat, Transaction};
pub use drift::{Difference, Drift, foreign_rules};
pub use legacy::legacy_tables;
pub use live::{Counter, LiveRuleset, LiveChain, LiveRule, NativeIstio, failed};
pub use rule_limit::{MOST_RULES, most_rules};
pub use plan::{PlannedStep, CreatedTables, Step};
pub use removal::remove;
pub use ruleset::{Ruleset, TableRules};
