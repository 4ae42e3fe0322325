//! Keeping the plugin on the node: whatever changes, what is wanted is compared with what is found.

use super::daemon_set::DaemonSet;
use super::health::Health;
use super::install::plan::undo;
use super::install::{ConfigurationTarget, DesiredState, InstallError, InstallPlan, NodeFiles, reconcile};
use super::metrics::Metrics;
use super::own_pod::OwnPod;
use super::services::Services;
use super::stability::{HOLD, Stability};
use super::watch::{DirectoryWatch, WakeReason};
use crate::cluster::Event;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, Instant};

/// Files are looked at this often even if nothing seems to change: not every file system tells.
const RESYNC: Duration = Duration::from_secs(60);
/// After a failure, a full disk for one.
const RETRY: Duration = Duration::from_secs(5);
/// How long one turn may take before the agent counts as stuck.
const SLACK: Duration = Duration::from_secs(30);
/// How often the watchdog looks whether it is.
const CHECK: Duration = Duration::from_secs(10);

/// What happens to the plugin when the agent ends.
#[derive(Debug, Clone)]
pub enum OnExit {
    /// It stays, and goes on working: for upgrades.
    Leave,
    /// It is taken away: before the agent itself is.
    Remove,
    /// It stays as long as this DaemonSet does: where that can't be known, too.
    Auto(DaemonSet),
}

/// What is wanted on the node now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredInstallation {
    /// With the newest configuration that was accepted.
    pub desired: DesiredState,
    /// Why a newer configuration is not in use.
    pub refused: Option<String>,
}

/// What an agent does.
pub struct Job<'a> {
    /// Where.
    pub node: &'a NodeFiles,
    /// What is wanted; asked anew each time, for tokens and configurations change.
    pub desired: &'a dyn Fn() -> Result<DesiredInstallation, String>,
    /// The program that is copied.
    pub program: &'a Path,
    /// Directories, as this process sees them, with what `desired` reads.
    pub sources: Vec<PathBuf>,
    /// At the end.
    pub on_exit: OnExit,
    /// Where a kubelet's questions are answered, and Prometheus's.
    pub health_address: Option<SocketAddr>,
    /// What is counted of this and told there.
    pub metrics: Metrics,
    /// What is done beside, where the node's name is known.
    pub services: Option<Services>,
    /// The agent's own pod, for Events of a configuration that is refused.
    pub own_pod: Option<OwnPod>,
}

/// Where this agent stands among those of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leadership {
    /// It has done nothing yet, and takes over from whoever is there.
    New,
    Leads,
    /// A later one leads, as long as that is there.
    Yielded,
}

/// What came of a turn.
enum Iteration {
    /// All is as it should be; in words, with what else was seen.
    Settled(String),
    /// Now it is; these things were not.
    Repaired(InstallPlan),
    /// Something is missing that somebody else must bring; in words.
    Waits(String),
    /// A later agent does the work.
    Yields(String),
    Failed(String),
}

/// What a turn means for the node.
#[derive(Debug, PartialEq, Eq)]
enum Readiness {
    Ready,
    /// Everything is in place, but not for long enough.
    Confirming,
    /// In words.
    Not(String),
}

