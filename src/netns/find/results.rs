//! The results of ADDs that libcni caches, each with its network namespace (containernetworking/cni,
//! `libcni/api.go`: `cachedInfo`).

use crate::cni::{Code, Error, PROGRAM};
use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file::read_nofollow;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// The cache directory of libcni, which containerd and CRI-O use.
const RUNTIME_DIRECTORY: &str = "/var/lib/cni/results";
/// The cache directories: the runtimes' and Multus's.
const DIRECTORIES: [&str; 2] = [RUNTIME_DIRECTORY, "/var/lib/cni/multus/results"];
/// How containerd begins the names of the network namespaces that it makes (containerd, `pkg/netns`). CRI-O uses UUIDs
/// (cri-o, `internal/config/nsmgr`).
const NETNS_OF_CONTAINERD: &str = "cni-";
/// The largest file that is read.
const MAX_RESULT: u64 = 4 << 20;
/// The `kind` of a cached result.
const KIND: &str = "cniCacheV1";

/// The cached result of an ADD.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct CachedResult {
    /// The cache file, as a path on the node.
    #[serde(skip)]
    pub(super) file: String,
    kind: String,
    pub(super) container_id: String,
    #[serde(rename = "networkName")]
    pub(super) network: String,
    #[serde(rename = "ifName")]
    pub(super) ifname: String,
    /// Base64 of the configuration list, or of a single plugin's configuration.
    config: String,
    /// `CNI_NETNS`, written since libcni 1.2.
    netns: Option<String>,
    cni_args: Option<Vec<(String, String)>>,
    /// The result that the ADD returned.
    pub(super) result: Value,
}

impl CachedResult {
    fn parse(file: String, text: &[u8]) -> Option<Self> {
        let read: Self = serde_json::from_slice(text).ok().filter(|read: &Self| read.kind == KIND)?;
        Some(Self { file, ..read })
    }

    /// Returns `K8S_POD_UID`.
    pub(super) fn pod_uid(&self) -> Option<&str> {
        self.arg("K8S_POD_UID")
    }

    /// Returns `K8S_POD_NAMESPACE` and `K8S_POD_NAME`.
    pub(super) fn pod_name(&self) -> Option<(&str, &str)> {
        self.arg("K8S_POD_NAMESPACE").zip(self.arg("K8S_POD_NAME"))
    }

    fn arg(&self, name: &str) -> Option<&str> {
        self.cni_args.iter().flatten().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Returns the network namespace, as a path on the node: that of the call; the fallback is that of the interface.
    pub(super) fn netns(&self) -> Option<HostPath> {
        let of_interface = || {
            let interfaces = self.result["interfaces"].as_array()?;
            interfaces.iter().find(|interface| interface["name"] == *self.ifname)?["sandbox"].as_str()
        };
        self.netns.as_deref().or_else(of_interface).and_then(HostPath::new)
    }

    /// Returns the types of the plugins that are called to delete the pod; `None` if containerd saved the result in
    /// `directory`, because it deletes pods with its current configuration list (go-cni, `Remove`), and if the pod sandbox
    /// no longer exists.
    fn types(&self, directory: &str, node: &HostRoot) -> Option<BTreeSet<String>> {
        let netns = self.netns.as_deref().unwrap_or_default();
        let is_of_containerd = netns.rsplit('/').next().is_some_and(|name| name.starts_with(NETNS_OF_CONTAINERD));
        let is_gone = HostPath::new(netns).is_some_and(|netns| is_gone(node, &netns));
        if is_gone || (directory == RUNTIME_DIRECTORY && is_of_containerd) {
            return None;
        }
        let config: Value = serde_json::from_slice(&BASE64_STANDARD.decode(&self.config).ok()?).ok()?;
        let plugins = config["plugins"].as_array().map_or(std::slice::from_ref(&config), Vec::as_slice);
        Some(plugins.iter().filter_map(|plugin| plugin["type"].as_str()).map(str::to_owned).collect())
    }
}

/// Whether a network namespace does not exist, although its directory does.
fn is_gone(node: &HostRoot, netns: &HostPath) -> bool {
    let exists = |path: &HostPath| node.reach(path).is_ok_and(|path| path.exists());
    exists(&netns.parent()) && !exists(netns)
}

/// Reads all cached results, sorted by file name. Skips files in another format.
///
/// # Errors
/// A cache directory can't be read.
pub(super) fn cached_results(node: &HostRoot) -> Result<Vec<CachedResult>, Error> {
    let mut all = Vec::new();
    for name in DIRECTORIES {
        all.extend(files(node, name)?.into_iter().filter_map(|path| {
            let file = HostPath::new(name)?.join(path.file_name()?.to_str()?);
            CachedResult::parse(file.to_string(), &read_nofollow(&path, MAX_RESULT).ok()?)
        }));
    }
    Ok(all)
}

/// Returns the containers whose pods are deleted with a cached configuration that has a plugin of one of `types`, by type;
/// and the problems of reading them, one for each directory. CRI-O and Multus delete pods in this way, containerd does not.
/// The configuration lacks the plugins of the directory with the network's name; `is_own` tells whether the plugin has a
/// record of the container and the network.
#[must_use]
pub fn containers_by_type(
    node: &HostRoot,
    types: &BTreeSet<String>,
    is_own: &dyn Fn(&str, &str) -> bool,
) -> (BTreeMap<String, BTreeSet<String>>, Vec<Error>) {
    let (mut containers, mut problems): (BTreeMap<_, BTreeSet<_>>, _) = (BTreeMap::new(), Vec::new());
    let mut read = |name: &str| {
        let mut unread = Ok(());
        for path in files(node, name)? {
            let text = match read_nofollow(&path, MAX_RESULT) {
                Ok(text) => text,
                // The runtime has deleted the container.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => {
                    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    unread = Err(Error::new(Code::Io, format!("can't read the cached result {name}/{file}: {error}")));
                    continue;
                }
            };
            let Some(cached) = CachedResult::parse(String::new(), &text) else { continue };
            let Some(mut plugins) = cached.types(name, node) else { continue };
            if is_own(&cached.container_id, &cached.network) {
                plugins.insert(PROGRAM.to_owned());
            }
            for kind in plugins.intersection(types) {
                containers.entry(kind.clone()).or_default().insert(cached.container_id.clone());
            }
        }
        unread
    };
    problems.extend(DIRECTORIES.iter().filter_map(|name| read(name).err()));
    (containers, problems)
}

