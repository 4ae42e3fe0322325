//! The API server accepts every field of the shipped manifests.

use crate::control_plane::ControlPlane;
use crate::shipped::{apply, base, chart, chart_with_files, manifests, objects, of_kind, prepare};
use detour_cni::agent::install::PLATFORMS;
use serde_json::{Value, json};
use std::fs;

#[test]
fn every_manifest_is_accepted() {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    prepare(&admin);
    for platform in ["kubernetes", "openshift"] {
        apply(&admin, &base(platform));
    }
    for platform in PLATFORMS.iter() {
        let platform = format!("global.platform={}", platform.name);
        apply(&admin, &chart(&[&platform]));
        apply(&admin, &chart(&[&platform, EVERYTHING, "onExit=remove"]));
    }
    for sample in fs::read_dir(manifests().join("samples")).expect("readable") {
        let text = fs::read_to_string(sample.expect("readable").path()).expect("readable");
        // Samples of chart values are not objects.
        for mut object in objects(&text).into_iter().filter(|object| object["kind"].is_string()) {
            if !object["kind"].as_str().is_some_and(|kind| kind.starts_with("Cluster")) {
                object["metadata"]["namespace"] = json!("shop");
            }
            apply(&admin, &[object]);
        }
    }
    let sample = manifests().join("samples/monitoring-values.yaml");
    let monitored = chart_with_files(&[&sample], &["global.platform=openshift"]);
    for kind in ["NetworkPolicy", "PodMonitor", "PrometheusRule"] {
        of_kind(&monitored, kind);
    }
    apply(&admin, &monitored);
    // Wrong fields are refused.
    let mut wrong = of_kind(&base("openshift"), "DaemonSet").clone();
    wrong["spec"]["template"]["spec"]["containers"][0]["privileged"] = json!(true);
    assert!(admin.apply(&wrong).expect_err("an unknown field").message.contains("privileged"));
    let mut wrong: Value = of_kind(&base("openshift"), "SecurityContextConstraints").clone();
    wrong["allowHostPids"] = json!(true);
    assert!(admin.apply(&wrong).expect_err("an unknown field").message.contains("allowHostPids"));
}

/// Enables every optional part of the chart.
const EVERYTHING: &str = "primaryPlugin.enabled=true,resourceQuotas.enabled=true,podMonitor.enabled=true,\
                          podMonitor.labels.a=b,prometheusRule.enabled=true,prometheusRule.labels.a=b,\
                          grafanaDashboard.enabled=true,seLinuxOptions.type=spc_t,podLabels.a=b,podAnnotations.a=b,\
                          nodeSelector.a=b,global.imagePullSecrets={a},global.networkPolicy.enabled=true,\
                          metricsFrom[0].namespaceSelector.matchLabels.a=b,global.nativeNftables=true,revision=a,\
                          global.logging.level=cni:debug,updateStrategy.type=OnDelete,daemonSetLabels.a=b,\
                          terminationGracePeriodSeconds=5,env.KUBERNETES_SERVICE_HOST=a,cniNetnsDir=/var/run/a,\
                          env.KUBERNETES_SERVICE_PORT=6443,resources.limits.cpu=2,seLinuxOptions.level=s0,\
                          tolerations[0].key=a,tolerations[0].operator=Equal,tolerations[0].value=b,\
                          attachments[0].name=a,attachments[0].namespaces={shop}";
