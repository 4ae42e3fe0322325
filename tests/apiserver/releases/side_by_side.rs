//! Several releases in one cluster.

use super::helm::{Helm, PLATFORM};
use super::inventory::inventory;
use crate::control_plane::ControlPlane;
use crate::shipped::{manifests, prepare};

#[test]
fn releases_of_one_name_in_two_namespaces_need_different_object_names() {
    let plane = ControlPlane::start();
    let (admin, helm) = (plane.admin(), Helm::new(&plane));
    prepare(&admin);
    let chart = manifests().join("chart").display().to_string();
    helm.upgrade("detour", &[]);
    let before = inventory(&admin);
    let install = ["install", "detour", chart.as_str(), "-n", "shop", "-f", PLATFORM];
    let refused = helm.run(&install).expect_err("a ClusterRole of that name exists");
    assert!(
        refused.contains("ClusterRole \"detour-plugin\"") || refused.contains("ClusterRole \"detour-agent\""),
        "{refused}"
    );
    assert!(refused.contains("must equal \"shop\": current value is \"kube-system\""), "{refused}");
    let refused = helm.try_upgrade("other", &["--set", "fullnameOverride=detour"]).expect_err("the same names");
    assert!(refused.contains("must equal \"other\": current value is \"detour\""), "{refused}");
    assert_eq!(inventory(&admin), before);
    helm.run(&[&install[..], &["--set", "fullnameOverride=shop-detour"]].concat()).expect("installed");
    let both = inventory(&admin);
    assert!(before.iter().all(|(name, object)| both.get(name) == Some(object)));
    helm.uninstall("detour", "shop");
    assert_eq!(inventory(&admin), before);
}
