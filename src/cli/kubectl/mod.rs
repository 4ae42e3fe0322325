//! `kubectl detour`: the commands that work from any machine. kubectl itself reads objects and reaches the agents. Commands
//! about a pod run in the agent's pod on the pod's node, with the same arguments.

use super::cluster::ON_NODE;
use super::output::{CommandError, CommandOutput, OutputArguments};
use super::{doctor, explain, print_message, print_result, print_usage, rules};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::audit::AuditReport;
use detour_cni::inspect::{AgentPod, NodeCheck, NodesCheck, has_sidecar, missing_agent, report_of};
use detour_cni::printable::Text;
use serde_json::Value;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

mod client;

use client::AGENT_LABEL;
pub(super) use client::Kubectl;

/// Check how meshed pods bypass or reach their Istio sidecars, on all nodes
///
/// Commands about a pod run in the agent's pod on the pod's node, with kubectl exec; without -n, the pod is in the
/// namespace of the kubeconfig's context. With -f, explain and trace read files and need no cluster.
///
/// The plugin runs kubectl. Required permissions: get and list pods; create and get pods/exec in the agents' namespace;
/// for audit and check, list nodes; for check, list daemonsets.apps; for explain and trace with --config, get namespaces
/// and network-attachment-definitions.
///
/// Exit codes: 0 success, 1 failure or problem found, 2 invalid arguments or input.
#[derive(Debug, Parser)]
#[command(name = "detour", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    kubectl: Kubectl,
    #[command(subcommand)]
    command: KubectlCommand,
}

/// Those of every command.
const EXAMPLES: &str = "\
Examples:
  kubectl detour check                                  check the installation on all nodes
  kubectl detour audit -A                               list the pods that bypass the mesh
  kubectl detour explain -n shop web-0                  show what happens to the pod's traffic
  kubectl detour trace -n shop web-0 --from container=vault-agent-init --to 10.96.0.10:53/udp
  kubectl detour rules -n shop web-0                    compare live rules with desired ones
  kubectl detour doctor -n shop web-0                   find the cause of a problem with a pod";

/// The programs that run plugins: `NAME-detour` is the command `detour` of NAME.
const HOSTS: [&str; 2] = ["kubectl", "oc"];
/// Time limit of a command about a pod, and of the audit of a node's pods. `doctor --probe` uses most of it.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Options that this process uses itself.
const OWN: [&str; 4] = ["namespace", "kubeconfig", "context", "agent_namespace"];

#[derive(Debug, Subcommand)]
enum KubectlCommand {
    Check(CheckArguments),
    Audit(AuditArguments),
    Explain(explain::ExplainArguments),
    Trace(Box<explain::TraceArguments>),
    Rules(rules::RulesArguments),
    Doctor(Box<doctor::DoctorArguments>),
}

/// Runs the command line as kubectl's or oc's plugin, if `program` is the name of one.
pub(crate) fn run_as_plugin_of_kubectl(program: &str) -> Option<ExitCode> {
    let host = HOSTS.into_iter().find(|host| program == format!("{host}-detour"))?;
    let parsed = command(host).try_get_matches().and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    Some(match parsed {
        Ok((cli, matches)) => cli.run(host, &matches),
        Err(error) => print_usage(&error),
    })
}

/// Returns the command line for kubectl or oc: the examples of shared commands name it, and options that select objects on
/// a node are hidden.
fn command(host: &str) -> Command {
    let hidden = |argument: Arg| {
        let is_of_node = argument.get_help_heading() == Some(ON_NODE);
        argument.hide(is_of_node)
    };
    // With -f, a file has the pod.
    [("explain", "[POD]"), ("trace", "[POD]"), ("rules", "POD"), ("doctor", "POD")].into_iter().fold(
        Cli::command().bin_name(format!("{host} detour")),
        |command, (name, pod)| {
            let usage = format!("{host} detour {name} [OPTIONS] {pod}");
            command.mut_subcommand(name, |own| own.after_help(EXAMPLES).override_usage(usage).mut_args(hidden))
        },
    )
}

