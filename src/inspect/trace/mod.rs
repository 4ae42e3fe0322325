//! `trace`: the way of a packet through rules, live ones or those of a policy.

mod container_sender;
mod packet;
mod report;
mod rulebook;

pub use container_sender::ExcludedSenders;
pub use packet::{Destination, InSet, Origin, Sender, SenderArgument};
pub use report::{Hop, RulePlace, Trace, trace};
pub use rulebook::{Rulebook, restore_text};