/// Installs, repairs what drifts, and ends with SIGTERM or SIGINT. Nothing that is wrong on the
/// node ends it: `/readyz` and the log say what is.
///
/// # Errors
/// The kernel refuses to wait for signals, or a thread; the address for `/readyz` can't be had; at the
/// end, what is to be removed can't be.
pub fn keep(job: &Job<'_>) -> Result<(), String> {
    let waiting = |error| format!("can't wait for signals: {error}");
    // Before any thread, which would not leave the signals alone.
    let mut watch = DirectoryWatch::new().map_err(waiting)?;
    let health = Health::new(RESYNC + SLACK);
    if let Some(address) = job.health_address {
        let bound = health
            .serve(address, job.metrics.clone())
            .map_err(|error| format!("{address}: can't answer there: {error}"))?;
        tracing::info!(address = %bound, "answers /healthz, /readyz and /metrics");
        health.supervise(CHECK, end_stuck).map_err(|error| format!("can't start the watchdog: {error}"))?;
    }
    if let OnExit::Auto(daemon_set) = &job.on_exit {
        daemon_set.watch().map_err(|error| format!("can't watch DaemonSets: {error}"))?;
    }
    // Ended with this function.
    let mut services = match &job.services {
        Some(services) => Some(services.start(job.node, &job.metrics)?),
        None => None,
    };
    let events = job.own_pod.as_ref().map(OwnPod::events).transpose();
    let mut events = events.map_err(|error| format!("no thread for Events: {error}"))?;
    let (mut stability, mut said) = (Stability::default(), LastLogged::default());
    let (mut standing, mut present) = (Leadership::New, None);
    loop {
        watch.forget();
        let (desired, refused) = match (job.desired)() {
            Ok(DesiredInstallation { desired, refused }) => (Ok(desired), refused),
            Err(why) => (Err(why), None),
        };
        watch.directories(&job.directories(desired.as_ref().ok()));
        if let (None, Ok(desired)) = (&present, &desired) {
            present = job.node.be_present(&desired.installer).ok().map(|lock| (desired.installer.clone(), lock));
            job.node.forget_absent();
        }
        let unusable = desired.as_ref().err().cloned();
        let turn = job.turn(desired, standing);
        standing = match turn {
            Iteration::Yields(_) => Leadership::Yielded,
            Iteration::Failed(_) => standing,
            _ => Leadership::Leads,
        };
        let (readiness, time, deaf) = turn.assess(&mut stability, Instant::now());
        if let Some(services) = &mut services {
            services.tell(turn.decides(&readiness));
        }
        job.count(&turn, &readiness);
        job.metrics.refused(refused.is_some());
        let refused = refused.map(|why| format!("{why}; the last accepted configuration stays in use"));
        // The plugin works as before, so the taint does not come back.
        health.tell(readiness.obstacle().or_else(|| refused.clone()), time + SLACK);
        said.refused(refused.as_deref());
        if let Some(events) = &mut events {
            events.tell(complaint(refused.as_deref(), unusable.as_deref()));
        }
        said.report(&turn, &readiness, time);
        // After a repair it looks again: what others did meanwhile and what it did itself look alike.
        if watch.wait(time, deaf).map_err(waiting)? == WakeReason::ToEnd {
            let removes = job.on_exit.removes();
            let ended = present.map_or(Ok(()), |(installer, _)| {
                job.node.forget_presence(&installer);
                job.end(&installer, removes)
            });
            if let Some(services) = services.as_mut().filter(|_| removes) {
                services.leave();
            }
            return ended;
        }
    }
}

/// The Event for a configuration that is refused, or for anything else because of which nothing can be installed.
fn complaint(refused: Option<&str>, unusable: Option<&str>) -> Option<Event> {
    let refused = refused.map(|why| ("DetourConfigurationRefused", why));
    let (reason, why) = refused.or(unusable.map(|why| ("DetourNotInstalled", why)))?;
    Some(Event { warning: true, reason: reason.into(), message: why.to_owned() })
}

/// Ends the process as a failed liveness probe would: the kubelet starts the container again.
fn end_stuck() {
    tracing::error!("the agent is stuck: the file system does not answer; it ends, to be started again");
    process::exit(1);
}

impl OnExit {
    fn removes(&self) -> bool {
        match self {
            Self::Leave => false,
            Self::Remove => true,
            Self::Auto(daemon_set) => daemon_set.is_gone().unwrap_or_else(|why| {
                tracing::warn!("{why}; so the plugin stays: `detour uninstall` takes it off");
                false
            }),
        }
    }
}

