//! `trace`: the way of a packet through rules, live ones or those of a policy.

mod arguments;
mod container_sender;
mod report;

pub use arguments::SenderArgument;
pub use container_sender::ExcludedSenders;
pub use report::{Origin, Trace, trace};
