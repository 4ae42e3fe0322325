//! CHECK: compares the kernel's rules with the desired state of all attachments of the pod sandbox.

use super::netns_state::{NetnsState, exclude_secondary_networks, open_of_request, warn_of_legacy};
use super::record::{attachment, writes_ip6};
use super::running::containers::{ElementPlan, ObservedContainers, RunningContainer};
use crate::cluster::agent::{BypassingContainer, excluded_containers};
use crate::cni::{Code, Error, NetConf, Request};
use crate::firewall::{ContainerElement, LiveRuleset, container_elements, foreign_rules, set_name};
use crate::netns::{self, NetNs};
use crate::policy::Policy;
use crate::state::{ROOT, Store};
use std::time::Duration;

/// How long a CHECK waits for another call in the same network namespace.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// The timeout of CHECK for the agent's answer. The agent only reads its memory.
const AGENT_TIMEOUT: Duration = Duration::from_secs(2);
/// What restores the rules of a pod whose addresses or routes have changed.
const REPEAT_ADD: &str = "enable the agent's repair, repeat the ADD, or recreate the pod";
/// The maximum number of differences that an error lists; the others are counted.
const MAX_LISTED: usize = 10;
/// The maximum number of foreign rules that are logged; the others are counted.
const MAX_LOGGED: usize = 20;

/// Checks the rules of the pod sandbox. Foreign rules are logged and are not an error.
///
/// # Errors
/// CHECK without ADD, the network namespace is gone, or its rules have drifted.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<(), Error> {
    let (store, attachment) = (Store::new(ROOT), attachment(request, &conf.name));
    let netns = open_of_request(request)?;
    let (mut found, policy) = netns.enter(LOCK_TIMEOUT, || {
        let state = NetnsState::read(&store, &request.container_id, &netns)?;
        if !state.attachments.contains(&attachment) {
            let path = netns.path().display();
            let msg = format!("CHECK without ADD: no saved state of the {attachment} in {path}; recreate the pod");
            return Err(Error::new(Code::NoAdd, msg));
        }
        let live = LiveRuleset::now()
            .map_err(|error| Error { msg: format!("CHECK{}: {}", of_pod(request), error.msg), ..error })?;
        log_foreign(&state, &live);
        Ok((differences(&state, &live)?, state.policy))
    })?;
    if !policy.containers.is_empty() {
        found.extend(element_drift(&policy, &netns, request, conf)?);
    }
    if found.is_empty() { Ok(()) } else { Err(drifted(request, &found)) }
}

/// Returns the drift of the sets of excluded containers: elements of other containers and, if the agent knows the
/// running containers, all differences from these.
///
/// # Errors
/// The kernel's state can't be read.
fn element_drift(policy: &Policy, netns: &NetNs, request: &Request, conf: &NetConf) -> Result<Vec<String>, Error> {
    let compare = || -> Result<Vec<String>, Error> {
        let socket = conf.kubernetes.agent_socket.as_ref();
        let status = socket.map(|socket| excluded_containers(socket, &request.container_id, AGENT_TIMEOUT));
        let status = status.transpose().unwrap_or_else(|why| {
            tracing::debug!("the elements of running containers are not checked: agent: {why}");
            None
        });
        let expected = status.and_then(|status| status.expected);
        let live = netns.enter_without_lock(container_elements)?;
        Ok(compare_elements(policy, &live, expected.as_deref()))
    };
    // A container may start or exit between the answer and the dump.
    let found = compare()?;
    if found.is_empty() { Ok(found) } else { compare() }
}

/// Compares live elements as the agent does; without the containers that it expects, only with the policy.
fn compare_elements(
    policy: &Policy,
    live: &[ContainerElement],
    expected: Option<&[BypassingContainer]>,
) -> Vec<String> {
    let known = expected.unwrap_or_default().iter();
    let running: Vec<_> =
        known.map(|one| RunningContainer { name: one.name.clone(), id: one.id.clone(), cgroup: one.cgroup }).collect();
    let observed = ObservedContainers { running: &running, exited: &[], complete: expected.is_some() };
    let ElementPlan { remove, add, .. } = ElementPlan::new(policy, live, observed);
    let text = |element: &ContainerElement| {
        let name = element.container.as_ref().map_or("(unknown)", |label| &label.name);
        format!("control group {} in the set {:?} of container {name:?}", element.cgroup, set_name(element.scope))
    };
    let unexpected = remove
        .iter()
        .map(|element| format!("unexpected: {}: it is not excluded, or its bypass has ended", text(element)));
    let missing = add.iter().map(|element| format!("missing: {}: its traffic is captured", text(element)));
    unexpected.chain(missing).collect()
}

