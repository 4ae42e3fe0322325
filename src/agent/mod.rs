//! The node's agent: what puts the plugin on a node and keeps it there.

mod backoff;
mod calls;
mod facts;
mod health;
pub mod install;
mod keep;
mod known;
mod metrics;
pub mod repair;
mod services;
mod socket;
pub mod taint;
mod watch;

pub use keep::{Job, OnExit, keep};
pub use known::{EndedContainer, KnownPod};
pub use metrics::Metrics;
pub use services::Services;
