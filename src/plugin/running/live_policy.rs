//! Live policy, for the node's agent and `doctor`: the policies of running pods from saved state, their desired policies,
//! and the change from one to the other. This module does not use the cluster.

mod decision;

pub(crate) use decision::{
    Assessment, Input, Policies, Verdict, applied_policy, assess, assess_changed, changes, follows_changes, policy_name,
};

use super::container_status::is_gone;
use crate::cni::{Code, Error, GROUP_FILE, NODE_CONFIGURATION, NetConf, NodeConf, is_identifier};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::NetnsId;
use crate::plugin::inputs::{AddInputs, NodeInputs, refusal};
use crate::plugin::node;
use crate::plugin::open_netns;
use crate::plugin::primary::united;
use crate::plugin::reconcile::{Operation, reconcile};
use crate::plugin::record::{AttachmentRecord, SandboxRecords};
use crate::pod::well_known::INIT_CONTAINER;
use crate::pod::{Facts, PodRef};
use crate::policy::{Interception, LivePolicyScope, Policy};
use crate::state::{Attachment, ROOT, Store};
use crate::sub_plugins::{enrolled_by, pod_skip_reason};
use ring::digest::{SHA256, digest};
use serde_json::{Map, Value};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The number of bytes of a digest that [`policy_hash`] shows.
const HASH_BYTES: usize = 6;
/// Stands for an unknown default. Fields of objects in lists have the defaults null, false or empty.
const UNKNOWN_DEFAULT: Value = Value::Bool(false);

/// A container of the runtime (a pod sandbox) with saved state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningPod {
    /// Its ID: `CNI_CONTAINERID`.
    pub container_id: String,
    /// The pod; `None` if no record contains it: an earlier version wrote them, or its policy is final.
    pub pod: Option<PodRef>,
    /// The path of its network namespace in the runtime; empty if no record contains it.
    pub netns: PathBuf,
    /// Its attachments, sorted.
    pub attachments: Vec<AppliedPolicy>,
    /// Whether a call was killed while it changed the rules: they may be the old or the new ones. [`Self::apply`]
    /// completes the change.
    pub interrupted: bool,
}

/// The applied policy of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppliedPolicy {
    /// The attachment.
    pub attachment: Attachment,
    /// Its policy as evaluated, before it was adapted to the network namespace; comparable with a desired policy.
    pub policy: Policy,
    inputs: Option<AddInputs<'static>>,
    /// The network namespace of its rules: its path in the runtime, and its identity.
    netns: Option<(PathBuf, NetnsId)>,
    added_since_boot: u64,
    /// Whether it was adapted to the redirection of another tool.
    is_redirected_elsewhere: bool,
}

/// The policies that an ADD of each attachment would apply now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredPolicies {
    /// The policies. Where a setting of a sub-plugin is invalid, they have what is applied.
    pub policies: Vec<(Attachment, Policy)>,
    /// Why a setting of the configuration or of the pod is invalid: an ADD would fail.
    pub rejected: Option<Error>,
    /// A request outside the bounds that is without effect.
    pub ignored: Option<String>,
}

/// Returns the containers with saved state. A damaged record is logged, and its container is skipped.
///
/// # Errors
/// The saved state can't be read.
pub(crate) fn running() -> Result<Vec<RunningPod>, Error> {
    let store = Store::new(ROOT);
    let mut pods = Vec::new();
    for container_id in store.sandboxes()? {
        match RunningPod::read(&store, &container_id) {
            Err(error) if error.code == Code::State => tracing::debug!("{error}"),
            other => pods.extend(other?),
        }
    }
    Ok(pods)
}

/// Returns one container with saved state; `None` if it has none.
///
/// # Errors
/// Its saved state can't be read.
pub fn running_container(container_id: &str) -> Result<Option<RunningPod>, Error> {
    // The ID becomes part of a path.
    if !is_identifier(container_id) {
        return Ok(None);
    }
    RunningPod::read(&Store::new(ROOT), container_id)
}

impl AppliedPolicy {
    fn new(attachment: Attachment, record: AttachmentRecord) -> Self {
        let inputs = record.inputs.as_ref().and_then(AddInputs::read);
        let netns = record.netns_path.clone().zip(record.netns_id);
        let netns = netns.or_else(|| inputs.as_ref()?.netns.clone());
        let (applied, evaluated) = (&record.policy, record.evaluated());
        let is_redirected_elsewhere = applied.redirect().is_some() != evaluated.redirect().is_some()
            || applied.dns_captured_elsewhere != evaluated.dns_captured_elsewhere;
        let added_since_boot = record.added_since_boot;
        let policy = record.evaluated.unwrap_or(record.policy);
        Self { attachment, policy, inputs, netns, added_since_boot, is_redirected_elsewhere }
    }
}

