//! The real helm with its own directories, and charts to install.

use crate::control_plane::ControlPlane;
use crate::shipped::{NAMESPACE, helm, manifests};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
        let mut command = Command::new(helm());
        command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").env("HOME", &home);
        command.env("KUBECONFIG", &self.kubeconfig).current_dir(env!("CARGO_MANIFEST_DIR"));
        let output = command.output().expect("hack/test.sh builds it");
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
