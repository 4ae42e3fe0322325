//! Executables in a sub-plugin chain: their order, input and result.

use crate::delegates::pod::{Pod, call, conf, with};
use crate::delegates::recorders::{Recorders, add_prints, fails};
use serde_json::{Value, json};
use std::path::Path;

fn result(address: &str) -> Value {
    json!({"cniVersion": "1.0.0", "ips": [{"address": address}]})
}

fn chain() -> [Value; 2] {
    [json!({"type": "first", "own": {"a": [1, null]}}), json!({"type": "second"})]
}

#[test]
fn an_executable_inherits_environment_and_namespace() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let pod = Pod::new();
    let mut environment = pod.environment("ADD", "/nonexistent:/opt/cni/bin");
    environment.insert("TRACEPARENT".to_owned(), "00-1".to_owned());
    let conf = with(conf("1.0.0", &chain()), &json!({"kubernetes": {"cni_bin_dir": recorders.bin()}}));
    // With a pod's name but without a source of facts, the sub-plugins use the configuration only.
    assert!(call(&environment, &conf).success);
    let path = format!("{}:/nonexistent:/opt/cni/bin", recorders.bin().display());
    environment.insert("CNI_PATH".to_owned(), path);
    let host = std::fs::read_link("/proc/self/ns/net").expect("exists").display().to_string();
    for mut seen in recorders.seen() {
        // The shell sets these.
        ["PWD", "SHLVL", "_", "OLDPWD"].iter().for_each(|name| drop(seen.environment.remove(*name)));
        assert_eq!((&seen.environment, &seen.netns), (&environment, &host));
    }
}

#[test]
fn del_runs_executables_in_reverse_order_before_it_removes_the_rules() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let pod = Pod::new();
    for (version, known) in [("0.3.1", false), ("1.0.0", true)] {
        let conf = conf(version, &chain());
        assert!(pod.call("ADD", &recorders.bin(), &conf).success);
        let previous = json!({"cniVersion": version});
        assert!(pod.call("DEL", &recorders.bin(), &with(conf, &json!({"prevResult": previous}))).success);
        let seen = recorders.seen();
        let [.., second, first] = &seen[..] else { panic!("{seen:?}") };
        assert_eq!([&second.kind, &first.kind], ["second", "first"]);
        for seen in [first, second] {
            assert_eq!(seen.command, "DEL");
            assert_eq!(seen.stdin.get("prevResult"), known.then_some(&previous));
        }
        assert_eq!(pod.rules(), [""; 0]);
    }
}

/// The kernel gives the identity of a namespace that is gone to a new one, here with the path of the old one.
#[test]
fn a_late_del_of_an_earlier_pod_passes_no_network_namespace_to_executables() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let (pod, conf) = (Pod::new(), conf("1.0.0", &chain()));
    assert!(pod.call("ADD", &recorders.bin(), &conf).success);
    let rules = pod.rules();
    let state = Path::new("/run/detour/attachments");
    let earlier = format!("{}-earlier", pod.name);
    std::fs::create_dir(state.join(&earlier)).expect("writable");
    for file in std::fs::read_dir(state.join(&pod.name)).expect("saved").flatten() {
        std::fs::copy(file.path(), state.join(&earlier).join(file.file_name())).expect("copied");
    }
    let mut environment = pod.environment("DEL", &recorders.bin().display().to_string());
    environment.insert("CNI_CONTAINERID".to_owned(), earlier.clone());
    assert!(call(&environment, &conf).success);
    assert!(pod.call("DEL", &recorders.bin(), &conf).success);
    let netns: Vec<_> = recorders.seen()[2..].iter().map(|seen| seen.environment["CNI_NETNS"].clone()).collect();
    let own = pod.netns().display().to_string();
    assert_eq!(netns, ["", "", &own, &own]);
    assert!(!state.join(&earlier).exists() && !rules.is_empty() && pod.rules().is_empty());
}

