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
use std::array;
use std::sync::Arc;

/// The media type of [`Metrics::text`] (OpenMetrics 1.0, "Protocol Negotiation").
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The counters, gauges and histograms of one agent. Clones share their values.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    calls: Series<Counter, 3>,
    call_seconds: Series<Histogram, 1>,
    /// Requests that went to the API server instead of the cache, by reason.
    pub fallbacks: Series<Counter, 1>,
    pub(super) drift: Counter,
    /// Attempts to repair a pod, by type and result.
    pub repairs: Series<Counter, 2>,
    pub(super) overflows: Counter,
    /// Failures to read a pod's rules, by the name of their code ([`crate::cni::Code::name`]).
    pub look_failures: Series<Counter, 1>,
    pub(super) ready: Gauge,
    pub(super) rejected: Gauge,
    pub(super) token_renewal_failed: Gauge,
    /// Installations, by result.
    pub installs: Series<Counter, 1>,
    facts: Series<Gauge, 1>,
    too_large: Series<Gauge, 1>,
    /// Whether the watch of a kind is synchronized.
    pub watch_synced: Series<Gauge, 1>,
    /// Whether the container runtime reports containers to the agent.
    pub nri_registered: Series<Gauge, 0>,
    pub(super) multus_chain: Series<Gauge, 0>,
    /// Starts of excluded containers, by result.
    pub container_starts: Series<Counter, 1>,
    /// How long the container runtime waited at the start of a container.
    pub nri_seconds: Series<Histogram, 0>,
    /// Changes of the policies of running pods, by result.
    pub policy_changes: Series<Counter, 1>,
    pub(super) guard_rejected: Series<Counter, 1>,
    pods: Series<Gauge, 1>,
}

