//! The saved state of a pod in `cniDir`, kept until DEL. With it, DEL, CHECK and GC need neither the cluster nor the
//! current configuration. And Multus's own record of a pod that it started before this plugin replaced it: DEL calls the
//! same plugins.

use super::invocation::{Invocation, PrimaryCall};
use super::networks::NetworkRunner;
use crate::cni::Error;
use crate::netns::NetNs;
use crate::networks::RunnableConfiguration;
use crate::plugin::del;
use crate::state::{Attachment, ROOT, Store};
use crate::trusted_file::read_trusted;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// The invocations of a pod: those that were run, and those that are about to be.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedState {
    /// In the order of ADD: the default network, the other networks, the chained plugins. Every version writes them: a
    /// default would hide damage.
    #[serde(rename = "members")]
    pub(super) invocations: Vec<Invocation>,
}

impl SavedState {
    /// Recovers what is readable of a damaged or newer record.
    pub(crate) fn recover(fields: &Map<String, Value>) -> Option<Self> {
        let invocations = fields.get("members")?.as_array()?;
        let invocations = invocations.iter().filter_map(|found| Invocation::deserialize(found).ok()).collect();
        Some(Self { invocations })
    }
}

impl PrimaryCall<'_> {
    /// Removes everything in `saved` in the reverse order of ADD: the chained plugins, the rules of the call's attachment and
    /// of `attachments`, the networks. All steps are tried even if one fails.
    ///
    /// # Errors
    /// The steps that failed.
    pub(super) fn remove(&self, saved: &SavedState, attachments: &[Attachment]) -> Result<(), Error> {
        let mut call = self.delegate_call();
        let netns = NetNs::open(&call.netns).ok().flatten();
        if del::is_late(&self.attachment(), &call.netns) {
            call.netns = PathBuf::new();
        }
        let store = Store::new(ROOT);
        let (chained, networks): (Vec<_>, Vec<_>) = saved.invocations.iter().rev().partition(|one| one.is_chained);
        let mut results: Vec<_> = chained.iter().map(|invocation| invocation.del(&call)).collect();
        results.extend(attachments.iter().map(|attachment| del::remove(&store, attachment, netns.as_ref())));
        results.push(del::run(self.request, self.conf));
        results.extend(networks.iter().map(|invocation| invocation.del(&call)));
        Error::all(results)
    }
}

/// The default of Multus's `cniDir` (pkg/types/conf.go, `defaultCNIDir`).
const DIRECTORY: &str = "/var/lib/cni/multus";
/// The maximum size of a record, in bytes: at most 32 networks with a definition each, as the API server stores it.
const MAX_BYTES: u64 = 64 << 20;

/// A record: the networks of a pod in the order of their ADD, and the files from which they were read.
pub(super) struct MultusRecord {
    pub(super) saved: SavedState,
    /// The attachments that ran this plugin; it has its own records of them.
    pub(super) attachments: Vec<Attachment>,
    files: Vec<PathBuf>,
}

/// An element of the record (Multus, pkg/types, `DelegateNetConf`).
#[derive(Deserialize)]
struct Delegate {
    /// The interface that the pod's annotation requests.
    #[serde(default, rename = "ifnameRequest")]
    interface: String,
    /// The configuration, unchanged.
    #[serde(rename = "Bytes")]
    configuration: String,
}

impl MultusRecord {
    /// Reads the record of the call's pod in `cniDir`, or in Multus's default directory; `None` if it is missing or
    /// can't be used.
    pub(super) fn read(call: &PrimaryCall<'_>) -> Option<Self> {
        let directories = [call.primary.cni_dir.as_path(), Path::new(DIRECTORY)];
        let (directory, path) = directories
            .map(|directory| (directory, directory.join(&call.request.container_id)))
            .into_iter()
            .find(|(_, path)| path.is_file())?;
        let warn = |why: &dyn std::fmt::Display| {
            tracing::warn!(
                "DEL skips the networks in Multus's record {}: {why}; drain nodes before this plugin replaces Multus",
                path.display()
            );
        };
        let text = read_trusted(&path, MAX_BYTES).inspect_err(|error| warn(error)).ok()?;
        let delegates: Vec<Delegate> = serde_json::from_slice(&text).inspect_err(|error| warn(error)).ok()?;
        let mut record = Self { saved: SavedState::default(), attachments: Vec::new(), files: vec![path.clone()] };
        for (position, delegate) in delegates.iter().enumerate() {
            record.add(call, directory, position, delegate).unwrap_or_else(|why| warn(&why));
        }
        Some(record)
    }

    /// Adds the network at `position`.
    fn add(
        &mut self,
        call: &PrimaryCall<'_>,
        directory: &Path,
        position: usize,
        delegate: &Delegate,
    ) -> Result<(), String> {
        let text = BASE64_STANDARD.decode(&delegate.configuration).map_err(|error| error.to_string())?;
        let text = String::from_utf8(text).map_err(|error| error.to_string())?;
        let place = format!("network {position}");
        let configuration = RunnableConfiguration::parse(&place, &text, None).map_err(|error| error.msg)?;
        let (container_id, network) = (&call.request.container_id, configuration.name.clone());
        let ifname = match (delegate.interface.as_str(), position) {
            ("", 0) => call.request.ifname.clone(),
            ("", _) => format!("net{position}"),
            (requested, _) => requested.to_owned(),
        };
        if NetworkRunner::of(call.primary, &configuration) == NetworkRunner::Here {
            self.attachments.push(Attachment { container_id: container_id.clone(), network, ifname });
            return Ok(());
        }
        // The network's cached result (libcni, `cachedInfo`).
        let cached = directory.join("results").join(format!("{network}-{container_id}-{ifname}"));
        let found = read_trusted(&cached, MAX_BYTES).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        let found = found.unwrap_or_default();
        self.saved.invocations.push(Invocation {
            name: network,
            interface: ifname,
            conf: text,
            runtime_config: found["capabilityArgs"].as_object().cloned().unwrap_or_default(),
            cni_args: call.request.args_text.clone(),
            result: Some(found["result"].clone()).filter(|result| !result.is_null()),
            ..Invocation::default()
        });
        self.files.push(cached);
        Ok(())
    }

    /// Removes the record and the cached results.
    pub(super) fn remove(&self) {
        for file in &self.files {
            if let Err(error) = fs::remove_file(file)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!("Multus's file not removed: {}: {error}", file.display());
            }
        }
    }
}
