//! The agent's main loop: reconciles the node with the desired state at every change, and reports readiness.

mod installer;
mod iteration;

use super::daemon_set::DaemonSet;
use super::facts::SharedFacts;
use super::health::Health;
use super::metrics::Metrics;
use super::pod_reports::PodReports;
use super::services::{RunningServices, Services};
use super::watch::EndSignals;
use crate::cluster::Api;
use crate::pod::PodRef;
use clap::ValueEnum;
use installer::{Installer, Role, STANDBY_INTERVAL};
use iteration::{LastLogged, Stability, assess, count, event, taint_decision};
use std::net::SocketAddr;
use std::process;
use std::time::{Duration, Instant};
use tokio::time::sleep;

pub use installer::{DesiredInstallation, Installation};

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
        let (plan, rejected);
        (installer, (plan, rejected)) = installer.run(Installer::iterate).await?;
        let (readiness, mut delay, ignore_events) = assess(&plan, &mut stability, Instant::now());
        if !installer.watch.is_complete() && !ignore_events {
            delay = delay.min(POLL_INTERVAL);
        }
        if let Some(services) = &running {
            services.report(taint_decision(&plan, &readiness));
        }
        count(&plan, &job.metrics, &readiness);
        job.metrics.set("configuration_rejected", [], rejected.is_some());
        let rejected = rejected.map(|reason| format!("{reason}; the last accepted configuration stays in use"));
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
        (_, result) = installer.run(move |installer| installer.end(removes, socket.as_ref())).await?;
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
