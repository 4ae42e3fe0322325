//! The agent's main loop: reconciles the node with the desired state at every change, and reports readiness. Work
//! on the node's files blocks, so it runs in the pool of threads.

mod iteration;

use super::daemon_set::DaemonSet;
use super::facts::SharedFacts;
use super::health::Health;
use super::install::{DesiredState, InstallError, InstallPlan, Leadership, NodeFiles, Obstacle};
use super::metrics::Metrics;
use super::pod_reports::PodReports;
use super::services::{RunningServices, Services};
use super::socket;
use super::watch::{DirectoryWatch, EndSignals};
use crate::cluster::Api;
use crate::host_path::HostPath;
use crate::pod::PodRef;
use crate::wait;
use clap::ValueEnum;
use iteration::{LastLogged, Stability, assess, count, event, taint_decision};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process;
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// The interval of reconciliations if the kernel does not report changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What happens to the plugin when the agent ends, a value of `--on-exit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnExit {
    /// Keep the plugin installed
    Leave,
    /// Remove the plugin, as `detour uninstall` does
    Remove,
    /// Remove the plugin if the DaemonSet of --daemon-set no longer exists; keep it if that is unknown
    Auto,
}

/// The settings of an agent.
pub struct Job {
    /// The installation on the node.
    pub installation: Installation,
    /// What happens to the plugin when the agent ends.
    pub on_exit: OnExit,
    /// The agent's DaemonSet, if `on_exit` depends on it.
    pub daemon_set: Option<DaemonSet>,
    /// The address of `/healthz`, `/readyz` and `/metrics`.
    pub health_address: Option<SocketAddr>,
    /// The metrics that are served there.
    pub metrics: Metrics,
    /// The services that need the node's name; `None` if it is unknown.
    pub services: Option<Services>,
    /// The account that writes Events of pods; `None` to only log Events.
    pub account: Option<Api>,
    /// The agent's own pod, for Events of a configuration that is rejected.
    pub own_pod: Option<PodRef>,
}

/// Runs the agent until SIGTERM or SIGINT, with [`super::run_tasks`]. Problems of the node do not end it; `/readyz` and
/// the log report them.
///
/// # Errors
/// A signal descriptor or the health address is not available, or the final removal of the plugin fails.
pub async fn run(job: Job) -> Result<(), String> {
    // Before any thread is started, because a thread inherits the signal mask.
    let signals = EndSignals::new().map_err(|error| format!("can't wait for signals: {error}"))?;
    let facts = SharedFacts::default();
    let health = Health::new(facts.clone());
    if let Some(address) = job.health_address {
        let bound = health
            .serve(address, job.metrics.clone())
            .map_err(|error| format!("can't listen on health address {address}: {error}"))?;
        tracing::info!(address = %bound, "serving /healthz, /readyz and /metrics");
        health.supervise(exit_stuck);
    }
    job.daemon_set.iter().for_each(DaemonSet::watch);
    let reports = PodReports::start(job.account.clone());
    let mut last_event = None;
    let (mut stability, mut logged) = (Stability::default(), LastLogged::default());
    let mut installer = Installer::new(job.installation, job.metrics.clone());
    let mut running: Option<RunningServices> = None;
    let leads = loop {
        let role;
        (installer, role) = installer.run(Installer::role).await?;
        if matches!(role, Role::Foreign) {
            // The agent of the DaemonSet that owns the installation serves the plugin.
            stop(running.take()).await;
        } else if let (None, Some(services)) = (&running, &job.services) {
            running = Some(services.start(installer.node(), &job.metrics, &reports, &facts)?);
        }
        match role {
            Role::Standby(obstacle) => {
                health.report(obstacle.clone(), STANDBY_INTERVAL);
                logged.standby(obstacle.as_deref());
                tokio::select! {
                    () = signals.received() => break false,
                    () = sleep(STANDBY_INTERVAL) => continue,
                }
            }
            Role::Leads => running.iter().for_each(RunningServices::lead),
            Role::Foreign => {}
        }
        let plan;
        (installer, plan) = installer.run(Installer::iterate).await?;
        let (readiness, mut delay, ignore_events) = assess(&plan, &mut stability, Instant::now());
        if !installer.watch.is_complete() && !ignore_events {
            delay = delay.min(POLL_INTERVAL);
        }
        if let Some(services) = &running {
            services.report(taint_decision(&plan, &readiness));
        }
        count(&plan, &job.metrics, &readiness);
        job.metrics.set("configuration_rejected", [], plan.rejected.is_some());
        let in_use = |reason: &String| format!("{reason}; the last accepted configuration stays in use");
        let rejected = plan.rejected.as_ref().map(in_use);
        // The plugin works with the earlier configuration: /readyz fails, but the taint stays off.
        health.report(readiness.obstacle().or_else(|| rejected.clone()), delay);
        logged.rejected(rejected.as_deref());
        let event = event(&plan, rejected.as_deref());
        if let (Some(pod), Some(event)) = (&job.own_pod, event.as_ref().filter(|_| event != last_event)) {
            reports.event(pod, event.clone());
        }
        last_event = event;
        logged.iteration(&plan, &readiness, delay);
        // Its own changes are not distinguishable from those of other processes, so it ignores the events after a
        // repair and compares again.
        tokio::select! {
            () = signals.received() => break true,
            () = installer.watch.changed(), if !ignore_events => {}
            () = sleep(delay) => {}
        }
    };
    let mut result = Ok(());
    if leads {
        let removes = removes(job.on_exit, job.daemon_set.as_ref()).await;
        let socket = job.services.and_then(|services| services.socket);
        let end = move |installer: &mut Installer| {
            let result = installer.leave(removes);
            installer.hand_over(socket.as_ref());
            result
        };
        (_, result) = installer.run(end).await?;
        if let Some(services) = running.as_mut().filter(|_| removes) {
            services.remove_taint().await;
        }
    }
    stop(running).await;
    result
}