/// Returns the sorted files of a cache directory; none if it does not exist.
fn files(node: &HostRoot, name: &str) -> Result<Vec<PathBuf>, Error> {
    let failed = |error| Error::new(Code::Io, format!("can't read the cached results in {name}: {error}"));
    let Some(directory) = HostPath::new(name) else { return Ok(Vec::new()) };
    let entries = match fs::read_dir(node.reach(&directory).map_err(failed)?) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn text() -> Value {
        json!({
            "kind": KIND, "containerId": "c", "config": "e30=", "ifName": "eth0", "networkName": "n",
            "netns": "/var/run/netns/one",
            "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_UID", "u"]],
            "result": {"interfaces": [
                {"name": "veth1"}, {"name": "eth0", "sandbox": "/var/run/netns/two"},
            ]},
        })
    }

    fn parse(text: &Value) -> Option<CachedResult> {
        CachedResult::parse("f".into(), text.to_string().as_bytes())
    }

    fn cached(text: &Value) -> CachedResult {
        parse(text).expect("a cached result")
    }

    fn netns(result: &CachedResult) -> Option<String> {
        result.netns().map(|netns| netns.to_string())
    }

    #[test]
    fn the_namespace_of_the_call_is_preferred_to_that_of_the_interface() {
        let mut text = text();
        let result = parse(&text).expect("a result");
        assert_eq!(netns(&result).as_deref(), Some("/var/run/netns/one"));
        assert_eq!((result.pod_uid(), &*result.network, &*result.ifname), (Some("u"), "n", "eth0"));
        text.as_object_mut().expect("an object").remove("netns");
        assert_eq!(netns(&parse(&text).expect("a result")).as_deref(), Some("/var/run/netns/two"));
        text["ifName"] = "net1".into();
        assert_eq!(netns(&parse(&text).expect("a result")), None);
    }

    #[test]
    fn a_path_that_is_relative_or_contains_dots_is_ignored() {
        for path in ["netns/one", "/run/netns/../../etc"] {
            let mut text = text();
            text["netns"] = path.into();
            assert_eq!(netns(&parse(&text).expect("a result")), None, "{path}");
        }
    }

    #[test]
    fn files_in_another_format_are_skipped() {
        assert_eq!(CachedResult::parse("f".into(), b"{"), None);
        assert_eq!(parse(&json!({"cniVersion": "0.4.0", "ips": []})), None);
        let mut other = text();
        other["kind"] = "cniCacheV9".into();
        assert_eq!(parse(&other), None);
    }

    #[test]
    fn the_types_of_a_cached_list_or_plugin_are_read() {
        let types = |config: &Value| {
            let mut text = text();
            text["config"] = BASE64_STANDARD.encode(config.to_string()).into();
            let node = HostRoot::new("/no/such/node");
            let types = cached(&text).types(RUNTIME_DIRECTORY, &node).expect("a configuration");
            types.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(types(&json!({"plugins": [{"type": "b"}, {"type": "a"}, {}]})), ["a", "b"]);
        assert_eq!(types(&json!({"type": "istio-cni"})), ["istio-cni"]);
        assert_eq!(types(&json!([])), [""; 0]);
        let mut invalid = text();
        invalid["config"] = "%".into();
        assert_eq!(cached(&invalid).types(RUNTIME_DIRECTORY, &HostRoot::new("/none")), None);
    }

    #[test]
    fn a_list_that_containerd_saved_needs_no_program() {
        let is_needed = |directory: &str, netns: Option<&str>| {
            let mut text = text();
            match netns {
                Some(netns) => text["netns"] = netns.into(),
                None => drop(text.as_object_mut().expect("an object").remove("netns")),
            }
            cached(&text).types(directory, &HostRoot::new("/none")).is_some()
        };
        let [runtime, multus] = DIRECTORIES;
        let containerd = Some("/var/run/netns/cni-1b3d9a1c-2f0c-7a0e-4a51-95a1b5b7f6a2");
        assert!(!is_needed(runtime, containerd), "of containerd");
        assert!(is_needed(multus, containerd), "of Multus under containerd");
        let cri_o = Some("/var/run/netns/0c4b7fb8-07a5-4f0e-b9b8-8f2b7a2f3b11");
        assert!(is_needed(runtime, cri_o) && is_needed(runtime, None), "of CRI-O, and of earlier versions of libcni");
    }
}
