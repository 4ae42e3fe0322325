//! The ADD of a running pod, repeated by the node's agent: the pod gets the rules that an ADD would give it now, with the
//! inputs of its ADD from saved state. Missing rules and a changed policy are the same finding: the desired rules differ
//! from the live ones. The redirection stays as it was when the pod started.

use crate::cni::{Code, Error, GROUP_FILE, NODE_CONFIGURATION, NetConf};
use crate::firewall::Rejected;
use crate::host_path::{HostPath, HostRoot};
use crate::netns::NetNs;
use crate::plugin::inputs::{AddInputs, NodeInputs};
use crate::plugin::reconcile::{Operation, reconcile};
use crate::plugin::record::{SandboxRecord, SandboxRecords};
use crate::plugin::{netns_state, node};
use crate::pod::Facts;
use crate::policy::{ContainerExclusion, Exclusion, Interception, Policy, TrafficOwner};
use crate::printable::cut;
use crate::state::{ROOT, Store};
use crate::sub_plugins::setting_values;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The maximum length of a change in words, in bytes.
const MAX_WORDS: usize = 800;

/// A repeated ADD of all attachments of a pod.
#[derive(Debug, Clone, Copy)]
pub struct RepeatedAdd<'a> {
    /// The mount point of the node's file system.
    pub root: &'a Path,
    /// What is known about the pod and its namespace; `None` if it keeps its policy.
    pub facts: Option<&'a Facts>,
    /// The configurations that are installed on the node. An attachment whose network name is that of one of them is
    /// evaluated with it; the others, and those of a primary plugin, with the configuration of their ADD.
    pub installed: &'a [&'a NetConf],
    /// Whether live rules that differ are restored although the policy does not change.
    pub restores: bool,
    /// Where the network namespace was found, if the recorded path does not lead to it.
    pub found: Option<&'a Path>,
}

/// What a repeated ADD found and changed.
#[derive(Debug, Default)]
pub struct Repeated {
    /// The change of the policy in words; empty without one.
    pub change: String,
    /// Whether the live rules were changed.
    pub has_committed: bool,
    /// Why requests of the pod or its namespace count as absent: the errors of a new pod's ADD.
    pub absent: Vec<Error>,
    /// Whether the pod has no guard because of its init container istio-init.
    pub unguarded: bool,
    /// Whether the pod has rules.
    pub has_rules: bool,
    /// Whether the rules redirect its traffic.
    pub is_redirected: bool,
    /// What its guard had rejected; `None` without a guard, or if the live rules were not read.
    pub rejected: Option<Rejected>,
    /// The network namespace, as this process reaches it.
    pub netns: PathBuf,
}

