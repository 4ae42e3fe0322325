//! Runs `kubectl`: it selects the cluster and the user, reads objects, and runs commands in the agents' containers.

use super::output::{CommandError, show_progress};
use clap::Args;
use detour_cni::cluster::{Definition, DefinitionQuery, Definitions, Lookup, objects};
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::{AgentPod, NodeLabels};
use detour_cni::pod::Facts;
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// The maximum output of a command in an agent's container, in bytes.
const MAX_OUTPUT: u64 = 16 << 20;
/// In how many agents a command runs at the same time.
const PARALLEL: usize = 16;
/// How long a command runs before its progress is shown.
const SILENCE: Duration = Duration::from_secs(1);
/// The label of the agents' pods and DaemonSets in the manifests of all versions; agents of other products may have it too.
const AGENT_LABEL: &str = "--selector=app.kubernetes.io/component=agent";
/// The container of the agent in its pod.
const CONTAINER: &str = "agent";
const DEFINITIONS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

/// Selects the cluster, as flags of kubectl.
#[derive(Debug, Clone, Args)]
pub(super) struct ConnectionArguments {
    /// Kubeconfig, as in kubectl
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig, as in kubectl
    #[arg(long, value_name = "NAME", global = true)]
    context: Option<String>,
    /// Namespace of the agents' pods [default: all namespaces]
    #[arg(long, value_name = "NAMESPACE", global = true)]
    agent_namespace: Option<String>,
}

/// `kubectl` or `oc`, with the flags that select the cluster.
#[derive(Debug, Clone)]
pub(super) struct Kubectl {
    program: &'static str,
    flags: Vec<String>,
    agent_namespace: Option<String>,
}

/// What a command in an agent's container printed, and its exit code.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Output {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: String,
    pub(super) code: u8,
}

impl Kubectl {
    /// # Errors
    /// The file of `--kubeconfig` does not exist.
    pub(super) fn new(program: &'static str, connection: &ConnectionArguments) -> Result<Self, CommandError> {
        let kubeconfig = connection.kubeconfig.as_ref();
        if let Some((path, why)) = kubeconfig.and_then(|path| Some((path, fs::metadata(path).err()?))) {
            return Err(CommandError::Usage(format!("--kubeconfig {}: {why}", path.display())));
        }
        let kubeconfig = kubeconfig.map(|path| format!("--kubeconfig={}", path.display()));
        let context = connection.context.as_ref().map(|name| format!("--context={name}"));
        let flags = kubeconfig.into_iter().chain(context).collect();
        Ok(Self { program, flags, agent_namespace: connection.agent_namespace.clone() })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.args(&self.flags).args(arguments);
        command
    }

    fn failed(&self, what: &str, why: &str) -> Error {
        Error::new(Code::TryAgain, format!("{} {what}: {why}", self.program))
    }

    /// Runs kubectl with the user's terminal, because a credential plugin may ask, and returns what it prints.
    fn read(&self, what: &str, arguments: &[&str]) -> Result<Vec<u8>, Error> {
        let mut command = self.command(arguments);
        let output = command.stdin(Stdio::inherit()).stderr(Stdio::inherit()).output();
        let output = output.map_err(|why| self.failed(what, &format!("{why}; expected it in PATH")))?;
        if !output.status.success() {
            return Err(self.failed(what, &format!("{}; see its message above", output.status)));
        }
        Ok(output.stdout)
    }

    /// Returns the objects that `kubectl get` finds; none if the named object does not exist.
    fn get(&self, what: &str, arguments: &[&str]) -> Result<Vec<Value>, Error> {
        let flags = ["get", "--output=json", "--ignore-not-found", "--request-timeout=30s"];
        let text = self.read(&format!("get {what}"), &[&flags, arguments, &["--", what]].concat())?;
        if text.trim_ascii().is_empty() {
            return Ok(Vec::new());
        }
        let mut found: Value = serde_json::from_slice(&text).map_err(|why| self.failed(what, &why.to_string()))?;
        Ok(match found["items"].take() {
            Value::Array(items) => items,
            _ => vec![found],
        })
    }

    /// Returns the namespace of the context.
    ///
    /// # Errors
    /// kubectl has no context, as in a pod.
    pub(super) fn namespace(&self) -> Result<String, Error> {
        let arguments = ["config", "view", "--minify", "--output=jsonpath={..namespace}"];
        let name = self.read("config view", &arguments)?;
        let name = String::from_utf8_lossy(name.trim_ascii()).into_owned();
        Ok(if name.is_empty() { "default".to_owned() } else { name })
    }

