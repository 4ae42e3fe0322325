//! Runs `kubectl`: it selects the cluster and the user, reads objects, and runs commands in the agents' containers.

use clap::Args;
use detour_cni::cluster::{Definition, DefinitionQuery, Definitions, Lookup, objects};
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::{AgentPod, run_program};
use detour_cni::pod::Facts;
use serde_json::{Value, json};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{iter, thread};

/// The maximum output of a command in an agent's container, in bytes.
const MAX_OUTPUT: u64 = 16 << 20;
/// In how many agents a command runs at the same time.
const PARALLEL: usize = 16;
/// The label of the agents' pods and DaemonSets in the manifests of all versions; agents of other products may have it too.
pub(super) const AGENT_LABEL: &str = "--selector=app.kubernetes.io/component=agent";
/// The container of the agent in its pod.
const CONTAINER: &str = "agent";
const DEFINITIONS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

/// `kubectl` or `oc`, with the flags that select the cluster.
#[derive(Debug, Clone, Args)]
pub(in crate::cli) struct Kubectl {
    #[arg(skip)]
    pub(super) program: &'static str,
    /// Kubeconfig, as in kubectl
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig, as in kubectl
    #[arg(long, value_name = "NAME", global = true)]
    context: Option<String>,
    /// Namespace of the agents' pods [default: all namespaces]
    #[arg(long, value_name = "NAMESPACE", global = true)]
    pub(super) agent_namespace: Option<String>,
}

