//! Whether a pod needs repair: from what the cluster says of it, and what the node does.

use super::Selector;
use crate::agent::install::Installed;
use crate::agent::{EndedContainer, KnownPod};
use crate::chain::{Decision, SubPlugin};
use crate::networks;
use crate::plugin::{Standing, wish};
use crate::pod::{Facts, Pod, PodRef};
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
            annotation: "sidecar.istio.io/status".to_owned(),
            container: "istio-validation".to_owned(),
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
pub fn suspect(criteria: &Criteria, installed: &Installed, known: &KnownPod) -> Option<Suspicion> {
    let pod = &known.pod;
    let name = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() };
    let is_ours = !known.ending
        && !pod.host_network
        && pod.proxy().is_some()
        && criteria.selector.selects(&pod.labels)
        && wish::left_out(&installed.conf, &name).is_none();
    is_ours.then(|| Suspicion {
        validation_failed: criteria.failed(known),
        settled: !known.addresses.is_empty(),
        redirectable: is_called(installed, pod) && redirects(installed, pod),
    })
}

/// Why the pod needs repair; `None` where it does not. `standing` is what its namespace holds, `None`
/// where it has none on this node.
#[must_use]
pub fn diagnose(suspicion: Suspicion, standing: Option<&Standing>) -> Option<Cause> {
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
    fn failed(&self, known: &KnownPod) -> bool {
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
    let selects = || networks::networks(pod).is_ok_and(|selected| selected.elements.iter().any(|one| one.name == *name));
    installed.for_every_pod || selects()
}

fn redirects(installed: &Installed, pod: &Pod) -> bool {
    let redirect = |block: &&_| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect);
    let blocks: Vec<_> = installed.conf.chain.iter().filter(redirect).cloned().collect();
    let facts = Facts { pod: pod.clone(), namespace: None };
    wish::output(&blocks, &installed.conf, Some(&facts)).is_ok_and(|output| output.decision == Decision::Redirect)
}