    /// Returns a pod in a namespace, by default in that of the context.
    ///
    /// # Errors
    /// kubectl fails, or there is no such pod.
    pub(super) fn pod(&self, namespace: Option<&str>, name: &str) -> Result<Value, Error> {
        // As in kubectl logs and kubectl exec.
        let name = ["pod/", "pods/", "po/"].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
        if !name.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c)) {
            return Err(Error::new(Code::PodUnknown, format!("pod {name:?}: not a name of a pod")));
        }
        let found = self.get(&format!("pod/{name}"), &namespace_flag(namespace))?.pop();
        found.ok_or_else(|| {
            let msg = match namespace {
                Some(namespace) => format!("pod {namespace}/{name}: not found"),
                None => format!("pod {name}: not found in the namespace of the context; add -n NAMESPACE"),
            };
            Error::new(Code::PodUnknown, msg)
        })
    }

    /// Returns a pod with its namespace.
    ///
    /// # Errors
    /// As [`Self::pod`]; an object is invalid.
    pub(super) fn facts(&self, namespace: Option<&str>, name: &str) -> Result<Facts, Error> {
        let pod = self.pod(namespace, name)?;
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
        let mut items = self.get(&format!("namespace/{namespace}"), &[])?;
        items.push(pod);
        let list = json!({"kind": "List", "items": items}).to_string();
        let mut found = objects(Path::new(self.program), &list, &namespace)?;
        let pod = found.pods.pop().ok_or_else(|| self.failed("get pod", "expected a pod"))?.pod;
        Ok(Facts { pod, namespace: found.namespaces.pop() })
    }

    /// Returns the agents' pods on one or all nodes, sorted by node, namespace and name.
    ///
    /// # Errors
    /// kubectl fails.
    pub(super) fn agents(&self, node: Option<&str>) -> Result<Vec<AgentPod>, Error> {
        let on_node = node.map(|node| format!("--field-selector=spec.nodeName={node}"));
        let found = self.get("pods", &self.of_agents(on_node.as_deref()))?;
        let mut agents: Vec<AgentPod> = found.iter().filter_map(AgentPod::of).collect();
        agents.sort_unstable_by(|a, b| (&a.node, &a.object).cmp(&(&b.node, &b.object)));
        Ok(agents)
    }

    /// Returns the DaemonSets of agents, and perhaps those of other products.
    ///
    /// # Errors
    /// kubectl fails.
    pub(super) fn daemon_sets(&self) -> Result<Vec<Value>, Error> {
        self.get("daemonsets.apps", &self.of_agents(None))
    }

    fn of_agents<'a>(&'a self, more: Option<&'a str>) -> Vec<&'a str> {
        let place = match &self.agent_namespace {
            Some(namespace) => vec!["--namespace", namespace],
            None => vec!["--all-namespaces"],
        };
        place.into_iter().chain([AGENT_LABEL]).chain(more).collect()
    }

    /// Returns the nodes that a label selector selects, sorted by name.
    ///
    /// # Errors
    /// kubectl fails.
    pub(super) fn nodes(&self, selector: Option<&str>) -> Result<Vec<NodeLabels>, Error> {
        let selector = selector.map(|labels| format!("--selector={labels}"));
        let selector: Vec<&str> = selector.iter().map(String::as_str).collect();
        let found = self.get("nodes", &selector)?;
        let mut nodes: Vec<NodeLabels> = found.iter().filter_map(NodeLabels::of).collect();
        nodes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(nodes)
    }

    /// Returns the pods on a node, in one or all namespaces.
    ///
    /// # Errors
    /// kubectl fails.
    pub(super) fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<Value>, Error> {
        let on_node = format!("--field-selector=spec.nodeName={node}");
        let place = namespace.map_or_else(|| vec!["--all-namespaces"], |namespace| vec!["--namespace", namespace]);
        self.get("pods", &[&place[..], &[&on_node]].concat())
    }

    /// Runs a command in all these agents, and shows the progress on a terminal. Returns the output of each, or why there
    /// is none.
    pub(super) fn run_in_all(
        &self,
        agents: &[&AgentPod],
        words: &[&str],
        timeout: Duration,
    ) -> Vec<Result<Output, String>> {
        let next = AtomicUsize::new(0);
        let (sender, receiver) = channel();
        thread::scope(|scope| {
            for _ in 0..agents.len().min(PARALLEL) {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || {
                    while let Some((index, agent)) = {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        agents.get(index).map(|agent| (index, agent))
                    } {
                        let _ = sender.send((index, self.run_in(agent, words, timeout)));
                    }
                });
            }
            drop(sender);
            let mut outputs: Vec<_> = agents.iter().map(|_| Err("no result".to_owned())).collect();
            let mut shown = Instant::now();
            for (ended, (index, output)) in receiver.iter().enumerate() {
                outputs[index] = output;
                if ended + 1 < agents.len() && shown.elapsed() >= SILENCE {
                    shown = Instant::now();
                    show_progress(&format!("{} of {} agents have answered", ended + 1, agents.len()));
                }
            }
            outputs
        })
    }

    /// Runs a command in the agent's container.
    ///
    /// # Errors
    /// The container is not running, kubectl fails, or the command does not end in time.
    pub(super) fn run_in(&self, agent: &AgentPod, words: &[&str], timeout: Duration) -> Result<Output, String> {
        let AgentPod { object, stopped, .. } = agent;
        let failed = |why: &str| format!("pod {object}: container {CONTAINER}: {why}");
        if let Some(reason) = stopped {
            let next = format!("see kubectl describe pod -n {} {}", object.namespace, object.name);
            return Err(failed(&format!("not running: {reason}; {next}")));
        }
        let place = ["exec", "--namespace", &object.namespace, "--container", CONTAINER, &object.name, "--"];
        let output = run(self.command(&[&place, words].concat()), timeout).map_err(|why| failed(&why))?;
        match output.code == 2 && is_unknown_to_agent(&output.stderr) {
            true => Err(format!("the agent in pod {object} is too old for this command; upgrade its release")),
            false => Ok(output),
        }
    }
}

