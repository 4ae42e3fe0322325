//! The traffic policy of a pod: a redirection, exclusions, and a guard.

use super::exclusion::Exclusion;
use super::exclusion::{ContainerExclusion, ContainerScope};
use super::owners::ByTraffic;
use super::redirect::Redirect;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::Not;

/// The traffic policy of one attachment, or the union of those of several attachments.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// The redirection to the sidecar. Saved state always has it: a default would hide damage.
    pub interception: Interception,
    /// The outbound traffic that bypasses the sidecar.
    #[serde(default)]
    pub exclusions: BTreeSet<Exclusion>,
    /// The containers whose traffic bypasses the sidecar while they run.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub containers: BTreeSet<ContainerExclusion>,
    /// Whether another tool's redirection captures this pod's DNS, according to that tool's rules or the pod's
    /// facts; `None` if neither is known yet.
    #[serde(default)]
    pub dns_captured_elsewhere: Option<bool>,
    /// Whether the pod is in Istio's ambient mesh. ztunnel sends from sockets in the pod's network namespace, to which
    /// exclusions do not apply.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub ambient: bool,
    /// What is rejected if neither the redirection nor an exclusion explains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guard>,
}

/// Whether the pod's traffic is redirected to the sidecar.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Interception {
    /// Not set: another tool may redirect the pod's traffic.
    #[default]
    #[serde(rename = "Unsaid")]
    Unset,
    /// `interceptionMode: NONE`: no rules at all, not even for exclusions.
    Off,
    /// Traffic is redirected with these settings.
    On(Box<Redirect>),
}

impl Policy {
    /// Returns whether the policy requires no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.guard.is_none()
            && match self.interception {
                Interception::Off => true,
                Interception::Unset => self.exclusions.is_empty() && self.containers.is_empty(),
                Interception::On(_) => false,
            }
    }

    /// Returns the exclusions that no other one covers: those that require a rule.
    #[must_use]
    pub fn exclusions_in_effect(&self) -> BTreeSet<Exclusion> {
        ByTraffic::group(self.exclusions.iter()).uncovered()
    }

    /// Returns the number of exclusions in effect, including those of containers.
    #[must_use]
    pub fn exclusion_count(&self) -> usize {
        self.exclusions_in_effect().len() + self.containers.len()
    }

    /// Returns the policy of a running pod with this policy if an ADD of a new pod would apply `desired`. The redirection
    /// stays as it was when the pod started, because the proxy expects its traffic so: it neither begins nor ends, and
    /// keeps its mode, ports, proxy and DNS capture. Exclusions and the redirection's lists follow.
    #[must_use]
    pub fn repeated(&self, desired: &Self) -> Self {
        let interception = match (&self.interception, &desired.interception) {
            (Interception::Off, _) => return self.clone(),
            (Interception::On(own), Interception::On(desired)) => {
                Interception::On(Box::new(own.with_lists_of(desired)))
            }
            (own, _) => own.clone(),
        };
        // The guard rejects what the redirection of the start captures.
        let own = match &self.guard {
            Some(Guard::Sidecar(own)) => Some(own.as_ref()),
            _ => self.redirect(),
        };
        let guard = match (own, &desired.guard) {
            (Some(own), Some(Guard::Sidecar(desired))) => Some(Guard::Sidecar(Box::new(own.with_lists_of(desired)))),
            (_, desired) => desired.clone(),
        };
        let mut repeated = Self {
            ambient: desired.ambient && self.redirect().is_none(),
            interception,
            exclusions: desired.exclusions.clone(),
            containers: desired.containers.clone(),
            dns_captured_elsewhere: desired.dns_captured_elsewhere,
            guard,
        };
        // A policy without rules does not depend on it.
        if !self.is_empty() && !repeated.is_empty() {
            repeated.dns_captured_elsewhere = self.dns_captured_elsewhere.or(desired.dns_captured_elsewhere);
        }
        repeated
    }

    /// Returns `desired` with the exclusions that this policy has already: it requires no more rules than this one, and no
    /// traffic bypasses the sidecar that does not in `desired`.
    #[must_use]
    pub fn limited_to(&self, desired: &Self) -> Self {
        let exclusions = ByTraffic::group(desired.exclusions.iter()).covered(&self.exclusions);
        let containers = self.containers.intersection(&desired.containers).cloned().collect();
        Self { exclusions, containers, ..desired.clone() }
    }

    /// Returns the settings of the redirection; `None` if traffic is not redirected.
    #[must_use]
    pub fn redirect(&self) -> Option<&Redirect> {
        match &self.interception {
            Interception::On(redirect) => Some(redirect),
            Interception::Unset | Interception::Off => None,
        }
    }

    /// Returns which traffic of the running container `name` bypasses the sidecar; `None` if none does.
    #[must_use]
    pub fn container_scope(&self, name: &str) -> Option<ContainerScope> {
        self.containers.iter().filter(|exclusion| exclusion.name == name).map(|exclusion| exclusion.scope).max()
    }
}

/// What the guard rejects: new connections and DNS queries that a redirection would capture, and that were neither captured
/// nor excluded. Therefore, a pod whose redirection is missing fails closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Guard {
    /// What a redirection to the sidecar with these settings captures. If the pod's attachments redirect it, their settings
    /// apply instead.
    Sidecar(Box<Redirect>),
    /// What istio-cni's rules for the ambient mesh capture.
    Ambient(AmbientGuard),
}

