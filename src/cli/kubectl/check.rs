//! `kubectl detour check`: checks the installation on all nodes.

use super::agents::{no_agents, run_in_all};
use crate::cli::cluster::ConnectionArguments;
use crate::cli::output::{CommandError, CommandOutput, OutputArguments};
use crate::cli::print_error;
use clap::Args;
use detour_cni::cluster::{AgentDaemonSet, AgentPod, NodeLabels};
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::{NodeCheck, NodesCheck};
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  kubectl detour check
  kubectl detour check --node worker-1
        then run `kubectl detour doctor -n NAMESPACE POD` for a pod on the node
  kubectl detour check -l node-role.kubernetes.io/worker -o json

The command runs `detour doctor --node` in the agents of all nodes, 16 at a time. A node that the
DaemonSet of a release selects is unhealthy if it has no ready agent. If the DaemonSet has a node
affinity, nodes without an agent are skipped.

The output also lists workloads whose pods have a native sidecar, and whose init containers no
longer need their exclusion. This does not change the exit code.

Exit codes: 0 all nodes are healthy or skipped, 1 a node is unhealthy or the cluster can't be read,
2 invalid arguments or input.";

/// Time limit for the checks of one node.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Check the installation, API access, the policies of running pods and the kernel on all nodes
///
/// The output has the number of pods with the current policy, and one line per node. For each failed check and each
/// warning, it has what was found and the next step.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct CheckArguments {
    /// Check only this node
    #[arg(long, value_name = "NAME", conflicts_with = "selector")]
    node: Option<String>,
    /// Check only nodes with these labels, in the syntax of kubectl -l
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<String>,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

pub(super) fn run(connection: &ConnectionArguments, arguments: &CheckArguments) -> Result<CommandOutput, CommandError> {
    let api = connection.open()?;
    let mut nodes = api.nodes(arguments.selector.as_deref())?;
    if let Some(name) = &arguments.node {
        nodes.retain(|node| node.name == *name);
    }
    if nodes.is_empty() {
        let which = arguments.node.as_ref().map_or_else(
            || arguments.selector.as_ref().map_or_else(|| "nodes".to_owned(), |labels| format!("nodes {labels:?}")),
            |name| format!("node {name}"),
        );
        return Err(Error::new(Code::PodUnknown, format!("{which}: not found; see kubectl get nodes")).into());
    }
    let sets = api.agent_daemon_sets(connection.agent_namespace())?;
    let all = connection.agents(&api, arguments.node.as_deref())?;
    if sets.is_empty() && all.is_empty() {
        return Err(no_agents().into());
    }
    let agents: Vec<&AgentPod> = all.iter().filter(|agent| nodes.iter().any(|node| node.name == agent.node)).collect();
    let command = ["/detour", "doctor", "--node", "--root", "/host", "-o", "json"];
    let outputs = run_in_all(&api, &agents, &command, TIMEOUT)?;
    let of_agents = agents.iter().zip(&outputs).map(|(agent, output)| {
        let output = output.as_ref().map(|output| (&output.stdout[..], &output.stderr[..])).map_err(Clone::clone);
        NodeCheck::of_agent(&agent.node, agent.object.to_string(), &agent.release, agent.ready, output)
    });
    let without = nodes.iter().filter(|node| !agents.iter().any(|agent| agent.node == node.name));
    let report = NodesCheck::of(of_agents.chain(without.map(|node| without_agent(node, &sets))).collect());
    if !report.healthy {
        print_error(format_args!("unhealthy nodes: {}", report.unhealthy().join(", ")), ExitCode::FAILURE);
    }
    arguments.output.render_verdict(&report, report.healthy)
}

/// Returns the result of a node without an agent.
fn without_agent(node: &NodeLabels, sets: &[AgentDaemonSet]) -> NodeCheck {
    let selecting = |result| sets.iter().find(|set| set.selects(node) == result).map(|set| &set.object);
    let (expected, reason) = match (selecting(Some(true)), selecting(None)) {
        (Some(set), _) => {
            let next = format!("see kubectl describe daemonset -n {} {}", set.namespace, set.name);
            (false, format!("no agent, but DaemonSet {set} selects this node; {next}"))
        }
        (None, Some(set)) => (true, format!("no agent; DaemonSet {set} has a node affinity")),
        (None, None) => (true, "no agent; no DaemonSet of an agent selects this node".to_owned()),
    };
    NodeCheck::without_agent(&node.name, expected, reason)
}
