//! docs/openshift.md: its commands about the operator, run with the real helm and kubectl (as oc), while a simulated operator
//! applies Istio's own chart as the Sail operator does.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::releases::{Helm, definition_of};
use crate::shipped::{apply, established, objects, prepare};
use crate::support::program::{built, write_executable};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

const GUIDE: &str = include_str!("../../docs/openshift.md");
const CRDS: &str = include_str!("service-mesh-crds.yaml");

/// The beginnings of commands that change nothing that the operator watches.
const UNRELATED: [&str; 6] = ["oc create namespace", "oc get", "oc label", "oc patch istio ", "oc rollout", "helm get"];

/// A cluster with the operator's types, tools for the guide's commands, and a simulated operator.
pub(crate) struct Cluster {
    pub(crate) admin: Client,
    pub(crate) helm: Helm,
    kubeconfig: PathBuf,
    programs: PathBuf,
    pub(crate) plane: ControlPlane,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        let plane = ControlPlane::start();
        let admin = plane.admin();
        prepare(&admin);
        let types = objects(CRDS);
        apply(&admin, &types);
        established(&admin, &types);
        apply(&admin, &[json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-0"}})]);
        let programs = plane.directory.join("programs");
        fs::create_dir_all(&programs).expect("writable");
        for (name, program) in [
            ("oc", built("kubectl")),
            ("kubectl", built("kubectl")),
            ("helm", built("helm")),
            ("detour", env!("CARGO_BIN_EXE_detour").into()),
        ] {
            symlink(program, programs.join(name)).expect("writable");
        }
        Self { admin, helm: Helm::new(&plane), kubeconfig: plane.kubeconfig(), programs, plane }
    }

    /// Runs a shell command. Returns whether it succeeded, and its output.
    pub(crate) fn run(&self, command: &str) -> (bool, String) {
        let path = format!("{}:/usr/bin:/bin", self.programs.display());
        let output = Command::new("sh")
            .args(["-c", command])
            .env_clear()
            .envs([("PATH", path.as_str()), ("HOME", self.programs.to_str().expect("UTF-8")), ("COLUMNS", "120")])
            .env("KUBECONFIG", &self.kubeconfig)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("sh starts");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (output.status.success(), text(output.stdout) + &text(output.stderr))
    }

    /// Runs the commands of a code block of the guide, with the operator after each one that could concern it. Returns
    /// the output of the last one.
    #[track_caller]
    fn follow(&self, block: &str) -> String {
        let mut last = String::new();
        for command in block.lines() {
            let (succeeded, output) = self.run(command);
            assert!(succeeded, "{command}: {output}");
            if !UNRELATED.iter().any(|start| command.starts_with(start)) {
                self.reconcile().unwrap_or_else(|error| panic!("the operator, after {command}: {error}"));
            }
            last = output;
        }
        last
    }

    /// Does what the operator does for the resource IstioCNI: upgrade the release istio-cni of Istio's chart, with an
    /// owner reference on each object, or uninstall it. Then deletes the definitions whose owner is gone, as the garbage
    /// collector of Kubernetes does.
    fn reconcile(&self) -> Result<(), String> {
        let owner = self.admin.get(&istio_cni());
        if let Ok(resource) = &owner {
            let reference = json!([{
                "apiVersion": "sailoperator.io/v1", "kind": "IstioCNI", "name": "default",
                "uid": resource["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true,
            }]);
            let script = format!(
                "#!/bin/sh\nexec awk '{{print}} /^metadata:/ {{print \"  ownerReferences: {}\"}}'\n",
                reference.to_string().replace('"', "\\\"")
            );
            let renderer = self.programs.join("post-renderer");
            write_executable(&renderer, &script);
            let values = self.programs.join("values.json");
            fs::write(&values, resource["spec"]["values"].to_string()).expect("writable");
            let text = |path: &PathBuf| path.to_str().expect("UTF-8").to_owned();
            let options = "-n istio-cni --history-max 1 --set global.platform=openshift";
            let (chart, renderer, values) = (text(&istio_chart()), text(&renderer), text(&values));
            let command =
                format!("upgrade --install istio-cni {chart} {options} -f {values} --post-renderer {renderer}");
            self.helm.run(&command.split(' ').collect::<Vec<_>>())?;
        } else if self.helm.run(&["status", "istio-cni", "-n", "istio-cni"]).is_ok() {
            self.helm.run(&["uninstall", "istio-cni", "-n", "istio-cni"])?;
        }
        if let Some(definition) = self.definition() {
            let mut owners = definition["metadata"]["ownerReferences"].as_array().into_iter().flatten();
            let is_gone =
                |reference: &Value| owner.as_ref().map_or(true, |owner| owner["metadata"]["uid"] != reference["uid"]);
            if owners.any(is_gone) {
                self.admin.delete(&definition).expect("deleted");
            }
        }
        Ok(())
    }

    /// Returns `default/istio-cni`.
    pub(crate) fn definition(&self) -> Option<Value> {
        self.admin.get(&definition_of("default", "istio-cni")).ok()
    }

    /// Returns the release that owns `default/istio-cni`, and the definition's UID.
    #[track_caller]
    fn owner(&self) -> (String, String) {
        let metadata = self.definition().expect("default/istio-cni exists")["metadata"].clone();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&metadata["annotations"]["meta.helm.sh/release-name"]), text(&metadata["uid"]))
    }
}

