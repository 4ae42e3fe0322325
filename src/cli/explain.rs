//! `detour explain`

use super::output::Output;
use super::subject::SubjectArguments;
use super::{Answer, Failure};
use clap::{Args, ValueEnum};
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{Ruleset, native};
use detour_cni::inspect::{explain, picture, restore_text};
use detour_cni::policy::Ipv6;
use detour_cni::printable::Text;

const EXAMPLES: &str = "\
Examples:
  kubectl get pod -n shop web-0 -o yaml | detour explain -f - --config istio-cni.conf
  detour explain -f pod.yaml --config 10-cluster.conflist --namespace-file ns.yaml -o json
  detour explain -n shop web-0 --kubeconfig ~/.kube/config
  detour explain -f pod.yaml --config 00-detour.conf --definitions definitions/
        all attachments of the pod under a primary plugin, and what they come to
  detour explain -f pod.yaml --rules iptables | iptables-restore --test
  detour explain -f pod.yaml --rules nft | nft --check -f -
  detour explain -f pod.yaml --format svg > web-0.svg

The text of --rules iptables is for iptables-restore and ip6tables-restore: each loads its own.
Nothing is changed, and neither root nor, with -f, a cluster is needed.
Exit codes: 0 explained, 1 an ADD of this pod would fail, 2 wrong usage or input.";

/// What happens to a pod's traffic, and why
///
/// Whether it is redirected and which rule decided, what every setting resolved to and at whose word, what
/// leaves untouched, and what of all that may surprise.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// Print the rules instead
    #[arg(long, value_enum, value_name = "DIALECT", conflicts_with = "output")]
    rules: Option<Dialect>,
    /// Print a picture instead
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with_all = ["output", "rules"])]
    format: Option<Picture>,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Dialect {
    /// For iptables-restore and ip6tables-restore
    Iptables,
    /// For nft -f
    Nft,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Picture {
    Svg,
}

/// The report, the rules, or the picture.
pub(super) fn run(arguments: Arguments) -> Result<Answer, Failure> {
    let subject = arguments.subject.read()?;
    let explained = explain(&subject)?;
    match (arguments.rules, arguments.format) {
        (Some(dialect), _) => {
            let ipv6 = explained.policy.redirect().map(|redirect| redirect.ipv6);
            let families = if ipv6 == Some(Ipv6::Off) { &[Family::Ip][..] } else { &Family::ALL };
            let rules = Ruleset::of(&explained.policy, families);
            let text = match dialect {
                Dialect::Iptables => restore_text(&rules),
                Dialect::Nft => native::text(&native::translate(&rules)),
            };
            Ok(Answer::fine(Text::lines(&text)))
        }
        (None, Some(Picture::Svg)) => Ok(Answer::fine(Text::lines(&picture(&subject, &explained)))),
        (None, None) => arguments.output.answer(&explained.explanation),
    }
}
