//! From what a configuration and a pod's annotations name to networks that can be added.
//!
//! Which namespaces' definitions a pod may refer to.

use super::{
    RunnableConfiguration, Selection, check_default_routes, configuration, default_network, files, interface_names,
    networks, no_network_found,
};
use crate::cluster::{Cluster, DefinitionQuery, Lookup, ObjectRef};
use crate::cni::{Code, DefaultNetwork, Error, NetworkName, Primary};
use crate::pod::Pod;
use std::collections::BTreeMap;

/// A network of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// How users know it: `NAMESPACE/NAME` of its definition, else its configuration's name.
    pub name: String,
    /// How its interface is to be called.
    pub interface: String,
    /// What the pod asks of it; `None` where the pod did not select it.
    pub selection: Option<Selection>,
    /// How it is made.
    pub configuration: RunnableConfiguration,
}

/// The networks of a pod in the order in which they are added, the default one first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodNetworks {
    /// At least one.
    pub networks: Vec<PodNetwork>,
    /// What was ignored and should be looked at, one line each.
    pub warnings: Vec<String>,
}

/// Where a network is named, until its configuration is known.
enum Reference<'a> {
    /// `delegates[i]`.
    Delegate(usize, String),
    /// A key of the configuration.
    Configured(String, &'a NetworkName),
    /// The pod.
    Selected(Box<Selection>),
}

/// Finds and checks all networks of a pod before the first one is added: those that the
/// configuration gives it and, where there is a `pod`, those that its annotations select. Each
/// definition is fetched once, all at the same time. `ifname` is `CNI_IFNAME`.
///
/// # Errors
/// A reference is wrong or refers to what isn't there, as the error that names it; what can't be
/// known has the code of whoever was asked.
pub fn resolve(
    conf: &Primary,
    cluster: Option<&dyn Cluster>,
    pod: Option<&Pod>,
    ifname: &str,
) -> Result<PodNetworks, Error> {
    let mut resolved = PodNetworks::default();
    let references = references(conf, pod, &mut resolved.warnings)?;
    let requests: Vec<_> = references.iter().map(|one| (one.place(), one.selection())).collect();
    let interfaces = interface_names(ifname, &requests)?;
    let about_pod = |error| match pod {
        Some(Pod { namespace, name, .. }) => at(&format!("networks of pod {namespace}/{name}"), error),
        None => error,
    };
    let definitions = look_up(conf, cluster, &references).map_err(about_pod)?;
    let context = ResolveContext { conf, cluster, pod, definitions };
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

/// All that is named, in order, the annotations checked as far as they can be by themselves.
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
        let named = conf.default_networks.iter().enumerate();
        all.extend(named.map(|(i, name)| Reference::Configured(format!("defaultNetworks[{i}]"), name)));
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

    /// For messages.
    fn place(&self) -> String {
        match self {
            Reference::Delegate(i, _) => format!("delegates[{i}]"),
            Reference::Configured(place, _) => place.clone(),
            Reference::Selected(selection) => selection.place.clone(),
        }
    }

    /// The definition that is meant, where one may be.
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

    /// A name of the configuration's may be a file's, too.
    fn may_be_a_file(&self) -> bool {
        matches!(self, Reference::Configured(..))
    }
}

fn look_up(
    conf: &Primary,
    cluster: Option<&dyn Cluster>,
    references: &[Reference<'_>],
) -> Result<BTreeMap<ObjectRef, Lookup>, Error> {
    let Some(cluster) = cluster else { return Ok(BTreeMap::new()) };
    let mut wanted: BTreeMap<ObjectRef, bool> = BTreeMap::new();
    for reference in references {
        if let Some(object) = reference.object(conf) {
            *wanted.entry(object).or_default() |= !reference.may_be_a_file();
        }
    }
    let wanted: Vec<_> = wanted.into_iter().map(|(object, awaited)| DefinitionQuery { object, awaited }).collect();
    let found = cluster.definitions(&wanted)?;
    Ok(wanted.into_iter().map(|sought| sought.object).zip(found).collect())
}

/// What configurations are found with.
struct ResolveContext<'a> {
    conf: &'a Primary,
    cluster: Option<&'a dyn Cluster>,
    pod: Option<&'a Pod>,
    definitions: BTreeMap<ObjectRef, Lookup>,
}

impl ResolveContext<'_> {
    /// The configuration, and the definition that it is from.
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
            Reference::Delegate(_, text) => RunnableConfiguration::parse(&place, text, None).map(by_node),
            Reference::Configured(_, NetworkName::Path(path)) => files::at(path).map_err(|error| at(&place, error)),
            Reference::Configured(_, NetworkName::Name(name)) => files::named(&self.conf.conf_dir, name, warnings)
                .map_err(|error| match lookup {
                    Some(Lookup::Missing(sought)) => {
                        at(&place, error).with_details(format!("nor a definition: {sought}"))
                    }
                    _ => at(&place, error),
                }),
            Reference::Selected(selection) => Err(self.missing(selection, lookup)),
        };
        Ok((None, configuration?))
    }

    /// The error for a selected definition that is not there, for the operator and as an event.
    fn missing(&self, selection: &Selection, lookup: Option<&Lookup>) -> Error {
        let Selection { place, namespace, name, .. } = selection;
        let object = ObjectRef { namespace: namespace.clone(), name: name.clone() };
        let (Some(cluster), Some(Lookup::Missing(sought))) = (self.cluster, lookup) else {
            let msg = format!("{place}: {object}: there is no API to look definitions up; set kubernetes.kubeconfig");
            return Error::new(Code::InvalidConfig, msg);
        };
        if let Some(pod) = self.pod
            && let Err(error) = cluster.report(pod, None, &[no_network_found(&object, sought)])
        {
            tracing::warn!("the event NoNetworkFound could not be recorded: {error}");
        }
        let elsewhere = match cluster.namespaces_with_definition(name) {
            None => String::new(),
            Some(namespaces) if namespaces.is_empty() => "; no namespace has one of that name".to_owned(),
            Some(namespaces) => {
                format!("; there is one of that name in {}: write NAMESPACE/{name}", namespaces.join(", "))
            }
        };
        let msg =
            format!("{place}: there is no NetworkAttachmentDefinition {name:?} in namespace {namespace:?}{elsewhere}");
        Error::new(Code::InvalidConfig, msg).with_details(sought.clone())
    }
}

/// The configuration is the node's own, or in a file that this names.
fn by_node(configuration: RunnableConfiguration) -> RunnableConfiguration {
    RunnableConfiguration { trusted: true, ..configuration }
}

/// The error, with the reference that led to it.
fn at(place: &str, error: Error) -> Error {
    Error { msg: format!("{place}: {}", error.msg), ..error }
}

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
