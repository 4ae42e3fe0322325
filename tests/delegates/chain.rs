//! Executables in a sub-plugin chain: their order, input and result.

use crate::pod::{Pod, call, conf, with};
use crate::recorders::{Recorders, add_prints, fails};
use serde_json::{Value, json};
use std::path::Path;

fn result(address: &str) -> Value {
    json!({"cniVersion": "1.0.0", "ips": [{"address": address}]})
}

fn chain() -> [Value; 2] {
    [json!({"type": "first", "own": {"a": [1, null]}}), json!({"type": "second"})]
}

#[test]
fn add_passes_each_result_to_the_next_executable() {
    let first = add_prints(&result("10.0.0.1/8"));
    let recorders = Recorders::new().with("first", &first).with("second", &add_prints(&result("10.0.0.2/8")));
    let pod = Pod::new();
    let previous = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]});
    let conf = with(conf("1.0.0", &chain()), &json!({"prevResult": previous}));
    let output = pod.call("ADD", &recorders.bin(), &conf);
    assert!(output.success, "{output:?}");
    assert_eq!(output.stdout, result("10.0.0.2/8"));
    let seen = recorders.seen();
    assert_eq!(recorders.order(), ["ADD first", "ADD second"]);
    let named = |keys: Value| with(json!({"name": "mesh", "cniVersion": "1.0.0"}), &keys);
    assert_eq!(seen[0].stdin, named(json!({"type": "first", "own": {"a": [1, null]}, "prevResult": previous})));
    assert_eq!(seen[1].stdin, named(json!({"type": "second", "prevResult": result("10.0.0.1/8")})));
    assert!(!pod.rules().is_empty());
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
fn an_empty_stdout_leaves_the_result_unchanged() {
    let recorders = Recorders::new().with("first", &add_prints(&result("10.0.0.1/8"))).with("second", "");
    let pod = Pod::new();
    let output = pod.call("ADD", &recorders.bin(), &conf("1.1.0", &chain()));
    assert_eq!(output.stdout, with(result("10.0.0.1/8"), &json!({"cniVersion": "1.1.0"})));
    assert_eq!(recorders.seen()[0].stdin.get("prevResult"), None);

    let silent = Recorders::new().with("first", "").with("second", "");
    let output = pod.call("ADD", &silent.bin(), &conf("1.1.0", &chain()));
    assert_eq!(output.stdout, json!({"cniVersion": "1.1.0"}));
}

#[test]
fn a_result_of_another_version_is_converted() {
    let older = json!({"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.0.0.1/8"}], "dns": {}});
    let recorders = Recorders::new().with("first", &add_prints(&older)).with("second", "");
    let output = Pod::new().call("ADD", &recorders.bin(), &conf("1.0.0", &chain()));
    assert_eq!(output.stdout, result("10.0.0.1/8"));
    assert_eq!(recorders.seen()[1].stdin["prevResult"], result("10.0.0.1/8"));
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
fn del_runs_all_executables_even_if_one_fails() {
    let no = |msg: &str| fails("DEL", &json!({"code": 11, "msg": msg}));
    let recorders = Recorders::new().with("first", &no("one")).with("second", &no("two"));
    let pod = Pod::new();
    let conf = conf("1.0.0", &chain());
    assert!(pod.call("ADD", &recorders.bin(), &conf).success);
    let output = pod.call("DEL", &recorders.bin(), &conf);
    assert_eq!((output.success, &output.stdout["code"]), (false, &json!(11)));
    assert_eq!(output.stdout["msg"], r#"plugin type="second" failed (delete): two"#);
    assert_eq!(output.stdout["details"], r#"plugin type="first" failed (delete): one"#);
    assert_eq!(pod.rules(), [""; 0]);
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
fn an_executable_gets_the_runtime_config_of_its_capabilities() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let pod = Pod::new();
    let executables =
        [json!({"type": "first", "capabilities": {"mac": true, "ips": false}}), json!({"type": "second"})];
    let more = json!({"runtimeConfig": {"mac": "m", "ips": ["1"]}, "args": {"cni": {"a": 1}}});
    assert!(pod.call("ADD", &recorders.bin(), &with(conf("1.0.0", &executables), &more)).success);
    let seen = recorders.seen();
    assert_eq!(seen[0].stdin["runtimeConfig"], json!({"mac": "m"}));
    assert_eq!(seen[0].stdin.get("capabilities"), None);
    assert_eq!(seen[1].stdin.get("runtimeConfig"), None);
    assert_eq!(seen[1].stdin["args"], json!({"cni": {"a": 1}}));
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
