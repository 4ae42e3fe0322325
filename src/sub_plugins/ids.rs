//! Lists of UIDs or GIDs in every form that an exclusion takes.

use super::Note;
use super::context::{ListAuthor, PodContext, name_of};
use crate::cni::{Code, Error, ItemList, at_most, excerpt};
use crate::pod::{Container, Facts, Namespace, Pod};
use crate::policy::{IdRange, TrafficOwner};
use std::collections::HashSet;
use std::fmt;

/// The most containers, init containers included, of a pod whose containers' UIDs are asked for.
const MOST_CONTAINERS: usize = 100;

const ACCEPTED: &str = "numbers from 0 to 4294967294, ranges such as 1000-1999 or 1000650000/10000, *, \
    namespace-range, namespace-range-first, namespace-range-last, container:NAME, init-containers";

/// OpenShift's annotations on a namespace (`openshift/api`, `security/v1/consts.go`); Istio's
/// injector takes the proxy's UID from the first and its GID from the second, or else the first.
const UID_RANGE: &str = "openshift.io/sa.scc.uid-range";
const GROUP_RANGE: &str = "openshift.io/sa.scc.supplemental-groups";

/// Containers of Istio's own, by the names that its injector gives them.
const ISTIO_CONTAINERS: [&str; 3] = ["istio-init", "istio-validation", PROXY];
const PROXY: &str = "istio-proxy";

/// A list of UIDs or of GIDs, as somebody wrote it down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IdList {
    place: String,
    author: ListAuthor,
    forms: Vec<IdForm>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum IdForm {
    All,
    Range(IdRange),
    Namespace(RangePart),
    Container(String),
    InitContainers,
}

/// Which part of a namespace's range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum RangePart {
    Whole,
    First,
    Last,
}

/// Which of a process's two IDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdKind {
    /// Its UID.
    User,
    /// Its GID.
    Group,
}

impl IdList {
    /// Understands every item.
    pub(super) fn parse(list: &ItemList, author: ListAuthor) -> Result<Self, Error> {
        Ok(Self { place: list.place.clone(), author, forms: list.distinct(ACCEPTED, IdForm::parse)? })
    }

    /// Where it stands, for messages.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// Whose traffic that is in one pod.
    pub(super) fn owners(
        &self,
        kind: IdKind,
        scene: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<Vec<TrafficOwner>, Error> {
        let mut owners = Vec::new();
        for form in &self.forms {
            match form {
                IdForm::All => owners.push(TrafficOwner::Any),
                IdForm::Range(range) => owners.push(kind.owner(*range)),
                other => {
                    let facts = scene.facts(&self.place, other)?;
                    let asked = FactLookup { ids: self, form, kind, facts };
                    owners.extend(asked.ranges(notes)?.into_iter().map(|range| kind.owner(range)));
                }
            }
        }
        Ok(owners)
    }
}

impl IdForm {
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
                None => Self::Range(range(text)?),
            },
        })
    }
}

impl fmt::Display for IdForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("*"),
            Self::Range(range) => range.fmt(f),
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

    /// The key of a `securityContext` that says it.
    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::User => "runAsUser",
            Self::Group => "runAsGroup",
        }
    }

    const fn annotations(self) -> &'static [&'static str] {
        match self {
            Self::User => &[UID_RANGE],
            Self::Group => &[GROUP_RANGE, UID_RANGE],
        }
    }

    /// What the pod says that `container` runs as.
    pub(super) fn of(self, pod: &Pod, container: &Container) -> Result<Option<u32>, Error> {
        let said = match self {
            Self::User => pod.user_of(container),
            Self::Group => pod.group_of(container),
        };
        let id = |said: i64| {
            let id = u32::try_from(said).ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| {
                let (key, container, pod) = (self.key(), &container.name, name_of(pod));
                let msg = format!(
                    "{key} of container {container} of pod {pod}: invalid value {said}; expected 0 to 4294967294"
                );
                Error::new(Code::InvalidConfig, msg)
            })
        };
        said.map(id).transpose()
    }
}

/// The UIDs that OpenShift gives to the pods of `namespace`; `None` where it says nothing that can
/// be understood.
#[must_use]
pub fn namespace_uids(namespace: &Namespace) -> Option<Vec<IdRange>> {
    let blocks = ItemList::from_text(UID_RANGE, namespace.annotations.get(UID_RANGE)?).ok()?;
    let ranges: Option<Vec<IdRange>> = blocks.items.iter().map(|item| range(item)).collect();
    ranges.filter(|ranges| !ranges.is_empty())
}

/// A form that only a pod's facts give a meaning.
struct FactLookup<'a> {
    ids: &'a IdList,
    form: &'a IdForm,
    kind: IdKind,
    facts: &'a Facts,
}