impl RepeatedAdd<'_> {
    /// Repeats the ADD in a pod sandbox (`CNI_CONTAINERID`): all attachments in one transaction. Waits only shortly for
    /// another call in the network namespace.
    ///
    /// # Errors
    /// [`Code::NoAdd`]: there is no saved state. The network namespace is gone, the facts are of another pod, a
    /// configuration is invalid, or the kernel refuses the rules. The old rules and the old saved state remain.
    pub fn run(&self, container_id: &str) -> Result<Repeated, Error> {
        let (store, root) = (Store::new(ROOT), HostRoot::new(self.root));
        let records = SandboxRecords::read_all(&store, container_id, None)?;
        if records.attachments.is_empty() {
            return Err(Error::new(Code::NoAdd, format!("pod sandbox {container_id}: no saved state")));
        }
        let netns = self.netns_of(&store, &root, container_id)?;
        let records = records.of_netns(netns.id());
        if records.attachments.is_empty() {
            return Err(not_found(netns.path()));
        }
        let mut repeated = Repeated { netns: netns.path().to_owned(), ..Repeated::default() };
        let mut desired = self.desired(&root, &records, &mut repeated)?.attachments;
        let before = records.policy()?;
        let is_interrupted = records.attachments.iter().any(|(_, record)| record.previous_policy.is_some());
        // An attachment that never had rules needs none.
        desired.retain(|(_, record)| record.netns_id.is_some() || !record.policy.is_empty());
        let is_changed = desired.iter().any(|(attachment, record)| records.get(attachment) != Some(record));
        drop(records);
        let changed: Vec<_> = desired.into_iter().map(|(attachment, record)| (attachment, record.policy)).collect();
        let mut after = before.clone();
        if let Some((first, _)) = changed.first()
            && (self.restores || is_changed || is_interrupted)
        {
            netns_state::refuse_own(netns.path())?;
            if let Some(committed) = reconcile(&store, first, &netns, &Operation::Repeat, &changed)? {
                (repeated.has_committed, repeated.rejected) = (committed.changes > 0, committed.rejected);
                after = committed.policy;
            }
        }
        repeated.change = changes(&before, &after);
        (repeated.has_rules, repeated.is_redirected) = (!after.is_empty(), after.redirect().is_some());
        Ok(repeated)
    }

    /// Opens the network namespace of a pod sandbox.
    fn netns_of(&self, store: &Store, root: &HostRoot, container_id: &str) -> Result<NetNs, Error> {
        let location = SandboxRecord::find(store, container_id)?.and_then(SandboxRecord::location);
        let netns = match (self.found, &location) {
            // 0.2.0 saved no location of a pod without rules.
            (Some(found), None) => NetNs::open(found)?,
            (Some(found), Some((_, id))) => NetNs::open(found)?.filter(|netns| netns.id() == *id),
            (None, Some((path, id))) => netns_state::open_recorded(root, path, *id)?,
            (None, None) => None,
        };
        netns.ok_or_else(|| not_found(location.as_ref().map_or(Path::new(""), |(path, _)| path)))
    }

    /// Returns the records with the policies of an ADD now.
    fn desired(
        &self,
        root: &HostRoot,
        records: &SandboxRecords,
        repeated: &mut Repeated,
    ) -> Result<SandboxRecords, Error> {
        let Some(facts) = self.facts else { return Ok(records.clone()) };
        let mut desired = self.evaluate(root, facts, records, Some(repeated))?;
        let check = |records: &SandboxRecords| {
            records.check_limits(format_args!("pod {}/{}", facts.pod.namespace, facts.pod.name))
        };
        // Existing rules can always be restored.
        if let Err(error) = check(&desired)
            && desired != *records
        {
            repeated.absent.push(error);
            desired = self.evaluate(root, facts, records, None)?;
            if let Err(error) = check(&desired) {
                // Bypasses that are no longer permitted end, also if the others can't be added.
                for ((_, new), (_, own)) in desired.attachments.iter_mut().zip(&records.attachments) {
                    new.policy = own.policy.limited_to(&new.policy);
                }
                repeated.absent.push(error);
            }
        }
        Ok(desired)
    }

    /// Evaluates all records with the facts; without `reports`, all requests count as absent.
    fn evaluate(
        &self,
        root: &HostRoot,
        facts: &Facts,
        records: &SandboxRecords,
        mut reports: Option<&mut Repeated>,
    ) -> Result<SandboxRecords, Error> {
        let about = |error: Error| error.of_pod(&facts.pod.namespace, &facts.pod.name);
        let group_file = root.find(&HostPath::root().join(GROUP_FILE));
        let read = |path: PathBuf| node::read(NODE_CONFIGURATION, &path).ok().flatten();
        let node = root.reach(&HostPath::root().join(NODE_CONFIGURATION)).ok().and_then(read);
        let mut desired = records.clone();
        for (attachment, record) in &mut desired.attachments {
            let Some(inputs) = record.inputs.as_ref().and_then(AddInputs::read) else { continue };
            let of_network = |conf: &&&NetConf| conf.name == attachment.network && conf.primary.is_none();
            let node = NodeInputs {
                installed: self.installed.iter().find(of_network).copied(),
                configuration: node.as_ref().map(|(node, _)| node),
                network: &attachment.network,
                group_file: &group_file,
            };
            let output = inputs.evaluate(facts, &node, &record.policy, reports.is_some()).map_err(about)?;
            record.policy = record.policy.repeated(&output.policy);
            if let Some(reports) = &mut reports {
                reports.absent.extend(output.absent.into_iter().map(about));
                reports.unguarded |= output.unguarded;
            }
        }
        capture_alike(&mut desired);
        Ok(desired)
    }
}

/// Returns the error for a network namespace that is not the one of the records.
fn not_found(netns: &Path) -> Error {
    let msg = format!("network namespace {}: gone, replaced, or not visible in this mount namespace", netns.display());
    Error::new(Code::InvalidNetns, msg)
}

/// Makes all redirections capture secondary networks if one does: a pod has one redirection, and only some of its
/// attachments follow the installed configuration.
fn capture_alike(records: &mut SandboxRecords) {
    let redirections = records.attachments.iter().filter_map(|(_, record)| record.policy.redirect());
    let captures = { redirections }.any(|redirect| redirect.capture_secondary_networks);
    for (_, record) in &mut records.attachments {
        if let Interception::On(redirect) = &mut record.policy.interception {
            redirect.capture_secondary_networks = captures;
        }
    }
}

