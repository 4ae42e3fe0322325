//! Running pods follow changes of their policy: of their annotations, their namespace's, and the node's configuration.
//!
//! | file | content |
//! |---|---|
//! | `worker` | the thread `live-policy`: which pods are evaluated, and when; the report and the metrics |
//! | `tracked_pod` | the state of a pod between two evaluations; its reports |
//! | `decision` | whether a pod is current, and what it gets (pure) |
//! | `change_limit` | how often a pod is changed (pure) |
//! | `wording`, `texts` | changes in words; Events and the condition (pure) |
//! | `jobs` | the threads that apply changes |
//! | `report` | the report for the agent socket |

mod change_limit;
mod decision;
mod jobs;
mod report;
mod texts;
mod tracked_pod;
mod wording;
mod worker;

pub(super) use report::SharedPolicies;
pub(super) use worker::{NodeState, Worker};
