//! The plugin's credentials: an administrator's kubeconfig, and an agent whose API server does not grant the plugin's
//! token, which installs and restores everything that needs no credentials.

use crate::agent_process::{Agent, READY};
use crate::own_list::{list, network, types};
use crate::scene::{CALICO, KUBECONFIG, LIST, NODE, OWN, PROGRAM, Scene, program};
use crate::server::{Answer, Server, closed_port};
use crate::support::api::kubeconfig_of;
use crate::support::health::get;
use crate::support::wait::until;
use serde_json::{Value, json};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

/// The reason for `/readyz`.
const MISSING: &str = "missing: credentials of the plugin (/var/lib/cni/detour/kubeconfig), without which pods with a \
                       sidecar wait: ";

/// A node whose API server grants tokens when `grants` is set, and does not answer before.
fn node(name: &str) -> (Scene, Server, Arc<AtomicBool>) {
    let scene = Scene::with(name, "10-calico.conflist", CALICO);
    let grants = Arc::new(AtomicBool::new(false));
    let granted = Arc::clone(&grants);
    let api = Server::plain(move |request| match granted.load(Ordering::Relaxed) {
        true if request.line.contains("/serviceaccounts/detour-plugin/token") => {
            Answer::json(201, &json!({"status": {"token": "granted", "expirationTimestamp": "2099-01-01T00:00:00Z"}}))
        }
        true => Answer::json(404, &json!({})),
        false => Answer::Hang,
    });
    (scene, api, grants)
}

/// Starts an agent that requests a token of the plugin's own account from the API server at this URL.
fn agent(scene: &Scene, api: &str, more: &[&str]) -> Agent {
    agent_with(scene, api, "--plugin-service-account=detour-plugin", more)
}

fn agent_with(scene: &Scene, api: &str, account: &str, more: &[&str]) -> Agent {
    let files =
        [format!("--root={}", scene.root.display()), format!("--service-account={}", scene.path("sa").display())];
    let api = format!("--api-server={api}");
    let own = ["agent", &files[0], &files[1], &api, account, "--health-address=127.0.0.1:0"];
    let arguments: Vec<String> = own.iter().chain(more).map(ToString::to_string).collect();
    Agent::spawn_with(&[("HOSTNAME", "a"), ("POD_NAMESPACE", "detour-system")], &arguments)
}

/// Checks that the agent installs everything but the kubeconfig, restores it and follows the cluster network's list.
fn installs_without_credentials(scene: &Scene, agent: &Agent, listed: &str) {
    let address = agent.address();
    let has_entry = || scene.path(listed).exists() && types(scene, listed).last().is_some_and(|kind| kind == "detour");
    until("the entry is in the list", has_entry);
    assert!(scene.path(PROGRAM).exists() && scene.path(NODE).exists() && !scene.path(KUBECONFIG).exists());
    agent.wait_for_log(MISSING);
    let (status, answer) = get(&address, "/readyz");
    assert!(status == "503" && answer.contains(MISSING), "{answer}");

    for file in [PROGRAM, NODE] {
        fs::remove_file(scene.path(file)).expect("there");
        until("the file is restored", || scene.path(file).exists());
    }
    // Requests of a token time out meanwhile. Each change of an edited list is a repair, which is delayed if there are many.
    for round in 0..if listed == OWN { 40 } else { 1 } {
        let name = format!("changed-{round}");
        scene.write(LIST, &list(&name));
        until("the agent follows", || has_entry() && network(scene, listed) == json!(name));
        thread::park_timeout(Duration::from_millis(200));
    }
    assert!(!scene.path(KUBECONFIG).exists() && get(&address, "/readyz").0 == "503");
}

#[test]
fn a_first_installation_does_not_wait_for_credentials() {
    for (name, flag, listed) in [("own", "--own-list=true", OWN), ("edited", "--own-list=false", LIST)] {
        let (scene, api, grants) = node(&format!("credentials-{name}"));
        let agent = agent(&scene, &api.http(), &[flag]);
        installs_without_credentials(&scene, &agent, listed);
        grants.store(true, Ordering::Relaxed);
        agent.wait_for_log(READY);
        assert_eq!(scene.json(KUBECONFIG)["users"][0]["user"]["token"], "granted");
        drop(agent);
        scene.ok("uninstall", &[]);
        assert!(!scene.path(KUBECONFIG).exists() && types(&scene, LIST).last().is_some_and(|kind| kind != "detour"));
    }
}

