//! What is made of the plugin's word on a call: a line of the log, and counts.

use super::Metrics;
use crate::cluster::agent::CallReport;
use crate::cni::{Code, CniCommand};

/// Logs a call in one line and counts it.
pub(super) fn record(called: &CallReport, metrics: &Metrics) {
    let milliseconds = |us: u64| format!("{:.1}", us as f64 / 1e3);
    let CallReport { command, pod, container, network, ifname, facts, .. } = called;
    let (wall_ms, cpu_ms) = (milliseconds(called.wall_us), milliseconds(called.cpu_us));
    let warnings = (!called.warnings.is_empty()).then(|| called.warnings.join("; "));
    let facts = (!facts.is_empty()).then_some(facts.as_str());
    // GC is about no container.
    let [pod, container, ifname] = [pod, container, ifname].map(|text| (!text.is_empty()).then_some(text.as_str()));
    match called.code {
        None => tracing::info!(
            command,
            pod,
            network,
            ifname,
            container,
            facts,
            wall_ms,
            cpu_ms,
            warnings,
            "the plugin was called"
        ),
        Some(code) => tracing::error!(
            command,
            pod,
            network,
            ifname,
            container,
            code,
            error = called.error,
            facts,
            wall_ms,
            cpu_ms,
            warnings,
            "the plugin failed"
        ),
    }
    if facts == Some("api") {
        metrics.api_fallback("agent-passed-over");
    }
    // A verb of a later version has no name here.
    let Some(verb) = CniCommand::named(command) else { return };
    let (outcome, reason) = match called.code {
        None => ("done", ""),
        Some(code) => ("failed", Code::numbered(code).map_or("of-another-plugin", Code::name)),
    };
    metrics.call(verb.name(), outcome, reason, called.wall_us as f64 / 1e6);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_what_came_of_them() {
        let metrics = Metrics::default();
        let called = |command: &str, code, facts: &str| {
            let called = CallReport { command: command.into(), code, facts: facts.into(), ..CallReport::default() };
            record(&called, &metrics);
        };
        called("ADD", None, "agent");
        called("ADD", Some(Code::PodUnknown.number()), "api");
        called("ADD", Some(999), "");
        called("LATER", None, "");
        let text = metrics.text();
        for line in [
            r#"detour_plugin_calls_total{verb="ADD",outcome="done",reason=""} 1"#,
            r#"detour_plugin_calls_total{verb="ADD",outcome="failed",reason="pod-unknown"} 1"#,
            r#"detour_plugin_calls_total{verb="ADD",outcome="failed",reason="of-another-plugin"} 1"#,
            r#"detour_api_fallbacks_total{reason="agent-passed-over"} 1"#,
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("LATER"));
    }
}
