//! The agent's Prometheus metrics.
//!
//! Label values are constants of this program, never external text, so the number of time series is bounded.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::sync::Arc;
use std::time::Duration;

/// The media type of [`Metrics::text`] (OpenMetrics 1.0, "Protocol Negotiation").
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;

/// The counters, gauges and histograms of one agent. Clones share their values.
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
    token_renewal_failed: Gauge,
    installs: Counters<1>,
    facts: Family<Labels<1>, Gauge>,
    too_large: Family<Labels<1>, Gauge>,
    watch_synced: Family<Labels<1>, Gauge>,
    nri_registered: Family<Labels<0>, Gauge>,
    container_starts: Counters<1>,
    ended_bypasses: Counter,
    nri_seconds: Family<Labels<0>, Histogram, fn() -> Histogram>,
    policy_changes: Counters<1>,
    pods: Family<Labels<1>, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("detour");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the agent", build);
        let calls = Counters::default();
        let help = "Plugin calls reported to the agent, by verb, outcome and reason of a failure";
        registry.register("plugin_calls", help, calls.clone());
        let call_seconds = Family::new_with_constructor(call_buckets as fn() -> Histogram);
        let help = "Duration of plugin calls";
        registry.register_with_unit("plugin_call_duration", help, Unit::Seconds, call_seconds.clone());
        let fallbacks = Counters::default();
        let help = "Requests sent to the API server because the agent's cache could not answer, by reason";
        registry.register("api_fallbacks", help, fallbacks.clone());
        let facts = Family::default();
        registry.register("facts", "Objects in the agent's cache, by kind", facts.clone());
        let too_large = Family::default();
        let help = "Objects of which the agent's cache has only the names because they are too large, by kind";
        registry.register("facts_too_large", help, too_large.clone());
        let watch_synced = Family::default();
        let help = "1 if the agent's watch of a kind is synchronized, else 0; absent if the kind is not watched";
        registry.register("watch_synced", help, watch_synced.clone());
        let drift = Counter::default();
        registry.register("drift", "Pods found with rules that differ from the desired rules", drift.clone());
        let repairs = Counters::default();
        registry.register("repairs", "Attempts to repair a pod, by type and result", repairs.clone());
        let overflows = Counter::default();
        let help = "Pods deferred because the repair queue was full";
        registry.register("repair_queue_overflows", help, overflows.clone());
        let look_failures = Counters::default();
        let help = "Failures to read the rules of a pod, by reason";
        registry.register("look_failures", help, look_failures.clone());
        let ready = Gauge::default();
        registry.register("install_ready", "1 if the plugin is installed and ready on the node, else 0", ready.clone());
        let refused = Gauge::default();
        let help = "1 if the newest configuration is refused and an earlier one is in use, else 0";
        registry.register("configuration_refused", help, refused.clone());
        let token_renewal_failed = Gauge::default();
        let help = "1 if the API server grants the plugin no new token, else 0";
        registry.register("plugin_token_renewal_failed", help, token_renewal_failed.clone());
        let installs = Counters::default();
        registry.register(
            "installs",
            "Installations and repairs of the plugin on the node, by result",
            installs.clone(),
        );
        let nri_registered = Family::default();
        let help = "1 if the container runtime reports containers to the agent, 0 if not; absent without --nri-socket";
        registry.register("nri_registered", help, nri_registered.clone());
        let container_starts = Counters::default();
        registry.register("container_starts", "Starts of excluded containers, by result", container_starts.clone());
        let ended_bypasses = Counter::default();
        let help = "Bypasses of running containers that ended because the proxy accepts connections";
        registry.register("bypasses_ended", help, ended_bypasses.clone());
        let nri_seconds = Family::new_with_constructor(start_buckets as fn() -> Histogram);
        let help = "How long the container runtime waited for the agent when it started a container";
        registry.register_with_unit("nri", help, Unit::Seconds, nri_seconds.clone());
        let policy_changes = Counters::default();
        for result in ["applied", "refused", "failed"] {
            let _: Counter = policy_changes.get_or_create_owned(&[("result", result)]);
        }
        let help = "Changes of the policies of running pods, by result";
        registry.register("policy_changes", help, policy_changes.clone());
        let pods = Family::default();
        let help = "Pods with a sidecar on the node, by the state of their policy";
        registry.register("pods", help, pods.clone());
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
            token_renewal_failed,
            installs,
            facts,
            too_large,
            watch_synced,
            nri_registered,
            container_starts,
            ended_bypasses,
            nri_seconds,
            policy_changes,
            pods,
        }
    }
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

    /// Counts a pod whose rules drifted.
    pub fn drift(&self) {
        self.drift.inc();
    }

    /// Counts an attempt to repair a pod.
    pub fn repair(&self, kind: &'static str, result: &'static str) {
        self.repairs.get_or_create(&[("type", kind), ("result", result)]).inc();
    }

    /// Counts a pod that did not fit into the repair queue.
    pub fn queue_overflow(&self) {
        self.overflows.inc();
    }

    /// Counts a failure to read a pod's rules, by the name of its code ([`Code::name`]).
    ///
    /// [`Code::name`]: crate::cni::Code::name
    pub fn look_failure(&self, reason: &'static str) {
        self.look_failures.get_or_create(&[("reason", reason)]).inc();
    }

    /// Sets whether the plugin is installed and ready.
    pub fn installed(&self, ready: bool) {
        self.ready.set(ready.into());
    }

    /// Sets whether the newest configuration is refused.
    pub fn refused(&self, refused: bool) {
        self.refused.set(refused.into());
    }

    /// Sets whether the last request for a token of the plugin failed.
    pub fn token_renewal_failed(&self, failed: bool) {
        self.token_renewal_failed.set(failed.into());
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

    /// Counts the start of an excluded container.
    pub fn container_start(&self, result: &'static str) {
        self.container_starts.get_or_create(&[("result", result)]).inc();
    }

    /// Counts a bypass that ended because the proxy accepts connections.
    pub fn bypass_ended(&self) {
        self.ended_bypasses.inc();
    }

    /// Records how long the container runtime waited at the start of a container.
    pub fn nri_request(&self, duration: Duration) {
        self.nri_seconds.get_or_create(&[]).observe(duration.as_secs_f64());
    }

    /// Counts a change of a running pod's policy.
    pub fn policy_change(&self, result: &'static str) {
        self.policy_changes.get_or_create(&[("result", result)]).inc();
    }

    /// Sets the number of pods with a policy of this kind.
    pub fn pods(&self, policy: &'static str, count: u32) {
        self.pods.get_or_create(&[("policy", policy)]).set(count.into());
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
            ("detour_bypasses_ended_total".into(), 0.0),
            ("detour_configuration_refused".into(), 0.0),
            ("detour_drift_total".into(), 0.0),
            ("detour_install_ready".into(), 0.0),
            ("detour_plugin_token_renewal_failed".into(), 0.0),
            (r#"detour_policy_changes_total{result="applied"}"#.into(), 0.0),
            (r#"detour_policy_changes_total{result="failed"}"#.into(), 0.0),
            (r#"detour_policy_changes_total{result="refused"}"#.into(), 0.0),
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
        metrics.drift();
        metrics.repair("repair", "done");
        metrics.queue_overflow();
        metrics.look_failure(Code::ForeignRules.name());
        metrics.installed(true);
        metrics.install("done");
        metrics.token_renewal_failed(true);
        metrics.facts("pods", (500, 0));
        metrics.facts("pods", (499, 2));
        metrics.nri_registered(true);
        metrics.container_start("exempt");
        metrics.bypass_ended();
        metrics.nri_request(Duration::from_millis(3));
        metrics.policy_change("applied");
        metrics.pods("older", 7);
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
            (r#"detour_container_starts_total{result="exempt"}"#, 1.0),
            ("detour_bypasses_ended_total", 1.0),
            (r#"detour_nri_seconds_bucket{le="0.004"}"#, 1.0),
            (r#"detour_nri_seconds_bucket{le="0.002"}"#, 0.0),
            (r#"detour_policy_changes_total{result="applied"}"#, 1.0),
            (r#"detour_pods{policy="older"}"#, 7.0),
        ] {
            assert_eq!(samples.get(series), Some(&value), "{series}");
        }
        metrics.installed(false);
        assert!(metrics.text().contains("detour_install_ready 0\n"));
    }
}
