//! `kubectl detour`: the commands that work from any machine. kubectl itself reads objects and reaches the agents. Commands
//! about a pod run in the agent's pod on the pod's node, with the same arguments.

use super::output::{CommandError, CommandOutput, OutputArguments};
use super::{doctor, explain, print_report, print_usage, rules, trace};
use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use client::ConnectionArguments;
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::AgentPod;
use detour_cni::printable::Text;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

mod client;
mod nodes;

pub(super) use client::Kubectl;

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

/// The commands about a pod, with their examples.
const ABOUT_PODS: [(&str, &str); 4] = [
    (
        "explain",
        "  kubectl detour explain -n shop web-0
        use the configuration that is installed on the pod's node; the report names its file
  kubectl detour explain -n shop web-0 --config new.conf
        show the effect of another configuration",
    ),
    (
        "trace",
        "  kubectl detour trace -n shop web-0 --from uid=1337 --to 10.96.0.10:53/udp
        use the configuration that is installed on the pod's node; the report names its file
  kubectl detour trace --live -n shop web-0 --from inbound --to 10.88.0.2:8080/tcp
        use the live rules of the pod",
    ),
    (
        "rules",
        "  kubectl detour rules -n shop web-0

The agent needs the capabilities that the chart value repair.enabled grants.",
    ),
    (
        "doctor",
        "  kubectl detour doctor -n shop web-0
        check the pod's node, and the pod: from its annotations to its rules in the kernel

To check the nodes without a pod, use kubectl detour check. For log files, run detour on the node.",
    ),
];

/// The programs that run plugins: `NAME-detour` is the command `detour` of NAME.
const HOSTS: [&str; 2] = ["kubectl", "oc"];
/// Time limit of a command about a pod. `doctor --probe` uses most of it.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Options that select objects or files of the node on which the command runs.
const OF_NODE: [&str; 11] =
    ["netns", "pid", "container", "pod_uid", "root", "node", "node_name", "conf", "platform", "chained", "bin_dir"];
/// Arguments that this process uses itself.
const OWN: [&str; 6] = ["place", "pod", "namespace", "kubeconfig", "context", "agent_namespace"];

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
    let parse = |arguments: Vec<OsString>| -> Result<(Cli, ArgMatches), clap::Error> {
        let matches = command(host).try_get_matches_from(arguments)?;
        Ok((Cli::from_arg_matches(&matches)?, matches))
    };
    Some(match parse(std::env::args_os().collect()) {
        Ok((cli, matches)) => cli.run(host, &matches),
        Err(error) => print_usage(error, |arguments| parse(arguments).err()),
    })
}

/// Returns the command line for kubectl or oc: the help texts of shared commands name this command line, and options
/// that select objects on a node are hidden.
fn command(host: &str) -> Command {
    let about_pod = |own: Command, examples: &str| {
        let shared = own.get_after_help().map(ToString::to_string).unwrap_or_default();
        let codes = shared.rsplit_once("\n\nExit codes: ").map_or("", |(_, codes)| codes);
        let help = "Namespace of the pod [default: the namespace of the kubeconfig's context]";
        own.after_help(format!("Examples:\n{examples}\n\nExit codes: {codes}"))
            .mut_arg("namespace", |argument| argument.help(help).long_help(Resettable::Reset))
            .mut_args(|argument| {
                let is_of_node = OF_NODE.contains(&argument.get_id().as_str());
                if is_of_node { argument.hide(true) } else { argument }
            })
    };
    let place = |own: Command| {
        let usage = format!("{host} detour rules [OPTIONS] POD");
        let own = own.override_usage(usage).mut_arg("configs", |argument| argument.hide(true));
        own.mut_arg("place", |argument| argument.value_name("POD").help("Name of the pod"))
    };
    ABOUT_PODS.into_iter().fold(
        Cli::command().bin_name(format!("{host} detour")).mut_subcommand("rules", place),
        |command, (name, examples)| command.mut_subcommand(name, |own| about_pod(own, examples)),
    )
}

