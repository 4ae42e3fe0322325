//! STATUS of the binary: exit code 0 if an ADD would succeed, else error 50 with the reason.

use crate::support::called::{plugin, start};
use crate::support::directory;
use crate::support::program::write_executable;

use directory::Directory;
use serde_json::{Value, json};

fn status(mut conf: Value) -> (Option<i32>, String) {
    conf["cniVersion"] = json!("1.1.0");
    conf["name"] = json!("status");
    conf["type"] = json!("detour");
    let mut plugin = plugin([("CNI_COMMAND", "STATUS"), ("CNI_PATH", "/nowhere")]);
    let output = start(&mut plugin, &conf.to_string()).wait_with_output().expect("it ends");
    (output.status.code(), String::from_utf8(output.stdout).expect("text"))
}

fn refused(conf: Value) -> String {
    let (exit, stdout) = status(conf);
    assert_eq!(exit, Some(1), "{stdout}");
    let error: Value = serde_json::from_str(&stdout).expect("an error object");
    assert_eq!(error["code"], 50, "{error}");
    error["details"].as_str().expect("details").to_owned()
}

#[test]
fn status_succeeds_if_facts_are_available_or_not_needed() {
    let manifests = Directory::new("status");
    assert_eq!(status(json!({"kubernetes": {"manifests_dir": &*manifests}})), (Some(0), String::new()));
    assert_eq!(status(json!({"chain": [{"type": "uid-exclude", "uids": [1337]}]})), (Some(0), String::new()));
    // istio-cni redirects the pods of the ambient mesh.
    let excluding = json!({"ambient_enabled": true, "chain": [{"type": "uid-exclude", "uids": [1337]}]});
    assert_eq!(status(excluding), (Some(0), String::new()));
}

#[test]
fn the_error_has_the_reason() {
    let details = refused(json!({"kubernetes": {"manifests_dir": "/no/such/directory"}}));
    assert!(details.contains("/no/such/directory"), "{details}");
    let details = refused(json!({"kubernetes": {"kubeconfig": "/no/such/kubeconfig"}}));
    assert!(details.contains("/no/such/kubeconfig"), "{details}");
    let details = refused(json!({"ambient_enabled": true, "kubernetes": {"manifests_dir": "/no/such/directory"}}));
    assert!(details.contains("ambient_enabled") && details.contains("/no/such/directory"), "{details}");
}

#[test]
fn settings_that_an_add_refuses_fail_status() {
    let manifests = Directory::new("status-chain");
    let group = json!({"type": "istio-redirect", "owner_groups_include": ["no-such-group"]});
    for (chain, reason) in [
        (json!([{"type": "uid-exclude", "uidz": [1]}]), "chain[0].uidz: unknown key"),
        (json!([{"type": "dns-exclude", "ports": [0]}]), "chain[0].ports: invalid value"),
        (
            json!([{"type": "istio-redirect", "drop_invalid": true}, {"type": "istio-redirect", "drop_invalid": false}]),
            "chain[0] and chain[1] contradict each other",
        ),
        (json!([group]), "chain[0].owner_groups_include: invalid value \"no-such-group\""),
    ] {
        let kubernetes = json!({"manifests_dir": &*manifests});
        for more in [json!({}), json!({"clusterNetwork": "ovn", "confDir": "/no/such/directory"})] {
            let mut conf = json!({"kubernetes": kubernetes, "chain": chain});
            conf.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            let details = refused(conf);
            assert!(details.contains(reason), "{details}");
        }
    }
    for kubernetes in [json!({}), json!({"agent_namespace": "kube-system"})] {
        let details = refused(json!({"kubernetes": kubernetes, "chain": [{"type": "istio-redirect"}]}));
        assert!(details.contains("chain[0]: istio-redirect needs facts of the pod: set kubernetes.kube"), "{details}");
    }
    // What every ADD accepts.
    let empty = json!([{"type": "istio-redirect", "proxy_uid": [], "proxy_gid": []}]);
    let kubernetes = json!({"manifests_dir": &*manifests});
    assert_eq!(status(json!({"kubernetes": kubernetes, "chain": empty})), (Some(0), String::new()));
    let (exit, stdout) = status(json!({"kubernetes": {"manifests_dir": &*manifests}, "chian": []}));
    assert!(exit == Some(1) && stdout.contains("did you mean"), "{stdout}");
    let (exit, stdout) = status(json!({"chain": [{"type": "dns-exlude"}]}));
    assert!(exit == Some(1) && stdout.contains("did you mean \\\"dns-exclude\\\"?"), "{stdout}");
}

