//! What runtimes, Multus and this plugin say when a pod does not come up, and what to do about it.

/// What is said, and what to do.
struct KnownError {
    /// Every one of them is in the text.
    said: &'static [&'static str],
    next: &'static str,
}

const AGENT: &str = "see whether the agent runs on this node (kubectl get pods -A -o wide -l \
    app.kubernetes.io/component=agent)";

/// The first that fits counts. The words are those of CRI-O and containerd (libcni's `FindInPath`, ocicni, go-cni), of
/// Multus (`pkg/k8sclient`) and of this program (`cluster::query`, `networks`).
const KNOWN_ERRORS: [KnownError; 23] = [
    KnownError {
        said: &["failed to find plugin"],
        next: "the program is not in the runtime's directories: see program-present, and install it under the name that \
               is missing (detour install --name)",
    },
    KnownError { said: &["exec format error"], next: "the program is for another machine: see program-architecture" },
    KnownError {
        said: &["fork/exec", "permission denied"],
        next: "the program may not be executed: see program-executable, and SELinux's log (ausearch -m avc)",
    },
    KnownError {
        said: &["network-attachment-definition", "in namespace"],
        next: "see definition-found: the annotation names a definition that is not in that namespace",
    },
    KnownError {
        said: &["NetworkAttachmentDefinition", "in namespace"],
        next: "see definition-found: the annotation names a definition that is not in that namespace",
    },
    KnownError {
        said: &["there is no configuration with \"name\""],
        next: "see definition-leads: no file on the node has the definition's name",
    },
    KnownError {
        said: &["no network config found in"],
        next: "see definition-leads: no file on the node has the definition's name",
    },
    KnownError {
        said: &["no network available in the name"],
        next: "see definition-leads: no file on the node has the definition's name",
    },
    KnownError {
        said: &["Error loading CNI config file"],
        next: "see configuration-valid: Multus stops at the first file by name that it can't read, whosever that is",
    },
    KnownError {
        said: &["failed to unmarshal Spec.Config"],
        next: "see definition-leads: the definition's spec.config is not JSON",
    },
    KnownError { said: &["parsePodNetwork"], next: "see annotation-valid: the pod's networks annotation can't be read" },
    KnownError { said: &["network", "not found"], next: "see definition-found and definition-leads: a name leads nowhere" },
    KnownError {
        said: &["No CNI configuration file in"],
        next: "the cluster's own network is not up on this node: see its agent's pods",
    },
    KnownError {
        said: &["no networks found in"],
        next: "the cluster's own network is not up on this node: see its agent's pods",
    },
    KnownError { said: &["is not written yet"], next: AGENT },
    KnownError { said: &["are not accepted"], next: "see token-valid: the token in the kubeconfig is refused" },
    KnownError { said: &["Unauthorized"], next: "see token-valid: the token in the kubeconfig is refused" },
    KnownError { said: &["lack the right to"], next: "see the lines right-*: grant what is missing" },
    KnownError { said: &["is forbidden"], next: "see the lines right-*: grant what is missing" },
    KnownError { said: &["no usable answer in"], next: "see api-reachable: the node did not reach the API server in time" },
    KnownError {
        said: &["contradict each other"],
        next: "give both attachments the same value of the setting that is named",
    },
    KnownError { said: &["is not accepted"], next: "correct the key or annotation that is named" },
    KnownError {
        said: &["the kernel refused"],
        next: "see the lines kernel-*: the node's kernel lacks what the rules need",
    },
];

/// What to do about it; `None` where it is not known.
pub(super) fn next(text: &str) -> Option<&'static str> {
    KNOWN_ERRORS.iter().find(|known| known.said.iter().all(|part| text.contains(part))).map(|known| known.next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_others_say_is_recognised() {
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
                "pod shop/web-0: GET https://10.0.0.1:443/api/v1/namespaces/shop/pods/web-0 (kubeconfig /k): 403, the credentials in /k lack the right to get pods in namespace shop: grant it in a ClusterRole",
                "right-*",
            ),
            (
                "kubeconfig /k is not written yet: the node agent (detour's, or istio-cni's install-cni) writes it",
                "agent",
            ),
        ] {
            let found = next(text).unwrap_or_else(|| panic!("not recognised: {text}"));
            assert!(found.contains(wanted), "{text}: {found}");
        }
        assert_eq!(next("Back-off restarting failed container app"), None);
    }
}
