//! `container-exclude`: traffic of certain containers bypasses the sidecar, even if others have the same UID.

use super::context::{AnnotationValue, ListAuthor, PodContext, RequestedExclusions, check_containers, name_of};
use super::sub_plugin::Note;
use crate::cni::{BlockReader, Code, Error, ItemList, at_most, did_you_mean, is_dns_label};
use crate::pod::well_known::{EXCLUDE_CONTAINERS, ISTIO_CONTAINERS};
use crate::pod::{Container, Pod};
use crate::policy::{ContainerExclusion, ContainerScope};
use std::fmt;

/// The annotations of a pod or namespace that this sub-plugin reads.
pub(super) const ANNOTATIONS: [&str; 1] = [EXCLUDE_CONTAINERS];

const ACCEPTED: &str = "names of containers, patterns such as *-init, init-containers";
const INIT_CONTAINERS: &str = "init-containers";
/// The values of `kinds`.
const KINDS: [(&str, ContainerKind); 2] = [("init", ContainerKind::Init), ("app", ContainerKind::App)];
/// Limit of items of one list.
const MAX_ITEMS: usize = 100;
/// Limit of unknown names of one list that are compared with the names of the pod.
const MAX_COMPARED: usize = 8;

/// The exclusions that one block, argument or annotation requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContainerExclude {
    pub(super) containers: Option<ContainerList>,
    /// The kinds to which `containers` is bound; `None` is all.
    kinds: Option<Vec<ContainerKind>>,
    scope: ContainerScope,
}

impl ContainerExclude {
    /// Parses a block's keys.
    pub(super) fn parse(r: &BlockReader<'_>, author: ListAuthor) -> Result<Self, Error> {
        let containers = r.list("containers")?.map(|list| ContainerList::parse(&list, author)).transpose()?;
        let scope = r.one_of("scope", &[("all", ContainerScope::All), ("dns", ContainerScope::Dns)])?;
        let scope = scope.unwrap_or(ContainerScope::All);
        Ok(Self { containers, kinds: kinds(r)?, scope })
    }

    /// Parses the annotation. It applies to all traffic.
    pub(super) fn of_annotation(annotation: &AnnotationValue<'_>) -> Result<Self, Error> {
        let containers = Some(ContainerList::parse(&annotation.list()?, annotation.author)?);
        Ok(Self { containers, kinds: None, scope: ContainerScope::All })
    }

    /// Returns the exclusions for one pod, in the order in which the containers start.
    pub(super) fn exclusions(
        &self,
        context: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<RequestedExclusions, Error> {
        let Some((list, first)) = self.containers.as_ref().and_then(|list| Some((list, list.forms.first()?))) else {
            return Ok(RequestedExclusions::default());
        };
        let pod = &context.facts(&list.place, first)?.pod;
        check_containers(pod, &|what| format!("{}: {what}", list.place))?;
        list.add_notes(pod, notes);
        let is_of_kind = |container: &Container| {
            self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&ContainerKind::of(pod, container)))
        };
        let named = pod.all_containers().filter(|container| list.contains(pod, container));
        let (requested, others): (Vec<_>, Vec<_>) = named.partition(|container| is_of_kind(container));
        if !others.is_empty() {
            let names: Vec<&str> = others.into_iter().map(|container| container.name.as_str()).collect();
            let text = format!("{}: {}: not excluded: not of the kinds in \"kinds\"", list.place, quoted(&names));
            notes.push(list.author.note(text));
        }
        let exclusion = |container: &Container| ContainerExclusion { name: container.name.clone(), scope: self.scope };
        let containers = requested.into_iter().map(exclusion).collect();
        Ok(RequestedExclusions { containers, ..RequestedExclusions::default() })
    }
}

/// A kind of container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ContainerKind {
    /// An init container that ends before the application starts.
    Init,
    /// A container that runs with the application: an ordinary container or a sidecar (`restartPolicy: Always`).
    App,
}

impl ContainerKind {
    fn of(pod: &Pod, container: &Container) -> Self {
        match pod.is_init_container(&container.name) && !container.restarts_always {
            true => Self::Init,
            false => Self::App,
        }
    }
}

/// Reads the key `kinds`.
fn kinds(r: &BlockReader<'_>) -> Result<Option<Vec<ContainerKind>>, Error> {
    let kind = |item: &str| Some(KINDS.iter().find(|(word, _)| *word == item)?.1);
    r.list("kinds")?.map(|list| list.distinct(&KINDS.map(|(word, _)| word).join(", "), kind)).transpose()
}

/// The containers that a grant permits.
#[derive(Debug)]
pub(super) struct ContainerGrant {
    forms: Vec<ContainerForm>,
    kinds: Option<Vec<ContainerKind>>,
}

impl ContainerGrant {
    /// Returns whether the grant permits an item of a request. Each container that the item excludes must have a permitted
    /// kind.
    pub(super) fn permits(&self, request: &ContainerExclude, form: &ContainerForm, pod: &Pod) -> bool {
        let is_kind = |kinds: &Option<Vec<ContainerKind>>, container: &Container| {
            kinds.as_ref().is_none_or(|kinds| kinds.contains(&ContainerKind::of(pod, container)))
        };
        let is_requested = |container: &&Container| is_kind(&request.kinds, container) && form.excludes(pod, container);
        self.forms.iter().any(|granted| granted.permits(form))
            && pod.all_containers().filter(is_requested).all(|container| is_kind(&self.kinds, container))
    }