/// Every ADD of a primary plugin runs all of its delegates and executables.
#[test]
fn a_primary_plugin_checks_everything_that_all_pods_have_in_common() {
    let directory = Directory::new("status-primary");
    for name in ["bridge", "exclude-backup"] {
        let script = "#!/bin/sh\necho '{\"cniVersion\": \"1.1.0\"}'\n";
        write_executable(&directory.join(name), script);
    }
    let conf = |second: Value, chain: Value| {
        json!({
            "kubernetes": {"manifests_dir": &*directory, "cni_bin_dir": &*directory}, "chain": chain,
            "delegates": [{"name": "a", "cniVersion": "1.1.0", "type": "bridge"}, second],
        })
    };
    let good = json!({"name": "b", "cniVersion": "1.1.0", "type": "istio-cni"});
    let backup = json!([{"type": "exclude-backup"}]);
    assert_eq!(status(conf(good.clone(), backup.clone())), (Some(0), String::new()));
    let with = |key: &str, value: Value| {
        let mut second = good.clone();
        second[key] = value;
        second
    };
    for (conf, reason) in [
        (conf(good.clone(), json!([{"type": "exclude-backups"}])), "exclude-backups"),
        (conf(with("type", json!("macvlan")), backup.clone()), "macvlan"),
        (conf(with("log_level", json!("loud")), backup.clone()), "log_level"),
        (conf(with("chain", json!([{"type": "uid-exclude", "uids": "x"}])), backup.clone()), "chain[0].uids"),
        (conf(with("chain", json!([{"type": "exclude-ldap"}])), backup), "exclude-ldap"),
    ] {
        let (exit, stdout) = status(conf);
        assert!(exit == Some(1) && stdout.contains("\"code\":50") && stdout.contains(reason), "{reason}: {stdout}");
    }
}

/// Without the own list, the runtime would find no configuration.
#[test]
fn status_fails_if_the_cluster_network_has_removed_the_source_of_the_own_list() {
    let directory = Directory::new("status-own-list");
    let conf = |directory: &std::path::Path| json!({"chain": [], "cni_conf_dir": directory});
    let write = |name: &str| std::fs::write(directory.join(name), "{}").expect("writable");
    write("00-detour.conflist");
    write("00-detour.conflist.cilium_bak");
    let details = refused(conf(&directory));
    assert!(details.contains(&format!("cni_conf_dir: {} has no configuration", directory.display())), "{details}");
    for other in ["10-calico.conflist", "10-calico.conf", "10-calico.json"] {
        write(other);
        assert_eq!(status(conf(&directory)), (Some(0), String::new()), "{other}");
        std::fs::remove_file(directory.join(other)).expect("removed");
    }
    let write_text = |name: &str, text: &str| std::fs::write(directory.join(name), text).expect("writable");
    write_text("99-loopback.conf", r#"{"name": "lo", "type": "loopback"}"#);
    write_text("99-loopback.conflist", r#"{"name": "lo", "plugins": [{"type": "loopback"}]}"#);
    assert!(refused(conf(&directory)).contains("has no configuration of the cluster network"));
    for other in [r#"{"name": "n", "plugins": [{"type": "loopback"}, {"type": "calico"}]}"#, "{", &" ".repeat(20 << 10)]
    {
        write_text("10-calico.conflist", other);
        assert_eq!(status(conf(&directory)), (Some(0), String::new()), "{other}");
    }
    // The agent writes the own list again.
    assert_eq!(status(conf(&directory.join("missing"))), (Some(0), String::new()));
    let (exit, stdout) = status(json!({"cni_conf_dir": "etc/cni/net.d"}));
    assert!(exit == Some(1) && stdout.contains("cni_conf_dir") && stdout.contains("an absolute path"), "{stdout}");
}

/// Otherwise the node would be NotReady, and the agent's pod, which writes the kubeconfig, could not start.
#[test]
fn faults_that_the_agent_repairs_do_not_fail_status() {
    let directory = Directory::new("status-agent");
    let written = |name: &str, text: &str| {
        std::fs::write(directory.join(name), text).expect("writable");
        directory.join(name)
    };
    let refusing = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"tokenFile": "/no/such/token"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    let kubeconfigs = [
        "/no/such/kubeconfig".into(),
        written("broken", "{"),
        written("no-token", &refusing.to_string()),
        written("refused", &refusing.to_string().replace(r#"{"tokenFile":"/no/such/token"}"#, "{}")),
    ];
    let agents = [json!({"agent_namespace": "kube-system"}), json!({"agent_socket": "/no/such/socket"})];
    for kubeconfig in kubeconfigs {
        for agent in &agents {
            let mut kubernetes = agent.clone();
            kubernetes["kubeconfig"] = json!(kubeconfig);
            for more in [json!({}), json!({"clusterNetwork": "ovn", "confDir": "/no/such/directory"})] {
                let mut conf = json!({"kubernetes": kubernetes});
                conf.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
                assert_eq!(status(conf.clone()), (Some(0), String::new()), "{conf}");
            }
        }
        // Without an agent, the operator repairs it.
        refused(json!({"kubernetes": {"kubeconfig": kubeconfig}}));
    }
    // What no agent repairs fails as before.
    let agent = json!({"agent_namespace": "kube-system", "manifests_dir": "/no/such/directory"});
    assert!(refused(json!({"kubernetes": agent})).contains("/no/such/directory"));
    assert!(refused(json!({"kubernetes": agents[0], "ambient_enabled": true})).contains("ambient_enabled"));
    let (exit, stdout) = status(json!({"kubernetes": agents[0], "chain": [{"type": "no-such-plugin"}]}));
    assert!(exit == Some(1) && stdout.contains("\"code\":50") && stdout.contains("no-such-plugin"), "{stdout}");
}

#[test]
fn an_unreachable_api_server_is_reported_within_two_seconds() {
    let directory = Directory::new("status-kubeconfig");
    let kubeconfig = directory.join("kubeconfig");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(&kubeconfig, text.to_string()).expect("writable");
    let details = refused(json!({"kubernetes": {"kubeconfig": kubeconfig}}));
    assert!(details.contains("http://127.0.0.1:1"), "{details}");
}
