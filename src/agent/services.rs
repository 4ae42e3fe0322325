//! What the agent does beside keeping the plugin installed: one thread watches the node's pods and
//! answers the plugin.

use super::Metrics;
use super::facts::{Answers, Facts};
use super::install::{HostPath, Node};
use super::socket;
use crate::cluster::ServiceAccount;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// As many questions to the API wait at the same time; each has a thread.
const WAITING: usize = 16;
/// A thread that waits for nothing is kept so long.
const IDLE: Duration = Duration::from_secs(10);

/// What the services of a node need.
#[derive(Debug, Clone)]
pub struct Services {
    /// The node's name: that of its Node object.
    pub node_name: String,
    /// Where the plugin asks.
    pub socket: HostPath,
    /// Who watches.
    pub account: ServiceAccount,
}

/// Services that run, until this is dropped.
pub(super) struct Running {
    facts: Facts,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Services {
    /// Begins, for a node that is reached as `node`.
    ///
    /// # Errors
    /// The kernel has no thread or no event queue left.
    pub(super) fn start(&self, node: &Node, metrics: &Metrics) -> Result<Running, String> {
        let (facts, (end, ended)) = (Facts::new(), oneshot::channel());
        let socket = node.reach(&self.socket).map_err(|error| error.to_string())?;
        let mut builder = Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(WAITING).thread_keep_alive(IDLE);
        let runtime = builder.build().map_err(|error| format!("no event loop for the services: {error}"))?;
        let (services, known, metrics) = (self.clone(), facts.clone(), metrics.clone());
        let thread = thread::Builder::new().name("services".into());
        let thread = thread.spawn(move || services.run(runtime, &known, &metrics, &socket, ended));
        let thread = thread.map_err(|error| format!("no thread for the services: {error}"))?;
        Ok(Running { facts, end: Some(end), thread: Some(thread) })
    }

    fn run(&self, runtime: Runtime, facts: &Facts, metrics: &Metrics, socket: &Path, ended: oneshot::Receiver<()>) {
        let answers = Answers::new(facts.clone(), self.account.clone(), metrics.clone());
        runtime.block_on(async {
            tokio::select! {
                _ = ended => {}
                () = facts.keep(&self.account, &self.node_name, metrics) => {}
                () = socket::serve(socket, &answers) => {}
            }
        });
        // A thread that still waits for the API is not waited for.
        runtime.shutdown_background();
    }
}

#[allow(dead_code, reason = "what repairs pods asks for them")]
impl Running {
    /// What is known of the node.
    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the services have ended badly");
        }
    }
}