/// What istio-cni's rules for the ambient mesh capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AmbientGuard {
    /// Whether they capture DNS over UDP.
    pub dns: bool,
    /// Whether they capture inbound connections.
    pub inbound: bool,
    /// The source addresses of the kubelet's probes: istio-cni translates the node's address to them.
    pub probes: BTreeSet<IpAddr>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{DnsCapture, IdRange, InterceptionMode, Ipv6, PortRange, Ports, Protocol, TrafficOwner};

    #[test]
    fn the_widest_exclusion_counts() {
        let exclusion = |scope| ContainerExclusion { name: "vault".to_owned(), scope };
        let containers = [exclusion(ContainerScope::All), exclusion(ContainerScope::Dns)];
        let policy = Policy { containers: containers.into(), ..Policy::default() };
        assert_eq!(policy.container_scope("vault"), Some(ContainerScope::All));
        assert_eq!(policy.container_scope("other"), None);
    }

    fn redirecting(redirect: Redirect) -> Policy {
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    fn excluding(uid: u32) -> Policy {
        let owner = TrafficOwner::Uid(IdRange::one(uid));
        let exclusion = Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
        Policy { exclusions: [exclusion].into(), ..Policy::default() }
    }

    #[test]
    fn only_lists_and_exclusions_of_a_running_pod_follow() {
        let lists = Redirect {
            inbound_ports_exclude: Ports::List(vec![PortRange::one(9)]),
            outbound_ports_include: Ports::All,
            exclude_interfaces: vec!["net1".into()],
            capture_secondary_networks: false,
            ..Redirect::default()
        };
        let desired = Redirect {
            proxy_uid: vec![7],
            proxy_port: 7,
            inbound_capture_port: 7,
            inbound_interception_mode: InterceptionMode::Tproxy,
            inbound_tproxy_mark: 7,
            dns: DnsCapture::All,
            drop_invalid: true,
            ipv6: Ipv6::Off,
            ..lists.clone()
        };
        let desired = Policy { exclusions: excluding(7).exclusions, ..redirecting(desired) };
        let expected = Policy { exclusions: excluding(7).exclusions, ..redirecting(lists) };
        assert_eq!(redirecting(Redirect::default()).repeated(&desired), expected);
        assert_eq!(expected.repeated(&expected), expected);
    }

    /// Attachments that redirect and others that only guard must not contradict each other later.
    #[test]
    fn the_guard_of_a_running_pod_keeps_what_its_redirection_keeps() {
        let guarded = |policy: Policy, redirect: &Redirect| {
            let guard = Some(Guard::Sidecar(Box::new(redirect.clone())));
            Policy { guard, ..policy }
        };
        let own = Redirect::default();
        let tproxy = Redirect { inbound_interception_mode: InterceptionMode::Tproxy, ..Redirect::default() };
        let desired = guarded(Policy::default(), &tproxy);
        for started in [guarded(Policy::default(), &own), redirecting(own.clone())] {
            assert_eq!(started.repeated(&desired), guarded(started.clone(), &own));
        }
        assert_eq!(Policy::default().repeated(&desired), desired, "a guard that begins");
        let ended = guarded(Policy::default(), &own).repeated(&Policy::default());
        assert_eq!(ended.guard, None);
    }

    #[test]
    fn a_redirection_neither_begins_nor_ends() {
        let off = Policy { interception: Interception::Off, ..Policy::default() };
        let kinds = [redirecting(Redirect::default()), excluding(7), off.clone()];
        for (own, desired) in kinds.iter().flat_map(|own| kinds.iter().map(move |desired| (own, desired))) {
            assert_eq!(own.repeated(desired).interception, own.interception, "{own:?} {desired:?}");
        }
        let ended = Policy { exclusions: excluding(7).exclusions, ..kinds[0].clone() }.repeated(&off);
        assert_eq!(ended, kinds[0], "an exclusion ends");
        assert_eq!(off.repeated(&kinds[1]), off);
    }

    #[test]
    fn a_known_dns_capture_remains_while_the_policy_has_rules() {
        let captured = |policy: Policy, captured| Policy { dns_captured_elsewhere: captured, ..policy };
        let (own, desired) = (captured(excluding(7), Some(true)), captured(excluding(8), Some(false)));
        assert_eq!(own.repeated(&desired), captured(excluding(8), Some(true)));
        assert_eq!(captured(Policy::default(), Some(true)).repeated(&desired), desired);
    }

    /// Records of earlier versions lack the field, and those of pods outside of the ambient mesh stay as they were.
    #[test]
    fn a_record_names_the_ambient_mesh_only_for_its_pods() {
        let saved = |ambient| serde_json::to_value(Policy { ambient, ..Policy::default() }).expect("JSON");
        assert_eq!((saved(false).get("ambient"), &saved(true)["ambient"]), (None, &true.into()));
        for ambient in [false, true] {
            let read: Policy = serde_json::from_value(saved(ambient)).expect("readable");
            assert_eq!(read.ambient, ambient);
        }
    }

    #[test]
    fn exclusions_that_others_cover_do_not_count() {
        let all = Exclusion {
            owner: TrafficOwner::Uid(IdRange::one(1337)),
            destination: None,
            protocol: None,
            ports: Vec::new(),
        };
        let dns = |protocol| Exclusion { protocol: Some(protocol), ports: vec![PortRange::one(53)], ..all.clone() };
        let exclusions = BTreeSet::from([dns(Protocol::Udp), dns(Protocol::Tcp), all.clone()]);
        assert_eq!(Policy { exclusions, ..Policy::default() }.exclusion_count(), 1);
    }
}
