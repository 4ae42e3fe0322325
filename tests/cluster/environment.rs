//! Environment variables that the plugin inherits from the runtime and must ignore. The test runs in child processes,
//! because a process can't change its environment safely.

use crate::scene::{facts_by, has_both, kubeconfig, status};
use crate::server::Server;
use serde_json::json;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The path of the kubeconfig for the child process.
const KUBECONFIG: &str = "TEST_KUBECONFIG";

#[test]
fn proxy_variables_and_kubeconfig_are_ignored_and_no_thread_is_started() {
    if let Some(path) = env::var_os(KUBECONFIG) {
        let before = threads();
        facts_by(Path::new(&path)).expect("facts");
        assert_eq!(threads(), before);
        return;
    }
    let server = Server::plain(has_both);
    let proxy = Server::plain(|_| status(502, "a proxy"));
    let path = kubeconfig("environment", &json!({"server": server.http()}), &json!({}));
    for (variable, value) in [
        ("HTTPS_PROXY", proxy.http()),
        ("HTTPS_PROXY", "not a URL".to_owned()),
        ("HTTP_PROXY", proxy.http()),
        ("ALL_PROXY", proxy.http()),
        ("https_proxy", proxy.http()),
        ("http_proxy", proxy.http()),
        ("all_proxy", proxy.http()),
        ("NO_PROXY", "[::1".to_owned()),
        ("KUBECONFIG", "/absent".to_owned()),
    ] {
        let test = "environment::proxy_variables_and_kubeconfig_are_ignored_and_no_thread_is_started";
        let child = Command::new(env::current_exe().expect("this test"))
            .args(["--exact", test, "--nocapture"])
            .env(KUBECONFIG, &path)
            .env(variable, &value)
            .output()
            .expect("a child");
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{variable}={value}: {output}");
    }
    assert_eq!(proxy.connections(), 0);
    assert_eq!(server.requests().len(), 18);
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").expect("procfs").count()
}
