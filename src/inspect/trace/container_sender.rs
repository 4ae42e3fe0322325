//! Excluded containers as senders of the packets that `trace` follows: which traffic of a container bypasses the sidecar
//! now.

use super::report::{Trace, trace};
use crate::firewall::{ContainerElement, Destination, InSet, RulesetView, Sender};
use crate::inspect::elements::ContainerSender;
use crate::inspect::elements::cgroup_paths;
use crate::inspect::rules::LiveRules;
use crate::inspect::terminal::first_of;
use crate::policy::{ContainerScope, Policy};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

/// Limit for the containers that a caveat names; the rest is counted.
const MAX_NAMED: usize = 10;

/// The excluded containers of a pod: those of its policy, and those that have an element.
#[derive(Debug, Clone, Copy)]
pub struct ExcludedSenders<'a> {
    policy: Option<&'a Policy>,
    /// The live elements; `None` if all excluded containers are assumed to run.
    elements: Option<&'a [ContainerElement]>,
    /// Where the node's file system is mounted, for the levels of control groups.
    root: Option<&'a Path>,
}

impl<'a> ExcludedSenders<'a> {
    /// Returns the containers that a policy excludes, while they run.
    #[must_use]
    pub const fn planned(policy: &'a Policy) -> Self {
        Self { policy: Some(policy), elements: None, root: None }
    }

    /// Returns the containers with live elements. The node's file system is mounted at `root`.
    #[must_use]
    pub fn live(rules: &'a LiveRules, root: &'a Path) -> Self {
        let policy = rules.desired.as_ref().map(|desired| &desired.policy);
        Self { policy, elements: Some(&rules.live.containers), root: Some(root) }
    }

    /// Returns the container called `name`, and its place in the sets.
    fn named(&self, name: &str) -> (ContainerSender, Option<InSet>) {
        let planned = self.policy.and_then(|policy| policy.container_scope(name));
        let is_named = |element: &&ContainerElement| element.container.as_ref().is_some_and(|of| of.name == name);
        let element = self.elements.and_then(|all| all.iter().filter(is_named).max_by_key(|element| element.scope));
        let bypasses = if self.elements.is_some() { element.map(|one| one.scope) } else { planned };
        let level = element.zip(self.root).and_then(|(element, root)| level(element.cgroup, root));
        let sender = ContainerSender { name: name.to_owned(), excluded: planned.is_some(), bypasses };
        (sender, bypasses.map(|scope| InSet { scope, level }))
    }

    /// Returns the containers whose traffic bypasses the sidecar now.
    fn bypassing(&self) -> BTreeMap<&'a str, ContainerScope> {
        let planned = self.policy.into_iter().flat_map(|policy| &policy.containers).map(|one| (&*one.name, one.scope));
        let live = |element: &'a ContainerElement| Some((&*element.container.as_ref()?.name, element.scope));
        let mut widest = BTreeMap::new();
        let mut add = |(name, scope): (&'a str, ContainerScope)| {
            let known = widest.entry(name).or_insert(scope);
            *known = scope.max(*known);
        };
        match self.elements {
            Some(elements) => elements.iter().filter_map(live).for_each(&mut add),
            None => planned.for_each(&mut add),
        }
        widest
    }

    /// Traces the first packet of a connection as [`trace()`]; `container` is the name of the sending container, if known.
    #[must_use]
    pub fn trace(
        &self,
        view: &RulesetView,
        (from, container): (Sender, Option<&str>),
        to: Destination,
        pod_addresses: &[IpAddr],
        interface: &str,
    ) -> Trace {
        let of = |set| trace(view, from.in_set(set), to, pod_addresses, interface);
        let Some(name) = container else {
            let mut traced = of(None);
            traced.caveats.extend(self.caveat(from, &traced, |scope| of(Some(InSet { scope, level: None }))));
            return traced;
        };
        let (sender, place) = self.named(name);
        Trace { container: Some(sender), ..of(place) }
    }

    /// Returns a caveat if the packet arrives elsewhere when an excluded container sends it.
    fn caveat(&self, from: Sender, traced: &Trace, of: impl Fn(ContainerScope) -> Trace) -> Option<String> {
        let bypassing = self.bypassing();
        if bypassing.is_empty() || matches!(from, Sender::Inbound(_)) {
            return None;
        }
        let differs = |scope: &ContainerScope| of(*scope).arrives_at != traced.arrives_at;
        let wide: Vec<ContainerScope> =
            [ContainerScope::Dns, ContainerScope::All].into_iter().filter(differs).collect();
        let names: Vec<&str> =
            bypassing.into_iter().filter(|(_, scope)| wide.contains(scope)).map(|(name, _)| name).collect();
        let first = names.first()?;
        let listed = first_of(names.iter().map(ToString::to_string), MAX_NAMED, ", ");
        Some(format!(
            "the same packet of an excluded container bypasses the sidecar: {listed}; use --from container={first}"
        ))
    }
}

/// Returns the level of a control group, if its path is found.
fn level(cgroup: u64, root: &Path) -> Option<u8> {
    let paths = cgroup_paths([cgroup], root);
    let path = paths.get(&cgroup)?;
    u8::try_from(path.split('/').filter(|part| !part.is_empty()).count()).ok()
}
