//! STATUS; endless inputs and outputs that are not read: plugin and agent stop waiting after a timeout, and their memory is
//! limited; a panic of the plugin is reported as an error object.

use crate::support::api::kubeconfig_of;
use crate::support::called::{plugin, start};
use crate::support::delegate_pod::with;
use crate::support::directory::Directory;
use crate::support::program::write_executable;
use detour_cni::plugin;
use nix::fcntl::OFlag;
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

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
    for (wrong, reason) in [
        (json!({"type": "dns-exclude", "ports": [0]}), "chain[0].ports: invalid value"),
        (group, "chain[0].owner_groups_include: invalid value \"no-such-group\""),
    ] {
        for mut conf in [json!({}), json!({"clusterNetwork": "ovn", "confDir": "/no/such/directory"})] {
            (conf["kubernetes"], conf["chain"]) = (json!({"manifests_dir": &*manifests}), json!([wrong]));
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
    let write = |name: &str| fs::write(directory.join(name), "{}").expect("writable");
    write("00-detour.conflist");
    write("00-detour.conflist.cilium_bak");
    let details = refused(conf(&directory));
    assert!(details.contains(&format!("cni_conf_dir: {} has no configuration", directory.display())), "{details}");
    for other in ["10-calico.conflist", "10-calico.conf", "10-calico.json"] {
        write(other);
        assert_eq!(status(conf(&directory)), (Some(0), String::new()), "{other}");
        fs::remove_file(directory.join(other)).expect("removed");
    }
    let write_text = |name: &str, text: &str| fs::write(directory.join(name), text).expect("writable");
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
        fs::write(directory.join(name), text).expect("writable");
        directory.join(name)
    };
    let refusing = |user: Value| kubeconfig_of(&json!({"server": "http://127.0.0.1:1"}), &user);
    let kubeconfigs = [
        "/no/such/kubeconfig".into(),
        written("broken", "{"),
        written("no-token", &refusing(json!({"tokenFile": "/no/such/token"}))),
        written("refused", &refusing(json!({}))),
    ];
    let agents = [json!({"agent_namespace": "kube-system"}), json!({"agent_socket": "/no/such/socket"})];
    for kubeconfig in kubeconfigs {
        for agent in &agents {
            let mut kubernetes = agent.clone();
            kubernetes["kubeconfig"] = json!(kubeconfig);
            for more in [json!({}), json!({"clusterNetwork": "ovn", "confDir": "/no/such/directory"})] {
                let conf = with(json!({"kubernetes": kubernetes}), &more);
                assert_eq!(status(conf.clone()), (Some(0), String::new()), "{conf}");
            }
        }
        // Without an agent, the operator repairs it.
        let details = refused(json!({"kubernetes": {"kubeconfig": kubeconfig}}));
        assert!(!kubeconfig.ends_with("refused") || details.contains("http://127.0.0.1:1"), "{details}");
    }
    // What no agent repairs fails as before.
    let agent = json!({"agent_namespace": "kube-system", "manifests_dir": "/no/such/directory"});
    assert!(refused(json!({"kubernetes": agent})).contains("/no/such/directory"));
    assert!(refused(json!({"kubernetes": agents[0], "ambient_enabled": true})).contains("ambient_enabled"));
    let (exit, stdout) = status(json!({"kubernetes": agents[0], "chain": [{"type": "no-such-plugin"}]}));
    assert!(exit == Some(1) && stdout.contains("\"code\":50") && stdout.contains("no-such-plugin"), "{stdout}");
}

/// The maximum duration of each call, also on a slow machine.
const DEADLINE: Duration = Duration::from_secs(60);
/// The maximum memory of a call, in KiB.
const MEMORY: u64 = 64 << 10;

/// Returns a call of the plugin for a pod, with a pipe as stdin.
fn call(command: &str) -> Command {
    let mut detour = Command::new(env!("CARGO_BIN_EXE_detour"));
    detour.env_clear().envs([
        ("CNI_COMMAND", command),
        ("CNI_CONTAINERID", "limits-test"),
        ("CNI_NETNS", "/run/netns/limits-test-none"),
        ("CNI_IFNAME", "net1"),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
        ("CNI_PATH", "/opt/cni/bin"),
    ]);
    detour.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    detour
}

/// Returns a configuration that skips the pod and causes a warning.
fn conf() -> String {
    let kubernetes = json!({"odd": "x".repeat(1000), "exclude_namespaces": ["shop"]});
    json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "kubernetes": kubernetes}).to_string()
}

/// Waits for the end of a process; returns its status and its maximum memory, in KiB.
#[track_caller]
fn end(process: &mut Child) -> (ExitStatus, u64) {
    let (started, status_file) = (Instant::now(), format!("/proc/{}/status", process.id()));
    let mut most = 0;
    loop {
        let text = fs::read_to_string(&status_file).unwrap_or_default();
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        most = most.max(peak.unwrap_or(0));
        if let Some(status) = process.try_wait().expect("a child") {
            return (status, most);
        }
        if started.elapsed() > DEADLINE {
            process.kill().expect("a child");
            panic!("it does not end; memory: {most} KiB");
        }
        thread::yield_now();
    }
}