impl Job<'_> {
    fn turn(&self, desired: Result<DesiredState, String>, standing: Leadership) -> Iteration {
        let desired = match desired {
            Ok(desired) => desired,
            Err(why) => return Iteration::Failed(why),
        };
        self.compare(&desired, standing).unwrap_or_else(|error| Iteration::Failed(error.to_string()))
    }

    fn compare(&self, desired: &DesiredState, standing: Leadership) -> Result<Iteration, InstallError> {
        let lock = self.node.lock()?;
        let found = self.node.look(Some(desired))?;
        let other = &found.record.installer;
        if standing != Leadership::New && *other != desired.installer && self.node.is_present(other) {
            return Ok(Iteration::Yields(other.clone()));
        }
        let plan = reconcile(desired, &found);
        self.node.apply(&plan, self.program, &lock)?;
        let with_notes = |state: String| [vec![state], plan.notes.clone()].concat().join("; ");
        Ok(match &plan.waits_for {
            _ if !plan.actions.is_empty() => Iteration::Repaired(plan),
            Some(what) => Iteration::Waits(with_notes(format!("missing: {what}"))),
            None => Iteration::Settled(with_notes("all is as it should be".to_owned())),
        })
    }

    fn count(&self, turn: &Iteration, readiness: &Readiness) {
        self.metrics.installed(*readiness == Readiness::Ready);
        match turn {
            Iteration::Repaired(_) => self.metrics.install("done"),
            Iteration::Failed(_) => self.metrics.install("failed"),
            Iteration::Settled(_) | Iteration::Waits(_) | Iteration::Yields(_) => {}
        }
    }

    /// Where something can change that matters.
    fn directories(&self, desired: Option<&DesiredState>) -> Vec<PathBuf> {
        let mut paths = BTreeSet::new();
        if let Some(desired) = desired {
            paths.extend(desired.programs.iter().map(|path| path.parent()));
            paths.extend([&desired.kubeconfig, &desired.node].into_iter().flatten().map(|(path, _)| path.parent()));
            paths.insert(match &desired.configuration {
                ConfigurationTarget::Own { path, .. } => path.parent(),
                ConfigurationTarget::Listed { dir, .. } => dir.clone(),
            });
        }
        let reached = paths.iter().filter_map(|path| self.node.reach(path).ok());
        reached.chain(self.sources.iter().cloned()).collect()
    }

    fn end(&self, installer: &str, removes: bool) -> Result<(), String> {
        let remove = || {
            let lock = self.node.lock()?;
            let found = self.node.look(None)?;
            // A later agent may have taken over since this one looked last.
            let plan = if found.record.installer == installer { undo(&found) } else { InstallPlan::default() };
            if !plan.actions.is_empty() {
                self.node.apply(&plan, self.program, &lock)?;
            }
            self.node.forget_absent();
            self.node.forget_lock(lock);
            Ok(plan)
        };
        let plan =
            if removes { remove().map_err(|error: InstallError| error.to_string())? } else { InstallPlan::default() };
        plan.actions.iter().for_each(|action| tracing::info!("{action}"));
        plan.notes.iter().for_each(|note| tracing::warn!("{note}"));
        let what = if plan.actions.is_empty() { "stays on" } else { "is taken off" };
        tracing::info!("ends; the plugin {what} the node");
        Ok(())
    }
}

impl Iteration {
    /// What it means for the node, the time to the next turn, and whether changes until then are ignored.
    fn assess(&self, stability: &mut Stability, now: Instant) -> (Readiness, Duration, bool) {
        match self {
            Self::Settled(_) => match stability.in_place(now) {
                Duration::ZERO => (Readiness::Ready, RESYNC, false),
                left if stability.is_ready() => (Readiness::Ready, left, false),
                left => (Readiness::Confirming, left, false),
            },
            Self::Repaired(plan) => {
                let pause = stability.repaired();
                let readiness = match &plan.waits_for {
                    Some(what) => {
                        stability.incomplete();
                        Readiness::Not(what.clone())
                    }
                    None if stability.is_contested() => Readiness::Not(contested(plan, stability)),
                    None if stability.is_ready() => Readiness::Ready,
                    None => Readiness::Confirming,
                };
                (readiness, pause, true)
            }
            Self::Yields(_) => (Readiness::Ready, RETRY, false),
            Self::Waits(why) => {
                stability.incomplete();
                (Readiness::Not(why.clone()), RESYNC, false)
            }
            Self::Failed(why) => {
                stability.incomplete();
                (Readiness::Not(why.clone()), RETRY, true)
            }
        }
    }
}

impl Iteration {
    /// Whether the node's taint comes off; `None`: it stays as it is. That of an agent that yields is up to
    /// the one that leads, and one that has just replaced the program, as in an upgrade, changes nothing yet.
    fn decides(&self, readiness: &Readiness) -> Option<bool> {
        match (self, readiness) {
            (Self::Yields(_), _) | (_, Readiness::Confirming) => None,
            (_, readiness) => Some(*readiness == Readiness::Ready),
        }
    }
}

