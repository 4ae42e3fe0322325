//! A pod that runs: its sandbox's process in a network namespace with addresses, and what its runtime keeps
//! of the ADD of the cluster network.

use crate::kernel::Tools;
use crate::node::{Process, Where, id, uid};
use crate::scene::Scene;
use detour_cni::agent::{EndedContainer, ObservedPod};
use detour_cni::cluster::objects;
use nix::mount::umount;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

const LINKS: &str = "link set lo up
link add eth0 type veth peer name peer0
link set eth0 up
link set peer0 up
addr add 10.88.0.2/24 dev eth0
addr add fd88::2/64 dev eth0 nodad
";

pub(crate) struct Pod {
    pub(crate) uid: String,
    pub(crate) sandbox: String,
    pause: Process,
    address: &'static str,
    annotations: Vec<(String, String)>,
    pub(crate) dialect: &'static str,
}

fn group(uid: &str, container: &str) -> String {
    let uid = uid.replace('-', "_");
    format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/crio-{container}.scope")
}

impl Tools for Pod {
    fn tool(&self, name: &str, args: &[&str], input: &str) -> String {
        Self::tool(self, name, args, input)
    }
}

impl Pod {
    pub(crate) fn new(scene: &Scene<'_>) -> Self {
        let (uid, sandbox) = (uid(), id("b"));
        let pause = scene.node.process("pause", &group(&uid, &sandbox), Where::New);
        scene.node.pin(&sandbox, &pause);
        scene.node.keep("results", ("cluster", "eth0"), &sandbox, &uid, &sandbox);
        let pod = Self { uid, sandbox, pause, address: "10.88.0.2", annotations: Vec::new(), dialect: "auto" };
        pod.tool("ip", &["-batch", "-"], LINKS);
        pod
    }

    /// Another pod, of which only a process in this one's namespace is left.
    pub(crate) fn stray(&self, scene: &Scene<'_>) -> Self {
        let (uid, sandbox) = (uid(), id("b"));
        let pause = scene.node.process("pause", &group(&uid, &sandbox), Where::With(&self.pause));
        Self { uid, sandbox, pause, address: "10.88.0.3", annotations: Vec::new(), dialect: "auto" }
    }

    /// Ends the pod as a runtime does that makes no DEL.
    pub(crate) fn go(&self, scene: &Scene<'_>) {
        let path = scene.node.root.join("run/netns").join(&self.sandbox);
        umount(&path).expect("unmounted");
        fs::remove_file(path).expect("removed");
        self.pause.end();
    }

    pub(crate) fn netns(&self) -> PathBuf {
        self.pause.netns()
    }

    /// Runs a tool in the namespace, which must succeed, and returns what it printed.
    #[track_caller]
    pub(crate) fn tool(&self, program: &str, arguments: &[&str], stdin: &str) -> String {
        let mut child = Command::new("nsenter")
            .arg(format!("--net={}", self.netns().display()))
            .arg(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nsenter is needed");
        child.stdin.take().expect("it is piped").write_all(stdin.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// A call of the plugin as the runtime makes it, which must succeed.
    #[track_caller]
    pub(crate) fn call(&self, scene: &Scene<'_>, verb: &str) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_detour"))
            .env_clear()
            .envs([
                ("CNI_COMMAND", verb),
                ("CNI_CONTAINERID", &self.sandbox),
                ("CNI_NETNS", &self.netns().display().to_string()),
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", "/opt/cni/bin"),
                ("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={}", self.name())),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let mut conf = scene.call_configuration();
        conf["dialect"] = self.dialect.into();
        if verb == "CHECK" {
            conf["prevResult"] = json!({});
        }
        child.stdin.take().expect("it is piped").write_all(conf.to_string().as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stdout));
    }

    /// The name in its namespace, shop.
    pub(crate) fn name(&self) -> String {
        format!("web-{}", self.uid)
    }

    /// Gives it an annotation.
    pub(crate) fn annotate(&mut self, scene: &Scene<'_>, key: &str, value: &str) {
        self.annotations.push((key.to_owned(), value.to_owned()));
        scene.publish(self);
    }

    /// Its manifest, with a sidecar.
    pub(crate) fn manifest(&self) -> Value {
        let mut manifest = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": self.name(), "namespace": "shop", "uid": self.uid, "labels": {"app": "web"},
                "annotations": {"sidecar.istio.io/status": "{}"},
            },
            "spec": {
                "initContainers": [{"name": "istio-validation"}],
                "containers": [
                    {"name": "web"},
                    {"name": "istio-proxy", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1337}},
                ],
            },
        });
        for (key, value) in &self.annotations {
            manifest["metadata"]["annotations"][key] = value.as_str().into();
        }
        manifest
    }

    /// As the agent knows it when it has its addresses.
    pub(crate) fn known(&self) -> ObservedPod {
        self.known_as(&self.manifest())
    }

    pub(crate) fn known_as(&self, manifest: &Value) -> ObservedPod {
        let pod = objects(Path::new("pod"), &manifest.to_string(), "default").expect("a manifest").pods.remove(0).pod;
        ObservedPod {
            pod,
            resource_version: "7".into(),
            owned: true,
            addresses: vec![self.address.parse().expect("an address")],
            ..ObservedPod::default()
        }
    }

    /// The same when its validation has failed.
    pub(crate) fn unvalidated(&self) -> Arc<ObservedPod> {
        let failed = EndedContainer { name: "istio-validation".into(), last_failure: Some(126), ..Default::default() };
        Arc::new(ObservedPod { ended_init_containers: vec![failed], ..self.known() })
    }
}
