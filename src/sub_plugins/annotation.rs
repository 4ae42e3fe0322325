//! Annotations, with the place where each stands.

use super::SettingSource;
use super::context::{ListAuthor, name_of};
use crate::cni::{Error, ItemList};
use crate::pod::{Facts, Pod};

/// An annotation that is there, though its value may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AnnotationValue<'a> {
    /// For messages: its key, and whose it is.
    pub place: String,
    /// Its value.
    pub value: &'a str,
    /// Whose it is.
    pub author: ListAuthor,
}

impl<'a> AnnotationValue<'a> {
    /// The pod's.
    pub(super) fn of_pod(pod: &'a Pod, key: &str) -> Option<Self> {
        let value = pod.annotations.get(key)?;
        Some(Self { place: format!("annotation {key:?} of pod {}", name_of(pod)), value, author: ListAuthor::Pod })
    }

    /// The pod's or, where the pod has none, its namespace's.
    pub(super) fn of_pod_or_namespace(facts: &'a Facts, key: &str) -> Option<Self> {
        Self::of_pod(&facts.pod, key).or_else(|| {
            let namespace = facts.namespace.as_ref()?;
            let value = namespace.annotations.get(key)?;
            let place = format!("annotation {key:?} of namespace {}", namespace.name);
            Some(Self { place, value, author: ListAuthor::Administrator })
        })
    }

    /// Whose word it is; `key` is its own.
    pub(super) const fn source(&self, key: &'static str) -> SettingSource {
        match self.author {
            ListAuthor::Pod => SettingSource::Pod(key),
            ListAuthor::Administrator => SettingSource::Namespace(key),
        }
    }

    /// The error for a value that is not understood.
    pub(super) fn reject(&self, accepted: &str) -> Error {
        ItemList { place: self.place.clone(), items: Vec::new() }.reject(self.value, accepted)
    }

    /// Its value as a comma list.
    pub(super) fn list(&self) -> Result<ItemList, Error> {
        ItemList::from_text(&self.place, self.value)
    }
}
