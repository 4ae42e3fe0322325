//! `validate`: checks the configurations in a file as `detour install` and the agent do.

use super::terminal::{Cell, Screen, TextReport, Tone};
use crate::cluster::yaml::documents;
use crate::cni::{Code, Error, NODE_CONFIGURATION, NodeConf, PROGRAM, configuration};
use crate::plugin::validate;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The report about a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ValidationReport {
    /// Whether the plugin would accept all configurations.
    pub valid: bool,
    /// Every configuration in the file.
    pub configurations: Vec<CheckedConf>,
}

/// The result for one configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckedConf {
    /// The file and, in a manifest, the object and its key.
    pub place: String,
    /// Whether the plugin would accept it.
    pub valid: bool,
    /// Why the plugin would refuse it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Ignored keys and skipped checks, one line each.
    pub warnings: Vec<String>,
}

impl TextReport for ValidationReport {
    fn write(&self, screen: &mut Screen) {
        for CheckedConf { place, error, warnings, .. } in &self.configurations {
            match error {
                None => screen.line(&[Cell::of(format!("{place}:")), Cell::of("valid").tone(Tone::Good)]),
                Some(error) => {
                    screen.line(&[Cell::of(format!("{place}:")), Cell::of(format!("invalid: {error}")).tone(Tone::Bad)])
                }
            }
            for warning in warnings {
                screen.line(&[Cell::of(format!("  warning: {warning}"))]);
            }
        }
    }
}

/// What a text contains.
enum ConfKind {
    /// The configuration of a plugin, or a plugin list.
    Configuration,
    /// The keys for `detour install --config`.
    Keys,
    /// The node configuration.
    Node,
}

/// Checks every configuration in `text`, the content of the file `place`.
///
/// The text is a configuration, a plugin list, the keys for `detour install --config`, a node configuration, or
/// manifests. Only NetworkAttachmentDefinitions and the chart's ConfigMap are checked. `is_installed` is passed to
/// [`validate`].
///
/// # Errors
/// The text is neither JSON nor YAML, or contains no configuration.
pub fn validate_text(
    place: &Path,
    text: &str,
    is_installed: &dyn Fn(&str) -> Option<bool>,
) -> Result<ValidationReport, Error> {
    let failed = |what: String| Error::new(Code::InvalidConfig, format!("{}: {what}", place.display()));
    let documents = match serde_json::from_str::<Value>(text) {
        Ok(value) => vec![value],
        Err(json) => documents(text)
            .map_err(|yaml| failed(format!("expected JSON or YAML: invalid JSON: {json}; invalid YAML: {yaml}")))?,
    };
    let mut configurations = Vec::new();
    for document in &documents {
        for (within, kind, text) in configurations_in(document).map_err(failed)? {
            let place = format!("{}{within}", place.display());
            let (warnings, error) = match check(&kind, &text, is_installed) {
                Ok(warnings) => (warnings, None),
                Err(error) => (Vec::new(), Some(error.to_string())),
            };
            configurations.push(CheckedConf { place, valid: error.is_none(), error, warnings });
        }
    }
    if configurations.is_empty() {
        return Err(failed("expected a configuration, got none".to_owned()));
    }
    Ok(ValidationReport { valid: configurations.iter().all(|checked| checked.valid), configurations })
}

/// Returns the configurations in a document: the suffix for the place of each, its kind and its text.
fn configurations_in(document: &Value) -> Result<Vec<(String, ConfKind, String)>, String> {
    let Some(keys) = document.as_object() else { return Err("expected an object".to_owned()) };
    let name = document["metadata"]["name"].as_str().unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    Ok(match keys.get("kind").and_then(Value::as_str).filter(|_| keys.contains_key("apiVersion")) {
        Some("List") => {
            let items = document["items"].as_array().cloned().unwrap_or_default();
            items.iter().map(configurations_in).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect()
        }
        Some("NetworkAttachmentDefinition") => {
            let config = text(&document["spec"]["config"]).filter(|text| !text.is_empty());
            let place = format!(": NetworkAttachmentDefinition {name}: spec.config");
            config
                .filter(|text| may_be_ours(text))
                .map(|text| (place, ConfKind::Configuration, text))
                .into_iter()
                .collect()
        }
        Some("ConfigMap") => configurations_of_chart(name, &document["data"])?,
        Some(_) => Vec::new(),
        None => vec![(String::new(), kind(keys), document.to_string())],
    })
}

/// Returns the configurations in the data of the chart's ConfigMap: `config.json`, and each attachment, whose keys
/// override those of `config.json`.
fn configurations_of_chart(name: &str, data: &Value) -> Result<Vec<(String, ConfKind, String)>, String> {
    let Some(config) = data["config.json"].as_str() else { return Ok(Vec::new()) };
    let place = |key: &str| format!("ConfigMap {name}: data[\"{key}\"]");
    let mut found = vec![(format!(": {}", place("config.json")), ConfKind::Keys, config.to_owned())];
    // Only the file's own entry reports that it is invalid.
    let shared: Map<String, Value> = serde_json::from_str(config).unwrap_or_default();
    let place = place("attachments.json");
    let attachments: Vec<Map<String, Value>> = serde_json::from_str(data["attachments.json"].as_str().unwrap_or("[]"))
        .map_err(|error| format!("{place}: expected a JSON array of objects: {error}"))?;
    for (i, attachment) in attachments.into_iter().enumerate() {
        let mut keys = shared.clone();
        keys.extend(attachment);
        found.push((format!(": {place}[{i}]"), ConfKind::Keys, Value::Object(keys).to_string()));
    }
    Ok(found)
}

