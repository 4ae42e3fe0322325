//! `detour doctor`: a list of checks of a node, and of a pod on it. Each check reports what it found and, if it fails,
//! what to do next. Nothing is changed. With `--probe`, a few packets are sent to addresses that are reserved for
//! documentation.
//!
//! Each check has a row in the list below, and a function in the file of its subject that returns a verdict. A check that
//! needs another one is reported as not checked if that one did not pass.

mod configuration;
mod findings;
mod node;
mod pod;
mod probe;
mod report;
mod rules;

pub(super) use report::merged;
pub use report::{CheckOutcome, CheckTarget, CheckVerdict, Checklist, NeedlessExclusion, OwnList, ReportLine};

use super::explain::{InitContainer, application_containers, explain};
use super::subject::Subject;
use crate::cluster::{ScheduledPod, Workload};
use crate::plugin::FormatCounts;
use crate::pod::Facts;
use findings::{Check, Findings};

macro_rules! checks {
    ($($group:literal { $($id:literal $holds:literal [$($needed:literal),*] $examine:path;)* })*) => {
        /// The checks in their order.
        const CHECKS: &[Check] = &[$($(Check {
            id: $id,
            group: $group,
            holds: $holds,
            needs: &[$($needed),*],
            examine: |findings| $examine(findings).into(),
        },)*)*];
    };
}

checks! {
    "node" {
        "configuration-present" "a configuration calls the plugin" [] configuration::present;
        "configuration-valid" "the plugin accepts the configuration"
            ["configuration-present"] configuration::valid;
        "configuration-picked" "runtimes use the configuration"
            ["configuration-present", "configuration-valid"] configuration::picked;
        "own-list" "the own configuration list is a copy of the cluster network's list"
            [] configuration::own_list;
        "multus-chain" "Multus runs the plugins of its auxiliary chain" [] configuration::multus_chain;
        "node-configuration" "the node configuration is valid, and only root can change it"
            [] configuration::node_configuration;
        "program-trusted" "only root can change the plugin directories" [] node::program_trusted;
        "program-present" "the program is in the runtimes' plugin directory, in this version"
            ["program-trusted"] node::program_present;
        "kubeconfig-valid" "the plugin's kubeconfig is private and usable, and its token has not expired"
            [] node::kubeconfig;
        "installation" "the installation is unchanged" [] node::installation;
    }

    "cluster" {
        "api-reachable" "the API server answers" ["kubeconfig-valid"] node::api_reachable;
        "permissions" "the plugin has the permissions that its configuration needs"
            ["api-reachable"] node::permissions;
        "agent-reachable" "the node agent answers, and has current facts" [] node::agent;
    }

    "policies" {
        "policies" "the node's pods have the rules of their policies" ["agent-reachable"] node::policies;
    }

    "kernel" {
        "kernel-rules" "the kernel accepts the rules of a pod" [] node::kernel;
        "socket-load-balancing" "no eBPF program replaces Service addresses before netfilter"
            [] node::socket_lb;
    }

    "pod" {
        "pod-known" "the cluster knows the pod" [] pod::known;
        "annotation-valid" "the pod's networks annotation is valid" ["pod-known"] pod::annotation;
        "definition-found" "the definition in the annotation exists" [] pod::definition_found;
        "definition-leads" "the definition leads to a configuration"
            ["definition-found"] pod::definition_leads;
        "plugin-attached" "the plugin runs for this pod"
            ["pod-known", "configuration-present", "configuration-valid"] pod::attached;
        "redirected" "the pod's traffic is redirected to its sidecar"
            ["pod-known", "configuration-present", "configuration-valid"] pod::redirected;
        "events" "no Event reports a failed start" ["pod-known"] pod::events;
    }

    "sandbox" {
        "netns-found" "the pod runs on this node, and its network namespace is found" [] rules::netns;
        "rules-equal" "the live rules, addresses and routes equal the desired ones"
            ["netns-found"] rules::equal;
        "rules-first" "no foreign rule precedes detour's rules" ["netns-found"] rules::first;
        "default-route-captured" "the interface with the pod's default route is captured"
            [] rules::default_route;
        "proxy-listening" "the proxy listens on the ports that rules redirect to, as the excluded user"
            ["netns-found"] rules::listeners;
    }

    "containers" {
        "containers-ready" "kernel, control groups, runtime and agent support excluded containers"
            [] rules::containers_ready;
        "containers-bypass" "exactly the running excluded containers bypass the sidecar"
            [] rules::containers_bypass;
    }

    "probe" {
        "probe-captured" "an application's connection and DNS query reach the proxy"
            ["netns-found", "rules-equal"] probe::captured;
        "probe-excluded" "excluded traffic bypasses the proxy"
            ["netns-found", "rules-equal"] probe::excluded;
    }

    "policies" {
        "pod-policy" "the pod has the rules of its policy" ["pod-known", "agent-reachable"] node::policies;
    }

    "logs" {
        "runtime-log" "the runtime logged no error about the pod" [] pod::runtime_log;
    }
}

