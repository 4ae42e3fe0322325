//! A cluster with a real API server, Multus' types and the chart, for one node.

use crate::certificates::SERVICE;
use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::node::{Node, tools};
use crate::pod::Pod;
use crate::support::new_netns::tool;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{Shutdown, shutdown};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io;
use std::net::{Shutdown as Direction, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

/// The namespace of the chart's release.
pub(crate) const SYSTEM: &str = "kube-system";

pub(crate) struct Cluster {
    pub(crate) plane: ControlPlane,
    pub(crate) admin: Client,
    kubeconfig: String,
}

impl Cluster {
    /// Starts etcd and kube-apiserver, and creates namespaces and types.
    pub(crate) fn start() -> Self {
        let plane = ControlPlane::start();
        let (admin, kubeconfig) = (plane.admin(), plane.kubeconfig().display().to_string());
        let cluster = Self { plane, admin, kubeconfig };
        for namespace in [SYSTEM, "default", "shop"] {
            let metadata = json!({"name": "default", "namespace": namespace});
            let named = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
            cluster.admin.apply(&named).expect("accepted");
            let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata});
            cluster.admin.apply(&account).expect("accepted");
        }
        // Tokens are bound to it.
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}});
        cluster.admin.apply(&node).expect("accepted");
        let types = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/apiserver/crds.yaml");
        cluster.apply(&types);
        let established = ["wait", "--for=condition=Established", "--timeout=60s", "--filename"];
        cluster.kubectl(&[&established[..], &[&types.display().to_string()]].concat());
        cluster
    }

    /// Runs kubectl, which must succeed. Returns its output.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        let program = tools().join("kubectl").display().to_string();
        tool(&program, &[&["--kubeconfig", &self.kubeconfig], arguments].concat(), "")
    }

    /// Applies a file of manifests.
    pub(crate) fn apply(&self, file: &Path) {
        self.kubectl(&["apply", "--server-side", "--filename", &file.display().to_string()]);
    }

    /// Renders the chart with these values and applies it. Returns its DaemonSet and its ConfigMap.
    pub(crate) fn install_chart(&self, file: &Path, values: &[String]) -> (Value, Value) {
        let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/chart").display().to_string();
        let helm = tools().join("helm").display().to_string();
        let mut arguments = vec!["template", "detour", &chart, "--no-hooks", "--namespace", SYSTEM];
        arguments.extend(["--kube-version", "1.35.0", "--set", "hub=registry.example/mesh"]);
        values.iter().for_each(|value| arguments.extend(["--set", value]));
        fs::write(file, tool(&helm, &arguments, "")).expect("written");
        self.apply(file);
        let named = |version: &str, kind: &str| {
            let metadata = json!({"namespace": SYSTEM, "name": "detour-agent"});
            self.admin.get(&json!({"apiVersion": version, "kind": kind, "metadata": metadata})).expect("applied")
        };
        (named("apps/v1", "DaemonSet"), named("v1", "ConfigMap"))
    }

    /// Creates the pod, which gets its UID.
    pub(crate) fn create(&self, pod: &mut Pod) {
        let mut manifest = pod.manifest();
        manifest["metadata"].as_object_mut().expect("an object").remove("uid");
        let created = self.admin.apply(&manifest).expect("accepted");
        pod.uid = created["metadata"]["uid"].as_str().expect("text").to_owned();
    }

    /// Reports the pod's addresses, as the kubelet does after the sandbox has started.
    pub(crate) fn has_started(&self, pod: &Pod, addresses: &[String]) {
        let addresses: Vec<_> = addresses.iter().map(|address| json!({"ip": address})).collect();
        let status = json!({"phase": "Running", "podIP": addresses[0]["ip"], "podIPs": addresses});
        self.admin.merge_status(&pod.manifest(), &json!({"status": status})).expect("accepted");
    }

    /// Opens the API server's port at the address of its Service in the node's network.
    pub(crate) fn open(&self, node: &Node) -> Entrance {
        let (netns, port) = (format!("/proc/{}/ns/net", node.first_process()), self.plane.port);
        let bind = move || {
            setns(File::open(netns).expect("the node runs"), CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            TcpListener::bind((SERVICE, 443)).expect("the port is free")
        };
        let listener = thread::spawn(bind).join().expect("it listens");
        let entrance = Entrance { listener, connections: Arc::default() };
        let (listener, connections) =
            (entrance.listener.try_clone().expect("a descriptor"), entrance.connections.clone());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let both = [client, server];
                connections.lock().expect("no panic while locked").extend(both.iter().map(clone));
                for (mut from, mut to) in [(clone(&both[0]), clone(&both[1])), (clone(&both[1]), clone(&both[0]))] {
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Direction::Write);
                    });
                }
            }
        });
        entrance
    }
}

fn clone(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("a descriptor")
}

/// The API server in the node's network. Dropping it closes the port and all connections.
pub(crate) struct Entrance {
    listener: TcpListener,
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

impl Drop for Entrance {
    fn drop(&mut self) {
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        for connection in self.connections.lock().expect("no panic while locked").drain(..) {
            let _ = connection.shutdown(Direction::Both);
        }
    }
}
