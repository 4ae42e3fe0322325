//! Upgrades, uninstallation, and several releases in one cluster.

use super::helm::Helm;
use super::inventory::{difference, inventory, objects_of};
use crate::control_plane::ControlPlane;
use crate::shipped::{NAMESPACE, prepare};
use detour_cni::agent::install::PLATFORMS;
use serde_json::{Value, json};

const EXCLUDEDNS: &str = "manifests/chart/values-excludedns.yaml";

/// This chart, excludedns beside it, each other name of the platform, and nothing. The other platforms differ in
/// directories, which `tests/chart` compares.
#[test]
fn a_platform_is_upgraded_extended_and_uninstalled_without_remains() {
    let plane = ControlPlane::start();
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let empty = inventory(&admin);
    for platform in PLATFORMS.iter().filter(|platform| ["openshift", "k3s"].contains(&platform.name)) {
        let name = platform.name;
        let values = |name: &str| format!("global.platform={name}");
        helm.upgrade("detour", &["--set", &values(name)]);
        let own = objects_of(&admin, "detour", NAMESPACE);
        helm.upgrade("excludedns", &["-f", EXCLUDEDNS, "--set", &values(name), "--set", "chained=false"]);
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
        for alias in &platform.aliases {
            helm.upgrade("detour", &["--set", &values(alias)]);
            assert_eq!(objects_of(&admin, "detour", NAMESPACE), own, "{alias} has the same objects as {name}");
        }
        helm.uninstall("detour", NAMESPACE);
        helm.uninstall("excludedns", NAMESPACE);
        assert_eq!(difference(&empty, &inventory(&admin)), [""; 0], "{name}");
    }
}

/// The new agents remove the files that the earlier ones wrote there.
#[test]
fn an_upgrade_mounts_the_directories_of_the_previous_revision() {
    let plane = ControlPlane::start();
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let daemon_set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": NAMESPACE, "name": "detour-agent"}});
    let previous = || -> Vec<String> {
        let pod = admin.get(&daemon_set).expect("there")["spec"]["template"]["spec"].take();
        let all = |of: &Value| of.as_array().expect("a list").clone();
        let volumes = all(&pod["volumes"]).into_iter();
        let volumes =
            volumes.filter(|volume| volume["name"].as_str().is_some_and(|name| name.starts_with("previous-")));
        let paths = volumes.map(|volume| {
            let path = volume["hostPath"]["path"].as_str().expect("a path").to_owned();
            let place = format!("/host{path}");
            let mut mounts = all(&pod["containers"][0]["volumeMounts"]).into_iter();
            assert!(mounts.any(|mount| mount["name"] == volume["name"] && mount["mountPath"] == place.as_str()));
            path
        });
        paths.collect()
    };
    let chain = "/run/multus/cni/net.d/vendor-cni-chain";
    helm.upgrade("detour", &["--set", &format!("global.platform=openshift,cni.multusChain={chain}")]);
    assert_eq!(previous(), [""; 0]);
    let moved = ["--set", "global.platform=openshift,cniBinDir=/opt/other/bin"];
    helm.upgrade("detour", &moved);
    assert_eq!(previous(), ["/var/lib/cni/bin", chain]);
    helm.upgrade("detour", &moved);
    assert_eq!(previous(), [""; 0]);
}

#[test]
fn an_upgrade_that_would_rename_the_objects_is_refused() {
    let plane = ControlPlane::start();
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let empty = inventory(&admin);
    helm.upgrade("mesh", &["--set", "global.platform=openshift,fullnameOverride=detour"]);
    let refused = helm.try_upgrade("mesh", &["--set", "fullnameOverride=other"]).expect_err("renamed");
    assert!(refused.contains("set fullnameOverride=detour"), "{refused}");
    helm.uninstall("mesh", NAMESPACE);
    assert_eq!(difference(&empty, &inventory(&admin)), [""; 0]);
}
