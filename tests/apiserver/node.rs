//! A node: its file system for the agent and the plugin, the shipped agent's pod, and calls of the installed plugin.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::shipped::{NAMESPACE, of_kind};
pub(crate) use crate::support::agent_process::{Agent, SETTLED};
use crate::support::background::Running;
use crate::support::called::Called;
use crate::support::netns_pod::Pod;
use crate::support::program::built;
use detour_cni::cluster::{Cluster, source};
use detour_cni::cni::configuration;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

const CALICO: &str = include_str!("../golden/10-calico.conflist");
pub(crate) const LIST: &str = "etc/cni/net.d/10-calico.conflist";
/// The agent's own list, which the runtime uses because it sorts first.
pub(crate) const OWN_LIST: &str = "etc/cni/net.d/00-detour.conflist";
pub(crate) const NAME: &str = "node-1";
/// The mount point of the node's file system in the agent's container.
const ROOT: &str = "/mnt";
/// The directory of a pod's service account.
const ACCOUNT: &str = "/run/secrets/kubernetes.io/serviceaccount";

/// Runs `work` on a node with a cluster network, in a mount namespace of its own. `objects` are those
/// that were applied.
pub(crate) fn on_a_node<T: Send>(
    plane: &ControlPlane,
    objects: &[Value],
    work: impl FnOnce(&Node<'_>) -> T + Send,
) -> T {
    let pod = &of_kind(objects, "DaemonSet")["spec"]["template"]["spec"];
    let node = Node { pod, objects, port: plane.port, authority: plane.authority() };
    let admin = plane.admin();
    let on_thread = || {
        unshare(CloneFlags::CLONE_NEWNS).expect("needs CAP_SYS_ADMIN");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("mounts can be made private");
        fs::create_dir_all("/var/lib/cni").expect("needs root");
        for empty in ["/run", ROOT, "/var/lib/cni"] {
            mount(Some("tmpfs"), empty, Some("tmpfs"), MsFlags::empty(), none).expect("a tmpfs");
        }
        // Mounts, such as a pod's network namespace, propagate to the other paths.
        mount(none, ROOT, none, MsFlags::MS_SHARED, none).expect("mounts can be shared");
        node.mount_volumes();
        node.write(LIST, CALICO);
        node.renew_account(&admin);
        work(&node)
    };
    thread::scope(|scope| scope.spawn(on_thread).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

pub(crate) struct Node<'a> {
    /// The agent's, as it is shipped.
    pod: &'a Value,
    objects: &'a [Value],
    port: u16,
    authority: String,
}

impl Node<'_> {
    /// The directories of the node that the pod mounts: where the plugin sees them, and where the agent does.
    fn mount_volumes(&self) {
        let bind = |what: &Path, place: &Path| {
            fs::create_dir_all(place).expect("a tmpfs");
            mount(Some(what), place, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        };
        let volumes = self.pod["volumes"].as_array().expect("volumes").iter();
        let mut paths: Vec<_> = volumes.clone().filter_map(|volume| volume["hostPath"]["path"].as_str()).collect();
        // A mount below another one comes after it.
        paths.sort_unstable();
        for path in paths {
            let inside = self.path(path.trim_start_matches('/'));
            fs::create_dir_all(&inside).expect("a tmpfs");
            match path {
                // The machine's first process may have more rights than this one, and so be out of reach.
                "/proc" => {
                    fs::create_dir_all(inside.join("1/ns")).expect("a tmpfs");
                    symlink(format!("/proc/{}/ns/net", std::process::id()), inside.join("1/ns/net")).expect("a tmpfs");
                }
                _ if path.starts_with("/run/") || path == "/var/lib/cni" => bind(&inside, Path::new(path)),
                _ => {}
            }
        }
        for mounted in self.pod["containers"][0]["volumeMounts"].as_array().expect("mounts") {
            let Some(place) = mounted["mountPath"].as_str().and_then(|path| path.strip_prefix("/host/")) else {
                continue;
            };
            let volume = volumes.clone().find(|volume| volume["name"] == mounted["name"]).expect("a volume");
            let path = volume["hostPath"]["path"].as_str().expect("of the node").trim_start_matches('/');
            if place != path {
                bind(&self.path(path), &self.path(place));
            }
        }
    }

    pub(crate) fn path(&self, within: &str) -> PathBuf {
        Path::new(ROOT).join(within)
    }

    pub(crate) fn write(&self, within: &str, text: &str) {
        let path = self.path(within);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a tmpfs");
        fs::write(path, text).expect("a tmpfs");
    }

    pub(crate) fn read(&self, within: &str) -> String {
        fs::read_to_string(self.path(within)).unwrap_or_else(|error| panic!("{within}: {error}"))
    }

    /// Its files, without the first slash.
    pub(crate) fn files(&self) -> Vec<String> {
        let (mut found, mut left) = (Vec::new(), ["etc", "opt", "run", "var"].map(|top| self.path(top)).to_vec());
        left.retain(|directory| directory.exists());
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(directory).expect("readable") {
                let path = entry.expect("readable").path();
                match path.is_dir() {
                    true => left.push(path),
                    false => found.push(path.strip_prefix(ROOT).expect("below").display().to_string()),
                }
            }
        }
        found
    }

    /// Returns the configuration list that the runtime uses.
    fn list(&self) -> String {
        self.read(if self.path(OWN_LIST).exists() { OWN_LIST } else { LIST })
    }

    /// Whether the plugin is installed.
    pub(crate) fn is_installed(&self) -> bool {
        let list = self.list() != CALICO;
        let program = self.path("opt/cni/bin/detour").exists();
        assert_eq!(list, program, "both or neither");
        list
    }

    /// Returns the plugin's token.
    pub(crate) fn plugin_token(&self) -> String {
        let kubeconfig: Value =
            serde_json::from_str(&self.read("var/lib/cni/detour/kubeconfig")).expect("a kubeconfig");
        kubeconfig["users"][0]["user"]["token"].as_str().expect("a token").to_owned()
    }

    /// Renews the token of the agent's pod, as the kubelet does.
    pub(crate) fn renew_account(&self, admin: &Client) {
        fs::create_dir_all(ACCOUNT).expect("a tmpfs");
        fs::write(format!("{ACCOUNT}/ca.crt"), &self.authority).expect("a tmpfs");
        let account = self.pod["serviceAccountName"].as_str().expect("a name");
        let token = admin.bound_token(NAMESPACE, account, &agent_pod(admin, account, NAME));
        fs::write(format!("{ACCOUNT}/token"), token).expect("a tmpfs");
    }

    /// Starts the agent with the arguments and the environment that its pod has.
    pub(crate) fn start_agent(&self, name: &str) -> Agent {
        let container = &self.pod["containers"][0];
        let config = of_kind(self.objects, "ConfigMap");
        let directory = format!("/run/config-{}/", config["metadata"]["name"].as_str().expect("a name"));
        fs::create_dir_all(&directory).expect("a tmpfs");
        for (file, text) in config["data"].as_object().expect("files") {
            fs::write(format!("{directory}{file}"), text.as_str().expect("text")).expect("a tmpfs");
        }
        let arguments = container["args"].as_array().expect("arguments").iter().map(|argument| {
            let argument = argument.as_str().expect("text");
            argument
                .replace("=/host", &format!("={ROOT}"))
                .replace("=/etc/detour/", &format!("={directory}"))
                .replace(":8000", ":0")
        });
        let mut command = self.in_container(name, Path::new(env!("CARGO_BIN_EXE_detour")));
        Agent::of(command.args(arguments))
    }

    /// Starts the agent, and waits until the installation is complete.
    pub(crate) fn settled_agent(&self, name: &str) -> Agent {
        let agent = self.start_agent(name);
        agent.wait_for_log(SETTLED);
        agent
    }

    /// Serves exec as a kubelet does: commands run as processes on this node, with the environment of the agent's
    /// container. `program` replaces the container's. Returns the process and its port.
    pub(crate) fn start_kubelet(&self, name: &str, program: &Path) -> Kubelet {
        let mut process = self
            .in_container(name, &built("kubelet"))
            .arg(program)
            .arg(ROOT)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut line).expect("a port");
        Kubelet { _process: Running(process), port: line.trim().parse().expect("a port") }
    }

    /// A program with the environment of the agent's container. It ends with this thread.
    fn in_container(&self, name: &str, program: &Path) -> Command {
        let container = &self.pod["containers"][0];
        let mut command = Command::new("/usr/bin/setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).env_clear().env("HOSTNAME", name);
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1").env("KUBERNETES_SERVICE_PORT", self.port.to_string());
        for variable in container["env"].as_array().expect("variables") {
            let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some("metadata.namespace") => NAMESPACE,
                Some("metadata.name") => name,
                Some("metadata.uid") => "uid-of-the-agent",
                Some("spec.nodeName") => NAME,
                other => panic!("{variable}: {other:?}"),
            };
            command.env(variable["name"].as_str().expect("a name"), value);
        }
        command
    }

    /// Returns the installed plugin's source of facts.
    pub(crate) fn source(&self) -> Box<dyn Cluster> {
        let conf = configuration(&self.path(OWN_LIST), self.list().as_bytes()).expect("a configuration");
        source(&conf.kubernetes).expect("it names one")
    }

    /// Calls the plugin as the node's runtime does, for a pod as the API knows it.
    pub(crate) fn call(&self, verb: &str, sandbox: &Pod, pod: &Value) -> Result<(), Value> {
        self.call_with(verb, sandbox, pod, &json!({}))
    }

    /// Calls the installed plugin with this `runtimeConfig`.
    pub(crate) fn call_with(
        &self,
        verb: &str,
        sandbox: &Pod,
        pod: &Value,
        runtime_config: &Value,
    ) -> Result<(), Value> {
        let list: Value = serde_json::from_str(&self.list()).expect("JSON");
        let members = list["plugins"].as_array().expect("members");
        let mut conf = members.iter().find(|member| member["type"] == "detour").expect("the plugin is listed").clone();
        conf["name"] = list["name"].clone();
        conf["cniVersion"] = list["cniVersion"].clone();
        conf["runtimeConfig"] = runtime_config.clone();
        conf["prevResult"] = json!({
            "cniVersion": list["cniVersion"], "interfaces": [{"name": "eth0", "sandbox": sandbox.netns()}],
            "ips": [{"interface": 0, "address": "10.88.0.2/24"}],
        });
        let text = |path: &[&str]| path.iter().fold(pod, |value, key| &value[key]).as_str().expect("text").to_owned();
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_UID={}",
            text(&["metadata", "namespace"]),
            text(&["metadata", "name"]),
            text(&["metadata", "uid"]),
        );
        let mut plugin = Command::new(self.path("opt/cni/bin/detour"));
        plugin
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &sandbox.container_id)
            .env("CNI_NETNS", sandbox.netns())
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_ARGS", arguments);
        let called = Called::run(&mut plugin, &conf);
        if called.success { Ok(()) } else { Err(called.stdout) }
    }
}

