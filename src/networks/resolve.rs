//! Resolution of the networks that a configuration and a pod's annotations name: each gets its definition or file, and
//! the name of its interface. Definitions of other namespaces may be forbidden (`namespaceIsolation`). And whether Multus runs
//! an installed file for a definition.

use super::annotations::{Selection, default_network, networks};
use super::configuration::RunnableConfiguration;
use super::files;
use super::interfaces::{check_default_routes, interface_names};
use super::status::no_network_found;
use crate::cluster::{Cluster, Definition, DefinitionQuery, Definitions, Lookup, ObjectRef};
use crate::cni::{
    Code, DefaultNetwork, Error, GLOBAL_NAMESPACE, NetworkName, OWN_TYPES, Primary, SYSTEM_NAMESPACE, at_most,
};
use crate::pod::Pod;
use crate::pod::well_known::RESOURCE_NAME;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A network of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// The name for users: `NAMESPACE/NAME` of its definition, or its configuration's name.
    pub name: String,
    /// The name of its interface.
    pub interface: String,
    /// The pod's selection; `None` if the configuration names the network.
    pub selection: Option<Selection>,
    /// Its configuration.
    pub configuration: RunnableConfiguration,
}

/// The networks of a pod in the order in which they are added, the default network first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodNetworks {
    /// At least one.
    pub networks: Vec<PodNetwork>,
    /// Ignored parts of annotations and files, one line each.
    pub warnings: Vec<String>,
}

/// A reference to a network whose configuration is not yet resolved.
struct Reference<'a> {
    /// Where it was written, for messages.
    place: String,
    source: Source<'a>,
    /// The element of the pod's annotations; `None` if the reference is part of the configuration.
    selection: Option<Selection>,
}