/// Kubernetes before 1.31 binds tokens only to pods and secrets.
#[test]
fn an_api_server_that_binds_no_token_to_a_node_grants_another_one() {
    let (scene, ..) = node("credentials-unbound");
    let api = Server::plain(|request| match &request.line {
        line if !line.contains("/serviceaccounts/detour-plugin/token") => Answer::json(404, &json!({})),
        _ if String::from_utf8_lossy(&request.body).contains("boundObjectRef") => {
            let message = "cannot bind token to object of type /v1, Kind=Node";
            Answer::json(400, &json!({"kind": "Status", "status": "Failure", "message": message}))
        }
        _ => Answer::json(201, &json!({"status": {"token": "granted", "expirationTimestamp": "2099-01-01T00:00:00Z"}})),
    });
    let agent = agent(&scene, &api.http(), &["--node-name=n"]);
    agent.wait_for_log(READY);
    assert_eq!(scene.json(KUBECONFIG)["users"][0]["user"]["token"], "granted");
}

#[test]
fn an_agent_that_gives_the_plugin_no_credentials_removes_those_of_an_earlier_one() {
    let (scene, api, grants) = node("credentials-none");
    grants.store(true, Ordering::Relaxed);
    let earlier = agent(&scene, &api.http(), &["--own-list=true"]);
    earlier.wait_for_log(READY);
    drop(earlier);
    let sources = |file: &str| scene.json(file)["kubernetes"].as_object().expect("an object").clone();
    assert!(scene.path(KUBECONFIG).exists() && sources(NODE).contains_key("kubeconfig"));
    let none = ["--own-list=true", "--node-name=n"];
    let agent = agent_with(&scene, &api.http(), "--plugin-service-account=", &none);
    agent.wait_for_log(READY);
    assert!(!scene.path(KUBECONFIG).exists() && !sources(NODE).contains_key("kubeconfig"));
    assert!(sources(NODE).contains_key("agent_socket"), "{}", scene.read(NODE));
    assert!(!scene.read(OWN).contains("detour/kubeconfig"), "{}", scene.read(OWN));
}

#[test]
fn an_agent_that_starts_without_a_kubeconfig_restores_the_own_list() {
    let (scene, api, grants) = node("credentials-restart");
    grants.store(true, Ordering::Relaxed);
    let first = agent(&scene, &api.http(), &["--own-list=true"]);
    first.wait_for_log(READY);
    drop(first);
    fs::remove_file(scene.path(KUBECONFIG)).expect("there");
    fs::remove_file(scene.path(OWN)).expect("there");
    grants.store(false, Ordering::Relaxed);
    for api in [format!("http://{}", closed_port()), api.http()] {
        let agent = agent(&scene, &api, &["--own-list=true"]);
        until("the own list is restored", || scene.path(OWN).exists());
        installs_without_credentials(&scene, &agent, OWN);
        drop(agent);
        fs::remove_file(scene.path(OWN)).expect("there");
    }
}

/// The agent's own token is not readable for a while: the plugin's kubeconfig stays as it is.
#[test]
fn a_kubeconfig_stays_while_the_agent_has_no_credentials() {
    let scene = Scene::with("credentials-lost", "10-calico.conflist", CALICO);
    let agent = Agent::start(&scene, "a", &["--own-list=true", "--health-address=127.0.0.1:0"]);
    let address = agent.address();
    agent.wait_for_log(READY);
    let kubeconfig = scene.read(KUBECONFIG);
    fs::rename(scene.path("sa/token"), scene.path("sa/elsewhere")).expect("renamed");
    agent.wait_for_log(MISSING);
    let (_, answer) = get(&address, "/readyz");
    assert!(answer.contains("sa/token"), "{answer}");
    fs::remove_file(scene.path(OWN)).expect("there");
    until("the own list is restored", || scene.path(OWN).exists());
    assert_eq!(scene.read(KUBECONFIG), kubeconfig);
    fs::rename(scene.path("sa/elsewhere"), scene.path("sa/token")).expect("renamed");
    agent.wait_for_log(READY);
    let stderr = {
        fs::remove_file(scene.path("sa/token")).expect("there");
        scene.ends(2, "install", &["--own-list=true"])
    };
    assert!(stderr.contains("can't read --service-account: "), "the command changes nothing: {stderr}");
}