impl Cli {
    fn run(self, host: &'static str, matches: &ArgMatches) -> ExitCode {
        let report = |output: OutputArguments, run: &mut dyn FnMut(Kubectl) -> Result<CommandOutput, CommandError>| {
            print_report(output, Kubectl::new(host, &self.connection).and_then(run))
        };
        let in_agent = |kubectl: &Kubectl, pod: (Option<&str>, Option<&str>), needs_netns| {
            let mut definition = command(host);
            definition.build();
            run_in_agent(kubectl, &definition, matches, pod, needs_netns)
        };
        match self.command {
            KubectlCommand::Check(arguments) => {
                report(arguments.output, &mut |kubectl| nodes::check(&kubectl, &arguments))
            }
            KubectlCommand::Audit(arguments) => {
                report(arguments.output, &mut |kubectl| nodes::audit(&kubectl, &arguments))
            }
            KubectlCommand::Explain(mut arguments) => {
                report(arguments.output, &mut |kubectl| match arguments.subject.in_cluster() {
                    Some(pod) => in_agent(&kubectl, pod, false),
                    None => {
                        arguments.subject.read_with(kubectl);
                        explain::run(&arguments)
                    }
                })
            }
            KubectlCommand::Trace(mut arguments) => {
                report(arguments.output, &mut |kubectl| match arguments.subject.in_cluster() {
                    Some(pod) => in_agent(&kubectl, pod, arguments.live),
                    None => {
                        arguments.subject.read_with(kubectl);
                        trace::run(&arguments)
                    }
                })
            }
            KubectlCommand::Rules(arguments) => {
                report(arguments.output, &mut |kubectl| in_agent(&kubectl, arguments.selected(), true))
            }
            KubectlCommand::Doctor(arguments) => {
                report(arguments.output, &mut |kubectl| in_agent(&kubectl, arguments.selected(), false))
            }
        }
    }
}

/// Runs a command in the agent on the node of the selected pod (namespace and name). `matches` has the name and the
/// arguments of the command in the command line `definition`. The output is escaped again, because the node may be
/// compromised.
///
/// # Errors
/// No pod is selected, an option is supported only on the node, the pod or the agent is not found, or the agent can't
/// enter the network namespaces of pods, although the command `needs_netns`.
fn run_in_agent(
    kubectl: &Kubectl,
    definition: &Command,
    matches: &ArgMatches,
    (namespace, pod): (Option<&str>, Option<&str>),
    needs_netns: bool,
) -> Result<CommandOutput, CommandError> {
    let (name, matches) = matches.subcommand().unwrap_or(("", matches));
    let options = forwarded(definition.find_subcommand(name), matches)?;
    let pod = pod.ok_or_else(|| CommandError::Usage("expected a pod: [-n NAMESPACE] POD".to_owned()))?;
    let found = kubectl.pod(namespace, pod)?;
    let text = |pointer| found.pointer(pointer).and_then(serde_json::Value::as_str).unwrap_or_default();
    let [namespace, pod, node] = ["/metadata/namespace", "/metadata/name", "/spec/nodeName"].map(text);
    let failed = |why: String| Error::new(Code::PodUnknown, format!("pod {namespace}/{pod}: {why}"));
    if node.is_empty() {
        let why = format!("not scheduled to a node; see kubectl describe pod -n {namespace} {pod}");
        return Err(failed(why).into());
    }
    let agents = kubectl.agents(Some(node))?;
    let none = || failed(format!("no agent on its node {node}; see kubectl detour check --node {node}"));
    let agent = AgentPod::choose(&agents).ok_or_else(none)?;
    if needs_netns && !agent.enters_pods {
        let msg = format!(
            "pod {}: the agent lacks the capabilities to enter pods' network namespaces; set the chart value \
             repair.enabled=true, or run the command on node {node}",
            agent.object
        );
        return Err(Error::new(Code::Forbidden, msg).into());
    }
    let words = ["/detour", name, "--root", "/host", "-n", namespace].into_iter();
    let words: Vec<&str> = words.chain(options.iter().map(String::as_str)).chain(["--", pod]).collect();
    let output = kubectl.run_in(agent, &words, TIMEOUT).map_err(|why| Error::new(Code::TryAgain, why))?;
    for line in output.stderr.lines() {
        crate::print(io::stderr(), &Text::line(&format!("{node}: {line}")), ExitCode::SUCCESS);
    }
    let text = Text::lines(&String::from_utf8_lossy(&output.stdout));
    Ok(CommandOutput { text, code: ExitCode::from(output.code) })
}

/// Returns the options that were given on the command line, except for those that this process uses.
///
/// # Errors
/// An option is supported only on the node.
fn forwarded(definition: Option<&Command>, matches: &ArgMatches) -> Result<Vec<String>, CommandError> {
    let mut words = Vec::new();
    for argument in definition.into_iter().flat_map(Command::get_arguments) {
        let id = argument.get_id().as_str();
        let is_given =
            matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine);
        let Some(long) = argument.get_long().filter(|_| is_given && !OWN.contains(&id)) else { continue };
        if OF_NODE.contains(&id) {
            return Err(CommandError::Usage(format!(
                "--{long}: not supported by kubectl detour; run detour on the node"
            )));
        }
        if matches!(argument.get_action(), ArgAction::SetTrue) {
            words.push(format!("--{long}"));
            continue;
        }
        for value in matches.get_raw(id).into_iter().flatten() {
            words.push(format!("--{long}={}", value.to_string_lossy()));
        }
    }
    Ok(words)
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
