//! From a policy to the kernel: policy → rules as values → the fewest changes → one netlink
//! transaction; and back, for CHECK. Nothing here forks or needs a tool on the host.

mod commit;
mod detour;
mod drift;
mod iptables;
mod istio;
mod live;
pub mod nfnetlink;
mod plan;
pub mod rule;
mod ruleset;
mod text;

pub use commit::commit;
pub use drift::{Difference, Drift, drift, foreign_rules};
pub use live::{Counter, Live, LiveChain, LiveRule};
pub use plan::{Change, Made, Step, changes};
pub use ruleset::{Ruleset, TableRules};
