//! Excluded containers of the node's pods: their traffic bypasses the sidecar from their first instruction until they
//! exit. One task owns the state of all pod sandboxes, and lends that of a sandbox (`sandbox`) to its check, which runs in
//! the agent's pool of threads: it reads saved state and changes the sets in the pod's network namespace.

mod sandbox;

use super::install::NodeFiles;
use super::metrics::Metrics;
use super::nri::{self, NriContainer, NriPod, NriReport, NriStatus, START_TIMEOUT};
use super::pod_reports::PodReports;
use crate::cluster::agent::ContainersStatus;
use crate::host_path::{HostPath, HostRoot};
use crate::plugin::running::containers::ExcludedContainers as Excluded;
use crate::pod::PodRef;
use crate::state::ROOT;
use sandbox::{Answer, Captures, Sandbox, Tools};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinSet, spawn_blocking, spawn_local};
use tokio::time::sleep;

/// The interval in which the saved state is searched for changes.
const SCAN_INTERVAL: Duration = Duration::from_millis(500);
/// The limit of checks, beyond which only those start for which the runtime waits.
const MAX_CHECKS: usize = 24;
/// The time without a registration after which the agent reports captures: a restarting runtime returns earlier.
const GRACE: Duration = Duration::from_secs(2);
/// The limit of the runtime's reports, and that of questions, that wait for the task.
const MAX_WAITING: usize = 64;

/// Asks for the status of a sandbox.
type Question = (String, oneshot::Sender<ContainersStatus>);

/// A running task. It ends with the last clone.
#[derive(Debug, Clone)]
pub(super) struct ExcludedContainers(mpsc::Sender<Question>);

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

/// A change of a sandbox.
type Change = Box<dyn FnOnce(&mut Sandbox)>;

/// The place of a sandbox.
struct Slot {
    /// `None` while a check owns it.
    sandbox: Option<Sandbox>,
    /// When the last check began.
    checked: Instant,
    /// What happened during the check.
    changes: Vec<Change>,
    /// The containers for which the runtime waits during the check, since when; and which ones are excluded and reported.
    awaited: Vec<(Instant, String)>,
    excluded: Option<Arc<Excluded>>,
    captures: Captures,
}

/// The state of the task.
struct Task {
    tools: Arc<Tools>,
    nri_socket: HostPath,
    slots: BTreeMap<String, Slot>,
    connection: Connection,
    checks: JoinSet<Sandbox>,
}

impl ExcludedContainers {
    /// Starts the task, which registers at the runtime's NRI socket. `damaged` gets the pods whose rules for excluded
    /// containers are missing; it is `None` if the agent does not repair pods.
    ///
    /// # Errors
    /// The path of the socket can't be resolved.
    pub(super) fn start(
        nri_socket: &HostPath,
        node: &NodeFiles,
        metrics: &Metrics,
        reports: PodReports,
        damaged: Option<mpsc::Sender<PodRef>>,
    ) -> Result<Self, String> {
        let path = node.reach(nri_socket).map_err(|error| error.to_string())?;
        let (sender, questions) = mpsc::channel(MAX_WAITING);
        let tools = Tools { root: HostRoot::new(node.root()), metrics: metrics.clone(), reports, damaged };
        let task = Task {
            tools: Arc::new(tools),
            nri_socket: nri_socket.clone(),
            slots: BTreeMap::new(),
            connection: Connection::Starting(Instant::now()),
            checks: JoinSet::new(),
        };
        spawn_local(task.run(path, questions));
        Ok(Self(sender))
    }

    /// Returns the answer to CHECK and `doctor` about a sandbox.
    pub(super) async fn status(&self, sandbox_id: String) -> ContainersStatus {
        let (answer, status) = oneshot::channel();
        let _ = self.0.send((sandbox_id, answer)).await;
        // Fails only if the agent ends.
        status.await.unwrap_or_default()
    }
}

