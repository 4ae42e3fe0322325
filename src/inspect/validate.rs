//! `validate`: checks the configurations in a file as `detour install` and the agent do.

use super::subject::listed;
use super::terminal::{Screen, TextReport, Tone};
use crate::cluster::KubeconfigSummary;
use crate::cluster::manifests::documents;
use crate::cni::{Code, Error, NODE_CONFIGURATION, NetConf, NodeConf, PROGRAM, configuration};
use crate::plugin::node::effective;
use crate::plugin::{TargetNode, validate};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

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
    /// Why the plugin would reject it: the first problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// All problems, one line each.
    pub errors: Vec<String>,
    /// Ignored keys and skipped checks, one line each.
    pub warnings: Vec<String>,
}

impl TextReport for ValidationReport {
    fn write(&self, screen: &mut Screen) {
        for CheckedConf { place, errors, warnings, .. } in &self.configurations {
            if errors.is_empty() {
                screen.labeled(format!("{place}:"), "valid", Tone::Good);
            }
            for error in errors {
                screen.labeled(format!("{place}:"), format!("invalid: {error}"), Tone::Bad);
            }
            for warning in warnings {
                screen.text(format!("  warning: {warning}"), Tone::Plain);
            }
        }
    }
}

/// The kubeconfig that an installation writes by default.
const KUBECONFIG: &str = "/var/lib/cni/detour/kubeconfig";

/// What a text contains.
#[derive(Clone, Copy)]
enum ConfKind {
    /// The configuration of a plugin, or a configuration list.
    Configuration,
    /// The configuration in a NetworkAttachmentDefinition.
    Definition,
    /// The keys for `detour install --config`.
    Keys,
    /// The node configuration.
    Node,
    /// No configuration: a text about where Multus finds it.
    OnNode,
}

/// Checks every configuration in `text`, the content of the file `place`.
///
/// The text is a configuration, a configuration list, the keys for `detour install --config`, a node configuration, or
/// manifests. Only NetworkAttachmentDefinitions and the chart's ConfigMap are checked. Manifests can be YAML; the plugin
/// reads the others, and only accepts JSON. `node` is the node configuration of this machine, and `is_installed` is
/// passed to [`validate`].
///
/// # Errors
/// The text is neither JSON nor YAML, or contains no configuration.
pub fn validate_text(
    place: &Path,
    text: &str,
    node: Option<&NodeConf>,
    is_installed: &dyn Fn(&NetConf, &str) -> Option<bool>,
) -> Result<ValidationReport, Error> {
    let failed = |what: String| Error::new(Code::InvalidConfig, format!("{}: {what}", place.display()));
    let documents = match serde_json::from_str::<Value>(text) {
        Ok(value) => vec![value],
        Err(json) => documents(text)
            .map_err(|yaml| failed(format!("expected JSON or YAML: invalid JSON: {json}; invalid YAML: {yaml}")))?,
    };
    let (mut found, mut others) = (Vec::new(), Vec::new());
    documents.iter().try_for_each(|document| find(document, text, &mut found, &mut others)).map_err(failed)?;
    // YAML documents without manifests are one text, which is not JSON.
    found.dedup_by(|a, b| (&a.0, &a.2) == (&b.0, &b.2));
    if found.is_empty() {
        return Err(failed(format!("expected a configuration, got {}", listed(others))));
    }
    let checked = |(within, kind, text): Piece| {
        let (warnings, errors) = problems(&text, |text| check(kind, text, node, is_installed));
        let (place, error) = (format!("{}{within}", place.display()), errors.first().cloned());
        CheckedConf { place, valid: errors.is_empty(), error, errors, warnings }
    };
    let configurations: Vec<CheckedConf> = found.into_iter().map(checked).collect();
    Ok(ValidationReport { valid: configurations.iter().all(|checked| checked.valid), configurations })
}

/// The limits for the search of further problems: their number, and that of keys that a message names.
const MAX_PROBLEMS: usize = 20;
const MAX_KEYS: usize = 500;

