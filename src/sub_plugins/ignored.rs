//! Annotations and arguments of a pod without effect: unknown ones, and those that no sub-plugin uses.

use super::chain::{ChainInput, ParsedChain};
use super::context::{AnnotationValue, name_of};
use super::decision::injection_request;
use super::exclude::Exclude;
use super::settings::Settings;
use super::sub_plugin::Note;
use super::sub_plugin::SubPlugin;
use super::values::parse_bool;
use crate::cni::{SUB_PLUGINS, closest, excerpt};
use crate::pod::well_known::{INJECT, ISTIO_PREFIX, OTHER_ANNOTATIONS};
use crate::pod::{Facts, Pod};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Limit of unknown annotations per object that are named and compared with known ones.
const MAX_NAMED: usize = 8;
/// Limit of keys in `args.cni` that are compared with known ones. The pod decides how many there are.
const MAX_COMPARED: usize = 32;

const NOT_IN_CHAIN: &str = ": ignored: the sub-plugin chain has no ";

/// A warning about something that is valid, but hardly ever has the intended effect. `Display` shows one line for logs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Warning {
    /// The kind of mistake; stable.
    pub code: &'static str,
    /// The effect: for an annotation or label, its object, and why it has none.
    pub what: String,
    /// The next step.
    pub next: String,
}

impl Warning {
    /// Returns a warning.
    pub fn new(code: &'static str, what: impl Into<String>, next: impl Into<String>) -> Self {
        Self { code, what: what.into(), next: next.into() }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what, self.next)
    }
}

/// Returns the annotations that have one of Istio's or detour's prefixes and an unknown name, and values of
/// `sidecar.istio.io/inject` that are not booleans. Takes one pass, without an allocation if all are known and valid.
#[must_use]
pub fn ignored(facts: &Facts) -> Vec<Warning> {
    let mut all = Vec::new();
    add_unknown(&facts.pod.annotations, || format!("pod {}", name_of(&facts.pod)), &mut all);
    if let Some(namespace) = &facts.namespace {
        add_unknown(&namespace.annotations, || format!("namespace {}", namespace.name), &mut all);
    }
    all.extend(invalid_injection_request(&facts.pod));
    all
}

/// Returns the next step for a note of [`unused_requests`] about a sub-plugin that is not in the chain.
#[must_use]
pub fn missing_sub_plugin(note: &str) -> Option<String> {
    let (_, name) = note.split_once(NOT_IN_CHAIN)?;
    SUB_PLUGINS
        .contains(&name)
        .then(|| format!("add {{\"type\": {name:?}}} to the sub-plugin chain of the configuration"))
}

/// Returns a note for each annotation and argument of the pod that has no effect because the sub-plugin chain has no
/// block for it, or because the block's `pod_overrides` is false.
pub(super) fn unused_requests(chain: &ParsedChain, input: &ChainInput<'_>) -> Vec<Note> {
    let mut notes = Vec::new();
    for sub_plugin in SubPlugin::ALL {
        let blocks = chain.paths(sub_plugin);
        let requests = requests(sub_plugin, !blocks.is_empty(), input).join(", ");
        if requests.is_empty() {
            continue;
        }
        if blocks.is_empty() {
            let name = sub_plugin.name();
            notes.push(Note::warning(format!("{requests}{NOT_IN_CHAIN}{name}")));
        }
        for (path, _) in blocks.iter().filter(|(_, pod_overrides)| !pod_overrides) {
            notes.push(Note::info(format!("{requests}: ignored: {path}.pod_overrides is false")));
        }
    }
    notes
}

/// Returns a note for each key of `args.cni` that resembles a sub-plugin's name. Other keys belong to other plugins.
pub(super) fn misspelled_arguments(input: &ChainInput<'_>) -> impl Iterator<Item = Note> {
    let others = input.args.keys().filter(|key| !SUB_PLUGINS.contains(&key.as_str()));
    others.take(MAX_COMPARED).filter_map(|key| {
        let suggestion = closest(key, SUB_PLUGINS)?;
        Some(Note::warning(format!("args.cni.{key}: unknown, ignored; did you mean {suggestion:?}?")))
    })
}

/// Returns the annotations that `sub_plugin` reads.
pub(super) fn annotations(sub_plugin: SubPlugin) -> &'static [&'static str] {
    if sub_plugin == SubPlugin::IstioRedirect { Settings::ANNOTATIONS } else { Exclude::annotations(sub_plugin) }
}

