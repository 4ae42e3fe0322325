//! The event loop of the agent: one thread runs the watches, the socket, the health server and all other tasks, and one
//! connection to the API server serves all of them. What blocks (API requests of other threads, files) runs on a small
//! pool of threads.

use crate::cluster::Api;
use std::io;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{LocalSet, spawn_local};

/// The limit of threads for what blocks: 64 requests of the plugin, and more for a check of each pod whose network
/// namespace does not respond.
const MAX_BLOCKING_THREADS: usize = 192;
/// The time after which an idle one of them ends.
const THREAD_IDLE_TIME: Duration = Duration::from_secs(10);

/// An event loop that is not running yet, because its thread must inherit the signal mask of [`super::run`].
#[derive(Debug)]
pub struct AgentRuntime {
    runtime: Mutex<Option<(Runtime, mpsc::UnboundedReceiver<StartTask>)>>,
    api: OnceLock<Api>,
    tasks: Tasks,
}

/// Starts a task on the thread of the event loop.
type StartTask = Box<dyn FnOnce() + Send>;

/// A handle of the event loop, to start tasks.
#[derive(Debug, Clone)]
pub struct Tasks {
    handle: Handle,
    starts: mpsc::UnboundedSender<StartTask>,
}

impl Tasks {
    /// Starts a task. It ends with the event loop.
    pub(super) fn start<F: Future<Output = ()> + 'static>(&self, task: impl FnOnce() -> F + Send + 'static) {
        // Fails only if the event loop has ended.
        let _ = self.starts.send(Box::new(|| drop(spawn_local(task()))));
    }

    /// Returns the event loop.
    pub(super) const fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// A running event loop. Dropping it ends the loop and its tasks.
#[derive(Debug)]
pub struct RunningRuntime {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl AgentRuntime {
    /// Creates the event loop.
    ///
    /// # Errors
    /// The kernel refuses its descriptors.
    pub fn new() -> io::Result<Self> {
        let mut builder = Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(MAX_BLOCKING_THREADS).thread_keep_alive(THREAD_IDLE_TIME);
        let runtime = builder.build()?;
        let ((starts, started), handle) = (mpsc::unbounded_channel(), runtime.handle().clone());
        let runtime = Mutex::new(Some((runtime, started)));
        Ok(Self { runtime, api: OnceLock::new(), tasks: Tasks { handle, starts } })
    }

    /// Returns the API server with the connection that all tasks and threads share: that of the first call.
    #[must_use]
    pub fn shared(&self, api: Api) -> Api {
        self.api.get_or_init(|| api.on(self.tasks.handle.clone())).clone()
    }

    /// Returns a handle to start tasks.
    #[must_use]
    pub const fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Starts the thread that runs the tasks.
    ///
    /// # Errors
    /// The thread can't be created, or the loop was started before.
    pub fn start(&self) -> io::Result<RunningRuntime> {
        let runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (runtime, mut tasks) = runtime.ok_or_else(|| io::Error::other("the event loop was started before"))?;
        let (end, mut ended) = oneshot::channel::<()>();
        let run = move || {
            LocalSet::new().block_on(&runtime, async {
                loop {
                    tokio::select! {
                        // Also if the sender is dropped.
                        _ = &mut ended => return,
                        Some(start) = tasks.recv() => start(),
                    }
                }
            });
            // Does not wait for threads that wait for the API server.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("tasks".into()).spawn(run)?;
        Ok(RunningRuntime { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for RunningRuntime {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread of the agent's tasks panicked");
        }
    }
}