/// Logs foreign redirections and rules, which are no drift.
fn log_foreign(state: &NetnsState, live: &LiveRuleset) {
    let NetnsState { policy, rules, records, .. } = state;
    let foreign = live.foreign_redirection(&records.known_rules());
    if policy.redirect().is_some() {
        warn_of_legacy();
    }
    for chain in live.diverting_chains() {
        tracing::info!("foreign chain that can {} connections: {}", chain.diversion.verb(), chain.text);
    }
    if foreign.is_some_and(|foreign| foreign.captures_dns) && policy.dns_captured_elsewhere == Some(false) {
        tracing::warn!(
            "a redirection that was added after this attachment captures DNS: excluded queries bypass it, but each is \
             tracked twice until the next ADD; add this attachment after the redirection"
        );
    }
    let foreign = foreign_rules(live, rules);
    for rule in foreign.iter().take(MAX_LOGGED) {
        tracing::info!("foreign rule: {rule}");
    }
    if foreign.len() > MAX_LOGGED {
        tracing::info!("{} more foreign rules", foreign.len() - MAX_LOGGED);
    }
}

/// Returns the drift from the desired state, one line per difference. Call it in the pod's network namespace.
///
/// # Errors
/// The kernel's state can't be read.
pub(super) fn differences(desired: &NetnsState, live: &LiveRuleset) -> Result<Vec<String>, Error> {
    let drift = desired.rule_format.drift(live, &desired.rules);
    let mut found: Vec<String> = drift.iter().map(ToString::to_string).collect();
    found.extend(desired.fixtures.drift()?);
    found.extend(uncaptured(&desired.policy, desired.records.ip6())?);
    Ok(found)
}

/// Returns the lines about addresses and routes that appeared after an ADD, and whose traffic bypasses the sidecar: IPv6
/// addresses if it wrote rules for IPv4 only, and a default route of an interface that it excluded as a secondary one.
fn uncaptured(policy: &Policy, ip6: bool) -> Result<Vec<String>, Error> {
    let mut now = policy.clone();
    exclude_secondary_networks(&mut now)?;
    // Exclusions apply to both families.
    let (Some(before), Some(now)) = (policy.redirect(), now.redirect()) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    if !writes_ip6(policy, ip6) && writes_ip6(policy, true) {
        let mut addresses = netns::own_ip6_addresses()?;
        addresses.retain(|(name, _)| !now.exclude_interfaces.contains(name));
        if let [(interface, address), others @ ..] = addresses.as_slice() {
            let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
            found.push(format!(
                "missing: rules for IPv6: address {address} on interface {interface:?}{more} appeared after ADD: its traffic \
                 bypasses the sidecar; {REPEAT_ADD}"
            ));
        }
    }
    let excluded = before.exclude_interfaces.iter().find(|name| !now.exclude_interfaces.contains(name));
    found.extend(excluded.map(|interface| {
        format!(
            "missing: capture on interface {interface:?}: traffic to public addresses leaves through it since a change of \
             routes, and bypasses the sidecar; {REPEAT_ADD}"
        )
    }));
    Ok(found)
}

fn drifted(request: &Request, found: &[String]) -> Error {
    let mut details = found.iter().take(MAX_LISTED).cloned().collect::<Vec<_>>().join("; ");
    if found.len() > MAX_LISTED {
        details += &format!("; and {} more", found.len() - MAX_LISTED);
    }
    let count = match found.len() {
        1 => "1 difference".to_owned(),
        count => format!("{count} differences"),
    };
    let msg = format!("the rules{} have drifted from the desired state ({count})", of_pod(request));
    Error::new(Code::Drift, msg).with_details(details)
}

fn of_pod(request: &Request) -> String {
    request.args.pod.as_ref().map_or_else(String::new, |pod| format!(" of pod {}/{}", pod.namespace, pod.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{ContainerExclusion, ContainerScope};

    #[test]
    fn each_element_that_differs_is_a_difference() {
        let exclusion = |name: &str| ContainerExclusion { name: name.to_owned(), scope: ContainerScope::All };
        let policy = Policy { containers: [exclusion("vault"), exclusion("later")].into(), ..Policy::default() };
        let element = |cgroup, name| ContainerElement::new(ContainerScope::All, cgroup, name, "0123");
        let unnamed = ContainerElement { container: None, ..element(3, "") };
        let live = [element(1, "vault"), element(2, "app"), unnamed];
        let text = |set: &str, cgroup, name| {
            format!("control group {cgroup} in the set \"excluded-{set}\" of container \"{name}\"")
        };
        let unexpected = |set: &str, cgroup, name| {
            format!("unexpected: {}: it is not excluded, or its bypass has ended", text(set, cgroup, name))
        };
        let alone = [unexpected("all", 2, "app"), unexpected("all", 3, "(unknown)")];
        assert_eq!(compare_elements(&policy, &live, None), alone);
        let bypassing =
            |cgroup, name: &str, scope| BypassingContainer { name: name.into(), id: "0123".into(), cgroup, scope };
        let known = [bypassing(1, "vault", ContainerScope::All)];
        assert!(compare_elements(&policy, &live[..1], Some(&known)).is_empty());
        assert_eq!(compare_elements(&policy, &live[..1], Some(&[])), [unexpected("all", 1, "vault")]);
        let missing = format!("missing: {}: its traffic is captured", text("all", 1, "vault"));
        assert_eq!(compare_elements(&policy, &[], Some(&known)), [missing]);
        assert!(compare_elements(&policy, &live[..1], None).is_empty());
    }
}
