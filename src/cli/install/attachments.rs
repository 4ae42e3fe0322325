//! The files of `--config` and `--attachments`: keys of the plugin's configuration that the administrator sets.

use anyhow::{Context, Result, bail, ensure};
use detour_cni::agent::install::{Entry, EntrySettings, InstallError};
use detour_cni::cni::{is_dns_subdomain, primary_in_attachment, unknown_key};
use detour_cni::trusted_file::read;
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
/// Limit for the name of a network. libcni saves a result as `NETWORK-CONTAINERID-INTERFACE`, with 64 and up to 15
/// characters for the last two, and a name has up to 255 bytes (NAME_MAX).
const MAX_NETWORK_NAME: usize = 174;

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
    keys: Map<String, Value>,
}

impl GivenKeys {
    /// Reads the files. `names` are the names under which the program is installed, which are the valid types.
    pub(super) fn read(config: Option<&Path>, attachments: Option<&Path>, names: &[&str]) -> Result<Self> {
        let file = |flag: &str, path: Option<&Path>| {
            let place = |path: &Path| format!("{flag} {}", path.display());
            path.map(|path| Ok::<_, anyhow::Error>((place(path), contents(path, &place(path))?))).transpose()
        };
        Self::parse(file("--config", config)?, file("--attachments", attachments)?, names)
    }

    /// Parses the contents of the files, each with its place for messages.
    pub(in crate::cli) fn parse(
        config: Option<(String, Vec<u8>)>,
        attachments: Option<(String, Vec<u8>)>,
        names: &[&str],
    ) -> Result<Self> {
        let config = config.map(|(place, text)| {
            let keys = serde_json::from_slice(&text);
            let keys = keys.with_context(|| format!("{place}: expected a JSON object"))?;
            check_type(&keys, &place, names).map(|()| keys)
        });
        let attachments = attachments.map(|(place, text)| {
            let all: Vec<Map<String, Value>> =
                serde_json::from_slice(&text).with_context(|| format!("{place}: expected a JSON array of objects"))?;
            parse(all, &place, names)
        });
        Ok(Self {
            config: config.transpose()?.unwrap_or_default(),
            attachments: attachments.transpose()?.unwrap_or_default(),
        })
    }

    /// Returns the name of the network in the configuration file of the installation: the key `name` of `--config`.
    /// Without such a file, the key is refused.
    pub(super) fn network(&self, is_written: bool) -> Result<String> {
        match self.config.get("name").filter(|name| !name.is_null()) {
            None => Ok(DEFAULT_NETWORK.to_owned()),
            Some(Value::String(name)) if is_written && name.len() <= MAX_NETWORK_NAME => Ok(name.clone()),
            Some(name) if is_written => {
                bail!("--config: name: expected a text of at most {MAX_NETWORK_NAME} bytes, got {name}")
            }
            Some(_) => bail!(
                "--config: name: it has an effect only with --chained=false and without --attachments; remove the key"
            ),
        }
    }
}

impl Attachment {
    /// Returns the name of its configuration file.
    pub(super) fn file_name(&self) -> String {
        format!("{}.conf", self.name)
    }

    /// Whether its own keys name a kubeconfig.
    pub(super) fn has_kubeconfig(&self) -> bool {
        self.keys.get("kubernetes").and_then(|keys| keys.get("kubeconfig")).is_some()
    }

    /// Returns its configuration: the keys of `--config`, overridden by its own.
    pub(super) fn entry(&self, settings: &EntrySettings) -> Result<Entry, InstallError> {
        let entry = settings.with_keys(&self.keys).entry()?;
        match &entry.conf.primary {
            Some(_) => Err(InstallError::Configuration(primary_in_attachment().to_string())),
            None => Ok(entry),
        }
    }
}

fn contents(path: &Path, place: &str) -> Result<Vec<u8>> {
    read(path, MAX_FILE).with_context(|| format!("can't read {place}"))
}

fn parse(all: Vec<Map<String, Value>>, place: &str, names: &[&str]) -> Result<Vec<Attachment>> {
    ensure!(all.len() <= MAX_ATTACHMENTS, "{place}: expected at most {MAX_ATTACHMENTS} attachments, got {}", all.len());
    let (mut attachments, mut known) = (Vec::new(), BTreeSet::new());
    for (i, mut keys) in all.into_iter().enumerate() {
        let name = keys.shift_remove("name").unwrap_or_default();
        let Some(name) = name.as_str().filter(|name| is_dns_subdomain(name)).map(str::to_owned) else {
            bail!("{place}: [{i}].name: expected the name of a NetworkAttachmentDefinition, got {name}");
        };
        let length = name.len();
        ensure!(length <= MAX_NAME, "{place}: [{i}].name: expected at most {MAX_NAME} characters, got {length}");
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
