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
    pub(super) placement: Option<Placement>,
    pub(super) found: Result<Option<Found>, Error>,
}

impl Whereabouts {
    /// Asks the cluster and looks at the node. A static pod is known there by its hash.
    pub(super) fn of(case: &Case, inquiry: Option<&Inquiry>, pod: &PodRef, facts: Option<&Facts>) -> Self {
        let placement = inquiry.and_then(|inquiry| inquiry.placement(pod).ok());
        let known = facts.map(|facts| &facts.pod);
        let uids = [known.and_then(|pod| pod.annotations.get("kubernetes.io/config.hash")), known.and_then(|pod| pod.uid.as_ref())];
        let found = uids.into_iter().flatten().map(|uid| of_pod(&case.mount, uid));
        let found = found.reduce(|first, second| if matches!(first, Ok(Some(_))) { first } else { second });
        Self { placement, found: found.unwrap_or(Ok(None)) }
    }

    /// Whether it is on another node than this.
    fn elsewhere<'a>(&'a self, case: &Case) -> Option<&'a str> {
        let node = self.placement.as_ref()?.node.as_deref()?;
        (case.node_name.as_deref() != Some(node)).then_some(node)
    }

    /// Says so, and gives the namespace.
    pub(super) fn examine(
        &self,
        case: &Case,
        command: impl FnOnce(&str) -> String,
        checkup: &mut Checkup,
    ) -> Option<&Found> {
        let found = self.found.as_ref().ok().and_then(Option::as_ref);
        let node = self.placement.as_ref().and_then(|placement| placement.node.as_deref());
        let never = checkup.has_failed(&EVENTS).then(|| format!("because {} failed", EVENTS.id));
        checkup.after(&[&KNOWN], &HERE, || match (found, node) {
            _ if never.is_some() => Verdict::not_checked(never.unwrap_or_default()),
            (Some(_), _) => Verdict::pass(node.map_or_else(|| "it is here".to_owned(), |node| format!("node {node}"))),
            (None, None) => Verdict::not_checked("it is on no node yet, as far as the cluster says"),
            (None, Some(node)) => match self.elsewhere(case) {
                Some(_) => Verdict::NotChecked(format!("it runs on node {node}"), Some(command(node))),
                None => Verdict::pass(format!("node {node}")),
            },
        });
        checkup.after(&[&HERE], &NETNS, || match &self.found {
            Ok(Some(found)) => Verdict::pass(found.evidence.clone()),
            Ok(None) => Verdict::fail(
                "no result of an ADD and no process of the pod is on this node",
                "it has ended, or was never started: see the events below, and crictl pods --name on the node",
            ),
            Err(error) => Verdict::fail(error.to_string(), "see crictl inspectp for what the runtime knows of the sandbox"),
        });
        found
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
