//! `detour rules`: compares the live rules of a network namespace with the desired ones.

use super::cluster::ClusterArguments;
use super::output::{CommandError, CommandOutput, OutputArguments};
use super::subject::{NO_NETNS, NetnsArguments};
use clap::{ArgGroup, Args};
use detour_cni::inspect::RulesReport;
use std::path::Path;

const EXAMPLES: &str = "\
Examples:
  detour rules -n shop web-0
  detour rules --container 5f0c1f2ab34d -o json
        use a container ID from crictl ps
  kubectl exec -n kube-system detour-agent-x7k2p -- /detour rules --root /host -n shop web-0";

/// Compare a pod's live rules with the desired ones, and show packet counters
///
/// The table marks each rule that differs: missing (desired, but not in the kernel), extra (in the kernel, but
/// not desired), moved (in the wrong position), or foreign (added by another program). If the pod excludes containers,
/// a second table lists those that bypass the sidecar now.
///
/// The command finds a pod with the service account of the agent's pod, or with the plugin's kubeconfig. For a pod on
/// another node, it prints the command to run there. It requires root, but neither iptables nor nft.
///
/// Exit codes: 0 rules as desired or no saved state, 1 different or unreadable rules, 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(
    after_help = EXAMPLES,
    group(ArgGroup::new("target").required(true).args(["place", "pid", "container"])),
)]
pub(super) struct RulesArguments {
    /// Name of a pod, with -n or kubectl detour; otherwise a network namespace, as a path or a name in /run/netns
    #[arg(value_name = "NETNS|POD")]
    place: Option<String>,
    #[command(flatten)]
    netns: NetnsArguments,
    #[command(flatten)]
    cluster: ClusterArguments,
    /// List all rules after the differences
    ///
    /// Without differences, and in JSON and YAML, the report always lists all rules.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

impl RulesArguments {
    /// Returns namespace and name of the pod.
    pub(super) fn selected(&self) -> (Option<&str>, Option<&str>) {
        (self.cluster.namespace.as_deref(), self.place.as_deref())
    }
}

pub(super) fn run(arguments: &RulesArguments) -> Result<CommandOutput, CommandError> {
    let root = arguments.netns.place.root()?;
    let (pod, place) = match (&arguments.place, &arguments.cluster.namespace) {
        (Some(pod), Some(_)) => (Some(arguments.cluster.pod(pod, root)?), None),
        (None, Some(_)) => return Err(CommandError::usage(NO_NETNS)),
        (place, None) => (None, place.as_deref().map(Path::new)),
    };
    let rules = arguments.netns.read(pod.as_ref(), place, "rules")?;
    let mut report = RulesReport { all: arguments.all, ..rules.report() };
    report.containers.iter_mut().for_each(|sets| sets.add_paths(root));
    arguments.output.render_verdict(&report, report.as_asked != Some(false))
}
