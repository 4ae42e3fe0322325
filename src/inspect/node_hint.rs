//! Hints to run detour on a pod's node.

use crate::pod::Pod;

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
