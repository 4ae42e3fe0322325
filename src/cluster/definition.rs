//! NetworkAttachmentDefinitions, as far as they are read.

use crate::pod::well_known::RESOURCE_NAME;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The name of an object of a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectRef {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A definition as the cluster knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Definition {
    /// Its namespace and name.
    pub object: ObjectRef,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// `spec.config`, byte for byte; empty where there is none.
    pub config: String,
}

impl Definition {
    /// The largest `spec.config`, in bytes: as much as all annotations of an object may have. One byte more
    /// is kept of a larger one, which shows that it is too large.
    pub const MAX_CONFIG: usize = 256 << 10;

    /// The device plugin's resource that it asks for.
    #[must_use]
    pub fn resource_name(&self) -> Option<&str> {
        self.annotations.get(RESOURCE_NAME).map(String::as_str)
    }
}

/// A definition that is looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DefinitionQuery {
    /// Which one.
    pub object: ObjectRef,
    /// Whether one that is not there may be about to appear, and is waited for. Else its absence is
    /// an answer.
    pub awaited: bool,
}

/// What looking a definition up came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookup {
    /// It is there.
    Found(Definition),
    /// It is not there; where it was looked for, for how long, and what was answered.
    Missing(String),
}