impl Task {
    /// Registers at the runtime's socket, which this process reaches at `socket`, and runs until no question can come.
    async fn run(mut self, socket: PathBuf, mut questions: mpsc::Receiver<Question>) {
        self.tools.metrics.set("nri_registered", [], false);
        let (sender, mut reports) = mpsc::channel(MAX_WAITING);
        let (connect, scanned) = (nri::run(&socket, sender), scan_after(Duration::ZERO));
        tokio::pin!(connect, scanned);
        loop {
            tokio::select! {
                () = &mut connect => return,
                Some(report) = reports.recv() => self.handle(report),
                Some(Ok(sandbox)) = self.checks.join_next() => self.finish(sandbox),
                question = questions.recv() => match question {
                    Some(question) => self.answer(question),
                    None => return,
                },
                found = &mut scanned => {
                    scanned.set(scan_after(SCAN_INTERVAL));
                    self.tick(found);
                }
            }
            self.proceed();
        }
    }

    fn is_registered(&self) -> bool {
        matches!(self.connection, Connection::Registered(_))
    }

    /// Returns the place of a pod's sandbox.
    fn slot(&mut self, pod: &NriPod) -> &mut Slot {
        let slot = place(&mut self.slots, &pod.id);
        let uid = (!pod.uid.is_empty()).then(|| pod.uid.clone());
        let pod = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid };
        slot.change(|sandbox| sandbox.captures.pod = Some(pod));
        slot
    }

    fn handle(&mut self, report: NriReport) {
        let tools = Arc::clone(&self.tools);
        match report {
            NriReport::Status(status) => self.connected(status),
            NriReport::Synchronized(pods, containers) => self.synchronize(&pods, containers),
            NriReport::Start(pod, container, answer) => {
                let slot = self.slot(&pod);
                let now = Instant::now();
                let answer = (!slot.is_slow()).then_some(Answer(answer, now));
                slot.awaited.push((now, container.name.clone()));
                slot.change(move |sandbox| sandbox.start(container, answer, &tools.metrics));
            }
            NriReport::Started(pod, container) => self.slot(&pod).change(|sandbox| sandbox.started(container)),
            NriReport::Stopped(pod, container) => self.slot(&pod).change(move |sandbox| sandbox.stopped(&container)),
            NriReport::Removed(pod, container) => self.slot(&pod).change(|sandbox| sandbox.removed(container)),
        }
    }

    fn connected(&mut self, status: NriStatus) {
        let socket = &self.nri_socket;
        self.tools.metrics.set("nri_registered", [], matches!(status, NriStatus::Registered { .. }));
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
                Connection::Disconnected { why, since }
            }
        };
        // Whether all running containers are known may have changed.
        self.slots.values_mut().for_each(|slot| slot.change(Sandbox::wake));
    }

    /// Replaces all containers by those that the runtime lists and that run. An element without a container is removed.
    fn synchronize(&mut self, pods: &[NriPod], containers: Vec<NriContainer>) {
        for pod in pods {
            self.slot(pod);
        }
        let mut listed = BTreeMap::<String, Vec<NriContainer>>::new();
        for container in containers.into_iter().filter(|container| container.running) {
            place(&mut self.slots, &container.pod_id);
            listed.entry(container.pod_id.clone()).or_default().push(container);
        }
        for (id, slot) in &mut self.slots {
            let containers = listed.remove(id).unwrap_or_default();
            slot.change(|sandbox| sandbox.listed(containers));
        }
    }

    /// Answers a question, or lets the answer wait for a check that runs.
    fn answer(&mut self, (id, answer): Question) {
        let (runtime, error) = match &self.connection {
            Connection::Starting(_) => (None, "the agent has just started".to_owned()),
            Connection::Disconnected { why, .. } => (None, why.clone()),
            Connection::Registered(runtime) => (Some(runtime.clone()), String::new()),
        };
        let mut status = ContainersStatus { runtime, error, expected: None };
        match self.slots.get_mut(&id).filter(|_| status.runtime.is_some()) {
            None => drop(answer.send(status)),
            Some(slot) => slot.change(|sandbox| {
                (status.error, status.expected) = (sandbox.failure.clone(), sandbox.expected());
                let _ = answer.send(status);
            }),
        }
    }

    /// Compares the saved state with the changes that were found, and reports that the agent is not registered for long.
    fn tick(&mut self, found: io::Result<BTreeMap<String, SystemTime>>) {
        // The plugin's calls report it if they can't use this directory either.
        if let Ok(mut found) = found.inspect_err(|error| tracing::debug!("{ROOT}: {error}")) {
            for id in found.keys() {
                place(&mut self.slots, id);
            }
            for (id, slot) in &mut self.slots {
                let modified = found.remove(id);
                slot.sandbox.iter_mut().for_each(|sandbox| sandbox.scanned(modified));
            }
        }
        self.slots.values_mut().for_each(|slot| slot.report_late(&self.tools.reports));
        if let Connection::Disconnected { why, since } = &self.connection
            && since.elapsed() >= GRACE
        {
            let sandboxes = self.slots.values_mut().filter_map(|slot| slot.sandbox.as_mut());
            sandboxes.for_each(|sandbox| sandbox.report_disconnection(*since, why));
        }
    }

    /// Creates the new Events, starts the checks that are due, and forgets what ended.
    fn proceed(&mut self) {
        let (is_complete, now) = (self.is_registered(), Instant::now());
        for slot in self.slots.values_mut() {
            let Some(sandbox) = &mut slot.sandbox else { continue };
            sandbox.captures.create_events(&self.tools.reports);
            let is_due = sandbox.is_due(now) && self.checks.len() < MAX_CHECKS;
            if let Some(sandbox) = slot.sandbox.take_if(|sandbox| is_due || sandbox.is_awaited()) {
                (slot.checked, slot.awaited) = (now, sandbox.awaited());
                (slot.excluded, slot.captures) = (sandbox.excluded.clone(), sandbox.captures.clone());
                let tools = Arc::clone(&self.tools);
                self.checks.spawn_blocking(move || sandbox.check(&tools, is_complete));
            }
        }
        self.slots.retain(|_, slot| !slot.sandbox.as_ref().is_some_and(Sandbox::is_unused));
    }

    /// Takes a sandbox back from its check.
    fn finish(&mut self, mut sandbox: Sandbox) {
        let Some(slot) = self.slots.get_mut(&sandbox.id) else { return };
        sandbox.is_slow = slot.is_slow();
        sandbox.captures.add_reported(&slot.captures);
        slot.changes.drain(..).for_each(|change| change(&mut sandbox));
        slot.sandbox = Some(sandbox);
    }
}

