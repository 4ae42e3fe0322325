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
use std::sync::Arc;
use std::time::Duration;

/// The media type of [`Metrics::text`] (OpenMetrics 1.0, "Protocol Negotiation").
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;
type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// The counters, gauges and histograms of one agent. Clones share their values.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    calls: Counters<3>,
    call_seconds: Histograms<1>,
    fallbacks: Counters<1>,
    pub(super) drift: Counter,
    repairs: Counters<2>,
    pub(super) overflows: Counter,
    look_failures: Counters<1>,
    pub(super) ready: Gauge,
    pub(super) rejected: Gauge,
    pub(super) token_renewal_failed: Gauge,
    installs: Counters<1>,
    facts: Family<Labels<1>, Gauge>,
    too_large: Family<Labels<1>, Gauge>,
    watch_synced: Family<Labels<1>, Gauge>,
    nri_registered: Family<Labels<0>, Gauge>,
    multus_chain: Family<Labels<0>, Gauge>,
    container_starts: Counters<1>,
    nri_seconds: Histograms<0>,
    policy_changes: Counters<1>,
    guard_rejected: Counters<1>,
    pods: Family<Labels<1>, Gauge>,
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
        let add = &mut registry;
        let policy_changes: Counters<1> =
            metric(add, "policy_changes", "Changes of the policies of running pods, by result");
        for result in ["applied", "rejected", "failed"] {
            let _: Counter = policy_changes.get_or_create_owned(&[("result", result)]);
        }
        let guarded = "Packets that the guards of running pods rejected, by direction";
        let guard_rejected: Counters<1> = metric(add, "guard_rejected", guarded);
        for direction in ["outbound", "inbound"] {
            let _: Counter = guard_rejected.get_or_create_owned(&[("direction", direction)]);
        }
        Self {
            calls: metric(add, "plugin_calls", calls),
            call_seconds: seconds(add, "plugin_call_duration", "Duration of plugin calls", call_buckets),
            fallbacks: metric(add, "api_fallbacks", fallbacks),
            facts: metric(add, "facts", "Objects in the agent's cache, by kind"),
            too_large: metric(add, "facts_too_large", too_large),
            watch_synced: metric(add, "watch_synced", synced),
            drift: metric(add, "drift", "Pods found with rules that differ from the desired rules"),
            repairs: metric(add, "repairs", "Attempts to repair a pod, by type and result"),
            overflows: metric(add, "repair_queue_overflows", "Passes over pods that were more than a minute late"),
            look_failures: metric(add, "look_failures", "Failures to read the rules of a pod, by reason"),
            ready: metric(add, "install_ready", "1 if the plugin is installed and ready on the node, else 0"),
            rejected: metric(add, "configuration_rejected", rejected),
            token_renewal_failed: metric(
                add,
                "plugin_token_renewal_failed",
                "1 if the API server grants the plugin no new token, else 0",
            ),
            installs: metric(add, "installs", "Installations and repairs of the plugin on the node, by result"),
            nri_registered: metric(add, "nri_registered", registered),
            multus_chain: metric(add, "multus_chain_invalid_files", chain),
            container_starts: metric(add, "container_starts", "Starts of excluded containers, by result"),
            nri_seconds: seconds(add, "nri", waited, start_buckets),
            policy_changes,
            guard_rejected,
            pods: metric(add, "pods", "Pods of the mesh on the node, by the state of their policy"),
            registry: Arc::new(registry),
        }
    }
}

fn metric<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

fn seconds<const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    buckets: fn() -> Histogram,
) -> Histograms<N> {
    let family = Histograms::new_with_constructor(buckets);
    registry.register_with_unit(name, help, Unit::Seconds, family.clone());
    family
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
        self.calls.get_or_create(&[("verb", verb), ("outcome", outcome), ("reason", reason)]).inc();
        self.call_seconds.get_or_create(&[("verb", verb)]).observe(seconds);
    }

    /// Counts a request that went to the API server instead of the cache.
    pub fn api_fallback(&self, reason: &'static str) {
        self.fallbacks.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts an attempt to repair a pod.
    pub fn repair(&self, kind: &'static str, result: &'static str) {
        self.repairs.get_or_create(&[("type", kind), ("result", result)]).inc();
    }

    /// Counts a failure to read a pod's rules, by the name of its code ([`Code::name`]).
    ///
    /// [`Code::name`]: crate::cni::Code::name
    pub fn look_failure(&self, reason: &'static str) {
        self.look_failures.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts an installation.
    pub fn install(&self, result: &'static str) {
        self.installs.get_or_create(&[("result", result)]).inc();
    }

    /// Sets the number of objects of a kind, and how many of them are too large for the cache.
    pub fn facts(&self, kind: &'static str, (count, too_large): (usize, usize)) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.facts.get_or_create(&[("kind", kind)]).set(number(count));
        self.too_large.get_or_create(&[("kind", kind)]).set(number(too_large));
    }

    /// Sets whether the watch of a kind is synchronized.
    pub fn watch_synced(&self, kind: &'static str, synced: bool) {
        self.watch_synced.get_or_create(&[("kind", kind)]).set(synced.into());
    }

    /// Sets whether the container runtime reports containers to the agent.
    pub fn nri_registered(&self, registered: bool) {
        self.nri_registered.get_or_create(&[]).set(registered.into());
    }

    /// Sets the number of invalid files in Multus's auxiliary chain.
    pub fn multus_chain(&self, invalid_files: usize) {
        self.multus_chain.get_or_create(&[]).set(i64::try_from(invalid_files).unwrap_or(i64::MAX));
    }

    /// Counts the start of an excluded container.
    pub fn container_start(&self, result: &'static str) {
        self.container_starts.get_or_create(&[("result", result)]).inc();
    }

    /// Records how long the container runtime waited at the start of a container.
    pub fn nri_request(&self, duration: Duration) {
        self.nri_seconds.get_or_create(&[]).observe(duration.as_secs_f64());
    }

    /// Counts a change of a running pod's policy.
    pub fn policy_change(&self, result: &'static str) {
        self.policy_changes.get_or_create(&[("result", result)]).inc();
    }

    /// Counts packets that the guard of a pod rejected.
    pub fn rejected_by_guard(&self, outbound: u64, inbound: u64) {
        for (direction, count) in [("outbound", outbound), ("inbound", inbound)] {
            self.guard_rejected.get_or_create(&[("direction", direction)]).inc_by(count);
        }
    }

    /// Sets the numbers of pods: current, with rejected requests, failed, without rules, outside of the ambient mesh.
    pub fn pods(&self, counts: [u32; 5]) {
        for (state, count) in Finding::NAMES.into_iter().zip(counts) {
            self.pods.get_or_create(&[("policy", state)]).set(count.into());
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
        metrics.api_fallback("unknown");
        metrics.drift.inc();
        metrics.repair("repair", "done");
        metrics.overflows.inc();
        metrics.look_failure(Code::ForeignRules.name());
        metrics.ready.set(1);
        metrics.install("done");
        metrics.token_renewal_failed.set(1);
        metrics.facts("pods", (500, 0));
        metrics.facts("pods", (499, 2));
        metrics.nri_registered(true);
        metrics.container_start("excluded");
        metrics.nri_request(Duration::from_millis(3));
        metrics.policy_change("applied");
        metrics.pods([0, 7, 0, 0, 0]);
        metrics.rejected_by_guard(3, 0);
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