#[test]
fn with_a_kubeconfig_of_the_administrator_none_is_written() {
    let scene = Scene::with("given", "10-calico.conflist", CALICO);
    scene.write("etc/kubernetes/mesh.conf", &kubeconfig(json!({"token": "t"})));
    scene.ok("install", &["--kubeconfig=/etc/kubernetes/mesh.conf"]);
    assert!(!scene.path(KUBECONFIG).exists());
    let list = scene.json(LIST);
    assert_eq!(list["plugins"][3]["kubernetes"]["kubeconfig"], "/etc/kubernetes/mesh.conf");
    // As doctor and validate do.
    let insecure =
        kubeconfig(json!({"token": "t"})).replace(r#""server""#, r#""insecure-skip-tls-verify":true,"server""#);
    scene.write("etc/kubernetes/mesh.conf", &insecure);
    let warning = "--kubeconfig /etc/kubernetes/mesh.conf: https://10.96.0.1:443: insecure-skip-tls-verify is true";
    scene.reports(0, "install", &["--kubeconfig=/etc/kubernetes/mesh.conf"], &[warning]);
}

fn kubeconfig(user: Value) -> String {
    kubeconfig_of(&json!({"server": "https://10.96.0.1:443"}), &user)
}

#[test]
fn an_unusable_kubeconfig_is_refused_from_flag_and_configuration() {
    let scene = Scene::with("kubeconfigs", "10-calico.conflist", CALICO);
    scene.write("etc/empty.conf", "");
    scene.write("etc/broken.conf", "x: [");
    scene.write("etc/no-context.conf", "{}");
    scene.write("etc/no-token.conf", &kubeconfig(json!({"tokenFile": "/etc/missing.token"})));
    scene.write("etc/token", "t");
    scene.write("etc/good.conf", &kubeconfig(json!({"tokenFile": "/etc/token"})));
    let untouched = scene.files();
    for (name, cause) in [
        ("missing", "No such file"),
        ("empty", "current-context"),
        ("broken", "invalid kubeconfig"),
        ("no-context", "current-context"),
        ("no-token", "/etc/missing.token"),
    ] {
        let path = format!("/etc/{name}.conf");
        let config = scene.config("c", &json!({"kubernetes": {"kubeconfig": path}}));
        for (arguments, place) in [
            ([format!("--kubeconfig={path}"), "--dry-run".to_owned()], "--kubeconfig "),
            ([config.clone(), "--dry-run".to_owned()], "--config: kubernetes.kubeconfig "),
            ([config.clone(), "--chained=true".to_owned()], "--config: kubernetes.kubeconfig "),
        ] {
            scene.reports(2, "install", &arguments.each_ref().map(String::as_str), &[&format!("{place}{path}"), cause]);
        }
    }
    assert_eq!(scene.files(), untouched);
    // The plugin reads files instead, or the installation writes this kubeconfig.
    for keys in [
        json!({"kubernetes": {"kubeconfig": "/etc/missing.conf", "manifests_dir": "/etc/manifests"}}),
        json!({"kubernetes": {"kubeconfig": format!("/{KUBECONFIG}")}}),
        json!({"kubernetes": {"kubeconfig": "/etc/good.conf"}}),
    ] {
        scene.ok("install", &[&scene.config("c", &keys), "--dry-run"]);
    }
    scene.ok("install", &["--kubeconfig=/etc/good.conf", "--dry-run"]);
}

/// Runs commands and an installation, which must fail, in a new mount namespace. Returns stderr.
fn after(scene: &Scene, commands: &str) -> String {
    let arguments = scene.arguments("install", &[]).join(" ");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation=private", "sh", "-e", "-c"])
        .arg(format!("cd {}; {commands}; {} {arguments}", scene.root.display(), program().display()))
        .output()
        .expect("unshare starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    stderr
}

#[test]
fn a_full_disk_or_a_read_only_directory_is_reported_and_no_configuration_changes() {
    for (commands, error, next_step) in [
        (
            "mkdir -p opt/cni/bin; mount -t tmpfs -o size=64k none opt/cni/bin",
            "can't write /opt/cni/bin/detour: No space left on device",
            "free some space",
        ),
        (
            "mount --bind etc/cni/net.d etc/cni/net.d; mount -o remount,bind,ro etc/cni/net.d",
            "can't write /etc/cni/net.d/10-calico.conflist: Read-only file system",
            "mount it writable, or select another directory",
        ),
    ] {
        let scene = Scene::with("full", "10-calico.conflist", CALICO);
        let stderr = after(&scene, commands);
        assert!(stderr.contains(error) && stderr.contains(next_step), "{stderr}");
        assert_eq!(scene.read(LIST), CALICO);
    }
}

#[test]
fn a_full_disk_leaves_no_temporary_file() {
    let scene = Scene::with("full-conf", "10-calico.conflist", CALICO);
    let fill = "mount -t tmpfs -o size=16k none etc/cni/net.d; printf '%s' '{\"name\":\"n\",\"plugins\":[{\"type\":\"a\"}]}' \
                > etc/cni/net.d/10-x.conflist; dd if=/dev/zero of=etc/cni/net.d/filler bs=1k 2>dd || true";
    let look = "trap 'ls -A etc/cni/net.d > seen' EXIT";
    let stderr = after(&scene, &format!("{fill}; {look}"));
    assert!(stderr.contains("can't write /etc/cni/net.d/10-x.conflist: No space left on device"), "{stderr}");
    assert_eq!(scene.read("seen"), "10-x.conflist\nfiller\n");
}
