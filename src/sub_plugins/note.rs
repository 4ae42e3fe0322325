//! What a chain has to say besides its policy.
//!
//! Where each value of a policy comes from: whose word it is.

use super::settings::Settings;
use super::sub_plugin::{ParsedBlock, ParsedChain, SubPlugin};
use super::values::AnnotationValue;
use super::{ChainInput, settings};
use crate::cni::SUB_PLUGINS;
use crate::pod::Pod;
use crate::policy::Exclusion;
use crate::suggest::closest;
use std::collections::HashSet;
use std::fmt;

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
pub(super) fn unheard(chain: &ParsedChain, input: &ChainInput<'_>) -> Vec<Note> {
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
pub(super) fn misspelled(input: &ChainInput<'_>) -> impl Iterator<Item = Note> {
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
fn wishes(sub_plugin: SubPlugin, in_chain: bool, input: &ChainInput<'_>) -> Vec<String> {
    let keys = if sub_plugin == SubPlugin::IstioRedirect && !in_chain { &[] } else { sub_plugin.annotations() };
    let annotation = |key: &&str| Some(found(sub_plugin, input, key)?.place);
    let argument = sub_plugin.argument(input).map(|(path, _)| path);
    keys.iter().filter_map(annotation).chain(argument).collect()
}

fn found<'a>(sub_plugin: SubPlugin, input: &ChainInput<'a>, key: &str) -> Option<AnnotationValue<'a>> {
    let facts = input.facts?;
    match sub_plugin {
        SubPlugin::IstioRedirect => AnnotationValue::of_pod(&facts.pod, key),
        SubPlugin::UidExclude | SubPlugin::DnsExclude => AnnotationValue::of_pod_or_namespace(facts, key),
    }
}

/// Whose word a setting or an exclusion is; from the farthest from the pod to the nearest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SettingSource {
    /// Nobody's: Istio's own default.
    Default,
    /// The configuration's block at this path.
    Configuration(String),
    /// What the container istio-proxy says of itself: its ID's key or an environment variable.
    Container(&'static str),
    /// `args.cni`, the block of this sub-plugin.
    Argument(SubPlugin),
    /// This annotation of the pod's namespace.
    Namespace(&'static str),
    /// This annotation of the pod.
    Pod(&'static str),
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Configuration(path) => write!(f, "configuration, {path}"),
            Self::Container(key) => write!(f, "container istio-proxy, {key}"),
            Self::Argument(sub_plugin) => write!(f, "args.cni.{}", sub_plugin.name()),
            Self::Namespace(key) => write!(f, "namespace, {key}"),
            Self::Pod(key) => write!(f, "pod, {key}"),
        }
    }
}

/// Where everything in an [`super::Output`]'s policy comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins {
    /// Each key of `istio-redirect` with whose value counts; several where several blocks add to
    /// one list. Empty where nothing is redirected.
    pub settings: Vec<(&'static str, SettingSource)>,
    /// Each exclusion that was asked for, those too that another one covers.
    pub exclusions: Vec<(Exclusion, SettingSource)>,
}

/// The layers of the redirection, the nearest to the pod first.
pub(super) struct Layers<'a> {
    /// The blocks one by one, each with its path.
    pub blocks: &'a [ParsedBlock<Settings>],
    /// The pod.
    pub pod: &'a Pod,
    /// Its annotations.
    pub annotated: Settings,
    /// `args.cni`.
    pub args: Settings,
    /// The container istio-proxy.
    pub container: Settings,
    /// What the blocks set together.
    pub block: Settings,
}

impl Layers<'_> {
    /// Each key with whose value counts.
    pub(super) fn origins(&self) -> impl Iterator<Item = (&'static str, SettingSource)> {
        let layers = [&self.annotated, &self.args, &self.container, &self.block].map(Settings::says);
        Settings::KEYS.iter().enumerate().flat_map(move |(index, key)| {
            let sources = match layers.iter().position(|says| says[index]) {
                Some(0) => vec![SettingSource::Pod(settings::of_key(self.pod, key))],
                Some(1) => vec![SettingSource::Argument(SubPlugin::IstioRedirect)],
                Some(2) => vec![SettingSource::Container(settings::said_by(key))],
                Some(_) => {
                    let says = self.blocks.iter().filter(|entry| entry.own.says()[index]);
                    says.map(|entry| SettingSource::Configuration(format!("{}.{key}", entry.path))).collect()
                }
                None => vec![SettingSource::Default],
            };
            sources.into_iter().map(|source| (*key, source))
        })
    }

    /// What all of them say together.
    pub(super) fn settings(self) -> Settings {
        self.annotated.over(self.args).over(self.container).over(self.block)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scenario::chain;
    use super::*;
    use serde_json::json;

    #[test]
    fn the_source_of_a_setting_is_the_nearest_layer_that_has_it() {
        let scenario =
            chain(json!([{"type": "istio-redirect", "proxy_uid": 1, "proxy_port": 2, "drop_invalid": true}]))
                .env("INVALID_DROP", "true")
                .args(json!({"istio-redirect": {"proxy_port": 3, "exclude_interfaces": "a"}}))
                .annotated("traffic.sidecar.istio.io/excludeInterfaces", "b")
                .annotated("traffic.sidecar.istio.io/kubevirtInterfaces", "c");
        let settings = scenario.output().origins.settings;
        assert_eq!(settings.len(), Settings::KEYS.len());
        for (key, source) in [
            ("proxy_uid", "container istio-proxy, runAsUser"),
            ("proxy_port", "args.cni.istio-redirect"),
            ("drop_invalid", "container istio-proxy, INVALID_DROP"),
            ("exclude_interfaces", "pod, traffic.sidecar.istio.io/excludeInterfaces"),
            ("reroute_virtual_interfaces", "pod, traffic.sidecar.istio.io/kubevirtInterfaces"),
            ("redirect_dns", "default"),
        ] {
            let found: Vec<String> =
                settings.iter().filter(|(k, _)| *k == key).map(|(_, source)| source.to_string()).collect();
            assert_eq!(found, [source], "{key}");
        }
        let plain = chain(json!([{"type": "istio-redirect", "proxy_port": 2}])).output().origins.settings;
        assert!(plain.contains(&("proxy_port", SettingSource::Configuration("chain[0].proxy_port".into()))));
    }

    #[test]
    fn every_exclusion_has_its_source() {
        let scenario = chain(json!([{"type": "uid-exclude", "uids": 1}, {"type": "dns-exclude", "uids": 2}]))
            .args(json!({"uid-exclude": {"uids": 3}}))
            .annotated("detour.io/exclude-uids", "4")
            .namespace("detour.io/exclude-gids", "5")
            .namespace("detour.io/exclude-dns", "all");
        let sources: std::collections::BTreeSet<String> =
            scenario.output().origins.exclusions.iter().map(|(_, source)| source.to_string()).collect();
        let expected = [
            "args.cni.uid-exclude",
            "configuration, chain[0]",
            "configuration, chain[1]",
            "namespace, detour.io/exclude-dns",
            "namespace, detour.io/exclude-gids",
            "pod, detour.io/exclude-uids",
        ];
        assert_eq!(sources.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }
}
