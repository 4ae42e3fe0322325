//! What the agent does beside keeping the plugin installed: one thread watches the node's pods and
//! answers the plugin, one repairs pods, one keeps the node's taint.
//!
//! What the agent keeps of a pod of its node.

use super::facts::{Answers, SharedFacts};
use super::install::{HostPath, NodeFiles};
use super::metrics::Metrics;
use super::repair::{Pods, RepairSettings, RepairWorker};
use super::socket;
use super::socket::OpenConnections;
use super::taint::{Taint, TaintController};
use crate::cluster::ServiceAccount;
use crate::pod::Pod;
use std::future::pending;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::thread::JoinHandle;
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
    /// Where the plugin asks; `None`: nowhere.
    pub socket: Option<HostPath>,
    /// Who watches.
    pub account: ServiceAccount,
    /// How pods that bypass the mesh are repaired; `None`: not at all.
    pub repair: Option<RepairSettings>,
    /// The key of the taint of a node that isn't ready; `None`: there is none.
    pub taint: Option<String>,
}

/// Services that run, until this is dropped.
pub(super) struct Running {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Has repairs begin.
    repair: Option<Sender<()>>,
    taint: Option<TaintController>,
}

/// The watched pods, for who repairs them.
struct WatchedPods {
    facts: SharedFacts,
    /// As many changes were seen.
    seen: u64,
}

impl Pods for WatchedPods {
    fn pods(&self) -> Vec<Arc<ObservedPod>> {
        self.facts.pods()
    }

    fn wait(&mut self, time: Duration) {
        self.seen = self.facts.wait_for_pods(self.seen, time);
    }
}

impl Services {
    /// Begins, for a node that is reached as `node`; what is done is counted.
    ///
    /// # Errors
    /// The kernel has no thread or no event queue left.
    pub(super) fn start(&self, node: &NodeFiles, metrics: &Metrics) -> Result<Running, String> {
        let (facts, (end, ended)) = (SharedFacts::new(), oneshot::channel());
        let socket = self.socket.as_ref().map(|socket| node.reach(socket)).transpose();
        let socket = socket.map_err(|error| error.to_string())?;
        let mut builder = Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(WAITING).thread_keep_alive(IDLE);
        let runtime = builder.build().map_err(|error| format!("no event loop for the services: {error}"))?;
        let (services, known, counted) = (self.clone(), facts.clone(), metrics.clone());
        let thread = thread::Builder::new().name("services".into());
        let thread = thread.spawn(move || services.run(runtime, &known, &counted, socket, ended));
        let thread = thread.map_err(|error| format!("no thread for the services: {error}"))?;
        let repair = |settings: &RepairSettings| {
            let (begin, installed) = channel();
            let repair = RepairWorker::new(settings.clone(), node.clone(), self.account.clone(), metrics.clone());
            repair.start(WatchedPods { facts: facts.clone(), seen: 0 }, installed).map(|()| begin)
        };
        let repair = self.repair.as_ref().map(repair).transpose();
        let repair = repair.map_err(|error| format!("no thread for repairs: {error}"))?;
        let taint =
            |key: &String| Taint { key: key.clone(), node: self.node_name.clone(), account: self.account.clone() };
        let taint = self.taint.as_ref().map(|key| taint(key).keep()).transpose();
        let taint = taint.map_err(|error| format!("no thread for the node's taint: {error}"))?;
        Ok(Running { end: Some(end), thread: Some(thread), repair, taint })
    }

    fn run(
        &self,
        runtime: Runtime,
        facts: &SharedFacts,
        metrics: &Metrics,
        socket: Option<PathBuf>,
        ended: oneshot::Receiver<()>,
    ) {
        let answers = Answers::new(facts.clone(), self.account.clone(), metrics.clone());
        runtime.block_on(async {
            let mut asked = OpenConnections::none();
            tokio::select! {
                _ = ended => {}
                () = facts.keep(&self.account, &self.node_name, metrics) => {}
                () = serve(socket, &answers, &mut asked) => {}
            }
            asked.are_answered().await;
        });
        // A thread that still waits for the API is not waited for.
        runtime.shutdown_background();
    }
}

/// Answers for ever; where there is no socket, nobody.
async fn serve(socket: Option<PathBuf>, answers: &Answers, asked: &mut OpenConnections) {
    match socket {
        Some(socket) => socket::serve(&socket, answers, asked).await,
        None => pending().await,
    }
}

impl Running {
    /// The plugin has been seen to. Whether it is ready on the node; `None`: the taint stays as it is.
    pub(super) fn tell(&mut self, is_ready: Option<bool>) {
        if let Some(begin) = self.repair.take() {
            // Where the thread is gone, nobody is left to begin.
            let _ = begin.send(());
        }
        if let (Some(taint), Some(is_ready)) = (&self.taint, is_ready) {
            taint.tell(is_ready);
        }
    }

    /// The plugin is taken off the node, and nobody will be there to take the taint off.
    pub(super) fn leave(&mut self) {
        if let Some(taint) = self.taint.take() {
            taint.end();
        }
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

/// A pod of the node, as the watch saw it last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedPod {
    /// What decides about its traffic.
    pub pod: Pod,
    /// `metadata.resourceVersion`: a precondition for what is done to it.
    pub resource_version: String,
    /// Whether somebody makes a new one in its place (`metadata.ownerReferences` with `controller: true`,
    /// a node's mirror of a static pod excepted).
    pub owned: bool,
    /// Whether it has ended or is being deleted.
    pub ending: bool,
    /// `status.podIPs`.
    pub addresses: Vec<IpAddr>,
    /// `status.initContainerStatuses`, as far as they have ended once.
    pub ended_init_containers: Vec<EndedContainer>,
}

/// How an init container ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndedContainer {
    /// Its name.
    pub name: String,
    /// Whether it has succeeded by now (`state.terminated.exitCode` 0).
    pub succeeded: bool,
    /// The exit code of its last failure: `state.terminated`, else `lastState.terminated`.
    pub last_failure: Option<i32>,
    /// That failure's `message`.
    pub message: String,
}
