//! Whether a pod is redirected, and why or why not.

use super::parse_bool::parse_bool;
use crate::pod::Pod;
use std::fmt;

/// Label, or else annotation, by which a pod says whether it wants a sidecar.
const INJECT: &str = "sidecar.istio.io/inject";

/// The annotation that Istio's injector leaves on a pod that it gave a sidecar.
const STATUS: &str = "sidecar.istio.io/status";

/// What `istio-redirect` does for a pod. `Display` gives one line for logs and people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The pod's traffic goes to its sidecar.
    Redirect,
    /// It does not, or not by us.
    LeaveAlone(Reason),
}

/// Why a pod is not redirected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// The chain has no `istio-redirect`.
    NotInChain,
    /// The pod has the node's network: rules for it would be the node's.
    HostNetwork,
    /// The pod's own `istio-init` container redirects it.
    IstioInit,
    /// `DISABLE_ENVOY` of the proxy is true: nobody would accept what is redirected.
    EnvoyDisabled,
    /// No container is named `istio-proxy`.
    NoProxy,
    /// The proxy runs as something else, `router` for one: a gateway.
    NotASidecar(String),
    /// `sidecar.istio.io/inject` is false.
    InjectionRefused,
    /// Istio's injector has not seen the pod.
    NotInjected,
    /// The interception mode is `NONE`.
    ModeNone,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redirect => f.write_str("redirected: the pod has an injected sidecar"),
            Self::LeaveAlone(reason) => write!(f, "not redirected: {reason}"),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInChain => f.write_str("istio-redirect is not in the chain"),
            Self::HostNetwork => f.write_str("the pod has the node's network (hostNetwork)"),
            Self::IstioInit => f.write_str("the pod's own istio-init container does it"),
            Self::EnvoyDisabled => f.write_str("DISABLE_ENVOY of container istio-proxy is true"),
            Self::NoProxy => f.write_str("no container is named istio-proxy"),
            Self::NotASidecar(kind) => write!(f, "istio-proxy runs as {kind:?}, not as a sidecar"),
            Self::InjectionRefused => write!(f, "{INJECT} is false"),
            Self::NotInjected => write!(f, "there is no annotation {STATUS}, so the sidecar was not injected"),
            Self::ModeNone => f.write_str("the interception mode is NONE"),
        }
    }
}

/// Which of Istio's rows a pod falls into; the first that matches counts.
pub(super) fn decide(pod: &Pod) -> Decision {
    why_not(pod).map_or(Decision::Redirect, Decision::LeaveAlone)
}

fn why_not(pod: &Pod) -> Option<Reason> {
    if pod.host_network {
        return Some(Reason::HostNetwork);
    }
    if pod.all_containers().any(|c| c.name == "istio-init") {
        return Some(Reason::IstioInit);
    }
    let Some(proxy) = pod.proxy() else { return Some(Reason::NoProxy) };
    if proxy.env("DISABLE_ENVOY").and_then(parse_bool) == Some(true) {
        return Some(Reason::EnvoyDisabled);
    }
    if let [first, kind, ..] = &proxy.args[..]
        && first == "proxy"
        && !matches!(kind.as_str(), "" | "sidecar")
    {
        return Some(Reason::NotASidecar(kind.clone()));
    }
    let inject = pod.labels.get(INJECT).or_else(|| pod.annotations.get(INJECT));
    if inject.and_then(|value| parse_bool(value)) == Some(false) {
        return Some(Reason::InjectionRefused);
    }
    (!pod.annotations.contains_key(STATUS)).then_some(Reason::NotInjected)
}
