//! What the agent's main loop does with the node's files. All of it blocks, so it runs in the pool of threads.

use crate::agent::install::{DesiredState, InstallError, InstallPlan, Leadership, NodeFiles, Obstacle};
use crate::agent::metrics::Metrics;
use crate::agent::socket;
use crate::agent::watch::DirectoryWatch;
use crate::host_path::HostPath;
use crate::wait;
use std::convert::Infallible;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;

/// The interval in which an agent on standby checks whether it leads now.
pub(super) const STANDBY_INTERVAL: Duration = Duration::from_millis(100);
/// The interval in which an agent on standby checks whether it could lead.
const OBSTACLE_INTERVAL: Duration = Duration::from_secs(1);
/// How long an agent that ends waits until the next one serves the plugin's requests.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3);

/// The desired state of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredInstallation {
    /// The desired state, with the last accepted configuration.
    pub desired: DesiredState,
    /// Why a newer configuration is not in use.
    pub rejected: Option<String>,
}

/// The installation on the node.
pub struct Installation {
    /// The node's files.
    pub node: NodeFiles,
    /// Returns the desired state; called in each iteration, because tokens and configurations change.
    pub desired: Box<dyn Fn() -> Result<DesiredInstallation, String> + Send>,
    /// The directories of the files that `desired` reads, as this process reaches them.
    pub sources: Vec<PathBuf>,
    /// The agent's DaemonSet, as NAMESPACE/NAME: it owns the installation.
    pub owner: Option<String>,
}

/// What the agent is on its node.
pub(super) enum Role {
    Leads,
    /// Another agent leads, as in a rolling update. This one takes over when that one has ended, so it is ready only if it
    /// could: otherwise, this is the reason.
    Standby(Option<String>),
    /// The installation belongs to another DaemonSet.
    Foreign,
}

/// The installation and what is known about it. It moves between the event loop and the pool of threads.
pub(super) struct Installer {
    installation: Installation,
    metrics: Metrics,
    pub(super) watch: DirectoryWatch,
    leadership: Option<Leadership>,
    /// On standby: when the last obstacle was found, and the obstacle.
    obstacle: Option<(Instant, Option<String>)>,
}

impl Installer {
    pub(super) fn new(installation: Installation, metrics: Metrics) -> Self {
        let watch = DirectoryWatch::new();
        Self { installation, metrics, watch, leadership: None, obstacle: None }
    }

    /// Runs `work` in the pool of threads.
    ///
    /// # Errors
    /// `work` panics.
    pub(super) async fn run<T: Send + 'static>(
        mut self,
        work: impl FnOnce(&mut Self) -> T + Send + 'static,
    ) -> Result<(Self, T), String> {
        let done = spawn_blocking(move || {
            let result = work(&mut self);
            (self, result)
        });
        done.await.map_err(|panic| format!("the agent's installation failed: {panic}"))
    }

    pub(super) fn node(&self) -> &NodeFiles {
        &self.installation.node
    }

    /// Returns the agent's role. It leads from the first time on at which no other agent does.
    pub(super) fn role(&mut self) -> Role {
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
        let desired = match self.desired() {
            Ok(DesiredInstallation { desired, .. }) => desired,
            Err(why) => return Some(why),
        };
        match self.node().preview(Some(&desired)) {
            Ok(plan) => plan.obstacle.filter(|(kind, _)| *kind == Obstacle::Failed).map(|(_, why)| why),
            Err(error) => Some(error.to_string()),
        }
    }

    fn desired(&self) -> Result<DesiredInstallation, String> {
        let DesiredInstallation { desired, rejected } = (self.installation.desired)()?;
        let desired = DesiredState { owner: self.installation.owner.clone(), ..desired };
        Ok(DesiredInstallation { desired, rejected })
    }

    /// Makes the node's files as desired. Returns what has changed, and why the newest configuration is not in use.
    pub(super) fn iterate(&mut self) -> (InstallPlan, Option<String>) {
        self.watch.discard_events();
        let desired = self.desired();
        self.watch.directories(&self.directories(desired.as_ref().ok().map(|found| &found.desired)));
        let DesiredInstallation { desired, rejected } = match desired {
            Ok(desired) => desired,
            Err(reason) => return (InstallPlan::impossible(Obstacle::Failed, reason), None),
        };
        let plan = self.node().change(Some(&desired));
        if let (Ok(plan), Some(_)) = (&plan, &desired.multus_chain) {
            self.metrics.set("multus_chain_invalid_files", [], plan.invalid_chain_files.len());
        }
        let plan = plan.unwrap_or_else(|error| {
            let is_owned = matches!(error, InstallError::Owned(_));
            InstallPlan::impossible(if is_owned { Obstacle::Occupied } else { Obstacle::Failed }, error.to_string())
        });
        (plan, rejected)
    }

    /// Returns the directories whose changes require a new iteration.
    fn directories(&self, desired: Option<&DesiredState>) -> Vec<PathBuf> {
        let installed = desired.map(|desired| self.node().directories(desired)).unwrap_or_default();
        installed.into_iter().chain(self.installation.sources.iter().cloned()).collect()
    }

    /// Ends the installation: removes the plugin if `removes`, and lets an agent on standby lead, which then serves the
    /// plugin's requests at `socket`.
    pub(super) fn end(&mut self, removes: bool, socket: Option<&HostPath>) -> Result<(), String> {
        let result = self.leave(removes);
        self.hand_over(socket);
        result
    }

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

    /// Lets an agent on standby lead. If there is one, waits until it serves the plugin's requests, so that there is always
    /// one that does.
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
