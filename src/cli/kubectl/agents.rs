//! Commands in several agents.

use detour_cni::cluster::{AgentPod, CommandOutput, UserApi};
use detour_cni::cni::{Code, Error};
use std::time::{Duration, Instant};

/// How long a command runs before its progress is shown.
const SILENCE: Duration = Duration::from_secs(1);

/// Runs a command in all these agents, and shows the progress on a terminal. Returns the output of each, or why there is
/// none.
///
/// # Errors
/// The API server can't be used.
pub(super) fn run_in_all(
    api: &UserApi,
    agents: &[&AgentPod],
    command: &[&str],
    timeout: Duration,
) -> Result<Vec<Result<CommandOutput, String>>, Error> {
    let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
    let mut shown = Instant::now();
    let outputs = api.exec(agents, &command, timeout, |ended| {
        if ended < agents.len() && shown.elapsed() >= SILENCE {
            shown = Instant::now();
            crate::cli::output::show_progress(&format!("{ended} of {} agents have answered", agents.len()));
        }
    })?;
    let usable = |(agent, output): (&&AgentPod, Result<CommandOutput, Error>)| match output {
        Ok(output) if is_unknown_to_agent(&output) => {
            Err(format!("the agent in pod {} is too old for this command; upgrade its release", agent.object))
        }
        output => output.map_err(|error| error.to_string()),
    };
    Ok(agents.iter().zip(outputs).map(usable).collect())
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
