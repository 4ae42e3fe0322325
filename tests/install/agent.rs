//! `detour agent`: drift is repaired, and problems of the node do not end the agent.

use crate::agent_process::{Agent, READY, SETTLED};
use crate::exposition::Exposition;
use crate::scene::{CALICO, KUBECONFIG, LIST, PROGRAM, Scene, program};
use crate::server::{Answer, Server};
use crate::support::background::Repeated;
use crate::support::health::{fetch, get, is_ready};
use crate::support::wait::until;
use nix::sys::signal::Signal;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Returns the parsed metrics.
fn scrape(address: &str) -> Exposition {
    let (head, body) = fetch(address, "/metrics");
    let mut lines = head.lines();
    assert_eq!(lines.next(), Some("HTTP/1.1 200 OK"));
    let header = |name: &str| {
        let mut headers = head.lines().skip(1).filter_map(|line| line.split_once(": "));
        headers.find(|(key, _)| key.eq_ignore_ascii_case(name)).expect("the header").1.to_owned()
    };
    assert_eq!(header("content-type"), "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert_eq!(header("content-length"), body.len().to_string());
    Exposition::parse(&body)
}

#[test]
fn removed_or_overwritten_files_are_restored() {
    let scene = Scene::with("agent", "10-calico.conflist", CALICO);
    let agent = Agent::settled(&scene, "a", &[]);
    let installed = scene.files();
    let back = |doing: &dyn Fn(), repair: &str| {
        doing();
        agent.wait_for_log(repair);
        agent.wait_for_log(SETTLED);
        assert_eq!(scene.files(), installed, "{repair}");
    };
    back(&|| fs::remove_file(scene.path(PROGRAM)).expect("removed"), "copy this program to /opt/cni/bin/detour");
    back(&|| scene.write(KUBECONFIG, "{}"), "write /var/lib/cni/detour/kubeconfig");
    // As another agent would: a file of another name, renamed.
    scene.write("etc/cni/net.d/new", CALICO);
    back(&|| fs::rename(scene.path("etc/cni/net.d/new"), scene.path(LIST)).expect("renamed"), "write /etc/cni/net.d/");

    // A directory that is created again is watched again.
    fs::rename(scene.path("etc/cni/net.d"), scene.path("etc/cni/old")).expect("renamed");
    agent.wait_for_log("missing: the cluster network's configuration in /etc/cni/net.d");
    scene.write(LIST, "{ half of it");
    agent.wait_for_log("10-calico.conflist: skipped: invalid JSON");
    scene.write(LIST, CALICO);
    agent.wait_for_log("write /etc/cni/net.d/10-calico.conflist");
    agent.wait_for_log(SETTLED);
}

#[test]
fn a_token_that_the_kubelet_rotates_is_written_to_the_plugins_kubeconfig() {
    let scene = Scene::with("agent-token", "10-calico.conflist", CALICO);
    fs::remove_file(scene.path("sa/token")).expect("removed");
    scene.write("sa/..1/token", "first");
    symlink("..1", scene.path("sa/..data")).expect("linked");
    symlink("..data/token", scene.path("sa/token")).expect("linked");
    let agent = Agent::settled(&scene, "a", &[]);
    assert_eq!(scene.json(KUBECONFIG)["users"][0]["user"]["token"], "first");
    scene.write("sa/..2/token", "second");
    symlink("..2", scene.path("sa/..data_tmp")).expect("linked");
    fs::rename(scene.path("sa/..data_tmp"), scene.path("sa/..data")).expect("renamed");
    agent.wait_for_log("write /var/lib/cni/detour/kubeconfig");
    agent.wait_for_log(SETTLED);
    assert_eq!(scene.json(KUBECONFIG)["users"][0]["user"]["token"], "second");
}

#[test]
fn the_node_is_ready_once_the_cluster_network_exists_and_metrics_count_installations() {
    let scene = Scene::with("agent-ready", "10-calico.conflist", "{");
    let agent = Agent::start(&scene, "a", &["--health-address=127.0.0.1:0"]);
    let address = agent.address();
    agent.wait_for_log("missing: ");
    let (status, body) = get(&address, "/readyz");
    assert_eq!(status, "503");
    assert!(body.contains("/etc/cni/net.d"), "{body}");
    assert_eq!(get(&address, "/healthz").0, "200");
    let metrics = scrape(&address);
    let done = |metrics: &Exposition| metrics.value("detour_installs", "_total", &[("result", "done")]);
    assert_eq!(metrics.value("detour_install_ready", "", &[]), Some(0.0));
    assert_eq!(metrics.value("detour_build", "_info", &[("version", env!("CARGO_PKG_VERSION"))]), Some(1.0));
    let before = done(&metrics).expect("program and kubeconfig were put there");
    for (name, family) in &metrics.0 {
        assert!(name.starts_with("detour_"), "{name}");
        let kind = family.kind.as_str();
        assert!(["counter", "gauge", "histogram", "info"].contains(&kind), "{name} is a {kind}");
    }

    scene.write(LIST, CALICO);
    agent.wait_for_log(SETTLED);
    let (status, body) = get(&address, "/readyz");
    assert!(status == "200" || body.contains("not yet confirmed"), "it must stay in place first: {status} {body}");
    agent.wait_for_log(READY);
    assert_eq!(get(&address, "/readyz"), ("200".into(), "installed".into()));
    assert_eq!(get(&address, "/else").0, "404");
    let metrics = scrape(&address);
    assert_eq!(metrics.value("detour_install_ready", "", &[]), Some(1.0));
    assert!(done(&metrics).is_some_and(|count| count > before), "{before}");
    assert_eq!(metrics.value("detour_installs", "_total", &[("result", "failed")]), None);

    // At once, because the agent creates a directory that is missing.
    scene.write("opt/cni/file", "not a directory");
    let (file, directory) = (scene.path("opt/cni/file"), scene.path("opt/cni/bin"));
    renameat_with(CWD, file, CWD, directory, RenameFlags::EXCHANGE).expect("exchanged");
    agent.wait_for_log("can't ");
    let metrics = scrape(&address);
    assert_eq!(metrics.value("detour_install_ready", "", &[]), Some(0.0));
    let failed = metrics.value("detour_installs", "_total", &[("result", "failed")]);
    assert!(failed.is_some_and(|count| count >= 1.0), "{failed:?}");
}

#[test]
fn a_configuration_that_the_plugin_would_refuse_is_reported_and_not_installed() {
    let scene = Scene::with("agent-refused", "10-calico.conflist", CALICO);
    scene.write("config/config.json", r#"{"chain": [{"type": "uid-exclude", "uids": ["7"]}]}"#);
    let config = format!("--config={}", scene.path("config/config.json").display());
    let agent = Agent::start(&scene, "a", &[&config, "--health-address=127.0.0.1:0"]);
    let address = agent.address();
    agent.wait_for_log(READY);
    let installed = scene.read(LIST);
    for (bad, why) in [
        (r#"{"chain": [{"type": "uid-exclude", "uids": ["x"]}]}"#, "chain[0].uids: "),
        ("{", "expected a JSON object"),
        (
            r#"{"kubernetes": {"kubeconfig": "/etc/missing.conf"}}"#,
            "kubernetes.kubeconfig /etc/missing.conf: the plugin can't use",
        ),
    ] {
        scene.write("config/config.json", bad);
        agent.wait_for_log(why);
        let (status, body) = get(&address, "/readyz");
        assert!(status == "503" && body.contains(why) && body.contains("stays in use"), "{status} {body}");
        let metrics = scrape(&address);
        assert_eq!(metrics.value("detour_configuration_rejected", "", &[]), Some(1.0));
        assert_eq!(metrics.value("detour_install_ready", "", &[]), Some(1.0), "the plugin works");
        assert_eq!(scene.read(LIST), installed);
    }
    // Everything else continues: the token is renewed, and removed files are restored.
    scene.write("sa/token", "second-token\n");
    agent.wait_for_log("write /var/lib/cni/detour/kubeconfig");
    assert!(scene.read(KUBECONFIG).contains("second-token"));
    fs::remove_file(scene.path(PROGRAM)).expect("removed");
    agent.wait_for_log("copy this program to /opt/cni/bin/detour");

    scene.write("config/config.json", r#"{"chian": 1, "chain": [{"type": "uid-exclude", "uids": ["8"]}]}"#);
    agent.wait_for_log("chian: unknown key");
    agent.wait_for_log("the newest configuration is accepted");
    assert!(scene.read(LIST).contains("\"8\""), "{}", scene.read(LIST));
    assert_eq!(scrape(&address).value("detour_configuration_rejected", "", &[]), Some(0.0));
    assert_eq!(get(&address, "/readyz").0, "200");

    // An agent that starts with a refused configuration leaves the installed one.
    let installed = scene.read(LIST);
    drop(agent);
    scene.write("config/config.json", r#"{"chain": [{"type": "uid-exclude", "uids": ["x"]}]}"#);
    let agent = Agent::start(&scene, "b", &[&config, "--health-address=127.0.0.1:0"]);
    let address = agent.address();
    agent.wait_for_log("chain[0].uids: ");
    assert_eq!(get(&address, "/readyz").0, "503");
    assert_eq!(scene.read(LIST), installed);
}

#[test]
fn on_exit_selects_whether_the_plugin_stays() {
    let scene = Scene::with("agent-end", "10-calico.conflist", CALICO);
    let before = scene.files();
    let agent = Agent::settled(&scene, "a", &[]);
    assert!(agent.end(Signal::SIGTERM).success());
    assert_ne!(scene.read(LIST), CALICO, "left");
    let agent = Agent::start(&scene, "a", &["--on-exit=remove"]);
    agent.wait_for_log("platform kubernetes (detected): ");
    agent.wait_for_log(SETTLED);
    assert!(agent.end(Signal::SIGTERM).success());
    assert_eq!(scene.files(), before);
    assert!(!scene.has_lock());
}

#[test]
fn flags_that_contradict_or_lack_another_one_are_errors_of_usage() {
    let scene = Scene::with("agent-usage", "10-calico.conflist", CALICO);
    let before = scene.files();
    for (arguments, parts) in [
        (&["--on-exit=auto"][..], &["--daemon-set"][..]),
        (&["--on-exit=auto", "--daemon-set=detour-agent"], &["--daemon-set detour-agent", "POD_NAMESPACE"]),
        (&["--plugin-service-account=p"], &["unknown namespace; set the variable POD_NAMESPACE"]),
        (&["--own-list=true", "--chained=false"], &["--own-list=true: expected --chained=true, got false"]),
        (&["--own-list=true", "--platform=openshift"], &["got false, the default of openshift"]),
    ] {
        scene.reports(2, "agent", arguments, parts);
        if arguments[0] == "--own-list=true" {
            scene.reports(2, "install", arguments, parts);
        }
    }
    assert_eq!(scene.files(), before);
    let arguments = scene.arguments("agent", &["--on-exit=auto", "--daemon-set=d", "--kubeconfig=/etc/k"]);
    let outside = Command::new(program()).args(arguments).env_clear().env("POD_NAMESPACE", "n").output();
    let outside = outside.expect("it starts");
    let why = String::from_utf8(outside.stderr).expect("text");
    assert_eq!(outside.status.code(), Some(2), "{why}");
    assert!(why.contains("--api-server URL and --service-account DIR in place of --kubeconfig"), "{why}");
}

/// A rolling update of a DaemonSet ends the earlier agent when the later one is ready.
#[test]
fn an_agent_on_standby_is_ready_only_if_it_could_install_the_plugin_and_removes_nothing() {
    let scene = Scene::with("agent-standby", "10-calico.conflist", CALICO);
    scene.write("opt/cni/bin/calico", "");
    let _first = Agent::settled(&scene, "first", &[]);
    let installed = scene.files();
    let arguments = ["--health-address=127.0.0.1:0", "--bin-dir=/opt/other/bin"];
    let second = Agent::start(&scene, "second", &arguments);
    let address = second.address();
    let wanted = "has the plugins of /etc/cni/net.d/10-calico.conflist in /opt/cni/bin";
    assert!(second.wait_for_log("this agent is on standby and could not lead").contains(wanted));
    let (status, body) = get(&address, "/readyz");
    assert!(status == "503" && body.contains(wanted), "{status} {body}");
    assert_eq!(scene.files(), installed);
    let third = Agent::start(&scene, "third", &["--health-address=127.0.0.1:0", "--on-exit=remove"]);
    let address = third.address();
    until("an agent with the same directories is ready", || is_ready(&address));
    assert!(third.end(Signal::SIGTERM).success());
    assert_eq!(scene.files(), installed, "an agent on standby removes nothing");
}

/// Restores its own file and renames every other one, as Cilium does by default.
fn exclusive(list: PathBuf) -> Repeated {
    let new = list.with_file_name("new.cilium_bak");
    Repeated::start(Duration::from_millis(1), move || {
        if fs::read_to_string(&list).is_ok_and(|text| text != CALICO) {
            fs::write(&new, CALICO).expect("written");
            fs::rename(&new, &list).expect("renamed");
        }
    })
}

#[test]
fn a_node_is_not_ready_while_another_process_reverts_the_file() {
    let scene = Scene::with("agent-exclusive", "10-calico.conflist", CALICO);
    let exclusive = exclusive(scene.path(LIST));
    let agent = Agent::start(&scene, "a", &["--health-address=127.0.0.1:0"]);
    let address = agent.address();
    agent.wait_for_log("another process keeps reverting");
    let (status, body) = get(&address, "/readyz");
    assert!(status == "503" && body.contains("10-calico.conflist") && body.contains("cni.exclusive=false"), "{body}");
    assert_eq!(scrape(&address).value("detour_install_ready", "", &[]), Some(0.0));
    // It was not ready at any time before.
    agent.wait_for_log("another process keeps reverting");
    assert!(!agent.logged().iter().any(|line| line.contains(READY)));
    drop(exclusive);
    agent.wait_for_log(READY);
    assert_eq!(get(&address, "/readyz").0, "200");
    assert!(scene.read(LIST).contains("\"detour\""));
}

#[test]
fn uninstall_warns_of_an_agent_and_removes_the_lock_of_a_killed_one() {
    let scene = Scene::with("agent-killed", "10-calico.conflist", CALICO);
    let lock = scene.path("var/lib/cni/detour/agent.lock");
    let killed = Agent::settled(&scene, "killed", &[]);
    killed.end(Signal::SIGKILL);
    let alive = Agent::settled(&scene, "alive", &[]);
    let warning = "warning: an agent on this node installs the plugin again; delete its DaemonSet";
    let warned = scene.ends(0, "uninstall", &[]);
    assert!(lock.exists() && warned.contains(warning), "{warned}");
    alive.end(Signal::SIGKILL);
    assert!(lock.exists(), "nothing could remove it");
    let warned = scene.ends(0, "uninstall", &[]);
    assert!(!lock.exists() && !warned.contains("warning"), "{warned}");
}

#[test]
fn each_refused_configuration_creates_one_event_of_the_agents_pod() {
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let api = Server::plain(move |request| {
        if request.line.starts_with("POST /api/v1/namespaces/kube-system/events") {
            let event: Value = serde_json::from_slice(&request.body).expect("JSON");
            sender.lock().expect("unpoisoned").send(event).expect("the test listens");
        }
        Answer::json(201, &json!({}))
    });
    let scene = Scene::with("agent-event", "10-calico.conflist", CALICO);
    let config = scene.path("config/config.json");
    scene.write("config/config.json", "{}");
    let arguments = [format!("--root={}", scene.root.display()), format!("--api-server={}", api.http())];
    let files = [format!("--service-account={}", scene.path("sa").display()), format!("--config={}", config.display())];
    let pod =
        [("POD_NAMESPACE", "kube-system"), ("POD_NAME", "detour-agent-x"), ("POD_UID", "uid-1"), ("HOSTNAME", "a")];
    let agent = Agent::spawn_with(&pod, &[&["agent".to_owned()], &arguments[..], &files].concat());
    agent.wait_for_log(READY);
    // Atomically, as kubelets do.
    let write = |text: &str| {
        scene.write("new.json", text);
        fs::rename(scene.path("new.json"), &config).expect("replaced");
    };
    for uid in ["x", "y", "x"] {
        write(&format!(r#"{{"chain": [{{"type": "uid-exclude", "uids": ["{uid}"]}}]}}"#));
        let event = events.recv_timeout(Duration::from_secs(60)).expect("an Event");
        assert_eq!((&event["reason"], &event["type"]), (&json!("DetourConfigurationRejected"), &json!("Warning")));
        let object = json!({"apiVersion": "v1", "kind": "Pod", "namespace": "kube-system", "name": "detour-agent-x", "uid": "uid-1"});
        assert_eq!(event["involvedObject"], object);
        let message = event["message"].as_str().expect("text");
        assert!(
            message.contains(&format!("chain[0].uids: invalid value \"{uid}\"")) && message.contains("stays in use"),
            "{message}"
        );
        // Another iteration of the agent with the same configuration.
        fs::remove_file(scene.path(PROGRAM)).expect("removed");
        agent.wait_for_log("copy this program to /opt/cni/bin/detour");
    }
    write("{}");
    agent.wait_for_log("the newest configuration is accepted");
    assert_eq!(events.try_iter().count(), 0);
}

#[test]
fn a_taint_without_a_node_name_is_a_warning() {
    let scene = Scene::with("agent-taint", "10-calico.conflist", CALICO);
    let agent = Agent::start(&scene, "a", &["--taint=detour.io/not-ready"]);
    agent.wait_for_log("--taint, --nri-socket: no effect: unknown node name; add --node-name NAME");
}
