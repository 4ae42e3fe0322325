//! `kubectl detour`: the commands that work from any machine. kubectl itself reads objects and reaches the agents.

use super::client::{ConnectionArguments, Kubectl};
use super::output::{CommandError, CommandOutput, OutputArguments};
use super::{doctor, explain, print_report, print_usage, rules, trace};
use clap::builder::Resettable;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use in_agent::InAgent;
use std::process::ExitCode;

mod in_agent;
mod nodes;

/// Check how meshed pods bypass or reach their Istio sidecars, on all nodes
///
/// Commands about a pod run in the agent's pod on the pod's node, with kubectl exec. With -f, explain and trace read
/// files and need no cluster.
#[derive(Debug, Parser)]
#[command(name = "detour", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    connection: ConnectionArguments,
    #[command(subcommand)]
    command: KubectlCommand,
}

const EXAMPLES: &str = "\
Examples:
  kubectl detour check                                  check the installation on all nodes
  kubectl detour audit -A                               list the pods that bypass the mesh
  kubectl detour explain -n shop web-0                  show what happens to the pod's traffic
  kubectl detour trace -n shop web-0 --from uid=1337 --to 10.96.0.10:53/udp
                                                        follow one packet through the rules
  kubectl detour rules -n shop web-0                    compare live rules with desired ones
  kubectl detour doctor -n shop web-0                   find the cause of a problem with a pod

The plugin runs kubectl. Required permissions: get and list pods; create and get pods/exec in the
agents' namespace; for audit and check, list nodes; for check, list daemonsets.apps; for explain and
trace with --config, get namespaces and network-attachment-definitions.

Exit codes: 0 success, 1 failure or problem found, 2 invalid arguments or input.";

/// The programs that run plugins: `NAME-detour` is the command `detour` of NAME.
const HOSTS: [&str; 2] = ["kubectl", "oc"];

#[derive(Debug, Subcommand)]
enum KubectlCommand {
    Check(nodes::CheckArguments),
    Audit(nodes::AuditArguments),
    Explain(explain::ExplainArguments),
    Trace(trace::TraceArguments),
    Rules(rules::RulesArguments),
    Doctor(Box<doctor::DoctorArguments>),
}

/// Runs the command line as kubectl's or oc's plugin, if `program` is the name of one.
pub(crate) fn run_as_plugin_of_kubectl(program: &str) -> Option<ExitCode> {
    let host = HOSTS.into_iter().find(|host| program == format!("{host}-detour"))?;
    let result = command(host).try_get_matches().and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches)?;
        Ok((cli, matches))
    });
    Some(match result {
        Ok((cli, matches)) => {
            let output = cli.command.output();
            print_report(output, cli.run(host, &matches))
        }
        Err(error) => print_usage(error),
    })
}

/// Returns the command line for kubectl or oc: the help texts of shared commands name this command line, and options
/// that select objects on a node are hidden.
fn command(host: &str) -> Command {
    let mut command = Cli::command().bin_name(format!("{host} detour"));
    for (name, help) in in_agent::HELP {
        command = command.mut_subcommand(name, |own| own.after_help(help));
    }
    let hide = |own: Command| {
        own.mut_args(|argument| match in_agent::is_of_node(argument.get_id().as_str()) {
            true => argument.hide(true),
            false => argument,
        })
    };
    let place = |own: Command| {
        let usage = format!("{host} detour rules [OPTIONS] POD");
        let own = own.override_usage(usage).mut_arg("configs", |argument| argument.hide(true));
        own.mut_arg("place", |argument| argument.value_name("POD").help("Name of the pod"))
    };
    command = command.mut_subcommand("rules", place);
    for (name, _) in in_agent::HELP {
        command = command.mut_subcommand(name, |own| {
            own.mut_arg("namespace", |argument| {
                let help = "Namespace of the pod [default: the namespace of the kubeconfig's context]";
                argument.help(help).long_help(Resettable::Reset)
            })
        });
    }
    ["explain", "trace", "rules", "doctor"]
        .into_iter()
        .fold(command, |command, name| command.mut_subcommand(name, hide))
}

impl KubectlCommand {
    /// Returns the format of the command's report.
    const fn output(&self) -> OutputArguments {
        match self {
            Self::Check(arguments) => arguments.output,
            Self::Audit(arguments) => arguments.output,
            Self::Explain(arguments) => arguments.output,
            Self::Trace(arguments) => arguments.output,
            Self::Rules(arguments) => arguments.output,
            Self::Doctor(arguments) => arguments.output,
        }
    }
}

impl Cli {
    fn run(self, host: &'static str, matches: &ArgMatches) -> Result<CommandOutput, CommandError> {
        let Self { connection, command: own } = self;
        let kubectl = Kubectl::new(host, &connection)?;
        let mut definition = command(host);
        definition.build();
        let in_agent = |selected: (Option<&str>, Option<&str>)| InAgent::new(&kubectl, &definition, matches, selected);
        match own {
            KubectlCommand::Check(arguments) => nodes::check(&kubectl, &arguments),
            KubectlCommand::Audit(arguments) => nodes::audit(&kubectl, &arguments),
            KubectlCommand::Explain(mut arguments) => match arguments.subject.in_cluster() {
                Some(selected) => in_agent(selected)?.run(),
                None => {
                    arguments.subject.read_with(kubectl);
                    explain::run(arguments)
                }
            },
            KubectlCommand::Trace(mut arguments) => match arguments.subject.in_cluster() {
                Some(selected) if arguments.live => in_agent(selected)?.needs_netns()?.run(),
                Some(selected) => in_agent(selected)?.run(),
                None => {
                    arguments.subject.read_with(kubectl);
                    trace::run(arguments)
                }
            },
            KubectlCommand::Rules(arguments) => in_agent(arguments.selected())?.needs_netns()?.run(),
            KubectlCommand::Doctor(arguments) => in_agent(arguments.selected())?.run(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_shows_how_to_call_it_as_a_plugin() {
        for host in HOSTS {
            let command = command(host);
            command.clone().debug_assert();
            for own in command.get_subcommands().chain([&command]) {
                let footer = own.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(footer.starts_with("Examples:\n"), "{}: {footer}", own.get_name());
                let example = footer.lines().nth(1).unwrap_or_default();
                assert!(example.contains("kubectl detour "), "{footer}");
                let codes = footer.replace('\n', " ");
                assert!(codes.contains(", 2 invalid arguments or input."), "{}: {footer}", own.get_name());
                assert!(footer.lines().all(|line| line.chars().count() <= 100), "{}: {footer}", own.get_name());
            }
        }
    }

    #[test]
    fn options_that_select_objects_of_a_node_are_hidden() {
        let command = command("kubectl");
        let rules = command.find_subcommand("rules").expect("a command");
        let is_shown = |id: &str| rules.get_arguments().any(|own| own.get_id() == id && !own.is_hide_set());
        assert!(is_shown("all") && is_shown("namespace") && !is_shown("pid") && !is_shown("root"));
        let explain = command.find_subcommand("explain").expect("a command");
        let root = explain.get_arguments().find(|own| own.get_id() == "root").expect("an option");
        assert!(root.is_hide_set());
    }
}