impl RunningPod {
    fn read(store: &Store, container_id: &str) -> Result<Option<Self>, Error> {
        let records = SandboxRecords::read_all(store, &store.attachments_of(container_id)?)?.attachments;
        if records.is_empty() {
            return Ok(None);
        }
        let interrupted = records.iter().any(|(_, record)| record.previous_policy.is_some());
        let applied = records.into_iter().map(|(attachment, record)| AppliedPolicy::new(attachment, record));
        let attachments: Vec<AppliedPolicy> = applied.collect();
        let pod = attachments.iter().find_map(|applied| Some(applied.inputs.as_ref()?.pod.clone()));
        let netns = attachments.iter().find_map(|applied| Some(applied.netns.as_ref()?.0.clone()));
        let (container_id, netns) = (container_id.to_owned(), netns.unwrap_or_default());
        Ok(Some(Self { container_id, pod, netns, attachments, interrupted }))
    }

    /// Returns whether its network namespace may exist. One that is unknown or not visible in this mount namespace may.
    #[must_use]
    pub fn is_present(&self, root: &HostRoot) -> bool {
        let netns = self.attachments.iter().find_map(|applied| applied.netns.as_ref());
        netns.is_none_or(|(path, id)| {
            open_netns::recorded(root, path, *id).is_ok_and(|netns| netns.is_some()) || !is_gone(root, path, *id)
        })
    }

    /// Returns when its first attachment was added, in nanoseconds since the node's boot; zero if unknown.
    #[must_use]
    pub fn added_since_boot(&self) -> u64 {
        self.attachments.iter().map(|applied| applied.added_since_boot).min().unwrap_or_default()
    }

    /// Returns whether the inputs of each ADD are saved. An earlier version did not save them: without them, only a
    /// new pod gets a changed policy. They are also missing if the policy is final: without a sidecar, and without
    /// sub-plugins that exclude.
    #[must_use]
    pub fn has_inputs(&self) -> bool {
        self.attachments.iter().all(|applied| applied.inputs.is_some())
    }

