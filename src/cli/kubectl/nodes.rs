//! `kubectl detour check` and `kubectl detour audit`: reports about all nodes, from the agents' reports.

use super::client::Kubectl;
use crate::cli::output::{CommandError, CommandOutput, OutputArguments};
use crate::cli::print_error;
use clap::Args;
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::{
    AgentDaemonSet, AgentPod, NodeCheck, NodeLabels, NodesAudit, NodesCheck, pods_with_running_sidecar,
};
use std::process::ExitCode;
use std::time::Duration;

const CHECK_EXAMPLES: &str = "\
Examples:
  kubectl detour check
  kubectl detour check --node worker-1
        then run `kubectl detour doctor -n NAMESPACE POD` for a pod on the node
  kubectl detour check -l node-role.kubernetes.io/worker -o json

The command runs `detour doctor --node` in the agents of all nodes, 16 at a time. A node that the
DaemonSet of a release selects is unhealthy if it has no ready agent. Exclusions that are no longer
needed do not change the exit code.

Exit codes: 0 all nodes are healthy or skipped, 1 a node is unhealthy or the cluster can't be read,
2 invalid arguments or input.";

const AUDIT_EXAMPLES: &str = "\
Examples:
  kubectl detour audit -A
  kubectl detour audit -n shop -o json

The command runs `detour audit` in one agent of each node, 16 at a time. Pods that are not
redirected come first, then those with a rule of another program, then those with the most bytes.
Most rules count only the first packet of each connection (docs/reports.md). The agents need the
capabilities that the chart value repair.enabled grants.

Exit codes: 0 all pods are redirected and have the desired rules, 1 a pod is not redirected, has
other rules, has a rule of another program that lets traffic bypass the mesh or was not examined,
or a node could not be audited, 2 invalid arguments or input.";

/// Time limit for the checks of one node.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the audit of the pods of one node.
const AUDIT_TIMEOUT: Duration = Duration::from_secs(120);
/// The maximum number of names of pods in the reason for a node.
const MAX_NAMES: usize = 5;

/// Check the installation, API access, the policies of running pods and the kernel on all nodes
///
/// The output has the number of pods with the current policy, and one line per node. For each failed check and each
/// warning, it has what was found and the next step.
#[derive(Debug, Args)]
#[command(after_help = CHECK_EXAMPLES)]
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

/// List the pods of all nodes whose traffic bypasses the mesh, and why
#[derive(Debug, Args)]
#[command(after_help = AUDIT_EXAMPLES)]
pub(super) struct AuditArguments {
    /// Namespace of the pods [default: the namespace of the kubeconfig's context]
    #[arg(short, long, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// List the pods of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

/// Checks the installation on all nodes.
pub(super) fn check(kubectl: &Kubectl, arguments: &CheckArguments) -> Result<CommandOutput, CommandError> {
    let mut nodes = kubectl.nodes(arguments.selector.as_deref())?;
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
    let sets: Vec<AgentDaemonSet> = kubectl.daemon_sets()?.iter().filter_map(AgentDaemonSet::of).collect();
    let all = kubectl.agents(arguments.node.as_deref())?;
    if sets.is_empty() && all.is_empty() {
        return Err(no_agents().into());
    }
    let agents: Vec<&AgentPod> = all.iter().filter(|agent| nodes.iter().any(|node| node.name == agent.node)).collect();
    let words = ["/detour", "doctor", "--node", "--root", "/host", "-o", "json"];
    let outputs = kubectl.run_in_all(&agents, &words, CHECK_TIMEOUT);
    let of_agents = agents.iter().zip(&outputs);
    let of_agents = of_agents.map(|(agent, output)| NodeCheck::of_agent(agent, output.as_ref().map_err(Clone::clone)));
    let without = nodes.iter().filter(|node| !agents.iter().any(|agent| agent.node == node.name));
    let report = NodesCheck::of(of_agents.chain(without.map(|node| without_agent(node, &sets))).collect());
    if !report.healthy {
        let nodes: Vec<&str> = report.unhealthy().into_iter().collect();
        print_error(format_args!("unhealthy nodes: {}", nodes.join(", ")), ExitCode::FAILURE);
    }
    arguments.output.render_verdict(&report, report.healthy)
}

/// Lists the pods of all nodes that bypass the mesh.
pub(super) fn audit(kubectl: &Kubectl, arguments: &AuditArguments) -> Result<CommandOutput, CommandError> {
    let namespace = match (arguments.all_namespaces, &arguments.namespace) {
        (true, _) => None,
        (false, Some(namespace)) => Some(namespace.clone()),
        (false, None) => Some(kubectl.namespace()?),
    };
    let namespace = namespace.as_deref();
    let all = kubectl.agents(None)?;
    if all.is_empty() {
        return Err(no_agents().into());
    }
    let agents: Vec<&AgentPod> =
        all.chunk_by(|a, b| a.node == b.node).filter_map(|of_node| AgentPod::choose(of_node)).collect();
    let mut words = vec!["/detour", "audit", "--root", "/host", "-o", "json"];
    words.extend(namespace.iter().flat_map(|namespace| ["-n", namespace]));
    let outputs = kubectl.run_in_all(&agents, &words, AUDIT_TIMEOUT);
    let mut report = NodesAudit::default();
    for (agent, output) in agents.iter().zip(&outputs) {
        report.add(&agent.node, namespace, output.as_ref().map_err(Clone::clone));
    }
    match not_audited(kubectl, namespace, &agents) {
        Ok(nodes) => nodes.into_iter().for_each(|(node, error)| report.add(&node, namespace, Err(error))),
        Err(error) => report.add("nodes without an agent", namespace, Err(error.to_string())),
    }
    let report = report.sorted();
    if !report.errors.is_empty() {
        let nodes: Vec<&str> = report.errors.iter().map(|error| error.node.as_str()).collect();
        print_error(format_args!("nodes not audited: {}", nodes.join(", ")), ExitCode::FAILURE);
    }
    arguments.output.render_verdict(&report, report.is_clean())
}

/// Returns the error for a cluster without agents.
fn no_agents() -> Error {
    let msg = "no agent found: no pod has the labels app.kubernetes.io/part-of=detour and \
               app.kubernetes.io/component=agent and mounts /var/lib/cni/detour of its node; install detour, or correct \
               --context and --agent-namespace";
    Error::new(Code::PodUnknown, msg)
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

/// Returns the nodes without an agent that have pods with a sidecar, with the reason why these pods are not examined.
fn not_audited(
    kubectl: &Kubectl,
    namespace: Option<&str>,
    agents: &[&AgentPod],
) -> Result<Vec<(String, String)>, Error> {
    let mut found = Vec::new();
    for NodeLabels { name, .. } in kubectl.nodes(None)? {
        if agents.iter().any(|agent| agent.node == name) {
            continue;
        }
        let pods = pods_with_running_sidecar(&kubectl.pods_of_node(&name, namespace)?);
        if !pods.is_empty() {
            let shown = pods[..pods.len().min(MAX_NAMES)].join(", ");
            let more = if pods.len() > MAX_NAMES { ", …" } else { "" };
            let error = format!(
                "no agent; pods with a sidecar, not examined: {} ({shown}{more}); see kubectl detour check --node {name}",
                pods.len()
            );
            found.push((name, error));
        }
    }
    Ok(found)
}
