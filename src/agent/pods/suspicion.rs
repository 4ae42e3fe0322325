//! Whether a pod bypasses the sidecar, from its state in the cluster and the state of its network namespace.

use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::cni::Block;
use crate::networks::{self, InstalledNetwork};
use crate::plugin::evaluation;
use crate::plugin::running::ContainerStatus;
use crate::pod::well_known::INJECTION_STATUS;
use crate::pod::{Facts, Namespace, Pod};
use crate::sub_plugins::{Decision, SubPlugin, is_meshed, skip_reason};
use std::fmt;

/// Why a pod needs a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// Its init container found that traffic is not redirected.
    ValidationFailed,
    /// Its live rules differ from the desired rules of its attachments.
    Drift,
    /// The plugin was not called for it: it started before the plugin was installed, or while it was missing.
    NoRules,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ValidationFailed => "its init container found that traffic is not redirected",
            Self::Drift => "its rules had drifted from the desired rules",
            Self::NoRules => "it had a sidecar and no rules",
        })
    }
}

/// The evidence in the cluster that a pod bypasses the sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Suspicion {
    /// Whether its validation has failed and has not succeeded since.
    pub(super) validation_failed: bool,
    /// Whether its sandbox is complete: it has addresses, so all ADD calls have returned.
    pub(super) settled: bool,
    /// Whether the plugin, as it is configured now, would be called for it and would redirect it.
    pub(super) redirectable: bool,
}

/// Returns the evidence in the cluster about a pod, and the configuration that would redirect it. If no configuration
/// would, it is the first one that includes the pod. Returns `None` if the pod is never repaired: it is not in the mesh, has
/// no network namespace of its own, is ending, or is excluded by every configuration.
pub(super) fn suspect<'a>(
    installed: &'a [Installed],
    observed: &ObservedPod,
    namespace: Option<&Namespace>,
) -> Option<(&'a Installed, Suspicion)> {
    let pod = &observed.pod;
    let name = pod.reference();
    if observed.has_ended || observed.is_deleting || !is_meshed(pod, namespace) {
        return None;
    }
    let including: Vec<_> =
        installed.iter().filter(|installed| skip_reason(&installed.conf, &name).is_none()).collect();
    let redirects_any = including.iter().any(|installed| redirections(installed).next().is_some());
    let redirecting = including.iter().find(|it| is_called(it, pod) && redirects(it, pod)).copied();
    let installed = redirecting.or_else(|| including.first().copied())?;
    let is_injected = pod.annotations.contains_key(INJECTION_STATUS);
    let suspicion = Suspicion {
        // Without a redirection of its own, the agent leaves the pod to the program that redirects it.
        validation_failed: observed.validation_failed && is_injected && redirects_any,
        settled: !observed.addresses.is_empty(),
        redirectable: redirecting.is_some(),
    };
    Some((installed, suspicion))
}

/// Returns why a pod without saved state needs a repair; `None` if it does not, or if it has no address yet: only an address
/// proves that a network namespace is the pod's. `status` is the state of its network namespace, `None` if that is not
/// found on this node.
pub(super) fn diagnose(suspicion: Suspicion, status: Option<&ContainerStatus>) -> Option<Cause> {
    if !suspicion.settled {
        return None;
    }
    if suspicion.validation_failed {
        return Some(Cause::ValidationFailed);
    }
    (suspicion.redirectable && status?.is_bare()).then_some(Cause::NoRules)
}

/// Whether the plugin is called for the pod: always from the cluster network's configuration list, and otherwise for
/// pods that select its network.
fn is_called(installed: &Installed, pod: &Pod) -> bool {
    let network = || networks::installed_network(pod, &installed.conf.name, &|_| None);
    installed.for_every_pod || matches!(network(), Ok(InstalledNetwork::Runs | InstalledNetwork::Unknown(_)))
}

/// Returns the blocks of the configuration that redirect traffic.
fn redirections(installed: &Installed) -> impl Iterator<Item = &Block> {
    installed.conf.chain.iter().filter(|block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect))
}

