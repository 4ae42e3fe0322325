//! `detour agent`.

use super::Failure;
use super::install::{PROGRAM_FILE, Wanted, program};
use super::repair::Repair;
use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};
use detour_cni::agent::install::{HostPath, kubeconfig};
use detour_cni::agent::{DaemonSet, Job, Metrics, OnExit, OwnPod, PluginToken, Services, Wish, keep};
use detour_cni::cluster::ObjectRef;
use detour_cni::cni::LogLevel;
use detour_cni::logging;
use detour_cni::pod::PodRef;
use detour_cni::trusted_file::read_trusted;
use std::cell::RefCell;
use std::env;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;

const EXAMPLES: &str = "\
Examples:
  detour agent --platform openshift --root /host --health-address 0.0.0.0:8000
        in a DaemonSet that has the node's directories mounted below /host
  detour agent --root /host --plugin-service-account detour-plugin
        gives the plugin a token of its own
  detour agent --root /host --on-exit auto --daemon-set detour-agent
        takes the plugin off the node when that DaemonSet is deleted
  detour agent --root /host --node-name \"$NODE_NAME\"
        answers the plugin's questions about this node's pods, so that an ADD needs no API, and
        repairs those that bypass the mesh

It installs as `detour install` does, with the same flags, and again whenever the program, the
kubeconfig, the configuration, this pod's token or the file of --config change. A file of --config
that the plugin would refuse changes nothing: the last accepted one stays in use, and /readyz, the
log, the metric detour_configuration_refused and an Event of the agent's pod (POD_NAME, POD_UID and
POD_NAMESPACE name it) report the new one. SIGTERM ends it. The plugin
stays then and goes on working, unless --on-exit says otherwise: `remove` takes it away,
`auto` does so if the DaemonSet is gone, and leaves it where that can't be known. Of two agents on a
node, as there are in an upgrade, the later one does the work.

/metrics is in the OpenMetrics text format; its names start with detour_.

With a node name it watches the node's pods, all namespaces and all NetworkAttachmentDefinitions,
as this pod's service account, answers the plugin at --socket, and logs each of its calls but
STATUS in a line. Whenever the plugin gets no answer there, it asks the API itself.

It also repairs pods of the node that have a sidecar and bypass it: their init container
istio-validation has ended with 126, their rules are no longer what was asked for, or they have
never been attached. In place, the plugin's own ADD is made (again) in the pod's network namespace,
and the rules are read back. Each pod gets an Event of it. A pod is tried five times, with pauses.

With --health-address the agent ends with exit code 1 if the file system has not answered for two
minutes, so that it is started again.

Exit codes: 0 ended by a signal, 1 something is wrong, 2 wrong usage or input. A file
of --config or --kubeconfig that is missing or wrong does not end it: /readyz and the log report it.";

/// The agent's own kubeconfig has a few KiB.
const LARGEST_KUBECONFIG: u64 = 1 << 20;

/// Puts the plugin on a node and keeps it there.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Agent {
    #[command(flatten)]
    wanted: Wanted,
    /// What happens to the plugin on the node when the agent ends.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "leave")]
    on_exit: Exit,
    /// The DaemonSet that decides for --on-exit=auto, in the namespace of the agent's own pods.
    #[arg(long, value_name = "NAME", required_if_eq("on_exit", "auto"))]
    daemon_set: Option<String>,
    /// A service account, in the namespace of the agent's own pods, whose token the plugin gets; else it
    /// gets the agent's own.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["kubeconfig", "token_file"])]
    plugin_service_account: Option<String>,
    /// Where /healthz, /readyz and /metrics are answered; nowhere unless given.
    #[arg(long, value_name = "ADDR:PORT")]
    health_address: Option<SocketAddr>,
    /// The name of this node's Node object [default: $NODE_NAME]; without one, no pod is watched.
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Where, on the node, the plugin's questions are answered; nowhere if it is empty.
    #[arg(long, value_name = "PATH", default_value = "/run/detour/agent.sock")]
    socket: Socket,
    /// The taint that the node has while the plugin isn't ready there (NoSchedule); none unless given.
    #[arg(long, value_name = "KEY", value_parser = taint)]
    taint: Option<String>,
    #[command(flatten)]
    repair: Repair,
}

/// A taint's key as the API takes it (apimachinery, `IsQualifiedName`), as far as an agent can know.
fn taint(key: &str) -> Result<String, String> {
    let (prefix, name) = key.rsplit_once('/').unwrap_or(("p", key));
    let plain = |text: &str| {
        let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        text.chars().all(inner) && ends(text.chars().next()) && ends(text.chars().last())
    };
    let accepted = plain(prefix) && plain(name) && name.len() <= 63;
    accepted.then(|| key.to_owned()).ok_or_else(|| "accepted: [PREFIX/]NAME, as cni.istio.io/not-ready".to_owned())
}

