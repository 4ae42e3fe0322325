//! The event loop of the agent: the process's first thread runs all tasks. What blocks (the kernel, files) runs on a small
//! pool of threads.

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