impl Definitions for Kubectl {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let look_up = |DefinitionQuery { object, .. }: &DefinitionQuery| {
            let what = format!("{DEFINITIONS}/{}", object.name);
            let Some(found) = self.get(&what, &namespace_flag(Some(&object.namespace)))?.pop() else {
                return Ok(Lookup::Missing("not found".to_owned()));
            };
            let found: Option<Definition> =
                objects(Path::new(self.program), &found.to_string(), &object.namespace)?.definitions.pop();
            Ok(found.map_or_else(|| Lookup::Missing("expected a definition".to_owned()), Lookup::Found))
        };
        wanted.iter().map(look_up).collect()
    }

    fn namespaces_with_definition(&self, _: &str) -> Option<Vec<String>> {
        None
    }
}

fn namespace_flag(namespace: Option<&str>) -> Vec<&str> {
    namespace.map_or_else(Vec::new, |namespace| vec!["--namespace", namespace])
}

/// Whether the agent's version does not know a command or one of its options (clap's messages).
fn is_unknown_to_agent(stderr: &str) -> bool {
    ["unrecognized subcommand", "unexpected argument"].iter().any(|text| stderr.contains(text))
}

/// Runs `kubectl exec` until `timeout`.
fn run(mut command: Command, timeout: Duration) -> Result<Output, String> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|why| format!("{}: {why}", command.get_program().display()))?;
    let (sender, receiver) = channel();
    let streams: [Option<Box<dyn Read + Send>>; 2] = [
        child.stdout.take().map(|stream| Box::new(stream) as _),
        child.stderr.take().map(|stream| Box::new(stream) as _),
    ];
    for (index, stream) in streams.into_iter().enumerate() {
        let sender = sender.clone();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = stream.map_or(Ok(0), |stream| stream.take(MAX_OUTPUT + 1).read_to_end(&mut bytes));
            let _ = sender.send((index, read.map(|_| bytes)));
        });
    }
    let deadline = Instant::now() + timeout;
    let mut streams = [Vec::new(), Vec::new()];
    let result = (0..streams.len()).try_for_each(|_| {
        let received = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        let (index, bytes) = received.map_err(|_| format!("no result within {} s", timeout.as_secs()))?;
        let bytes = bytes.map_err(|why| format!("output: {why}"))?;
        if bytes.len() as u64 > MAX_OUTPUT {
            return Err(format!("output: expected at most {MAX_OUTPUT} bytes, got more"));
        }
        streams[index] = bytes;
        Ok(())
    });
    if result.is_err() {
        // It may have ended already.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|why| why.to_string())?;
    let [stdout, stderr] = result.map(|()| streams)?;
    let stderr = String::from_utf8_lossy(&stderr).into_owned();
    let Some(code) = status.code().and_then(|code| u8::try_from(code).ok()) else { return Err(status.to_string()) };
    if code == 0 {
        return Ok(Output { stdout, stderr, code });
    }
    // kubectl writes this line if the command ran, and exits with the command's code (kubectl, `cmd/util`, `checkErr`).
    match stderr.strip_suffix(&format!("command terminated with exit code {code}\n")) {
        Some(rest) => Ok(Output { stdout, stderr: rest.to_owned(), code }),
        None => Err(format!("kubectl exec: {}", stderr.trim())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration) -> Result<Output, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, timeout)
    }

    #[test]
    fn the_exit_code_is_that_of_the_command_or_kubectl_has_failed() {
        let long = Duration::from_secs(60);
        let of = |script| shell(script, long).map(|output| (output.stdout, output.stderr, output.code));
        assert_eq!(of("printf a; printf b >&2"), Ok((b"a".to_vec(), "b".to_owned(), 0)));
        let ended = "printf 'x\\ncommand terminated with exit code 7\\n' >&2; exit 7";
        assert_eq!(of(ended), Ok((Vec::new(), "x\n".to_owned(), 7)));
        let failed = of("echo 'error: unable to upgrade connection' >&2; exit 1").expect_err("kubectl failed");
        assert_eq!(failed, "kubectl exec: error: unable to upgrade connection");
        // The words alone are not enough.
        assert!(of("echo 'command terminated with exit code 2' >&2; exit 1").is_err());
    }

    #[test]
    fn output_and_time_are_limited() {
        let large = shell(&format!("head -c {} /dev/zero", MAX_OUTPUT + 1), Duration::from_secs(60));
        assert!(large.expect_err("too large").contains("at most 16777216 bytes"));
        let started = Instant::now();
        let late = shell("exec sleep 600", Duration::from_millis(50));
        assert_eq!(late, Err("no result within 0 s".to_owned()));
        assert!(started.elapsed() < Duration::from_secs(300));
    }
}