/// Returns the place of a sandbox.
fn place<'a>(slots: &'a mut BTreeMap<String, Slot>, id: &str) -> &'a mut Slot {
    slots.entry(id.to_owned()).or_insert_with(|| Slot::new(id))
}

impl Slot {
    fn new(id: &str) -> Self {
        let (checked, captures) = (Instant::now(), Captures::default());
        Self { sandbox: Some(Sandbox::new(id)), checked, changes: vec![], awaited: vec![], excluded: None, captures }
    }

    /// Changes the sandbox: now, or after its check.
    fn change(&mut self, change: impl FnOnce(&mut Sandbox) + 'static) {
        match &mut self.sandbox {
            Some(sandbox) => change(sandbox),
            None => self.changes.push(Box::new(change)),
        }
    }

    /// Reports the excluded containers that start captured because the check takes longer than the runtime waits.
    fn report_late(&mut self, reports: &PodReports) {
        let (None, Some(excluded)) = (&self.sandbox, &self.excluded) else { return };
        let why =
            format!("the pod's rules were not changed within {} ms; the agent retries", START_TIMEOUT.as_millis());
        let is_late = |(since, name): &&(Instant, String)| {
            since.elapsed() > START_TIMEOUT && excluded.policy.container_scope(name).is_some()
        };
        self.awaited.iter().filter(is_late).for_each(|(_, name)| self.captures.add(name, &why));
        self.captures.create_events(reports);
    }

    /// Whether the check that runs, or the last one, takes longer than the runtime waits.
    fn is_slow(&self) -> bool {
        self.sandbox.as_ref().map_or_else(|| self.checked.elapsed() > START_TIMEOUT, |sandbox| sandbox.is_slow)
    }
}

/// Returns the sandboxes with saved state, each with the time of its last change.
async fn scan_after(pause: Duration) -> io::Result<BTreeMap<String, SystemTime>> {
    sleep(pause).await;
    let scan = || {
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
    };
    spawn_blocking(scan).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
