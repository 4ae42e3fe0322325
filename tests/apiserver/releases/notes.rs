//! What helm prints after an installation.

use super::helm::{Helm, definition_of};
use crate::control_plane::ControlPlane;
use crate::shipped::{apply, prepare};

const HEAD: &str = concat!("detour ", env!("CARGO_PKG_VERSION"), " for the platform ");
const STEPS: &str = "
Next step: wait for the agents, and check one node:
  kubectl -n kube-system rollout status daemonset/detour-agent && helm test detour -n kube-system

kubectl detour check checks all nodes.
";
const OWN_LIST: &str = "
On each node, the agent writes /etc/cni/net.d/00-detour.conflist, a copy of the cluster network's
configuration list with the plugin's entry. In a few cases, for example beside Multus, it edits the cluster network's
list instead. Its log contains the reason.
";

#[test]
fn the_notes_name_affected_pods_and_the_next_step() {
    let plane = ControlPlane::start();
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let notes = |values: &str| {
        let notes = helm.upgrade("detour", &["--reset-values", "--set", values]);
        notes.split_once("NOTES:\n").expect("notes").1.to_owned()
    };
    assert_eq!(
        notes("definitions=auto"),
        format!(
            "{HEAD}kubernetes: DaemonSet kube-system/detour-agent\n\n\
             The plugin runs for new pods that have a sidecar or are in the ambient mesh, except in the namespaces istio-system, kube-system.\n{OWN_LIST}{STEPS}"
        )
    );
    assert_eq!(
        notes("global.platform=openshift,excludeNamespaces=null"),
        format!(
            "{HEAD}openshift: DaemonSet kube-system/detour-agent\n\n\
             The plugin runs for new pods that have a sidecar or are in the ambient mesh,\n\
             if they select one of these attachments in the annotation k8s.v1.cni.cncf.io/networks:\n  \
             default/istio-cni\n{STEPS}"
        )
    );
    let chain = "config.chain[0].type=istio-redirect,config.chain[1].type=container-exclude";
    let (captured, unused) = ("Excluded containers start captured.", "containerExclusion.enabled has no effect");
    for (values, warning) in [
        (chain.to_owned(), Some(captured)),
        // With an API that the chart finds in the cluster.
        ("containerExclusion.enabled=true,taint.enabled=true,taint.atCreation=true".to_owned(), Some(unused)),
        (format!("{chain},containerExclusion.enabled=true"), None),
    ] {
        let notes = notes(&values);
        assert_eq!(notes.split_once("\nWarning: ").is_some(), warning.is_some(), "{notes}");
        assert!(warning.is_none_or(|warning| notes.replace('\n', " ").contains(warning)), "{notes}");
    }
    apply(&admin, &[definition_of("shop", "a")]);
    assert_eq!(
        notes("attachments[0].name=a,attachments[0].namespaces={shop},definitions=never"),
        format!(
            "{HEAD}kubernetes: DaemonSet kube-system/detour-agent\n\n\
             The plugin runs for new pods that have a sidecar or are in the ambient mesh, except in the namespaces istio-system, kube-system.\n\
             Pods can also select one of these attachments in the annotation k8s.v1.cni.cncf.io/networks:\n  \
             default/a\n  shop/a\n{OWN_LIST}{STEPS}\n\
             Warning: this release does not create NetworkAttachmentDefinition default/a (definitions=never).\n\
             Pods can select it only if another owner creates it.\n\n\
             Warning: NetworkAttachmentDefinition shop/a belongs to another owner (not managed by Helm).\n\
             This release uses it, and does not change or delete it. If its owner deletes it, run helm upgrade.\n"
        )
    );
}
