//! Whether a pod is redirected, and why or why not.

use super::values::parse_bool;
use crate::pod::{Container, Pod};
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
    LeaveAlone(SkipReason),
}

/// Why a pod is not redirected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SkipReason {
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

impl fmt::Display for SkipReason {
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

/// One rule that was looked at on the way to a decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsideredRule {
    /// What must hold for the pod to be redirected.
    pub wanted: &'static str,
    /// What the pod says of it.
    pub found: String,
    /// Whether it holds; the first that does not decides.
    pub holds: bool,
}

/// One of Istio's rules.
struct DecisionRule {
    wanted: &'static str,
    found: fn(&Pod) -> String,
    why_not: fn(&Pod) -> Option<SkipReason>,
}

/// In Istio's order.
const RULES: [DecisionRule; 7] = [
    DecisionRule {
        wanted: "a network of its own",
        found: |pod| format!("hostNetwork is {}", pod.host_network),
        why_not: |pod| pod.host_network.then_some(SkipReason::HostNetwork),
    },
    DecisionRule {
        wanted: "nobody else redirects it",
        found: |pod| match pod.all_containers().any(is_istio_init) {
            true => "a container is named istio-init".to_owned(),
            false => "no container is named istio-init".to_owned(),
        },
        why_not: |pod| pod.all_containers().any(is_istio_init).then_some(SkipReason::IstioInit),
    },
    DecisionRule {
        wanted: "a container istio-proxy",
        found: |pod| {
            let names: Vec<&str> = pod.all_containers().map(|c| c.name.as_str()).collect();
            format!("containers {}", names.join(", "))
        },
        why_not: |pod| pod.proxy().is_none().then_some(SkipReason::NoProxy),
    },
    DecisionRule {
        wanted: "the proxy takes what is redirected",
        found: |pod| said("DISABLE_ENVOY", pod.proxy().and_then(|proxy| proxy.env("DISABLE_ENVOY"))),
        why_not: |pod| {
            let disabled = pod.proxy()?.env("DISABLE_ENVOY").and_then(parse_bool);
            (disabled == Some(true)).then_some(SkipReason::EnvoyDisabled)
        },
    },
    DecisionRule {
        wanted: "the proxy is a sidecar",
        found: |pod| match pod.proxy().map(|proxy| proxy.args.as_slice()).unwrap_or_default() {
            [] => "istio-proxy has no args".to_owned(),
            args => format!("args start with {}", args.iter().take(2).cloned().collect::<Vec<_>>().join(" ")),
        },
        why_not: |pod| match pod.proxy()?.args.as_slice() {
            [first, kind, ..] if first == "proxy" && !matches!(kind.as_str(), "" | "sidecar") => {
                Some(SkipReason::NotASidecar(kind.clone()))
            }
            _ => None,
        },
    },
    DecisionRule {
        wanted: "injection is not refused",
        found: |pod| said(INJECT, inject(pod).map(|(_, value)| value)),
        why_not: |pod| {
            (inject(pod).and_then(|(_, value)| parse_bool(value)) == Some(false))
                .then_some(SkipReason::InjectionRefused)
        },
    },
    DecisionRule {
        wanted: "Istio's injector has seen it",
        found: |pod| match pod.annotations.contains_key(STATUS) {
            true => format!("annotation {STATUS} is there"),
            false => format!("there is no annotation {STATUS}"),
        },
        why_not: |pod| (!pod.annotations.contains_key(STATUS)).then_some(SkipReason::NotInjected),
    },
];

fn is_istio_init(container: &Container) -> bool {
    container.name == "istio-init"
}

/// The label or, if it is missing, the annotation: for messages, and its value.
pub(super) fn inject(pod: &Pod) -> Option<(Inject, &str)> {
    let label = pod.labels.get(INJECT).map(|value| (Inject("label"), value.as_str()));
    label.or_else(|| Some((Inject("annotation"), pod.annotations.get(INJECT)?)))
}

/// What of a pod has the key `sidecar.istio.io/inject`.
pub(super) struct Inject(&'static str);

impl fmt::Display for Inject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {INJECT:?}", self.0)
    }
}

fn said(key: &str, value: Option<&str>) -> String {
    value.map_or_else(|| format!("{key} is not set"), |value| format!("{key} is {value:?}"))
}

/// Which of Istio's rows a pod falls into; the first that matches counts.
pub(super) fn decide(pod: &Pod) -> Decision {
    why_not(pod).map_or(Decision::Redirect, Decision::LeaveAlone)
}

fn why_not(pod: &Pod) -> Option<SkipReason> {
    RULES.iter().find_map(|rule| (rule.why_not)(pod))
}

/// Every rule up to the one that decides, for people.
#[must_use]
pub fn considered(pod: &Pod) -> Vec<ConsideredRule> {
    let decides = RULES.iter().position(|rule| (rule.why_not)(pod).is_some());
    let seen = decides.map_or(RULES.len(), |index| index + 1);
    let look = |rule: &DecisionRule| ConsideredRule {
        wanted: rule.wanted,
        found: (rule.found)(pod),
        holds: (rule.why_not)(pod).is_none(),
    };
    RULES[..seen].iter().map(look).collect()
}

#[cfg(test)]
mod tests {
    use super::super::scenario::{container, meshed_pod};
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

    /// A row: what it is, how the pod differs from an injected one, why it is left alone.
    type Row = (&'static str, fn(&mut Pod), Option<SkipReason>);

    fn rows() -> Vec<Row> {
        vec![
            ("injected", |_| (), None),
            ("the node's network", |p| p.host_network = true, Some(SkipReason::HostNetwork)),
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
    fn each_row() {
        for (row, change, reason) in rows() {
            let mut pod = meshed_pod();
            change(&mut pod);
            assert_eq!(why_not(&pod), reason, "{row}");
            let seen = considered(&pod);
            let (last, before) = seen.split_last().expect("a rule");
            assert!(before.iter().all(|rule| rule.holds), "{row}: {seen:?}");
            assert_eq!(last.holds, reason.is_none(), "{row}: {seen:?}");
        }
    }

    #[test]
    fn the_first_row_that_matches_counts() {
        let mut pod = meshed_pod();
        let from_the_last_row_up = [
            "not injected",
            "label false",
            "a gateway",
            "DISABLE_ENVOY",
            "no proxy",
            "istio-init",
            "the node's network",
        ];
        for name in from_the_last_row_up {
            let (_, change, reason) = rows().into_iter().find(|(row, ..)| *row == name).expect(name);
            change(&mut pod);
            assert_eq!(why_not(&pod), reason, "{name}");
        }
    }

    #[test]
    fn the_label_wins_over_the_annotation() {
        let mut pod = meshed_pod();
        annotation(&mut pod, "false");
        label(&mut pod, "true");
        assert_eq!(decide(&pod), Decision::Redirect);
        label(&mut pod, "whatever");
        assert_eq!(decide(&pod), Decision::Redirect);
    }

    #[test]
    fn a_native_sidecar_counts() {
        let mut pod = meshed_pod();
        let proxy = pod.containers.pop().expect("a proxy");
        pod.init_containers.push(Container { restarts_always: true, ..proxy });
        assert_eq!(decide(&pod), Decision::Redirect);
    }

    #[test]
    fn every_reason_is_one_line_of_its_own() {
        let reasons = [
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
        assert_eq!(lines.len(), 10);
        assert!(lines.iter().all(|line| line.contains("redirected: ") && !line.contains('\n')), "{lines:?}");
        assert!(lines.iter().any(|line| line.contains("\"router\"")));
    }
}