/// A pod of this account on a node, which exists then.
pub(crate) fn agent_pod(admin: &Client, account: &str, node: &str) -> Value {
    let machine = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
    if admin.get(&machine).is_err() {
        admin.apply(&machine).expect("accepted");
    }
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": NAMESPACE, "name": format!("{account}-{node}")},
        "spec": {
            "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
            "containers": [{"name": "agent", "image": "detour"}],
        },
    });
    admin.apply(&pod).expect("accepted")
}

/// A pod with a sidecar on this node, as the API has it, which its kubelet has given an address.
pub(crate) fn meshed_pod(admin: &Client, name: &str) -> Value {
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": "shop", "name": "default"}});
    admin.apply(&account).expect("accepted");
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "1", "controller": true});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": "shop", "name": name, "annotations": {"sidecar.istio.io/status": "{}"},
            "ownerReferences": [owner],
        },
        "spec": {
            "nodeName": NAME, "automountServiceAccountToken": false,
            "initContainers": [{"name": "istio-validation", "image": "proxy"}],
            "containers": [{"name": "app", "image": "app"}, {"name": "istio-proxy", "image": "proxy"}],
        },
    });
    admin.apply(&pod).expect("accepted");
    let status = json!({"status": {"podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]}});
    admin.merge_status(&pod, &status).expect("accepted")
}

/// Reasons of the events that were recorded of pods.
pub(crate) fn events(admin: &Client) -> Vec<String> {
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "shop"}});
    let events = admin.list(&event).expect("allowed");
    events.iter().map(|event| event["reason"].as_str().expect("a reason").to_owned()).collect()
}

