//! Whether a pod is redirected or skipped, and why.

use super::ambient::EnrolledBy;
use super::values::parse_bool;
use crate::cni::NetConf;
use crate::pod::well_known::{DISABLE_ENVOY, INIT_CONTAINER, INJECT, INJECTION_STATUS};
use crate::pod::{Container, Pod, PodRef};
use serde::Serialize;
use std::fmt;

/// Whether this plugin redirects a pod. `Display` shows one line for logs and users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The pod's traffic is redirected to its sidecar.
    Redirect,
    /// The pod is skipped: it is not redirected, or another program redirects it.
    LeaveAlone(SkipReason),
}

/// Why a pod is not redirected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SkipReason {
    /// The pod is the node agent's, which must start before anything else works.
    AgentPod,
    /// The pod's namespace is in `exclude_namespaces`.
    NamespaceExcluded(String),
    /// `CNI_ARGS` names no pod.
    NoPodName,
    /// The chain has no sub-plugin.
    NoSubPlugin,
    /// The chain has no `istio-redirect`.
    NotInChain,
    /// The pod uses the host network: its rules would apply to the node.
    HostNetwork,
    /// The pod is in the ambient mesh: istio-cni redirects it to ztunnel.
    Ambient(EnrolledBy),
    /// The pod's `istio-init` container redirects it.
    IstioInit,
    /// `DISABLE_ENVOY` of the proxy is true: nothing would accept redirected traffic.
    EnvoyDisabled,
    /// The pod has no container `istio-proxy`.
    NoProxy,
    /// The proxy does not run as a sidecar but, for example, as a `router`: a gateway.
    NotASidecar(String),
    /// `sidecar.istio.io/inject` is false.
    InjectionRefused,
    /// Istio's injector has not processed the pod.
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

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AgentPod => f.write_str("the pod is the node agent's own"),
            Self::NamespaceExcluded(namespace) => write!(f, "namespace {namespace} is excluded"),
            Self::NoPodName => f.write_str("CNI_ARGS contains no pod name"),
            Self::NoSubPlugin => f.write_str("the sub-plugin chain is empty"),
            Self::NotInChain => f.write_str("istio-redirect is not in the sub-plugin chain"),
            Self::HostNetwork => f.write_str("the pod uses the host network (hostNetwork)"),
            Self::Ambient(enrolled_by) => {
                write!(f, "the pod is in the ambient mesh ({enrolled_by}): istio-cni redirects it to ztunnel")
            }
            Self::IstioInit => f.write_str("the pod's own istio-init container redirects it"),
            Self::EnvoyDisabled => f.write_str("DISABLE_ENVOY of container istio-proxy is true"),
            Self::NoProxy => f.write_str("no container is named istio-proxy"),
            Self::NotASidecar(kind) => write!(f, "istio-proxy runs as {kind:?}, not as a sidecar"),
            Self::InjectionRefused => write!(f, "{INJECT} is false"),
            Self::NotInjected => write!(f, "annotation {INJECTION_STATUS} is missing, so the sidecar was not injected"),
            Self::ModeNone => f.write_str("the interception mode is NONE"),
        }
    }
}

/// Returns why `pod` is skipped without any facts of it: it is the agent's, or its namespace is excluded.
#[must_use]
pub fn skip_reason(conf: &NetConf, pod: &PodRef) -> Option<SkipReason> {
    let kubernetes = &conf.kubernetes;
    let is_agent = kubernetes.agent_namespace.as_ref() == Some(&pod.namespace)
        && kubernetes.agent_pod_prefixes.iter().any(|prefix| pod.name.starts_with(prefix));
    if is_agent {
        return Some(SkipReason::AgentPod);
    }
    kubernetes.excludes(&pod.namespace).then(|| SkipReason::NamespaceExcluded(pod.namespace.clone()))
}

/// Returns why a pod with these facts is skipped: the first of Istio's rules that does not hold.
#[must_use]
pub fn pod_skip_reason(pod: &Pod) -> Option<SkipReason> {
    RULES.iter().find_map(|rule| (rule.skip_reason)(pod))
}

/// A rule that was considered for a decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConsideredRule {
    /// What must hold for the pod to be redirected.
    pub wanted: &'static str,
    /// The pod's value.
    pub found: String,
    /// Whether the rule holds. The first that does not hold decides.
    pub holds: bool,
}

/// Returns every rule up to the one that decides, for `explain`.
#[must_use]
pub fn considered(pod: &Pod) -> Vec<ConsideredRule> {
    let decisive = RULES.iter().position(|rule| (rule.skip_reason)(pod).is_some());
    let count = decisive.map_or(RULES.len(), |index| index + 1);
    let considered = |rule: &DecisionRule| ConsideredRule {
        wanted: rule.wanted,
        found: (rule.found)(pod),
        holds: (rule.skip_reason)(pod).is_none(),
    };
    RULES[..count].iter().map(considered).collect()
}

