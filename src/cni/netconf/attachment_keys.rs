//! The keys of an attachment of `--attachments`: an unknown key is an error there.

use super::kubernetes::Kubernetes;
use super::unknown::{first_at_the_top, is_of_maistra};
use crate::cni::list::excerpt;
use crate::suggest::did_you_mean;
use serde_json::{Map, Value};

/// Returns an error message for the first key of an attachment that is unknown at the top level or in `kubernetes`, with
/// a suggestion.
#[must_use]
pub fn unknown_key(keys: &Map<String, Value>) -> Option<String> {
    let in_kubernetes = || {
        let (unknown, known) = Kubernetes::keys_of(keys.get("kubernetes")?)?;
        let key = unknown.iter().find(|key| !is_of_maistra(key))?;
        Some((format!("kubernetes.{}", excerpt(key)), did_you_mean(key, known)))
    };
    let (key, suggestion) = first_at_the_top(keys).or_else(in_kubernetes)?;
    let next = if suggestion.is_empty() { "; remove it" } else { suggestion.as_str() };
    Some(format!("{key}: unknown key{next}"))
}