/// Returns the annotations and the argument with which the pod addresses `sub_plugin`. Without `istio-redirect` in the
/// sub-plugin chain, Istio's annotations do not count: another program that redirects the pod reads them, and Istio's
/// injector sets some of them itself.
fn requests(sub_plugin: SubPlugin, in_chain: bool, input: &ChainInput<'_>) -> Vec<String> {
    let keys = if sub_plugin == SubPlugin::IstioRedirect && !in_chain { &[] } else { annotations(sub_plugin) };
    let annotation = |key: &&str| {
        let facts = input.facts?;
        let annotation = match sub_plugin {
            SubPlugin::IstioRedirect => AnnotationValue::of_pod(&facts.pod, key)?,
            _ => AnnotationValue::of_pod_or_namespace(facts, key)?,
        };
        Some(annotation.place)
    };
    let argument = input.argument(sub_plugin).map(|(path, _)| path);
    keys.iter().filter_map(annotation).chain(argument).collect()
}

fn add_unknown(annotations: &BTreeMap<String, String>, object: impl Fn() -> String, all: &mut Vec<Warning>) {
    const CODE: &str = "unknown-annotation";
    let mut count = 0;
    for key in annotations.keys().filter(|key| is_unknown(key)) {
        count += 1;
        if count > MAX_NAMED {
            continue;
        }
        let what = format!("annotation {:?} of {}: unknown, ignored", excerpt(key), object());
        let next = match suggestion(key) {
            Some(known) => format!("did you mean {known:?}?"),
            None => "correct its name, or remove it".to_owned(),
        };
        all.push(Warning::new(CODE, what, next));
    }
    if count > MAX_NAMED {
        let what = format!("{} more annotations of {}: unknown, ignored", count - MAX_NAMED, object());
        all.push(Warning::new(CODE, what, "correct their names, or remove them"));
    }
}

/// Returns whether the annotation has a known prefix and an unknown name. Under `istio.io`, which has many other
/// purposes, only a name that resembles a known one counts.
fn is_unknown(key: &str) -> bool {
    let Some((prefix, name)) = key.split_once('/') else { return false };
    let Some((_, others)) = OTHER_ANNOTATIONS.iter().find(|(known, _)| *known == prefix) else { return false };
    if others.contains(&name) || read_annotations().any(|known| known == (prefix, name)) {
        return false;
    }
    let names = || read_annotations().filter(|(known, _)| *known == ISTIO_PREFIX).map(|(_, name)| name);
    prefix != ISTIO_PREFIX || closest(name, names()).is_some()
}

/// Returns the annotations that the plugin reads, each as its prefix and name.
fn read_annotations() -> impl Iterator<Item = (&'static str, &'static str)> {
    SubPlugin::ALL.into_iter().flat_map(annotations).filter_map(|key| key.split_once('/'))
}

/// Returns the known annotation with the most similar name under any prefix.
fn suggestion(key: &str) -> Option<String> {
    let (_, name) = key.split_once('/')?;
    let others = OTHER_ANNOTATIONS.iter().flat_map(|(prefix, names)| names.iter().map(move |name| (*prefix, *name)));
    let known: Vec<(&str, &str)> = read_annotations().chain(others).collect();
    let name = closest(name, known.iter().map(|(_, name)| *name))?;
    let (prefix, _) = known.iter().find(|(_, known)| *known == name)?;
    Some(format!("{prefix}/{name}"))
}

