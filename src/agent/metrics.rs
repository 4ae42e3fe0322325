//! What the agent counts for Prometheus.
//!
//! A label's value is a word of this program, never text from elsewhere: the number of time series
//! is bounded by the source.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::sync::Arc;

/// The media type of [`Metrics::text`] (OpenMetrics 1.0, "Protocol Negotiation").
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;

/// Counters, gauges and histograms of one agent; clones count together.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    calls: Counters<3>,
    call_seconds: Family<Labels<1>, Histogram, fn() -> Histogram>,
    fallbacks: Counters<1>,
    drift: Counter,
    repairs: Counters<2>,
    overflows: Counter,
    look_failures: Counters<1>,
    ready: Gauge,
    refused: Gauge,
    installs: Counters<1>,
    facts: Family<Labels<1>, Gauge>,
}

impl Default for Metrics {
    /// Nothing has happened so far.
    fn default() -> Self {
        let mut registry = Registry::with_prefix("detour");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "This program", build);
        let calls = Counters::default();
        let what = "Calls of the plugin that were reported, by what came of them";
        registry.register("plugin_calls", what, calls.clone());
        let call_seconds = Family::new_with_constructor(call_buckets as fn() -> Histogram);
        let what = "How long calls of the plugin took";
        registry.register_with_unit("plugin_call_duration", what, Unit::Seconds, call_seconds.clone());
        let fallbacks = Counters::default();
        let what = "Questions about a pod that went to the API in place of the agent's memory";
        registry.register("api_fallbacks", what, fallbacks.clone());
        let facts = Family::default();
        registry.register("facts", "Objects that the agent remembers", facts.clone());
        let drift = Counter::default();
        registry.register("drift", "Pods found without the rules that they should have", drift.clone());
        let repairs = Counters::default();
        registry.register("repairs", "Repairs of pods, by what was done and what came of it", repairs.clone());
        let overflows = Counter::default();
        let what = "Pods that found the queue for repairs full";
        registry.register("repair_queue_overflows", what, overflows.clone());
        let look_failures = Counters::default();
        let what = "Pods whose rules could not be looked at, by the kind of failure";
        registry.register("look_failures", what, look_failures.clone());
        let ready = Gauge::default();
        registry.register("install_ready", "Whether the plugin is on the node (1) or not (0)", ready.clone());
        let refused = Gauge::default();
        let what = "Whether the newest configuration is refused (1), so that an earlier one stays in use, or not (0)";
        registry.register("configuration_refused", what, refused.clone());
        let installs = Counters::default();
        registry.register("installs", "Times that the plugin was put on the node, or could not be", installs.clone());
        let registry = Arc::new(registry);
        Self {
            registry,
            calls,
            call_seconds,
            fallbacks,
            drift,
            repairs,
            overflows,
            look_failures,
            ready,
            refused,
            installs,
            facts,
        }
    }
}

/// From 5 ms, an ADD that asks nobody, to 20 s, twice what it may wait for facts by default.
fn call_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 2.0, 13))
}

impl Metrics {
    /// The plugin was called and has reported it: the verb ([`Command::name`]), what came of it, and
    /// for a failure its kind ([`Code::name`]), else nothing.
    ///
    /// [`Command::name`]: crate::cni::Command::name
    /// [`Code::name`]: crate::cni::Code::name
    pub fn call(&self, verb: &'static str, outcome: &'static str, reason: &'static str, seconds: f64) {
        self.calls.get_or_create(&[("verb", verb), ("outcome", outcome), ("reason", reason)]).inc();
        self.call_seconds.get_or_create(&[("verb", verb)]).observe(seconds);
    }

    /// The API was asked for what should have been in memory, and why.
    pub fn api_fallback(&self, why: &'static str) {
        self.fallbacks.get_or_create(&[("reason", why)]).inc();
    }

    /// A pod's rules were not what they should be.
    pub fn drift(&self) {
        self.drift.inc();
    }

    /// A repair was tried: of what kind, and what came of it.
    pub fn repair(&self, kind: &'static str, result: &'static str) {
        self.repairs.get_or_create(&[("type", kind), ("result", result)]).inc();
    }

    /// A pod had to be left out, for too many wait for repair.
    pub fn queue_overflow(&self) {
        self.overflows.inc();
    }