#[test]
fn check_passes_the_runtimes_result_and_stops_at_the_first_failure() {
    let drift = fails("CHECK", &json!({"code": 7, "msg": "drift", "details": "x"}));
    let recorders = Recorders::new().with("first", "").with("second", &drift).with("third", "");
    let executables = [json!({"type": "first"}), json!({"type": "second"}), json!({"type": "third"})];
    let pod = Pod::new();
    let conf = with(conf("1.0.0", &executables), &json!({"prevResult": result("10.0.0.1/8")}));
    assert!(pod.call("ADD", &recorders.bin(), &conf).success);
    let output = pod.call("CHECK", &recorders.bin(), &conf);
    let answer = json!({
        "cniVersion": "1.0.0", "code": 7, "msg": "plugin type=\"second\" failed (check): drift", "details": "x",
    });
    assert_eq!(output.stdout, answer);
    assert_eq!(recorders.order()[3..], ["CHECK first", "CHECK second"]);
    assert_eq!(recorders.seen()[4].stdin["prevResult"], result("10.0.0.1/8"));
}

#[test]
fn gc_and_status_are_forwarded() {
    let recorders =
        Recorders::new().with("first", &fails("STATUS", &json!({"code": 51, "msg": "no"}))).with("second", "");
    let pod = Pod::new();
    let list = json!([{"containerID": pod.name, "ifname": "eth0"}]);
    let valid = json!({"cni.dev/valid-attachments": list});
    // A network of its own: GC removes the attachments that other tests have in this one.
    let conf = with(conf("1.1.0", &chain()), &json!({"name": "mesh-gc"}));
    assert!(pod.call("GC", &recorders.bin(), &with(conf.clone(), &valid)).success);
    let output = pod.call("STATUS", &recorders.bin(), &conf);
    assert_eq!((output.success, &output.stdout["code"]), (false, &json!(51)));
    assert_eq!(recorders.order(), ["GC first", "GC second", "STATUS first"]);
    let seen = recorders.seen();
    assert_eq!((&seen[1].stdin["cni.dev/valid-attachments"], &seen[1].stdin["cni.dev/attachments"]), (&list, &list));
    assert_eq!(seen[2].environment["CNI_CONTAINERID"], "");
}

#[test]
fn status_fails_if_an_executable_is_missing() {
    let recorders = Recorders::new().with("first", &fails("STATUS", &json!({"msg": "no"})));
    let status = |executables: &[Value]| {
        let output = Pod::new().call("STATUS", &recorders.bin(), &conf("1.1.0", executables));
        (output.stdout["code"].clone(), output.stdout["msg"].to_string())
    };
    let (code, msg) = status(&chain());
    assert!(code == 50 && msg.contains("failed to find plugin \\\"second\\\""), "{code} {msg}");
    let (code, msg) = status(&chain()[..1]);
    assert!(code == 50 && msg.contains("failed (status): no"), "{code} {msg}");
}

#[test]
fn executables_run_for_pods_whose_sub_plugins_are_skipped() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let pod = Pod::new();
    let excluded = json!({"kubernetes": {"exclude_namespaces": ["shop"]}});
    assert!(pod.call("ADD", &recorders.bin(), &with(conf("1.0.0", &chain()), &excluded)).success);
    assert_eq!(recorders.order(), ["ADD first", "ADD second"]);
    assert_eq!(pod.rules(), [""; 0]);
}

#[test]
fn a_chain_of_executables_alone_works() {
    let recorders = Recorders::new().with("first", &add_prints(&result("10.0.0.1/8")));
    let pod = Pod::new();
    let conf = json!({"cniVersion": "1.0.0", "name": "mesh", "type": "detour", "chain": [{"type": "first"}]});
    assert_eq!(pod.call("ADD", &recorders.bin(), &conf).stdout, result("10.0.0.1/8"));
    assert!(pod.call("DEL", &recorders.bin(), &conf).success);
    assert_eq!(recorders.order(), ["ADD first", "DEL first"]);
}
