//! The files of `--config` and `--attachments`: keys of the plugin's configuration that the administrator sets.

use anyhow::{Context, Result, bail, ensure};
use detour_cni::cni::{is_dns_subdomain, unknown_key};
use detour_cni::trusted_file::read;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// Limit for each file. Its content becomes part of the plugin's configurations.
const MAX_FILE: u64 = 1 << 20;
/// Limit for the number of attachments.
const MAX_ATTACHMENTS: usize = 100;
/// Limit for the name of an attachment, as in the chart.
const MAX_NAME: usize = 63;

/// The name of the network, unless `--config` sets one: that of Istio's NetworkAttachmentDefinition.
const DEFAULT_NETWORK: &str = "istio-cni";
/// The administrator's keys of the plugin's configurations.
#[derive(Debug, Clone, Default)]
pub(in crate::cli) struct GivenKeys {
    /// The keys of `--config`.
    pub(super) config: Map<String, Value>,
    /// The attachments of `--attachments`.
    pub(super) attachments: Vec<Attachment>,
}

/// An attachment: a configuration file of its own, for a network that pods select.
#[derive(Debug, Clone)]
pub(super) struct Attachment {
    /// The name of the network and of the NetworkAttachmentDefinition.
    pub(super) name: String,
    /// The keys that override those of `--config`.
    pub(super) keys: Map<String, Value>,
}

impl GivenKeys {
    /// Reads the files. `names` are the names under which the program is installed, which are the valid types.
    pub(super) fn read(config: Option<&Path>, attachments: Option<&Path>, names: &[&str]) -> Result<Self> {
        let mut given = Self::default();
        if let Some(path) = config {
            let place = format!("--config {}", path.display());
            given.config = contents(path, &place, "a JSON object")?;
            check_type(&given.config, &place, names)?;
        }
        if let Some(path) = attachments {
            let place = format!("--attachments {}", path.display());
            given.attachments = parse(contents(path, &place, "a JSON array of objects")?, &place, names)?;
        }
        Ok(given)
    }

    /// Returns the name of the network in the configuration file of the installation: the key `name` of `--config`.
    /// Without such a file, the key is refused.
    pub(super) fn network(&self, is_written: bool) -> Result<String> {
        match self.config.get("name").filter(|name| !name.is_null()) {
            None => Ok(DEFAULT_NETWORK.to_owned()),
            Some(Value::String(name)) if is_written => Ok(name.clone()),
            Some(name) if is_written => bail!("--config: name: expected a text, got {name}"),
            Some(_) => bail!(
                "--config: name: it has an effect only with --chained=false and without --attachments; remove the key"
            ),
        }
    }
}

fn contents<T: DeserializeOwned>(path: &Path, place: &str, expected: &str) -> Result<T> {
    let text = read(path, MAX_FILE).with_context(|| format!("can't read {place}"))?;
    serde_json::from_slice(&text).with_context(|| format!("{place}: expected {expected}"))
}

fn parse(all: Vec<Map<String, Value>>, place: &str, names: &[&str]) -> Result<Vec<Attachment>> {
    ensure!(all.len() <= MAX_ATTACHMENTS, "{place}: expected at most {MAX_ATTACHMENTS} attachments, got {}", all.len());
    let (mut attachments, mut known) = (Vec::new(), BTreeSet::new());
    for (i, mut keys) in all.into_iter().enumerate() {
        let name = keys.shift_remove("name").unwrap_or_default();
        let Some(name) = name.as_str().filter(|name| is_dns_subdomain(name)).map(str::to_owned) else {
            bail!("{place}: [{i}].name: expected the name of a NetworkAttachmentDefinition, got {name}");
        };
        ensure!(
            name.len() <= MAX_NAME,
            "{place}: [{i}].name: expected at most {MAX_NAME} characters, got {}",
            name.len()
        );
        ensure!(
            known.insert(name.clone()),
            "{place}: [{i}].name: {name:?} occurs twice; each attachment needs its own"
        );
        check_type(&keys, &format!("{place}: [{i}]"), names)?;
        if let Some(problem) = unknown_key(&keys) {
            bail!("{place}: [{i}]: {problem}");
        }
        attachments.push(Attachment { name, keys });
    }
    Ok(attachments)
}

/// Checks that the program is installed under the name that a configuration's type requires.
fn check_type(keys: &Map<String, Value>, place: &str, names: &[&str]) -> Result<()> {
    match keys.get("type").and_then(Value::as_str) {
        Some(kind) if !names.contains(&kind) => {
            let names = names.join(" or ");
            bail!("{place}: type: expected {names}, got {kind:?}; add --name {kind}, or remove the key")
        }
        _ => Ok(()),
    }
}
