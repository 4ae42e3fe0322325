//! The alerts and the dashboard that the chart renders: promtool runs the alerts' unit tests in `alerts.yaml`, and they
//! use only metrics that the agent exports.

use crate::helm::{merged, objects, of_kind};
use detour_cni::agent::Metrics;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const RUNBOOK: &str = "docs/alerts.md";

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the groups of alerts that the chart renders with these values.
fn groups(values: &Value) -> Value {
    let values = merged(&json!({"prometheusRule": {"enabled": true}}), values);
    of_kind(&objects(&values), "PrometheusRule")["spec"].clone()
}

fn rules(values: &Value) -> Vec<Value> {
    groups(values)["groups"][0]["rules"].as_array().expect("rules").clone()
}

fn dashboard() -> Value {
    let objects = objects(&json!({"grafanaDashboard": {"enabled": true}}));
    let mut dashboards = objects.iter().filter(|object| object["metadata"]["labels"]["grafana_dashboard"] == "1");
    let text = dashboards.next().expect("a dashboard")["data"]["detour.json"].as_str().expect("text");
    serde_json::from_str(text).expect("JSON")
}

/// Returns the expressions of all panels.
fn queries(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().expect("targets"));
    targets.map(|target| target["expr"].as_str().expect("text").to_owned()).collect()
}

/// Runs promtool with a file of this content in a directory of its own.
fn promtool(name: &str, arguments: &[&str], files: &[(&str, &str)]) {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("monitoring-{name}"));
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).expect("writable");
    for (name, content) in files {
        fs::write(directory.join(name), content).expect("writable");
    }
    let output = Command::new("promtool").args(arguments).current_dir(&directory).output();
    let output = output.unwrap_or_else(|error| panic!("promtool: {error}: hack/test.sh --test chart installs it"));
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{arguments:?}: {out}{err}");
}

/// Returns the labels of each metric that the agent exports.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let metrics = Metrics::default();
    metrics.call("ADD", "done", "", 0.1);
    metrics.count("api_fallbacks", [("reason", "a")]);
    metrics.count("repairs", [("type", "a"), ("result", "a")]);
    metrics.count("look_failures", [("reason", "a")]);
    metrics.count("installs", [("result", "a")]);
    metrics.set("facts", [("kind", "a")], 1);
    metrics.set("facts_too_large", [("kind", "a")], 0);
    metrics.set("watch_synced", [("kind", "a")], true);
    metrics.set("nri_registered", [], true);
    metrics.count("container_starts", [("result", "a")]);
    metrics.runtime_waited(0.0);
    metrics.count("policy_changes", [("result", "a")]);
    metrics.pods([1; 5]);
    let text = metrics.text();
    let mut exported = BTreeMap::<String, BTreeSet<String>>::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').expect("a value");
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('='));
        exported.entry(name.to_owned()).or_default().extend(labels.map(|(label, _)| label.to_owned()));
    }
    exported
}

/// Returns the words of an expression that are not in quotes.
fn words(expression: &str) -> Vec<&str> {
    let unquoted = expression.split('"').step_by(2);
    let is_delimiter = |character: char| !character.is_ascii_alphanumeric() && !"_$".contains(character);
    unquoted.flat_map(|part| part.split(is_delimiter)).filter(|word| !word.is_empty()).collect()
}

/// Checks that an expression uses only metrics of the agent and labels that they have.
fn check(expression: &str) {
    /// Labels that Prometheus and the PodMonitor add.
    const TARGET: [&str; 3] = ["namespace", "pod", "node"];
    /// Words of PromQL in the expressions.
    const LANGUAGE: &str =
        "sum max count by increase rate absent histogram_quantile vector or up le $__rate_interval e";
    let language: Vec<&str> = LANGUAGE.split(' ').collect();
    let exported = exported();
    let words = words(expression);
    let metrics: Vec<_> = words.iter().filter(|word| word.starts_with("detour_")).collect();
    assert!(!metrics.is_empty() || words.contains(&"up"), "{expression}: no metric");
    let mut labels: BTreeSet<&str> = TARGET.into_iter().collect();
    for metric in metrics {
        let of_metric = exported.get(*metric).unwrap_or_else(|| panic!("{expression}: {metric} is not exported"));
        labels.extend(of_metric.iter().map(String::as_str));
    }
    for word in words.iter().filter(|word| !word.starts_with("detour_")) {
        let is_number = word.starts_with(|character: char| character.is_ascii_digit());
        assert!(is_number || language.contains(word) || labels.contains(word), "{expression}: unknown label {word}");
    }
}