/// A path on the node, or nowhere.
#[derive(Debug, Clone)]
struct Socket(Option<HostPath>);

impl FromStr for Socket {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(Self(None)) } else { text.parse().map(|path| Self(Some(path))) }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Exit {
    /// It stays and goes on working.
    Leave,
    /// It is taken away, as by `detour uninstall`.
    Remove,
    /// It stays as long as --daemon-set does, and is taken away with that.
    Auto,
}

/// What is wrong with the arguments is wrong usage.
fn usage<T>(result: Result<T>) -> Result<T, Failure> {
    result.map_err(|why| Failure::Usage(format!("{why:#}")))
}

impl Agent {
    pub(super) fn run(&self) -> ExitCode {
        super::ended(self.keep())
    }

    fn keep(&self) -> Result<ExitCode> {
        logging::start(LogLevel::Info, None, &[], None, None);
        let node = self.wanted.node()?;
        tracing::info!("{}", self.wanted.describe_platform(&node));
        let program = program()?;
        let (plugin_token, on_exit) = (usage(self.plugin_token())?, usage(self.on_exit())?);
        let token = || match &plugin_token {
            None => self.wanted.token(),
            Some(token) => {
                let written = || {
                    let reached = node.reach(&self.wanted.own_kubeconfig()).ok()?;
                    String::from_utf8(read_trusted(&reached, LARGEST_KUBECONFIG).ok()?).ok()
                };
                token.current(|| kubeconfig::token_in(&written()?)).map_err(|why| anyhow!(why))
            }
        };
        let services = self.services();
        let socket = services.as_ref().and_then(|services| services.socket.as_ref());
        let accepted = RefCell::new(None);
        let desired = || {
            let desired = |given: &_| self.wanted.desired(&node, &program, given, &token, socket);
            let newest = self.wanted.given().and_then(|given| desired(&given).map(|desired| (desired, given)));
            match newest {
                Ok((desired, given)) => {
                    accepted.replace(Some(given));
                    Ok(Wish { desired, refused: None })
                }
                // The token and all else stay current with the last configuration that was accepted.
                Err(error) => {
                    let refused = format!("{error:#}");
                    let earlier = accepted.borrow().as_ref().and_then(|given| desired(given).ok());
                    earlier.map(|desired| Wish { desired, refused: Some(refused.clone()) }).ok_or(refused)
                }
            }
        };
        let job = Job {
            node: &node,
            desired: &desired,
            program: Path::new(PROGRAM_FILE),
            sources: self.wanted.sources(),
            on_exit,
            health_address: self.health_address,
            metrics: Metrics::default(),
            services: services.clone(),
            own_pod: self.own_pod(),
        };
        keep(&job).map_err(|why| anyhow!(why))?;
        Ok(ExitCode::SUCCESS)
    }

    fn plugin_token(&self) -> Result<Option<PluginToken>> {
        let Some(name) = &self.plugin_service_account else { return Ok(None) };
        Ok(Some(PluginToken::new(
            self.wanted.account_for("--plugin-service-account")?,
            self.own("--plugin-service-account", name)?,
        )))
    }

    fn on_exit(&self) -> Result<OnExit> {
        Ok(match (self.on_exit, &self.daemon_set) {
            (Exit::Remove, _) => OnExit::Remove,
            (Exit::Auto, Some(name)) => {
                OnExit::Auto(DaemonSet::new(self.wanted.account_for("--daemon-set")?, self.own("--daemon-set", name)?))
            }
            (Exit::Leave | Exit::Auto, _) => OnExit::Leave,
        })
    }

    /// An object of the agent's own namespace.
    fn own(&self, flag: &str, name: &str) -> Result<ObjectRef> {
        let namespace = self.wanted.agent_namespace();
        let namespace =
            namespace.with_context(|| format!("{flag} {name}: in which namespace? --agent-namespace NAME"))?;
        Ok(ObjectRef { namespace, name: name.to_owned() })
    }

    /// The agent's own pod, as the downward API names it; `None` for an agent that is started by hand.
    fn own_pod(&self) -> Option<OwnPod> {
        let set = |key| env::var(key).ok().filter(|value| !value.is_empty());
        let (namespace, name) = (self.wanted.agent_namespace()?, set("POD_NAME")?);
        let account = self.wanted.account_for("Events of the agent's pod").ok()?;
        Some(OwnPod { account, pod: PodRef { namespace, name, uid: set("POD_UID") } })
    }

    fn services(&self) -> Option<Services> {
        let named = self.node_name.clone().or_else(|| env::var("NODE_NAME").ok());
        let node_name = named.filter(|name| !name.is_empty())?;
        let account = self.wanted.account_for("no pod is watched").inspect_err(|why| tracing::warn!("{why}"));
        Some(Services {
            node_name,
            socket: self.socket.0.clone(),
            account: account.ok()?,
            repair: self.repair.settings(),
            taint: self.taint.clone(),
        })
    }
}
