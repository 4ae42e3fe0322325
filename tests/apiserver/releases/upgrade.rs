//! Upgrades from the previous release of the chart, and uninstallation.

use super::helm::{Helm, previous_chart};
use super::inventory::{difference, inventory, objects_of};
use crate::control_plane::ControlPlane;
use crate::shipped::{NAMESPACE, prepare};
use detour_cni::agent::install::PLATFORMS;
use serde_json::{Value, json};

const EXCLUDEDNS: &str = "manifests/chart/values-excludedns.yaml";

fn install_previous(helm: &Helm, release: &str, arguments: &[&str]) {
    let chart = previous_chart();
    let mut all = vec!["install", release, chart.as_str(), "-n", NAMESPACE];
    all.extend(arguments);
    helm.run(&all).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
}

/// Each platform: the previous chart, this one, excludedns beside it, each other name of the platform, and nothing.
#[test]
fn each_platform_is_upgraded_extended_and_uninstalled_without_remains() {
    let plane = ControlPlane::start("platforms");
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let empty = inventory(&admin);
    let agent = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": NAMESPACE, "name": "detour-agent"},
    });
    for platform in PLATFORMS.iter() {
        let name = platform.name;
        let known = ["openshift", "gke", "k3d", "k3s", "microk8s"].contains(&name);
        install_previous(&helm, "detour", &["--set", &format!("global.platform={}", if known { name } else { "" })]);
        let before = admin.get(&agent).expect("installed");
        let values = |name: &str| format!("global.platform={name}");
        helm.upgrade("detour", &["--set", &values(name)]);
        let after = admin.get(&agent).expect("upgraded");
        assert_eq!(before["metadata"]["uid"], after["metadata"]["uid"], "{name}: the DaemonSet is not replaced");
        assert_eq!(before["spec"]["selector"], after["spec"]["selector"]);
        let own = objects_of(&admin, "detour", NAMESPACE);
        helm.upgrade(
            "excludedns",
            &["-f", EXCLUDEDNS, "--set", &values(name), "--set", "provider=multus,chained=false"],
        );
        let both = inventory(&admin);
        assert!(own.iter().all(|(name, object)| both.get(name) == Some(object)), "{name}: unchanged");
        let created = difference(&both, &empty).into_iter().filter(|name| !name.starts_with("Secret "));
        for object in created {
            let labels = &both[object]["metadata"]["labels"];
            for label in ["name", "instance", "version", "component", "part-of", "managed-by"] {
                assert!(labels[format!("app.kubernetes.io/{label}")].is_string(), "{name}: {object}: {label}");
            }
            assert_eq!(labels["helm.sh/chart"], concat!("detour-", env!("CARGO_PKG_VERSION")), "{name}: {object}");
        }
        for alias in platform.aliases {
            helm.upgrade("detour", &["--set", &values(alias)]);
            assert_eq!(objects_of(&admin, "detour", NAMESPACE), own, "{alias} has the same objects as {name}");
        }
        helm.uninstall("detour", NAMESPACE);
        helm.uninstall("excludedns", NAMESPACE);
        assert_eq!(difference(&empty, &inventory(&admin)), [""; 0], "{name}");
    }
}

/// The previous chart did not name its objects after the release.
#[test]
fn a_release_of_the_previous_chart_keeps_the_names_of_its_objects() {
    let plane = ControlPlane::start("renamed");
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let empty = inventory(&admin);
    install_previous(&helm, "mesh", &["--set", "global.platform=openshift"]);
    let before = inventory(&admin);
    let refused = helm.try_upgrade("mesh", &["--reuse-values"]).expect_err("values of the previous chart");
    assert!(refused.contains("use --reset-then-reuse-values"), "{refused}");
    let refused = helm.try_upgrade("mesh", &["--reset-then-reuse-values"]).expect_err("it would rename all objects");
    assert!(refused.contains("expected \"mesh-detour\"; set fullnameOverride=detour"), "{refused}");
    assert_eq!(inventory(&admin), before);
    helm.upgrade("mesh", &["--set", "global.platform=openshift,fullnameOverride=detour"]);
    let after = objects_of(&admin, "mesh", NAMESPACE);
    for (name, object) in &after {
        assert_eq!(object["metadata"]["uid"], before[name]["metadata"]["uid"], "{name}");
    }
    let refused = helm.try_upgrade("mesh", &["--set", "fullnameOverride=other"]).expect_err("renamed");
    assert!(refused.contains("set fullnameOverride=detour"), "{refused}");
    helm.uninstall("mesh", NAMESPACE);
    assert_eq!(difference(&empty, &inventory(&admin)), [""; 0]);
}

/// The previous chart has the same definition, and does not record it.
#[test]
fn a_definition_of_the_previous_chart_is_taken_over_and_one_that_was_taken_is_not_deleted() {
    let plane = ControlPlane::start("previous-definition");
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let definition = super::helm::definition_of("default", "istio-cni");
    let annotate = |annotations: Value| {
        admin.merge(&definition, &json!({"metadata": {"annotations": annotations}})).expect("annotated")
    };
    let openshift = ["--set", "global.platform=openshift"];
    install_previous(&helm, "detour", &openshift);
    annotate(json!({"meta.helm.sh/release-name": "istio-cni"}));
    let refused = helm.try_upgrade("detour", &openshift).expect_err("it would delete the definition");
    assert!(refused.contains("default/istio-cni: it belongs to another owner now"), "{refused}");
    annotate(json!({"meta.helm.sh/release-name": "detour"}));
    helm.upgrade("detour", &openshift);
    assert_eq!(admin.get(&definition).expect("there")["metadata"]["labels"]["app.kubernetes.io/part-of"], "detour");
    helm.run(&["rollback", "detour", "1", "-n", NAMESPACE]).expect("rolled back");
    assert!(admin.get(&definition).is_ok());
    helm.uninstall("detour", NAMESPACE);
    assert!(admin.get(&definition).is_err());
}

#[test]
fn wrong_values_are_refused_and_change_nothing() {
    let plane = ControlPlane::start("wrong-values");
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let empty = inventory(&admin);
    for (values, message) in [
        ("global.platfrom=openshift", "platfrom"),
        ("definitions=maybe", "definitions"),
        ("attachments[0].nam=a", "attachments"),
        ("attachments[0].name=A", "attachments"),
        ("attachmentConfDir=relative", "attachmentConfDir"),
        (
            "attachments[0].name=a,attachments[1].name=a,attachments[1].dialect=nftables",
            "attachments: two entries for \"a\" with different keys",
        ),
    ] {
        for arguments in [vec!["--set", values], vec!["--set", values, "--dry-run=server"]] {
            let refused = helm.try_upgrade("detour", &arguments).expect_err(values);
            assert!(refused.contains(message), "{values}: {refused}");
        }
    }
    assert_eq!(inventory(&admin), empty);
    // Two entries with equal keys are one attachment.
    let values = "attachments[0].name=a,attachments[1].name=a,attachments[1].namespace=shop";
    helm.upgrade("detour", &["--set", values]);
    let config =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": NAMESPACE, "name": "detour-agent"}});
    let config = admin.get(&config).expect("installed");
    let attachments = config["data"]["attachments.json"].as_str().expect("text");
    assert_eq!(serde_json::from_str::<Value>(attachments).expect("JSON"), json!([{"name": "a"}]));
}
