//! `CNI_ARGS`: what the runtime tells of the pod.

use super::names::{is_dns_label, is_dns_subdomain};
use super::{Code, Error};
use crate::pod::PodRef;
use std::collections::HashMap;

/// The keys that kubelet's runtimes pass. Others are ignored, whatever `IgnoreUnknown` says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    /// The pod, where both its name and its namespace are there.
    pub pod: Option<PodRef>,
    /// `K8S_POD_INFRA_CONTAINER_ID`: the sandbox's ID.
    pub infra_container_id: Option<String>,
}

impl Args {
    /// Reads `KEY=VALUE;…`. Of a key that is there twice the last counts: Multus writes its own
    /// and then appends what it was given (multus-cni, `pkg/multus`). A value may contain `=`.
    ///
    /// # Errors
    /// An item has no `=`, or the pod's name or namespace is none that Kubernetes allows: they go
    /// into URLs and paths.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut values = HashMap::new();
        for item in text.split(';').filter(|item| !item.is_empty()) {
            let Some((key, value)) = item.split_once('=') else {
                return Err(refuse_args(format!("CNI_ARGS: {item:?} is not accepted; accepted: KEY=VALUE, separated by ;")));
            };
            values.insert(key, value);
        }
        let value = |key: &str| values.get(key).filter(|v| !v.is_empty()).map(|v| (*v).to_owned());
        let name = value("K8S_POD_NAME");
        let namespace = value("K8S_POD_NAMESPACE");
        if let Some(name) = name.as_ref().filter(|name| !is_dns_subdomain(name)) {
            let accepted = "lower case letters, digits, - and ., at most 253 (an RFC 1123 subdomain)";
            return Err(refuse_args(format!("CNI_ARGS: K8S_POD_NAME {name:?} is not accepted; accepted: {accepted}")));
        }
        if let Some(namespace) = namespace.as_ref().filter(|namespace| !is_dns_label(namespace)) {
            let accepted = "lower case letters, digits and -, at most 63 (an RFC 1123 label)";
            let msg = format!("CNI_ARGS: K8S_POD_NAMESPACE {namespace:?} is not accepted; accepted: {accepted}");
            return Err(refuse_args(msg));
        }
        let uid = value("K8S_POD_UID");
        let pod = namespace.zip(name).map(|(namespace, name)| PodRef { namespace, name, uid });
        Ok(Self { pod, infra_container_id: value("K8S_POD_INFRA_CONTAINER_ID") })
    }
}

fn refuse_args(msg: String) -> Error {
    Error::new(Code::Environment, msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(text: &str) -> Option<PodRef> {
        Args::parse(text).expect("accepted").pod
    }

    #[test]
    fn what_kubelets_runtimes_pass() {
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns1;K8S_POD_NAME=p.q;K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=u";
        let args = Args::parse(args).expect("accepted");
        assert_eq!(args.pod, Some(PodRef { namespace: "ns1".into(), name: "p.q".into(), uid: Some("u".into()) }));
        assert_eq!(args.infra_container_id.as_deref(), Some("c"));
    }

    #[test]
    fn a_pod_has_a_name_and_a_namespace() {
        assert_eq!(pod(""), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=a"), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=;K8S_POD_NAME=b"), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=a;K8S_POD_NAME="), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=;").expect("a pod").uid, None);
    }

    #[test]
    fn the_last_of_a_repeated_key_counts_and_unknown_ones_do_not_matter() {
        let pod = pod("K8S_POD_NAME=a;IgnoreUnknown=0;FOO=x=y=;K8S_POD_NAMESPACE=n;K8S_POD_NAME=b").expect("a pod");
        assert_eq!(pod.name, "b");
        assert_eq!(
            Args::parse("K8S_POD_UID=a=b;K8S_POD_NAME=n;K8S_POD_NAMESPACE=m")
                .expect("accepted")
                .pod
                .expect("a pod")
                .uid
                .as_deref(),
            Some("a=b")
        );
    }

    #[test]
    fn errors_name_the_item() {
        for (text, named) in [
            ("K8S_POD_NAME=a;FOO;B=c", r#""FOO""#),
            ("K8S_POD_NAME=../../x", "K8S_POD_NAME"),
            ("K8S_POD_NAME=a b", "K8S_POD_NAME"),
            ("K8S_POD_NAMESPACE=a.b", "K8S_POD_NAMESPACE"),
            ("K8S_POD_NAMESPACE=A", "K8S_POD_NAMESPACE"),
        ] {
            let error = Args::parse(text).expect_err("refused");
            assert_eq!(error.code, Code::Environment);
            assert!(error.msg.contains(named), "{error}");
        }
    }
}
