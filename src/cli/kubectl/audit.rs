//! `kubectl detour audit`: lists the pods of all nodes that bypass the mesh.

use super::agents::{no_agents, run_in_all};
use crate::cli::cluster::ConnectionArguments;
use crate::cli::output::{CommandError, CommandOutput, OutputArguments};
use crate::cli::print_error;
use clap::Args;
use detour_cni::cluster::{AgentPod, NodeLabels, UserApi};
use detour_cni::cni::Error;
use detour_cni::inspect::NodesAudit;
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  kubectl detour audit -A
  kubectl detour audit -n shop -o json

The command runs `detour audit` in one agent of each node, 16 at a time. A node without an agent is
reported if it has pods with a sidecar. Pods that are not redirected come first, then those with a
rule of another program that lets traffic bypass the mesh, then those with the most bytes. The
numbers are those of the rules' counters: most rules count only the first packet of each connection
(docs/reports.md). The agents need the capabilities that the chart value repair.enabled grants.

Exit codes: 0 all pods are redirected and have the desired rules, 1 a pod is not redirected, has
other rules, has a rule of another program that lets traffic bypass the mesh or was not examined,
or a node could not be audited, 2 invalid arguments or input.";

/// Time limit for the pods of one node.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The maximum number of names of pods in the reason for a node.
const MAX_NAMES: usize = 5;

/// List the pods of all nodes whose traffic bypasses the mesh, and why
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
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

pub(super) fn run(connection: &ConnectionArguments, arguments: &AuditArguments) -> Result<CommandOutput, CommandError> {
    let api = connection.open()?;
    let namespace = (!arguments.all_namespaces).then(|| arguments.namespace.as_deref().unwrap_or(api.namespace()));
    let all = connection.agents(&api, None)?;
    if all.is_empty() {
        return Err(no_agents().into());
    }
    let agents: Vec<&AgentPod> =
        all.chunk_by(|a, b| a.node == b.node).filter_map(|of_node| AgentPod::choose(of_node)).collect();
    let mut words = vec!["/detour", "audit", "--root", "/host", "-o", "json"];
    words.extend(namespace.iter().flat_map(|namespace| ["-n", namespace]));
    let outputs = run_in_all(&api, &agents, &words, TIMEOUT)?;
    let mut report = NodesAudit::default();
    for (agent, output) in agents.iter().zip(&outputs) {
        let output = output.as_ref().map(|output| (&output.stdout[..], &output.stderr[..]));
        report.add(&agent.node, namespace, output.map_err(Clone::clone));
    }
    match without_agent(&api, namespace, &agents) {
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

/// Returns the nodes without an agent that have pods with a sidecar, with the reason why these pods are not examined.
fn without_agent(api: &UserApi, namespace: Option<&str>, agents: &[&AgentPod]) -> Result<Vec<(String, String)>, Error> {
    let mut found = Vec::new();
    for NodeLabels { name, .. } in api.nodes(None)? {
        if agents.iter().any(|agent| agent.node == name) {
            continue;
        }
        let pods: Vec<String> = api.pods_with_sidecar(&name, namespace)?.iter().map(ToString::to_string).collect();
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
