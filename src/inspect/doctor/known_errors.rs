//! Error messages of runtimes, Multus and this program, with the next step for each.

const DEFINITION: &str = "see definition-found: the annotation names a definition that is not in that namespace";
const NO_CONFIGURATION: &str = "see definition-leads: no configuration file on the node has the definition's name";
const NOT_READY: &str = "check the pods of the cluster network on this node: it has not written its configuration yet";
const TOKEN: &str = "see token-valid: the API server refuses the token in the kubeconfig";
const RIGHTS: &str = "see the checks right-*, and grant the missing rights";
const CORRECT: &str = "correct the named key or annotation";

/// Fragments that all occur in a message, and the next step. The first match counts. The messages are those of CRI-O and
/// containerd (libcni's `FindInPath`, ocicni, go-cni), of Multus (`pkg/k8sclient`) and of this program
/// (`cluster::api::call`, `networks`).
const KNOWN_ERRORS: [(&[&str], &str); 24] = [
    (
        &["failed to find plugin"],
        "see program-present: the program is not in the runtime's plugin directories; install it under the missing name \
         (detour install --name)",
    ),
    (&["exec format error"], "see program-architecture: the program is built for another architecture"),
    (
        &["fork/exec", "permission denied"],
        "see program-executable, and the SELinux log (ausearch -m avc): the program can't be executed",
    ),
    (&["network-attachment-definition", "in namespace"], DEFINITION),
    (&["NetworkAttachmentDefinition", "in namespace"], DEFINITION),
    (&["no configuration with \"name\""], NO_CONFIGURATION),
    (&["no network config found in"], NO_CONFIGURATION),
    (&["no network available in the name"], NO_CONFIGURATION),
    (
        &["Error loading CNI config file"],
        "see configuration-valid: Multus stops at the first file that it can't read, in the order of names",
    ),
    (&["failed to unmarshal Spec.Config"], "see definition-leads: the definition's spec.config is invalid JSON"),
    (&["parsePodNetwork"], "see annotation-valid: the pod's networks annotation can't be read"),
    (&["network", "not found"], "see definition-found and definition-leads: a network is not found"),
    (&["No CNI configuration file in"], NOT_READY),
    (&["no networks found in"], NOT_READY),
    (
        &["is not written yet"],
        "check whether the agent runs on this node (kubectl get pods -A -o wide -l app.kubernetes.io/component=agent)",
    ),
    (&["are not accepted"], TOKEN),
    (&["Unauthorized"], TOKEN),
    (&["lack the right to"], RIGHTS),
    (&["is forbidden"], RIGHTS),
    (&["no usable answer in"], "see api-reachable: the API server did not answer in time"),
    (&["contradict each other"], "set the named setting to the same value in both attachments"),
    (&["invalid ", "; expected"], CORRECT),
    (&["unknown ", "; expected"], CORRECT),
    (&["the kernel refused"], "see the checks kernel-*: the kernel lacks a feature that the rules need"),
];

/// Returns the next step for a known error message.
pub(super) fn next(text: &str) -> Option<&'static str> {
    let known = KNOWN_ERRORS.iter().find(|(fragments, _)| fragments.iter().all(|part| text.contains(part)));
    known.map(|(_, next)| *next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_messages_of_other_programs_are_recognized() {
        for (text, wanted) in [
            (
                r#"Failed to create pod sandbox: rpc error: code = Unknown desc = failed to create pod network sandbox k8s_web-0_shop_1(2): error adding pod shop_web-0 to CNI network "multus-cni-network": plugin type="multus" name="multus-cni-network" failed (add): [shop/web-0/uid:istio-cni]: error adding container to network "istio-cni": failed to find plugin "istio-cni" in path [/opt/multus/bin /var/lib/cni/bin /usr/libexec/cni]"#,
                "program-present",
            ),
            (
                r#"Multus: [shop/web-0]: error getting k8s client: cannot find a network-attachment-definition (istio-cni) in namespace (shop): network-attachment-definitions.k8s.cni.cncf.io "istio-cni" not found"#,
                "definition-found",
            ),
            (
                r#"[shop/web-0/u:istio-cni]: error adding container: cniConfigFromNetworkResource: err in getCNIConfigFromFile: no network available in the name istio-cni in cni dir /etc/cni/multus/net.d"#,
                "definition-leads",
            ),
            (
                "Error loading CNI config file /etc/cni/multus/net.d/10-x.conf: no 'type'; perhaps this is a .conflist?",
                "configuration-valid",
            ),
            ("parsePodNetworkObjectName: Invalid network object (failed at '/')", "annotation-valid"),
            (r"fork/exec /var/lib/cni/bin/istio-cni: exec format error", "program-architecture"),
            (r"fork/exec /var/lib/cni/bin/istio-cni: permission denied", "program-executable"),
            (
                "pod shop/web-0: GET https://10.0.0.1:443/api/v1/namespaces/shop/pods/web-0 (kubeconfig /k): 403, the credentials in /k lack the right to get pods in namespace shop; grant it in a ClusterRole",
                "right-*",
            ),
            (
                "kubeconfig /k is not written yet; check that the pod of the agent that writes it (detour-agent, or istio-cni's install-cni) runs on this node, or correct kubernetes.kubeconfig",
                "agent",
            ),
        ] {
            let found = next(text).unwrap_or_else(|| panic!("not recognized: {text}"));
            assert!(found.contains(wanted), "{text}: {found}");
        }
        assert_eq!(next("Back-off restarting failed container app"), None);
    }
}
