//! Whether a pod needs repair: from what the cluster says of it, and what the node does.

use super::Selector;
use crate::agent::install::Installed;
use crate::agent::{EndedContainer, ObservedPod};
use crate::networks;
use crate::plugin::{ContainerStatus, desired_policy};
use crate::pod::well_known::{INJECTION_STATUS, VALIDATION_CONTAINER};
use crate::pod::{Facts, Pod, PodRef};
use crate::sub_plugins::{Decision, SubPlugin, skip_reason};
use std::fmt;

/// Which pods are looked after, and how a failed validation is known; the defaults are Istio's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criteria {
    /// Which pods, by their labels.
    pub selector: Selector,
    /// The annotation without which a pod was never validated; empty: any pod.
    pub annotation: String,
    /// The init container that validates; empty: any.
    pub container: String,
    /// Its exit code where traffic is not redirected; 0: any but success.
    pub exit_code: i32,
    /// Its termination message then; empty: any.
    pub message: String,
}

impl Default for Criteria {
    fn default() -> Self {
        Self {
            selector: Selector::default(),
            annotation: INJECTION_STATUS.to_owned(),
            container: VALIDATION_CONTAINER.to_owned(),
            exit_code: 126,
            message: String::new(),
        }
    }
}

/// Why a pod needs repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Its init container found that traffic is not redirected.
    ValidationFailed,
    /// The kernel does not hold what the pod's attachments asked for.
    Drift,
    /// It was never attached: it was there before the plugin, or while that was away.
    NoRules,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ValidationFailed => "its validation found that traffic is not redirected",
            Self::Drift => "its rules were not what its attachments asked for",
            Self::NoRules => "it had a sidecar and no rules",
        })
    }
}

/// What the cluster's facts alone say of a pod that is looked after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Suspicion {
    /// Its validation has failed, and has not succeeded since.
    pub validation_failed: bool,
    /// Its sandbox is complete: the kubelet knows addresses, so that every ADD is over.
    pub settled: bool,
    /// The plugin, as it is configured now, would be called for it and would redirect it.
    pub redirectable: bool,
}

/// What is suspected of a pod; `None` where nothing is to be done whatever the node holds: it has no
/// sidecar or no network of its own, is ending, is left out by the configuration or not selected.
#[must_use]
pub fn suspect(criteria: &Criteria, installed: &Installed, known: &ObservedPod) -> Option<Suspicion> {
    let pod = &known.pod;
    let name = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() };
    let is_ours = !known.ending
        && !pod.host_network
        && pod.proxy().is_some()
        && criteria.selector.selects(&pod.labels)
        && skip_reason(&installed.conf, &name).is_none();
    is_ours.then(|| Suspicion {
        validation_failed: criteria.failed(known),
        settled: !known.addresses.is_empty(),
        redirectable: is_called(installed, pod) && redirects(installed, pod),
    })
}

/// Why the pod needs repair; `None` where it does not. `standing` is what its namespace holds, `None`
/// where it has none on this node.
#[must_use]
pub fn diagnose(suspicion: Suspicion, standing: Option<&ContainerStatus>) -> Option<Cause> {
    if suspicion.validation_failed {
        return Some(Cause::ValidationFailed);
    }
    let standing = standing.filter(|_| suspicion.settled)?;
    if !standing.drift.is_empty() {
        return Some(Cause::Drift);
    }
    let bare = standing.attachments.is_empty() && !standing.redirected;
    (bare && suspicion.redirectable).then_some(Cause::NoRules)
}

impl Criteria {
    fn failed(&self, known: &ObservedPod) -> bool {
        let validated = self.annotation.is_empty() || known.pod.annotations.contains_key(&self.annotation);
        validated && known.ended_init_containers.iter().any(|ended| self.is_failure(ended))
    }

    fn is_failure(&self, ended: &EndedContainer) -> bool {
        let is_named = self.container.is_empty() || self.container == ended.name;
        let said = self.message.trim().is_empty() || self.message.trim() == ended.message.trim();
        let code = ended.last_failure.is_some_and(|code| self.exit_code == 0 || self.exit_code == code);
        is_named && said && code && !ended.succeeded
    }
}

/// A configuration of its own is only for pods that select its network.
fn is_called(installed: &Installed, pod: &Pod) -> bool {
    let name = &installed.conf.name;
    let selects =
        || networks::networks(pod).is_ok_and(|selected| selected.elements.iter().any(|one| one.name == *name));
    installed.for_every_pod || selects()
}