/// What a reference refers to.
enum Source<'a> {
    /// An element of `delegates`.
    Delegate(&'a Value),
    File(&'a Path),
    /// A definition. A reference in the configuration can also mean a file with this name in `confDir`.
    Definition(ObjectRef),
}

/// Resolves and checks all networks of a pod before the first one is added: those of the configuration and, if `pod` is
/// known, those that its annotations select. Fetches each definition once, all of them concurrently. `ifname` is
/// `CNI_IFNAME`; `reports` gets an Event about a missing definition.
///
/// # Errors
/// A reference is invalid or its object does not exist; a lookup fails, with the code of the source.
pub fn resolve(
    conf: &Primary,
    cluster: Option<&dyn Definitions>,
    pod: Option<&Pod>,
    ifname: &str,
    reports: Option<&dyn Cluster>,
) -> Result<PodNetworks, Error> {
    let mut resolved = PodNetworks::default();
    let references = references(conf, pod, &mut resolved.warnings)?;
    let selections: Vec<_> = references.iter().map(|one| (one.place.clone(), one.selection.as_ref())).collect();
    let interfaces = interface_names(ifname, &selections)?;
    let with_pod = |error: Error| match pod {
        Some(Pod { namespace, name, .. }) => error.at(format_args!("networks of pod {namespace}/{name}")),
        None => error,
    };
    let definitions = look_up(cluster, &references).map_err(with_pod)?;
    for (reference, interface) in references.into_iter().zip(interfaces) {
        let Reference { place, source, selection } = reference;
        let in_place = |error: Error| error.at(&place);
        let mut name = None;
        let configuration = match source {
            Source::Delegate(value) => RunnableConfiguration::parse(&place, &value.to_string(), None)
                .map(|configuration| RunnableConfiguration { trusted: true, ..configuration })?,
            Source::File(path) => files::at(path).map_err(in_place)?,
            Source::Definition(object) => match (definitions.get(&object), &selection) {
                (Some(Lookup::Found(definition)), _) => {
                    name = Some(object.to_string());
                    configuration(definition, &conf.conf_dir, &mut resolved.warnings).map_err(in_place)?
                }
                (lookup, Some(selection)) => return Err(missing(selection, lookup, pod.zip(reports))),
                (lookup, None) => {
                    files::named(&conf.conf_dir, &object.name, &mut resolved.warnings).map_err(|error| {
                        let error = in_place(error);
                        match lookup {
                            Some(Lookup::Missing(searched)) => {
                                error.with_details(format!("no NetworkAttachmentDefinition either: {searched}"))
                            }
                            _ => error,
                        }
                    })?
                }
            },
        };
        let name = name.unwrap_or_else(|| configuration.name.clone());
        resolved.networks.push(PodNetwork { name, interface, selection, configuration });
    }
    Ok(resolved)
}

/// Returns all references in order and checks the annotations as completely as possible without definitions.
fn references<'a>(
    conf: &'a Primary,
    pod: Option<&Pod>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Reference<'a>>, Error> {
    let configured = |place: String, network: &'a NetworkName| {
        let source = match network {
            NetworkName::Path(path) => Source::File(path),
            NetworkName::Name(name) => {
                Source::Definition(ObjectRef { namespace: conf.namespace.clone(), name: name.clone() })
            }
        };
        Reference { place, source, selection: None }
    };
    let selected = |selection: Selection| {
        let (place, source) = (selection.place.clone(), Source::Definition(selection.object.clone()));
        Reference { place, source, selection: Some(selection) }
    };
    let delegate =
        |(i, value)| Reference { place: format!("delegates[{i}]"), source: Source::Delegate(value), selection: None };
    let mut all: Vec<Reference<'_>> = match &conf.default {
        DefaultNetwork::Cluster(name) => vec![configured("clusterNetwork".to_owned(), name)],
        DefaultNetwork::Delegates(delegates) => delegates.iter().enumerate().map(delegate).collect(),
    };
    let is_system = |pod: &Pod| conf.system_namespaces.contains(&pod.namespace);
    if !pod.is_some_and(is_system) {
        let networks = conf.default_networks.iter().enumerate();
        all.extend(networks.map(|(i, network)| configured(format!("defaultNetworks[{i}]"), network)));
    }
    let Some(pod) = pod else { return Ok(all) };
    let default = default_network(pod, &conf.namespace)?;
    let selections = networks(pod)?;
    check_isolation(conf, &pod.namespace, &selections.elements)?;
    warnings.extend(default.warnings);
    warnings.extend(selections.warnings);
    if let Some(default) = default.elements.into_iter().next() {
        all[0] = selected(default);
    }
    all.extend(selections.elements.into_iter().map(selected));
    check_default_routes(all.iter().filter_map(|reference| reference.selection.as_ref()))?;
    Ok(all)
}