/// Returns the warnings about a configuration and all its problems. A check reports the first problem that it finds:
/// without the key that the message names, it reports the next one.
fn problems(text: &str, check: impl Fn(&str) -> Result<Vec<String>, Error>) -> (Vec<String>, Vec<String>) {
    let mut errors: Vec<String> = Vec::new();
    let mut document: Value = serde_json::from_str(text).unwrap_or_default();
    let mut result = check(text);
    while let Err(error) = &result
        && errors.len() < MAX_PROBLEMS
    {
        let error = error.to_string();
        errors.push(error.strip_prefix("configuration: ").unwrap_or(&error).to_owned());
        let is_named = |pointer: &String| error.contains(pointer.rsplit('/').next().unwrap_or_default());
        let without = |pointer: String| {
            let mut rest = document.clone();
            let (parent, key) = pointer.rsplit_once('/')?;
            rest.pointer_mut(parent)?.as_object_mut()?.remove(key)?;
            let next = check(&rest.to_string());
            let is_other = next.as_ref().err().is_none_or(|next| next.to_string() != error);
            is_other.then_some((rest, next))
        };
        // The deepest key first: a message about a UID can contain the word "name", too.
        let mut keys = pointers(&document);
        keys.sort_by_key(|pointer| Reverse(pointer.matches('/').count()));
        let Some((rest, next)) = keys.into_iter().filter(is_named).take(MAX_KEYS).find_map(without) else { break };
        (document, result) = (rest, next);
    }
    errors.dedup();
    (result.unwrap_or_default(), errors)
}

/// Returns the pointers to all keys except `type`, without which the rest means something else.
fn pointers(value: &Value) -> Vec<String> {
    let within = |key: &str, value| {
        let own = format!("/{key}");
        let mut all: Vec<String> = pointers(value).into_iter().map(|below| own.clone() + &below).collect();
        all.extend((key != "type").then_some(own));
        all
    };
    match value {
        Value::Object(members) => members.iter().flat_map(|(key, value)| within(key, value)).collect(),
        Value::Array(items) => items.iter().enumerate().flat_map(|(at, item)| within(&at.to_string(), item)).collect(),
        _ => Vec::new(),
    }
}

/// Returns the warning about a kubeconfig that does not authenticate the server.
#[must_use]
pub fn kubeconfig_warning(KubeconfigSummary { server, authority, .. }: &KubeconfigSummary) -> Option<String> {
    let text = || format!("{server}: insecure-skip-tls-verify is true: the server is not authenticated");
    authority.is_none().then(text)
}

/// Returns whether one of these directories has an executable of this name; `None` if no directory exists here.
#[must_use]
pub fn is_program(directories: impl Iterator<Item = PathBuf>, name: &str) -> Option<bool> {
    let existing: Vec<PathBuf> = directories.filter(|directory| directory.is_dir()).collect();
    let found = existing.iter().any(|directory| directory.join(name).is_file());
    (!existing.is_empty()).then_some(found)
}

/// A configuration: the suffix for its place, what it is, and its text.
type Piece = (String, ConfKind, String);

/// Adds the configurations in a document, and what else it contains. `whole` is the text of a document that is no manifest.
fn find(document: &Value, whole: &str, found: &mut Vec<Piece>, others: &mut Vec<String>) -> Result<(), String> {
    let Some(keys) = document.as_object() else { return Err("expected an object".to_owned()) };
    let name = document["metadata"]["name"].as_str().unwrap_or_default();
    match document.get("apiVersion").and_then(|_| document.get("kind")?.as_str()) {
        Some("List") => {
            let mut items = document["items"].as_array().into_iter().flatten();
            return items.try_for_each(|item| find(item, &item.to_string(), found, others));
        }
        Some("NetworkAttachmentDefinition") => {
            let config = document["spec"]["config"].as_str().unwrap_or_default();
            let within = format!(": NetworkAttachmentDefinition {name}: spec.config");
            if config.trim().is_empty() {
                let what = format!(
                    "empty: Multus uses the file on the node whose network is named {name:?}, usually \
                     /etc/cni/multus/net.d/{name}.conf or /etc/cni/net.d/{name}.conf; validate that file"
                );
                found.push((within, ConfKind::OnNode, what));
            } else if may_be_ours(config) {
                found.push((within, ConfKind::Definition, config.to_owned()));
            } else {
                others.push(format!("NetworkAttachmentDefinition {name} of another plugin"));
            }
        }
        Some("ConfigMap") => return find_in_chart(name, &document["data"], found),
        Some(kind) => others.push(format!("{kind} {name}")),
        None => match kind(keys) {
            Ok(kind) => found.push((String::new(), kind, whole.to_owned())),
            Err(values) => others.push(values),
        },
    }
    Ok(())
}

