//! Lists of UIDs or GIDs in every form that an exclusion accepts.

use super::context::{ListAuthor, PodContext, check_containers, name_of};
use super::sub_plugin::Note;
use super::values::parse_id_range;
use crate::cni::{Block, Bounds, Code, Error, ItemList, excerpt};
use crate::pod::well_known::{
    EXCLUDE_CONTAINERS, ISTIO_CONTAINERS, OPENSHIFT_GROUP_RANGE, OPENSHIFT_UID_RANGE, PROXY_CONTAINER,
};
use crate::pod::{Container, Facts, Namespace, Pod};
use crate::policy::{IdRange, TrafficOwner};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fmt;

const ACCEPTED: &str = "numbers from 0 to 4294967294, ranges such as 1000-1999 or 1000650000/10000, *, \
    namespace-range, namespace-range-first, namespace-range-last, container:NAME, init-containers";
const ACCEPTED_NAMESPACE_RANGES: &str = "start/size or start-end, several separated by commas";
/// The maximum number of IDs in the ranges of a namespace. OpenShift assigns 10,000, and elsewhere anyone who can update
/// the namespace writes its annotation.
const NAMESPACE_IDS: u32 = 65_536;

/// A list of UIDs or of GIDs as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IdList {
    place: String,
    author: ListAuthor,
    pub(super) forms: Vec<IdForm>,
}

/// One item of an [`IdList`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum IdForm {
    All,
    Range(IdRange),
    /// A range in OpenShift's form, `start/size`.
    Sized(IdRange),
    Namespace(RangePart),
    Container(String),
    InitContainers,
}

/// A part of a namespace's range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum RangePart {
    Whole,
    First,
    Last,
}

/// Which ID of a process a list contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdKind {
    User,
    Group,
}

impl IdList {
    /// Parses every item of `list`.
    pub(super) fn parse(list: &ItemList, author: ListAuthor) -> Result<Self, Error> {
        Ok(Self { place: list.place.clone(), author, forms: list.distinct(ACCEPTED, IdForm::parse)? })
    }

    /// Returns where the list was written, for messages.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// Returns whether this list, of a grant, permits an item of a request. `ranges` are those that the list means for the
    /// pod ([`Self::granted`]).
    pub(super) fn permits(&self, form: &IdForm, ranges: &[IdRange], kind: IdKind, facts: Option<&Facts>) -> bool {
        if self.forms.contains(&IdForm::All) || self.forms.contains(form) {
            return true;
        }
        let requested = self.ranges(form, kind, facts);
        let is_granted = |range: &IdRange| ranges.iter().any(|granted| granted.covers(*range));
        !requested.is_empty() && requested.iter().all(is_granted)
    }

    /// Returns the ranges that this list, of a grant, means for a pod.
    pub(super) fn granted(&self, kind: IdKind, facts: Option<&Facts>) -> Vec<IdRange> {
        let is_range = |form: &&IdForm| matches!(form, IdForm::Range(_) | IdForm::Sized(_) | IdForm::Namespace(_));
        self.forms.iter().filter(is_range).flat_map(|form| self.ranges(form, kind, facts)).collect()
    }

    /// Returns the ranges of an item; none if they are unknown, or it does not stand for ranges alone.
    fn ranges(&self, form: &IdForm, kind: IdKind, facts: Option<&Facts>) -> Vec<IdRange> {
        let of_facts = |facts| match form {
            IdForm::Namespace(part) => {
                FactLookup { ids: self, form, kind, facts }.namespace_ranges(*part, &mut Vec::new()).ok()
            }
            IdForm::Container(name) => {
                let container = facts.pod.all_containers().find(|container| container.name == *name)?;
                Some(vec![IdRange::one(kind.of_container(&facts.pod, container).ok()??)])
            }
            IdForm::All | IdForm::Range(_) | IdForm::Sized(_) | IdForm::InitContainers => None,
        };
        match form {
            IdForm::Range(range) | IdForm::Sized(range) => vec![*range],
            _ => facts.and_then(of_facts).unwrap_or_default(),
        }
    }

