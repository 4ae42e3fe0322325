//! The task that owns the state of all pod sandboxes. It waits for the runtime's reports, the results of checks, and
//! questions; nothing in it blocks.

use super::check::Check;
use super::sandbox::{Container, Sandbox};
use crate::agent::metrics::Metrics;
use crate::agent::nri::{self, NriContainer, NriPod, NriReport, NriStatus};
use crate::agent::pod_reports::PodReports;
use crate::cluster::agent::ContainersStatus;
use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::pod::PodRef;
use crate::state::ROOT;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval};

/// The interval in which the saved state is searched for changes.
const SCAN_INTERVAL: Duration = Duration::from_millis(500);
/// The limit of jobs, beyond which only checks start for which the runtime waits.
const MAX_JOBS: usize = 24;
/// The time without a registration after which the agent reports captures: a restarting runtime returns earlier.
const GRACE: Duration = Duration::from_secs(2);
/// The limit of the runtime's reports that wait for the task.
const MAX_REPORTS: usize = 64;

/// Asks for the status of a sandbox.
pub(super) struct Question {
    pub(super) sandbox_id: String,
    pub(super) answer: oneshot::Sender<ContainersStatus>,
}

/// The saved state of the node: each sandbox with the time of its last change.
type Scan = io::Result<BTreeMap<String, SystemTime>>;

/// The result of a job.
enum Done {
    Scanned(Scan),
    Checked(String, Box<Check>),
}

/// The connection to the runtime.
enum Connection {
    /// The first attempt to connect has not ended.
    Starting(Instant),
    Disconnected {
        why: String,
        since: Instant,
    },
    /// Name and version of the runtime. All running containers are known.
    Registered(String),
}

/// The state of the task.
pub(super) struct Task {
    pub(super) root: HostRoot,
    pub(super) nri_socket: HostPath,
    pub(super) metrics: Metrics,
    pub(super) reports: PodReports,
    /// Gets the pods whose sets are missing; `None` if the agent does not repair pods.
    pub(super) damaged: Option<mpsc::Sender<PodRef>>,
}

/// The state of the running task.
struct State {
    task: Task,
    sandboxes: BTreeMap<String, Sandbox>,
    connection: Connection,
    jobs: JoinSet<Done>,
    is_scanning: bool,
}

impl Task {
    /// Registers at the runtime's socket, which this process reaches at `socket`, and runs until no question can come.
    pub(super) async fn run(self, socket: PathBuf, mut questions: mpsc::Receiver<Question>) {
        self.metrics.nri_registered(false);
        let mut state = State {
            task: self,
            sandboxes: BTreeMap::new(),
            connection: Connection::Starting(Instant::now()),
            jobs: JoinSet::new(),
            is_scanning: false,
        };
        let (sender, mut reports) = mpsc::channel(MAX_REPORTS);
        let connect = nri::run(&socket, sender);
        tokio::pin!(connect);
        let mut scan = interval(SCAN_INTERVAL);
        scan.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = &mut connect => return,
                Some(report) = reports.recv() => state.handle(report),
                Some(Ok(done)) = state.jobs.join_next() => state.finish(done),
                question = questions.recv() => match question {
                    Some(Question { sandbox_id, answer }) => drop(answer.send(state.status(&sandbox_id))),
                    None => return,
                },
                _ = scan.tick() => state.tick(),
            }
            state.proceed();
        }
    }
}

impl State {
    fn is_registered(&self) -> bool {
        matches!(self.connection, Connection::Registered(_))
    }

    /// Searches the saved state for changes, and reports what lasts too long.
    fn tick(&mut self) {
        if !std::mem::replace(&mut self.is_scanning, true) {
            let scan = async { spawn_blocking(scan).await.unwrap_or_else(|panic| Err(io::Error::other(panic))) };
            self.jobs.spawn(async { Done::Scanned(scan.await) });
        }
        for sandbox in self.sandboxes.values_mut() {
            sandbox.expire(&self.task.metrics);
            match &self.connection {
                Connection::Disconnected { why, since } if since.elapsed() >= GRACE => {
                    sandbox.report_disconnection(*since, why);
                }
                _ => {}
            }
        }
    }

    /// Creates the new Events, starts the checks that are due, and forgets what ended.
    fn proceed(&mut self) {
        let is_registered = self.is_registered();
        for sandbox in self.sandboxes.values_mut() {
            for event in sandbox.events.drain(..).collect::<Vec<_>>() {
                tracing::warn!(pod = sandbox.pod_name(), sandbox = sandbox.id, "{}", event.message);
                if let Some(pod) = &sandbox.pod {
                    self.task.reports.event(pod, event);
                }
            }
            if self.jobs.len() >= MAX_JOBS && !sandbox.is_awaited() {
                continue;
            }
            let Some(check) = sandbox.begin(is_registered) else { continue };
            let (id, root) = (sandbox.id.clone(), self.task.root.clone());
            self.jobs.spawn(async move {
                let checked = spawn_blocking(move || check.run(&root)).await.unwrap_or_else(|panic| Check {
                    error: Some(Error::new(Code::TryAgain, format!("the check failed: {panic}; the agent retries"))),
                    ..Check::default()
                });
                Done::Checked(id, Box::new(checked))
            });
        }
        self.sandboxes.retain(|_, sandbox| !sandbox.is_unused());
    }

