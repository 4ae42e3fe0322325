//! The agent's Prometheus metrics.
//!
//! Label values are constants of this program, never external text, so the number of time series is bounded.

use super::pods::Finding;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The media type of [`Metrics::text`] (OpenMetrics 1.0, "Protocol Negotiation").
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The counters and gauges: the name without the prefix `detour_` and, for a counter, without the suffix `_total`, and what
/// it counts.
const COUNTERS: [(&str, &str); 10] = [
    ("plugin_calls", "Plugin calls reported to the agent, by verb, outcome and reason of a failure"),
    ("api_fallbacks", "Requests sent to the API server because the agent's cache could not answer, by reason"),
    ("drift", "Pods found with rules that differ from the desired rules"),
    ("repairs", "Attempts to repair a pod, by type and result"),
    ("repair_queue_overflows", "Passes over pods that were more than a minute late"),
    ("look_failures", "Failures to read the rules of a pod, by reason"),
    ("installs", "Installations and repairs of the plugin on the node, by result"),
    ("container_starts", "Starts of excluded containers, by result"),
    ("policy_changes", "Changes of the policies of running pods, by result"),
    ("guard_rejected", "Packets that the guards of running pods rejected, by direction"),
];
const GAUGES: [(&str, &str); 9] = [
    ("install_ready", "1 if the plugin is installed and ready on the node, else 0"),
    ("configuration_rejected", "1 if the newest configuration is rejected and an earlier one is in use, else 0"),
    ("plugin_token_renewal_failed", "1 if the API server grants the plugin no new token, else 0"),
    ("facts", "Objects in the agent's cache, by kind"),
    ("facts_too_large", "Objects of which the agent's cache has only the names because they are too large, by kind"),
    ("watch_synced", "1 if the agent's watch of a kind is synchronized, else 0; absent if the kind is not watched"),
    (
        "nri_registered",
        "1 if the container runtime reports containers to the agent, 0 if not; absent without --nri-socket",
    ),
    (
        "multus_chain_invalid_files",
        "Files of other tools because of which Multus skips its auxiliary chain; absent without --multus-chain",
    ),
    ("pods", "Pods of the mesh on the node, by the state of their policy"),
];

type Label = (&'static str, &'static str);
/// Time series by their labels, in the order in which they are exported.
type Series<M> = Family<Vec<Label>, M>;

/// The counters, gauges and histograms of one agent. Clones share their values.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    counters: Arc<BTreeMap<&'static str, Series<Counter>>>,
    gauges: Arc<BTreeMap<&'static str, Series<Gauge>>>,
    call_seconds: Series<Histogram>,
    nri_seconds: Series<Histogram>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("detour");
        registry.register("build", "Version of the agent", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        let counters = COUNTERS.map(|(name, help)| (name, series(&mut registry, name, help)));
        let gauges = GAUGES.map(|(name, help)| (name, series(&mut registry, name, help)));
        // From 5 ms, an ADD without requests, to 20 s, twice the default timeout for facts.
        let call_seconds = Series::new_with_constructor(|| Histogram::new(exponential_buckets(0.005, 2.0, 13)));
        // From 125 µs to 512 ms. Few starts wait longer: at most 1 s in total for each pod sandbox.
        let nri_seconds = Series::new_with_constructor(|| Histogram::new(exponential_buckets(0.000_125, 2.0, 13)));
        for (name, help, seconds) in [
            ("plugin_call_duration", "Duration of plugin calls", &call_seconds),
            ("nri", "How long the container runtime waited for the agent when it started a container", &nri_seconds),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, Series::clone(seconds));
        }
        let (counters, gauges) = (Arc::new(counters.into()), Arc::new(gauges.into()));
        let metrics = Self { registry: Arc::new(registry), counters, gauges, call_seconds, nri_seconds };
        // Alerts need the increase of a series from its first event on.
        ["drift", "repair_queue_overflows"].iter().for_each(|name| metrics.add(name, [], 0));
        for result in ["applied", "rejected", "failed"] {
            metrics.add("policy_changes", [("result", result)], 0);
        }
        for direction in ["outbound", "inbound"] {
            metrics.add("guard_rejected", [("direction", direction)], 0);
        }
        GAUGES[..3].iter().for_each(|(name, _)| metrics.set(name, [], 0));
        metrics
    }
}

fn series<M: Default + Clone>(registry: &mut Registry, name: &str, help: &str) -> Series<M>
where
    Series<M>: Metric,
{
    let series = Series::new_with_constructor(M::default as fn() -> M);
    registry.register(name, help, series.clone());
    series
}

impl Metrics {
    /// Counts an event.
    pub fn count<const N: usize>(&self, name: &str, labels: [Label; N]) {
        self.add(name, labels, 1);
    }

    /// Counts several events.
    pub(super) fn add<const N: usize>(&self, name: &str, labels: [Label; N], count: u64) {
        self.counters[name].get_or_create(&labels.into()).inc_by(count);
    }

    /// Sets a gauge.
    pub fn set<const N: usize>(&self, name: &str, labels: [Label; N], number: impl TryInto<i64>) {
        self.gauges[name].get_or_create(&labels.into()).set(number.try_into().unwrap_or(i64::MAX));
    }