    /// Returns the owners of traffic that the list means for one pod.
    pub(super) fn owners(
        &self,
        kind: IdKind,
        context: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<Vec<TrafficOwner>, Error> {
        let mut owners = Vec::new();
        for form in &self.forms {
            let lookup = || -> Result<_, Error> {
                Ok(FactLookup { ids: self, form, kind, facts: context.facts(&self.place, form)? })
            };
            let ranges = match form {
                IdForm::All => {
                    owners.push(TrafficOwner::Any);
                    continue;
                }
                IdForm::Range(range) | IdForm::Sized(range) => vec![*range],
                IdForm::Namespace(part) => lookup()?.namespace_ranges(*part, notes)?,
                IdForm::Container(name) => lookup()?.container_ranges(name, notes)?,
                IdForm::InitContainers => lookup()?.init_container_ranges(notes)?,
            };
            owners.extend(ranges.into_iter().map(|range| kind.owner(range)));
        }
        Ok(owners)
    }
}

impl IdForm {
    /// Returns whether the item stands for at most `limit` IDs, or for IDs that the pod or its namespace determine.
    pub(super) const fn is_limited(&self, limit: u32) -> bool {
        match self {
            Self::All => false,
            Self::Range(range) | Self::Sized(range) => range.last - range.first < limit,
            Self::Namespace(_) | Self::Container(_) | Self::InitContainers => true,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "*" => Self::All,
            "namespace-range" => Self::Namespace(RangePart::Whole),
            "namespace-range-first" => Self::Namespace(RangePart::First),
            "namespace-range-last" => Self::Namespace(RangePart::Last),
            "init-containers" => Self::InitContainers,
            _ => match text.strip_prefix("container:").map(str::trim) {
                Some("") => return None,
                Some(name) => Self::Container(name.to_owned()),
                None if text.contains('/') => Self::Sized(parse_id_range(text)?),
                None => Self::Range(parse_id_range(text)?),
            },
        })
    }
}

impl fmt::Display for IdForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("*"),
            Self::Range(range) => range.fmt(f),
            Self::Sized(range) => write!(f, "{}/{}", range.first, u64::from(range.last - range.first) + 1),
            Self::Namespace(RangePart::Whole) => f.write_str("namespace-range"),
            Self::Namespace(RangePart::First) => f.write_str("namespace-range-first"),
            Self::Namespace(RangePart::Last) => f.write_str("namespace-range-last"),
            Self::Container(name) => write!(f, "container:{name}"),
            Self::InitContainers => f.write_str("init-containers"),
        }
    }
}

impl IdKind {
    fn owner(self, range: IdRange) -> TrafficOwner {
        match self {
            Self::User => TrafficOwner::Uid(range),
            Self::Group => TrafficOwner::Gid(range),
        }
    }

    /// Returns the key of a grant.
    pub(super) const fn grant_key(self) -> &'static str {
        match self {
            Self::User => "uids",
            Self::Group => "gids",
        }
    }

    /// Returns the key of a `securityContext` with this ID.
    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::User => "runAsUser",
            Self::Group => "runAsGroup",
        }
    }

    const fn namespace_annotations(self) -> &'static [&'static str] {
        match self {
            Self::User => &[OPENSHIFT_UID_RANGE],
            Self::Group => &[OPENSHIFT_GROUP_RANGE, OPENSHIFT_UID_RANGE],
        }
    }

    /// Returns the ID that `container` runs as; `None` if the pod does not set it.
    pub(super) fn of_container(self, pod: &Pod, container: &Container) -> Result<Option<u32>, Error> {
        let configured = match self {
            Self::User => pod.user_of(container),
            Self::Group => pod.group_of(container),
        };
        let id = |configured: i64| {
            let id = u32::try_from(configured).ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| {
                let (key, container, pod) = (self.key(), &container.name, name_of(pod));
                let msg = format!(
                    "{key} of container {container} of pod {pod}: invalid value {configured}; expected a number from 0 to 4294967294"
                );
                Error::new(Code::InvalidConfig, msg)
            })
        };
        configured.map(id).transpose()
    }
}

/// Returns the UIDs that OpenShift assigns to the pods of `namespace`; `None` if its annotation is missing or invalid.
#[must_use]
pub fn namespace_uids(namespace: &Namespace) -> Option<Vec<IdRange>> {
    let value = namespace.annotations.get(OPENSHIFT_UID_RANGE)?;
    let list = ItemList::from_text(OPENSHIFT_UID_RANGE, value).ok()?;
    let ranges = list.distinct(ACCEPTED_NAMESPACE_RANGES, parse_id_range).ok()?;
    (!ranges.is_empty() && count(&ranges) <= NAMESPACE_IDS).then_some(ranges)
}

