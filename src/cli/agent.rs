//! `detour agent`: keeps the plugin installed, serves pod facts to the plugin, and repairs pods that bypass the
//! sidecar.

use super::cluster::{own_kubeconfig, variable};
use super::install::{InstallOptions, agent_namespace, program_digest};
use super::output::CommandError;
use anyhow::{Context, Result, anyhow};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use detour_cni::agent::install::{DesiredState, Digest, GivenKeys, HostPath, NodeFiles, token_in};
use detour_cni::agent::{
    DaemonSet, Installation, Job, Metrics, OnExit, PluginToken, PodSettings, RepairMode, Services, run, run_tasks,
};
use detour_cni::cluster::{Api, ObjectRef};
use detour_cni::logging;
use detour_cni::pod::PodRef;
use detour_cni::trusted_file::read_trusted;
use std::cell::RefCell;
use std::net::SocketAddr;
use tracing::level_filters::LevelFilter;

const EXAMPLES: &str = "\
Examples:
  detour agent --platform openshift --root /host --health-address 0.0.0.0:8000";

/// Limit for the kubeconfig that the agent wrote, which has a few KiB.
const MAX_KUBECONFIG: u64 = 1 << 20;

/// The socket on the node at which the plugin reaches the agent.
const SOCKET: &str = "/run/detour/agent.sock";

/// Keep the plugin installed on a node, serve pod facts to it, and repair pods that bypass the sidecar
///
/// The agent installs the plugin like `detour install`, and again when the program, the kubeconfig, its token or a file
/// of --config or --attachments changes. If the plugin would reject a new file, the last valid one stays in use; /readyz,
/// the log and a metric report it. With a node name, it answers the plugin's requests, repairs pods that bypass their
/// sidecar, and applies changed policies to running pods.
///
/// SIGTERM ends the agent; the plugin stays installed unless --on-exit removes it. With --health-address, the agent also
/// exits with code 1 if the file system hangs for two minutes.
///
/// Exit codes: 0 ended by a signal, 1 failure, 2 invalid arguments or input. A missing or invalid file of --config or
/// --kubeconfig does not end the agent: /readyz and the log report it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct AgentArguments {
    #[command(flatten)]
    pub(super) install: InstallOptions,
    /// What to do with the plugin on the node when the agent ends
    #[arg(long, value_name = "ACTION", default_value = "leave")]
    on_exit: OnExit,
    /// The agent's DaemonSet, in the namespace of its pods ($POD_NAMESPACE); it owns the installation on the node
    #[arg(long, value_name = "NAME", required_if_eq("on_exit", "auto"))]
    daemon_set: Option<String>,
    /// Service account whose token the plugin uses, in the namespace of the agent's pods; if empty, the plugin has no credentials and asks only the agent [default: the agent's own]
    #[arg(long, value_name = "NAME", conflicts_with = "kubeconfig")]
    plugin_service_account: Option<String>,
    /// Serve /healthz, /readyz and /metrics at this address [default: not served]
    #[arg(long, value_name = "ADDR:PORT")]
    health_address: Option<SocketAddr>,
    /// Name of the Node object; without it, the agent watches no pods [default: $NODE_NAME]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Key of the NoSchedule taint that the agent sets on the node while the plugin is not ready [default: no taint]
    #[arg(long, value_name = "KEY")]
    taint: Option<String>,
    /// Register at the container runtime's NRI socket on the node, to exclude containers before their first instruction [default without PATH: /var/run/nri/nri.sock; without the flag: not registered]
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true, default_missing_value = "/var/run/nri/nri.sock")]
    nri_socket: Option<HostPath>,
    /// Whether running pods follow changes of annotations and of the node's configuration
    #[arg(long, value_name = "on|off", action = ArgAction::Set, default_value = "on", value_parser = PossibleValuesParser::new(["on", "off"]).map(|value| value == "on"))]
    live_policy: bool,
    /// How to repair a pod that started before the plugin was ready, or that lost its rules
    #[arg(long, value_name = "MODE", default_value = "repair")]
    repair: RepairMode,
}

impl AgentArguments {
    pub(super) fn run(&self) -> Result<()> {
        run_tasks(self.keep()).context("can't create the agent's event loop").flatten()
    }

    async fn keep(&self) -> Result<()> {
        logging::start(LevelFilter::INFO, None, &[], None);
        let node = self.install.node()?;
        tracing::info!("{}", self.install.describe_platform(&node));
        let program = program_digest()?;
        let metrics = Metrics::default();
        // Its requests share one connection.
        let account = self.install.account().map(|account| account.on_node(self.node_name()).for_tasks());
        let account_for = |flag: &str| account.clone().map_err(|why| CommandError::usage(format!("{flag}: {why}")));
        let flag = "--plugin-service-account";
        let plugin_token = match self.plugin_service_account.as_ref().filter(|name| !name.is_empty()) {
            Some(name) => {
                let object = own_object(flag, name)?;
                Some(PluginToken::start(account_for(flag)?, object, metrics.clone()).await)
            }
            None => None,
        };
        let daemon_set = self.daemon_set.as_ref().map(|name| own_object("--daemon-set", name)).transpose()?;
        let owner = daemon_set.as_ref().map(ObjectRef::to_string);
        let watched = daemon_set.filter(|_| self.on_exit == OnExit::Auto);
        let watched = watched.map(|object| account_for("--daemon-set").map(|account| DaemonSet::new(account, object)));
        let daemon_set = watched.transpose()?;
        let services = self.services(account.clone());
        let desired = DesiredSource {
            install: self.install.clone(),
            without_token: self.plugin_service_account.as_deref() == Some(""),
            node: node.clone(),
            owner: owner.clone(),
            program,
            plugin_token,
            socket: services.as_ref().and_then(|services| services.socket.clone()),
            accepted: RefCell::default(),
            expired: RefCell::default(),
            warned: RefCell::default(),
        };
        let job = Job {
            installation: Installation {
                node,
                desired: Box::new(move || desired.current()),
                sources: self.install.source_directories(),
                owner,
            },
            on_exit: self.on_exit,
            daemon_set,
            health_address: self.health_address,
            metrics,
            services,
            account: account.ok(),
            own_pod: self.own_pod(),
        };
        run(job).await.map_err(|why| anyhow!(why))
    }

