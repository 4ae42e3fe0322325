//! CHECK: compares the kernel's rules with the desired state of all attachments of the container.

use super::desired_policy::{fixtures, ruleset, writes_ip6};
use super::netns_state::ForeignRedirection;
use super::open_netns;
use super::record::{ContainerRecords, attachment};
use crate::cni::{Code, DEFAULT_INTERFACE, Error, NetConf, Request};
use crate::firewall::{LiveRuleset, foreign_rules};
use crate::netns;
use crate::policy::Policy;
use crate::state::{ROOT, Store};
use serde_json::Value;
use std::time::Duration;

/// How long a CHECK waits for another call in the same network namespace.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum number of differences that an error lists; the others are counted.
const MAX_LISTED: usize = 10;
/// The maximum number of foreign rules that are logged; the others are counted.
const MAX_LOGGED: usize = 20;

/// Checks the rules of the container. CHECK has no result. Foreign rules are logged and are not an error.
///
/// # Errors
/// CHECK without ADD, the network namespace is gone, or its rules have drifted.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let (store, attachment) = (Store::new(ROOT), attachment(request, &conf.name));
    let netns = open_netns::of_request(request)?;
    netns.enter(LOCK_TIMEOUT, || {
        let records = ContainerRecords::read(&store, &request.container_id, &netns)?;
        if records.get(&attachment).is_none() {
            let path = netns.path().display();
            let msg = format!("CHECK without ADD: no saved state of the {attachment} in {path}; recreate the pod");
            return Err(Error::new(Code::NoAdd, msg));
        }
        let live = LiveRuleset::now()
            .map_err(|error| Error { msg: format!("CHECK{}: {}", of_pod(request), error.msg), ..error })?;
        log_foreign(&records, &live)?;
        let found = differences(&records, &live)?;
        if found.is_empty() { Ok(None) } else { Err(drifted(request, &found)) }
    })
}

/// Logs foreign redirections and rules, which are no drift.
fn log_foreign(records: &ContainerRecords, live: &LiveRuleset) -> Result<(), Error> {
    let policy = records.policy()?;
    let foreign = ForeignRedirection::find(live, &records.known_rules(), policy.redirect().is_some());
    if foreign.is_none() && policy.redirect().is_some() {
        ForeignRedirection::log_legacy();
    }
    if foreign.is_some_and(|foreign| foreign.captures_dns) && policy.dns_captured_elsewhere == Some(false) {
        tracing::warn!(
            "a redirection that was added after this attachment captures DNS: excluded queries bypass it, but each is \
             tracked twice until the next ADD; add this attachment after the redirection"
        );
    }
    let foreign = foreign_rules(live, &ruleset(&policy, records.ip6()));
    for rule in foreign.iter().take(MAX_LOGGED) {
        tracing::info!("foreign rule: {rule}");
    }
    if foreign.len() > MAX_LOGGED {
        tracing::info!("{} more foreign rules", foreign.len() - MAX_LOGGED);
    }
    Ok(())
}

/// Returns the drift from the saved state, one line per difference. Call it in the container's network namespace.
///
/// # Errors
/// The attachments contradict each other, or the kernel's state can't be read.
pub(super) fn differences(records: &ContainerRecords, live: &LiveRuleset) -> Result<Vec<String>, Error> {
    let policy = records.policy()?;
    let desired = ruleset(&policy, records.ip6());
    let dialect = records.dialect().unwrap_or_default();
    let mut found: Vec<String> = dialect.drift(live, &desired).iter().map(ToString::to_string).collect();
    found.extend(fixtures(&policy, records.ip6()).drift()?);
    found.extend(uncaptured_ip6(records, &policy)?);
    Ok(found)
}

/// Returns the line about IPv6 addresses that appeared after an ADD which wrote rules for IPv4 only.
fn uncaptured_ip6(records: &ContainerRecords, policy: &Policy) -> Result<Option<String>, Error> {
    if policy.is_empty() || writes_ip6(policy, records.ip6()) || !writes_ip6(policy, true) {
        return Ok(None);
    }
    let mut addresses = netns::own_ip6_addresses()?;
    if let Some(redirect) = policy.redirect() {
        let is_secondary = |name: &str| !redirect.capture_secondary_networks && name != DEFAULT_INTERFACE;
        addresses.retain(|(name, _)| !redirect.exclude_interfaces.contains(name) && !is_secondary(name));
    }
    let Some((interface, address)) = addresses.first() else { return Ok(None) };
    let more = match addresses.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let effect = match policy.redirect() {
        Some(_) => "its traffic bypasses the sidecar",
        None => "exclusions do not apply to its traffic",
    };
    Ok(Some(format!(
        "missing: rules for IPv6: address {address} on interface {interface:?}{more} appeared after ADD: {effect}; \
         enable the agent's repair, repeat the ADD, or recreate the pod"
    )))
}

fn drifted(request: &Request, found: &[String]) -> Error {
    let mut details = found.iter().take(MAX_LISTED).cloned().collect::<Vec<_>>().join("; ");
    if found.len() > MAX_LISTED {
        details += &format!("; and {} more", found.len() - MAX_LISTED);
    }
    let msg = format!("the rules{} have drifted from the desired state ({} differences)", of_pod(request), found.len());
    Error::new(Code::Drift, msg).with_details(details)
}

fn of_pod(request: &Request) -> String {
    request.args.pod.as_ref().map_or_else(String::new, |pod| format!(" of pod {}/{}", pod.namespace, pod.name))
}
