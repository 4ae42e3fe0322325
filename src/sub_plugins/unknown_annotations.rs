//! Annotations that look like Istio's or detour's and are neither: a misspelled one has no effect.

use super::context::name_of;
use super::decision::inject;
use super::sub_plugin::SubPlugin;
use super::values::parse_bool;
use crate::cni::excerpt;
use crate::pod::{Facts, Pod};
use crate::suggest::closest;
use std::collections::BTreeMap;
use std::fmt;

/// Istio's annotations of pods that the plugin does not read, by prefix (istio/api,
/// `annotation/annotations.yaml`, those of earlier releases and of the injection template included).
const ISTIO: [(&str, &str); 4] = [
    (
        "sidecar.istio.io",
        "agentLogLevel bootstrapOverride capNetBindService componentLogLevel controlPlaneAuthPolicy discoveryAddress \
         enableCoreDump extraStatTags inject logLevel nativeSidecar proxyCPU proxyCPULimit proxyImage proxyImageType \
         proxyMemory proxyMemoryLimit rewriteAppHTTPProbers statsCompression statsEvictionInterval statsFlushInterval \
         statsHistogramBuckets statsInclusionPrefixes statsInclusionRegexps statsInclusionSuffixes status userVolume \
         userVolumeMount",
    ),
    ("traffic.sidecar.istio.io", ""),
    (GENERAL, "autoRegistrationGroup connectedAt disconnectedAt dry-run rev workloadController"),
    ("detour.io", ""),
];
/// A prefix with names of many other purposes: only what resembles an annotation that the plugin reads counts.
const GENERAL: &str = "istio.io";
/// The most unknown annotations of an object that are named and compared with known ones.
const MOST: usize = 8;

/// Something that a pod or its namespace asks for in vain. `Display` gives one line for logs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ignored {
    /// Which kind it is; stable.
    pub code: &'static str,
    /// What is ignored, and whose it is.
    pub what: String,
    /// What can be done.
    pub next: String,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what, self.next)
    }
}

/// Returns the annotations that have one of Istio's or detour's prefixes and an unknown name, and a value of
/// `sidecar.istio.io/inject` that is not a boolean. One pass, without an allocation if all is well.
#[must_use]
pub fn ignored(facts: &Facts) -> Vec<Ignored> {
    let mut all = Vec::new();
    unknown(&facts.pod.annotations, || format!("pod {}", name_of(&facts.pod)), &mut all);
    if let Some(namespace) = &facts.namespace {
        unknown(&namespace.annotations, || format!("namespace {}", namespace.name), &mut all);
    }
    all.extend(inject_value(&facts.pod));
    all
}

fn unknown(annotations: &BTreeMap<String, String>, whose: impl Fn() -> String, all: &mut Vec<Ignored>) {
    const CODE: &str = "unknown-annotation";
    let mut count = 0;
    for key in annotations.keys().filter(|key| is_unknown(key)) {
        count += 1;
        if count > MOST {
            continue;
        }
        let what = format!("annotation {:?} of {}: unknown, ignored", excerpt(key), whose());
        let next = match meant(key) {
            Some(known) => format!("did you mean {known:?}?"),
            None => "correct its name, or remove it".to_owned(),
        };
        all.push(Ignored { code: CODE, what, next });
    }
    if count > MOST {
        let what = format!("{} more annotations of {}: unknown, ignored", count - MOST, whose());
        all.push(Ignored { code: CODE, what, next: "correct their names, or remove them".to_owned() });
    }
}

/// The names that are known under a prefix; `None` for a prefix of others.
fn known(prefix: &str) -> Option<impl Iterator<Item = &'static str>> {
    let (prefix, others) = ISTIO.into_iter().find(|(known, _)| *known == prefix)?;
    Some(read().filter(move |(own, _)| *own == prefix).map(|(_, name)| name).chain(others.split_whitespace()))
}

/// The annotations that the plugin reads: prefix and name.
fn read() -> impl Iterator<Item = (&'static str, &'static str)> {
    SubPlugin::ALL.into_iter().flat_map(|own| own.annotations()).filter_map(|key| key.split_once('/'))
}

fn is_unknown(key: &str) -> bool {
    let Some((prefix, name)) = key.split_once('/') else { return false };
    known(prefix).is_some_and(|mut known| !known.any(|known| known == name))
        && (prefix != GENERAL || closest(name, general()).is_some())
}

fn general() -> impl Iterator<Item = &'static str> {
    read().filter(|(prefix, _)| *prefix == GENERAL).map(|(_, name)| name)
}

/// The known annotation whose name is the most similar, under whichever prefix.
fn meant(key: &str) -> Option<String> {
    let (_, name) = key.split_once('/')?;
    let prefixes = || ISTIO.into_iter().map(|(prefix, _)| prefix);
    let named = |prefix: &&str, name: &str| known(prefix).is_some_and(|mut known| known.any(|known| known == name));
    let name = closest(name, prefixes().filter_map(known).flatten())?;
    let prefix = prefixes().find(|prefix| named(prefix, name))?;
    Some(format!("{prefix}/{name}"))
}

/// Istio's injector understands more words for true than `strconv.ParseBool`, by which istio-cni decides.
fn inject_value(pod: &Pod) -> Option<Ignored> {
    let (key, value) = inject(pod)?;
    let injects = ["y", "yes", "on", "true"].iter().any(|word| value.eq_ignore_ascii_case(word));
    if value.is_empty() || injects || parse_bool(value).is_some() {
        return None;
    }
    let what = format!("{key} of pod {}: {:?} is not a boolean, ignored", name_of(pod), excerpt(value));
    Some(Ignored { code: "inject-not-a-boolean", what, next: "expected true or false".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::super::scenario::{facts, meshed_pod};
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
    fn a_misspelled_annotation_is_named_with_the_one_that_is_meant() {
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
        for (prefix, _) in ISTIO {
            for name in known(prefix).expect("a known prefix") {
                if name != "inject" {
                    assert_eq!(ignored_on_pod(&[&format!("{prefix}/{name}")]), [""; 0]);
                }
            }
        }
        let others =
            ["kubernetes.io/config.hash", "proxy.istio.io/config", "istio.io/use-waypoint", "plain", "detour.io"];
        assert_eq!(ignored_on_pod(&others), [""; 0]);
    }

    #[test]
    fn a_value_of_inject_that_is_no_boolean_is_named() {
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
    fn of_many_or_long_annotations_only_a_few_are_named() {
        let started = Instant::now();
        let mut pod = meshed_pod();
        let many = (0..50_000).map(|i| (format!("detour.io/exclude-uid{i}"), String::new()));
        pod.annotations
            .extend(many.chain((0..50_000).map(|i| (format!("istio.io/reroute-virtual-{i}"), String::new()))));
        pod.annotations.insert(format!("detour.io/{}\u{1b}[2J", "exclude".repeat(100_000)), String::new());
        let lines = lines(&facts(pod, &[]));
        assert_eq!(lines.len(), MOST + 1);
        assert!(lines.iter().all(|line| line.len() < 300 && !line.contains('\u{1b}')), "{lines:?}");
        assert!(
            lines[MOST].ends_with(
                "more annotations of pod shop/cart-1: unknown, ignored; correct their names, or remove them"
            )
        );
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }
}
