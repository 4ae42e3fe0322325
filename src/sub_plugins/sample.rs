//! Pods for tests.

use crate::pod::{Container, Facts, Namespace, Pod};

/// An injected pod as Istio leaves it: `cart-1` of namespace `shop`, an application and a sidecar.
pub(super) fn meshed_pod() -> Pod {
    let proxy = Container { args: vec!["proxy".into(), "sidecar".into()], ..container("istio-proxy", Some(1337)) };
    Pod {
        namespace: "shop".into(),
        name: "cart-1".into(),
        annotations: [("sidecar.istio.io/status".to_owned(), "{}".to_owned())].into(),
        containers: vec![container("app", Some(1000)), proxy],
        ..Pod::default()
    }
}

/// A container that runs as `user`, and as a group of the same number.
pub(super) fn container(name: &str, user: Option<i64>) -> Container {
    Container { name: name.into(), run_as_user: user, run_as_group: user, ..Container::default() }
}

/// A pod, and its namespace with these annotations.
pub(super) fn facts(pod: Pod, annotations: &[(&str, &str)]) -> Facts {
    let annotations = annotations.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let namespace = Namespace { name: pod.namespace.clone(), annotations };
    Facts { pod, namespace: Some(namespace) }
}
