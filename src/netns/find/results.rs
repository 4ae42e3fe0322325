//! The results that runtimes' library keeps of every ADD, each with the namespace it was for
//! (containernetworking/cni, `libcni/api.go`: `cachedInfo`).

use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file::read_nofollow;
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Where they are: the library's default, which containerd and CRI-O keep, and Multus's.
const DIRECTORIES: [&str; 2] = ["/var/lib/cni/results", "/var/lib/cni/multus/results"];
/// A result is larger only by mistake.
const LARGEST: u64 = 4 << 20;
/// What makes a file one of them.
const KIND: &str = "cniCacheV1";

/// The result of an ADD.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CachedResult {
    /// The file, as the node names it.
    pub(super) file: String,
    /// `CNI_CONTAINERID`.
    pub(super) container_id: String,
    /// The network's name.
    pub(super) network: String,
    /// `CNI_IFNAME`.
    pub(super) ifname: String,
    /// `K8S_POD_UID`.
    pub(super) pod: Option<String>,
    /// `K8S_POD_NAMESPACE` and `K8S_POD_NAME`.
    pub(super) pod_name: Option<(String, String)>,
    /// Where the namespace was, as the node names it.
    pub(super) netns: Option<HostPath>,
    /// What the ADD returned.
    pub(super) result: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Text {
    kind: String,
    container_id: String,
    if_name: String,
    network_name: String,
    /// Since 1.2 of the library.
    netns: Option<String>,
    cni_args: Option<Vec<(String, String)>>,
    #[serde(default)]
    result: Value,
}

impl CachedResult {
    fn parse(file: String, text: &[u8]) -> Option<Self> {
        let text: Text = serde_json::from_slice(text).ok()?;
        if text.kind != KIND {
            return None;
        }
        let of_interface = || {
            let interfaces = text.result["interfaces"].as_array()?;
            let own = interfaces.iter().find(|interface| interface["name"] == text.if_name.as_str())?;
            own["sandbox"].as_str().map(str::to_owned)
        };
        let netns = text.netns.clone().or_else(of_interface).and_then(HostPath::new);
        let args = text.cni_args.unwrap_or_default();
        let arg = |name| args.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        Some(Self {
            file,
            netns,
            pod: arg("K8S_POD_UID"),
            pod_name: arg("K8S_POD_NAMESPACE").zip(arg("K8S_POD_NAME")),
            container_id: text.container_id,
            network: text.network_name,
            ifname: text.if_name,
            result: text.result,
        })
    }
}

/// All that is kept, in the order of the files' names.
///
/// # Errors
/// A directory can't be read. A file that is none of the library's, or of another form, is passed over.
pub(super) fn kept(node: &HostRoot) -> Result<Vec<CachedResult>, Error> {
    let mut all = Vec::new();
    for name in DIRECTORIES {
        let failed = |error| Error::new(Code::Io, format!("{name}: the results kept there can't be read: {error}"));
        let Some(directory) = HostPath::new(name) else { continue };
        let entries = match fs::read_dir(node.reach(&directory).map_err(failed)?) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        all.extend(files.into_iter().filter_map(|path| {
            let file = directory.join(path.file_name()?.to_str()?);
            CachedResult::parse(file.to_string(), &read_nofollow(&path, LARGEST).ok()?)
        }));
    }
    Ok(all)
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

    fn netns(kept: &CachedResult) -> Option<String> {
        kept.netns.as_ref().map(ToString::to_string)
    }

    #[test]
    fn the_namespace_is_the_calls_or_that_of_its_interface() {
        let mut text = text();
        let kept = parse(&text).expect("a result");
        assert_eq!(netns(&kept).as_deref(), Some("/var/run/netns/one"));
        assert_eq!((kept.pod.as_deref(), kept.network.as_str(), kept.ifname.as_str()), (Some("u"), "n", "eth0"));
        text.as_object_mut().expect("an object").remove("netns");
        assert_eq!(netns(&parse(&text).expect("a result")).as_deref(), Some("/var/run/netns/two"));
        text["ifName"] = "net1".into();
        assert_eq!(netns(&parse(&text).expect("a result")), None);
    }

    #[test]
    fn a_path_that_is_not_absolute_or_leads_up_is_none() {
        for path in ["netns/one", "/run/netns/../../etc"] {
            let mut text = text();
            text["netns"] = path.into();
            assert_eq!(netns(&parse(&text).expect("a result")), None, "{path}");
        }
    }

    #[test]
    fn other_files_are_passed_over() {
        assert_eq!(CachedResult::parse("f".into(), b"{"), None);
        assert_eq!(parse(&json!({"cniVersion": "0.4.0", "ips": []})), None);
        let mut other = text();
        other["kind"] = "cniCacheV9".into();
        assert_eq!(parse(&other), None);
    }
}
