//! `detour explain`

use super::output::OutputArguments;
use super::subject::{SubjectArguments, Subjects};
use super::{CommandError, CommandOutput, complain};
use clap::{Args, ValueEnum};
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{Ruleset, native};
use detour_cni::inspect::{Applied, Explanations, PodManifest, Subject, explain, picture, restore_text};
use detour_cni::policy::Ipv6;
use detour_cni::printable::Text;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  kubectl get pod -n shop web-0 -o yaml | detour explain -f - --config istio-cni.conf
  detour explain -f pod.yaml --config 10-cluster.conflist --namespace-file ns.yaml -o json
  detour explain -n shop web-0 --kubeconfig ~/.kube/config
  detour explain -f pod.yaml --config 00-detour.conf --definitions definitions/
        all attachments of the pod under a primary plugin, and what they come to
  istioctl kube-inject -f web.yaml | detour explain -f -
        each pod and each pod template (Deployment, CronJob, …) of lists and several documents
  detour explain -f all.yaml deployment/web
  detour explain -f pod.yaml --rules iptables | iptables-restore --test
  detour explain -f pod.yaml --rules nft | nft --check -f -
  detour explain -f pod.yaml --format svg > web-0.svg

The text of --rules iptables is for iptables-restore and ip6tables-restore: each loads its own.
--rules and --format need one pod; name it where FILE has several. With several, -o json and -o yaml
print a list. Istio injects pods, not Deployments: the template in the cluster has no sidecar.
Nothing is changed, and neither root nor, with -f, a cluster is needed.
Exit codes: 0 explained, 1 an ADD of this pod would fail, 2 wrong usage or input.";

/// What happens to a pod's traffic, and why
///
/// Whether it is redirected and which rule decided, what every setting resolved to and at whose word, what
/// leaves untouched, and what of all that may surprise.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExplainArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// Print the rules instead
    #[arg(long, value_enum, value_name = "DIALECT", conflicts_with = "output")]
    rules: Option<RuleFormatArgument>,
    /// Print a picture instead
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with_all = ["output", "rules"])]
    format: Option<Picture>,
    #[command(flatten)]
    output: OutputArguments,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RuleFormatArgument {
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
pub(super) fn run(arguments: ExplainArguments) -> Result<CommandOutput, CommandError> {
    let (found, conf) = match arguments.subject.read_all()? {
        Subjects::Known(subject) => return arguments.one(&subject),
        Subjects::Given(given) => *given,
    };
    let needs_one = arguments.rules.is_some() || arguments.format.is_some();
    if needs_one || found.pods.len() == 1 {
        let given = found.one().map_err(CommandError::Input)?;
        return arguments.one(&found.subject(given, conf)?);
    }
    arguments.several(&found, &conf)
}

impl ExplainArguments {
    /// Those that can be explained; why another can not goes to stderr.
    fn several(&self, found: &PodManifest, conf: &Applied) -> Result<CommandOutput, CommandError> {
        let (mut explanations, mut code) = (Vec::new(), ExitCode::SUCCESS);
        for given in &found.pods {
            match found.subject(given, conf.clone()).and_then(|subject| explain(&subject)) {
                Ok(explained) => explanations.push(explained.explanation),
                Err(error) => code = complain(format_args!("{given}: {error}"), ExitCode::FAILURE),
            }
        }
        Ok(CommandOutput { code, ..self.output.answer(&Explanations(explanations))? })
    }

    fn one(&self, subject: &Subject) -> Result<CommandOutput, CommandError> {
        let explained = explain(subject)?;
        match (self.rules, self.format) {
            (Some(dialect), _) => {
                let ipv6 = explained.policy.redirect().map(|redirect| redirect.ipv6);
                let families = if ipv6 == Some(Ipv6::Off) { &[Family::Ip][..] } else { &Family::ALL };
                if explained.policy.is_empty() {
                    let decision = &explained.explanation.decision;
                    complain(format_args!("pod {}: no rules: {decision}", subject.name()), ExitCode::SUCCESS);
                }
                let rules = Ruleset::of(&explained.policy, families);
                let text = match dialect {
                    RuleFormatArgument::Iptables => restore_text(&rules),
                    RuleFormatArgument::Nft => native::text(&native::translate(&rules)),
                };
                Ok(CommandOutput::fine(Text::lines(&text)))
            }
            (None, Some(Picture::Svg)) => Ok(CommandOutput::fine(Text::lines(&picture(subject, &explained)))),
            (None, None) => self.output.answer(&explained.explanation),
        }
    }
}
