//! Resolution of the networks that a configuration and a pod's annotations name: each gets its definition or file, and
//! the name of its interface. Definitions of other namespaces may be forbidden (`namespaceIsolation`).

use super::annotations::Selection;
use super::annotations::{default_network, networks};
use super::configuration::RunnableConfiguration;
use super::definition::configuration;
use super::files;
use super::interfaces::{check_default_routes, interface_names};
use super::status::no_network_found;
use crate::cluster::{Cluster, DefinitionQuery, Definitions, Lookup, ObjectRef};
use crate::cni::{Code, DefaultNetwork, Error, NetworkName, Primary};
use crate::pod::Pod;
use std::collections::BTreeMap;

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
enum Reference<'a> {
    /// `delegates[i]`.
    Delegate(usize, String),
    /// A key of the configuration, with its path.
    Configured(String, &'a NetworkName),
    /// An element of the pod's annotations.
    Selected(Box<Selection>),
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
    let selections: Vec<_> = references.iter().map(|reference| (reference.place(), reference.selection())).collect();
    let interfaces = interface_names(ifname, &selections)?;
    let with_pod = |error| match pod {
        Some(Pod { namespace, name, .. }) => at(&format!("networks of pod {namespace}/{name}"), error),
        None => error,
    };
    let definitions = look_up(conf, cluster, &references).map_err(with_pod)?;
    let context = ResolveContext { conf, pod, definitions, reports };
    for (reference, interface) in references.into_iter().zip(interfaces) {
        let (object, configuration) = context.configuration(&reference, &mut resolved.warnings)?;
        let name = object.map_or_else(|| configuration.name.clone(), |object| object.to_string());
        let selection = match reference {
            Reference::Selected(selection) => Some(*selection),
            Reference::Delegate(..) | Reference::Configured(..) => None,
        };
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
    let mut all: Vec<Reference<'_>> = match &conf.default {
        DefaultNetwork::Cluster(name) => vec![Reference::Configured("clusterNetwork".to_owned(), name)],
        DefaultNetwork::Delegates(delegates) => {
            delegates.iter().enumerate().map(|(i, value)| Reference::Delegate(i, value.to_string())).collect()
        }
    };
    let is_system = |pod: &Pod| conf.system_namespaces.contains(&pod.namespace);
    if !pod.is_some_and(is_system) {
        let configured = conf.default_networks.iter().enumerate();
        all.extend(configured.map(|(i, name)| Reference::Configured(format!("defaultNetworks[{i}]"), name)));
    }
    let Some(pod) = pod else { return Ok(all) };
    let default = default_network(pod, &conf.namespace)?;
    let selected = networks(pod)?;
    check_isolation(conf, &pod.namespace, &selected.elements)?;
    warnings.extend(default.warnings);
    warnings.extend(selected.warnings);
    if let Some(default) = default.elements.into_iter().next() {
        all[0] = Reference::Selected(Box::new(default));
    }
    all.extend(selected.elements.into_iter().map(Box::new).map(Reference::Selected));
    check_default_routes(all.iter().filter_map(Reference::selection))?;
    Ok(all)
}

impl Reference<'_> {
    fn selection(&self) -> Option<&Selection> {
        match self {
            Reference::Selected(selection) => Some(selection),
            Reference::Delegate(..) | Reference::Configured(..) => None,
        }
    }

    /// Returns where the reference was written, for messages.
    fn place(&self) -> String {
        match self {
            Reference::Delegate(i, _) => format!("delegates[{i}]"),
            Reference::Configured(place, _) => place.clone(),
            Reference::Selected(selection) => selection.place.clone(),
        }
    }

    /// Returns the definition that it can refer to.
    fn object(&self, conf: &Primary) -> Option<ObjectRef> {
        match self {
            Reference::Delegate(..) | Reference::Configured(_, NetworkName::Path(_)) => None,
            Reference::Configured(_, NetworkName::Name(name)) => {
                Some(ObjectRef { namespace: conf.namespace.clone(), name: name.clone() })
            }
            Reference::Selected(selection) => {
                Some(ObjectRef { namespace: selection.namespace.clone(), name: selection.name.clone() })
            }
        }
    }

    /// Returns whether it can refer to a file: a name in the configuration can.
    fn may_be_a_file(&self) -> bool {
        matches!(self, Reference::Configured(..))
    }
}

fn look_up(
    conf: &Primary,
    cluster: Option<&dyn Definitions>,
    references: &[Reference<'_>],
) -> Result<BTreeMap<ObjectRef, Lookup>, Error> {
    let Some(cluster) = cluster else { return Ok(BTreeMap::new()) };
    let mut awaited: BTreeMap<ObjectRef, bool> = BTreeMap::new();
    for reference in references {
        if let Some(object) = reference.object(conf) {
            *awaited.entry(object).or_default() |= !reference.may_be_a_file();
        }
    }
    let queries: Vec<_> = awaited.into_iter().map(|(object, awaited)| DefinitionQuery { object, awaited }).collect();
    let found = cluster.definitions(&queries)?;
    Ok(queries.into_iter().map(|query| query.object).zip(found).collect())
}

/// Everything that resolution needs.
struct ResolveContext<'a> {
    conf: &'a Primary,
    reports: Option<&'a dyn Cluster>,
    pod: Option<&'a Pod>,
    definitions: BTreeMap<ObjectRef, Lookup>,
}

