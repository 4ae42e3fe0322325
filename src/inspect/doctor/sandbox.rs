//! Where the pod is: on this node or on another, and in which network namespace.

use super::case::Case;
use super::check::{Check, Checkup, Verdict};
use super::logs::EVENTS;
use super::pod::KNOWN;
use super::report::Group;
use crate::cluster::{Inquiry, Placement};
use crate::cni::{Error, NetConf};
use crate::pod::{Facts, PodRef};
use crate::sandbox::find::{Found, of_pod};

const fn check(id: &'static str, holds: &'static str) -> Check {
    Check { id, group: Group::Sandbox, holds }
}

pub(super) const HERE: Check = check("pod-here", "the pod runs on this node");
pub(super) const NETNS: Check = check("netns-found", "its network namespace is known");

/// What is known of where it is.
pub(super) struct Whereabouts {
    placement: Option<Placement>,
    found: Result<Option<Found>, Error>,
    /// It has the node's network, and no namespace of its own.
    on_host_network: bool,
}

impl Whereabouts {
    /// Asks the cluster and looks at the node. A static pod is known there by its hash.
    pub(super) fn of(case: &Case, inquiry: Option<&Inquiry>, pod: &PodRef, facts: Option<&Facts>) -> Self {
        let placement = inquiry.and_then(|inquiry| inquiry.placement(pod).ok());
        let known = facts.map(|facts| &facts.pod);
        let on_host_network = known.is_some_and(|pod| pod.host_network);
        let hash = known.and_then(|pod| pod.annotations.get("kubernetes.io/config.hash"));
        let uids = [hash, known.and_then(|pod| pod.uid.as_ref())].into_iter().flatten();
        let looked_for = uids.filter(|_| !on_host_network).map(|uid| of_pod(&case.mount, uid));
        let found = looked_for.reduce(|first, second| if matches!(first, Ok(Some(_))) { first } else { second });
        Self { placement, found: found.unwrap_or(Ok(None)), on_host_network }
    }

    /// Its namespace, where that was found.
    pub(super) fn found(&self) -> Option<&Found> {
        self.found.as_ref().ok().and_then(Option::as_ref)
    }

    /// Says where it is. `command` is what to run on another node.
    pub(super) fn examine(&self, case: &Case, command: impl FnOnce(&str) -> String, checkup: &mut Checkup) {
        let never = checkup.has_failed(&EVENTS);
        checkup.after(&[&KNOWN], &HERE, || match never {
            true => Verdict::not_checked(format!("because {} failed", EVENTS.id)),
            false => self.here(case, command),
        });
        checkup.after(&[&HERE], &NETNS, || self.netns());
    }

    fn here(&self, case: &Case, command: impl FnOnce(&str) -> String) -> Verdict {
        let node = self.placement.as_ref().and_then(|placement| placement.node.as_deref());
        match (self.found(), node) {
            // Whatever the node is called here.
            (Some(_), node) => Verdict::pass(node.map_or("its namespace".to_owned(), |node| format!("node {node}"))),
            (None, None) if self.placement.is_none() => Verdict::not_checked("the cluster does not say where it runs"),
            (None, None) => Verdict::not_checked("it is on no node so far: see kubectl describe pod for why"),
            (None, Some(node)) if case.node_name.as_deref() != Some(node) => {
                Verdict::NotChecked(format!("it runs on node {node}"), Some(command(node)))
            }
            (None, Some(node)) => Verdict::pass(format!("node {node}")),
        }
    }

    fn netns(&self) -> Verdict {
        let phase = self.placement.as_ref().map_or("", |placement| placement.phase.as_str());
        match &self.found {
            _ if self.on_host_network => Verdict::not_checked("the pod has the node's own (hostNetwork)"),
            Ok(Some(found)) => Verdict::pass(found.evidence.clone()),
            Ok(None) if ["Succeeded", "Failed"].contains(&phase) => {
                Verdict::not_checked(format!("the pod has ended ({phase})"))
            }
            Ok(None) => Verdict::fail(
                "no result of an ADD and no process of the pod is on this node",
                "see the line events, and crictl pods --name on the node: it may never have been started",
            ),
            Err(error) => {
                Verdict::fail(error.to_string(), "see crictl inspectp for what the runtime knows of the sandbox")
            }
        }
    }
}

/// What to run on the pod's own node: in the agent's pod there, where that can be known.
pub(super) fn command(inquiry: Option<&Inquiry>, conf: Option<&NetConf>, pod: &PodRef, node: &str) -> String {
    let PodRef { namespace, name, .. } = pod;
    let debug = format!("oc debug node/{node} -- chroot /host /var/lib/cni/bin/detour doctor -n {namespace} {name}");
    let Some(kubernetes) = conf.map(|conf| &conf.kubernetes) else { return debug };
    let Some(agents) = &kubernetes.agent_namespace else { return debug };
    let is_agent = |pod: &str| kubernetes.agent_pod_prefixes.iter().any(|prefix| pod.starts_with(prefix.as_str()));
    let pods = inquiry.and_then(|inquiry| inquiry.pods_on(agents, node).ok()).unwrap_or_default();
    let agent = match pods.iter().find(|pod| is_agent(&pod.name)) {
        Some(agent) => agent.name.clone(),
        None => format!(
            "$(kubectl get pods -n {agents} --field-selector spec.nodeName={node} -l app.kubernetes.io/component=agent -o name)"
        ),
    };
    format!("kubectl exec -n {agents} {agent} -- /detour doctor --root /host -n {namespace} {name}; or {debug}")
}
