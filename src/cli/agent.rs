//! `detour agent`.
//!
//! `detour agent --repair …`: pods that bypass the mesh.

use super::CommandError;
use super::install::{InstallOptions, PROGRAM_FILE, program};
use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};
use detour_cni::agent::install::{HostPath, kubeconfig};
use detour_cni::agent::repair::{Criteria, RepairMode, RepairSettings, Selector};
use detour_cni::agent::{DaemonSet, DesiredInstallation, Job, Metrics, OnExit, OwnPod, PluginToken, Services, keep};
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
use std::time::Duration;

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
pub(super) struct AgentArguments {
    #[command(flatten)]
    wanted: InstallOptions,
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
    socket: SocketPath,
    /// The taint that the node has while the plugin isn't ready there (NoSchedule); none unless given.
    #[arg(long, value_name = "KEY", value_parser = taint)]
    taint: Option<String>,
    #[command(flatten)]
    repair: RepairArguments,
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
struct SocketPath(Option<HostPath>);

impl FromStr for SocketPath {
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
fn usage<T>(result: Result<T>) -> Result<T, CommandError> {
    result.map_err(|why| CommandError::Usage(format!("{why:#}")))
}

impl AgentArguments {
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
        let warned = RefCell::new(Vec::new());
        // Once each, however often the configuration is compared.
        let warn = |warnings: Vec<String>| {
            let earlier = warned.replace(warnings.clone());
            for warning in warnings.iter().filter(|warning| !earlier.contains(warning)) {
                tracing::warn!("{warning}");
            }
        };
        let desired = || {
            let desired = |given: &_| self.wanted.desired(&node, &program, given, &token, socket, &warn);
            let newest = self.wanted.given().and_then(|given| desired(&given).map(|desired| (desired, given)));
            match newest {
                Ok((desired, given)) => {
                    accepted.replace(Some(given));
                    Ok(DesiredInstallation { desired, refused: None })
                }
                // The token and all else stay current with the last configuration that was accepted.
                Err(error) => {
                    let refused = format!("{error:#}");
                    let earlier = accepted.borrow().as_ref().and_then(|given| desired(given).ok());
                    earlier
                        .map(|desired| DesiredInstallation { desired, refused: Some(refused.clone()) })
                        .ok_or(refused)
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

/// How pods that bypass the mesh are repaired.
#[derive(Debug, Args)]
#[command(next_help_heading = "Repair of pods")]
pub(super) struct RepairArguments {
    /// What is done with a pod that raced the plugin, or lost its rules.
    #[arg(long, value_name = "HOW", value_enum, default_value = "repair")]
    repair: How,
    /// What is done where --repair repair has failed five times.
    #[arg(long, value_name = "HOW", value_enum, default_value = "off")]
    repair_otherwise: Otherwise,
    /// The label of --repair label.
    #[arg(long, value_name = "KEY=VALUE", value_parser = label, default_value = "cni.istio.io/uninitialized=true")]
    repair_label: (String, String),
    /// Which pods, by their labels, as for kubectl -l; all unless given.
    #[arg(long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    repair_selector: Selector,
    /// How often the rules of each pod are looked at besides when it changes, in seconds; 0: never.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(..=86_400))]
    repair_interval: u32,
    /// The annotation of pods that have been validated; if it is empty, any pod.
    #[arg(long, value_name = "KEY", default_value = "sidecar.istio.io/status")]
    repair_annotation: String,
    /// The init container that validates; if it is empty, any.
    #[arg(long, value_name = "NAME", default_value = "istio-validation")]
    repair_init_container: String,
    /// Its exit code where traffic is not redirected; 0: any but success.
    #[arg(long, value_name = "CODE", default_value_t = 126)]
    repair_exit_code: i32,
    /// Its termination message then; any unless given.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    repair_message: String,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum How {
    /// In place: the pod runs on, and gets the rules that it should have.
    Repair,
    /// It is deleted, where a controller makes a new one.
    Delete,
    /// It is labelled, for somebody else to act upon.
    Label,
    /// Nothing.
    Off,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Otherwise {
    /// As --repair delete.
    Delete,
    /// As --repair label.
    Label,
    /// Nothing more.
    Off,
}

fn label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = parts.ok_or("accepted: KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

impl RepairArguments {
    /// `None` where nothing is repaired.
    pub(super) fn settings(&self) -> Option<RepairSettings> {
        Some(RepairSettings {
            criteria: Criteria {
                selector: self.repair_selector.clone(),
                annotation: self.repair_annotation.clone(),
                container: self.repair_init_container.clone(),
                exit_code: self.repair_exit_code,
                message: self.repair_message.clone(),
            },
            mode: match self.repair {
                How::Repair => RepairMode::InPlace,
                How::Delete => RepairMode::Delete,
                How::Label => RepairMode::Label,
                How::Off => return None,
            },
            otherwise: match self.repair_otherwise {
                Otherwise::Delete => Some(RepairMode::Delete),
                Otherwise::Label => Some(RepairMode::Label),
                Otherwise::Off => None,
            },
            label: self.repair_label.clone(),
            interval: Duration::from_secs(self.repair_interval.into()),
        })
    }
}