/// Returns whether a definition is for this plugin. Text that is not JSON counts, so that the check refuses it.
fn may_be_ours(config: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(config) else { return true };
    let plugins = value["plugins"].as_array().cloned().unwrap_or_else(|| vec![value]);
    plugins.iter().any(|plugin| {
        let kind = plugin["type"].as_str();
        kind.is_none_or(|kind| crate::cni::OWN_TYPES.contains(&kind)) || plugin.get("chain").is_some()
    })
}

/// Returns the kind of a JSON object that is not a manifest.
fn kind(keys: &Map<String, Value>) -> ConfKind {
    let has = |key| keys.contains_key(key);
    if has("type") || has("plugins") || has("name") || has("cniVersion") {
        ConfKind::Configuration
    } else if has("pinned") || has("attachments_may_exclude_namespaces") || has("primary") {
        ConfKind::Node
    } else {
        ConfKind::Keys
    }
}

fn check(kind: &ConfKind, text: &str, is_installed: &dyn Fn(&str) -> Option<bool>) -> Result<Vec<String>, Error> {
    let place = Path::new("configuration");
    match kind {
        ConfKind::Configuration => validate(&configuration(place, text.as_bytes())?, is_installed),
        ConfKind::Node => NodeConf::parse(NODE_CONFIGURATION, text.as_bytes()).map(|(_, warnings)| warnings),
        ConfKind::Keys => {
            let mut keys = json!({"cniVersion": "1.0.0", "name": "n", "type": PROGRAM});
            let given: Map<String, Value> = serde_json::from_str(text)
                .map_err(|error| Error::new(Code::Decode, format!("expected a JSON object: {error}")))?;
            if let Some(keys) = keys.as_object_mut() {
                keys.extend(given);
            }
            validate(&configuration(place, keys.to_string().as_bytes())?, is_installed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(text: &str) -> Result<ValidationReport, String> {
        validate_text(Path::new("f"), text, &|_| None).map_err(|error| error.msg)
    }

    #[test]
    fn each_kind_of_file_is_recognized_and_checked() {
        let definition = |config: &str| {
            json!({
                "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
                "metadata": {"name": "istio-cni"}, "spec": {"config": config},
            })
            .to_string()
        };
        let good = r#"{"name": "n", "type": "detour", "chain": [{"type": "uid-exclude", "uids": [1]}]}"#;
        let bad = r#"{"name": "n", "type": "detour", "chain": [{"type": "uid-exclude", "uids": ["x"]}]}"#;
        let map = |config: &str| {
            format!(
                "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m}}\ndata:\n  config.json: |\n    {config}\n---\napiVersion: v1\nkind: Pod\n"
            )
        };
        for (good, bad, place) in [
            (good.to_owned(), bad.to_owned(), "f"),
            (
                format!(r#"{{"name": "l", "plugins": [{{"type": "bridge"}}, {good}]}}"#),
                format!(r#"{{"name": "l", "plugins": [{{"type": "bridge"}}, {bad}]}}"#),
                "f",
            ),
            (r#"{"pinned": ["uid-exclude"]}"#.into(), r#"{"pinned": [], "log_file": "x"}"#.into(), "f"),
            (r#"{"log_level": "warn"}"#.into(), r#"{"chain": 7}"#.into(), "f"),
            (definition(good), definition(bad), "f: NetworkAttachmentDefinition istio-cni: spec.config"),
            (
                map(r#"{"chain": []}"#),
                map(r#"{"chain": [{"type": "uid-exclud"}]}"#),
                "f: ConfigMap m: data[\"config.json\"]",
            ),
        ] {
            let accepted = report(&good).expect("configurations");
            assert!(accepted.valid && accepted.configurations[0].place == place, "{accepted:?}");
            let refused = report(&bad).expect("configurations");
            assert!(!refused.valid && refused.configurations[0].error.is_some(), "{bad}: {refused:?}");
        }
        let others = definition(r#"{"name": "n", "type": "macvlan"}"#);
        assert_eq!(report(&others), Err("f: expected a configuration, got none".into()));
        assert!(report("{").expect_err("broken").starts_with("f: expected JSON or YAML: invalid JSON: "));
    }

    #[test]
    fn each_attachment_of_the_charts_config_map_is_checked_with_the_keys_of_its_configuration() {
        let map = |config: &str, attachments: &str| {
            let data = json!({"config.json": config, "attachments.json": attachments});
            report(
                &json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": data}).to_string(),
            )
        };
        let refused = |report: ValidationReport| -> Vec<_> {
            let refused = report.configurations.into_iter().filter(|checked| !checked.valid);
            refused.map(|checked| checked.place).collect()
        };
        let good = r#"{"chain": [{"type": "uid-exclude", "uids": [1]}]}"#;
        let bad = r#"{"chain": [{"type": "uid-exclude", "uids": ["x"]}]}"#;
        let both = r#"[{"name": "a"}, {"name": "b", "chain": [{"type": "uid-exclud"}]}]"#;
        let second = "f: ConfigMap m: data[\"attachments.json\"][1]";
        assert_eq!(map(good, r#"[{"name": "a"}]"#).map(|report| report.configurations.len()), Ok(2));
        assert_eq!(map(good, both).map(refused), Ok(vec![second.to_owned()]));
        let first = ["f: ConfigMap m: data[\"config.json\"]", "f: ConfigMap m: data[\"attachments.json\"][0]", second];
        assert_eq!(map(bad, both).map(refused), Ok(first.map(str::to_owned).to_vec()));
        let place = "f: ConfigMap m: data[\"attachments.json\"]: expected a JSON array of objects: ";
        assert!(map(good, "{}").expect_err("no array").starts_with(place));
    }
}
