//! The networks that a pod selects, and what each leads to.

use crate::cluster::{DefinitionQuery, Definitions, Lookup, ObjectRef};
use crate::cni::{Code, Error, GLOBAL_NAMESPACE, SYSTEM_NAMESPACE, closest};
use crate::networks::{Selection, default_network, networks, plugin_types};
use crate::pod::Pod;
use crate::pod::well_known::NETWORKS;
use std::collections::BTreeMap;

/// A network that a pod selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectedNetwork {
    /// `NAMESPACE/NAME` of its definition.
    pub name: String,
    /// What it leads to.
    pub leads_to: NetworkLead,
}

/// What a network that a pod selects leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkLead {
    /// To this file, which has the definition's name.
    File(String),
    /// To the configuration of its definition, with plugins of these types.
    Definition(Vec<String>),
    /// To a file on the node: its definition has no configuration.
    OnNode,
    /// To nothing: its definition does not exist.
    Missing,
    /// Its definition is not known; with the name of a known one that resembles it.
    Unknown(Option<String>),
}

impl NetworkLead {
    pub(super) fn text(&self) -> String {
        match self {
            Self::File(place) => place.clone(),
            Self::Definition(types) if types.is_empty() => "its definition".to_owned(),
            Self::Definition(types) => format!("its definition ({})", types.join(", ")),
            Self::OnNode => "a file on the node with its name".to_owned(),
            Self::Missing => "nothing: its definition does not exist".to_owned(),
            Self::Unknown(None) => "unknown: no file and no definition with its name is given".to_owned(),
            Self::Unknown(Some(similar)) => {
                format!("nothing: no file and no definition has its name; did you mean {similar:?}?")
            }
        }
    }

    /// Whether Multus finds no configuration, and therefore fails the pod.
    pub(super) const fn is_missing(&self) -> bool {
        matches!(self, Self::Missing | Self::Unknown(Some(_)))
    }
}

/// Returns the networks that the pod selects, and what each leads to; none if the annotation is malformed. `files` has
/// the known files by name; without `definitions`, definitions can't be looked up.
pub(super) fn selected_networks(
    pod: &Pod,
    definitions: Option<&BTreeMap<ObjectRef, Lookup>>,
    files: &BTreeMap<String, String>,
) -> Vec<SelectedNetwork> {
    let selected = networks(pod).map(|selections| selections.elements).unwrap_or_default();
    // With several files, the missing one is a typo. A name that the pod selects too is another network.
    let unselected = || files.keys().filter(|name| selected.iter().all(|one| one.object.name != **name));
    let is_guessed = definitions.is_none() && files.len() > 1;
    let lead = |object: &ObjectRef| match (definitions.and_then(|known| known.get(object)), files.get(&object.name)) {
        (Some(Lookup::Found(definition)), _) if !definition.config.trim().is_empty() => {
            NetworkLead::Definition(plugin_types(definition))
        }
        (Some(Lookup::Found(_)) | None, Some(place)) => NetworkLead::File(place.clone()),
        (Some(Lookup::Found(_)), None) => NetworkLead::OnNode,
        (Some(Lookup::Missing(_)), _) => NetworkLead::Missing,
        (None, None) => {
            let similar = closest(&object.name, unselected().map(String::as_str)).filter(|_| is_guessed);
            NetworkLead::Unknown(similar.map(str::to_owned))
        }
    };
    let network =
        |Selection { object, .. }: &Selection| SelectedNetwork { name: object.to_string(), leads_to: lead(object) };
    selected.iter().map(network).collect()
}

/// Returns the error for a network that leads to nothing: Multus adds no network if it can't find one of them. Multus has
/// added the networks of a pod with an address.
pub(super) fn missing_network(pod: &Pod, selected: &[SelectedNetwork]) -> Option<Error> {
    let missing = selected.iter().filter(|_| pod.addresses.is_empty()).find(|one| one.leads_to.is_missing())?;
    let (object, name) = (&missing.name, missing.name.rsplit('/').next().unwrap_or_default());
    let (cause, next) = match &missing.leads_to {
        NetworkLead::Unknown(Some(similar)) => {
            ("for which no file and no definition is given", format!("did you mean {similar:?}?"))
        }
        _ => ("which does not exist", format!("select {GLOBAL_NAMESPACE}/{name}, or create {object}")),
    };
    let msg = format!(
        "pod {}/{}: annotation {NETWORKS:?} selects NetworkAttachmentDefinition {object}, {cause}, so Multus can't add the \
         pod's networks; {next}",
        pod.namespace, pod.name
    );
    Some(Error::new(Code::InvalidConfig, msg))
}

/// Looks up the definitions that the pod selects; none if an annotation is malformed, or if the source refuses.
pub(super) fn selected_definitions(pod: &Pod, cluster: &dyn Definitions) -> BTreeMap<ObjectRef, Lookup> {
    let (selected, default) = (networks(pod), default_network(pod, SYSTEM_NAMESPACE));
    let elements = [selected, default].into_iter().flatten().flat_map(|selections| selections.elements);
    let queries: Vec<_> = elements.map(|one| DefinitionQuery { object: one.object, awaited: false }).collect();
    let found = if queries.is_empty() { Ok(Vec::new()) } else { cluster.definitions(&queries) };
    queries.into_iter().map(|query| query.object).zip(found.unwrap_or_default()).collect()
}