async fn stop(running: Option<RunningServices>) {
    if let Some(services) = running {
        services.stop().await;
    }
}

/// Ends the process as a failed liveness probe would; the kubelet restarts the container.
fn exit_stuck() {
    tracing::error!("the agent is stuck: the file system does not respond; exiting, so that the agent is restarted");
    process::exit(1);
}

/// Whether the plugin is removed from the node now that the agent ends.
async fn removes(on_exit: OnExit, daemon_set: Option<&DaemonSet>) -> bool {
    match (on_exit, daemon_set) {
        (OnExit::Remove, _) => true,
        (OnExit::Auto, Some(daemon_set)) => daemon_set.is_gone().await.unwrap_or_else(|error| {
            tracing::warn!("{error}; the plugin stays on the node; run `detour uninstall` to remove it");
            false
        }),
        (OnExit::Leave | OnExit::Auto, _) => false,
    }
}

/// The interval at which an agent on standby checks whether it leads now.
const STANDBY_INTERVAL: Duration = Duration::from_millis(100);
/// The interval at which an agent on standby checks whether it could install the plugin.
const OBSTACLE_INTERVAL: Duration = Duration::from_secs(1);
/// How long an agent that ends waits for the next one to serve the plugin's requests.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3);

/// The installation on the node.
pub struct Installation {
    /// The node's files.
    pub node: NodeFiles,
    /// Returns the desired state; called in each iteration, because tokens and configurations change.
    pub desired: Box<dyn Fn() -> Result<DesiredState, String> + Send>,
    /// The directories of the files that `desired` reads, as this process reaches them.
    pub sources: Vec<PathBuf>,
    /// The agent's DaemonSet, as NAMESPACE/NAME: it owns the installation.
    pub owner: Option<String>,
}

/// The role of the agent on its node.
enum Role {
    Leads,
    /// Another agent leads, as in a rolling update. This one takes over when that one ends. It is ready unless it could not
    /// install the plugin, for this reason.
    Standby(Option<String>),
    /// The installation belongs to another DaemonSet.
    Foreign,
}

/// The installation and what is known about it. It moves between the event loop and the pool of threads.
struct Installer {
    installation: Installation,
    metrics: Metrics,
    watch: DirectoryWatch,
    leadership: Option<Leadership>,
    /// On standby: when the last obstacle was found, and the obstacle.
    obstacle: Option<(Instant, Option<String>)>,
}

impl Installer {
    fn new(installation: Installation, metrics: Metrics) -> Self {
        let watch = DirectoryWatch::new();
        Self { installation, metrics, watch, leadership: None, obstacle: None }
    }