#[test]
fn each_alert_fires_as_its_unit_tests_require() {
    let tests = fs::read_to_string(repository().join("tests/chart/alerts.yaml")).expect("readable");
    for rule in rules(&json!({})) {
        let name = rule["alert"].as_str().expect("a name");
        let [fires, does_not] = ["exp_alerts:\n", "exp_alerts: []"].map(|expected| {
            let mut entries = tests.split("- eval_time:");
            entries.any(|entry| entry.contains(&format!("alertname: {name}\n")) && entry.contains(expected))
        });
        assert!(fires && does_not, "{name}: expected a test with which it fires and one with which it does not");
    }
    let rules = groups(&json!({})).to_string();
    promtool("alerts", &["check", "rules", "rules.yaml"], &[("rules.yaml", &rules)]);
    promtool("alerts", &["test", "rules", "tests.yaml"], &[("rules.yaml", &rules), ("tests.yaml", &tests)]);
}

#[test]
fn alerts_use_only_exported_metrics_and_link_to_their_runbooks() {
    let page = fs::read_to_string(repository().join("docs/alerts.md")).expect("readable");
    let documented: BTreeSet<&str> = page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let rules_with_links = rules(&json!({}));
    let mut alerts = BTreeSet::new();
    for rule in &rules_with_links {
        let name = rule["alert"].as_str().expect("a name");
        check(rule["expr"].as_str().expect("an expression"));
        assert!(["warning", "critical"].contains(&rule["labels"]["severity"].as_str().expect("a severity")), "{name}");
        let text =
            |key: &str| rule["annotations"][key].as_str().unwrap_or_else(|| panic!("{name}: no {key}")).to_owned();
        assert!(text("summary").len() < 100 && text("description").len() > 50, "{name}");
        assert_eq!(text("runbook_url"), format!("{RUNBOOK}#{}", name.to_lowercase()));
        alerts.insert(name);
    }
    assert_eq!(alerts, documented, "docs/alerts.md has a section for each alert");
}

#[test]
fn alerts_of_a_release_select_only_its_own_agents() {
    for rule in rules(&json!({"fullnameOverride": "excludedns"})) {
        let expression = rule["expr"].as_str().expect("an expression");
        let selector = r#"{namespace="kube-system",pod=~"excludedns-agent-[a-z0-9]{5}""#;
        assert_eq!(expression.matches('{').count(), expression.matches(selector).count() * 2, "{expression}");
    }
}

#[test]
fn the_dashboard_shows_only_exported_metrics_with_valid_expressions() {
    let dashboard = dashboard();
    let panels = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().expect("an ID")).collect();
    assert_eq!(ids.len(), panels.len(), "the IDs of the panels are unique");
    let cells: Vec<[u64; 4]> = panels
        .iter()
        .map(|panel| ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().expect("a number")))
        .collect();
    for (index, &[x, y, w, h]) in cells.iter().enumerate() {
        assert!(x + w <= 24, "panel {index} is within the grid");
        for &[left, top, width, height] in &cells[..index] {
            let is_apart = x >= left + width || left >= x + w || y >= top + height || top >= y + h;
            assert!(is_apart, "panel {index} overlaps with an earlier one");
        }
    }
    let queries = queries(&dashboard);
    let shown: BTreeSet<&str> = queries.iter().flat_map(|query| words(query)).collect();
    for query in &queries {
        check(query);
        assert!(query.contains(r#"namespace=~"$namespace",pod=~"$pod""#), "{query}");
    }
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    for variable in variables.iter().filter(|variable| variable["type"] == "query") {
        let query = variable["query"]["query"].as_str().expect("text");
        assert!(query.starts_with("label_values(detour_build_info"), "{query}");
    }
    for name in exported().keys() {
        let family = name.trim_end_matches("_count").trim_end_matches("_sum");
        assert!(shown.iter().any(|word| word.starts_with(family)), "no panel shows {name}");
    }
    let records: Vec<_> = queries
        .iter()
        .enumerate()
        .map(|(index, query)| json!({"record": format!("panel:{index}"), "expr": query.replace("$__rate_interval", "5m")}))
        .collect();
    let rules = json!({"groups": [{"name": "panels", "rules": records}]}).to_string();
    promtool("dashboard", &["check", "rules", "rules.yaml"], &[("rules.yaml", &rules)]);
}

#[test]
fn the_readme_lists_each_metric_with_its_labels() {
    let page = fs::read_to_string(repository().join("docs/operate.md")).expect("readable");
    for (name, labels) in exported() {
        let suffix = ["_bucket", "_sum", "_count"].into_iter().find_map(|suffix| name.strip_suffix(suffix));
        let name = suffix.unwrap_or(&name);
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("docs/operate.md: no row for {name}"));
        let cell = row.split('|').nth(2).expect("a column");
        let listed: BTreeSet<&str> = cell.split('`').skip(1).step_by(2).collect();
        let labels: BTreeSet<&str> = labels.iter().map(String::as_str).filter(|label| *label != "le").collect();
        assert_eq!(listed, labels, "{name}");
    }
}
