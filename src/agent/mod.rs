//! The node's agent: what puts the plugin on a node and keeps it there.

mod backoff;
mod calls;
mod daemon_set;
mod facts;
mod health;
pub mod install;
mod keep;
mod known;
mod metrics;
mod plugin_token;
pub mod repair;
mod services;
mod socket;
pub mod taint;
mod watch;

pub use daemon_set::DaemonSet;
pub use keep::{Job, OnExit, keep};
pub use known::{EndedContainer, KnownPod};
pub use metrics::Metrics;
pub use plugin_token::PluginToken;
pub use services::Services;
