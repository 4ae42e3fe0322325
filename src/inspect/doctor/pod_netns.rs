//! Where the pod is: on this node or on another, and in which network namespace.

use super::target::CheckTarget;
use super::check::{Check, Results, CheckVerdict};
use super::logs::EVENTS;
use super::pod::KNOWN;
use super::report::CheckGroup;
use crate::cluster::{ApiProbe, ObjectRef};
use crate::cni::{Error, NetConf};
use crate::inspect::node_hint::{AGENT_NAMESPACE, elsewhere};
use crate::pod::{Facts, Pod, PodRef};
use crate::netns::find::{FoundNetns, of_name, of_pod};

pub(super) const HERE: Check = Check::of(CheckGroup::Sandbox, "pod-here", "the pod runs on this node");
pub(super) const NETNS: Check = Check::of(CheckGroup::Sandbox, "netns-found", "its network namespace is known");

/// What is known of where it is.
pub(super) struct PodNetns<'a> {
    pod: Option<&'a Pod>,
    found: Result<Option<FoundNetns>, Error>,
}

impl<'a> PodNetns<'a> {
    /// Looks for it on the node: by its UID, or by its name where the cluster does not tell that.
    pub(super) fn of(case: &CheckTarget, named: &PodRef, facts: Option<&'a Facts>) -> Self {
        let pod = facts.map(|facts| &facts.pod);
        let found = match pod {
            None => of_name(&case.mount, &named.namespace, &named.name),
            Some(pod) if pod.host_network => Ok(None),
            Some(pod) => pod.uid_on_node().map_or(Ok(None), |uid| of_pod(&case.mount, uid)),
        };
        Self { pod, found }
    }

    /// Its namespace, where that was found.
    pub(super) fn found(&self) -> Option<&FoundNetns> {
        self.found.as_ref().ok().and_then(Option::as_ref)
    }

    /// Says where it is, and what to run where it is not here.
    pub(super) fn examine(
        &self,
        case: &CheckTarget,
        inquiry: Option<&ApiProbe>,
        conf: Option<&NetConf>,
        checkup: &mut Results,
    ) {
        let never = checkup.has_failed(&EVENTS);
        let needed = if self.found().is_some() { &[][..] } else { &[&KNOWN] };
        checkup.after(needed, &HERE, || match (self.pod, self.found()) {
            _ if never => CheckVerdict::not_checked(format!("because {} failed", EVENTS.id)),
            (None, Some(_)) => CheckVerdict::pass("by what its runtime keeps under the pod's name"),
            (None, None) => CheckVerdict::not_checked("the pod is not known"),
            // Whatever the node is called here.
            (Some(pod), Some(_)) => CheckVerdict::pass(format!("node {}", pod.node_name.as_deref().unwrap_or("unknown"))),
            (Some(pod), None) => here(pod, case, inquiry, conf),
        });
        checkup.after(&[&HERE], &NETNS, || self.netns());
    }

    fn netns(&self) -> CheckVerdict {
        match &self.found {
            _ if self.pod.is_some_and(|pod| pod.host_network) => {
                CheckVerdict::not_checked("the pod has the node's own (hostNetwork)")
            }
            Ok(Some(found)) => CheckVerdict::pass(found.evidence.clone()),
            Ok(None) => CheckVerdict::fail(
                "no result of an ADD and no process of the pod is on this node",
                "it has ended, or was never started: see the line events, and crictl pods --name on the node",
            ),
            Err(error) => {
                CheckVerdict::fail(error.to_string(), "see crictl inspectp for what the runtime knows of the sandbox")
            }
        }
    }
}

fn here(pod: &Pod, case: &CheckTarget, inquiry: Option<&ApiProbe>, conf: Option<&NetConf>) -> CheckVerdict {
    let Some(node) = &pod.node_name else {
        return CheckVerdict::not_checked("it is on no node so far: kubectl describe pod says why");
    };
    if case.node_name.as_ref() == Some(node) {
        return CheckVerdict::pass(format!("node {node}"));
    }
    let this = case.node_name.as_deref().unwrap_or("unknown");
    let probe = if case.probe { " --probe" } else { "" };
    let question = format!("doctor -n {} {}{probe}", pod.namespace, pod.name);
    let kubernetes = conf.map(|conf| &conf.kubernetes);
    let agents = kubernetes.and_then(|kubernetes| kubernetes.agent_namespace.as_deref());
    let agents = agents.unwrap_or(AGENT_NAMESPACE);
    let pods = inquiry.and_then(|inquiry| inquiry.pods_on(&agents.to_owned(), node).ok()).unwrap_or_default();
    let is_agent = |pod: &&ObjectRef| {
        kubernetes.is_some_and(|k| k.agent_pod_prefixes.iter().any(|prefix| pod.name.starts_with(prefix.as_str())))
    };
    let agent = pods.iter().find(is_agent).map(|pod| pod.name.as_str());
    let next = elsewhere(pod, Some(agents), agent, &question);
    CheckVerdict::NotChecked(format!("it runs on node {node}, this is {this}"), Some(next))
}
