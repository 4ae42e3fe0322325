//! The files that several releases on one node share.
//!
//! A file is shared if the records of several releases list it: the program and the node configuration.
//! Only the last release removes or restores it. A shared program or hook has the newest version of all releases; the
//! node configuration is composed of the parts in all records.

use super::{FoundState, InstallRecord, NodePart, NodeParts, Owned, Role, with_newest};
use crate::agent::install::digest::Digest;
use crate::agent::install::release::Release;
use crate::cni::NodeConf;
use crate::host_path::HostPath;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::slice::from_ref;

impl FoundState {
    /// Returns the other releases whose records list the file, with their records of it.
    pub(in crate::agent::install) fn sharers(
        &self,
        path: &HostPath,
    ) -> impl Iterator<Item = (&Release, &InstallRecord, &Owned)> {
        self.others.iter().filter_map(move |(release, record)| Some((release, record, record.files.get(path)?)))
    }

    /// Returns the other release whose record lists the file.
    pub(in crate::agent::install) fn owner(&self, path: &HostPath) -> Option<&Release> {
        let owns = |record: &&InstallRecord| record.files.contains_key(path) || record.lists.contains_key(path);
        self.others.iter().find(|(_, record)| owns(record)).map(|(release, _)| release)
    }

    /// Returns the path under which the record of another release can list the configuration file.
    pub(in crate::agent::install) fn recorded_path<'a>(&'a self, path: &'a HostPath) -> &'a HostPath {
        self.aliases.get(path).unwrap_or(path)
    }

    /// Returns the other release that has a configuration for the network, according to its record.
    pub(in crate::agent::install) fn network_owner(&self, network: &str) -> Option<&Release> {
        let has = |record: &InstallRecord| record.node.iter().any(|part| part.network.as_deref() == Some(network));
        self.others.iter().find(|(_, record)| has(record)).map(|(release, _)| release)
    }

    /// Returns the record of the file: that of this release, or else that of another one.
    pub(in crate::agent::install) fn recorded(&self, path: &HostPath) -> Option<&Owned> {
        self.record.files.get(path).or_else(|| self.sharers(path).next().map(|(.., owned)| owned))
    }

    /// Whether an installation wrote the current contents of the file, or may have written them before it was killed.
    pub(in crate::agent::install) fn is_ours(&self, path: &HostPath) -> bool {
        let Some(file) = self.files.get(path) else { return false };
        let own = self.record.files.get(path).into_iter();
        own.chain(self.sharers(path).map(|(.., owned)| owned)).any(|owned| owned.ours.contains(&file.digest))
    }

    /// Returns the digest of another release's program at `path`, if that is newer than `digest` of `version`.
    /// Equal versions are ordered by their digests, so that every release selects the same one.
    pub(in crate::agent::install) fn newer_file(
        &self,
        path: &HostPath,
        version: &str,
        digest: &Digest,
    ) -> Option<&Digest> {
        let shared = self.sharers(path).filter(|(.., owned)| owned.role == Role::Program);
        let versioned = shared.filter_map(|(_, record, owned)| Some((&*record.program_version, owned.ours.last()?)));
        let newest = versioned.max_by(|a, b| compare(*a, *b))?;
        (compare(newest, (version, digest)) == Ordering::Greater).then_some(newest.1)
    }

