//! What the agent asks as its pod's service account.

use crate::scene::directory;
use crate::server::{Answer, Server};
use detour_cni::cluster::{ObjectRef, ServiceAccount};
use detour_cni::cni::Code;
use serde_json::json;
use std::fs;
use std::time::{Duration, Instant};

/// A service account for which `server` is the API.
fn account(test: &str, server: &Server) -> ServiceAccount {
    let directory = directory(&format!("own-{test}"));
    let authority = rcgen::generate_simple_self_signed(["api".to_owned()]).expect("a certificate");
    fs::write(directory.join("ca.crt"), authority.cert.pem()).expect("written");
    fs::write(directory.join("token"), "token").expect("written");
    ServiceAccount { server: server.http(), directory }
}

fn daemon_set() -> ObjectRef {
    ObjectRef { namespace: "kube-system".into(), name: "detour-agent".into() }
}

#[test]
fn a_daemon_set_is_missing_where_the_api_says_it_of_this_one() {
    let missing = json!({
        "kind": "Status", "status": "Failure", "message": "daemonsets.apps \"detour-agent\" not found",
        "reason": "NotFound", "details": {"name": "detour-agent", "group": "apps", "kind": "daemonsets"}, "code": 404
    });
    let server = Server::plain(move |_| Answer::json(404, &missing));
    let has = account("missing", &server).has(&daemon_set(), Duration::from_secs(10));
    assert!(!has.expect("an answer"));
    assert_eq!(server.lines(), ["GET /apis/apps/v1/namespaces/kube-system/daemonsets/detour-agent HTTP/1.1"]);
}

#[test]
fn a_server_that_knows_of_no_daemon_sets_says_nothing_of_this_one() {
    let server = Server::plain(|_| Answer::text(404, "404 page not found\n"));
    let (started, time) = (Instant::now(), Duration::from_secs(1));
    let error = account("unserved", &server).has(&daemon_set(), time).expect_err("no answer");
    assert_eq!(error.code, Code::TryAgain, "{error}");
    assert!(error.to_string().contains("DaemonSet kube-system/detour-agent"), "{error}");
    assert!(server.lines().len() > 1 && started.elapsed() < 2 * time, "{:?}", server.lines());
}