/// Runs the checks of the node and, if a pod is named, of the pod.
#[must_use]
pub fn examine(target: &CheckTarget) -> Checklist {
    let mut findings = Findings::new(target);
    for check in CHECKS {
        let applies = match check.group {
            "node" | "cluster" | "kernel" | "containers" => true,
            // About a pod, only its own policy is checked.
            "policies" => (check.id == "policies") == target.pod.is_none(),
            "probe" => target.probe,
            _ => target.pod.is_some(),
        };
        if applies {
            findings.run(check);
        }
    }
    Checklist {
        pod: target.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)),
        node: target.node_name.clone(),
        platform: target.platform.clone(),
        rule_formats: FormatCounts::read(&findings.store()).ok(),
        needless_exclusions: target.pod.is_none().then(|| needless_exclusions(&findings)).flatten(),
        policies: findings.policies.and_then(Result::ok),
        ..Checklist::of(findings.lines)
    }
}

/// Returns the exclusions of a node's pods that are not needed, because a native sidecar serves their init containers;
/// `None` if the pods can't be listed.
fn needless_exclusions(findings: &Findings<'_>) -> Option<Vec<NeedlessExclusion>> {
    let api = findings.api().ok()?;
    let mut pods = api.pods_of_node(findings.target.node_name.as_deref()?, None).ok()?;
    pods.retain(|scheduled| {
        let has_served = application_containers(&scheduled.pod).iter().any(|container| container.runs_after_proxy());
        has_served && !scheduled.is_ending
    });
    let namespaces = api.namespaces(None).ok()?;
    let mut found = Vec::new();
    for ScheduledPod { pod, workload, .. } in pods {
        let of_itself = || Workload { kind: "Pod".to_owned(), name: pod.name.clone() };
        let (Workload { kind, name }, of) = (workload.unwrap_or_else(of_itself), pod.namespace.clone());
        let facts = Facts { namespace: namespaces.iter().find(|one| one.name == of).cloned(), pod };
        let subject = Subject::given(&findings.configurations, facts, Some(&api));
        // If an ADD of the pod fails, it has no exclusions.
        let explained = subject.and_then(|subject| explain(&subject));
        let containers = explained.map(|explanation| explanation.init_containers).unwrap_or_default();
        for InitContainer { name: container, needless_exclusions: exclusions, .. } in containers {
            let (namespace, kind, name) = (of.clone(), kind.clone(), name.clone());
            found.push(NeedlessExclusion { namespace, kind, name, container, exclusions, pods: 1 });
        }
    }
    found.retain(|one| !one.exclusions.is_empty());
    Some(merged(found))
}

/// Reads the plugin's configurations on a node, and finds its API server, without any request.
pub(super) fn node_setup(target: &CheckTarget) -> Findings<'_> {
    let mut findings = Findings::new(target);
    node::kubeconfig(&mut findings);
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_has_its_own_id_and_needs_only_earlier_ones() {
        assert!(CHECKS.len() <= 35);
        for (index, check) in CHECKS.iter().enumerate() {
            let is_earlier = |id: &str| CHECKS[..index].iter().any(|other| other.id == id);
            assert!(!is_earlier(check.id) && check.needs.iter().all(|id| is_earlier(id)), "{}", check.id);
        }
    }
}
