//! The agent's main loop: reconciles the node with the desired state at every change, and reports readiness.

mod iteration;
mod messages;

use super::containers::{ContainerSettings, ExcludedContainers};
use super::daemon_set::DaemonSet;
use super::facts::SyncStates;
use super::health::Health;
use super::install::{DesiredState, InstallError, InstallPlan, Leadership, NodeFiles};
use super::metrics::Metrics;
use super::pod_reports::PodReports;
use super::pods::RepairMode;
use super::runtime::AgentRuntime;
use super::services::{self, Services};
use super::socket;
use super::watch::{DirectoryWatch, WakeReason};
use crate::cluster::{Api, Event};
use crate::pod::PodRef;
use crate::wait;
use clap::ValueEnum;
use iteration::{Iteration, Readiness, Stability};
use messages::LastLogged;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The interval of reconciliations if the kernel does not report changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The interval in which an agent on standby checks whether it leads now.
const STANDBY_INTERVAL: Duration = Duration::from_millis(100);
/// How long an agent that ends waits until the next one serves the plugin's requests.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3);

/// The limit of pods that wait for a check of their rules for excluded containers.
const MAX_DAMAGED: usize = 64;

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

/// The desired state of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredInstallation {
    /// The desired state, with the last accepted configuration.
    pub desired: DesiredState,
    /// Why a newer configuration is not in use.
    pub rejected: Option<String>,
}

/// The settings of an agent.
pub struct Job<'a> {
    /// The event loop of the agent's tasks, which has not been started.
    pub runtime: &'a AgentRuntime,
    /// The node's files.
    pub node: &'a NodeFiles,
    /// Returns the desired state; called in each iteration, because tokens and configurations change.
    pub desired: &'a dyn Fn() -> Result<DesiredInstallation, String>,
    /// The directories of the files that `desired` reads, as this process reaches them.
    pub sources: Vec<PathBuf>,
    /// The agent's DaemonSet, as NAMESPACE/NAME: it owns the installation.
    pub owner: Option<String>,
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
    /// The account that writes Events and conditions of pods; `None` to only log Events.
    pub account: Option<Api>,
    /// How the traffic of excluded containers bypasses the sidecar; `None` if containers can't be excluded.
    pub containers: Option<ContainerSettings>,
    /// The agent's own pod, for Events of a configuration that is rejected.
    pub own_pod: Option<PodRef>,
}

/// Runs the agent until SIGTERM or SIGINT. Problems of the node do not end it; `/readyz` and the log report them.
///
/// # Errors
/// A signal descriptor, a thread or the health address is not available, or the final removal of the plugin fails.
pub fn run(job: &Job<'_>) -> Result<(), String> {
    let signal_error = |error| format!("can't wait for signals: {error}");
    // Before any thread is started, because a thread inherits the signal mask.
    let mut watch = DirectoryWatch::new().map_err(signal_error)?;
    // Dropped last: the others end tasks.
    let _running = job.runtime.start().map_err(|error| format!("can't start the thread of the tasks: {error}"))?;
    let tasks = job.runtime.tasks();
    let watches = SyncStates::default();
    let health = Health::new(watches.clone());
    if let Some(address) = job.health_address {
        let bound = health
            .serve(address, job.metrics.clone(), tasks)
            .map_err(|error| format!("can't listen on health address {address}: {error}"))?;
        tracing::info!(address = %bound, "serving /healthz, /readyz and /metrics");
        health.supervise(tasks, exit_stuck);
    }
    job.daemon_set.iter().for_each(|daemon_set| daemon_set.watch(tasks));
    let reports = PodReports::start(job.account.clone(), tasks);
    let mut last_event = None;
    let (mut stability, mut logged) = (Stability::default(), LastLogged::default());
    let mut leadership = None;
    let mut on_standby: Option<(Instant, Option<String>)> = None;
    let mut running = None;
    loop {
        watch.discard_events();
        if running.is_none() && !job.is_occupied() {
            running = Some(job.start_services(&reports, &watches)?);
        }
        if leadership.is_none() && !job.is_occupied() {
            let found = job.node.lead();
            if let Ok(None) = found {
                // Another agent leads, as in a rolling update. This one takes over when that one has ended, so it is
                // ready only if it could.
                let last = on_standby.take().filter(|(checked, _)| checked.elapsed() < POLL_INTERVAL);
                let (_, obstacle) = on_standby.insert(last.unwrap_or_else(|| (Instant::now(), job.obstacle())));
                health.report(obstacle.clone(), STANDBY_INTERVAL);
                logged.standby(obstacle.as_deref());
                if watch.wait(STANDBY_INTERVAL, true).map_err(signal_error)? == WakeReason::Signal {
                    return Ok(());
                }
                continue;
            }
            leadership = found.ok().flatten();
            if let Some(RunningServices { services: Some(services), .. }) = &running {
                services.lead();
            }
        }
        let (desired, rejected) = match (job.desired)() {
            Ok(DesiredInstallation { desired, rejected }) => {
                (Ok(DesiredState { owner: job.owner.clone(), ..desired }), rejected)
            }
            Err(why) => (Err(why), None),
        };
        watch.directories(&job.directories(desired.as_ref().ok()));
        let iteration = job.iterate(desired);
        if matches!(iteration, Iteration::Occupied(_)) {
            // The agent of the DaemonSet that owns the installation serves the plugin.
            running = None;
        }
        let (readiness, mut delay, ignore_events) = iteration.assess(&mut stability, Instant::now());
        if !watch.is_complete() && !ignore_events {
            delay = delay.min(POLL_INTERVAL);
        }
        if let Some(RunningServices { services: Some(services), .. }) = &mut running {
            services.report(iteration.taint_decision(&readiness));
        }
        job.count(&iteration, &readiness);
        job.metrics.rejected.set(rejected.is_some().into());
        let rejected = rejected.map(|reason| format!("{reason}; the last accepted configuration stays in use"));
        // The plugin works with the earlier configuration: /readyz fails, but the taint stays off.
        health.report(readiness.obstacle().or_else(|| rejected.clone()), delay);
        logged.rejected(rejected.as_deref());
        let event = installation_event(rejected.as_deref(), &iteration);
        if let (Some(pod), Some(event)) = (&job.own_pod, event.as_ref().filter(|_| event != last_event)) {
            reports.event(pod, event.clone());
        }
        last_event = event;
        logged.iteration(&iteration, &readiness, delay);
        // Its own changes are not distinguishable from those of other processes, so it ignores the events after a
        // repair and compares again.
        if watch.wait(delay, ignore_events).map_err(signal_error)? == WakeReason::Signal {
            let removes = leadership.is_some() && job.removes();
            let result = job.end(removes);
            job.hand_over(leadership);
            if let Some(RunningServices { services: Some(services), .. }) = running.as_mut().filter(|_| removes) {
                services.remove_taint();
            }
            return result;
        }
    }
}