    /// Parses the keys `containers` and `kinds` of a grant.
    ///
    /// # Errors
    /// A value is invalid, or `kinds` restricts nothing.
    pub(super) fn parse(r: &BlockReader<'_>) -> Result<Option<Self>, Error> {
        let list = r.list("containers")?.map(|list| ContainerList::parse(&list, ListAuthor::Administrator));
        let kinds = kinds(r)?;
        match list.transpose()? {
            Some(list) => Ok(Some(Self { forms: list.forms, kinds })),
            None if kinds.is_none() => Ok(None),
            None => {
                let place = r.place("kinds");
                let msg =
                    format!("{place}: restricts the key \"containers\", which is missing; add it, or remove kinds");
                Err(Error::new(Code::InvalidConfig, msg))
            }
        }
    }
}

/// A list of containers as it was written: the key `containers` or the annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContainerList {
    pub(super) place: String,
    author: ListAuthor,
    pub(super) forms: Vec<ContainerForm>,
}

/// One item of a [`ContainerList`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum ContainerForm {
    InitContainers,
    /// A name, or a pattern with `*`.
    Name(String),
}

impl ContainerList {
    fn parse(list: &ItemList, author: ListAuthor) -> Result<Self, Error> {
        at_most(MAX_ITEMS, "items", &list.place, list.items.len())?;
        let invalid = list.items.iter().find(|item| ContainerForm::parse(item).is_none());
        if let Some(item) = invalid {
            return Err(list.reject(item, &format!("{ACCEPTED}{}", suggestion(item))));
        }
        Ok(Self { place: list.place.clone(), author, forms: list.distinct(ACCEPTED, ContainerForm::parse)? })
    }

    /// Returns whether an item matches this container. Istio's containers are never excluded, nor are containers whose
    /// name is not a DNS label: the API server would reject their manifest.
    fn contains(&self, pod: &Pod, container: &Container) -> bool {
        self.forms.iter().any(|form| form.excludes(pod, container))
    }

    /// Adds a note about names and patterns of containers that the pod does not have, and one about names of Istio's
    /// containers.
    fn add_notes(&self, pod: &Pod, notes: &mut Vec<Note>) {
        let names = self.forms.iter().filter_map(|form| match form {
            ContainerForm::Name(name) => Some(name.as_str()),
            ContainerForm::InitContainers => None,
        });
        let (istios, others): (Vec<_>, Vec<_>) = names.partition(|name| ISTIO_CONTAINERS.contains(name));
        if !istios.is_empty() {
            let text = format!("{}: {}: containers of Istio are never excluded", self.place, quoted(&istios));
            notes.push(self.author.note(text));
        }
        let of_pod = || pod.all_containers().map(|container| container.name.as_str());
        let is_unknown = |name: &&str| !of_pod().any(|container| matches(name, container));
        let unknown: Vec<&str> = others.into_iter().filter(is_unknown).collect();
        if unknown.is_empty() {
            return;
        }
        let others = || of_pod().filter(|name| !ISTIO_CONTAINERS.contains(name));
        let compared = unknown.iter().take(MAX_COMPARED);
        let suggestion = compared.map(|name| did_you_mean(name, others())).find(|text| !text.is_empty());
        let text = format!(
            "{}: {}: pod {} has no such container; it has {}{}",
            self.place,
            quoted(&unknown),
            name_of(pod),
            of_pod().collect::<Vec<_>>().join(", "),
            suggestion.unwrap_or_default(),
        );
        notes.push(self.author.note(text));
    }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

/// Returns a suggestion for an invalid item: the form `container:NAME` belongs to `uid-exclude`.
fn suggestion(item: &str) -> String {
    match item.strip_prefix("container:").map(str::trim).filter(|name| is_dns_label(name)) {
        Some(name) => format!("; did you mean {name:?}?"),
        None => did_you_mean(item, [INIT_CONTAINERS]),
    }
}

impl ContainerForm {
    fn parse(text: &str) -> Option<Self> {
        match text {
            INIT_CONTAINERS => Some(Self::InitContainers),
            // A pattern must be able to match a name.
            _ => is_dns_label(&text.replace('*', "0")).then(|| Self::Name(text.to_owned())),
        }
    }

    /// Returns whether the item excludes this container.
    fn excludes(&self, pod: &Pod, container: &Container) -> bool {
        let is_istios = ISTIO_CONTAINERS.contains(&container.name.as_str());
        !is_istios && is_dns_label(&container.name) && self.means(pod, container)
    }

    /// Returns whether the item names more than every container.
    pub(super) fn is_specific(&self) -> bool {
        match self {
            Self::InitContainers => true,
            Self::Name(pattern) => pattern.bytes().any(|byte| byte != b'*'),
        }
    }

    /// Returns whether this item of a grant permits the item of a request: a pattern only by the same text.
    fn permits(&self, requested: &Self) -> bool {
        match (self, requested) {
            (Self::Name(granted), Self::Name(name)) if !name.contains('*') => matches(granted, name),
            (granted, requested) => granted == requested || !granted.is_specific(),
        }
    }

    fn means(&self, pod: &Pod, container: &Container) -> bool {
        match self {
            Self::InitContainers => ContainerKind::of(pod, container) == ContainerKind::Init,
            Self::Name(pattern) => matches(pattern, &container.name),
        }
    }
}

impl fmt::Display for ContainerForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InitContainers => INIT_CONTAINERS,
            Self::Name(name) => name,
        })
    }
}

/// Returns whether `name` matches `pattern`, in which each `*` stands for any text. The cost is at most the product of
/// both lengths.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut remaining) = name.strip_prefix(start) else { return false };
    let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        let Some((_, after)) = remaining.split_once(part) else { return false };
        remaining = after;
    }
    remaining.ends_with(end)
}

#[cfg(test)]
mod tests;