    /// Counts a plugin call by verb ([`CniCommand::name`]), outcome and the reason of a failure ([`Code::name`]), which
    /// is empty otherwise.
    ///
    /// [`CniCommand::name`]: crate::cni::CniCommand::name
    /// [`Code::name`]: crate::cni::Code::name
    pub fn call(&self, verb: &'static str, outcome: &'static str, reason: &'static str, seconds: f64) {
        self.count("plugin_calls", [("verb", verb), ("outcome", outcome), ("reason", reason)]);
        self.call_seconds.get_or_create(&vec![("verb", verb)]).observe(seconds);
    }

    /// Records how long the container runtime waited at the start of a container.
    pub fn runtime_waited(&self, seconds: f64) {
        self.nri_seconds.get_or_create(&Vec::new()).observe(seconds);
    }

    /// Sets the numbers of pods: current, with rejected requests, failed, without rules, outside of the ambient mesh.
    pub fn pods(&self, counts: [u32; 5]) {
        for (state, count) in Finding::NAMES.into_iter().zip(counts) {
            self.set("pods", [("policy", state)], count);
        }
    }

    /// Returns all metrics in the OpenMetrics text format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String can't fail.
        let _ = encode(&mut text, &self.registry);
        // A family without labels is one series, which is usually written without braces.
        text.replace("{} ", " ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, Code};
    use std::collections::BTreeMap;

    /// Returns the value of every series.
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
    fn a_new_agent_exports_zeros() {
        let expected = [
            (format!("detour_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0),
            ("detour_configuration_rejected".into(), 0.0),
            ("detour_drift_total".into(), 0.0),
            (r#"detour_guard_rejected_total{direction="inbound"}"#.into(), 0.0),
            (r#"detour_guard_rejected_total{direction="outbound"}"#.into(), 0.0),
            ("detour_install_ready".into(), 0.0),
            ("detour_plugin_token_renewal_failed".into(), 0.0),
            (r#"detour_policy_changes_total{result="applied"}"#.into(), 0.0),
            (r#"detour_policy_changes_total{result="failed"}"#.into(), 0.0),
            (r#"detour_policy_changes_total{result="rejected"}"#.into(), 0.0),
            ("detour_repair_queue_overflows_total".into(), 0.0),
        ];
        assert_eq!(samples(&Metrics::default()), BTreeMap::from(expected));
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
        let seconds = |series: &str| samples[&format!("detour_plugin_call_duration_seconds_{series}")];
        assert_eq!(seconds(r#"count{verb="ADD"}"#), 2.0);
        assert_eq!(seconds(r#"bucket{le="0.005",verb="ADD"}"#), 1.0);
        assert_eq!(seconds(r#"bucket{le="5.12",verb="ADD"}"#), 1.0);
        assert_eq!(seconds(r#"bucket{le="10.24",verb="ADD"}"#), 2.0);
        assert!((seconds(r#"sum{verb="ADD"}"#) - 10.004).abs() < 1e-9);
    }

    #[test]
    fn every_other_metric_is_exported_under_its_name() {
        let metrics = Metrics::default();
        metrics.count("api_fallbacks", [("reason", "unknown")]);
        metrics.count("drift", []);
        metrics.count("repairs", [("type", "repair"), ("result", "done")]);
        metrics.count("repair_queue_overflows", []);
        metrics.count("look_failures", [("reason", Code::ForeignRules.name())]);
        metrics.set("install_ready", [], 1);
        metrics.count("installs", [("result", "done")]);
        metrics.set("plugin_token_renewal_failed", [], 1);
        metrics.set("facts", [("kind", "pods")], 500);
        metrics.set("facts", [("kind", "pods")], 499);
        metrics.set("facts_too_large", [("kind", "pods")], 2);
        metrics.set("nri_registered", [], true);
        metrics.count("container_starts", [("result", "excluded")]);
        metrics.runtime_waited(0.003);
        metrics.count("policy_changes", [("result", "applied")]);
        metrics.pods([0, 7, 0, 0, 0]);
        metrics.add("guard_rejected", [("direction", "outbound")], 3);
        let samples = samples(&metrics);
        for (series, value) in [
            (r#"detour_api_fallbacks_total{reason="unknown"}"#, 1.0),
            ("detour_drift_total", 1.0),
            (r#"detour_repairs_total{type="repair",result="done"}"#, 1.0),
            ("detour_repair_queue_overflows_total", 1.0),
            (r#"detour_look_failures_total{reason="foreign-rules"}"#, 1.0),
            ("detour_install_ready", 1.0),
            (r#"detour_installs_total{result="done"}"#, 1.0),
            ("detour_plugin_token_renewal_failed", 1.0),
            (r#"detour_facts{kind="pods"}"#, 499.0),
            (r#"detour_facts_too_large{kind="pods"}"#, 2.0),
            ("detour_nri_registered", 1.0),
            (r#"detour_container_starts_total{result="excluded"}"#, 1.0),
            (r#"detour_nri_seconds_bucket{le="0.004"}"#, 1.0),
            (r#"detour_nri_seconds_bucket{le="0.002"}"#, 0.0),
            (r#"detour_policy_changes_total{result="applied"}"#, 1.0),
            (r#"detour_pods{policy="rejected"}"#, 7.0),
            (r#"detour_guard_rejected_total{direction="outbound"}"#, 3.0),
        ] {
            assert_eq!(samples.get(series), Some(&value), "{series}");
        }
        metrics.set("install_ready", [], 0);
        assert!(metrics.text().contains("detour_install_ready 0\n"));
    }
}