fn redirects(installed: &Installed, pod: &Pod) -> bool {
    let blocks: Vec<_> = redirections(installed).cloned().collect();
    let facts = Facts { pod: pod.clone(), namespace: None };
    evaluation::output(&blocks, &installed.conf, Some(&facts)).is_ok_and(|output| output.decision == Decision::Redirect)
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
        let mut observed = meshed();
        change(&mut observed);
        observed
    }

    fn suspicion(observed: &ObservedPod) -> Option<(bool, bool, bool)> {
        let (_, suspicion) = suspect(&[installed(LISTED, true)], observed, None)?;
        Some((suspicion.validation_failed, suspicion.settled, suspicion.redirectable))
    }

    #[test]
    fn only_running_pods_with_a_sidecar_and_a_netns_of_their_own_are_checked() {
        let annotate = |observed: &mut ObservedPod, key: &str, value: &str| {
            drop(observed.pod.annotations.insert(key.into(), value.into()))
        };
        let table = [
            (meshed(), Some((false, true, true))),
            (changed(|observed| observed.addresses.clear()), Some((false, false, true))),
            (changed(|observed| observed.validation_failed = true), Some((true, true, true))),
            (changed(|observed| observed.has_ended = true), None),
            (changed(|observed| observed.is_deleting = true), None),
            (changed(|observed| observed.pod.host_network = true), None),
            (changed(|observed| observed.pod.namespace = "kube-system".into()), None),
            (changed(|observed| observed.pod.containers.clear()), None),
            (changed(|observed| observed.pod.annotations.clear()), Some((false, true, false))),
            (
                changed(|observed| annotate(observed, "sidecar.istio.io/interceptionMode", "NONE")),
                Some((false, true, false)),
            ),
            (
                changed(|observed| annotate(observed, "sidecar.istio.io/interceptionMode", "wrong")),
                Some((false, true, false)),
            ),
            (
                changed(|observed| {
                    observed.pod.init_containers.push(Container { name: "istio-init".into(), ..Container::default() })
                }),
                Some((false, true, false)),
            ),
        ];
        for (observed, expected) in table {
            assert_eq!(suspicion(&observed), expected, "{observed:?}");
        }
    }

    #[test]
    fn a_plugin_with_its_own_network_is_called_for_pods_that_select_it() {
        let own = installed(LISTED, false);
        let redirectable = |networks: Option<&str>| {
            let observed = changed(|observed| {
                let networks = networks.map(|text| ("k8s.v1.cni.cncf.io/networks".to_owned(), text.to_owned()));
                observed.pod.annotations.extend(networks);
            });
            suspect(std::slice::from_ref(&own), &observed, None).expect("it has a sidecar").1.redirectable
        };
        let answers =
            [None, Some("default/other"), Some("a, default/n"), Some("n@net1"), Some("[broken")].map(redirectable);
        assert_eq!(answers, [false, false, true, true, false]);
    }

    #[test]
    fn a_failed_validation_is_left_to_the_program_that_redirects_the_pod() {
        let exclusions = LISTED.replace("\"detour\"", "\"excludedns\"");
        let failed = changed(|observed| observed.validation_failed = true);
        let is_suspected = |text: &str| {
            let installed = [installed(text, true)];
            let (_, suspicion) = suspect(&installed, &failed, None).expect("it has a sidecar");
            suspicion.validation_failed
        };
        assert_eq!([LISTED, &exclusions].map(is_suspected), [true, false]);
    }

    #[test]
    fn the_state_of_the_netns_decides_unless_the_validation_failed() {
        let attachment = Attachment { container_id: "c".into(), network: "n".into(), ifname: "eth0".into() };
        let attached = ContainerStatus { attachments: vec![attachment], redirected: true, drift: Vec::new() };
        let (bare, foreign) =
            (ContainerStatus::default(), ContainerStatus { redirected: true, ..ContainerStatus::default() });
        let calm = Suspicion { validation_failed: false, settled: true, redirectable: true };
        let failed = Suspicion { validation_failed: true, ..calm };
        let unsettled = Suspicion { settled: false, ..calm };
        let other = Suspicion { redirectable: false, ..calm };
        let table = [
            (calm, None, None),
            (calm, Some(&attached), None),
            (calm, Some(&bare), Some(Cause::NoRules)),
            (calm, Some(&foreign), None),
            (other, Some(&bare), None),
            (unsettled, Some(&bare), None),
            (failed, None, Some(Cause::ValidationFailed)),
            (failed, Some(&attached), Some(Cause::ValidationFailed)),
            (Suspicion { settled: false, ..failed }, None, None),
        ];
        for (suspicion, status, expected) in table {
            assert_eq!(diagnose(suspicion, status), expected, "{suspicion:?} {status:?}");
        }
    }
}