/// Returns the Event for a rejected configuration, for another reason that prevents the installation, or for Multus's
/// auxiliary chain that Multus skips.
fn installation_event(rejected: Option<&str>, iteration: &Iteration) -> Option<Event> {
    let (reason, message) = match (rejected, iteration) {
        (Some(message), _) => ("DetourConfigurationRejected", message),
        (None, Iteration::Failed(message) | Iteration::Occupied(message) | Iteration::Lacks(message)) => {
            ("DetourNotInstalled", message.as_str())
        }
        (None, Iteration::ChainSkipped(message)) => ("DetourChainSkipped", message.as_str()),
        (None, _) => return None,
    };
    Some(Event { warning: true, reason: reason.into(), message: message.to_owned() })
}

/// Ends the process as a failed liveness probe would; the kubelet restarts the container.
fn exit_stuck() {
    tracing::error!("the agent is stuck: the file system does not respond; exiting, so that the agent is restarted");
    process::exit(1);
}

/// The services of an agent whose DaemonSet owns the installation. Dropping them ends their tasks.
struct RunningServices {
    services: Option<services::RunningServices>,
    #[expect(dead_code, reason = "held, never read")]
    containers: Option<ExcludedContainers>,
}

impl Job<'_> {
    /// Whether the plugin is removed from the node now that the agent ends.
    fn removes(&self) -> bool {
        match (self.on_exit, &self.daemon_set) {
            (OnExit::Remove, _) => true,
            (OnExit::Auto, Some(daemon_set)) => daemon_set.is_gone().unwrap_or_else(|error| {
                tracing::warn!("{error}; the plugin stays on the node; run `detour uninstall` to remove it");
                false
            }),
            (OnExit::Leave | OnExit::Auto, _) => false,
        }
    }

    /// Whether the installation on the node belongs to another DaemonSet.
    fn is_occupied(&self) -> bool {
        self.node.other_owner(self.owner.as_deref()).is_ok_and(|owner| owner.is_some())
    }

    fn start_services(&self, reports: &PodReports, watches: &SyncStates) -> Result<RunningServices, String> {
        let (sender, damaged) = mpsc::channel(MAX_DAMAGED);
        let repairs = self.services.as_ref().is_some_and(|services| services.pods.repair != RepairMode::Off);
        let sender = repairs.then_some(sender);
        let start = |settings: &ContainerSettings| {
            settings.start(self.node, &self.metrics, reports.clone(), sender, self.runtime.tasks())
        };
        let containers = self.containers.as_ref().map(start).transpose()?;
        let of_containers = (containers.clone(), damaged);
        let start = |services: &Services| services.start(self.node, &self.metrics, of_containers, reports, watches);
        let services = self.services.as_ref().map(start).transpose()?;
        Ok(RunningServices { services, containers })
    }

    fn iterate(&self, desired: Result<DesiredState, String>) -> Iteration {
        let desired = match desired {
            Ok(desired) => desired,
            Err(reason) => return Iteration::Failed(reason),
        };
        self.reconcile(&desired).unwrap_or_else(|error| match error {
            InstallError::Owned(_) => Iteration::Occupied(error.to_string()),
            error => Iteration::Failed(error.to_string()),
        })
    }

    fn reconcile(&self, desired: &DesiredState) -> Result<Iteration, InstallError> {
        let plan = self.node.install(desired)?;
        let with_notes = |state: String| [vec![state], plan.notes.clone()].concat().join("; ");
        if desired.multus_chain.is_some() {
            self.metrics.multus_chain(plan.invalid_chain_files.len());
        }
        Ok(match (&plan.waits_for, &plan.lacks) {
            _ if plan.refused.is_some() => Iteration::Failed(with_notes(plan.unmet().unwrap_or_default())),
            (None, _) if plan.follows => Iteration::Followed(Box::new(plan)),
            _ if !plan.actions.is_empty() => Iteration::Repaired(Box::new(plan)),
            (Some(missing), _) => Iteration::Waits(with_notes(format!("missing: {missing}"))),
            (None, _) if !plan.invalid_chain_files.is_empty() => {
                Iteration::ChainSkipped(with_notes(plan.unmet().unwrap_or_default()))
            }
            (None, Some(lacking)) => Iteration::Lacks(with_notes(format!("missing: {lacking}"))),
            (None, None) => Iteration::Settled(with_notes("the node has the desired state".to_owned())),
        })
    }

    /// Returns why this agent could not install the plugin now. Changes nothing.
    fn obstacle(&self) -> Option<String> {
        let desired = match (self.desired)() {
            Ok(DesiredInstallation { desired, .. }) => DesiredState { owner: self.owner.clone(), ..desired },
            Err(why) => return Some(why),
        };
        match self.node.preview(&desired) {
            Ok(plan) => plan.refused,
            Err(error) => Some(error.to_string()),
        }
    }

    fn count(&self, iteration: &Iteration, readiness: &Readiness) {
        self.metrics.ready.set((*readiness == Readiness::Ready).into());
        match iteration {
            Iteration::Repaired(_) => self.metrics.install("done"),
            Iteration::Failed(_) | Iteration::Occupied(_) => self.metrics.install("failed"),
            Iteration::Settled(_)
            | Iteration::Lacks(_)
            | Iteration::Followed(_)
            | Iteration::Waits(_)
            | Iteration::ChainSkipped(_) => {}
        }
    }

    /// Returns the directories whose changes require a new iteration.
    fn directories(&self, desired: Option<&DesiredState>) -> Vec<PathBuf> {
        let installed = desired.map(|desired| self.node.directories(desired)).unwrap_or_default();
        installed.into_iter().chain(self.sources.iter().cloned()).collect()
    }

    /// Lets an agent on standby lead. If there is one, waits until it serves the plugin's requests, so that there is always
    /// one that does.
    fn hand_over(&self, leadership: Option<Leadership>) {
        let Some(leadership) = leadership else { return };
        let socket = self.services.as_ref().and_then(|services| services.socket.as_ref());
        let socket = socket.and_then(|socket| self.node.reach(socket).ok());
        let own = socket.and_then(|socket| Some((socket::identity(&socket).ok()?, socket)));
        self.node.end_lead(leadership);
        let Some((own, socket)) = own else { return };
        let until = |timeout, is: &dyn Fn() -> bool| {
            let interval = STANDBY_INTERVAL / 10;
            wait::until(timeout, [interval; 2], || Ok::<_, Infallible>(is().then_some(()))) == Ok(Some(()))
        };
        if until(3 * STANDBY_INTERVAL, &|| self.node.has_agent()) {
            until(HANDOVER_TIMEOUT, &|| socket::identity(&socket).is_ok_and(|file| file != own));
        }
    }

    fn end(&self, removes: bool) -> Result<(), String> {
        let plan = if removes { self.node.uninstall() } else { Ok(InstallPlan::default()) };
        let plan = plan.map_err(|error| error.to_string())?;
        plan.actions.iter().for_each(|action| tracing::info!("{action}"));
        plan.notes.iter().for_each(|note| tracing::warn!("{note}"));
        let result = if plan.actions.is_empty() { "stays on" } else { "was removed from" };
        tracing::info!("the agent ends; the plugin {result} the node");
        Ok(())
    }
}