    /// Returns whether its attachments have rules.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.attachments.iter().any(|applied| !applied.policy.is_empty())
    }

    /// Returns whether these policies are applied.
    #[must_use]
    pub fn has_applied(&self, policies: &[(Attachment, Policy)]) -> bool {
        let applied = |(attachment, policy): &(Attachment, Policy)| {
            self.attachments.iter().any(|own| own.attachment == *attachment && own.policy == *policy)
        };
        !self.interrupted && policies.iter().all(applied)
    }

    /// Evaluates the policy that an ADD of each attachment would apply now. An attachment whose network name is that of
    /// one of the `installed` configurations is evaluated with that; the others, and those of a primary plugin, with the
    /// configuration of their ADD. `root` is the mount point of the node's file system, for the host's groups.
    ///
    /// # Errors
    /// Attachments contradict each other, the facts are of another pod, or the inputs are not saved ([`Code::NoAdd`]).
    pub fn desired(&self, root: &Path, facts: &Facts, installed: &[&NetConf]) -> Result<DesiredPolicies, Error> {
        let about = |error: Error| error.of_pod(&facts.pod.namespace, &facts.pod.name);
        let root = HostRoot::new(root);
        let (group_file, node) = (root.find(&HostPath::root().join(GROUP_FILE)), node_configuration(&root));
        let (mut rejected, mut ignored) = (None, None);
        let mut evaluate = |AppliedPolicy { attachment, inputs, policy: applied, .. }: &AppliedPolicy| {
            let inputs = inputs.as_ref().ok_or_else(|| without_inputs(attachment))?;
            let of_network = |conf: &&&NetConf| conf.name == attachment.network && conf.primary.is_none();
            let node = NodeInputs {
                installed: installed.iter().find(of_network).copied(),
                configuration: node.as_ref(),
                network: &attachment.network,
                group_file: &group_file,
            };
            let mut policies = Vec::new();
            for (network, separate) in inputs.evaluate(facts, &node, applied)? {
                rejected = rejected.take().or_else(|| refusal(network, &separate));
                ignored = ignored.take().or(separate.ignored);
                policies.push((network.unwrap_or_default(), separate.policy));
            }
            Ok((attachment.clone(), united(&policies)?))
        };
        let policies = self.attachments.iter().map(|applied| evaluate(applied).map_err(about));
        let policies = policies.collect::<Result<_, Error>>()?;
        Ok(DesiredPolicies { policies, rejected: rejected.map(about), ignored })
    }

    /// Returns the policies that the pod gets within `scope` if `desired` are its desired ones. A pod that nothing
    /// redirects gets no exclusions.
    #[must_use]
    pub fn following(
        &self,
        facts: &Facts,
        desired: &[(Attachment, Policy)],
        scope: LivePolicyScope,
    ) -> Vec<(Attachment, Policy)> {
        let is_redirected = scope == LivePolicyScope::All || self.is_redirected(facts);
        let followed = |(attachment, desired): &(Attachment, Policy)| {
            let own = self.attachments.iter().find(|own| own.attachment == *attachment)?;
            let keeps = own.policy.is_empty() && !is_redirected;
            let policy = if keeps { own.policy.clone() } else { own.policy.following(desired, scope) };
            Some((attachment.clone(), policy))
        };
        desired.iter().filter_map(followed).collect()
    }

    /// Returns the policies that the pod gets if it follows no other changes of `desired`: without bypasses that these do
    /// not have.
    #[must_use]
    pub fn tightened(&self, desired: &[(Attachment, Policy)]) -> Vec<(Attachment, Policy)> {
        let tightened = |(attachment, desired): &(Attachment, Policy)| {
            let own = self.attachments.iter().find(|own| own.attachment == *attachment)?;
            Some((attachment.clone(), own.policy.tightened(desired)))
        };
        desired.iter().filter_map(tightened).collect()
    }

    /// Returns whether its attachments, its `istio-init` container or another tool redirect it: to its sidecar, or to
    /// ztunnel.
    fn is_redirected(&self, facts: &Facts) -> bool {
        let by_attachment =
            |applied: &AppliedPolicy| applied.policy.redirect().is_some() || applied.is_redirected_elsewhere;
        self.attachments.iter().any(by_attachment)
            || facts.pod.init_containers.iter().any(|container| container.name == INIT_CONTAINER)
            // istio-cni redirects it by these rules.
            || pod_skip_reason(&facts.pod).is_none()
            || enrolled_by(&facts.pod, facts.namespace.as_ref()).is_some()
    }

    /// Applies policies to the attachments in one transaction, as their ADD would do. `root` is the mount point of the
    /// node's file system. Waits for other calls in the network namespace.
    ///
    /// # Errors
    /// The attachments contradict each other, a limit is exceeded, the kernel refuses the rules, or the pod is gone.
    /// The old rules and the old saved state remain.
    pub fn apply(&self, root: &Path, policies: &[(Attachment, Policy)]) -> Result<(), Error> {
        let Some((attachment, _)) = policies.first() else { return Ok(()) };
        let root = HostRoot::new(root);
        let mut netns = None;
        for (path, id) in self.attachments.iter().filter_map(|applied| applied.netns.as_ref()) {
            netns = netns.or(open_netns::recorded(&root, path, *id)?);
        }
        let netns = netns.ok_or_else(|| {
            let msg = format!(
                "network namespace {}: gone, replaced, or not visible in this mount namespace",
                self.netns.display()
            );
            Error::new(Code::InvalidNetns, msg)
        })?;
        open_netns::refuse_own(netns.path())?;
        reconcile(&Store::new(ROOT), attachment, &netns, Operation::Follow(policies.to_vec()))
    }
}

fn without_inputs(attachment: &Attachment) -> Error {
    let msg = format!("{attachment}: unknown inputs: an earlier version wrote its saved state; recreate the pod");
    Error::new(Code::NoAdd, msg)
}

/// Returns the node configuration; `None` if it is missing or can't be used.
fn node_configuration(root: &HostRoot) -> Option<NodeConf> {
    let path = root.reach(&HostPath::root().join(NODE_CONFIGURATION)).ok()?;
    node::read(NODE_CONFIGURATION, &path).ok().flatten().map(|(node, _)| node)
}

/// Returns the hash of the union of policies: 12 hexadecimal digits. Fields with default values do not contribute, so
/// that a new version with more fields returns the same hash. All policies without rules have the same hash.
pub(crate) fn policy_hash<'a>(policies: impl IntoIterator<Item = &'a Policy>) -> String {
    let union = Policy::union_of(policies);
    let text = if union.is_empty() { String::new() } else { without_defaults(&union) };
    let digest = digest(&SHA256, text.as_bytes());
    digest.as_ref().iter().take(HASH_BYTES).fold(String::new(), |mut hash, byte| {
        // Writing to a string does not fail.
        let _ = write!(hash, "{byte:02x}");
        hash
    })
}

/// Returns the policy as in saved state without fields that have default values, with sorted keys.
fn without_defaults(policy: &Policy) -> String {
    let (kind, interception) = match &policy.interception {
        Interception::Unset => ("unset", Interception::Unset),
        Interception::Off => ("off", Interception::Off),
        Interception::On(_) => ("on", Interception::On(Box::default())),
    };
    let default = Policy { interception, ..Policy::default() };
    let value = |policy: &Policy| serde_json::to_value(policy).unwrap_or_default();
    format!("{kind} {}", difference(value(policy), &value(&default)).unwrap_or_default())
}

