//! Reports about all nodes, merged from the reports of their agents. An agent's output is input of another machine: it
//! is parsed into these types, and limited.
//! Also hints to run detour on a pod's node.

use crate::pod::Pod;
pub use agents::{AgentDaemonSet, AgentPod, NodeLabels, pods_with_running_sidecar};
pub use audit::{NodesAudit, PodOfNode};
pub use check::{FailedCheck, NodeCheck, NodeResult, NodesCheck, PolicyCounts};
pub use needless_exclusions::NeedlessExclusion;
pub(super) use needless_exclusions::merged;
use serde::Deserialize;
use serde::de::DeserializeOwned;

mod agents;
mod audit;
mod check;
mod needless_exclusions;

/// The start of an output that is not a report, in a message.
const MAX_SHOWN: usize = 300;
/// The limit for each text of an agent's report, in bytes.
const MAX_TEXT: usize = 4 << 10;
/// The limit for each list of an agent's report: a node has at most 256 pods by default (kubelet, `maxPods`: 110).
const MAX_ITEMS: usize = 2000;

/// What a command prints in place of its report.
#[derive(Deserialize)]
struct FailedCommand {
    #[serde(deserialize_with = "short")]
    error: String,
}

/// Parses an agent's report.
fn parse<T: DeserializeOwned>(stdout: &[u8], stderr: &[u8]) -> Result<T, String> {
    serde_json::from_slice(stdout).map_err(|error| {
        if let Ok(FailedCommand { error }) = serde_json::from_slice(stdout) {
            return error;
        }
        let text = [stderr, stdout].map(String::from_utf8_lossy).concat();
        let shown = crate::printable::cut(text.trim(), MAX_SHOWN).into_owned();
        format!("expected a report, got {shown:?} ({error})")
    })
}

/// Deserializes a text, cut at [`MAX_TEXT`].
fn short<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text: Option<String> = Option::deserialize(deserializer)?;
    Ok(crate::printable::cut(&text.unwrap_or_default(), MAX_TEXT).into_owned())
}

/// The namespace of the agent in the project's manifests.
pub(super) const AGENT_NAMESPACE: &str = "kube-system";

/// Returns a hint with the commands that run detour with `arguments` on the pod's node: in the agent's pod, and on the
/// node itself.
///
/// `agent_namespace` is the namespace of the agent's pods, and `agent` the name of the one on that node, if known.
#[must_use]
pub fn node_hint(pod: &Pod, agent_namespace: Option<&str>, agent: Option<&str>, arguments: &str) -> String {
    let Some(node) = &pod.node_name else {
        return "the pod is not scheduled to a node (spec.nodeName)".to_owned();
    };
    let agent_namespace = agent_namespace.unwrap_or(AGENT_NAMESPACE);
    let agents = format!(
        "kubectl get pods -n {agent_namespace} -l app.kubernetes.io/part-of=detour,app.kubernetes.io/component=agent \
         --field-selector spec.nodeName={node} -o name | head -n 1"
    );
    let agent = agent.map_or_else(|| format!("\"$({agents})\""), str::to_owned);
    format!(
        "the pod is on node {node}; run there:\n  \
         kubectl exec -n {agent_namespace} {agent} -- /detour {arguments} --root /host\n\
         or, with DIR being the plugin's directory on the node (/var/lib/cni/bin on OpenShift):\n  \
         oc debug node/{node} -- chroot /host DIR/detour {arguments}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_contain_the_node_and_the_arguments() {
        let pod = Pod { node_name: Some("worker-1".into()), ..Pod::default() };
        let text = node_hint(&pod, Some("mesh"), None, "rules --pod-uid u");
        let commands: Vec<&str> = text.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(commands.len(), 2, "{text}");
        assert!(commands[0].starts_with("  kubectl exec -n mesh ") && commands[0].contains("spec.nodeName=worker-1"));
        assert!(commands[0].ends_with("-- /detour rules --pod-uid u --root /host"), "{text}");
        assert!(commands[1].contains("node/worker-1") && commands[1].ends_with("/detour rules --pod-uid u"), "{text}");
        let known = node_hint(&pod, Some("mesh"), Some("detour-agent-x"), "rules");
        assert!(known.contains("kubectl exec -n mesh detour-agent-x -- /detour rules --root /host"), "{known}");
        assert!(node_hint(&pod, None, None, "rules").contains("kubectl exec -n kube-system "));
        assert!(node_hint(&Pod::default(), None, None, "rules").contains("not scheduled"));
    }
}
