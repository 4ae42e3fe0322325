//! The agent of a node: it keeps the plugin installed, answers the plugin's requests about the node's pods, and repairs
//! pods that bypass the mesh. The process's first thread runs all tasks. What blocks (the kernel, files) runs on a small pool
//! of threads.

mod containers;
mod daemon_set;
mod facts;
mod health;
pub mod install;
mod metrics;
pub mod nri;
mod plugin_token;
mod pod_reports;
pub mod pods;
mod reconcile_loop;
mod services;
mod socket;
pub mod taint;
mod token_bucket;
mod watch;

pub use daemon_set::DaemonSet;
pub use facts::ObservedPod;
pub use metrics::Metrics;
pub use plugin_token::PluginToken;
pub use pod_reports::PodReports;
pub use pods::{PodSettings, RepairMode};
pub use reconcile_loop::{Installation, Job, OnExit, run};
pub use services::Services;

use std::io;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// The limit of threads for what blocks: the checks of pods (8) and of excluded containers, each of which waits while its
/// network namespace does not respond, and the installation.
const MAX_BLOCKING_THREADS: usize = 128;
/// The time after which an idle one of them ends.
const THREAD_IDLE_TIME: Duration = Duration::from_secs(10);

/// Runs `work` and the tasks that it starts on this thread. They end with `work`.
///
/// # Errors
/// The kernel refuses the descriptors of the event loop.
pub fn run_tasks<T>(work: impl Future<Output = T>) -> io::Result<T> {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().max_blocking_threads(MAX_BLOCKING_THREADS).thread_keep_alive(THREAD_IDLE_TIME);
    let runtime = builder.build()?;
    let result = LocalSet::new().block_on(&runtime, work);
    // Does not wait for threads that still block.
    runtime.shutdown_background();
    Ok(result)
}