/// Returns the label `sidecar.istio.io/inject` or, if it is missing, the annotation: `label` or `annotation`, and its value.
pub(super) fn injection_request(pod: &Pod) -> Option<(&'static str, &str)> {
    let label = pod.labels.get(INJECT).map(|value| ("label", value));
    let (kind, value) = label.or_else(|| Some(("annotation", pod.annotations.get(INJECT)?)))?;
    Some((kind, value))
}

/// Returns whether the pod itself requests or refuses a sidecar (`sidecar.istio.io/inject`); `None` if it does neither.
#[must_use]
pub fn requested_injection(pod: &Pod) -> Option<bool> {
    injection_request(pod).and_then(|(_, value)| parse_bool(value))
}

/// One of istio-cni's rules for the decision.
struct DecisionRule {
    wanted: &'static str,
    found: fn(&Pod) -> String,
    skip_reason: fn(&Pod) -> Option<SkipReason>,
}

/// Istio's rules in Istio's order.
const RULES: [DecisionRule; 7] = [
    DecisionRule {
        wanted: "the pod has its own network",
        found: |pod| format!("hostNetwork is {}", pod.host_network),
        skip_reason: |pod| pod.host_network.then_some(SkipReason::HostNetwork),
    },
    DecisionRule {
        wanted: "no istio-init container redirects it",
        found: |pod| match pod.all_containers().any(is_istio_init) {
            true => "a container is named istio-init".to_owned(),
            false => "no container is named istio-init".to_owned(),
        },
        skip_reason: |pod| pod.all_containers().any(is_istio_init).then_some(SkipReason::IstioInit),
    },
    DecisionRule {
        wanted: "the pod has a container istio-proxy",
        found: |pod| {
            let names: Vec<&str> = pod.all_containers().map(|c| c.name.as_str()).collect();
            format!("containers {}", names.join(", "))
        },
        skip_reason: |pod| pod.proxy().is_none().then_some(SkipReason::NoProxy),
    },
    DecisionRule {
        wanted: "the proxy accepts redirected traffic",
        found: |pod| shown(DISABLE_ENVOY, pod.proxy().and_then(|proxy| proxy.env(DISABLE_ENVOY))),
        skip_reason: |pod| {
            let disabled = pod.proxy()?.env(DISABLE_ENVOY).and_then(parse_bool);
            (disabled == Some(true)).then_some(SkipReason::EnvoyDisabled)
        },
    },
    DecisionRule {
        wanted: "the proxy is a sidecar",
        found: |pod| match pod.proxy().map(|proxy| proxy.args.as_slice()).unwrap_or_default() {
            [] => "istio-proxy has no args".to_owned(),
            args => format!("args start with {}", args.iter().take(2).cloned().collect::<Vec<_>>().join(" ")),
        },
        skip_reason: |pod| match pod.proxy()?.args.as_slice() {
            [first, kind, ..] if first == "proxy" && !matches!(kind.as_str(), "" | "sidecar") => {
                Some(SkipReason::NotASidecar(kind.clone()))
            }
            _ => None,
        },
    },
    DecisionRule {
        wanted: "injection is not disabled",
        found: |pod| shown(INJECT, injection_request(pod).map(|(_, value)| value)),
        skip_reason: |pod| {
            (injection_request(pod).and_then(|(_, value)| parse_bool(value)) == Some(false))
                .then_some(SkipReason::InjectionRefused)
        },
    },
    DecisionRule {
        wanted: "Istio's injector has processed the pod",
        found: |pod| match pod.annotations.contains_key(INJECTION_STATUS) {
            true => format!("annotation {INJECTION_STATUS} is set"),
            false => format!("annotation {INJECTION_STATUS} is missing"),
        },
        skip_reason: |pod| (!pod.annotations.contains_key(INJECTION_STATUS)).then_some(SkipReason::NotInjected),
    },
];

fn is_istio_init(container: &Container) -> bool {
    container.name == INIT_CONTAINER
}