    /// Returns the agent's own pod from the environment variables of the downward API, `None` outside of a pod.
    fn own_pod(&self) -> Option<PodRef> {
        let (namespace, name) = (agent_namespace()?, variable("POD_NAME")?);
        Some(PodRef { namespace, name, uid: variable("POD_UID") })
    }

    fn node_name(&self) -> Option<String> {
        let named = self.node_name.clone().or_else(|| variable("NODE_NAME"));
        named.filter(|name| !name.is_empty())
    }

    fn services(&self, account: Result<Api, &str>) -> Option<Services> {
        let Some(node_name) = self.node_name() else {
            if self.taint.is_some() || self.nri_socket.is_some() {
                tracing::warn!("--taint, --nri-socket: no effect: unknown node name; add --node-name NAME");
            }
            return None;
        };
        Some(Services {
            node_name,
            socket: HostPath::new(SOCKET),
            account: account.inspect_err(|why| tracing::warn!("pods are not watched: {why}")).ok()?,
            // Only a primary plugin asks for definitions.
            definitions: self.install.primary != Some(false),
            pods: PodSettings { repair: self.repair, live_policy: self.live_policy },
            nri_socket: self.nri_socket.clone(),
            taint: self.taint.clone(),
        })
    }
}

/// Returns a reference to an object in the namespace of the agent's pods.
fn own_object(flag: &str, name: &str) -> Result<ObjectRef, CommandError> {
    let unknown = || CommandError::usage(format!("{flag} {name}: unknown namespace; set the variable POD_NAMESPACE"));
    Ok(ObjectRef { namespace: agent_namespace().ok_or_else(unknown)?, name: name.to_owned() })
}

/// The desired state of the node, which changes with the files and the token that it comes from.
struct DesiredSource {
    install: InstallOptions,
    /// Whether the plugin gets no credentials.
    without_token: bool,
    node: NodeFiles,
    owner: Option<String>,
    program: Digest,
    plugin_token: Option<PluginToken>,
    socket: Option<HostPath>,
    /// The last valid configuration.
    accepted: RefCell<Option<GivenKeys>>,
    /// What the plugin lacks if its token has expired.
    expired: RefCell<Option<String>>,
    /// The warnings of the last evaluation.
    warned: RefCell<Vec<String>>,
}

impl DesiredSource {
    /// Returns the current state. If the plugin would reject the newest configuration, the last valid one still gets a
    /// current token and program.
    fn current(&self) -> Result<DesiredState, String> {
        let newest = self.install.given_keys();
        let newest = newest.and_then(|given| self.of(&given).map(|desired| (desired, given)));
        match newest {
            Ok((desired, given)) => {
                self.accepted.replace(Some(given));
                Ok(desired)
            }
            Err(error) => {
                let rejected = format!("{error:#}");
                let earlier = self.accepted.borrow().as_ref().and_then(|given| self.of(given).ok());
                let earlier = earlier.ok_or_else(|| rejected.clone())?;
                Ok(DesiredState { rejected: Some(rejected), ..earlier })
            }
        }
    }

    fn of(&self, given: &GivenKeys) -> Result<DesiredState> {
        let token: &dyn Fn() -> Result<String> = &|| self.token();
        let token = Some(token).filter(|_| !self.without_token);
        let warn = |warnings| self.log_new(warnings);
        let desired = self.install.desired(&self.node, &self.program, given, token, self.socket.as_ref(), &warn)?;
        Ok(DesiredState { owner: self.owner.clone(), expired: self.expired.take(), ..desired })
    }

    /// Returns the token for the plugin's kubeconfig.
    fn token(&self) -> Result<String> {
        let Some(token) = &self.plugin_token else { return self.install.token() };
        let installed = || {
            let reached = self.node.reach(&own_kubeconfig()).ok()?;
            token_in(&String::from_utf8(read_trusted(&reached, MAX_KUBECONFIG).ok()?).ok()?)
        };
        let (token, expired) = token.current(installed).map_err(|why| anyhow!(why))?;
        self.expired.replace(expired);
        Ok(token)
    }

    /// Logs each warning once, although the configuration is evaluated again and again.
    fn log_new(&self, warnings: Vec<String>) {
        let earlier = self.warned.replace(warnings.clone());
        for warning in warnings.iter().filter(|warning| !earlier.contains(warning)) {
            tracing::warn!("{warning}");
        }
    }
}