    /// Returns the text of the node configuration with `own` as this release's part and the parts of the others.
    /// `None` if no release has a part. The second part of the result are warnings.
    pub(in crate::agent::install) fn node_text(&self, own: &NodeParts) -> (Option<String>, Vec<String>) {
        let others = self.others.iter().map(|(release, record)| (release, &record.node));
        let mut parts: Vec<_> = others.chain([(&self.release, own)]).collect();
        let leads = |parts: &NodeParts| parts.iter().any(NodePart::leads);
        parts.sort_by_key(|(release, parts)| (!leads(parts), *release));
        let (mut confs, mut notes) = (Vec::new(), Vec::new());
        for (release, part) in parts.iter().flat_map(|(release, parts)| parts.iter().map(move |part| (release, part))) {
            match NodeConf::parse("node configuration", part.keys.to_string().as_bytes()) {
                Ok((conf, _)) => confs.push((part.network.clone(), conf)),
                Err(error) => notes.push(format!("release {release}: its part is skipped: {error}")),
            }
        }
        let composed = NodeConf::compose(confs);
        if let Some((_, ignored)) = &composed {
            notes.extend(ignored.iter().cloned());
        }
        (composed.map(|(conf, _)| conf.text()), notes)
    }

    /// Adds `contents` of the shared file `path` to the records of the other releases in `changed`. The other releases
    /// then recognize the file as their own when the record of this release no longer lists it.
    pub(in crate::agent::install) fn hand_over(
        &self,
        path: &HostPath,
        contents: &Digest,
        changed: &mut BTreeMap<Release, InstallRecord>,
    ) {
        for (release, record, owned) in self.sharers(path) {
            let ours = match (owned.role, owned.ours.last()) {
                // The other release's own program stays last in the list, because its agent restores that one.
                (Role::Program, Some(own)) => with_newest(from_ref(contents), own.clone()),
                _ => with_newest(&owned.ours, contents.clone()),
            };
            if ours != owned.ours {
                let record = changed.entry(release.clone()).or_insert_with(|| record.clone());
                record.files.insert(path.clone(), Owned { ours, ..owned.clone() });
            }
        }
    }

    /// Records the node configuration at `path` as the part of each release that wrote it without recording a part.
    /// Version 0.1.0 records no parts.
    pub(in crate::agent::install) fn adopt_node_parts(&mut self, path: &HostPath) {
        let Some(file) = self.files.get(path) else { return };
        let Some(Ok(keys)) = file.text.as_deref().map(serde_json::from_str::<Value>) else { return };
        for (release, record) in &mut self.others {
            let wrote = record.files.get(path).is_some_and(|owned| owned.ours.contains(&file.digest));
            if wrote && record.node.is_empty() {
                let of_network = record.files.iter().find(|(_, owned)| owned.role == Role::Configuration);
                let network = of_network.and_then(|(path, _)| path.name().strip_suffix(".conf").map(str::to_owned));
                let network = network.filter(|_| record.lists.is_empty() && keys["primary"] != true);
                record.node.push(NodePart { network, keys: keys.clone() });
                self.changed.insert(release.clone(), record.clone());
            }
        }
    }
}

impl NodePart {
    /// Whether its keys take precedence, because the runtime calls the plugin for every pod.
    fn leads(&self) -> bool {
        self.network.is_none() || self.keys["primary"] == true
    }
}

fn compare((version, digest): (&str, &Digest), other: (&str, &Digest)) -> Ordering {
    precedence(version).cmp(&precedence(other.0)).then_with(|| digest.cmp(other.1))
}

/// Returns a value that orders versions as Semantic Versioning does, except for several pre-releases of one version,
/// which are ordered as text. A missing version comes first.
fn precedence(version: &str) -> (Vec<u64>, bool, &str) {
    let version = version.split('+').next().unwrap_or_default();
    let (numbers, suffix) = version.split_once('-').unwrap_or((version, ""));
    (numbers.split('.').map_while(|number| number.parse().ok()).collect(), suffix.is_empty(), suffix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_and_equal_ones_by_digest() {
        let ordered = ["", "0.1.0", "0.2.0-rc.1", "0.2.0", "0.10.0", "1.0.0"];
        for pair in ordered.windows(2) {
            assert!(precedence(pair[0]) < precedence(pair[1]), "{pair:?}");
        }
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let forward = compare(("0.2.0", &a), ("0.2.0", &b));
        assert!(forward != Ordering::Equal && forward == compare(("0.2.0", &b), ("0.2.0", &a)).reverse());
    }
}
