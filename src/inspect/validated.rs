//! Files with configurations, checked as `detour install` and the agent check theirs.

use super::terminal::{Cell, Screen, TextReport, Tone};
use crate::cni::{Code, Error, NODE_CONFIGURATION, NodeConf, PROGRAM, configuration};
use crate::plugin::validate;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::Path;

/// What a file holds, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Validated {
    /// Whether the plugin would accept all of it.
    pub valid: bool,
    /// Each configuration in it.
    pub configurations: Vec<Checked>,
}

/// One configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// The file and, in a manifest, the object and its key.
    pub place: String,
    /// Whether the plugin would accept it.
    pub valid: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What it ignores and what could not be checked, one line each.
    pub warnings: Vec<String>,
}

impl TextReport for Validated {
    fn write(&self, page: &mut Screen) {
        for Checked { place, error, warnings, .. } in &self.configurations {
            match error {
                None => page.line(&[Cell::of(format!("{place}:")), Cell::of("valid").tone(Tone::Good)]),
                Some(error) => {
                    page.line(&[Cell::of(format!("{place}:")), Cell::of(format!("invalid: {error}")).tone(Tone::Bad)])
                }
            }
            for warning in warnings {
                page.line(&[Cell::of(format!("  warning: {warning}"))]);
            }
        }
    }
}

/// How a text is understood.
enum FileKind {
    /// A plugin's configuration or a plugin list.
    Configuration,
    /// The keys of `detour install --config`.
    Keys,
    /// The node configuration.
    Node,
}

/// Checks the configurations in `text`, which comes from `place`: a configuration, a plugin list, the keys of
/// `detour install --config`, a node configuration, or manifests with definitions of networks and the chart's
/// ConfigMap; other objects are skipped. `is_installed` is that of [`validate`].
///
/// # Errors
/// It is neither JSON nor YAML, or holds no configuration.
pub fn validated(place: &Path, text: &str, is_installed: &dyn Fn(&str) -> Option<bool>) -> Result<Validated, Error> {
    let refused = |what: String| Error::new(Code::InvalidConfig, format!("{}: {what}", place.display()));
    let documents = match serde_json::from_str::<Value>(text) {
        Ok(value) => vec![value],
        Err(json) => serde_saphyr::from_multiple::<Value>(text)
            .map_err(|yaml| refused(format!("neither JSON ({json}) nor YAML ({yaml})")))?,
    };
    let mut configurations = Vec::new();
    for document in &documents {
        for (within, kind, text) in texts(document).map_err(refused)? {
            let place = format!("{}{within}", place.display());
            let outcome = check(&kind, &text, is_installed);
            let (warnings, error) = match outcome {
                Ok(warnings) => (warnings, None),
                Err(error) => (Vec::new(), Some(error.to_string())),
            };
            configurations.push(Checked { place, valid: error.is_none(), error, warnings });
        }
    }
    if configurations.is_empty() {
        return Err(refused("no configuration in it".to_owned()));
    }
    Ok(Validated { valid: configurations.iter().all(|checked| checked.valid), configurations })
}

/// The configurations in a document, each with its place in it.
fn texts(document: &Value) -> Result<Vec<(String, FileKind, String)>, String> {
    let Some(keys) = document.as_object() else { return Err("expected an object".to_owned()) };
    let name = document["metadata"]["name"].as_str().unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    Ok(match keys.get("kind").and_then(Value::as_str).filter(|_| keys.contains_key("apiVersion")) {
        Some("List") => {
            let items = document["items"].as_array().cloned().unwrap_or_default();
            items.iter().map(texts).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect()
        }
        Some("NetworkAttachmentDefinition") => {
            let config = text(&document["spec"]["config"]).filter(|text| !text.is_empty());
            let place = format!(": NetworkAttachmentDefinition {name}: spec.config");
            config
                .filter(|text| calls_us(text))
                .map(|text| (place, FileKind::Configuration, text))
                .into_iter()
                .collect()
        }
        Some("ConfigMap") => {
            let config = text(&document["data"]["config.json"]);
            let place = format!(": ConfigMap {name}: data[\"config.json\"]");
            config.map(|text| (place, FileKind::Keys, text)).into_iter().collect()
        }
        Some(_) => Vec::new(),
        None => vec![(String::new(), kind(keys), document.to_string())],
    })
}

/// Whether a definition is for this plugin; what is not JSON is checked, and refused.
fn calls_us(config: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(config) else { return true };
    let plugins = value["plugins"].as_array().cloned().unwrap_or_else(|| vec![value]);
    plugins.iter().any(|plugin| {
        let kind = plugin["type"].as_str();
        kind.is_none_or(|kind| crate::cni::OWN_TYPES.contains(&kind)) || plugin.get("chain").is_some()
    })
}

/// What an object is that is no manifest.
fn kind(keys: &Map<String, Value>) -> FileKind {
    let has = |key| keys.contains_key(key);
    if has("type") || has("plugins") || has("name") || has("cniVersion") {
        FileKind::Configuration
    } else if has("pinned") || has("attachments_may_exclude_namespaces") || has("primary") {
        FileKind::Node
    } else {
        FileKind::Keys
    }
}

fn check(kind: &FileKind, text: &str, is_installed: &dyn Fn(&str) -> Option<bool>) -> Result<Vec<String>, Error> {
    let place = Path::new("configuration");
    match kind {
        FileKind::Configuration => validate(&configuration(place, text.as_bytes())?, is_installed),
        FileKind::Node => NodeConf::parse(NODE_CONFIGURATION, text.as_bytes()).map(|(_, warnings)| warnings),
        FileKind::Keys => {
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

    fn of(text: &str) -> Result<Validated, String> {
        validated(Path::new("f"), text, &|_| None).map_err(|error| error.msg)
    }

    #[test]
    fn each_kind_of_file_is_known_and_checked() {
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
            let report = of(&good).expect("configurations");
            assert!(report.valid && report.configurations[0].place == place, "{report:?}");
            let report = of(&bad).expect("configurations");
            assert!(!report.valid && report.configurations[0].error.is_some(), "{bad}: {report:?}");
        }
        let others = definition(r#"{"name": "n", "type": "macvlan"}"#);
        assert_eq!(of(&others), Err("f: no configuration in it".into()));
        assert!(of("{").expect_err("broken").starts_with("f: neither JSON ("));
    }
}