/// The time series of a metric, one for each combination of values of its labels. A series exists from its first use on.
#[derive(Debug, Clone)]
pub struct Series<M, const N: usize> {
    labels: [&'static str; N],
    family: Family<[(&'static str, &'static str); N], M>,
}

impl<M: Clone, const N: usize> Series<M, N> {
    fn of(&self, values: [&'static str; N]) -> M {
        self.family.get_or_create_owned(&array::from_fn(|label| (self.labels[label], values[label])))
    }
}

impl<const N: usize> Series<Counter, N> {
    /// Counts an event with these values of the labels.
    pub fn count(&self, values: [&'static str; N]) {
        self.of(values).inc();
    }

    /// Counts several events.
    pub(super) fn add(&self, values: [&'static str; N], count: u64) {
        self.of(values).inc_by(count);
    }
}

impl<const N: usize> Series<Gauge, N> {
    /// Sets the number for these values of the labels.
    pub fn set(&self, values: [&'static str; N], number: impl TryInto<i64>) {
        self.of(values).set(number.try_into().unwrap_or(i64::MAX));
    }
}

impl<const N: usize> Series<Histogram, N> {
    /// Records a duration.
    pub fn observe(&self, values: [&'static str; N], seconds: f64) {
        self.of(values).observe(seconds);
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("detour");
        registry.register("build", "Version of the agent", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        let calls = "Plugin calls reported to the agent, by verb, outcome and reason of a failure";
        let fallbacks = "Requests sent to the API server because the agent's cache could not answer, by reason";
        let too_large = "Objects of which the agent's cache has only the names because they are too large, by kind";
        let synced = "1 if the agent's watch of a kind is synchronized, else 0; absent if the kind is not watched";
        let rejected = "1 if the newest configuration is rejected and an earlier one is in use, else 0";
        let registered =
            "1 if the container runtime reports containers to the agent, 0 if not; absent without --nri-socket";
        let chain =
            "Files of other tools because of which Multus skips its auxiliary chain; absent without --multus-chain";
        let waited = "How long the container runtime waited for the agent when it started a container";
        let guarded = "Packets that the guards of running pods rejected, by direction";
        let add = &mut registry;
        let metrics = Self {
            calls: series(add, "plugin_calls", calls, ["verb", "outcome", "reason"]),
            call_seconds: seconds(add, "plugin_call_duration", "Duration of plugin calls", ["verb"], call_buckets),
            fallbacks: series(add, "api_fallbacks", fallbacks, ["reason"]),
            facts: series(add, "facts", "Objects in the agent's cache, by kind", ["kind"]),
            too_large: series(add, "facts_too_large", too_large, ["kind"]),
            watch_synced: series(add, "watch_synced", synced, ["kind"]),
            drift: metric(add, "drift", "Pods found with rules that differ from the desired rules"),
            repairs: series(add, "repairs", "Attempts to repair a pod, by type and result", ["type", "result"]),
            overflows: metric(add, "repair_queue_overflows", "Passes over pods that were more than a minute late"),
            look_failures: series(add, "look_failures", "Failures to read the rules of a pod, by reason", ["reason"]),
            ready: metric(add, "install_ready", "1 if the plugin is installed and ready on the node, else 0"),
            rejected: metric(add, "configuration_rejected", rejected),
            token_renewal_failed: metric(
                add,
                "plugin_token_renewal_failed",
                "1 if the API server grants the plugin no new token, else 0",
            ),
            installs: series(
                add,
                "installs",
                "Installations and repairs of the plugin on the node, by result",
                ["result"],
            ),
            nri_registered: series(add, "nri_registered", registered, []),
            multus_chain: series(add, "multus_chain_invalid_files", chain, []),
            container_starts: series(add, "container_starts", "Starts of excluded containers, by result", ["result"]),
            nri_seconds: seconds(add, "nri", waited, [], start_buckets),
            policy_changes: series(
                add,
                "policy_changes",
                "Changes of the policies of running pods, by result",
                ["result"],
            ),
            guard_rejected: series(add, "guard_rejected", guarded, ["direction"]),
            pods: series(add, "pods", "Pods of the mesh on the node, by the state of their policy", ["policy"]),
            registry: Arc::new(registry),
        };
        // These series exist from the start: alerts use their increase.
        for result in ["applied", "rejected", "failed"] {
            metrics.policy_changes.add([result], 0);
        }
        for direction in ["outbound", "inbound"] {
            metrics.guard_rejected.add([direction], 0);
        }
        metrics
    }
}

fn metric<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

fn series<M: Default + Clone, const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    labels: [&'static str; N],
) -> Series<M, N>
where
    Family<[(&'static str, &'static str); N], M>: Metric,
{
    let family = Family::new_with_constructor(M::default as fn() -> M);
    registry.register(name, help, family.clone());
    Series { labels, family }
}

fn seconds<const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    labels: [&'static str; N],
    buckets: fn() -> Histogram,
) -> Series<Histogram, N> {
    let family = Family::new_with_constructor(buckets);
    registry.register_with_unit(name, help, Unit::Seconds, family.clone());
    Series { labels, family }
}

/// Buckets from 5 ms, an ADD without requests, to 20 s, twice the default timeout for facts.
fn call_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 2.0, 13))
}

/// Buckets from 125 µs to 512 ms. Few starts wait longer: at most 1 s in total for each pod sandbox.
fn start_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.000_125, 2.0, 13))
}

impl Metrics {
    /// Counts a plugin call by verb ([`CniCommand::name`]), outcome and the reason of a failure ([`Code::name`]), which
    /// is empty otherwise.
    ///
    /// [`CniCommand::name`]: crate::cni::CniCommand::name
    /// [`Code::name`]: crate::cni::Code::name
    pub fn call(&self, verb: &'static str, outcome: &'static str, reason: &'static str, seconds: f64) {
        self.calls.count([verb, outcome, reason]);
        self.call_seconds.observe([verb], seconds);
    }

    /// Sets the number of objects of a kind, and how many of them are too large for the cache.
    pub fn facts(&self, kind: &'static str, (count, too_large): (usize, usize)) {
        self.facts.set([kind], count);
        self.too_large.set([kind], too_large);
    }

    /// Sets the numbers of pods: current, with rejected requests, failed, without rules, outside of the ambient mesh.
    pub fn pods(&self, counts: [u32; 5]) {
        for (state, count) in Finding::NAMES.into_iter().zip(counts) {
            self.pods.set([state], count);
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
        metrics.fallbacks.count(["unknown"]);
        metrics.drift.inc();
        metrics.repairs.count(["repair", "done"]);
        metrics.overflows.inc();
        metrics.look_failures.count([Code::ForeignRules.name()]);
        metrics.ready.set(1);
        metrics.installs.count(["done"]);
        metrics.token_renewal_failed.set(1);
        metrics.facts("pods", (500, 0));
        metrics.facts("pods", (499, 2));
        metrics.nri_registered.set([], true);
        metrics.container_starts.count(["excluded"]);
        metrics.nri_seconds.observe([], 0.003);
        metrics.policy_changes.count(["applied"]);
        metrics.pods([0, 7, 0, 0, 0]);
        metrics.guard_rejected.add(["outbound"], 3);
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
        metrics.ready.set(0);
        assert!(metrics.text().contains("detour_install_ready 0\n"));
    }
}
