//! CHECK: whether the kernel still holds what all attachments on the container ask for.

use super::desired_policy::{fixtures, ruleset, writes_ip6};
use super::netns_state::ForeignRedirection;
use super::reconcile::records;
use super::record::{ContainerRecords, attachment};
use crate::cni::{Code, DEFAULT_INTERFACE, Error, NetConf, Request};
use crate::firewall::{LiveRuleset, foreign_rules};
use crate::netns::{self, NetNs};
use crate::policy::Policy;
use crate::state::{ROOT, Store};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// How long a CHECK waits for another call in the same namespace.
const PATIENCE: Duration = Duration::from_secs(30);
/// How many differences an error names; the rest it counts.
const NAMED: usize = 10;
/// How many foreign rules are logged; the rest is counted.
const LOGGED: usize = 20;

/// Nothing goes to stdout.
///
/// # Errors
/// There was no ADD, the namespace is gone, or its rules are not what they should be; foreign
/// rules are logged and are no error.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let (store, attachment) = (Store::new(ROOT), attachment(request, &conf.name));
    let path = request.netns.as_deref().unwrap_or_else(|| Path::new(""));
    let gone =
        || Error::new(Code::InvalidNetns, format!("CNI_NETNS {}: there is no network namespace", path.display()));
    let netns = NetNs::open(path)?.ok_or_else(gone)?;
    netns.enter(PATIENCE, || {
        let records = records(&store, &request.container_id, &netns)?;
        if records.get(&attachment).is_none() {
            let msg = format!("there was no ADD of the {attachment} in {}", path.display());
            return Err(Error::new(Code::NoAdd, msg));
        }
        let live = LiveRuleset::now()
            .map_err(|error| Error { msg: format!("CHECK{}: {}", of_pod(request), error.msg), ..error })?;
        remark(&records, &live)?;
        let found = differences(&records, &live)?;
        if found.is_empty() { Ok(None) } else { Err(drifted(request, &found)) }
    })
}

/// Logs what is no difference and should be known.
fn remark(records: &ContainerRecords, live: &LiveRuleset) -> Result<(), Error> {
    let policy = records.policy()?;
    let foreign = ForeignRedirection::find(live, &records.known_rules(), policy.redirect().is_some());
    if foreign.is_none() && policy.redirect().is_some() {
        ForeignRedirection::remark_legacy();
    }
    if foreign.is_some_and(|foreign| foreign.captures_dns) && policy.dns_captured_elsewhere == Some(false) {
        tracing::warn!(
            "a redirection that came after this attachment captures DNS: exempt queries leave untouched, but each \
             is tracked twice until the next ADD; add this attachment after the redirection"
        );
    }
    let foreign = foreign_rules(live, &ruleset(&policy, records.ip6()));
    for rule in foreign.iter().take(LOGGED) {
        tracing::info!("foreign rule: {rule}");
    }
    if foreign.len() > LOGGED {
        tracing::info!("{} more foreign rules", foreign.len() - LOGGED);
    }
    Ok(())
}

/// How the kernel differs from what is kept, one line each. To be asked in the namespace.
///
/// # Errors
/// The attachments contradict each other, or the namespace can't be looked at.
pub(super) fn differences(records: &ContainerRecords, live: &LiveRuleset) -> Result<Vec<String>, Error> {
    let policy = records.policy()?;
    let desired = ruleset(&policy, records.ip6());
    let dialect = records.dialect().unwrap_or_default();
    let mut found: Vec<String> = dialect.drift(live, &desired).iter().map(ToString::to_string).collect();
    found.extend(fixtures(&policy, records.ip6()).drift()?);
    found.extend(uncaptured_ip6(records, &policy)?);
    Ok(found)
}

/// The line about IPv6 addresses that came after the last ADD, if that wrote rules for IPv4 alone.
fn uncaptured_ip6(records: &ContainerRecords, policy: &Policy) -> Result<Option<String>, Error> {
    if policy.is_empty() || writes_ip6(policy, records.ip6()) || !writes_ip6(policy, true) {
        return Ok(None);
    }
    let mut addresses = netns::own_ip6_addresses()?;
    if let Some(redirect) = policy.redirect() {
        let spared = |name: &str| !redirect.capture_secondary_networks && name != DEFAULT_INTERFACE;
        addresses.retain(|(name, _)| !redirect.exclude_interfaces.contains(name) && !spared(name));
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
    let mut details = found.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    if found.len() > NAMED {
        details += &format!("; and {} more", found.len() - NAMED);
    }
    let msg =
        format!("the rules{} are not what its attachments ask for ({} differences)", of_pod(request), found.len());
    Error::new(Code::Drift, msg).with_details(details)
}

fn of_pod(request: &Request) -> String {
    request.args.pod.as_ref().map_or_else(String::new, |pod| format!(" of pod {}/{}", pod.namespace, pod.name))
}
