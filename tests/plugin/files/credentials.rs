//! Kubeconfigs and the tokens, certificates and keys that they name. A user who can change one of them controls which
//! file root reads and where it is sent. FIFOs in place of files are an error at once: an ordinary open would wait.

use crate::files::node::{Node, OTHER, call, complaint, detour, give_away, printed, refusal, succeeds};
use serde_json::{Value, json};
use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::process::Command;

/// A server that must not receive a request.
struct Silence(TcpListener);

impl Silence {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("set");
        Self(listener)
    }

    fn url(&self) -> String {
        format!("http://{}", self.0.local_addr().expect("an address"))
    }

    #[track_caller]
    fn expect_no_connection(&self) {
        assert_eq!(self.0.accept().expect_err("no connection").kind(), ErrorKind::WouldBlock);
    }
}

fn add(kubeconfig: &Path) -> (u64, String) {
    refusal(&call("ADD", &json!({"kubernetes": {"kubeconfig": kubeconfig, "timeout_seconds": 2}})))
}

#[test]
fn a_kubeconfig_that_another_user_can_change_is_refused_before_a_request() {
    type Change = fn(&Node, &Path);
    let changes: [(&str, Change); 6] = [
        ("chown root:root", |_, file| give_away(file)),
        ("chmod go-w", |_, file| fs::set_permissions(file, Permissions::from_mode(0o602)).expect("set")),
        ("chmod go-w", |_, file| {
            chown(file, None, Some(OTHER)).expect("needs root");
            fs::set_permissions(file, Permissions::from_mode(0o660)).expect("set");
        }),
        ("chown root:root", |node, _| give_away(&node.path("deep"))),
        ("chmod go-w", |node, _| {
            fs::set_permissions(node.path("deep"), Permissions::from_mode(0o777)).expect("set");
        }),
        ("chown root:root", |node, file| {
            fs::rename(file, node.path("target")).expect("moved");
            symlink(node.path("target"), file).expect("linked");
            lchown(file, Some(OTHER), None).expect("needs root");
        }),
    ];
    for (number, (fix, change)) in changes.into_iter().enumerate() {
        let (node, server) = (Node::new(), Silence::new());
        let secret = node.file("secret", "root-only");
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).expect("set");
        let file = node.kubeconfig("deep/kubeconfig", &server.url(), json!({}), &json!({"tokenFile": secret}));
        change(&node, &file);
        let (code, message) = add(&file);
        assert_eq!(code, 7, "{number}: {message}");
        assert!(message.contains(&format!("kubeconfig {} is not used: ", file.display())), "{number}: {message}");
        assert!(message.contains(fix), "{number}: {message}");
        server.expect_no_connection();
    }
}

#[test]
fn files_that_the_kubeconfig_names_are_checked_too() {
    const PEM: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let rows = ["certificate-authority", "tokenFile", "client-certificate", "client-key"];
    for key in rows {
        let (node, server) = (Node::new(), Silence::new());
        let foreign = node.of_another("foreign", PEM);
        let mut cluster = json!({});
        let mut user = json!({});
        match key {
            "certificate-authority" => cluster[key] = json!(foreign),
            "tokenFile" => user[key] = json!(foreign),
            _ => {
                let own = node.file("own", PEM);
                user = json!({"client-certificate": own, "client-key": own});
                user[key] = json!(foreign);
            }
        }
        let file = node.kubeconfig("kubeconfig", &server.url(), cluster, &user);
        let (code, message) = add(&file);
        assert_eq!(code, 7, "{key}: {message}");
        let wanted = format!("{key}: {0} is not used: {0} is owned by UID {OTHER}", foreign.display());
        assert!(message.contains(&wanted), "{message}");
        server.expect_no_connection();
    }
}

#[test]
fn manifests_that_another_user_can_change_are_refused() {
    for within in ["", "pod.yaml"] {
        let node = Node::new();
        node.file("manifests/pod.yaml", "kind: Pod\nmetadata: {name: web-0, namespace: shop}\n");
        give_away(&node.path(&format!("manifests/{within}")));
        let (code, message) = refusal(&call("ADD", &json!({"kubernetes": {"manifests_dir": node.path("manifests")}})));
        assert_eq!(code, 7, "{message}");
        assert!(message.contains("chown root:root"), "{message}");
    }
}

#[test]
fn commands_check_the_kubeconfig_of_a_configuration_as_the_plugin_does() {
    let (node, server) = (Node::new(), Silence::new());
    let file = node.kubeconfig("kubeconfig", &server.url(), json!({}), &json!({"token": "t"}));
    give_away(&file);
    let conf = json!({"name": "n", "type": "detour", "kubernetes": {"kubeconfig": file}});
    let conf = node.file("conf", conf.to_string());
    let message = complaint(&detour(&["explain", "-n", "shop", "web-0", "--config", conf.to_str().expect("text")]));
    assert!(message.contains("is not used: ") && message.contains("chown root:root"), "{message}");
    server.expect_no_connection();
}

#[test]
fn installation_accepts_only_credentials_of_root() {
    let node = Node::new();
    for name in ["sa/token", "sa/ca.crt"] {
        node.of_another(name, "-----BEGIN CERTIFICATE-----\n");
        let message = complaint(&node.install(&[]));
        assert!(message.contains(name) && message.contains("chown root:root"), "{message}");
        assert!(!node.path("host/var").exists(), "nothing is written");
        fs::remove_file(node.path(name)).expect("removed");
    }
    let kubeconfig = node.of_another("host/var/lib/cni/detour/kubeconfig", "{}");
    let message = complaint(&node.install(&["--platform=openshift"]));
    assert!(message.contains("kubeconfig: it belongs to another owner"), "{message}");
    fs::remove_file(&kubeconfig).expect("removed");
    // The owner of the installed file is changed.
    for _ in 0..2 {
        succeeds(&node.install(&["--platform=openshift"]));
        assert_eq!(fs::metadata(&kubeconfig).expect("there").uid(), 0);
        let installed: Value = serde_json::from_slice(&fs::read(&kubeconfig).expect("read")).expect("JSON");
        assert_eq!(installed["users"][0]["user"]["token"], "token");
        give_away(&kubeconfig);
    }
}

