//! When each init container runs, and whether it needs an exclusion: traffic that it sends before the proxy accepts
//! connections is captured and lost. A native sidecar starts before the init containers that follow it in the pod, and
//! Istio injects it as the first one (the default since Istio 1.27 with Kubernetes 1.33).

use super::exclusions::{ContainerTraffic, ExcludedPart};
use crate::inspect::terminal::{Cell, Tone};
use crate::policy::Policy;
use serde::Serialize;

/// An init container of the pod, except Istio's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InitContainer {
    /// Its name.
    pub name: String,
    /// Whether it keeps running (`restartPolicy: Always`).
    pub sidecar: bool,
    /// Whether it starts before `istio-proxy` accepts connections.
    pub starts_before_proxy: bool,
    /// Whether its traffic must bypass the sidecar to reach its destination.
    pub needs_exclusion: bool,
    /// How much of its traffic bypasses the sidecar: `all`, `some` or `none`.
    pub excluded: &'static str,
}

impl InitContainer {
    /// Returns when and how `container` runs.
    fn of(container: &ContainerTraffic<'_>, policy: &Policy) -> Self {
        let starts_before_proxy = container.pod.starts_before_proxy(container.name());
        Self {
            name: container.name().to_owned(),
            sidecar: !container.ends_before,
            starts_before_proxy,
            needs_exclusion: starts_before_proxy,
            excluded: match container.excluded_part(policy) {
                ExcludedPart::All => "all",
                ExcludedPart::Some => "some",
                ExcludedPart::None => "none",
            },
        }
    }

    /// Returns its line in the table.
    pub(super) fn row(&self) -> Vec<Cell> {
        let when = match (self.starts_before_proxy, self.sidecar) {
            (true, false) => "runs before istio-proxy starts",
            (true, true) => "starts before istio-proxy, and keeps running",
            (false, false) => "runs after istio-proxy has started",
            (false, true) => "starts after istio-proxy, and keeps running",
        };
        let (what, tone) = match (self.needs_exclusion, self.sidecar, self.excluded) {
            (true, _, "all") => ("needs an exclusion, and is excluded", Tone::Good),
            (true, _, "some") => ("needs an exclusion; only a part of its traffic is excluded", Tone::Notable),
            (true, true, _) => ("needs an exclusion for traffic before istio-proxy accepts connections", Tone::Notable),
            (true, false, _) => ("needs an exclusion: its traffic is captured and lost", Tone::Bad),
            (false, _, "none") => ("needs no exclusion", Tone::Good),
            (false, ..) => ("needs no exclusion, but is excluded: its traffic has no mTLS", Tone::Notable),
        };
        vec![Cell::of(&self.name).tone(Tone::Strong), Cell::of(when), Cell::of(what).tone(tone)]
    }
}

/// Returns the init containers among `containers`, in the order in which they start.
pub(super) fn init_containers(containers: &[ContainerTraffic<'_>], policy: &Policy) -> Vec<InitContainer> {
    let init = containers.iter().filter(|container| container.pod.is_init_container(container.name()));
    init.map(|container| InitContainer::of(container, policy)).collect()
}
