//! Releases of the chart, installed with the real helm: upgrades, several releases in one cluster, and
//! NetworkAttachmentDefinitions that other owners have.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::shipped::{NAMESPACE, manifests, prepare};
use crate::support::program::built;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

mod documented;
mod ownership;
mod upgrade;

/// Values that each first installation needs.
pub(crate) const PLATFORM: &str = "tests/apiserver/releases/platform.yaml";

/// helm, with all rights in a cluster.
pub(crate) struct Helm {
    kubeconfig: PathBuf,
}

impl Helm {
    pub(crate) fn new(plane: &ControlPlane) -> Self {
        Self { kubeconfig: plane.kubeconfig() }
    }

    /// Runs helm. Returns its stdout, or its stderr if it fails.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let home = self.kubeconfig.with_file_name("helm");
        let mut command = Command::new(built("helm"));
        command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").env("HOME", &home);
        command.env("KUBECONFIG", &self.kubeconfig).current_dir(env!("CARGO_MANIFEST_DIR"));
        let output = command.output().expect("it starts");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// Installs the shipped chart, or upgrades the release, with these further arguments. Returns the notes.
    #[track_caller]
    pub(crate) fn upgrade(&self, release: &str, arguments: &[&str]) -> String {
        self.try_upgrade(release, arguments).unwrap_or_else(|error| panic!("{release} {arguments:?}: {error}"))
    }

    /// Tries to install or upgrade.
    pub(crate) fn try_upgrade(&self, release: &str, arguments: &[&str]) -> Result<String, String> {
        let chart = manifests().join("chart");
        let mut all = vec!["upgrade", "--install", release, chart.to_str().expect("UTF-8"), "-n", NAMESPACE];
        // A file of values would override the release's.
        if !arguments.iter().any(|argument| argument.ends_with("reuse-values")) {
            all.extend(["-f", PLATFORM]);
        }
        all.extend(arguments);
        self.run(&all)
    }

    #[track_caller]
    pub(crate) fn uninstall(&self, release: &str, namespace: &str) {
        self.run(&["uninstall", release, "-n", namespace]).unwrap_or_else(|error| panic!("{release}: {error}"));
    }
}

/// Starts a cluster in which the chart can be installed.
pub(crate) fn cluster() -> (ControlPlane, Client, Helm) {
    let plane = ControlPlane::start();
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    (plane, admin, helm)
}

/// Writes a chart with one NetworkAttachmentDefinition, as Istio's chart has it with the provider multus. Returns its
/// path.
pub(crate) fn istio_chart(directory: &Path, definition: &str) -> String {
    let chart = directory.join(format!("istio-cni-{definition}"));
    fs::create_dir_all(chart.join("templates")).expect("writable");
    let write = |file: &str, text: &Value| fs::write(chart.join(file), text.to_string()).expect("writable");
    write("Chart.yaml", &json!({"apiVersion": "v2", "name": "cni", "version": "1.27.0"}));
    let labels = json!({
        "operator.istio.io/component": "Cni", "app.kubernetes.io/name": "istio-cni",
        "app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/instance": "istio-cni",
        "app.kubernetes.io/part-of": "istio", "helm.sh/chart": "cni-1.27.0",
    });
    let mut object = definition_of("default", definition);
    object["metadata"]["labels"] = labels;
    write("templates/network-attachment-definition.yaml", &object);
    chart.display().to_string()
}

/// Returns a NetworkAttachmentDefinition without a spec.
pub(crate) fn definition_of(namespace: &str, name: &str) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": namespace, "name": name},
    })
}

/// Returns all objects of the cluster by their kind, namespace and name, except those that the API server itself writes
/// all the time.
pub(crate) fn inventory(admin: &Client) -> BTreeMap<String, Value> {
    let groups = admin.get_path("/apis").expect("allowed");
    let versions = groups["groups"].as_array().expect("groups").iter();
    let versions =
        versions.map(|group| format!("/apis/{}", group["preferredVersion"]["groupVersion"].as_str().expect("text")));
    let mut found = BTreeMap::new();
    for version in versions.chain(["/api/v1".to_owned()]) {
        let resources = admin.get_path(&version).expect("served");
        for resource in resources["resources"].as_array().expect("resources") {
            let (name, kind) = (resource["name"].as_str().expect("text"), resource["kind"].as_str().expect("text"));
            let is_listed = resource["verbs"].as_array().expect("verbs").iter().any(|verb| verb == "list");
            if !is_listed || ["Lease", "Event", "APIService", "ComponentStatus", "IPAddress"].contains(&kind) {
                continue;
            }
            let list = admin.get_path(&format!("{version}/{name}")).expect("allowed");
            for object in list["items"].as_array().expect("items") {
                let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default();
                let mut object = object.clone();
                object["kind"] = kind.into();
                found.insert(format!("{kind} {}/{}", text("namespace"), text("name")), object);
            }
        }
    }
    found
}

/// Returns the objects of a release, without those in which helm stores the release.
pub(crate) fn objects_of(admin: &Client, release: &str, namespace: &str) -> BTreeMap<String, Value> {
    let mut found = inventory(admin);
    found.retain(|_, object| {
        let annotations = &object["metadata"]["annotations"];
        annotations["meta.helm.sh/release-name"] == release
            && annotations["meta.helm.sh/release-namespace"] == namespace
    });
    found
}

/// Returns the names of the objects that exist in only one of the two inventories.
pub(crate) fn difference<'a>(one: &'a BTreeMap<String, Value>, other: &'a BTreeMap<String, Value>) -> Vec<&'a String> {
    let missing = |a: &'a BTreeMap<String, Value>, b: &'a BTreeMap<String, Value>| {
        a.keys().filter(|name| !b.contains_key(*name)).collect::<Vec<_>>()
    };
    [missing(one, other), missing(other, one)].concat()
}