/// Returns a value of `sidecar.istio.io/inject` that is not a boolean. Istio's injector accepts more words for true than
/// `strconv.ParseBool`, which istio-cni uses.
fn invalid_injection_request(pod: &Pod) -> Option<Warning> {
    let (kind, value) = injection_request(pod)?;
    let injects = ["y", "yes", "on", "true"].iter().any(|word| value.eq_ignore_ascii_case(word));
    if value.is_empty() || injects || parse_bool(value).is_some() {
        return None;
    }
    let what = format!("{kind} {INJECT:?} of pod {}: {:?} is not a boolean, ignored", name_of(pod), excerpt(value));
    Some(Warning::new("inject-not-a-boolean", what, "expected true or false"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::{facts, meshed_pod};
    use super::*;
    use std::time::{Duration, Instant};

    fn ignored_on_pod(keys: &[&str]) -> Vec<String> {
        let mut pod = meshed_pod();
        pod.annotations.extend(keys.iter().map(|key| ((*key).to_owned(), "true".to_owned())));
        lines(&facts(pod, &[]))
    }

    fn lines(facts: &Facts) -> Vec<String> {
        ignored(facts).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_misspelled_annotation_is_reported_with_a_suggestion() {
        for (key, meant) in [
            ("detour.io/exclude-uid", "detour.io/exclude-uids"),
            ("detour.io/exclude-outbound-port-for-uids", "detour.io/exclude-outbound-ports-for-uids"),
            ("traffic.sidecar.istio.io/excludeOutboundPort", "traffic.sidecar.istio.io/excludeOutboundPorts"),
            ("traffic.sidecar.istio.io/excludeoutboundports", "traffic.sidecar.istio.io/excludeOutboundPorts"),
            ("sidecar.istio.io/excludeOutboundPorts", "traffic.sidecar.istio.io/excludeOutboundPorts"),
            ("sidecar.istio.io/intercptionMode", "sidecar.istio.io/interceptionMode"),
            ("sidecar.istio.io/proxyCpu", "sidecar.istio.io/proxyCPU"),
            ("istio.io/reroute-virtual-interface", "istio.io/reroute-virtual-interfaces"),
        ] {
            let wanted = format!("annotation {key:?} of pod shop/cart-1: unknown, ignored; did you mean {meant:?}?");
            assert_eq!(ignored_on_pod(&[key]), [wanted]);
        }
        let wanted = "annotation \"sidecar.istio.io/something\" of pod shop/cart-1: unknown, ignored; correct its name, \
                      or remove it";
        assert_eq!(ignored_on_pod(&["sidecar.istio.io/something"]), [wanted]);
        let namespace = facts(meshed_pod(), &[("detour.io/exclude-dn", "all")]);
        let wanted = "annotation \"detour.io/exclude-dn\" of namespace shop: unknown, ignored; did you mean \
                      \"detour.io/exclude-dns\"?";
        assert_eq!(lines(&namespace), [wanted]);
    }

    #[test]
    fn published_annotations_and_those_of_others_are_no_warning() {
        for (prefix, of_prefix) in OTHER_ANNOTATIONS {
            for name in of_prefix {
                if *name != "inject" {
                    assert_eq!(ignored_on_pod(&[&format!("{prefix}/{name}")]), [""; 0]);
                }
            }
        }
        let others =
            ["kubernetes.io/config.hash", "proxy.istio.io/config", "istio.io/use-waypoint", "plain", "detour.io"];
        assert_eq!(ignored_on_pod(&others), [""; 0]);
    }

    #[test]
    fn an_injection_request_that_is_not_a_boolean_is_reported() {
        let with = |value: &str| {
            let mut pod = meshed_pod();
            pod.labels.insert("sidecar.istio.io/inject".into(), value.into());
            lines(&facts(pod, &[]))
        };
        for value in ["true", "false", "T", "0", "yes", "Y", "on", ""] {
            assert_eq!(with(value), [""; 0], "{value}");
        }
        let wanted = "label \"sidecar.istio.io/inject\" of pod shop/cart-1: \"yess\" is not a boolean, ignored; \
                      expected true or false";
        assert_eq!(with("yess"), [wanted]);
        assert_eq!(with("no").len(), 1, "the plugin redirects such a pod");
    }

    #[test]
    fn many_or_long_unknown_annotations_are_reported_in_short() {
        let started = Instant::now();
        let mut pod = meshed_pod();
        let many = (0..50_000).map(|i| (format!("detour.io/exclude-uid{i}"), String::new()));
        pod.annotations
            .extend(many.chain((0..50_000).map(|i| (format!("istio.io/reroute-virtual-{i}"), String::new()))));
        pod.annotations.insert(format!("detour.io/{}\u{1b}[2J", "exclude".repeat(100_000)), String::new());
        let lines = lines(&facts(pod, &[]));
        assert_eq!(lines.len(), MAX_NAMED + 1);
        assert!(lines.iter().all(|line| line.len() < 300 && !line.contains('\u{1b}')), "{lines:?}");
        assert!(
            lines[MAX_NAMED].ends_with(
                "more annotations of pod shop/cart-1: unknown, ignored; correct their names, or remove them"
            )
        );
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }
}