/// Adds the configurations in the data of the chart's ConfigMap: `config.json`, and each attachment, whose keys override
/// those of `config.json`.
fn find_in_chart(name: &str, data: &Value, found: &mut Vec<Piece>) -> Result<(), String> {
    let Some(config) = data["config.json"].as_str() else { return Ok(()) };
    let place = |key: &str| format!("ConfigMap {name}: data[\"{key}\"]");
    found.push((format!(": {}", place("config.json")), ConfKind::Keys, config.to_owned()));
    // Only the file's own entry reports that it is invalid.
    let shared: Map<String, Value> = serde_json::from_str(config).unwrap_or_default();
    let place = place("attachments.json");
    let attachments = data["attachments.json"].as_str().unwrap_or("[]");
    let attachments: Vec<Map<String, Value>> = serde_json::from_str(attachments)
        .map_err(|error| format!("{place}: expected a JSON array of objects: {error}"))?;
    found.extend(attachments.into_iter().enumerate().map(|(i, attachment)| {
        let mut keys = shared.clone();
        keys.extend(attachment);
        (format!(": {place}[{i}]"), ConfKind::Keys, Value::Object(keys).to_string())
    }));
    Ok(())
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

/// The top-level keys of the chart's values that no configuration has.
const HELM_VALUES: &str =
    "hub image global cni config repair livePolicy containerExclusion attachments platform resources tolerations";
/// The keys that only a configuration, and those that only a node configuration has.
const OF_CONFIGURATIONS: [&str; 4] = ["type", "plugins", "name", "cniVersion"];
const OF_NODES: [&str; 3] = ["pinned", "attachments_may_exclude_namespaces", "primary"];

/// Returns the kind of an object that is not a manifest, or what it is if it has the chart's values.
fn kind(keys: &Map<String, Value>) -> Result<ConfKind, String> {
    let has = |names: &[&str]| names.iter().any(|name| keys.contains_key(*name));
    let values: Vec<&str> = HELM_VALUES.split(' ').filter(|name| keys.contains_key(*name)).collect();
    match (has(&OF_CONFIGURATIONS), has(&OF_NODES)) {
        (true, _) => Ok(ConfKind::Configuration),
        (false, true) => Ok(ConfKind::Node),
        (false, false) if values.is_empty() => Ok(ConfKind::Keys),
        _ => Err(format!(
            "values of a Helm chart ({}); check the rendered manifests: helm template CHART -f FILE | detour validate -",
            values.join(", ")
        )),
    }
}

fn check(
    kind: ConfKind,
    text: &str,
    node: Option<&NodeConf>,
    is_installed: &dyn Fn(&NetConf, &str) -> Option<bool>,
) -> Result<Vec<String>, Error> {
    let place = Path::new("configuration");
    // The installation that applies a definition writes a node configuration.
    let may_name_source = matches!(kind, ConfKind::Definition) && node.is_none();
    let target = TargetNode { is_installed, group_file: None, may_name_source };
    let conf = match kind {
        ConfKind::OnNode => return Ok(vec![text.to_owned()]),
        ConfKind::Node => {
            return NodeConf::parse(NODE_CONFIGURATION, text.as_bytes()).map(|(_, warnings)| warnings);
        }
        ConfKind::Configuration | ConfKind::Definition => effective(node, place, text)?,
        ConfKind::Keys => {
            let given: Map<String, Value> = serde_json::from_str(text)
                .map_err(|error| Error::new(Code::Decode, format!("invalid JSON: {error}; expected an object")))?;
            if given.is_empty() {
                return Err(Error::new(Code::InvalidConfig, "expected a configuration, got an empty object"));
            }
            let mut keys = json!({"cniVersion": "1.0.0", "name": "n", "type": PROGRAM});
            given.into_iter().for_each(|(key, value)| keys[key] = value);
            let mut conf = configuration(place, keys.to_string().as_bytes())?;
            // The installation sets it.
            conf.kubernetes.kubeconfig.get_or_insert_with(|| KUBECONFIG.into());
            conf
        }
    };
    let summary =
        conf.kubernetes.kubeconfig.as_deref().and_then(|path| KubeconfigSummary::read(Path::new("/"), path).ok());
    let warning = summary.as_ref().and_then(kubeconfig_warning);
    Ok(validate(&conf, target)?.into_iter().chain(warning).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(text: &str) -> Result<ValidationReport, String> {
        validate_text(Path::new("f"), text, None, &|_, _| None).map_err(|error| error.msg)
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
        let found = "f: expected a configuration, got NetworkAttachmentDefinition istio-cni of another plugin";
        assert_eq!(report(&others), Err(found.into()));
        let service = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}"#;
        assert_eq!(report(service), Err("f: expected a configuration, got Service web".into()));
        for values in ["hub: example.com\nconfig: {chain: []}\n", r#"{"config": {"chain": []}, "repair": {}}"#] {
            let error = report(values).expect_err("Helm values");
            assert!(error.contains("got values of a Helm chart ("), "{error}");
        }
        let empty = report(&definition("")).expect("a report");
        assert!(empty.valid && empty.configurations[0].warnings[0].contains("istio-cni.conf"), "{empty:?}");
        let nothing = report("{}").expect("a report");
        assert_eq!(nothing.configurations[0].error.as_deref(), Some("expected a configuration, got an empty object"));
        assert!(report("{").expect_err("broken").starts_with("f: expected JSON or YAML: invalid JSON: "));
    }

    #[test]
    fn all_problems_of_a_configuration_are_reported() {
        let bad = r#"{"name": "n", "type": "detour", "log_level": "verbose", "chain": [
            {"type": "uid-exclude", "uids": ["x"], "gids": ["y"]}, {"type": "dns-exclude", "prots": [53]}]}"#;
        let CheckedConf { error, errors, .. } = &report(bad).expect("a report").configurations[0];
        assert_eq!(errors.first(), error.as_ref());
        for part in ["verbose", "\"x\"", "\"y\"", "prots"] {
            assert_eq!(errors.iter().filter(|error| error.contains(part)).count(), 1, "{part}: {errors:?}");
        }
    }

    #[test]
    fn text_that_only_a_yaml_parser_accepts_is_refused_unless_it_is_a_manifest() {
        let good = r#"{"name": "n", "type": "detour", "chain": [{"type": "uid-exclude", "uids": [1]}]}"#;
        assert!(report(good).expect("read").valid);
        for text in [
            good.replace("]}]}", "]},]}"),
            format!("# a comment\n{good}"),
            good.replace('"', "'"),
            format!("\u{feff}{good}"),
            "name: n\ntype: detour\nchain: []\n".to_owned(),
            "pinned: [uid-exclude]\n".to_owned(),
            "log_level: warn\n".to_owned(),
            format!("{good}\n---\n{good}"),
        ] {
            let refused = report(&text).expect("a report");
            let error = refused.configurations[0].error.as_deref().unwrap_or_default();
            assert!(!refused.valid && error.contains("invalid JSON: "), "{text}: {refused:?}");
        }
    }

    #[test]
    fn a_redirection_without_a_source_of_facts_is_refused_unless_the_node_may_name_one() {
        let conf = r#"{"name": "n", "type": "istio-cni"}"#;
        let refused = report(conf).expect("a report");
        let error = refused.configurations[0].error.as_deref().unwrap_or_default();
        assert!(error.contains("istio-redirect needs facts of the pod: set kubernetes.kubeconfig"), "{refused:?}");
        let (node, _) = NodeConf::parse("n", br#"{"kubernetes": {"kubeconfig": "/k"}}"#).expect("accepted");
        let governed = validate_text(Path::new("f"), conf, Some(&node), &|_, _| None).expect("a report");
        assert!(governed.valid, "{governed:?}");
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "spec": {"config": conf},
        });
        let definition = report(&definition.to_string()).expect("a report");
        let warning = &definition.configurations[0].warnings[0];
        assert!(definition.valid && warning.ends_with("or in the node configuration, which was not checked"));
        assert!(report(r#"{"chain": [{"type": "istio-redirect"}]}"#).expect("a report").valid, "keys for --config");
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