impl ResolveContext<'_> {
    /// Returns the configuration of a reference, with its definition if it has one.
    fn configuration(
        &self,
        reference: &Reference<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<(Option<ObjectRef>, RunnableConfiguration), Error> {
        let place = reference.place();
        let object = reference.object(self.conf);
        let lookup = object.as_ref().and_then(|object| self.definitions.get(object));
        if let Some(Lookup::Found(definition)) = lookup {
            let configuration = configuration(definition, &self.conf.conf_dir, warnings);
            return Ok((object, configuration.map_err(|error| at(&place, error))?));
        }
        let configuration = match reference {
            Reference::Delegate(_, text) => RunnableConfiguration::parse(&place, text, None).map(trusted),
            Reference::Configured(_, NetworkName::Path(path)) => files::at(path).map_err(|error| at(&place, error)),
            Reference::Configured(_, NetworkName::Name(name)) => files::named(&self.conf.conf_dir, name, warnings)
                .map_err(|error| match lookup {
                    Some(Lookup::Missing(searched)) => {
                        at(&place, error).with_details(format!("no NetworkAttachmentDefinition either: {searched}"))
                    }
                    _ => at(&place, error),
                }),
            Reference::Selected(selection) => Err(self.missing(selection, lookup)),
        };
        Ok((None, configuration?))
    }

    /// Returns the error for a selected definition that does not exist, and records it as an event of the pod.
    fn missing(&self, selection: &Selection, lookup: Option<&Lookup>) -> Error {
        let Selection { place, namespace, name, .. } = selection;
        let object = ObjectRef { namespace: namespace.clone(), name: name.clone() };
        let Some(Lookup::Missing(searched)) = lookup else {
            let msg = format!("{place}: {object}: no API server to look up the definition; set kubernetes.kubeconfig");
            return Error::new(Code::InvalidConfig, msg);
        };
        if let (Some(pod), Some(reports)) = (self.pod, self.reports)
            && let Err(error) = reports.report(pod, None, &[no_network_found(&object, searched)])
        {
            tracing::warn!("can't create Event NoNetworkFound: pod {}/{}: {error}", pod.namespace, pod.name);
        }
        let msg = format!(
            "{place}: NetworkAttachmentDefinition {name:?} not found in namespace {namespace:?}; create it, or write \
             NAMESPACE/{name} for one of another namespace"
        );
        Error::new(Code::InvalidConfig, msg).with_details(searched.clone())
    }
}

/// Marks a configuration as the node administrator's.
fn trusted(configuration: RunnableConfiguration) -> RunnableConfiguration {
    RunnableConfiguration { trusted: true, ..configuration }
}

/// Returns the error with the place of the reference.
fn at(place: &str, error: Error) -> Error {
    Error { msg: format!("{place}: {}", error.msg), ..error }
}

/// Rejects references to definitions of other namespaces if `namespaceIsolation` is on, except those in
/// `globalNamespaces`. The reference to the default network is not subject to this, as in Multus.
///
/// # Errors
/// [`Code::InvalidConfig`] with the reference, both namespaces and the accepted ones.
pub fn check_isolation(conf: &Primary, pod_namespace: &str, selections: &[Selection]) -> Result<(), Error> {
    let allowed = |namespace: &String| namespace == pod_namespace || conf.global_namespaces.contains(namespace);
    let rejected = |selection: &&Selection| conf.namespace_isolation && !allowed(&selection.namespace);
    let Some(Selection { place, namespace, name, .. }) = selections.iter().find(rejected) else { return Ok(()) };
    let mut accepted = vec![pod_namespace];
    accepted.extend(conf.global_namespaces.iter().map(String::as_str));
    let msg = format!(
        "{place}: {namespace}/{name}: namespaceIsolation forbids pods of namespace {pod_namespace:?} to use definitions of \
         namespace {namespace:?}; expected a definition in {}; move it there, or add the namespace to globalNamespaces",
        accepted.join(", ")
    );
    Err(Error::new(Code::InvalidConfig, msg))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, NetConf};
    use serde_json::{Value, json};

    /// Checks a reference of a pod in `shop` to a definition in `namespace`.
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
    fn the_error_contains_the_reference_and_the_accepted_namespaces() {
        let error = check(true, Value::Null, "other").expect_err("isolated");
        assert_eq!(error.code, Code::InvalidConfig);
        let wanted = "P: other/a: namespaceIsolation forbids pods of namespace \"shop\" to use definitions of namespace \"other\"; \
                      expected a definition in shop, default; ";
        assert!(error.msg.starts_with(wanted), "{error}");
    }
}