/// Returns the error object on the stdout of a process that has ended.
fn error(process: &mut Child) -> (u64, String) {
    let mut text = String::new();
    process.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
    let error: Value = serde_json::from_str(&text).expect("JSON");
    let part = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
    (error["code"].as_u64().expect("a code"), format!("{}: {}", part("msg"), part("details")))
}

/// Returns a full pipe.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = io::pipe().expect("a pipe");
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(OFlag::O_NONBLOCK.bits());
    let mut filler = options.open(format!("/proc/self/fd/{}", writer.as_raw_fd())).expect("opened again");
    while filler.write(&[b'-'; 4096]).is_ok() {}
    (reader, writer)
}

#[test]
fn reading_an_open_stdin_times_out() {
    let processes = [("ADD", ""), ("DEL", "{\"name\":")].map(|(command, text)| {
        let mut process = call(command).spawn().expect("it starts");
        let mut stdin = process.stdin.take().expect("a pipe");
        stdin.write_all(text.as_bytes()).expect("it fits into the pipe");
        (process, stdin)
    });
    for (mut process, stdin) in processes {
        let (status, _) = end(&mut process);
        assert_eq!(status.code(), Some(1));
        let (code, text) = error(&mut process);
        assert!(
            code == 5 && text.starts_with("error reading from stdin: expected the end of file within 10 s"),
            "{text}"
        );
        drop(stdin);
    }
}

#[test]
fn an_endless_stdin_is_read_up_to_the_limit() {
    for (opening, item) in [("", " "), ("{\"a\":[", "0,"), ("{\"a\":[", "{},"), ("{\"a\":\"", "x")] {
        let mut process = call("ADD").spawn().expect("it starts");
        let mut stdin = process.stdin.take().expect("a pipe");
        let writer = thread::spawn(move || {
            let piece = item.repeat(100_000);
            let mut sent = stdin.write_all(opening.as_bytes());
            // The plugin closes its end, or this would be 20 GB.
            for _ in 0..100_000 {
                sent = sent.and_then(|()| stdin.write_all(piece.as_bytes()));
            }
            sent.expect_err("it is not read to its end");
        });
        let (_, memory) = end(&mut process);
        let (code, text) = error(&mut process);
        assert!(code == 7 && text.contains("stdin: expected at most 4194304 bytes"), "{text}");
        assert!(memory < MEMORY, "{item:?}: {memory} KiB");
        writer.join().expect("no panic");
    }
}

/// The plugin also relays the stderr of a delegate.
#[test]
fn a_full_stderr_does_not_delay_the_answer() {
    let directory = Directory::new("noisy");
    let text =
        "#!/bin/sh\ni=0\nwhile [ $i -lt 3000 ]; do echo \"line $i of many, many others\" >&2; i=$((i+1)); done\n";
    write_executable(&directory.join("noisy"), text);
    for chain in [json!([]), json!([{"type": "noisy"}])] {
        let mut conf: Value = serde_json::from_str(&conf()).expect("JSON");
        conf["chain"] = chain;
        let (_reader, writer) = full_pipe();
        let mut process = call("ADD").env("CNI_PATH", &*directory).stderr(writer).spawn().expect("it starts");
        process.stdin.take().expect("a pipe").write_all(conf.to_string().as_bytes()).expect("written");
        assert!(end(&mut process).0.success());
        let mut answer = String::new();
        process.stdout.take().expect("a pipe").read_to_string(&mut answer).expect("text");
        assert_eq!(answer, "{\"cniVersion\":\"1.1.0\"}\n");
    }
}

/// Set in the process that panics, which ends it.
const HERE: &str = "PANIC_HERE";

struct BrokenStdin;

impl Read for BrokenStdin {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        panic!("stdin broke")
    }
}

#[test]
fn a_panic_is_one_error_object_and_exit_code_1() {
    if env::var_os(HERE).is_some() {
        drop(plugin::call(|name| env::var_os(name), BrokenStdin, "detour"));
        unreachable!("the panic ends the process");
    }
    let mut child = Command::new(env::current_exe().expect("this test"));
    child.args(["--exact", "status::a_panic_is_one_error_object_and_exit_code_1", "--nocapture"]);
    child.env_clear().envs([(HERE, "1"), ("CNI_COMMAND", "GC"), ("CNI_PATH", "/")]);
    let output = child.output().expect("it starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    let object = &stdout[stdout.find('{').expect("an object")..];
    let error: Value = serde_json::from_str(object).expect("one object and nothing after it");
    assert_eq!((&error["code"], &error["cniVersion"]), (&Value::from(108), &Value::from("1.1.0")));
    let msg = error["msg"].as_str().expect("a string");
    assert!(msg.contains("tests/plugin/status.rs") && msg.contains("stdin broke"), "{msg}");
}