impl Readiness {
    /// What `/readyz` reports; `None` for a node that is ready.
    fn obstacle(&self) -> Option<String> {
        match self {
            Self::Ready => None,
            Self::Confirming => {
                Some(format!("installed, but not yet confirmed: ready after {} s in place", HOLD.as_secs()))
            }
            Self::Not(why) => Some(why.clone()),
        }
    }
}

/// Why a node is not ready although everything was just put in place.
fn contested(plan: &InstallPlan, stability: &Stability) -> String {
    let what = plan.actions.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    format!(
        "another process keeps reverting the installation: {} repairs in a row did not last {} s, the latest: {what}; \
         stop that process (Cilium: set cni.exclusive=false)",
        stability.repairs(),
        HOLD.as_secs()
    )
}

/// What the log said last.
#[derive(Debug, Default)]
struct LastLogged {
    state: String,
    refused: Option<String>,
    ready: bool,
}

impl LastLogged {
    /// One line for each configuration that is refused, and when none is any longer.
    fn refused(&mut self, why: Option<&str>) {
        if self.refused.as_deref() == why {
            return;
        }
        match why {
            Some(why) => tracing::error!("{why}"),
            None => tracing::info!("the newest configuration is accepted"),
        }
        self.refused = why.map(str::to_owned);
    }

    /// One line for each thing that was done, for each new state, and when the node becomes ready.
    fn report(&mut self, turn: &Iteration, readiness: &Readiness, time: Duration) {
        let state = match turn {
            Iteration::Repaired(plan) => {
                plan.actions.iter().for_each(|action| tracing::info!("{action}"));
                if let Readiness::Not(why) = readiness
                    && plan.waits_for.is_none()
                {
                    tracing::warn!("{why}; next check in {} s", time.as_secs());
                }
                String::new()
            }
            Iteration::Settled(state) | Iteration::Waits(state) | Iteration::Failed(state) => state.clone(),
            Iteration::Yields(other) => format!("{other} has taken over; this one only watches"),
        };
        if self.state != state && !state.is_empty() {
            match turn {
                Iteration::Failed(_) => tracing::error!("{state}"),
                Iteration::Waits(_) => tracing::warn!("{state}"),
                _ => tracing::info!("{state}"),
            }
        }
        self.state = state;
        let ready = *readiness == Readiness::Ready;
        if ready && !self.ready {
            tracing::info!("the plugin is ready on this node");
        }
        self.ready = ready;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a turn means for the node's taint and for `/readyz`.
    fn assessed(turn: &Iteration, stability: &mut Stability, now: Instant) -> (Option<bool>, Option<String>) {
        let (readiness, ..) = turn.assess(stability, now);
        (turn.decides(&readiness), readiness.obstacle())
    }

    #[test]
    fn the_taint_comes_off_when_the_node_is_ready_and_goes_on_when_it_is_known_not_to_be() {
        let (now, settled) = (Instant::now(), || Iteration::Settled(String::new()));
        let repaired = || Iteration::Repaired(InstallPlan::default());
        let fresh = &mut Stability::default();
        for turn in [repaired(), settled()] {
            let (taint, obstacle) = assessed(&turn, fresh, now);
            assert!(taint.is_none() && obstacle.is_some_and(|why| why.contains("not yet confirmed")), "as it was");
        }
        assert_eq!(assessed(&settled(), fresh, now + HOLD), (Some(true), None));
        assert_eq!(assessed(&repaired(), fresh, now), (Some(true), None), "one repair changes nothing");
        assert_eq!(assessed(&Iteration::Yields("later".into()), fresh, now), (None, None));
        for turn in [Iteration::Waits("why".into()), Iteration::Failed("why".into())] {
            assert_eq!(assessed(&turn, fresh, now), (Some(false), Some("why".into())));
        }
        let missing = InstallPlan { waits_for: Some("a list".into()), ..InstallPlan::default() };
        assert_eq!(assessed(&Iteration::Repaired(missing), fresh, now), (Some(false), Some("a list".into())));
        let contested = &mut Stability::default();
        for _ in 0..4 {
            contested.repaired();
        }
        let (taint, obstacle) = assessed(&repaired(), contested, now);
        assert!(taint == Some(false) && obstacle.is_some_and(|why| why.contains("keeps reverting")));
        assert_eq!(assessed(&settled(), contested, now).0, None, "not off before it has held");
    }
}
