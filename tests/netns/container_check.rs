//! CHECK compares the elements of excluded containers with the names that the policy excludes, and with the agent's
//! answer.

use crate::configuration::{chain, story};
use crate::istio::Dns;
use crate::world::*;
use detour_cni::firewall::ContainerElement;
use detour_cni::policy::ContainerScope;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::slice;
use std::thread::{self, JoinHandle};

/// The excluded container, and an ID.
const NAME: &str = "vault-agent-init";
const ID: &str = "6f1b1e3a0f4f7c1c6c1d1b0a7a6d3f5e8b9c0d1e2f3a4b5c6d7e8f9a0b1c2d3e";

fn configuration(world: &World) -> Value {
    let sub_plugins = json!([{ "type": "container-exclude", "containers": [NAME] }]);
    chain(&story(world, Dns::Left, &[]), sub_plugins)
}

/// Returns the error of CHECK; `None` if it succeeds. `socket` is that of an agent.
fn check(world: &World, socket: &Path) -> Option<Value> {
    let mut configuration = configuration(world);
    configuration["kubernetes"]["agent_socket"] = json!(socket);
    let output = world.call("CHECK", &configuration).run();
    (!output.success).then_some(output.stdout)
}

/// Serves a socket of an agent that knows these containers, for as many requests. Returns the requests.
fn agent(socket: &Path, answers: Vec<Value>) -> JoinHandle<Vec<Value>> {
    let listener = UnixListener::bind(socket).expect("a socket");
    let serve = move |answer: Value| loop {
        let (stream, _) = listener.accept().expect("a request");
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).expect("a line");
        let request: Value = serde_json::from_str(&line).expect("JSON");
        // Each call also reports its outcome.
        if request["ask"]["about"] == "containers" {
            let hello = json!({"version": "9.9.9", "facts": 999});
            let lines = format!("{hello}\n{}\n", json!({"answer": "containers", "expected": answer}));
            (&stream).write_all(lines.as_bytes()).expect("it reads");
            return request;
        }
    };
    thread::spawn(move || answers.into_iter().map(serve).collect())
}

#[test]
fn check_reports_elements_that_no_excluded_container_explains() {
    let world = World::new(Families::V4);
    world.add(&configuration(&world));
    let socket: PathBuf = std::env::temp_dir().join(format!("{}.sock", world.name));
    assert_eq!(check(&world, &socket), None);
    let element = |cgroup, name| ContainerElement::new(ContainerScope::All, cgroup, name, ID);
    let [vault, app] = [element(1, NAME), element(2, "app")];
    world.change_containers(&[], slice::from_ref(&vault));
    assert_eq!(check(&world, &socket), None, "without an agent, the running containers are unknown");
    world.change_containers(&[], slice::from_ref(&app));
    let error = check(&world, &socket).expect("drift");
    assert_eq!(error["code"], 103, "{error}");
    let details = "unexpected: control group 2 in the set \"excluded-all\" of container \"app\": it is not excluded, or its \
                   bypass has ended";
    assert_eq!(error["details"], details);
    world.change_containers(&[app], &[]);

    let bypassing = json!([{"name": NAME, "id": ID, "cgroup": 1, "scope": "all"}]);
    let served = agent(&socket, vec![bypassing, json!(null), json!([]), json!([])]);
    assert_eq!(check(&world, &socket), None);
    assert_eq!(check(&world, &socket), None, "an agent that can't say is no error");
    // The second answer decides: a container may start or exit during the first comparison.
    let error = check(&world, &socket).expect("drift");
    assert!(
        error["details"].as_str().expect("text").contains(&format!("{NAME:?}: it is not excluded, or its bypass")),
        "{error}"
    );
    let requests = served.join().expect("no panic");
    assert!(requests.iter().all(|request| request["ask"]["container"] == json!(world.name)), "{requests:?}");
    std::fs::remove_file(socket).expect("removed");
}
