//! What somebody may do in the cluster.

use std::fmt;

/// A right, in the words of a Role's rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Right {
    /// `get`, `list`, `patch`, `create`.
    pub verb: &'static str,
    /// The API group; empty for the core's.
    pub group: &'static str,
    /// The resource, plural.
    pub resource: &'static str,
    /// `status`.
    pub subresource: Option<&'static str>,
    /// In which namespace; `None` is in all.
    pub namespace: Option<String>,
}

impl fmt::Display for Right {
    /// As `kubectl auth can-i` spells it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if let Some(subresource) = self.subresource {
            write!(f, "/{subresource}")?;
        }
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in namespace {namespace}"),
            None => f.write_str(" in all namespaces"),
        }
    }
}
