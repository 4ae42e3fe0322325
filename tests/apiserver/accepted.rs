//! The API server accepts every field of the shipped manifests, the agent writes only to mounted volumes, and the admission
//! policy knows every annotation of Istio.

use crate::admission::rejected_pods;
use crate::control_plane::ControlPlane;
use crate::node::{OWN_LIST, on_a_node};
use crate::shipped::{apply, base, chart, chart_with_files, cluster_with, manifests, objects, of_kind, prepare};
use crate::support::program::built;
use detour_cni::agent::install::PLATFORMS;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn every_manifest_is_accepted() {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    prepare(&admin);
    // The admission policy of some versions of OpenShift 4.19 and 4.20 (cluster-network-operator issue 2771) rejects
    // changes of definitions without a spec.
    let apply = |objects: &[Value]| {
        let is_definition = |object: &&Value| object["kind"] == "NetworkAttachmentDefinition";
        assert!(objects.iter().filter(is_definition).all(|object| object["spec"].is_object()), "{objects:?}");
        apply(&admin, objects);
    };
    for platform in ["kubernetes", "openshift"] {
        apply(&base(platform));
    }
    for platform in PLATFORMS.iter() {
        let platform = format!("global.platform={}", platform.name);
        apply(&chart(&[&platform]));
        apply(&chart(&[&platform, EVERYTHING, "onExit=remove"]));
    }
    for sample in fs::read_dir(manifests().join("samples")).expect("readable") {
        let text = fs::read_to_string(sample.expect("readable").path()).expect("readable");
        // Samples of chart values are not objects.
        for mut object in objects(&text).into_iter().filter(|object| object["kind"].is_string()) {
            if !object["kind"].as_str().is_some_and(|kind| kind.starts_with("Cluster")) {
                object["metadata"]["namespace"] = json!("shop");
            }
            apply(&[object]);
        }
    }
    let sample = manifests().join("samples/monitoring-values.yaml");
    let monitored = chart_with_files(&[&sample], &["global.platform=openshift"]);
    for kind in ["NetworkPolicy", "PodMonitor", "PrometheusRule"] {
        of_kind(&monitored, kind);
    }
    apply(&monitored);
    // Wrong fields are refused.
    let mut wrong = of_kind(&base("openshift"), "DaemonSet").clone();
    wrong["spec"]["template"]["spec"]["containers"][0]["privileged"] = json!(true);
    assert!(admin.apply(&wrong).expect_err("an unknown field").message.contains("privileged"));
    let mut wrong: Value = of_kind(&base("openshift"), "SecurityContextConstraints").clone();
    wrong["allowHostPids"] = json!(true);
    assert!(admin.apply(&wrong).expect_err("an unknown field").message.contains("allowHostPids"));
}

#[test]
fn the_documented_kustomization_sets_the_image() {
    let guide = fs::read_to_string(manifests().join("../docs/install.md")).expect("readable");
    let (_, block) = guide.split_once("```yaml\nresources: [manifests/openshift]").expect("a kustomization");
    let rest = block.split("```").next().expect("text");
    for platform in ["openshift", "kubernetes"] {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kustomization-{platform}"));
        let _ = fs::remove_dir_all(&directory);
        let copy = directory.join("manifests").join(platform);
        fs::create_dir_all(&copy).expect("writable");
        for file in ["kustomization.yaml", "rendered.yaml"] {
            fs::copy(manifests().join(platform).join(file), copy.join(file)).expect("a copy");
        }
        let text = format!("resources: [manifests/{platform}]{rest}");
        fs::write(directory.join("kustomization.yaml"), text).expect("writable");
        let kubectl = built("kubectl");
        let output = Command::new(kubectl).arg("kustomize").arg(&directory).output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        let built = objects(&String::from_utf8(output.stdout).expect("text"));
        let image = |objects: &[Value]| -> Value {
            of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["image"].clone()
        };
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(image(&base(platform)), format!("registry.invalid/detour:{version}"));
        assert_eq!(image(&built), format!("registry.example/mesh/detour:{version}"));
    }
}

/// Pod Security `restricted` has the rules of `restricted-v2` except for its UIDs. `explain` compares these with the
/// namespace's range, which it reads from the API server.
#[test]
fn the_sample_for_vault_needs_no_permission_for_another_uid() {
    let plane = ControlPlane::start();
    let admin = plane.admin();
    prepare(&admin);
    let shop = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {
            "name": "shop", "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            "annotations": {"openshift.io/sa.scc.uid-range": "1000650000/10000"},
        },
    });
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": "shop", "name": "default"}});
    apply(&admin, &[shop, account, of_kind(&base("openshift"), "NetworkAttachmentDefinition").clone()]);
    let conf = Path::new(env!("CARGO_MANIFEST_DIR")).join("conf");
    let sample = fs::read_to_string(conf.join("openshift-vault-pod.yaml")).expect("readable");
    let sample = objects(&sample).remove(0);
    let root = plane.directory.join("node");
    let kubeconfig = root.join("var/lib/cni/detour/kubeconfig");
    fs::create_dir_all(kubeconfig.parent().expect("a directory")).expect("writable");
    fs::write(&kubeconfig, plane.admin_kubeconfig().to_string()).expect("writable");
    fs::copy(conf.join("openshift-vault.conf"), root.join("vault.conf")).expect("writable");
    let explain = || -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_detour"));
        command.args(["explain", "-n", "shop", "web-0", "-o", "json", "--root"]).arg(&root);
        let output = command.args(["--config", "/vault.conf"]).env_clear().output();
        let output = output.expect("it starts");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    let outside = |report: &Value| -> Vec<Value> {
        let warnings = report["warnings"].as_array().expect("a list").iter();
        warnings.filter(|warning| warning["code"] == "uid-outside-namespace-range").cloned().collect()
    };

    apply(&admin, std::slice::from_ref(&sample));
    let report = explain();
    assert_eq!((&report["redirected"], outside(&report)), (&json!(true), vec![]), "{report}");
    assert_eq!(report["excluded_containers"][0]["name"], "vault-agent-init", "{report}");

    let vault = "/spec/initContainers/1/securityContext";
    let strict =
        [("/spec/securityContext", "seccompProfile"), (vault, "allowPrivilegeEscalation"), (vault, "capabilities")];
    admin.delete(&sample).expect("deleted");
    for (object, field) in strict {
        let mut pod = sample.clone();
        pod.pointer_mut(object).and_then(Value::as_object_mut).expect("an object").remove(field);
        let refused = admin.apply(&pod).expect_err(field).message;
        assert!(refused.contains("violates PodSecurity \"restricted:latest\"") && refused.contains(field), "{refused}");
    }

    let mut pod = sample;
    *pod.pointer_mut(vault).and_then(|context| context.get_mut("runAsUser")).expect("a UID") = json!(1337);
    apply(&admin, &[pod]);
    let warnings = outside(&explain());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0]["what"].as_str().expect("text").starts_with("container vault-agent-init runs as UID 1337"));
    assert!(warnings[0]["next"].as_str().expect("text").contains("nonroot-v2"));
}