/// A running kubelet.
pub(crate) struct Kubelet {
    _process: Running,
    pub(crate) port: u16,
}

/// The address of every pod.
const ADDRESS: &str = "10.88.0.2";

impl Pod {
    /// Pins the network namespace and caches the cluster network's result, as a runtime does.
    pub(crate) fn pin(&self, pod: &Value) {
        let pinned = Path::new("/run/netns").join(&self.container_id);
        File::create(&pinned).expect("writable");
        mount(Some(&self.netns()), &pinned, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        let netns = format!("/var{}", pinned.display());
        let cached = json!({
            "kind": "cniCacheV1", "containerId": self.container_id, "config": "e30=", "ifName": "eth0",
            "networkName": "k8s-pod-network", "netns": netns,
            "cniArgs": [
                ["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", pod["metadata"]["namespace"]],
                ["K8S_POD_NAME", pod["metadata"]["name"]], ["K8S_POD_UID", pod["metadata"]["uid"]],
            ],
            "result": {"cniVersion": "0.3.1", "interfaces": [{"name": "eth0", "sandbox": netns}],
                       "ips": [{"interface": 0, "version": "4", "address": format!("{ADDRESS}/24")}]},
        });
        fs::create_dir_all("/var/lib/cni/results").expect("a tmpfs");
        fs::write(format!("/var/lib/cni/results/k8s-pod-network-{}-eth0", self.container_id), cached.to_string())
            .expect("a tmpfs");
    }

    /// Whether it has the plugin's redirection.
    pub(crate) fn redirects(&self) -> bool {
        self.tool("iptables-save", &["-t", "nat"], "").contains("-A ISTIO_REDIRECT ")
    }

    /// Returns its rules.
    pub(crate) fn rules(&self) -> String {
        let rules = ["iptables-save", "ip6tables-save"].map(|program| self.tool(program, &[], ""));
        let native = self.tool("nft", &["list", "table", "inet", "detour-exclusions"], "");
        let is_rule = |line: &&str| !line.starts_with(['#', ':']);
        rules
            .iter()
            .chain([&native])
            .flat_map(|text| text.lines().filter(is_rule))
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// Removes the redirection.
    pub(crate) fn flush(&self) {
        for iptables in ["iptables", "ip6tables"] {
            self.tool(iptables, &["-t", "nat", "-F"], "");
        }
    }
}
