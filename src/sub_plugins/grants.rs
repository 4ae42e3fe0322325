//! Grants: what an administrator permits pods to request, as the key `allow` has it.

use super::container_exclude::ContainerGrant;
use super::context::ListAuthor;
use super::dns_exclude::ResolverList;
use super::ids::IdList;
use super::values;
use crate::cni::{BlockReader, Error, ItemList, is_dns_label, wrong_type};
use crate::pod::Facts;
use crate::policy::{Ports, Ranges};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt};
use serde_json::Value;

/// The label of a namespace with its name.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// The grants of one key `allow`.
#[derive(Debug)]
pub(super) struct Allow {
    pub place: String,
    pub set_by: String,
    pub grants: Vec<Grant>,
}

impl Allow {
    pub(super) fn parse(place: &str, value: &Value, set_by: &str) -> Result<Self, Error> {
        let grants = match value {
            Value::Array(items) => {
                let grant = |(i, item)| Grant::parse(&format!("{place}[{i}]"), item);
                items.iter().enumerate().map(grant).collect::<Result<_, _>>()?
            }
            Value::Object(_) => vec![Grant::parse(place, value)?],
            _ => {
                return Err(wrong_type(
                    place,
                    value,
                    "an object with what pods may request, or a list of such objects",
                ));
            }
        };
        Ok(Self { place: place.to_owned(), set_by: set_by.to_owned(), grants })
    }
}

/// What an administrator permits pods to request.
#[derive(Debug)]
pub(super) struct Grant {
    pub place: String,
    pub uids: Option<IdList>,
    pub gids: Option<IdList>,
    pub containers: Option<ContainerGrant>,
    pub ports: Option<Ports>,
    pub ip_ranges: Option<Ranges>,
    pub resolvers: Option<ResolverList>,
    namespaces: Option<Vec<String>>,
    selector: Option<Selector>,
}

impl Grant {
    fn parse(place: &str, value: &Value) -> Result<Self, Error> {
        let r = BlockReader::new(place, value)?;
        // As an absent key, it could permit everything.
        if let Some((key, null)) = r.all().iter().find(|(_, value)| value.is_null()) {
            return Err(wrong_type(&r.place(key), null, "a value; without one, remove the key"));
        }
        let ids = |key| r.list(key)?.map(|list| IdList::parse(&list, ListAuthor::Administrator)).transpose();
        let namespaces =
            |list: ItemList| list.distinct("names of namespaces", |item| is_dns_label(item).then(|| item.to_owned()));
        let grant = Self {
            place: place.to_owned(),
            uids: ids("uids")?,
            gids: ids("gids")?,
            containers: ContainerGrant::parse(&r)?,
            ports: r.list("ports")?.map(|list| values::parse_ports(&list)).transpose()?,
            ip_ranges: r.list("ip_ranges")?.map(|list| values::parse_ranges(&list)).transpose()?,
            resolvers: r.list("resolvers")?.map(|list| ResolverList::parse(&list)).transpose()?,
            namespaces: r.list("namespaces")?.map(namespaces).transpose()?,
            selector: selector(&r, "namespace_selector")?,
        };
        r.finish()?;
        Ok(grant)
    }

    /// Returns whether the grant names nothing in particular.
    pub(super) const fn permits_everything(&self) -> bool {
        let Self { uids, gids, containers, ports, ip_ranges, resolvers, .. } = self;
        uids.is_none()
            && gids.is_none()
            && containers.is_none()
            && ports.is_none()
            && ip_ranges.is_none()
            && resolvers.is_none()
    }

    /// Returns whether the grant is for pods of this namespace. Without facts, the namespace is unknown.
    pub(super) fn is_for(&self, facts: Option<&Facts>) -> bool {
        if self.namespaces.is_none() && self.selector.is_none() {
            return true;
        }
        let is_named = |names: &Vec<String>| facts.is_some_and(|facts| names.contains(&facts.pod.namespace));
        self.namespaces.as_ref().is_some_and(is_named)
            || self.selector.as_ref().is_some_and(|selector| selects(selector, facts))
    }
}

/// Returns whether the selector selects the pod's namespace. Labels that are unknown select nothing.
pub(super) fn selects(selector: &Selector, facts: Option<&Facts>) -> bool {
    let namespace = facts.and_then(|facts| facts.namespace.as_ref()).filter(|namespace| !namespace.incomplete);
    namespace.is_some_and(|namespace| {
        let mut labels = namespace.labels.clone();
        // The API server adds it to each namespace. A manifest lacks it.
        labels.insert(NAMESPACE_NAME.to_owned(), namespace.name.clone());
        selector.matches(&labels)
    })
}

/// Reads the `LabelSelector` (k8s.io/apimachinery, `meta/v1`) of a key. Unlike the API server's types, kube's accept
/// unknown keys.
pub(super) fn selector(r: &BlockReader<'_>, key: &'static str) -> Result<Option<Selector>, Error> {
    const EXPECTED: &str = "a LabelSelector with matchLabels, matchExpressions, or both";
    let Some(block) = r.block(key)? else { return Ok(None) };
    let value = Value::Object(block.all().clone());
    let invalid = || wrong_type(&r.place(key), &value, EXPECTED);
    block.value("matchLabels");
    for (i, expression) in block.value("matchExpressions").and_then(Value::as_array).into_iter().flatten().enumerate() {
        let keys = BlockReader::new(format!("{}[{i}]", block.place("matchExpressions")), expression)?;
        let operators = [("In", true), ("NotIn", true), ("Exists", false), ("DoesNotExist", false)];
        let needs_values = keys.one_of("operator", &operators)?;
        // An empty value is one, too.
        let has_values = keys.value("values").and_then(Value::as_array).is_some_and(|values| !values.is_empty());
        if keys.string("key")?.is_none_or(str::is_empty) || needs_values != Some(has_values) {
            return Err(invalid());
        }
        keys.finish()?;
    }
    block.finish()?;
    let selector: LabelSelector = serde_json::from_value(value.clone()).map_err(|_| invalid())?;
    selector.try_into().map(Some).map_err(|_| invalid())
}