/// Returns a warning if a block or a grant excludes the ranges of namespaces.
#[must_use]
pub fn trusts_namespaces(chain: &[Block], bounds: &Bounds) -> Option<String> {
    let grants = bounds.blocks.iter().map(|block| &block.allow).chain(&bounds.allow);
    let grants = grants.flat_map(|allow| allow.as_array().map_or(std::slice::from_ref(allow), Vec::as_slice));
    let mut all = chain.iter().map(|block| &block.keys).chain(grants.filter_map(Value::as_object));
    let names_range = |keys: &Map<String, Value>, key: &str| {
        let items = keys.get(key).and_then(|value| ItemList::from_json(key, value).ok())?.items;
        items.into_iter().find(|item| matches!(IdForm::parse(item), Some(IdForm::Namespace(_))))
    };
    // The users of a rule stand behind its protocol and its ports.
    let names_range_in_rule = |keys: &Map<String, Value>| {
        let items = keys.get("rules").and_then(|value| ItemList::from_json("rules", value).ok())?.items;
        let users = items.iter().filter_map(|item| item.rsplit(':').next());
        users.map(str::to_owned).find(|item| matches!(IdForm::parse(item), Some(IdForm::Namespace(_))))
    };
    let (key, item) = all.find_map(|keys| {
        let listed = ["uids", "gids"].into_iter().find_map(|key| Some((key, names_range(keys, key)?)));
        listed.or_else(|| Some(("rules", names_range_in_rule(keys)?)))
    })?;
    Some(format!(
        "{key}: {item:?} means what annotation {OPENSHIFT_UID_RANGE:?} of the namespace says: trust it only where users \
         can't update namespaces, as on OpenShift; elsewhere, list numbers"
    ))
}

/// Returns the number of IDs in ranges.
fn count(ranges: &[IdRange]) -> u32 {
    ranges.iter().fold(0, |sum, range| sum.saturating_add((range.last - range.first).saturating_add(1)))
}

/// Returns the hint to exclude one container of several with the same ID.
fn by_name(name: &str) -> String {
    format!("to exclude only {name}, use the sub-plugin container-exclude (annotation {EXCLUDE_CONTAINERS}: {name:?})")
}

/// Resolves an item that needs facts of a pod.
struct FactLookup<'a> {
    ids: &'a IdList,
    form: &'a IdForm,
    kind: IdKind,
    facts: &'a Facts,
}