    /// A pod's rules could not be looked at, for a failure of this kind ([`Code::name`]).
    ///
    /// [`Code::name`]: crate::cni::Code::name
    pub fn look_failure(&self, reason: &'static str) {
        self.look_failures.get_or_create(&[("reason", reason)]).inc();
    }

    /// Whether the plugin is on the node and can be called.
    pub fn installed(&self, ready: bool) {
        self.ready.set(ready.into());
    }

    /// Whether the newest configuration is not in use because the plugin would refuse it.
    pub fn refused(&self, refused: bool) {
        self.refused.set(refused.into());
    }

    /// The plugin was put on the node, or that failed.
    pub fn install(&self, result: &'static str) {
        self.installs.get_or_create(&[("result", result)]).inc();
    }

    /// So many objects of a kind are in memory now.
    pub fn facts(&self, kind: &'static str, count: usize) {
        self.facts.get_or_create(&[("kind", kind)]).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// All of it as text, in the OpenMetrics format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String can't fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, Code};
    use std::collections::BTreeMap;

    /// Every sample by its name and labels.
    fn samples(metrics: &Metrics) -> BTreeMap<String, f64> {
        let text = metrics.text();
        assert!(text.ends_with("\n# EOF\n"), "{text}");
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').expect("a value");
                (series.to_owned(), value.parse().expect("a number"))
            })
            .collect()
    }

    #[test]
    fn an_agent_that_did_nothing_says_so() {
        let wanted = [
            (format!("detour_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0),
            ("detour_configuration_refused".into(), 0.0),
            ("detour_drift_total".into(), 0.0),
            ("detour_install_ready".into(), 0.0),
            ("detour_repair_queue_overflows_total".into(), 0.0),
        ];
        assert_eq!(samples(&Metrics::default()), BTreeMap::from(wanted));
    }

    #[test]
    fn calls_are_counted_by_outcome_and_timed_by_verb() {
        let metrics = Metrics::default();
        metrics.clone().call(CniCommand::Add.name(), "done", "", 0.004);
        metrics.call(CniCommand::Add.name(), "failed", Code::TryAgain.name(), 10.0);
        metrics.call(CniCommand::Del.name(), "done", "", 0.001);
        let samples = samples(&metrics);
        let calls = |labels: &str| samples[&format!("detour_plugin_calls_total{{{labels}}}")];
        assert_eq!(calls(r#"verb="ADD",outcome="done",reason="""#), 1.0);
        assert_eq!(calls(r#"verb="ADD",outcome="failed",reason="try-again""#), 1.0);
        assert_eq!(calls(r#"verb="DEL",outcome="done",reason="""#), 1.0);
        let seconds = |what: &str| samples[&format!("detour_plugin_call_duration_seconds_{what}")];
        assert_eq!(seconds(r#"count{verb="ADD"}"#), 2.0);
        assert_eq!(seconds(r#"bucket{le="0.005",verb="ADD"}"#), 1.0);
        assert_eq!(seconds(r#"bucket{le="5.12",verb="ADD"}"#), 1.0);
        assert_eq!(seconds(r#"bucket{le="10.24",verb="ADD"}"#), 2.0);
        assert!((seconds(r#"sum{verb="ADD"}"#) - 10.004).abs() < 1e-9);
    }

    #[test]
    fn everything_else_has_a_name_of_its_own() {
        let metrics = Metrics::default();
        metrics.api_fallback("unknown");
        metrics.drift();
        metrics.repair("repair", "done");
        metrics.queue_overflow();
        metrics.look_failure(Code::ForeignRules.name());
        metrics.installed(true);
        metrics.install("done");
        metrics.facts("pods", 500);
        metrics.facts("pods", 499);
        let samples = samples(&metrics);
        for (series, value) in [
            (r#"detour_api_fallbacks_total{reason="unknown"}"#, 1.0),
            ("detour_drift_total", 1.0),
            (r#"detour_repairs_total{type="repair",result="done"}"#, 1.0),
            ("detour_repair_queue_overflows_total", 1.0),
            (r#"detour_look_failures_total{reason="foreign-rules"}"#, 1.0),
            ("detour_install_ready", 1.0),
            (r#"detour_installs_total{result="done"}"#, 1.0),
            (r#"detour_facts{kind="pods"}"#, 499.0),
        ] {
            assert_eq!(samples.get(series), Some(&value), "{series}");
        }
        metrics.installed(false);
        assert!(metrics.text().contains("detour_install_ready 0\n"));
    }
}
