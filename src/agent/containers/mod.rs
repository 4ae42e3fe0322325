//! Excluded containers of the node's pods: their traffic bypasses the sidecar from their first instruction until they
//! exit.

mod reconciler;
mod registry;
mod watcher;

use super::install::NodeFiles;
use super::metrics::Metrics;
use super::nri::{self, NriStatus};
use super::pod_reports::PodReports;
use crate::host_path::{HostPath, HostRoot};
use crate::pod::PodRef;
use reconciler::Reconciler;
pub(in crate::agent) use registry::Registry;
use std::io::PipeWriter;
use std::thread::{self, JoinHandle};
use tokio::sync::mpsc;
use watcher::Watcher;

/// The settings for excluded containers.
#[derive(Debug, Clone)]
pub struct ContainerSettings {
    /// The runtime's NRI socket.
    pub nri_socket: HostPath,
}

/// The running threads. Dropping them ends them.
pub(super) struct RunningContainers {
    pub(super) registry: Registry,
    /// Closing it ends the connection to the runtime.
    connection: Option<PipeWriter>,
    threads: Vec<JoinHandle<()>>,
}

impl ContainerSettings {
    /// Starts the threads. `damaged` gets the pods whose rules for excluded containers are missing; it is `None` if the agent
    /// does not repair pods.
    ///
    /// # Errors
    /// A thread can't be created, or the path of the socket can't be resolved.
    pub(super) fn start(
        &self,
        node: &NodeFiles,
        metrics: &Metrics,
        reports: PodReports,
        damaged: Option<mpsc::Sender<PodRef>>,
    ) -> Result<RunningContainers, String> {
        let thread_error = |error| format!("can't start the threads for excluded containers: {error}");
        let registry = Registry::new(self.nri_socket.to_string());
        let reconciler = Reconciler {
            root: HostRoot::new(node.root()),
            damaged,
            registry: registry.clone(),
            reports,
            metrics: metrics.clone(),
        };
        let mut running = RunningContainers { registry, connection: None, threads: Vec::new() };
        let watcher = Watcher::new(reconciler.clone());
        let thread = thread::Builder::new().name("containers".into()).spawn(move || watcher.run());
        running.threads.push(thread.map_err(thread_error)?);
        let socket = &self.nri_socket;
        let path = node.reach(socket).map_err(|error| error.to_string())?;
        let (ended, connection) = std::io::pipe().map_err(thread_error)?;
        let (metrics, shown) = (metrics.clone(), socket.clone());
        metrics.nri_registered(false);
        let registry = running.registry.clone();
        let report = move |status: NriStatus| {
            metrics.nri_registered(matches!(status, NriStatus::Registered { .. }));
            log(&status, &shown);
            registry.report(&status);
        };
        let work = move || nri::run(&path, reconciler, report, ended);
        running.threads.push(thread::Builder::new().name("nri".into()).spawn(work).map_err(thread_error)?);
        running.connection = Some(connection);
        Ok(running)
    }
}

fn log(status: &NriStatus, socket: &HostPath) {
    match status {
        NriStatus::Registered { runtime, version } => {
            tracing::info!(%socket, runtime, version, "registered at the container runtime");
        }
        NriStatus::Disconnected(why) => {
            tracing::warn!(why, "not registered at the container runtime: excluded containers start captured");
        }
    }
}

impl Drop for RunningContainers {
    fn drop(&mut self) {
        self.registry.end();
        drop(self.connection.take());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread for excluded containers panicked");
            }
        }
    }
}