impl FactLookup<'_> {
    fn namespace_ranges(&self, part: RangePart, notes: &mut Vec<Note>) -> Result<Vec<IdRange>, Error> {
        let Some(namespace) = &self.facts.namespace else {
            return Err(self.error(&format!("namespace {} is unknown", self.facts.pod.namespace)));
        };
        let annotation = |&key: &&'static str| Some((key, namespace.annotations.get(key)?));
        let Some((key, value)) = self.kind.namespace_annotations().iter().find_map(annotation) else {
            let name = &namespace.name;
            let msg = format!("namespace {name} has no annotation {OPENSHIFT_UID_RANGE:?}; list numbers instead");
            return Err(self.error(&msg));
        };
        let list = ItemList::from_text(format!("annotation {key:?} of namespace {}", namespace.name), value)?;
        let ranges = list.distinct(ACCEPTED_NAMESPACE_RANGES, parse_id_range)?;
        let first = *ranges.first().ok_or_else(|| list.reject(value, ACCEPTED_NAMESPACE_RANGES))?;
        let ids = count(&ranges);
        if ids > NAMESPACE_IDS {
            let msg = format!("{}: expected at most {NAMESPACE_IDS} IDs, got {ids}; list numbers instead", list.place);
            if self.ids.author == ListAuthor::Pod {
                return Err(self.error(&msg));
            }
            notes.push(Note::warning(self.message(&msg)));
            return Ok(Vec::new());
        }
        Ok(match part {
            RangePart::Whole => ranges,
            RangePart::First => vec![IdRange::one(first.first)],
            RangePart::Last => vec![IdRange::one(first.last)],
        })
    }

    fn container_ranges(&self, name: &str, notes: &mut Vec<Note>) -> Result<Vec<IdRange>, Error> {
        let pod = self.bounded_pod()?;
        let Some(container) = pod.all_containers().find(|c| c.name == name) else {
            let names: Vec<&str> = pod.all_containers().map(|c| c.name.as_str()).collect();
            let msg = format!("pod {} has no such container; it has {}", name_of(pod), names.join(", "));
            if self.ids.author == ListAuthor::Pod {
                return Err(self.error(&msg));
            }
            notes.push(self.note(&msg));
            return Ok(Vec::new());
        };
        let id = self.kind.of_container(pod, container)?.ok_or_else(|| {
            let (key, pod) = (self.kind.key(), name_of(pod));
            let what = format!("pod {pod} does not set {key} of this container; set its securityContext.{key}");
            self.error(&what)
        })?;
        let keeps_running = |c: &&Container| c.restarts_always || !pod.is_init_container(&c.name);
        let is_application = |c: &&Container| keeps_running(c) && !ISTIO_CONTAINERS.contains(&c.name.as_str());
        let has_id = |c: &&Container| self.kind.of_container(pod, c).is_ok_and(|other| other == Some(id));
        let mut others = pod.all_containers().filter(|c| c.name != name).filter(is_application).filter(has_id);
        if let Some(other) = others.next() {
            let more = match others.count() {
                0 => String::new(),
                count => format!(" and {count} more"),
            };
            let (key, other) = (self.kind.key(), &other.name);
            let what =
                format!("{key} {id} is also that of container {other}{more}, whose traffic bypasses the sidecar, too");
            notes.push(self.note(&format!("{what}; {}", by_name(name))));
        }
        Ok(vec![IdRange::one(id)])
    }

    /// Returns the IDs of init containers that end before the application starts, without those that a container that
    /// keeps running shares. If the ID of such a container is unknown, each ID could be shared.
    fn init_container_ranges(&self, notes: &mut Vec<Note>) -> Result<Vec<IdRange>, Error> {
        let pod = self.bounded_pod()?;
        let id = |container| self.kind.of_container(pod, container);
        let native_sidecars = pod.init_containers.iter().filter(|c| c.restarts_always || c.name == PROXY_CONTAINER);
        let keep_running = || pod.containers.iter().chain(native_sidecars.clone());
        let running = keep_running().map(id).collect::<Result<HashSet<_>, _>>()?;
        let ends = |c: &&Container| !c.restarts_always && !ISTIO_CONTAINERS.contains(&c.name.as_str());
        let unknown = keep_running().filter(|c| c.name != PROXY_CONTAINER).find(|c| id(c) == Ok(None));
        if let (Some(unknown), true) = (unknown, pod.init_containers.iter().filter(ends).any(|c| id(c) != Ok(None))) {
            let (key, name) = (self.kind.key(), &unknown.name);
            let msg = format!(
                "container {name} of pod {} does not set {key}: its image can have the ID of an init container, and then \
                 all its traffic would bypass the sidecar; set its securityContext.{key}, or use the sub-plugin \
                 container-exclude (annotation {EXCLUDE_CONTAINERS}: \"init-containers\")",
                name_of(pod)
            );
            if self.ids.author == ListAuthor::Pod {
                return Err(self.error(&msg));
            }
            notes.push(self.note(&msg));
            return Ok(Vec::new());
        }
        let mut ranges = Vec::new();
        for container in pod.init_containers.iter().filter(ends) {
            let why = match id(container)? {
                Some(id) if !running.contains(&Some(id)) => {
                    ranges.push(IdRange::one(id));
                    continue;
                }
                Some(id) => format!("its {} {id} is also used by a container that keeps running", self.kind.key()),
                None => format!("it does not set {}", self.kind.key()),
            };
            let name = &container.name;
            notes.push(self.note(&format!("container {name} is not excluded: {why}; {}", by_name(name))));
        }
        Ok(ranges)
    }

    /// Returns the pod, unless it has too many containers to search for each item.
    fn bounded_pod(&self) -> Result<&Pod, Error> {
        let pod = &self.facts.pod;
        check_containers(pod, &|what| self.message(what))?;
        Ok(pod)
    }

    fn note(&self, what: &str) -> Note {
        self.ids.author.note(self.message(what))
    }

    fn error(&self, what: &str) -> Error {
        Error::new(Code::InvalidConfig, self.message(what))
    }

    fn message(&self, what: &str) -> String {
        format!("{}: {:?}: {what}", self.ids.place, excerpt(&self.form.to_string()))
    }
}

#[cfg(test)]
mod tests;
