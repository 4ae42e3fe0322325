//! The installation record: each file with something of the installation, its role, and the SHA-256 of what the
//! installation wrote there.

use crate::host_path::HostPath;
use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, Read};

/// The record of an installation: everything that an uninstallation removes.
///
/// It is written before the first change, so that it covers the changes of an installation that was killed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstallRecord {
    /// The DaemonSet that owns the installation, as NAMESPACE/NAME: no other one may change it. `None` for an
    /// installation from the command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The platform of the installation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// The files.
    pub files: BTreeMap<HostPath, FileRecord>,
    /// The directory of Multus's auxiliary chain, if one of the files is there: Multus runs the plugin for every pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multus_chain: Option<HostPath>,
}

impl InstallRecord {
    /// Returns the files with this role.
    pub fn with_role(&self, role: Role) -> impl Iterator<Item = (&HostPath, &FileRecord)> {
        self.files.iter().filter(move |(_, file)| file.role == role)
    }
}

/// A file with something of the installation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// The purpose of the file.
    pub role: Role,
    /// The digests of what the installation wrote there: of the whole file, or of its entry in another owner's list. They
    /// are two while an installation runs, and after one that was killed.
    pub sha256: Vec<Digest>,
    /// The `type` of the plugin's entry, if the file is a configuration list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plugin: Option<String>,
    /// The name of the cluster network's file of which the own list is a copy, in the same directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// The purpose of a file, in the order of removal: each file is removed before those that it refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Another owner's configuration list with the plugin's entry.
    Entry,
    /// The own list: a copy of the cluster network's list with the plugin's entry.
    OwnList,
    /// The plugin's own configuration.
    Configuration,
    /// The node configuration, which applies to attachments with other configurations too.
    Node,
    /// The kubeconfig that the configurations name.
    Kubeconfig,
    /// The program that the configurations name.
    Program,
}

impl Role {
    /// Returns the permission bits of a file that the installation writes as a whole. Configurations and kubeconfigs can
    /// hold secrets or name them (CIS Kubernetes Benchmark, 1.1.9).
    pub(super) fn mode(self) -> u32 {
        if self == Self::Program { 0o755 } else { 0o600 }
    }

    /// Whether a file with this role needs the others.
    pub(super) fn is_configuration(self) -> bool {
        matches!(self, Self::Entry | Self::OwnList | Self::Configuration)
    }
}

/// Appends `newest` to the digests in `earlier`, without a duplicate.
pub(super) fn with_newest(earlier: impl IntoIterator<Item = Digest>, newest: Digest) -> Vec<Digest> {
    let mut digests: Vec<_> = earlier.into_iter().filter(|digest| *digest != newest).collect();
    digests.push(newest);
    digests
}

/// The SHA-256 of a content, as the installation record stores it: `sha256:` and 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(String);

/// Bytes read at a time: the agent must not hold a whole program in memory.
const CHUNK_SIZE: usize = 1 << 16;

impl Digest {
    /// Returns the digest of `contents`.
    #[must_use]
    pub fn of(contents: &[u8]) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(contents);
        Self::finish(context)
    }

    /// Returns the digest of everything that `reader` yields.
    ///
    /// # Errors
    /// Reading fails.
    pub fn read(mut reader: impl Read) -> io::Result<Self> {
        let mut context = Context::new(&SHA256);
        let mut chunk = vec![0; CHUNK_SIZE];
        loop {
            match reader.read(&mut chunk)? {
                0 => return Ok(Self::finish(context)),
                length => context.update(&chunk[..length]),
            }
        }
    }

    /// Returns the digest of a JSON value, independent of the order of its keys: programs that rewrite a list may
    /// sort them, as Go does.
    #[must_use]
    pub fn of_value(value: &Value) -> Self {
        let mut sorted = value.clone();
        sorted.sort_all_objects();
        Self::of(sorted.to_string().as_bytes())
    }

    fn finish(context: Context) -> Self {
        let digits = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        Self(format!("sha256:{digits}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_the_sha256_of_the_content() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").0, empty);
    }

    #[test]
    fn reading_in_chunks_gives_the_same_digest() {
        for length in [0, 1, 8, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5] {
            let contents: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).expect("small")).collect();
            assert_eq!(Digest::read(&contents[..]).expect("readable"), Digest::of(&contents), "{length}");
        }
    }

    #[test]
    fn the_order_of_keys_does_not_change_the_digest_of_a_value() {
        let digest = |text: &str| Digest::of_value(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(digest(r#"{"a": {"b": 1, "c": [1, 2]}, "d": 2}"#), digest(r#"{"d":2,"a":{"c":[1,2],"b":1}}"#));
        assert_ne!(digest(r#"{"a": [1, 2]}"#), digest(r#"{"a": [2, 1]}"#));
    }
}
