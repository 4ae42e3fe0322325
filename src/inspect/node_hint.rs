//! The commands by which a question about a pod is asked on the pod's own node.

use crate::pod::Pod;

/// Where the manifests put the agent.
pub(super) const AGENT_NAMESPACE: &str = "kube-system";

/// What to run there, for people: by the agent, and on the node itself. `arguments` are those of `detour`;
/// `agent_namespace` is where the agent's pods are, and `agent` the one on that node, where these are known.
#[must_use]
pub fn elsewhere(pod: &Pod, agent_namespace: Option<&str>, agent: Option<&str>, arguments: &str) -> String {
    let Some(node) = &pod.node_name else {
        return "it is on no node so far (spec.nodeName)".to_owned();
    };
    let agent_namespace = agent_namespace.unwrap_or(AGENT_NAMESPACE);
    let agents = format!(
        "kubectl get pods -n {agent_namespace} -l app.kubernetes.io/name=detour,app.kubernetes.io/component=agent \
         --field-selector spec.nodeName={node} -o name | head -n 1"
    );
    let agent = agent.map_or_else(|| format!("\"$({agents})\""), str::to_owned);
    format!(
        "it is on node {node}; ask there:\n  \
         kubectl exec -n {agent_namespace} {agent} -- /detour {arguments} --root /host\n\
         or, with the plugin's program on the node in DIR (OpenShift: /var/lib/cni/bin):\n  \
         oc debug node/{node} -- chroot /host DIR/detour {arguments}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_and_the_question_are_in_both_commands() {
        let pod = Pod { node_name: Some("worker-1".into()), ..Pod::default() };
        let text = elsewhere(&pod, Some("mesh"), None, "rules --pod-uid u");
        let commands: Vec<&str> = text.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(commands.len(), 2, "{text}");
        assert!(commands[0].starts_with("  kubectl exec -n mesh ") && commands[0].contains("spec.nodeName=worker-1"));
        assert!(commands[0].ends_with("-- /detour rules --pod-uid u --root /host"), "{text}");
        assert!(commands[1].contains("node/worker-1") && commands[1].ends_with("/detour rules --pod-uid u"), "{text}");
        let known = elsewhere(&pod, Some("mesh"), Some("detour-agent-x"), "rules");
        assert!(known.contains("kubectl exec -n mesh detour-agent-x -- /detour rules --root /host"), "{known}");
        assert!(elsewhere(&pod, None, None, "rules").contains("kubectl exec -n kube-system "));
        assert!(elsewhere(&Pod::default(), None, None, "rules").contains("on no node"));
    }
}