fn istio_cni() -> Value {
    json!({"apiVersion": "sailoperator.io/v1", "kind": "IstioCNI", "metadata": {"name": "default"},
           "spec": {"namespace": "istio-cni"}})
}

/// hack/test.sh downloads it.
fn istio_chart() -> PathBuf {
    let go_mod = include_str!("../injector/go.mod");
    let version = go_mod.lines().find_map(|line| line.trim().strip_prefix("istio.io/istio ")).expect("required");
    built(&format!("istio-charts-{version}/istio-cni"))
}

/// Returns the code blocks in a language below a heading, up to the next heading, without the indentation of lists.
/// A command is one line.
fn blocks(heading: &str, language: &str) -> Vec<String> {
    blocks_of(GUIDE, heading, language)
}

pub(crate) fn blocks_of(guide: &str, heading: &str, language: &str) -> Vec<String> {
    let (_, section) = guide.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no heading {heading}"));
    let (mut found, mut open) = (Vec::new(), None);
    for line in section.lines().map(str::trim) {
        match (line.strip_prefix("```"), &mut open) {
            (None, None) if line.starts_with('#') => break,
            (None, None) => (),
            (Some(of), None) => open = Some((of, Vec::new())),
            (None, Some((_, lines))) => lines.push(line),
            (Some(_), Some(_)) => found.extend(open.take()),
        }
    }
    found.retain(|(of, _)| *of == language);
    found.into_iter().map(|(_, lines)| lines.join("\n").replace(" \\\n", " ")).collect()
}

/// Returns a pod as Istio's injector stores it (tests/golden/injected), with another name.
fn injected(name: &str, new_name: &str) -> Value {
    let pods = objects(include_str!("../golden/injected/excludedns.yaml"));
    let mut pod = pods.into_iter().find(|pod| pod["metadata"]["name"] == name).expect("recorded");
    pod["metadata"]["name"] = json!(new_name);
    pod
}

