//! Whether Multus runs a configuration that is installed as a file for a pod.

use super::annotations::{default_network, networks};
use super::configuration::RunnableConfiguration;
use super::element::Selection;
use crate::cluster::{Definition, Lookup, ObjectRef};
use crate::cni::{Error, GLOBAL_NAMESPACE, OWN_TYPES, SYSTEM_NAMESPACE};
use crate::pod::Pod;

/// How a pod uses the network of an installed configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstalledNetwork {
    /// Multus runs the configuration: the pod selects a definition with its name that has no configuration.
    Runs,
    /// The pod selects this definition with its name; whether it exists and has a configuration is unknown.
    Unknown(ObjectRef),
    /// The pod selects this definition with its name, which has another configuration, with plugins of these types.
    HasOwn(ObjectRef, Vec<String>),
    /// The pod selects this definition with its name, which does not exist.
    Missing(ObjectRef),
    /// The pod selects no definition with its name.
    NotSelected,
}

/// Returns how `pod` uses the installed configuration `name`. `look_up` returns a definition, or `None` if it can't be
/// looked up.
///
/// # Errors
/// An annotation that selects networks is malformed.
pub fn installed_network(
    pod: &Pod,
    name: &str,
    look_up: &dyn Fn(&ObjectRef) -> Option<Lookup>,
) -> Result<InstalledNetwork, Error> {
    let mut selected = networks(pod)?.elements;
    selected.append(&mut default_network(pod, SYSTEM_NAMESPACE)?.elements);
    // The last one counts: a definition outside the shared namespaces, which may not exist.
    selected.sort_by_key(|one| ![GLOBAL_NAMESPACE, SYSTEM_NAMESPACE].contains(&one.namespace.as_str()));
    let mut found = InstalledNetwork::NotSelected;
    for Selection { namespace, name, .. } in selected.into_iter().filter(|one| one.name == name) {
        let object = ObjectRef { namespace, name };
        found = match look_up(&object) {
            Some(Lookup::Found(definition)) if definition.config.trim().is_empty() => {
                return Ok(InstalledNetwork::Runs);
            }
            Some(Lookup::Found(definition)) => InstalledNetwork::HasOwn(object, types(&definition)),
            Some(Lookup::Missing(_)) => InstalledNetwork::Missing(object),
            None => InstalledNetwork::Unknown(object),
        };
    }
    Ok(found)
}

/// Returns whether Multus runs this plugin with the definition's own configuration.
#[must_use]
pub fn runs_own_type(definition: &Definition) -> bool {
    types(definition).iter().any(|kind| OWN_TYPES.contains(&kind.as_str()))
}

/// Returns the types of the plugins in the definition's own configuration; none if it is missing or invalid.
fn types(definition: &Definition) -> Vec<String> {
    let own = RunnableConfiguration::parse("spec.config", &definition.config, Some(&definition.object.name));
    own.iter().flat_map(RunnableConfiguration::types).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};

    fn of(annotations: &[(&str, &str)], definitions: Option<&[(&str, &str)]>) -> Result<InstalledNetwork, Error> {
        let annotations = annotations.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        let pod = Pod { namespace: "shop".into(), name: "web".into(), annotations, ..Pod::default() };
        installed_network(&pod, "istio-cni", &|object| {
            let found = definitions?.iter().find(|(namespace, _)| *namespace == object.namespace);
            Some(found.map_or_else(
                || Lookup::Missing("not found".into()),
                |(_, config)| {
                    let (object, config) = (object.clone(), (*config).to_owned());
                    Lookup::Found(Definition { object, config, ..Definition::default() })
                },
            ))
        })
    }

    fn object(namespace: &str) -> ObjectRef {
        ObjectRef { namespace: namespace.into(), name: "istio-cni".into() }
    }

    #[test]
    fn a_definition_without_a_configuration_uses_the_installed_one() {
        let own = r#"{"plugins": [{"type": "bridge"}, {"type": "tuning"}]}"#;
        let definitions = [("default", " \n"), ("pay", own), ("kube-system", "")];
        let of_networks = |text: &str| of(&[(NETWORKS, text)], Some(&definitions)).expect("valid");
        let has_own = InstalledNetwork::HasOwn(object("pay"), vec!["bridge".into(), "tuning".into()]);
        for (text, expected) in [
            ("default/istio-cni", InstalledNetwork::Runs),
            ("[{\"name\": \"istio-cni\", \"namespace\": \"default\"}]", InstalledNetwork::Runs),
            ("istio-cni", InstalledNetwork::Missing(object("shop"))),
            ("pay/istio-cni", has_own),
            ("pay/istio-cni, default/istio-cni@net7, istio-cni", InstalledNetwork::Runs),
            ("default/other", InstalledNetwork::NotSelected),
            ("", InstalledNetwork::NotSelected),
        ] {
            assert_eq!(of_networks(text), expected, "{text}");
        }
        let default = |text: &str| of(&[(DEFAULT_NETWORK, text)], Some(&definitions)).expect("valid");
        assert_eq!(default("istio-cni"), InstalledNetwork::Runs, "in kube-system");
        assert_eq!(default("shop/istio-cni"), InstalledNetwork::Missing(object("shop")));
    }

    #[test]
    fn without_definitions_the_name_alone_is_known() {
        for text in ["istio-cni", "istio-cni,default/istio-cni", "default/istio-cni,istio-cni"] {
            assert_eq!(of(&[(NETWORKS, text)], None), Ok(InstalledNetwork::Unknown(object("shop"))), "{text}");
        }
        assert_eq!(of(&[], None), Ok(InstalledNetwork::NotSelected));
        assert!(of(&[(NETWORKS, "[broken")], None).is_err());
    }
}
