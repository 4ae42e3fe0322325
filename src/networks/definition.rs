//! The configuration of a NetworkAttachmentDefinition, and whether Multus runs an installed file for it.

use super::annotations::Selection;
use super::annotations::{default_network, networks};
use super::configuration::RunnableConfiguration;
use super::files;
use crate::cluster::{Definition, Lookup, ObjectRef};
use crate::cni::{Code, Error, GLOBAL_NAMESPACE, OWN_TYPES, SYSTEM_NAMESPACE, at_most};
use crate::pod::Pod;
use crate::pod::well_known::RESOURCE_NAME;
use std::path::Path;

/// Limit of plugins in a definition: each is a process.
const MAX_PLUGINS: usize = 100;

/// Returns the configuration of a definition: its own, or if it has none the one with its name in `conf_dir`. A
/// configuration without a name gets the definition's.
///
/// # Errors
/// [`Code::InvalidConfig`] with the definition, the key and the expected value: the configuration is missing or invalid,
/// or it requests a device from a device plugin.
pub fn configuration(
    definition: &Definition,
    conf_dir: &Path,
    warnings: &mut Vec<String>,
) -> Result<RunnableConfiguration, Error> {
    let place = format!("NetworkAttachmentDefinition {}", definition.object);
    if let Some(resource) = definition.resource_name().filter(|resource| !resource.is_empty()) {
        let msg = format!(
            "{place}: annotation {RESOURCE_NAME:?} requests a device of {resource:?}: device plugins are not supported; \
             remove the annotation, or use Multus for this pod's networks"
        );
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if definition.config.len() > Definition::MAX_CONFIG {
        let msg = format!("{place}: spec.config: expected at most {} bytes, got more", Definition::MAX_CONFIG);
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if definition.config.trim().is_empty() {
        files::named(conf_dir, &definition.object.name, warnings).map_err(|error| Error {
            msg: format!("{place}: spec.config is empty, searched confDir: {}", error.msg),
            ..error
        })
    } else {
        let place = format!("{place}: spec.config");
        let configuration = RunnableConfiguration::parse(&place, &definition.config, Some(&definition.object.name))?;
        at_most(MAX_PLUGINS, "plugins", &place, configuration.plugins.len())?;
        Ok(configuration)
    }
}

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
            Some(Lookup::Found(definition)) => InstalledNetwork::HasOwn(object, plugin_types(&definition)),
            Some(Lookup::Missing(_)) => InstalledNetwork::Missing(object),
            None => InstalledNetwork::Unknown(object),
        };
    }
    Ok(found)
}

/// Returns whether Multus runs this plugin with the definition's own configuration.
#[must_use]
pub fn runs_own_type(definition: &Definition) -> bool {
    plugin_types(definition).iter().any(|kind| OWN_TYPES.contains(&kind.as_str()))
}

/// Returns the types of the plugins in the definition's own configuration; none if it is missing or invalid.
#[must_use]
pub fn plugin_types(definition: &Definition) -> Vec<String> {
    let own = RunnableConfiguration::parse("spec.config", &definition.config, Some(&definition.object.name));
    own.iter().flat_map(RunnableConfiguration::types).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};

    fn definition(config: &str) -> Definition {
        let object = ObjectRef { namespace: "shop".into(), name: "a.b".into() };
        Definition { object, config: config.into(), ..Definition::default() }
    }

    fn read(definition: &Definition) -> Result<RunnableConfiguration, Error> {
        configuration(definition, Path::new("/absent"), &mut Vec::new())
    }

    #[test]
    fn a_configuration_without_a_name_gets_the_definitions() {
        let read = read(&definition("{\"type\":\"bridge\"}")).expect("accepted");
        assert_eq!((&*read.name, &*read.text), ("a.b", "{\"name\":\"a.b\",\"type\":\"bridge\"}"));
    }

    #[test]
    fn errors_contain_the_definition_and_the_key() {
        for (config, wanted) in [
            ("{", "NetworkAttachmentDefinition shop/a.b: spec.config: invalid JSON: EOF"),
            ("{\"type\":\"/bin/sh\"}", "NetworkAttachmentDefinition shop/a.b: spec.config.type: "),
            ("", "NetworkAttachmentDefinition shop/a.b: spec.config is empty, searched confDir: /absent can't be read"),
            (" \n", "NetworkAttachmentDefinition shop/a.b: spec.config is empty, searched confDir: /absent"),
        ] {
            let error = read(&definition(config)).expect_err(config);
            assert!(error.code == Code::InvalidConfig && error.msg.starts_with(wanted), "{error}");
        }
    }

    #[test]
    fn a_configuration_that_is_too_large_is_rejected() {
        let padded =
            |length: usize| format!("{{\"type\":\"bridge\"{}}}", " ".repeat(length - "{\"type\":\"bridge\"}".len()));
        assert!(read(&definition(&padded(Definition::MAX_CONFIG))).is_ok());
        let error = read(&definition(&padded(Definition::MAX_CONFIG + 1))).expect_err("refused");
        let wanted = "NetworkAttachmentDefinition shop/a.b: spec.config: expected at most 262144 bytes, got more";
        assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
    }

    #[test]
    fn a_definition_with_too_many_plugins_is_rejected() {
        let list = |plugins: usize| format!("{{\"plugins\":[{}]}}", vec!["{\"type\":\"a\"}"; plugins].join(","));
        assert_eq!(read(&definition(&list(MAX_PLUGINS))).expect("accepted").plugins.len(), MAX_PLUGINS);
        let error = read(&definition(&list(MAX_PLUGINS + 1))).expect_err("too many");
        let place = "NetworkAttachmentDefinition shop/a.b: spec.config";
        assert_eq!(error.msg, format!("{place}: expected at most 100 plugins, got 101"));
    }

    #[test]
    fn devices_are_rejected() {
        let mut sriov = definition("{\"type\":\"sriov\"}");
        sriov.annotations.insert(RESOURCE_NAME.into(), "intel.com/sriov".into());
        let error = read(&sriov).expect_err("a device");
        assert!(
            error.code == Code::InvalidConfig && error.msg.contains("\"intel.com/sriov\": device plugins"),
            "{error}"
        );
        sriov.annotations.insert(RESOURCE_NAME.into(), String::new());
        assert!(read(&sriov).is_ok());
    }

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
