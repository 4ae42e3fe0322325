//! The node of a cell, and what an administrator installs on it.

use super::cluster::{Cluster, SYSTEM};
use super::{Cell, Mode};
use crate::certificates::SERVICE;
use crate::node::{Node, Runtime, tools, until};
use crate::pod::{Class, Pod};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The UID of Istio's proxy.
pub(crate) const PROXY_USER: u32 = 1337;
/// The addresses of DNS servers and of the destination on the node.
pub(crate) const NODE: [&str; 2] = ["10.85.0.1", "fd00:85::1"];
/// The configuration list of the cluster network.
pub(crate) const LIST: &str = "10-net.conflist";
/// The first file of the runtime's directory, for a plugin that the runtime must use.
const MULTUS: &str = "00-multus.conf";

impl Cell {
    /// Starts a node with a bridge as its cluster network, which gives pods both families and default routes.
    pub(crate) fn node(self) -> Node {
        Node::start(self.runtime, |directory| {
            fs::create_dir_all(directory.join("net.d")).expect("made");
            fs::write(directory.join("net.d").join(LIST), cluster_network().to_string()).expect("written");
        })
    }

    /// The values of the chart for the mode.
    pub(crate) fn values(self) -> Vec<String> {
        let mode = match self.mode {
            Mode::Attachment => "chained=false",
            Mode::Chained => "chained=true,cni.ownList=false",
            Mode::OwnList => "chained=true,cni.ownList=true",
            Mode::Primary => {
                "chained=false,cniConfFileName=00-detour.conf,primaryPlugin.enabled=true,primaryPlugin.network=net,\
                 config.clusterNetwork=/etc/cni/net.d/10-net.conflist"
            }
        };
        let mut values = vec![mode.to_owned(), format!("config.dialect={}", self.dialect)];
        if self.runtime == Runtime::CriO {
            values.push("cniNetnsDir=/run/crio/ns/netns".to_owned());
        }
        values
    }

    /// Whether pods can select networks.
    pub(crate) fn has_networks(self) -> bool {
        matches!(self.mode, Mode::Attachment | Mode::Primary)
    }

    /// A pod with a sidecar that captures DNS.
    pub(crate) fn meshed(self, name: &str) -> Pod {
        let mut pod = Pod::new(name, Class::Burstable, "").init_container("init").container("web");
        let proxy = &mut pod.spec["containers"][0];
        proxy["securityContext"] = json!({"runAsUser": PROXY_USER, "runAsGroup": PROXY_USER});
        proxy["env"] = json!([{"name": "ISTIO_META_DNS_CAPTURE", "value": "true"}]);
        pod.spec["dnsPolicy"] = "None".into();
        pod.spec["dnsConfig"] = json!({"nameservers": NODE});
        match self.mode {
            Mode::Attachment => pod.annotate("k8s.v1.cni.cncf.io/networks", "default/istio-cni,second@data0"),
            Mode::Primary => pod.annotate("k8s.v1.cni.cncf.io/networks", "second@data0"),
            Mode::Chained | Mode::OwnList => {}
        }
        pod
    }
}

