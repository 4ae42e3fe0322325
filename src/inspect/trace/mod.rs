//! `trace`: the way of a packet through rules, live ones or those of a policy.
//!
//! | file | contents |
//! |---|---|
//! | `report` | the report: the evaluation of a packet in all tables |
//! | `packet` | a packet, and whether it matches a rule |
//! | `rulebook` | rules for `trace` and for `iptables-restore` |
//! | `container_sender` | excluded containers as senders of packets |

mod container_sender;
mod packet;
mod report;
mod rulebook;

pub use container_sender::ExcludedSenders;
pub use packet::{Destination, InSet, Origin, Sender, SenderArgument};
pub use report::{Hop, RulePlace, Trace, trace};
pub use rulebook::{Rulebook, restore_text};