impl Kubectl {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.args(self.kubeconfig.iter().map(|path| format!("--kubeconfig={}", path.display())));
        command.args(self.context.iter().map(|name| format!("--context={name}"))).args(arguments);
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
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(self.failed(what, &format!("{}; see its message above", output.status))),
        }
    }

    /// Returns the objects that `kubectl get` finds; none if the named object does not exist.
    ///
    /// # Errors
    /// kubectl fails.
    pub(super) fn get(&self, what: &str, namespace: Option<&str>, selectors: &[&str]) -> Result<Vec<Value>, Error> {
        let namespace = namespace.map(|name| format!("--namespace={name}"));
        let flags = ["get", "--output=json", "--ignore-not-found", "--request-timeout=30s"].into_iter();
        let flags = flags.chain(namespace.as_deref()).chain(selectors.iter().copied()).chain(["--", what]);
        let text = self.read(&format!("get {what}"), &flags.collect::<Vec<_>>())?;
        if text.trim_ascii().is_empty() {
            return Ok(Vec::new());
        }
        let mut found: Value = serde_json::from_slice(&text).map_err(|why| self.failed(what, &why.to_string()))?;
        Ok(match found["items"].take() {
            Value::Array(items) => items,
            _ => vec![found],
        })
    }

    /// Returns the objects in one or all namespaces.
    ///
    /// # Errors
    /// kubectl fails.
    pub(super) fn list(&self, what: &str, namespace: Option<&str>, selectors: &[&str]) -> Result<Vec<Value>, Error> {
        let all = namespace.is_none().then_some("--all-namespaces");
        self.get(what, namespace, &all.into_iter().chain(selectors.iter().copied()).collect::<Vec<_>>())
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
        let found = self.get(&format!("pod/{name}"), namespace, &[])?.pop();
        let place = || match namespace {
            Some(namespace) => format!("pod {namespace}/{name}: not found"),
            None => format!("pod {name}: not found in the namespace of the context; add -n NAMESPACE"),
        };
        found.ok_or_else(|| Error::new(Code::PodUnknown, place()))
    }

    /// Returns a pod with its namespace.
    ///
    /// # Errors
    /// As [`Self::pod`]; an object is invalid.
    pub(in crate::cli) fn facts(&self, namespace: Option<&str>, name: &str) -> Result<Facts, Error> {
        let pod = self.pod(namespace, name)?;
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
        let mut items = self.get(&format!("namespace/{namespace}"), None, &[])?;
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
        let selectors: Vec<&str> = [AGENT_LABEL].into_iter().chain(on_node.as_deref()).collect();
        let found = self.list("pods", self.agent_namespace.as_deref(), &selectors)?;
        let mut agents: Vec<AgentPod> = found.iter().filter_map(AgentPod::of).collect();
        agents.sort_unstable_by(|a, b| (&a.node, &a.object).cmp(&(&b.node, &b.object)));
        Ok(agents)
    }

    /// Runs a command in all these agents. Returns them in any order, each with the output or the error.
    pub(super) fn run_in_all<'a>(
        &self,
        agents: &[&'a AgentPod],
        words: &[&str],
        timeout: Duration,
    ) -> Vec<(&'a AgentPod, Result<Output, String>)> {
        let queue = Mutex::new(agents.iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let run = || iter::from_fn(next).map(|agent| (*agent, self.run_in(agent, words, timeout))).collect::<Vec<_>>();
        thread::scope(|scope| {
            let running: Vec<_> = (0..agents.len().min(PARALLEL)).map(|_| scope.spawn(run)).collect();
            running.into_iter().flat_map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
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
        run(self.command(&[&place, words].concat()), timeout).map_err(|why| failed(&why))
    }
}

impl Definitions for Kubectl {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let look_up = |DefinitionQuery { object, .. }: &DefinitionQuery| {
            let what = format!("{DEFINITIONS}/{}", object.name);
            let Some(found) = self.get(&what, Some(&object.namespace), &[])?.pop() else {
                return Ok(Lookup::Missing("not found".to_owned()));
            };
            let found: Option<Definition> =
                objects(Path::new(self.program), &found.to_string(), &object.namespace)?.definitions.pop();
            Ok(found.map_or_else(|| Lookup::Missing("expected a definition".to_owned()), Lookup::Found))
        };
        wanted.iter().map(look_up).collect()
    }
}

/// Runs `kubectl exec` until `timeout`.
fn run(mut command: Command, timeout: Duration) -> Result<Output, String> {
    let mut output = run_program(&mut command, MAX_OUTPUT, timeout)?;
    if [&output.stdout, &output.stderr].iter().any(|stream| stream.len() as u64 > MAX_OUTPUT) {
        return Err(format!("output: expected at most {MAX_OUTPUT} bytes, got more"));
    }
    let code = output.status.code().ok_or_else(|| output.status.to_string())?;
    if code != 0 {
        // kubectl writes this line if the command ran, and exits with the command's code (kubectl, `cmd/util`, `checkErr`).
        let line = format!("command terminated with exit code {code}\n");
        let Some(rest) = output.stderr.strip_suffix(line.as_bytes()) else {
            return Err(format!("kubectl exec: {}", String::from_utf8_lossy(&output.stderr).trim()));
        };
        output.stderr.truncate(rest.len());
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    fn shell(script: &str) -> Result<Output, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, Duration::from_secs(60))
    }

    #[test]
    fn the_exit_code_is_that_of_the_command_or_kubectl_has_failed() {
        let output = |stderr: &str, code: i32| Output {
            stdout: b"a".to_vec(),
            stderr: stderr.as_bytes().to_vec(),
            status: ExitStatus::from_raw(code << 8),
        };
        assert_eq!(shell("printf a; printf b >&2"), Ok(output("b", 0)));
        let ended = "printf a; printf 'x\\ncommand terminated with exit code 7\\n' >&2; exit 7";
        assert_eq!(shell(ended), Ok(output("x\n", 7)));
        let failed = shell("echo 'error: unable to upgrade connection' >&2; exit 1").expect_err("kubectl failed");
        assert_eq!(failed, "kubectl exec: error: unable to upgrade connection");
        // The words alone are not enough.
        assert!(shell("echo 'command terminated with exit code 2' >&2; exit 1").is_err());
        let large = shell(&format!("head -c {} /dev/zero", MAX_OUTPUT + 1));
        assert!(large.expect_err("too large").contains("at most 16777216 bytes"));
    }
}