fn shown(key: &str, value: Option<&str>) -> String {
    value.map_or_else(|| format!("{key} is not set"), |value| format!("{key} is {value:?}"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::{container, meshed_pod};
    use super::*;

    fn proxy_env(pod: &mut Pod, name: &str, value: &str) {
        pod.containers[1].env.push((name.into(), value.into()));
    }

    fn proxy_args(pod: &mut Pod, args: &[&str]) {
        pod.containers[1].args = args.iter().map(|&arg| arg.to_owned()).collect();
    }

    fn label(pod: &mut Pod, value: &str) {
        pod.labels.insert(INJECT.into(), value.into());
    }

    fn annotation(pod: &mut Pod, value: &str) {
        pod.annotations.insert(INJECT.into(), value.into());
    }

    /// A row: what it is, how the pod differs from an injected one, why it is skipped.
    type Row = (&'static str, fn(&mut Pod), Option<SkipReason>);

    fn rows() -> Vec<Row> {
        vec![
            ("injected", |_| (), None),
            ("the host network", |p| p.host_network = true, Some(SkipReason::HostNetwork)),
            ("istio-init", |p| p.init_containers.push(container("istio-init", None)), Some(SkipReason::IstioInit)),
            (
                "istio-init among containers",
                |p| p.containers.push(container("istio-init", None)),
                Some(SkipReason::IstioInit),
            ),
            ("istio-validation", |p| p.init_containers.push(container("istio-validation", None)), None),
            ("DISABLE_ENVOY", |p| proxy_env(p, "DISABLE_ENVOY", "T"), Some(SkipReason::EnvoyDisabled)),
            ("DISABLE_ENVOY false", |p| proxy_env(p, "DISABLE_ENVOY", "false"), None),
            ("DISABLE_ENVOY no boolean", |p| proxy_env(p, "DISABLE_ENVOY", "yes"), None),
            ("no proxy", |p| p.containers.truncate(1), Some(SkipReason::NoProxy)),
            ("a gateway", |p| proxy_args(p, &["proxy", "router"]), Some(SkipReason::NotASidecar("router".into()))),
            ("no kind of proxy", |p| proxy_args(p, &["proxy"]), None),
            ("an empty kind of proxy", |p| proxy_args(p, &["proxy", ""]), None),
            ("other arguments", |p| proxy_args(p, &["istio-iptables", "router"]), None),
            ("no arguments", |p| proxy_args(p, &[]), None),
            ("label false", |p| label(p, "false"), Some(SkipReason::InjectionRefused)),
            ("label 0", |p| label(p, "0"), Some(SkipReason::InjectionRefused)),
            ("label no boolean", |p| label(p, "disabled"), None),
            ("annotation false", |p| annotation(p, "F"), Some(SkipReason::InjectionRefused)),
            ("annotation true", |p| annotation(p, "true"), None),
            ("not injected", |p| p.annotations.clear(), Some(SkipReason::NotInjected)),
        ]
    }

    #[test]
    fn each_rule_gives_its_reason() {
        for (row, change, reason) in rows() {
            let mut pod = meshed_pod();
            change(&mut pod);
            assert_eq!(pod_skip_reason(&pod), reason, "{row}");
            let seen = considered(&pod);
            let (last, before) = seen.split_last().expect("a rule");
            assert!(before.iter().all(|rule| rule.holds), "{row}: {seen:?}");
            assert_eq!(last.holds, reason.is_none(), "{row}: {seen:?}");
        }
    }

    #[test]
    fn the_first_rule_that_does_not_hold_decides() {
        let mut pod = meshed_pod();
        let from_the_last_row_up =
            ["not injected", "label false", "a gateway", "DISABLE_ENVOY", "no proxy", "istio-init", "the host network"];
        for name in from_the_last_row_up {
            let (_, change, reason) = rows().into_iter().find(|(row, ..)| *row == name).expect(name);
            change(&mut pod);
            assert_eq!(pod_skip_reason(&pod), reason, "{name}");
        }
    }

    #[test]
    fn the_label_overrides_the_annotation() {
        let mut pod = meshed_pod();
        annotation(&mut pod, "false");
        label(&mut pod, "true");
        assert_eq!(pod_skip_reason(&pod), None);
        label(&mut pod, "any-value");
        assert_eq!(pod_skip_reason(&pod), None);
    }

    #[test]
    fn a_native_sidecar_is_redirected() {
        let mut pod = meshed_pod();
        let proxy = pod.containers.pop().expect("a proxy");
        pod.init_containers.push(Container { restarts_always: true, ..proxy });
        assert_eq!(pod_skip_reason(&pod), None);
    }

    #[test]
    fn every_reason_has_its_own_line() {
        let reasons = [
            SkipReason::AgentPod,
            SkipReason::NamespaceExcluded("kube-system".into()),
            SkipReason::NoPodName,
            SkipReason::NoSubPlugin,
            SkipReason::NotInChain,
            SkipReason::HostNetwork,
            SkipReason::IstioInit,
            SkipReason::EnvoyDisabled,
            SkipReason::NoProxy,
            SkipReason::NotASidecar("router".into()),
            SkipReason::InjectionRefused,
            SkipReason::NotInjected,
            SkipReason::ModeNone,
        ];
        let decisions = reasons.into_iter().map(Decision::LeaveAlone).chain([Decision::Redirect]);
        let lines: std::collections::BTreeSet<String> = decisions.map(|d| d.to_string()).collect();
        assert_eq!(lines.len(), 14);
        assert!(lines.iter().all(|line| line.contains("redirected: ") && !line.contains('\n')), "{lines:?}");
        assert!(lines.iter().any(|line| line.contains("\"router\"")));
    }
}
