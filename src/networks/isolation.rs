//! Which namespaces' definitions a pod may refer to.

use super::Selection;
use crate::cni::{Code, Error, Primary};

/// Refuses references to other namespaces' definitions where `namespaceIsolation` is on, but for
/// those in `globalNamespaces`. The default network's reference is the administrator's to check
/// (multus-cni: isolation is not applied to it).
///
/// # Errors
/// [`Code::InvalidConfig`] with the reference, both namespaces and what is accepted.
pub fn check_isolation(conf: &Primary, pod_namespace: &str, selections: &[Selection]) -> Result<(), Error> {
    let allowed = |namespace: &String| namespace == pod_namespace || conf.global_namespaces.contains(namespace);
    let refused = |selection: &&Selection| conf.namespace_isolation && !allowed(&selection.namespace);
    let Some(Selection { place, namespace, name, .. }) = selections.iter().find(refused) else { return Ok(()) };
    let mut accepted = vec![pod_namespace];
    accepted.extend(conf.global_namespaces.iter().map(String::as_str));
    let msg = format!(
        "{place}: {namespace}/{name}: definitions of namespace {namespace:?} are not for pods of {pod_namespace:?} \
         (namespaceIsolation); accepted: those of {}; put one there, or add the namespace to globalNamespaces",
        accepted.join(", ")
    );
    Err(Error::new(Code::InvalidConfig, msg))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, NetConf};
    use serde_json::{Value, json};

    /// Whether a pod of `shop` may refer to a definition of `namespace`.
    fn check(isolation: bool, global: Value, namespace: &str) -> Result<(), Error> {
        let conf = json!({
            "name": "n", "type": "detour", "clusterNetwork": "ovn",
            "namespaceIsolation": isolation, "globalNamespaces": global,
        });
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("a configuration");
        let own = Selection { namespace: "shop".into(), ..Selection::default() };
        let other =
            Selection { place: "P".into(), namespace: namespace.into(), name: "a".into(), ..Selection::default() };
        check_isolation(&conf.primary.expect("a primary plugin"), "shop", &[own, other])
    }

    #[test]
    fn own_and_global_namespaces_are_allowed() {
        for (isolation, global, namespace, fine) in [
            (false, Value::Null, "other", true),
            (true, Value::Null, "shop", true),
            (true, Value::Null, "default", true),
            (true, Value::Null, "other", false),
            (true, json!("other"), "other", true),
            (true, json!("a, other"), "other", true),
            (true, json!("other"), "default", false),
            (true, json!(""), "default", true),
        ] {
            assert_eq!(check(isolation, global.clone(), namespace).is_ok(), fine, "{isolation} {global} {namespace}");
        }
    }

    #[test]
    fn the_error_names_the_reference_and_what_is_accepted() {
        let error = check(true, Value::Null, "other").expect_err("isolated");
        assert_eq!(error.code, Code::InvalidConfig);
        let wanted = r#"P: other/a: definitions of namespace "other" are not for pods of "shop" (namespaceIsolation); accepted: those of shop, default; "#;
        assert!(error.msg.starts_with(wanted), "{error}");
    }
}