fn look_up(
    cluster: Option<&dyn Definitions>,
    references: &[Reference<'_>],
) -> Result<BTreeMap<ObjectRef, Lookup>, Error> {
    let Some(cluster) = cluster else { return Ok(BTreeMap::new()) };
    let mut awaited: BTreeMap<ObjectRef, bool> = BTreeMap::new();
    for Reference { source, selection, .. } in references {
        if let Source::Definition(object) = source {
            *awaited.entry(object.clone()).or_default() |= selection.is_some();
        }
    }
    let queries: Vec<_> = awaited.into_iter().map(|(object, awaited)| DefinitionQuery { object, awaited }).collect();
    let found = cluster.definitions(&queries)?;
    Ok(queries.into_iter().map(|query| query.object).zip(found).collect())
}

/// Returns the error for a selected definition that does not exist, and records it as an event of the pod.
fn missing(selection: &Selection, lookup: Option<&Lookup>, reports: Option<(&Pod, &dyn Cluster)>) -> Error {
    let Selection { place, object, .. } = selection;
    let ObjectRef { namespace, name } = object;
    let Some(Lookup::Missing(searched)) = lookup else {
        let msg = format!("{place}: {object}: no API server to look up the definition; set kubernetes.kubeconfig");
        return Error::new(Code::InvalidConfig, msg);
    };
    if let Some((pod, reports)) = reports
        && let Err(error) = reports.report(pod, None, &[no_network_found(object, searched)])
    {
        tracing::warn!("can't create Event NoNetworkFound: pod {}/{}: {error}", pod.namespace, pod.name);
    }
    let msg = format!(
        "{place}: NetworkAttachmentDefinition {name:?} not found in namespace {namespace:?}; create it, or write \
         NAMESPACE/{name} for one of another namespace"
    );
    Error::new(Code::InvalidConfig, msg).with_details(searched.clone())
}

/// Rejects references to definitions of other namespaces if `namespaceIsolation` is on, except those in
/// `globalNamespaces`. The reference to the default network is not subject to this, as in Multus.
///
/// # Errors
/// [`Code::InvalidConfig`] with the reference, both namespaces and the accepted ones.
fn check_isolation(conf: &Primary, pod_namespace: &str, selections: &[Selection]) -> Result<(), Error> {
    let allowed = |namespace: &String| namespace == pod_namespace || conf.global_namespaces.contains(namespace);
    let rejected = |selection: &&Selection| conf.namespace_isolation && !allowed(&selection.object.namespace);
    let Some(Selection { place, object, .. }) = selections.iter().find(rejected) else { return Ok(()) };
    let mut accepted = vec![pod_namespace];
    accepted.extend(conf.global_namespaces.iter().map(String::as_str));
    let msg = format!(
        "{place}: {object}: namespaceIsolation forbids pods of namespace {pod_namespace:?} to use definitions of \
         namespace {:?}; expected a definition in {}; move it there, or add the namespace to globalNamespaces",
        object.namespace,
        accepted.join(", ")
    );
    Err(Error::new(Code::InvalidConfig, msg))
}

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
    let rejected = |why: String| Err(Error::new(Code::InvalidConfig, format!("{place}: {why}")));
    if let Some(resource) = definition.resource_name().filter(|resource| !resource.is_empty()) {
        return rejected(format!(
            "annotation {RESOURCE_NAME:?} requests a device of {resource:?}: device plugins are not supported; \
             remove the annotation, or use Multus for this pod's networks"
        ));
    }
    if definition.config.len() > Definition::MAX_CONFIG {
        return rejected(format!("spec.config: expected at most {} bytes, got more", Definition::MAX_CONFIG));
    }
    if definition.config.trim().is_empty() {
        files::named(conf_dir, &definition.object.name, warnings)
            .map_err(|error| error.at(format_args!("{place}: spec.config is empty, searched confDir")))
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
    selected.sort_by_key(|one| ![GLOBAL_NAMESPACE, SYSTEM_NAMESPACE].contains(&one.object.namespace.as_str()));
    let mut found = InstalledNetwork::NotSelected;
    for Selection { object, .. } in selected.into_iter().filter(|one| one.object.name == name) {
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
    use crate::cni::{CniCommand, NetConf};
    use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};
    use serde_json::json;

    /// Checks a reference of a pod in `shop` to a definition in `namespace`.
    fn check(isolation: bool, global: Value, namespace: &str) -> Result<(), Error> {
        let conf = json!({
            "name": "n", "type": "detour", "clusterNetwork": "ovn",
            "namespaceIsolation": isolation, "globalNamespaces": global,
        });
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("a configuration");
        let in_namespace = |namespace: &str| Selection {
            place: "P".into(),
            object: ObjectRef { namespace: namespace.into(), name: "a".into() },
            ..Selection::default()
        };
        check_isolation(&conf.primary.expect("a primary plugin"), "shop", &["shop", namespace].map(in_namespace))
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
    fn the_error_contains_the_reference_and_the_accepted_namespaces() {
        let error = check(true, Value::Null, "other").expect_err("isolated");
        assert_eq!(error.code, Code::InvalidConfig);
        let wanted = "P: other/a: namespaceIsolation forbids pods of namespace \"shop\" to use definitions of namespace \"other\"; \
                      expected a definition in shop, default; ";
        assert!(error.msg.starts_with(wanted), "{error}");
    }

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