    fn handle(&mut self, report: NriReport) {
        match report {
            NriReport::Status(status) => self.connected(&status),
            NriReport::Synchronized(pods, containers) => self.synchronize(&pods, containers),
            NriReport::Start(pod, container, answer) => {
                sandbox_of(&mut self.sandboxes, &pod).start(container, answer, &self.task.metrics);
            }
            NriReport::Started(pod, container) => sandbox_of(&mut self.sandboxes, &pod).started(container),
            NriReport::Stopped(pod, container) => sandbox_of(&mut self.sandboxes, &pod).stopped(&container),
            NriReport::Removed(pod, container) => sandbox_of(&mut self.sandboxes, &pod).removed(container),
        }
    }

    fn connected(&mut self, status: &NriStatus) {
        let socket = &self.task.nri_socket;
        self.task.metrics.nri_registered(matches!(status, NriStatus::Registered { .. }));
        self.connection = match status {
            NriStatus::Registered { runtime, version } => {
                tracing::info!(%socket, runtime, version, "registered at the container runtime");
                Connection::Registered(format!("{runtime} {version}"))
            }
            NriStatus::Disconnected(why) => {
                tracing::warn!(why, "not registered at the container runtime: excluded containers start captured");
                let since = match &self.connection {
                    Connection::Disconnected { since, .. } | Connection::Starting(since) => *since,
                    Connection::Registered(_) => Instant::now(),
                };
                Connection::Disconnected { why: why.clone(), since }
            }
        };
        // Whether all running containers are known may have changed.
        self.sandboxes.values_mut().for_each(Sandbox::wake);
    }

    /// Replaces all containers by those that the runtime lists and that run. An element without a container is removed.
    fn synchronize(&mut self, pods: &[NriPod], containers: Vec<NriContainer>) {
        let known = self.sandboxes.values_mut().flat_map(Sandbox::take_containers);
        let mut known: BTreeMap<String, Container> = known.collect();
        for pod in pods {
            sandbox_of(&mut self.sandboxes, pod);
        }
        for container in containers.into_iter().filter(|container| container.running) {
            let before = known.remove(&container.id);
            let id = container.pod_id.clone();
            self.sandboxes.entry(id).or_insert_with_key(|id| Sandbox::new(id)).listed(container, before);
        }
    }

    fn finish(&mut self, done: Done) {
        match done {
            Done::Scanned(found) => {
                self.is_scanning = false;
                // The plugin's calls report it if they can't use this directory either.
                let Ok(mut found) = found.inspect_err(|error| tracing::debug!("{ROOT}: {error}")) else { return };
                for (id, sandbox) in &mut self.sandboxes {
                    sandbox.scanned(found.remove(id));
                }
                for (id, modified) in found {
                    let new = Sandbox::new(&id);
                    self.sandboxes.entry(id).or_insert(new).scanned(Some(modified));
                }
            }
            Done::Checked(id, checked) => {
                let (is_registered, repairs) = (self.is_registered(), self.task.damaged.is_some());
                let Some(sandbox) = self.sandboxes.get_mut(&id) else { return };
                let is_lost = sandbox.finish(*checked, (is_registered, repairs), &self.task.metrics);
                if let (true, Some(pod), Some(damaged)) = (is_lost, &sandbox.pod, &self.task.damaged) {
                    // If too many requests wait, the next failure makes another one.
                    let _ = damaged.try_send(pod.clone());
                }
            }
        }
    }

    fn status(&self, sandbox_id: &str) -> ContainersStatus {
        let sandbox = self.sandboxes.get(sandbox_id);
        let (runtime, error) = match &self.connection {
            Connection::Starting(_) => (None, "the agent has just started".to_owned()),
            Connection::Disconnected { why, .. } => (None, why.clone()),
            Connection::Registered(runtime) => {
                (Some(runtime.clone()), sandbox.map(|sandbox| sandbox.failure.clone()).unwrap_or_default())
            }
        };
        let expected = sandbox.filter(|_| runtime.is_some()).and_then(Sandbox::expected);
        ContainersStatus { runtime, error, expected }
    }
}

/// Returns the sandbox of a pod.
fn sandbox_of<'a>(sandboxes: &'a mut BTreeMap<String, Sandbox>, pod: &NriPod) -> &'a mut Sandbox {
    let sandbox = sandboxes.entry(pod.id.clone()).or_insert_with_key(|id| Sandbox::new(id));
    sandbox.set_pod(pod);
    sandbox
}

/// Returns the sandboxes with saved state, each with the time of its last change.
fn scan() -> Scan {
    let entries = match fs::read_dir(ROOT) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let mut found = BTreeMap::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // It may be gone by now.
        if let (false, Ok(modified)) = (name.starts_with('.'), entry.metadata().and_then(|it| it.modified())) {
            found.insert(name, modified);
        }
    }
    Ok(found)
}