const FIFO: &str = "expected a regular file, got a FIFO";

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

#[test]
fn the_plugin_does_not_wait_for_fifos() {
    let node = Node::new();
    let fifo = node.fifo("fifo");
    let by_user = |user: Value| {
        let file = node.kubeconfig("kubeconfig", "http://192.0.2.1", json!({}), &user);
        json!({"kubernetes": {"kubeconfig": file}})
    };
    node.fifo("manifests/pod.yaml");
    node.fifo("net.d/net.conf");
    let primary = |network: Value| json!({"clusterNetwork": network, "confDir": node.path("net.d"), "cniDir": node.path("state")});
    for (conf, wanted) in [
        (json!({"kubernetes": {"kubeconfig": fifo}}), 5),
        (by_user(json!({"tokenFile": fifo})), 7),
        (by_user(json!({"client-certificate": fifo, "client-key": fifo})), 7),
        (json!({"kubernetes": {"manifests_dir": node.path("manifests")}}), 7),
        (primary(json!(node.path("net.d/net.conf"))), 5),
        (primary("net".into()), 7),
    ] {
        let (code, message) = refusal(&call("ADD", &conf));
        assert_eq!(code, wanted, "{message}");
        assert!(message.contains(FIFO), "{message}");
    }
    let file = node.kubeconfig("kubeconfig", "https://192.0.2.1", json!({"certificate-authority": fifo}), &json!({}));
    let (code, message) = refusal(&call("ADD", &json!({"kubernetes": {"kubeconfig": file}})));
    assert!(code == 7 && message.contains("certificate-authority") && message.contains(FIFO), "{message}");
    node.fifo("state/files-test/n@net1.json");
    let message = printed(&call("DEL", &primary("net".into())));
    assert!(message.contains("n@net1.json") && message.contains(FIFO), "{message}");
}

#[test]
fn install_does_not_wait_for_fifos() {
    const STATE: &str = "host/var/lib/cni/detour";
    for name in ["install.json", "install.lock"] {
        let node = Node::new();
        node.fifo(&format!("{STATE}/{name}"));
        let message = complaint(&node.install(&["--platform=openshift"]));
        assert!(message.contains(name) && message.contains(FIFO), "{message}");
    }
    for name in ["sa/token", "sa/ca.crt"] {
        let node = Node::new();
        node.fifo(name);
        let message = complaint(&node.install(&[]));
        assert!(message.contains(name) && message.contains(FIFO), "{message}");
    }
    let node = Node::new();
    let config = format!("--config={}", node.fifo("config").display());
    let message = complaint(&node.install(&[&config]));
    assert!(message.contains("--config") && message.contains(FIFO), "{message}");
    // Runtimes and the installation skip entries that are not regular files.
    let node = Node::new();
    node.fifo("host/etc/cni/net.d/00-fifo.conflist");
    node.file("host/etc/cni/net.d/10-net.conflist", r#"{"name":"n","plugins":[{"type":"a"}]}"#);
    succeeds(&node.install(&["--chained=true"]));
    assert!(fs::read_to_string(node.path("host/etc/cni/net.d/10-net.conflist")).expect("read").contains("detour"));
}

#[test]
fn doctor_does_not_wait_for_fifos() {
    let node = Node::new();
    for within in
        ["etc/cni/net.d/00-a.conf", "var/lib/cni/detour/install.json", "var/lib/cni/results/r", "etc/hostname"]
    {
        node.fifo(&format!("host/{within}"));
    }
    node.fifo("host/run/detour/attachments/c/n@net1.json");
    let output = detour(&["doctor", "--root", text(&node.path("host")), "--conf=/etc/cni/net.d"]);
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.code() == Some(1) && report.contains(FIFO), "{output:?}");
}

/// Only here a pipe can be intended.
#[test]
fn explain_reads_a_pipe_that_is_an_argument() {
    let node = Node::new();
    let pod = node.file("pod.yaml", "kind: Pod\nmetadata: {name: web-0, namespace: shop}\nspec: {containers: []}\n");
    let script = format!("\"$0\" explain -f <(cat {})", text(&pod));
    let output = Command::new("bash").args(["-c", &script, env!("CARGO_BIN_EXE_detour")]).output().expect("bash");
    succeeds(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("shop/web-0"), "{output:?}");
}

/// conf/README.md has the limits of all files.
#[test]
fn the_error_for_a_file_that_is_too_large_has_the_limit() {
    let node = Node::new();
    for (file, limit, key, path, expected) in [
        ("kubeconfig", 1 << 20, "kubeconfig", "kubeconfig", 5),
        ("manifests/pod.yaml", 4 << 20, "manifests_dir", "manifests", 7),
    ] {
        let file = File::options().write(true).open(node.file(file, "")).expect("opened");
        file.set_len(limit + 1).expect("grown");
        let (code, message) = refusal(&call("ADD", &json!({"kubernetes": {key: node.path(path)}})));
        let part = format!("expected at most {limit} bytes, got more");
        assert!(code == expected && message.contains(&part), "{code} {message}");
    }
}
