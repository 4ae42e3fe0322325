//! The cluster of the command line, and the agents of its nodes.

use crate::cli::output::CommandError;
use crate::cli::subject::check_exists;
use clap::Args;
use detour_cni::cluster::{AgentPod, CommandOutput, UserApi};
use detour_cni::cni::{Code, Error};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long a command runs before its progress is shown.
const SILENCE: Duration = Duration::from_secs(1);

/// Selects the cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct ConnectionArguments {
    /// Kubeconfig [default: the files in $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current context]
    #[arg(long, value_name = "NAME", global = true)]
    context: Option<String>,
    /// Namespace of the agents' pods [default: all namespaces]
    #[arg(long, value_name = "NAMESPACE", global = true)]
    agent_namespace: Option<String>,
}

impl ConnectionArguments {
    /// Opens the API server of the kubeconfig.
    ///
    /// # Errors
    /// The kubeconfig is missing or invalid.
    pub(crate) fn open(&self) -> Result<UserApi, CommandError> {
        if let Some(path) = &self.kubeconfig {
            check_exists("--kubeconfig", path)?;
        }
        UserApi::open(self.kubeconfig.as_deref(), self.context.as_deref()).map_err(CommandError::Input)
    }

    pub(crate) fn agent_namespace(&self) -> Option<&str> {
        self.agent_namespace.as_deref()
    }

    /// Returns the agents' pods on one or all nodes.
    ///
    /// # Errors
    /// The request failed.
    pub(super) fn agents(&self, api: &UserApi, node: Option<&str>) -> Result<Vec<AgentPod>, Error> {
        api.agents(self.agent_namespace(), node)
    }
}

/// Runs a command in all these agents, and shows the progress on a terminal.
///
/// # Errors
/// The API server can't be used.
pub(super) fn run_in_all(
    api: &UserApi,
    agents: &[&AgentPod],
    command: &[&str],
    timeout: Duration,
) -> Result<Vec<Result<CommandOutput, Error>>, Error> {
    let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
    let mut shown = Instant::now();
    api.exec(agents, &command, timeout, |ended| {
        if ended < agents.len() && shown.elapsed() >= SILENCE {
            shown = Instant::now();
            crate::cli::output::show_progress(&format!("{ended} of {} agents have answered", agents.len()));
        }
    })
}

/// Returns the error for a cluster without agents.
pub(super) fn no_agents() -> Error {
    let msg = "no agent found: no pod has the labels app.kubernetes.io/part-of=detour and \
               app.kubernetes.io/component=agent and mounts /var/lib/cni/detour of its node; install detour, or correct \
               --context and --agent-namespace";
    Error::new(Code::PodUnknown, msg)
}

/// Whether a command failed because the agent's version does not know it or one of its options (clap's messages).
pub(super) fn is_unknown_to_agent(output: &CommandOutput) -> bool {
    let stderr = String::from_utf8_lossy(&output.stderr);
    output.code == 2 && ["unrecognized subcommand", "unexpected argument"].iter().any(|text| stderr.contains(text))
}
