//! The plugin's own token: renewed, and reused while the API server is down.

use crate::node::{NAME, SETTLED, meshed_pod, on_a_node};
use crate::shipped::{NAMESPACE, base, chart, cluster, cluster_with};
use crate::support::health::get;
use crate::support::netns_pod::Pod;
use detour_cni::cluster::Token;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

#[test]
fn the_plugin_works_with_a_token_of_its_own() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &base("kubernetes"), |node| {
        let agent = node.start_agent("a");
        agent.wait_for_log(SETTLED);
        let token = Token::of_account(&node.plugin_token(), NAMESPACE, "detour-plugin").expect("the plugin's");
        let minutes = (token.expires.as_second() - Timestamp::now().as_second()) / 60;
        assert!((58..=60).contains(&minutes), "{minutes}");

        let sandbox = Pod::new();
        node.call("ADD", &sandbox, &pod).expect("added");
        assert!(sandbox.redirects());

        // The agent's own token becomes invalid with its pod.
        let (status, _) = agent.ended();
        assert!(status.success());
        let another = Pod::new();
        node.call("ADD", &another, &pod).expect("it works without an agent");
        node.call("DEL", &another, &pod).expect("deleted");
        node.call("DEL", &sandbox, &pod).expect("deleted");
        assert!(!sandbox.redirects());

        let plugin = plane.with_token(&node.plugin_token());
        admin.delete(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME}})).expect("deleted");
        // The API server remembers for some seconds that the token is valid.
        plane.until(|| plugin.get(&pod).is_err_and(|refused| refused.code == 401));
    });
}

#[test]
fn without_credentials_the_plugin_works_while_an_agent_runs() {
    let objects = chart(&["cni.credentials=false"]);
    let plane = cluster_with(&objects);
    let pod = meshed_pod(&plane.admin(), "web-0");
    on_a_node(&plane, &objects, |node| {
        let (first, second) = (Pod::new(), Pod::new());
        let start = || {
            let agent = node.start_agent("a");
            agent.wait_for_logs(&["watching pods", "watching namespaces", SETTLED]);
            agent
        };
        let agent = start();
        assert!(node.files().iter().all(|file| !file.contains("kubeconfig")), "{:?}", node.files());
        node.call("ADD", &first, &pod).expect("the agent answers");
        assert!(first.redirects() && agent.ended().0.success());
        let failed = node.call("ADD", &second, &pod).expect_err("no agent");
        let msg = failed["msg"].as_str().expect("text");
        assert!(
            failed["code"] == 11 && msg.contains("no facts from the agent; check that the agent's pod"),
            "{failed}"
        );
        assert!(!second.redirects());
        node.call("DEL", &first, &pod).expect("DEL needs no facts");
        let _agent = start();
        node.call("ADD", &second, &pod).expect("the agent answers again");
        assert!(second.redirects());
    });
    let account = json!({
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": NAMESPACE, "name": "detour-plugin"},
    });
    assert_eq!(plane.admin().get(&account).expect_err("not created").code, 404);
}

#[test]
fn while_the_api_server_is_down_the_token_on_the_node_stays() {
    let plane = cluster();
    let admin = plane.admin();
    let pod = meshed_pod(&admin, "web-0");
    on_a_node(&plane, &base("kubernetes"), |node| {
        let agent = node.start_agent("a");
        agent.wait_for_log(SETTLED);
        let token = node.plugin_token();
        plane.kill_api();
        drop(agent);

        // An agent that starts now reuses the token.
        let started = node.start_agent("b");
        let serving = started.wait_for_log("serving /healthz");
        // The request runs in the background.
        let subject = "ServiceAccount kube-system/detour-plugin: POST https://127.0.0.1:";
        let logged = started.wait_for_logs(&["the plugin keeps the token that it has", SETTLED]);
        assert!(logged.iter().any(|line| line.contains(subject)), "{logged:?}");
        assert_eq!(node.plugin_token(), token);
        let (_, port) = serving.rsplit_once(':').expect("an address");
        let metrics = get(&format!("[::1]:{}", port.trim()), "/metrics").1;
        assert!(metrics.contains("\ndetour_plugin_token_renewal_failed 1\n"), "{metrics}");
        let sandbox = Pod::new();
        let refused = node.call("ADD", &sandbox, &pod).expect_err("neither agent nor API server answers");
        assert_eq!(refused["code"], 11, "{refused}");

        plane.start_api();
        node.call("ADD", &sandbox, &pod).expect("added");
        assert!(sandbox.redirects());
    });
}