impl FactLookup<'_> {
    fn ranges(&self, notes: &mut Vec<Note>) -> Result<Vec<IdRange>, Error> {
        match self.form {
            IdForm::All | IdForm::Range(_) => Ok(Vec::new()),
            IdForm::Namespace(part) => self.of_namespace(*part),
            IdForm::Container(name) => self.of_container(name, notes),
            IdForm::InitContainers => self.of_init_containers(notes),
        }
    }

    fn of_namespace(&self, part: RangePart) -> Result<Vec<IdRange>, Error> {
        let Some(namespace) = &self.facts.namespace else {
            return Err(self.error(&format!("namespace {} is not known", self.facts.pod.namespace)));
        };
        let annotation = |&key: &&'static str| Some((key, namespace.annotations.get(key)?));
        let Some((key, value)) = self.kind.annotations().iter().find_map(annotation) else {
            let msg = format!("namespace {} has no annotation {UID_RANGE:?}; write down numbers", namespace.name);
            return Err(self.error(&msg));
        };
        let blocks = ItemList::from_text(format!("annotation {key:?} of namespace {}", namespace.name), value)?;
        let accepted = "start/size or start-end, several with commas between";
        let ranges = blocks.distinct(accepted, range)?;
        let first = *ranges.first().ok_or_else(|| blocks.reject(value, accepted))?;
        Ok(match part {
            RangePart::Whole => ranges,
            RangePart::First => vec![IdRange::one(first.first)],
            RangePart::Last => vec![IdRange::one(first.last)],
        })
    }

    /// The pod, where its containers are not too many to look through for each form.
    fn pod(&self) -> Result<&Pod, Error> {
        let (pod, count) = (&self.facts.pod, self.facts.pod.all_containers().count());
        let place = || self.about(&format!("pod {}", name_of(pod)));
        if count > MOST_CONTAINERS {
            at_most(MOST_CONTAINERS, "containers", &place(), count)?;
        }
        Ok(pod)
    }

    fn of_container(&self, name: &str, notes: &mut Vec<Note>) -> Result<Vec<IdRange>, Error> {
        let pod = self.pod()?;
        let Some(container) = pod.all_containers().find(|c| c.name == name) else {
            let names: Vec<&str> = pod.all_containers().map(|c| c.name.as_str()).collect();
            let msg = format!("pod {} has no such container; it has {}", name_of(pod), names.join(", "));
            if self.ids.author == ListAuthor::Pod {
                return Err(self.error(&msg));
            }
            notes.push(self.note(&msg));
            return Ok(Vec::new());
        };
        let id = self.kind.of(pod, container)?.ok_or_else(|| {
            let key = self.kind.key();
            self.error(&format!("pod {} does not say what it runs as; set its securityContext.{key}", name_of(pod)))
        })?;
        Ok(vec![IdRange::one(id)])
    }

    fn of_init_containers(&self, notes: &mut Vec<Note>) -> Result<Vec<IdRange>, Error> {
        let pod = self.pod()?;
        let ids = |container| self.kind.of(pod, container);
        let natives = pod.init_containers.iter().filter(|c| c.restarts_always || c.name == PROXY);
        let staying = pod.containers.iter().chain(natives).map(ids).collect::<Result<HashSet<_>, _>>()?;
        let ordinary = |c: &&Container| !c.restarts_always && !ISTIO_CONTAINERS.contains(&c.name.as_str());
        let mut ranges = Vec::new();
        for container in pod.init_containers.iter().filter(ordinary) {
            let why_not = match ids(container)? {
                Some(id) if !staying.contains(&Some(id)) => {
                    ranges.push(IdRange::one(id));
                    continue;
                }
                Some(id) => format!("runs as {id} like a container that stays"),
                None => format!("has no {}", self.kind.key()),
            };
            notes.push(self.note(&format!("not container {}, which {why_not}", container.name)));
        }
        Ok(ranges)
    }

    /// What was asked for is not what the pod gets: its author should see that, while for the
    /// administrator of many pods it is nothing new.
    fn note(&self, what: &str) -> Note {
        match self.ids.author {
            ListAuthor::Administrator => Note::info(self.about(what)),
            ListAuthor::Pod => Note::warning(self.about(what)),
        }
    }

    fn about(&self, what: &str) -> String {
        format!("{}: {:?}: {what}", self.ids.place, excerpt(&self.form.to_string()))
    }

    fn error(&self, what: &str) -> Error {
        Error::new(Code::InvalidConfig, self.about(what))
    }
}

/// Plain numbers only, none twice: the UIDs or GIDs of the proxy.
pub(super) fn numbers(list: &ItemList) -> Result<Vec<u32>, Error> {
    list.distinct("numbers from 0 to 4294967294", number)
}

/// A UID or GID. 4294967295 is none: the kernel takes it, `(uid_t) -1`, as "unchanged".
pub(super) fn number(text: &str) -> Option<u32> {
    let text = text.trim();
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|id| digits && *id != u32::MAX)
}

/// `a`, `a-b` or `start/size`.
fn range(text: &str) -> Option<IdRange> {
    if let Some((start, size)) = text.split_once('/') {
        let (first, more) = (number(start)?, number(size)?.checked_sub(1)?);
        return first.checked_add(more).filter(|last| *last != u32::MAX).map(|last| IdRange { first, last });
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = IdRange { first: number(first)?, last: number(last)? };
    (range.first <= range.last).then_some(range)
}

#[cfg(test)]
mod tests;