fn cluster_network() -> Value {
    let ranges = [[json!({"subnet": "10.85.0.0/16"})], [json!({"subnet": "fd00:85::/64"})]];
    let ipam = json!({"type": "host-local", "ranges": ranges});
    let bridge = json!({"type": "bridge", "bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "ipam": ipam});
    json!({"cniVersion": "1.0.0", "name": "net", "plugins": [bridge]})
}

/// Installs Multus as the runtime's plugin.
pub(crate) fn install_multus(cluster: &Cluster, node: &Node) {
    cluster.apply(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/runtimes/multus/rbac.yaml"));
    let user = json!({"token": cluster.admin.token(SYSTEM, "multus")});
    let mut kubeconfig = cluster.plane.kubeconfig_of(&user);
    kubeconfig["clusters"][0]["cluster"]["server"] = format!("https://{SERVICE}:443").into();
    fs::create_dir_all(node.path("net.d/multus.d")).expect("made");
    fs::write(node.path("net.d/multus.d/kubeconfig"), kubeconfig.to_string()).expect("written");
    fs::copy(tools().join("runtimes/multus"), node.path("bin/multus")).expect("hack/e2e.sh builds it");
    let configuration = json!({
        "cniVersion": "1.0.0", "name": "multus", "type": "multus", "logToStderr": true, "logLevel": "error",
        "kubeconfig": "/etc/cni/net.d/multus.d/kubeconfig", "confDir": "/etc/cni/multus/net.d",
        // With a file as clusterNetwork, DEL of Multus 4.2.3 loses most keys of its plugins.
        "delegates": [cluster_network()],
    });
    write_list(node, MULTUS, &configuration);
}

/// Creates the definition of a second network.
pub(crate) fn define_second_network(cluster: &Cluster) {
    let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.86.0.0/24"}]]});
    let bridge = json!({"cniVersion": "1.0.0", "name": "second", "type": "bridge", "bridge": "cni1", "ipam": ipam});
    let metadata = json!({"name": "second", "namespace": "shop"});
    let definition = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": metadata,
        "spec": {"config": bridge.to_string()},
    });
    cluster.admin.apply(&definition).expect("accepted");
}

/// Writes a file of the runtime's directory, and waits until the runtime has read it.
fn write_list(node: &Node, name: &str, configuration: &Value) {
    let new = node.path("net.d").join(name).with_extension("new");
    fs::write(&new, configuration.to_string()).expect("written");
    fs::rename(new, node.path("net.d").join(name)).expect("renamed");
    until_used(node, "multus");
}

/// Waits until the runtime uses a configuration list in which this plugin is.
pub(crate) fn until_used(node: &Node, plugin: &str) {
    until("the runtime uses the plugin", || match node.runtime {
        Runtime::Containerd => {
            let info: Value = serde_json::from_str(&node.ok(&["crictl", "info"])).expect("JSON");
            let networks = info["cniconfig"]["Networks"].as_array().cloned().unwrap_or_default();
            networks.iter().any(|network| network["Config"]["Plugins"].to_string().contains(plugin))
        }
        // It logs each list that it has read, with its file and the type of the first plugin.
        Runtime::CriO => {
            let log = node.log();
            let lines = log.lines().filter(|line| line.contains("Updated default CNI network name to")).count();
            lines > 0 && log.contains("Found CNI network") && has_read(node, &log, plugin)
        }
    });
}

/// Whether CRI-O has read the plugin's file or, if the list of the cluster network has the plugin, that list again.
fn has_read(node: &Node, log: &str, plugin: &str) -> bool {
    let directory = fs::read_dir(node.path("net.d")).expect("readable").flatten();
    let with_plugin = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.contains(&format!("\"{plugin}\"")));
    let mut files: Vec<_> = directory.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    let Some(first) = files.iter().find(|path| with_plugin(path)) else { return false };
    let name = first.file_name().expect("a name").to_string_lossy().into_owned();
    let found = log.lines().filter(|line| line.contains("Found CNI network") && line.contains(&name)).count();
    found > usize::from(name == LIST)
}

/// The files that pods and the plugin leave on a node, with a checksum of each one below /etc/cni and /opt/cni.
pub(crate) fn files(node: &Node) -> Vec<String> {
    // The files of host-local that stay, and locks.
    let script = r"
        cd /
        for directory in run/netns run/crio/ns run/detour var/lib/cni; do
            [ ! -d $directory ] || find $directory -type f ! -name last_reserved_ip.\* ! -name lock ! -name \*.lock
        done
        find etc/cni/net.d etc/cni/multus/net.d opt/cni/bin ! -type d ! -path \*/multus.d/\* -exec md5sum {} +";
    let mut files: Vec<_> = node.ok(&["sh", "-c", script]).lines().map(str::to_owned).collect();
    files.sort();
    files
}

/// The processes of plugins on the node.
pub(crate) fn plugin_processes(node: &Node) -> Vec<String> {
    let list = node.ok(&["ps", "axo", "comm"]);
    let plugins = ["multus", "bridge", "host-local", "detour"];
    list.lines().filter(|name| plugins.contains(&name.trim())).map(str::to_owned).collect()
}
