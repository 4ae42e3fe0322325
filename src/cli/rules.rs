//! `detour rules`

use super::output::OutputArguments;
use super::subject::ClusterArguments;
use super::subject::{LiveArguments, NetnsRules, NetnsSelector};
use super::{CommandError, CommandOutput};
use clap::{ArgGroup, Args};
use detour_cni::inspect::{RulesReport, RulesView};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  detour rules -n shop web-0                            with your kubeconfig, or as the agent
  detour rules -n shop web-0 --kubeconfig /var/lib/cni/detour/kubeconfig
                                                        with the plugin's own kubeconfig
  detour rules --container 5f0c1f2ab34d                 as crictl ps prints it
  detour rules --pid \"$(pgrep -o envoy)\" -o json
  detour rules --all /run/netns/cni-0c1f
  kubectl exec -n kube-system detour-agent-x7k2p -- /detour rules --root /host -n shop web-0

A pod or container is looked for on this node, by the results that its runtime keeps and by the
control groups of processes. For a pod of another node, the command to run there is printed.
Needs root, and neither iptables nor nft.
Exit codes: 0 the namespace holds what its attachments ask for, or nothing is kept of any; 1 it does
not, or can't be found or read; 2 wrong usage or input.";

/// A pod's live rules with their counters, beside those that it should have
///
/// A rule that should be there is marked as missing, one of ours that should not as extra or moved, and
/// another program's as foreign. Where the rules differ, the table shows the difference.
#[derive(Debug, Args)]
#[command(
    after_help = EXAMPLES,
    group(ArgGroup::new("whose").required(true).args(["place", "pid", "container", "pod_uid"])),
)]
pub(super) struct RulesArguments {
    /// A network namespace: a path, or a name in /run/netns; with -n, the pod's name
    #[arg(value_name = "NETNS|POD")]
    place: Option<String>,
    #[command(flatten)]
    whose: LiveArguments,
    #[command(flatten)]
    cluster: ClusterArguments,
    /// List all rules after a difference; without a difference, and for programs, all are listed anyway
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    output: OutputArguments,
}

/// The rules; exit code 1 where they are not what is asked for.
pub(super) fn run(arguments: &RulesArguments) -> Result<CommandOutput, CommandError> {
    let whose = match (&arguments.place, &arguments.cluster.namespace) {
        (Some(pod), Some(_)) => Some(NetnsSelector::Pod(Box::new(arguments.cluster.subject(pod)?))),
        (Some(path), None) => Some(NetnsSelector::Netns(path.into())),
        (None, Some(_)) => None,
        (None, None) => arguments.whose.named(),
    };
    let whose = whose.ok_or_else(|| CommandError::Usage("name a network namespace, or a pod: -n NS POD".to_owned()))?;
    let NetnsRules { rules, netns, evidence } = arguments.whose.read(&whose, "rules")?;
    let report = RulesReport { found_by: evidence, ..rules.report(&netns) };
    let answer = arguments.output.answer(&RulesView { report: &report, all: arguments.all })?;
    let code = if report.as_asked == Some(false) { ExitCode::FAILURE } else { answer.code };
    Ok(CommandOutput { code, ..answer })
}
