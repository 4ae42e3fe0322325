//! Commands about a pod: they run in the agent's pod on the pod's node, with the same arguments.

use crate::cli::client::Kubectl;
use crate::cli::output::{CommandError, CommandOutput};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::AgentPod;
use detour_cni::printable::Text;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

/// Time limit of a command. `doctor --probe` uses most of it.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The help of each command about a pod.
pub(super) const HELP: [(&str, &str); 4] =
    [("explain", EXPLAIN), ("trace", TRACE), ("rules", RULES), ("doctor", DOCTOR)];

const EXPLAIN: &str = "\
Examples:
  kubectl detour explain -n shop web-0
        use the configuration that is installed on the pod's node; the report names its file
  kubectl detour explain -n shop web-0 --config new.conf
        show the effect of another configuration
  kubectl get pod web-0 -o yaml | kubectl detour explain -f - --config istio-cni.conf
        explain a manifest without a cluster

Exit codes: 0 success, 1 an ADD of this pod would fail, 2 invalid arguments or input.";

const TRACE: &str = "\
Examples:
  kubectl detour trace -n shop web-0 --from uid=1337 --to 10.96.0.10:53/udp
        use the configuration that is installed on the pod's node; the report names its file
  kubectl detour trace --live -n shop web-0 --from inbound --to 10.88.0.2:8080/tcp
        use the live rules of the pod
  kubectl detour trace --live -n shop web-0 --from container=vault-agent --to 10.88.0.2:8200/tcp
        show whether, and until when, an excluded container bypasses the sidecar
  kubectl detour trace -f pod.yaml --from container=web --to 10.88.0.2:8080/tcp
        follow the packet in a manifest, without a cluster

The packet arrives at one of: sidecar:PORT, ztunnel:PORT (ambient mesh), direct (it keeps its
destination), dropped, redirected:PORT (a rule outside of Istio's chains redirects it), or unknown
(rules that trace does not evaluate decide: iptables-legacy, istio-cni's native rules).

Exit codes: 0 success, 1 an ADD of this pod would fail or unreadable rules, 2 invalid arguments or
input.";

const RULES: &str = "\
Examples:
  kubectl detour rules -n shop web-0
  kubectl detour rules web-0 -o json
        use the namespace of the kubeconfig's context

If the pod excludes containers, the report also lists those that bypass the sidecar now.

The agent needs the capabilities that the chart value repair.enabled grants.

Exit codes: 0 rules as desired or no saved state, 1 different or unreadable rules, 2 invalid
arguments or input.";

const DOCTOR: &str = "\
Examples:
  kubectl detour doctor -n shop web-0
        check the pod's node, and the pod: from its annotations to its rules in the kernel
  kubectl detour doctor -n shop web-0 --probe
        also send packets from the pod's network namespace to unused addresses

To check the nodes without a pod, use kubectl detour check. For log files, run detour on the node.

Exit codes: 0 no check failed, 1 a check failed, 2 invalid arguments or input.";

/// Options that select objects or files of the node on which the command runs.
const OF_NODE: [&str; 11] =
    ["netns", "pid", "container", "pod_uid", "root", "node", "node_name", "conf", "platform", "chained", "bin_dir"];
/// Arguments that this process uses itself.
const OWN: [&str; 6] = ["place", "pod", "namespace", "kubeconfig", "context", "agent_namespace"];

/// Returns whether an option selects objects or files of the node on which the command runs.
pub(super) fn is_of_node(option: &str) -> bool {
    OF_NODE.contains(&option)
}

/// A command about a pod, and the agent in which it runs.
pub(super) struct InAgent {
    kubectl: Kubectl,
    agent: AgentPod,
    words: Vec<String>,
}

impl InAgent {
    /// Finds the agent on the node of the selected pod (namespace and name). `matches` has the name and the arguments
    /// of the command in the command line `definition`.
    ///
    /// # Errors
    /// No pod is selected, an option is supported only on the node, or the pod or the agent is not found.
    pub(super) fn new(
        kubectl: &Kubectl,
        definition: &Command,
        matches: &ArgMatches,
        (namespace, pod): (Option<&str>, Option<&str>),
    ) -> Result<Self, CommandError> {
        let (name, matches) = matches.subcommand().unwrap_or(("", matches));
        let options = forwarded(definition.find_subcommand(name), matches)?;
        let Some(pod) = pod else {
            return Err(CommandError::Usage("expected a pod: [-n NAMESPACE] POD".to_owned()));
        };
        let found = kubectl.pod(namespace, pod)?;
        let text = |pointer| found.pointer(pointer).and_then(serde_json::Value::as_str).unwrap_or_default();
        let [namespace, pod, node] = ["/metadata/namespace", "/metadata/name", "/spec/nodeName"].map(text);
        let failed = |why: String| Error::new(Code::PodUnknown, format!("pod {namespace}/{pod}: {why}"));
        if node.is_empty() {
            let why = format!("not scheduled to a node; see kubectl describe pod -n {namespace} {pod}");
            return Err(failed(why).into());
        }
        let agents = kubectl.agents(Some(node))?;
        let Some(agent) = AgentPod::choose(&agents).cloned() else {
            let why = format!("no agent on its node {node}; see kubectl detour check --node {node}");
            return Err(failed(why).into());
        };
        let words = ["/detour", name, "--root", "/host", "-n", namespace].map(str::to_owned);
        let words = words.into_iter().chain(options).chain(["--".to_owned(), pod.to_owned()]).collect();
        Ok(Self { kubectl: kubectl.clone(), agent, words })
    }

    /// Checks that the agent can enter the network namespaces of pods.
    ///
    /// # Errors
    /// It lacks the capabilities.
    pub(super) fn needs_netns(self) -> Result<Self, CommandError> {
        if self.agent.enters_pods {
            return Ok(self);
        }
        let AgentPod { object, node, .. } = &self.agent;
        let msg = format!(
            "pod {object}: the agent lacks the capabilities to enter pods' network namespaces; set the chart value \
             repair.enabled=true, or run the command on node {node}"
        );
        Err(Error::new(Code::Forbidden, msg).into())
    }

    /// Runs the command. Its output is escaped again, because the node may be compromised.
    ///
    /// # Errors
    /// The command can't be run.
    pub(super) fn run(&self) -> Result<CommandOutput, CommandError> {
        let node = &self.agent.node;
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        let failed = |why: String| Error::new(Code::TryAgain, why);
        let output = self.kubectl.run_in(&self.agent, &words, TIMEOUT).map_err(failed)?;
        for line in output.stderr.lines() {
            crate::print(io::stderr(), &Text::line(&format!("{node}: {line}")), ExitCode::SUCCESS);
        }
        let text = Text::lines(&String::from_utf8_lossy(&output.stdout));
        Ok(CommandOutput { text, code: ExitCode::from(output.code) })
    }
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
        if is_of_node(id) {
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