/// Enables every optional part of the chart.
const EVERYTHING: &str = "primaryPlugin.enabled=true,resourceQuotas.enabled=true,podMonitor.enabled=true,\
                          podMonitor.labels.a=b,prometheusRule.enabled=true,prometheusRule.labels.a=b,\
                          grafanaDashboard.enabled=true,seLinuxOptions.type=spc_t,podLabels.a=b,podAnnotations.a=b,\
                          nodeSelector.a=b,global.imagePullSecrets={a},global.networkPolicy.enabled=true,\
                          metricsFrom[0].namespaceSelector.matchLabels.a=b,global.nativeNftables=true,\
                          logLevel=debug,updateStrategy.type=OnDelete,\
                          env.KUBERNETES_SERVICE_HOST=a,cniNetnsDir=/var/run/a,\
                          env.KUBERNETES_SERVICE_PORT=6443,resources.limits.cpu=2,seLinuxOptions.level=s0,\
                          tolerations[0].key=a,tolerations[0].operator=Equal,tolerations[0].value=b,\
                          attachments[0].name=a,attachments[0].namespaces={shop}";

#[test]
fn the_agent_writes_only_to_mounted_volumes() {
    for (platform, conf) in [("kubernetes", OWN_LIST), ("openshift", "etc/cni/multus/net.d/istio-cni.conf")] {
        let plane = cluster_with(&base(platform));
        let objects = base(platform);
        on_a_node(&plane, &objects, |node| {
            let before = node.files();
            let _agent = node.settled_agent("a");
            let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
            let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts").iter();
            let mounts: Vec<&str> =
                mounts.filter_map(|mount| mount["mountPath"].as_str()?.strip_prefix("/host/")).collect();
            let written: Vec<_> = node.files().into_iter().filter(|path| !before.contains(path)).collect();
            for path in &written {
                assert!(mounts.iter().any(|mount| path.starts_with(mount)), "{path} is on no volume");
            }
            assert!(written.len() >= 3, "{written:?}");
            for volume in pod["volumes"].as_array().expect("volumes") {
                let Some(path) = volume["hostPath"]["path"].as_str() else { continue };
                assert!(mounts.contains(&path.trim_start_matches('/')), "{path} is mounted at its own place");
            }
            let written = node.read(conf);
            assert!(written.contains("\"uid-exclude\"") && written.contains("1337"), "{written}");
        });
    }
}

/// Each annotation that Istio defines excludes traffic, prevents injection, or does neither. A new one must be decided.
#[test]
fn the_policy_knows_every_annotation_of_istio() {
    let rejected: BTreeSet<String> = rejected_pods()
        .into_iter()
        .flat_map(|(_, annotations, ..)| {
            annotations.as_object().expect("annotations").keys().cloned().collect::<Vec<_>>()
        })
        .collect();
    // They add to what is captured, configure the proxy itself, or belong to other objects than pods. Istio captures DNS
    // for names, not for authorization.
    const OTHERS: &str = include_str!("../golden/istio-annotations.txt");
    let module = include_str!("../injector/go.mod").lines().find_map(|line| line.trim().strip_prefix("istio.io/api "));
    let file = format!("target/tools/istio-annotations-{}.go", module.expect("a version"));
    let source = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}: run hack/test.sh"));
    let names = source.lines().filter_map(|line| line.trim().strip_prefix("Name:")?.trim().split('"').nth(1));
    let mut unknown: Vec<&str> =
        names.filter(|name| !rejected.contains(*name) && !OTHERS.lines().any(|it| it == *name)).collect();
    unknown.sort_unstable();
    assert_eq!(unknown, [""; 0], "decide whether they exclude traffic: admission-policy-istio.yaml");
    let policy = include_str!("../../manifests/chart/templates/admission-policy-istio.yaml");
    for name in &rejected {
        let key = name.trim_start_matches("traffic.sidecar.istio.io/include");
        assert!(policy.contains(name.as_str()) || policy.contains(&format!("include{key}")), "{name}");
        assert!(source.contains(&format!("\"{name}\"")), "{name}: Istio removed it");
    }
}