#[test]
fn the_guide_beside_the_operator_migrates_and_goes_back() {
    let cluster = Cluster::start();
    let [create, install, patch, restart, explain] = &blocks("## Beside IstioCNI", "sh")[..] else {
        panic!("five blocks")
    };
    cluster.follow(create);
    let (owner, uid) = cluster.owner();
    assert_eq!(owner, "istio-cni");

    // Beside the operator: its definition does not change.
    let before = cluster.definition();
    cluster.follow(install);
    assert_eq!(cluster.definition(), before);
    assert!(cluster.admin.get(&definition_of("default", "excludedns")).is_ok());
    let chain = || {
        let metadata = json!({"name": "excludedns-detour-agent", "namespace": "kube-system"});
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
        let data = cluster.admin.get(&map).expect("rendered")["data"].clone();
        let of = |key: &str| -> Value { serde_json::from_str(data[key].as_str().expect("text")).expect("JSON") };
        assert_eq!(of("attachments.json"), json!([{"name": "excludedns"}]), "it has the chain of config.json");
        of("config.json")["chain"].clone()
    };
    let by_uid = chain();
    let [values] = &blocks("## Beside IstioCNI", "yaml")[..] else { panic!("one block") };
    let file = cluster.programs.join("containers.yaml");
    fs::write(&file, values).expect("writable");
    cluster.follow(&format!("{install} -f {}", file.display()));
    assert_eq!(chain(), json!([{"type": "container-exclude"}]), "instead of {by_uid}");
    assert_eq!(cluster.definition(), before);
    cluster.follow(install);
    assert_eq!(chain(), by_uid);
    cluster.follow(patch);
    let istio = json!({"apiVersion": "sailoperator.io/v1", "kind": "Istio", "metadata": {"name": "default"}});
    let injector = &cluster.admin.get(&istio).expect("created")["spec"]["values"]["sidecarInjectorWebhook"];
    assert_eq!(injector["defaultTemplates"], json!(["sidecar", "excludedns"]));
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "shop"}});
    let labels = json!({"app": "web"});
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"selector": {"matchLabels": labels}, "template": {
            "metadata": {"labels": labels}, "spec": {"containers": [{"name": "web", "image": "web"}]},
        }},
    });
    apply(&cluster.admin, &[account, deployment, injected("no-networks", "web-0")]);
    let networks = cluster.follow(restart);
    assert_eq!([networks], blocks("## Beside IstioCNI", "console")[..]);
    let report = cluster.follow(explain);
    for line in [
        "Pod shop/web-0 is not redirected: istio-redirect is not in the sub-plugin chain",
        "  uid 1337  everything to anywhere  configuration, default chain[0] of type excludedns",
    ] {
        assert!(report.lines().any(|found| found == line), "{line}: {report}");
    }

    // Definitions of tenants.
    let bank = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "bank"}});
    apply(&cluster.admin, &[bank]);
    let [tenants, sample] = &blocks("## Definitions in tenant namespaces", "sh")[..] else { panic!("two blocks") };
    cluster.follow(tenants);
    cluster.follow(sample);
    for (namespace, name) in
        [("shop", "excludedns"), ("bank", "excludedns"), ("default", "excludedns"), ("shop", "istio-cni")]
    {
        assert!(cluster.admin.get(&definition_of(namespace, name)).is_ok(), "{namespace}/{name}");
    }

    let [remove] = &blocks("### Remove the attachment", "sh")[..] else { panic!("one block") };
    cluster.follow(remove);
    let injector = &cluster.admin.get(&istio).expect("created")["spec"]["values"]["sidecarInjectorWebhook"];
    assert_eq!(*injector, json!({"defaultTemplates": ["sidecar"], "templates": {}}));
    assert!(cluster.admin.get(&definition_of("default", "excludedns")).is_err());

    // To detour: the definition keeps its UID, so it was never missing.
    let [keep, check, disown, take, label, finish] = &blocks("### Migrate from IstioCNI", "sh")[..] else {
        panic!("six blocks")
    };
    assert!(cluster.run(check).0, "the operator's release contains the definition");
    cluster.follow(keep);
    assert_eq!(cluster.run(check), (false, String::new()));
    cluster.follow(disown);
    cluster.follow(take);
    assert_eq!(cluster.owner(), ("detour".to_owned(), uid.clone()));
    cluster.follow(label);
    cluster.follow(finish);
    assert_eq!(cluster.owner(), ("detour".to_owned(), uid.clone()));
    assert!(cluster.helm.run(&["status", "istio-cni", "-n", "istio-cni"]).is_err(), "uninstalled");
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-0"}});
    let labels = cluster.admin.get(&node).expect("there")["metadata"]["labels"].to_string();
    assert!(!labels.contains("detour.io"), "{labels}");

    // And back to the operator.
    for block in blocks("### Go back", "sh") {
        cluster.follow(&block);
    }
    assert_eq!(cluster.owner(), ("istio-cni".to_owned(), uid));
    cluster.follow("oc delete istiocni default");
    assert_eq!(cluster.definition(), None, "the operator owns it again");
}

#[test]
fn the_guide_instead_of_the_operators_plugin_provides_the_definition() {
    let cluster = Cluster::start();
    let [commands] = &blocks("## Instead of IstioCNI", "sh")[..] else { panic!("one block") };
    cluster.follow(commands);
    assert_eq!(cluster.owner().0, "detour");
}
