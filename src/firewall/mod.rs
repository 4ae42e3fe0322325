//! From a policy to the kernel: policy → rules as values → the fewest changes → one netlink
//! transaction; and back, for CHECK. Nothing here forks or needs a tool on the host.

mod commit;
mod detour;
mod dialect;
mod drift;
mod expression;
mod iptables;
mod istio;
mod legacy;
mod live;
mod most_rules;
pub mod native;
pub mod nfnetlink;
mod plan;
mod removal;
pub mod rule;
mod ruleset;
mod text;

pub use dialect::{Dialect, Plan};
pub use drift::{Difference, Drift, foreign_rules};
pub use legacy::legacy_tables;
pub use live::{Counter, Live, LiveChain, LiveRule, NativeIstio, failed};
pub use most_rules::{MOST_RULES, most_rules};
pub use plan::{Change, Made, Step};
pub use removal::remove;
pub use ruleset::{Ruleset, TableRules};
