//! `detour explain`: reports what a configuration does with a pod's traffic, and why.

use super::cluster::NodeArguments;
use super::output::{CommandError, CommandOutput, OutputArguments};
use super::print_error;
use super::subject::SubjectArguments;
use clap::Args;
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{RuleFormat, Ruleset, native, restore_text};
use detour_cni::inspect::{Explanation, explained, picture};
use detour_cni::policy::Ipv6;
use detour_cni::printable::Text;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  kubectl get pod -n shop web-0 -o yaml | detour explain -f - --config istio-cni.conf
  detour explain -f pod.yaml --config 00-detour.conf --definitions definitions/ -o json
        combine all attachments of the pod, as the primary plugin does
  istioctl kube-inject -f web.yaml | detour explain -f - deployment/web
        explain a pod template (Deployment, CronJob, ...) in the file; without a name, all of them
  detour explain -f pod.yaml --rules nft | nft --check -f -
  detour explain -f pod.yaml --format svg > web-0.svg

--rules and --format require exactly one pod. Only --rules nft has the exclusions, which are native.

For a pod of the cluster, use kubectl detour explain: it runs on the pod's node, with the node's
configuration. The command changes nothing. With -f, it needs neither root nor a cluster.

Exit codes: 0 success, 1 an ADD of this pod would fail, 2 invalid arguments or input.";

/// Show what happens to a pod's traffic, and why
///
/// The report shows whether the pod is redirected and which condition decided, every setting with its value and
/// source, the traffic that bypasses the sidecar, and warnings.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExplainArguments {
    #[command(flatten)]
    pub(super) subject: SubjectArguments,
    /// Also print settings with their default, all conditions and requests, and long lists in full
    #[arg(long, conflicts_with_all = ["rules", "format"])]
    all: bool,
    /// Print the rules instead of the report, as input for iptables-restore and ip6tables-restore, or nft -f
    #[arg(long, value_name = "FORMAT", conflicts_with = "output")]
    rules: Option<RuleFormat>,
    /// Print a picture instead of the report
    #[arg(long, value_name = "FORMAT", value_parser = ["svg"], conflicts_with_all = ["output", "rules"])]
    format: Option<String>,
    #[command(flatten)]
    place: NodeArguments,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

pub(super) fn run(arguments: &ExplainArguments) -> Result<CommandOutput, CommandError> {
    let needs_one = arguments.rules.is_some() || arguments.format.is_some();
    let subjects = arguments.subject.read_all(arguments.place.root()?, needs_one)?;
    let of = |subject| Explanation { all: arguments.all, ..explained(subject) };
    if let [subject] = &subjects[..] {
        let explanation = of(subject);
        let add_fails = &explanation.add_fails;
        let text = match (arguments.rules, &arguments.format) {
            (Some(format), _) => rules(&explanation, format),
            (None, Some(_)) => picture(subject, &explanation),
            (None, None) => return arguments.output.render_verdict(&explanation, add_fails.is_none()),
        };
        let code = match add_fails {
            Some(cause) => {
                print_error(format_args!("pod {}: an ADD fails: {cause}", subject.name()), ExitCode::FAILURE)
            }
            None => ExitCode::SUCCESS,
        };
        return Ok(CommandOutput { text: Text::lines(&text), code });
    }
    let explanations: Vec<_> = subjects.iter().map(of).collect();
    let fine = explanations.iter().all(|one| one.add_fails.is_none());
    arguments.output.render_verdict(&explanations, fine)
}

/// Returns the rules as text, and prints a note about those that the text does not have.
fn rules(Explanation { pod, policy, decision, .. }: &Explanation, format: RuleFormat) -> String {
    let ipv6 = policy.redirect().map(|redirect| redirect.ipv6);
    let rules = Ruleset::of(policy, if ipv6 == Some(Ipv6::Off) { &[Family::Ip] } else { &Family::ALL });
    if policy.is_empty() {
        print_error(format_args!("pod {pod}: no rules: {decision}"), ExitCode::SUCCESS);
    } else if format == RuleFormat::Iptables && rules.excluded.is_some() {
        let what = "iptables shows only the redirection: exclusions are native nftables rules; use --rules nft";
        print_error(format_args!("pod {pod}: {what}"), ExitCode::SUCCESS);
    }
    match format {
        RuleFormat::Iptables => restore_text(&rules),
        RuleFormat::Nftables => native::text(&RuleFormat::Nftables.native(&rules)),
    }
}