/// Returns the part of `value` that differs from `default`.
fn difference(value: Value, default: &Value) -> Option<Value> {
    match (value, default) {
        (value, default) if value == *default => None,
        (Value::Object(fields), Value::Object(defaults)) => {
            let part = |(key, value): (String, Value)| {
                let value = difference(value, defaults.get(&key).unwrap_or(&UNKNOWN_DEFAULT))?;
                Some((key, value))
            };
            let mut fields: Map<String, Value> = fields.into_iter().filter_map(part).collect();
            fields.sort_keys();
            (!fields.is_empty()).then(|| fields.into())
        }
        (fields @ Value::Object(_), _) => difference(fields, &Value::Object(Map::new())),
        (Value::Array(items), _) if !items.is_empty() => {
            let items = items.into_iter().map(|item| difference(item, &UNKNOWN_DEFAULT).unwrap_or_default());
            Some(items.collect::<Vec<_>>().into())
        }
        (Value::Array(_) | Value::Null, default) if *default == UNKNOWN_DEFAULT => None,
        (value, _) => Some(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::NetNs;
    use crate::policy::{Exclusion, IdRange, PortRange, Ports, Redirect, TrafficOwner};

    fn excluding(uid: u32) -> Policy {
        let owner = TrafficOwner::Uid(IdRange::one(uid));
        let exclusion = Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
        Policy { exclusions: [exclusion].into(), dns_captured_elsewhere: Some(false), ..Policy::default() }
    }

    fn redirecting(redirect: Redirect) -> Policy {
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    /// Also if the node's file system is not mounted elsewhere.
    #[test]
    fn a_network_namespace_that_is_gone_is_not_present() {
        let (own, root) = (Path::new("/proc/thread-self/ns/net"), HostRoot::new("/"));
        let id = NetNs::open(own).expect("readable").expect("there").id();
        let is_present = |path: &str, id| {
            let attachment = Attachment { container_id: "c".into(), network: "n".into(), ifname: "eth0".into() };
            let applied = AppliedPolicy {
                attachment,
                policy: Policy::default(),
                inputs: None,
                netns: Some((path.into(), id)),
                added_since_boot: 0,
                is_redirected_elsewhere: false,
            };
            let pod = RunningPod {
                container_id: "c".into(),
                pod: None,
                netns: path.into(),
                attachments: vec![applied],
                interrupted: false,
            };
            pod.is_present(&root)
        };
        assert!(is_present("/proc/thread-self/ns/net", id));
        assert!(!is_present("/run/netns/detour-gone", id));
        // The mount point remains as a file, or another network namespace has the path.
        assert!(!is_present("/proc/thread-self/status", id));
        assert!(!is_present("/proc/thread-self/ns/net", NetnsId { inode: id.inode + 1, ..id }));
    }

    /// A later version must not change these values: they are on running pods.
    #[test]
    fn the_hash_is_the_same_in_each_version() {
        let ports = Ports::List(vec![PortRange::one(22)]);
        let policies = [
            Policy::default(),
            redirecting(Redirect::default()),
            redirecting(Redirect { outbound_ports_exclude: ports, ..Redirect::default() }),
            excluding(1337),
        ];
        let hashes = policies.each_ref().map(|policy| policy_hash([policy]));
        assert_eq!(hashes, ["e3b0c44298fc", "1605a5ecbb58", "4920f1ea8227", "5681280e2161"]);
    }

    #[test]
    fn the_hash_is_that_of_the_union() {
        let (a, b) = (redirecting(Redirect::default()), excluding(7));
        let both = a.union(&b).expect("no conflict");
        assert_eq!(policy_hash([&a, &b]), policy_hash([&b, &a]));
        assert_eq!(policy_hash([&a, &b]), policy_hash([&both]));
        assert_ne!(policy_hash([&a, &b]), policy_hash([&a]));
        assert_ne!(policy_hash([&a, &b]), policy_hash([&b]));
        assert_ne!(policy_hash([&b]), policy_hash([&excluding(8)]));
    }

    #[test]
    fn policies_without_rules_have_one_hash() {
        let off = Policy { interception: Interception::Off, ..Policy::default() };
        let known = Policy { dns_captured_elsewhere: Some(true), ..Policy::default() };
        assert_eq!(policy_hash([&off]), policy_hash([]));
        assert_eq!(policy_hash([&known, &Policy::default()]), policy_hash([]));
    }

    #[test]
    fn defaults_do_not_change_the_hash() {
        let mut value = serde_json::to_value(excluding(7)).expect("a value");
        let expected = difference(value.clone(), &UNKNOWN_DEFAULT);
        value["new"] = Value::Array(Vec::new());
        value["exclusions"][0]["new"] = Value::Bool(false);
        value["exclusions"][0]["other"] = serde_json::json!({"inner": null});
        assert_eq!(difference(value, &UNKNOWN_DEFAULT), expected);
    }
}
