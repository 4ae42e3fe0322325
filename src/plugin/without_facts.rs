//! Which pods wait for their facts, and what happens to a pod whose facts are unavailable: after a reboot, the runtime
//! calls the plugin before the node's agent runs. The annotations that the container runtime passes show whether Istio's
//! injector has processed the pod. A pod without the injector's annotation has no sidecar, so it starts at once.

use crate::cni::{Block, Error, NetConf};
use crate::pod::PodRef;
use crate::pod::well_known::INJECTION_STATUS;
use crate::sub_plugins::{self, guards};

/// Returns whether Istio's injector has processed the pod, according to the container runtime; `None` if the runtime
/// passes no annotations.
pub(super) fn is_injected(conf: &NetConf) -> Option<bool> {
    conf.pod_annotations().map(|annotations| annotations.contains_key(INJECTION_STATUS))
}

/// Who is asked for the facts of a pod when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// Nothing: they have no effect.
    Nothing,
    /// The agent's memory, for a fraction of a second: whether the pod is in the ambient mesh. Without an answer, the pod
    /// starts without rules, and the agent adds its exclusions later.
    Memory,
    /// All sources, within the configured timeout: the pod waits.
    All,
}

/// Returns who is asked for the facts of a pod with the sub-plugins in `chain`.
pub(super) fn asked(conf: &NetConf, chain: &[Block]) -> Asked {
    // With the guard, every pod waits, because only labels show whether it is in the ambient mesh.
    if is_injected(conf) != Some(false) || guards(chain).next().is_some() {
        return Asked::All;
    }
    // Only exclusions apply to pods in the ambient mesh, which also depends on their namespaces.
    if sub_plugins::wants(chain).namespace { Asked::Memory } else { Asked::Nothing }
}

/// Checks that a pod without facts can start: that its annotations from the runtime show that it is not redirected.
/// `error` is the reason why there are no facts. Returns a line that explains it.
///
/// # Errors
/// `error`, with the pod's name.
pub(super) fn check(pod: &PodRef, conf: &NetConf, error: Error) -> Result<String, Error> {
    let no_facts = || format!("its facts are unavailable: {error}");
    if let Some(why) = not_injected(conf, no_facts) {
        return Ok(why);
    }
    let mut error = error.of_pod(&pod.namespace, &pod.name);
    if is_injected(conf) == Some(true) {
        let separator = if error.details.is_empty() { "" } else { "; " };
        error.details += &format!(
            "{separator}the pod has a sidecar (annotation {INJECTION_STATUS}), so it starts only with its rules; the \
             runtime retries"
        );
    }
    Err(error)
}

/// Returns a line that explains that the pod is not redirected, if the annotations from the runtime show it. `cause` is
/// why only these annotations are known.
pub(super) fn not_injected(conf: &NetConf, cause: impl FnOnce() -> String) -> Option<String> {
    (is_injected(conf) == Some(false) && guards(&conf.chain).next().is_none()).then(|| {
        let cause = cause();
        format!("not redirected: annotation {INJECTION_STATUS} is missing according to the container runtime; {cause}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, Code};
    use serde_json::{Value, json};

    fn conf(annotations: Option<Value>) -> NetConf {
        let mut conf = json!({"name": "n", "type": "detour"});
        if let Some(annotations) = annotations {
            conf["runtimeConfig"] = json!({"io.kubernetes.cri.pod-annotations": annotations});
        }
        NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("accepted")
    }

    fn decided(annotations: Option<Value>, error: Error) -> Result<String, Error> {
        let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: None };
        check(&pod, &conf(annotations), error)
    }

    fn down() -> Error {
        Error::new(Code::TryAgain, "pod shop/web-0: GET …: no usable answer")
            .with_details("connection refused")
            .naming_pod()
    }

    #[test]
    fn a_pod_that_the_injector_has_not_processed_starts_without_facts() {
        for annotations in [json!({}), json!({"k8s.v1.cni.cncf.io/networks": "a", "detour.io/exclude-uids": "7"})] {
            let why = decided(Some(annotations), down()).expect("it starts");
            for part in ["sidecar.istio.io/status is missing", "container runtime", "connection refused"] {
                assert!(why.contains(part), "{why}");
            }
        }
    }

    #[test]
    fn other_pods_fail_with_their_name_and_the_cause() {
        // Istio's rule is about the annotation, not its value.
        for value in ["{}", ""] {
            let error = decided(Some(json!({"sidecar.istio.io/status": value})), down()).expect_err("it waits");
            assert_eq!((error.code, &error.msg), (Code::TryAgain, &down().msg));
            assert!(error.details.starts_with("connection refused; the pod has a sidecar"), "{error}");
        }
        assert_eq!(decided(None, down()), Err(down()));
        let error = decided(None, Error::new(Code::InvalidConfig, "kubeconfig /k: empty")).expect_err("it waits");
        assert_eq!(error.msg, "pod shop/web-0: kubeconfig /k: empty");
    }

    #[test]
    fn only_a_pod_that_the_injector_has_processed_waits() {
        let annotations = || [Some(json!({"a": "b"})), Some(json!({"sidecar.istio.io/status": "{}"})), None];
        let asked_of = |chain: Value| {
            annotations().map(|annotations| {
                let mut conf = json!({"name": "n", "type": "detour", "chain": chain});
                if let Some(annotations) = annotations {
                    conf["runtimeConfig"] = json!({"io.kubernetes.cri.pod-annotations": annotations});
                }
                let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("accepted");
                asked(&conf, &conf.chain)
            })
        };
        let redirect = json!({"type": "istio-redirect"});
        assert_eq!(asked_of(json!([redirect])), [Asked::Nothing, Asked::All, Asked::All]);
        let exclude = json!({"type": "uid-exclude", "uids": ["1337"]});
        assert_eq!(asked_of(json!([redirect, exclude])), [Asked::Memory, Asked::All, Asked::All]);
        assert_eq!(asked_of(json!([exclude])), [Asked::Memory, Asked::All, Asked::All]);
    }
}