/// Returns the differences between two policies in words; empty if none has an effect.
fn changes(before: &Policy, after: &Policy) -> String {
    let mut words = Vec::new();
    let kind = |policy: &Policy| match policy.interception {
        Interception::Unset => "not redirected",
        Interception::Off => "interception mode NONE",
        Interception::On(_) => "redirected",
    };
    if kind(before) != kind(after) {
        words.push(format!("{} (before: {})", kind(after), kind(before)));
    }
    let values = |policy: &Policy| policy.redirect().map(|it| setting_values(it).collect::<BTreeMap<_, _>>());
    if let (Some(before), Some(after)) = (values(before), values(after)) {
        for (key, value) in &after {
            let old = before.get(key).unwrap_or(&Value::Null);
            if old != value {
                words.push(format!("{key}: {} (before: {})", shown(value), shown(old)));
            }
        }
    }
    let (old, new) = (before.exclusions_in_effect(), after.exclusions_in_effect());
    words.extend(listed("excluded", new.difference(&old).map(exclusion)));
    words.extend(listed("no longer excluded", old.difference(&new).map(exclusion)));
    let container = |ContainerExclusion { name, scope }: &ContainerExclusion| format!("container {name} ({scope})");
    words.extend(listed("excluded", after.containers.difference(&before.containers).map(container)));
    words.extend(listed("no longer excluded", before.containers.difference(&after.containers).map(container)));
    cut(&words.join("; "), MAX_WORDS).into_owned()
}

fn listed(title: &str, items: impl Iterator<Item = String>) -> Option<String> {
    let items: Vec<String> = items.collect();
    (!items.is_empty()).then(|| format!("{title}: {}", items.join(", ")))
}

fn shown(value: &Value) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match value {
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => plain(other),
    }
}

fn exclusion(Exclusion { owner, destination, protocol, ports }: &Exclusion) -> String {
    let mut words = vec![match owner {
        TrafficOwner::Any => "every process".to_owned(),
        TrafficOwner::Uid(range) => format!("UID {range}"),
        TrafficOwner::Gid(range) => format!("GID {range}"),
    }];
    words.extend(protocol.map(|protocol| protocol.to_string()));
    if !ports.is_empty() {
        words.push(format!("port {}", ports.iter().map(ToString::to_string).collect::<Vec<_>>().join("/")));
    }
    words.extend(destination.map(|destination| format!("to {destination}")));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{ContainerScope, IdRange, PortRange, Ports, Protocol, Redirect};
    use std::collections::BTreeSet;

    fn redirected(change: impl FnOnce(&mut Redirect)) -> Policy {
        let mut redirect = Redirect::default();
        change(&mut redirect);
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    #[test]
    fn each_kind_of_change_is_named_with_both_values() {
        let before = redirected(|_| {});
        assert_eq!(changes(&before, &before), "");
        let mut after = redirected(|redirect| {
            redirect.outbound_ports_exclude = Ports::List(vec![PortRange::one(3306), PortRange { first: 1, last: 9 }]);
        });
        let uid = |first, last| Exclusion {
            owner: TrafficOwner::Uid(IdRange { first, last }),
            destination: None,
            protocol: None,
            ports: Vec::new(),
        };
        let dns = Exclusion {
            owner: TrafficOwner::Any,
            destination: Some("10.96.0.10/32".parse().expect("an address")),
            protocol: Some(Protocol::Udp),
            ports: vec![PortRange::one(53)],
        };
        after.exclusions = BTreeSet::from([uid(1000, 1999), dns]);
        after.containers = BTreeSet::from([ContainerExclusion { name: "vault".into(), scope: ContainerScope::All }]);
        let words = changes(&before, &after);
        for part in [
            "outbound_ports_exclude: 3306, 1-9 (before: 15020)",
            "excluded: every process udp port 53 to 10.96.0.10/32, UID 1000-1999",
            "excluded: container vault (all)",
        ] {
            assert!(words.contains(part), "{words}");
        }
        assert!(changes(&after, &before).contains("no longer excluded: container vault"), "the other way");
        assert_eq!(changes(&Policy::default(), &before), "redirected (before: not redirected)");
    }

    #[test]
    fn a_large_change_is_cut() {
        let ports = |range: std::ops::Range<u16>| Ports::List(range.map(PortRange::one).collect());
        let words =
            changes(&redirected(|_| {}), &redirected(|redirect| redirect.outbound_ports_exclude = ports(1..999)));
        assert!(words.len() <= MAX_WORDS && words.ends_with('…'), "{words}");
    }
}
