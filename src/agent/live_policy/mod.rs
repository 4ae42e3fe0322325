//! Running pods follow changes of their policy: of their annotations, their namespace's, and the node's configuration.
//!
//! | file | content |
//! |---|---|
//! | `worker` | the thread `live-policy`: which pods are evaluated, and when; the report and the metrics |
//! | `sandbox` | which pod sandbox of the saved state a pod has |
//! | `tracked_pod` | the state of a pod between two evaluations; its reports |
//! | `change_limit` | how often a pod is changed (pure) |
//! | `texts` | Events and the condition (pure) |
//! | `jobs` | the threads that apply changes |
//! | `report` | the report for the agent socket |

mod change_limit;
mod jobs;
mod report;
mod sandbox;
mod texts;
mod tracked_pod;
mod worker;

pub(super) use report::SharedPolicies;
pub(super) use worker::{NodeState, Worker};
