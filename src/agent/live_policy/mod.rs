//! Running pods follow changes of their policy: of their annotations, their namespace's, and the node's configuration.

mod change_limit;
mod jobs;
mod report;
mod sandbox;
mod texts;
mod tracked_pod;
mod worker;

pub(super) use report::SharedPolicies;
pub(super) use worker::{NodeState, Worker};