fn redirects(installed: &Installed, pod: &Pod) -> bool {
    let redirect = |block: &&_| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect);
    let blocks: Vec<_> = installed.conf.chain.iter().filter(redirect).cloned().collect();
    let facts = Facts { pod: pod.clone(), namespace: None };
    desired_policy::output(&blocks, &installed.conf, Some(&facts))
        .is_ok_and(|output| output.decision == Decision::Redirect)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::configuration;
    use crate::pod::Container;
    use crate::state::Attachment;
    use std::path::Path;

    const LISTED: &str = r#"{"cniVersion": "1.0.0", "name": "n", "type": "detour", "kubernetes": {"exclude_namespaces": ["kube-system"]}}"#;

    fn installed(text: &str, for_every_pod: bool) -> Installed {
        Installed { conf: configuration(Path::new("c"), text.as_bytes()).expect("a configuration"), for_every_pod }
    }

    fn meshed() -> ObservedPod {
        let proxy = Container {
            name: "istio-proxy".into(),
            args: vec!["proxy".into(), "sidecar".into()],
            ..Container::default()
        };
        let annotations = [("sidecar.istio.io/status".to_owned(), "{}".to_owned())].into();
        let pod = Pod {
            namespace: "shop".into(),
            name: "web".into(),
            annotations,
            containers: vec![proxy],
            ..Pod::default()
        };
        ObservedPod { pod, addresses: vec!["10.0.0.1".parse().expect("an address")], ..ObservedPod::default() }
    }

    fn changed(change: impl Fn(&mut ObservedPod)) -> ObservedPod {
        let mut known = meshed();
        change(&mut known);
        known
    }

    fn suspicion(known: &ObservedPod) -> Option<(bool, bool, bool)> {
        let suspicion = suspect(&Criteria::default(), &installed(LISTED, true), known)?;
        Some((suspicion.validation_failed, suspicion.settled, suspicion.redirectable))
    }

    fn ended(name: &str, succeeded: bool, last_failure: Option<i32>, message: &str) -> EndedContainer {
        EndedContainer { name: name.into(), succeeded, last_failure, message: message.into() }
    }

    #[test]
    fn who_is_looked_after() {
        let annotate = |known: &mut ObservedPod, key: &str, value: &str| {
            drop(known.pod.annotations.insert(key.into(), value.into()))
        };
        let table = [
            (meshed(), Some((false, true, true))),
            (changed(|known| known.addresses.clear()), Some((false, false, true))),
            (changed(|known| known.ending = true), None),
            (changed(|known| known.pod.host_network = true), None),
            (changed(|known| known.pod.namespace = "kube-system".into()), None),
            (changed(|known| known.pod.containers.clear()), None),
            (changed(|known| known.pod.annotations.clear()), Some((false, true, false))),
            (changed(|known| annotate(known, "sidecar.istio.io/interceptionMode", "NONE")), Some((false, true, false))),
            (
                changed(|known| annotate(known, "sidecar.istio.io/interceptionMode", "wrong")),
                Some((false, true, false)),
            ),
            (
                changed(|known| {
                    known.pod.init_containers.push(Container { name: "istio-init".into(), ..Container::default() })
                }),
                Some((false, true, false)),
            ),
        ];
        for (known, wanted) in table {
            assert_eq!(suspicion(&known), wanted, "{known:?}");
        }
    }

    #[test]
    fn a_configuration_of_its_own_is_for_pods_that_select_its_network() {
        let own = installed(LISTED, false);
        let redirectable = |networks: Option<&str>| {
            let known = changed(|known| {
                let networks = networks.map(|text| ("k8s.v1.cni.cncf.io/networks".to_owned(), text.to_owned()));
                known.pod.annotations.extend(networks);
            });
            suspect(&Criteria::default(), &own, &known).expect("it has a sidecar").redirectable
        };
        let answers =
            [None, Some("default/other"), Some("a, default/n"), Some("n@net1"), Some("[broken")].map(redirectable);
        assert_eq!(answers, [false, false, true, true, false]);
    }

    #[test]
    fn how_a_failed_validation_is_known() {
        let usual = Criteria::default();
        let any = Criteria { annotation: String::new(), container: String::new(), exit_code: 0, ..usual.clone() };
        let said = Criteria { message: " no rules\n".into(), ..usual.clone() };
        let table = [
            (&usual, ended("istio-validation", false, Some(126), ""), true),
            (&usual, ended("istio-validation", true, Some(126), ""), false),
            (&usual, ended("istio-validation", false, None, ""), false),
            (&usual, ended("istio-validation", false, Some(1), ""), false),
            (&usual, ended("other", false, Some(126), ""), false),
            (&any, ended("other", false, Some(1), "whatever"), true),
            (&any, ended("other", true, None, ""), false),
            (&said, ended("istio-validation", false, Some(126), "no rules"), true),
            (&said, ended("istio-validation", false, Some(126), "something else"), false),
        ];
        for (criteria, ended, wanted) in table {
            let known = changed(|known| known.ended_init_containers.push(ended.clone()));
            let suspicion = suspect(criteria, &installed(LISTED, true), &known).expect("it has a sidecar");
            assert_eq!(suspicion.validation_failed, wanted, "{criteria:?} {ended:?}");
        }
        let bare = changed(|known| {
            known.pod.annotations.clear();
            known.ended_init_containers.push(ended("istio-validation", false, Some(126), ""));
        });
        assert_eq!(suspicion(&bare), Some((false, true, false)), "it was never injected");
    }

    #[test]
    fn what_the_node_holds_decides_the_rest() {
        let attachment = Attachment { container_id: "c".into(), network: "n".into(), ifname: "eth0".into() };
        let attached = ContainerStatus { attachments: vec![attachment], redirected: true, drift: Vec::new() };
        let drifted = ContainerStatus { drift: vec!["a rule".into()], redirected: false, ..attached.clone() };
        let (bare, foreign) =
            (ContainerStatus::default(), ContainerStatus { redirected: true, ..ContainerStatus::default() });
        let calm = Suspicion { validation_failed: false, settled: true, redirectable: true };
        let failed = Suspicion { validation_failed: true, ..calm };
        let unsettled = Suspicion { settled: false, ..calm };
        let other = Suspicion { redirectable: false, ..calm };
        let table = [
            (calm, None, None),
            (calm, Some(&attached), None),
            (calm, Some(&drifted), Some(Cause::Drift)),
            (calm, Some(&bare), Some(Cause::NoRules)),
            (calm, Some(&foreign), None),
            (other, Some(&bare), None),
            (other, Some(&drifted), Some(Cause::Drift)),
            (unsettled, Some(&bare), None),
            (unsettled, Some(&drifted), None),
            (failed, None, Some(Cause::ValidationFailed)),
            (failed, Some(&attached), Some(Cause::ValidationFailed)),
        ];
        for (suspicion, standing, wanted) in table {
            assert_eq!(diagnose(suspicion, standing), wanted, "{suspicion:?} {standing:?}");
        }
    }
}
