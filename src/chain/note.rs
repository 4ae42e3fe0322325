//! What a chain has to say besides its policy.

use super::Input;
use super::annotation::Annotation;
use super::sub_plugin::{Chain, SubPlugin};
use crate::cni::SUB_PLUGINS;
use crate::suggest::closest;
use std::collections::HashSet;

/// A line for the log and for `explain`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Note {
    /// How much it matters.
    pub severity: Severity,
    /// One line.
    pub text: String,
}

/// How much a [`Note`] matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Good to know.
    Info,
    /// Somebody asked for something that did not happen.
    Warning,
}

impl Note {
    pub(super) fn info(text: impl Into<String>) -> Self {
        Self { severity: Severity::Info, text: text.into() }
    }

    pub(super) fn warning(text: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, text: text.into() }
    }
}

/// What the pod asks for and doesn't get, because no block in the chain is for it or because the
/// block's `pod_overrides` is false.
pub(super) fn unheard(chain: &Chain, input: &Input<'_>) -> Vec<Note> {
    let mut notes = Vec::new();
    for sub_plugin in SubPlugin::ALL {
        let entries = chain.entries(sub_plugin);
        let wishes = wishes(sub_plugin, !entries.is_empty(), input).join(", ");
        if wishes.is_empty() {
            continue;
        }
        if entries.is_empty() {
            let msg = format!("unused, for the chain has no {}: {wishes}", sub_plugin.name());
            notes.push(Note::warning(msg));
        }
        for (path, _) in entries.iter().filter(|(_, pod_overrides)| !pod_overrides) {
            notes.push(Note::info(format!("ignored, for {path}.pod_overrides is false: {wishes}")));
        }
    }
    notes
}

/// Keys of `args.cni` that are no sub-plugin's, and resemble one. Other plugins read other keys there.
pub(super) fn misspelled(input: &Input<'_>) -> impl Iterator<Item = Note> {
    /// The most keys that are compared: the pod decides how many there are.
    const COMPARED: usize = 32;
    let others = input.args.keys().filter(|key| !SUB_PLUGINS.contains(&key.as_str()));
    others.take(COMPARED).filter_map(|key| {
        let meant = closest(key, SUB_PLUGINS)?;
        Some(Note::warning(format!("args.cni.{key}: unknown, ignored; did you mean {meant:?}?")))
    })
}

/// The same notes, each where it comes first.
pub(super) fn each_once(notes: Vec<Note>) -> Vec<Note> {
    let mut said = HashSet::new();
    notes.into_iter().filter(|note| said.insert(note.clone())).collect()
}

/// The places where the pod speaks to `sub_plugin`. Istio's annotations are no wish to a chain
/// without `istio-redirect`: whoever redirects the pod heeds them, and Istio's injector writes
/// some of them itself.
fn wishes(sub_plugin: SubPlugin, in_chain: bool, input: &Input<'_>) -> Vec<String> {
    let keys = if sub_plugin == SubPlugin::IstioRedirect && !in_chain { &[] } else { sub_plugin.annotations() };
    let annotation = |key: &&str| Some(found(sub_plugin, input, key)?.place);
    let argument = sub_plugin.argument(input).map(|(path, _)| path);
    keys.iter().filter_map(annotation).chain(argument).collect()
}

fn found<'a>(sub_plugin: SubPlugin, input: &Input<'a>, key: &str) -> Option<Annotation<'a>> {
    let facts = input.facts?;
    match sub_plugin {
        SubPlugin::IstioRedirect => Annotation::of_pod(&facts.pod, key),
        SubPlugin::UidExclude | SubPlugin::DnsExclude => Annotation::of_pod_or_namespace(facts, key),
    }
}