    /// Runs `work` in the pool of threads.
    ///
    /// # Errors
    /// `work` panics.
    async fn run<T: Send + 'static>(
        mut self,
        work: impl FnOnce(&mut Self) -> T + Send + 'static,
    ) -> Result<(Self, T), String> {
        let done = spawn_blocking(move || {
            let result = work(&mut self);
            (self, result)
        });
        done.await.map_err(|panic| format!("the agent's installation failed: {panic}"))
    }

    fn node(&self) -> &NodeFiles {
        &self.installation.node
    }

    /// Returns the agent's role. It leads as soon as no other agent does, and then keeps the lead.
    fn role(&mut self) -> Role {
        let Installation { node, owner, .. } = &self.installation;
        if node.other_owner(owner.as_deref()).is_ok_and(|owner| owner.is_some()) {
            return Role::Foreign;
        }
        if self.leadership.is_none() {
            match node.lead() {
                Ok(None) => {
                    let last = self.obstacle.take().filter(|(found, _)| found.elapsed() < OBSTACLE_INTERVAL);
                    let last = last.unwrap_or_else(|| (Instant::now(), self.obstacle()));
                    return Role::Standby(self.obstacle.insert(last).1.clone());
                }
                found => self.leadership = found.ok().flatten(),
            }
        }
        Role::Leads
    }

    /// Returns why this agent could not install the plugin now. Changes nothing.
    fn obstacle(&self) -> Option<String> {
        let desired = (self.installation.desired)();
        let plan = desired.and_then(|desired| self.node().preview(Some(&desired)).map_err(|error| error.to_string()));
        match plan {
            Ok(plan) => plan.obstacle.filter(|(kind, _)| *kind == Obstacle::Failed).map(|(_, why)| why),
            Err(why) => Some(why),
        }
    }

    /// Reconciles the node's files with the desired state. Returns the plan that was applied.
    fn iterate(&mut self) -> InstallPlan {
        self.watch.discard_events();
        let desired = (self.installation.desired)();
        self.watch.directories(&self.directories(desired.as_ref().ok()));
        let desired = match desired {
            Ok(desired) => desired,
            Err(reason) => return InstallPlan::impossible(Obstacle::Failed, reason),
        };
        let plan = self.node().change(Some(&desired));
        if let (Ok(plan), Some(_)) = (&plan, &desired.multus_chain) {
            self.metrics.set("multus_chain_invalid_files", [], plan.invalid_chain_files.len());
        }
        let plan = plan.unwrap_or_else(|error| {
            let is_owned = matches!(error, InstallError::Owned(_));
            InstallPlan::impossible(if is_owned { Obstacle::Occupied } else { Obstacle::Failed }, error.to_string())
        });
        InstallPlan { rejected: desired.rejected, ..plan }
    }

    /// Returns the directories whose changes require a new iteration.
    fn directories(&self, desired: Option<&DesiredState>) -> Vec<PathBuf> {
        let installed = desired.map(|desired| self.node().directories(desired)).unwrap_or_default();
        installed.into_iter().chain(self.installation.sources.iter().cloned()).collect()
    }

    /// Removes the plugin if `removes` is set, and the installation is this agent's. Otherwise, the plugin stays.
    fn leave(&self, removes: bool) -> Result<(), String> {
        let Installation { node, owner, .. } = &self.installation;
        let is_own = || node.other_owner(owner.as_deref()).is_ok_and(|owner| owner.is_none());
        let removes = removes && self.leadership.is_some() && is_own();
        let plan = if removes { node.change(None) } else { Ok(InstallPlan::default()) };
        let plan = plan.map_err(|error| error.to_string())?;
        plan.actions.iter().for_each(|action| tracing::info!("{action}"));
        plan.notes.iter().for_each(|note| tracing::warn!("{note}"));
        let result = if plan.actions.is_empty() { "stays on" } else { "was removed from" };
        tracing::info!("the agent ends; the plugin {result} the node");
        Ok(())
    }

    /// Gives up the lead. If an agent on standby takes it, waits until that one serves the plugin's requests, so that one
    /// agent always does.
    fn hand_over(&mut self, socket: Option<&HostPath>) {
        let Some(leadership) = self.leadership.take() else { return };
        let socket = socket.and_then(|socket| self.node().reach(socket).ok());
        let own = socket.and_then(|socket| Some((socket::identity(&socket).ok()?, socket)));
        self.node().end_lead(leadership);
        let Some((own, socket)) = own else { return };
        let until = |timeout, is: &dyn Fn() -> bool| {
            let interval = STANDBY_INTERVAL / 10;
            wait::until(timeout, [interval; 2], || Ok::<_, Infallible>(is().then_some(()))) == Ok(Some(()))
        };
        if until(3 * STANDBY_INTERVAL, &|| self.node().has_agent()) {
            until(HANDOVER_TIMEOUT, &|| socket::identity(&socket).is_ok_and(|file| file != own));
        }
    }
}