impl Cli {
    fn run(self, host: &'static str, matches: &ArgMatches) -> ExitCode {
        let mut kubectl = self.kubectl;
        kubectl.program = host;
        let in_agent = |pod: (Option<&str>, Option<&str>), needs_netns| {
            let mut definition = command(host);
            definition.build();
            run_in_agent(&kubectl, &definition, matches, pod, needs_netns)
        };
        let (output, result) = match self.command {
            KubectlCommand::Check(own) => (own.output, check(&kubectl, &own)),
            KubectlCommand::Audit(own) => (own.output, audit(&kubectl, &own)),
            KubectlCommand::Explain(mut own) => {
                own.subject.read_with(&kubectl);
                let pod = own.subject.in_cluster();
                (own.output, pod.map_or_else(|| explain::run_explain(&own), |pod| in_agent(pod, false)))
            }
            KubectlCommand::Trace(mut own) => {
                own.subject.read_with(&kubectl);
                let pod = own.subject.in_cluster();
                (own.output, pod.map_or_else(|| explain::run_trace(&own), |pod| in_agent(pod, own.live)))
            }
            KubectlCommand::Rules(own) => (own.output, in_agent(own.selected(), true)),
            KubectlCommand::Doctor(own) => (own.output, in_agent(own.selected(), false)),
        };
        print_result(Some(output), result)
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
    let pod = pod.ok_or_else(|| CommandError::usage("expected a pod: [-n NAMESPACE] POD"))?;
    let found = kubectl.pod(namespace, pod)?;
    let text = |pointer| found.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
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
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        crate::print(io::stderr(), &Text::line(&format!("{node}: {line}")), ExitCode::SUCCESS);
    }
    let text = Text::lines(&String::from_utf8_lossy(&output.stdout));
    let code = output.status.code().and_then(|code| u8::try_from(code).ok());
    Ok(CommandOutput { text, code: code.map_or(ExitCode::FAILURE, ExitCode::from) })
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
        if argument.get_help_heading() == Some(ON_NODE) {
            return Err(CommandError::usage(format!(
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

/// Time limit for the checks of one node.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

/// Check the installation, API access, the policies of running pods and the kernel on all nodes
///
/// The output has the number of pods with the current policy, and one line per node. For each failed check and each
/// warning, it shows the finding and the next step. A node that the DaemonSet of a release selects is unhealthy if it has
/// no ready agent.
///
/// Exit codes: 0 all nodes are healthy or skipped, 1 a node is unhealthy or the cluster can't be read, 2 invalid
/// arguments or input.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
struct CheckArguments {
    /// Check only this node
    #[arg(long, value_name = "NAME", conflicts_with = "selector")]
    node: Option<String>,
    /// Check only nodes with these labels, in the syntax of kubectl -l
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<String>,
    #[command(flatten)]
    output: OutputArguments,
}

/// List the pods of all nodes whose traffic bypasses the mesh, and why
///
/// The agents need the capabilities that the chart value repair.enabled grants.
///
/// Exit codes: 0 all pods are redirected and have the desired rules, 1 a pod is not redirected, has other rules, has a rule
/// of another program that lets traffic bypass the mesh or was not examined, or a node could not be audited, 2 invalid
/// arguments or input.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
struct AuditArguments {
    /// Namespace of the pods [default: the namespace of the kubeconfig's context]
    #[arg(short, long, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// List the pods of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    #[command(flatten)]
    output: OutputArguments,
}

/// Checks the installation on all nodes.
fn check(kubectl: &Kubectl, arguments: &CheckArguments) -> Result<CommandOutput, CommandError> {
    let by_name = arguments.node.as_ref().map(|name| format!("--field-selector=metadata.name={name}"));
    let selector = by_name.or_else(|| Some(format!("--selector={}", arguments.selector.as_ref()?)));
    let nodes = kubectl.get("nodes", None, &selector.as_deref().into_iter().collect::<Vec<_>>())?;
    if nodes.is_empty() {
        let which = arguments.node.as_ref().or(arguments.selector.as_ref()).map_or("", String::as_str);
        return Err(Error::new(Code::PodUnknown, format!("node {which}: not found; see kubectl get nodes")).into());
    }
    let sets = kubectl.list("daemonsets.apps", kubectl.agent_namespace.as_deref(), &[AGENT_LABEL])?;
    let mut agents = kubectl.agents(arguments.node.as_deref())?;
    if sets.is_empty() && agents.is_empty() {
        return Err(no_agents().into());
    }
    let names: Vec<&str> = nodes.iter().filter_map(name_of).collect();
    agents.retain(|agent| names.contains(&agent.node.as_str()));
    let words = ["/detour", "doctor", "--node", "--root", "/host", "-o", "json"];
    let outputs = kubectl.run_in_all(&agents.iter().collect::<Vec<_>>(), &words, CHECK_TIMEOUT);
    let of_agents = outputs.into_iter().map(|(agent, output)| NodeCheck::of_agent(agent, output));
    let has_agent = |node: &&Value| agents.iter().any(|agent| name_of(node) == Some(&agent.node));
    let without = nodes.iter().filter(|node| !has_agent(node)).map(|node| missing_agent(node, &sets));
    let report = NodesCheck::of(of_agents.chain(without).collect());
    if !report.healthy {
        let nodes: Vec<&str> = report.unhealthy().into_iter().collect();
        print_message("error", format_args!("unhealthy nodes: {}", nodes.join(", ")));
    }
    arguments.output.render_verdict(&report, report.healthy)
}

fn name_of(node: &Value) -> Option<&str> {
    node["metadata"]["name"].as_str()
}

/// Lists the pods of all nodes that bypass the mesh.
fn audit(kubectl: &Kubectl, arguments: &AuditArguments) -> Result<CommandOutput, CommandError> {
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
    let mut report = AuditReport::default();
    for (agent, output) in kubectl.run_in_all(&agents, &words, TIMEOUT) {
        report.add(&agent.node, output.and_then(report_of));
    }
    match not_audited(kubectl, namespace, &agents) {
        Ok(nodes) => nodes.into_iter().for_each(|(node, error)| report.add(&node, Err(error))),
        Err(error) => report.add("nodes without an agent", Err(error.to_string())),
    }
    let report = report.sorted();
    arguments.output.render_verdict(&report, report.is_clean())
}

/// Returns the error for a cluster without agents.
fn no_agents() -> Error {
    let msg = "no agent found: no pod with the labels app.kubernetes.io/part-of=detour and \
               app.kubernetes.io/component=agent mounts /var/lib/cni/detour; install detour, or correct --context and \
               --agent-namespace";
    Error::new(Code::PodUnknown, msg)
}

/// Returns the nodes without an agent that have pods with a sidecar, with the reason why these pods are not examined.
fn not_audited(
    kubectl: &Kubectl,
    namespace: Option<&str>,
    agents: &[&AgentPod],
) -> Result<Vec<(String, String)>, Error> {
    let mut found = Vec::new();
    for node in kubectl.get("nodes", None, &[])? {
        let name = name_of(&node).unwrap_or_default();
        if agents.iter().any(|agent| agent.node == name) {
            continue;
        }
        // Pods that have ended send nothing.
        let on_node = format!("--field-selector=spec.nodeName={name},status.phase!=Succeeded,status.phase!=Failed");
        let pods = kubectl.list("pods", namespace, &[&on_node])?.iter().filter(|pod| has_sidecar(pod)).count();
        if pods > 0 {
            let next = format!("see kubectl detour check --node {name}");
            found.push((name.to_owned(), format!("no agent; pods with a sidecar, not examined: {pods}; {next}")));
        }
    }
    Ok(found)
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
                let help = own.clone().render_long_help().to_string().replace('\n', " ");
                assert!(help.contains(", 2 invalid arguments or input."), "{}: {help}", own.get_name());
                assert!(footer.lines().all(|line| line.chars().count() <= 100), "{}: {footer}", own.get_name());
            }
        }
    }

    #[test]
    fn options_that_select_objects_of_a_node_are_hidden() {
        let command = command("kubectl");
        for (name, hidden) in [
            ("explain", &["root"][..]),
            ("trace", &["netns", "pid", "container", "root"]),
            ("rules", &["pid", "container", "root"]),
            ("doctor", &["node", "conf", "platform", "node_name", "root"]),
        ] {
            let own = command.find_subcommand(name).expect("a command");
            let found = own.get_arguments().filter(|argument| argument.is_hide_set()).map(|argument| argument.get_id());
            let mut found: Vec<_> = found.map(clap::Id::as_str).collect();
            found.sort_by_key(|id| hidden.iter().position(|known| known == id));
            assert_eq!(found, hidden, "{name}");
        }
    }
}
