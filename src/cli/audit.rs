//! `detour audit`: lists the pods of a node whose traffic bypasses the mesh.

use super::doctor::TargetArguments;
use super::output::{CommandError, CommandOutput, OutputArguments};
use clap::Args;
use detour_cni::inspect::audit::audit;

const EXAMPLES: &str = "\
Examples:
  detour audit
        list the pods of this node whose traffic bypasses the mesh, in whole or in part
  detour audit --all -n shop -o json
        also list pods without bypassing traffic, and exclusions that no traffic has used
  kubectl exec -n kube-system detour-agent-x7k2p -- /detour audit --root /host
        run in the agent's pod on the node

The command changes nothing. It requires root, and the service account of the agent's pod: the
plugin's own kubeconfig can't list pods. With your own kubeconfig, use kubectl detour audit.

Exit codes: 0 all pods are redirected by the desired rules, apart from exclusions, 1 a pod bypasses
the mesh entirely, has other rules than desired, has a rule of another program before the desired
ones, or was not examined, 2 invalid arguments or input.";

/// List the pods of this node whose traffic bypasses the mesh, and why
///
/// Each line about a pod is a live rule that lets traffic bypass the sidecar, with what it has counted.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct AuditArguments {
    /// List only the pods of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// List all pods with a sidecar, and exclusions that no traffic has used
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    node_target: TargetArguments,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

pub(super) fn run(arguments: &AuditArguments) -> Result<CommandOutput, CommandError> {
    let target = arguments.node_target.read()?;
    let report = audit(&target, arguments.namespace.as_deref(), arguments.all)?;
    arguments.output.render_verdict(&report, report.is_clean())
}
