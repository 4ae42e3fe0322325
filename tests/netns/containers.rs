//! `container-exclude`: the rules distinguish containers by their control groups, not by their UIDs.

use crate::dialect::Dialect;
use crate::example::*;
use crate::expectations::*;
use crate::support::cgroup::Cgroup;
use crate::world::*;
use detour_cni::firewall::ContainerElement;
use detour_cni::policy::ContainerScope;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::slice;
use std::thread::{self, JoinHandle};

/// The excluded container, and the beginning of an ID.
const NAME: &str = "vault-agent-init";
const ID: &str = "0123456789abcdef0123";
const WHOLE_ID: &str = "6f1b1e3a0f4f7c1c6c1d1b0a7a6d3f5e8b9c0d1e2f3a4b5c6d7e8f9a0b1c2d3e";

fn element(scope: ContainerScope, cgroup: &Cgroup) -> ContainerElement {
    ContainerElement::new(scope, cgroup.id(), NAME, ID)
}

/// Returns a configuration that redirects the pod and excludes the container in this scope.
fn excluding(world: &World, dns: Dns, scope: &str) -> Value {
    let sub_plugins = json!([
        { "type": "istio-redirect" },
        { "type": "container-exclude", "containers": [NAME], "scope": scope },
    ]);
    chain(&story(world, dns, &[]), sub_plugins)
}

/// Creates a redirected pod that excludes the container, with an element for a new control group.
fn world(dns: Dns, scope: ContainerScope, dialect: Dialect) -> (World, Cgroup) {
    let world = World::new(Families::Both);
    world.add(&dialect.of(excluding(&world, dns, &scope.to_string())));
    let cgroup = Cgroup::new();
    world.change_containers(&[], &[element(scope, &cgroup)]);
    (world, cgroup)
}

/// Asserts that all traffic of the control group bypasses the sidecar, and traffic of another one with the same UID
/// does not.
#[track_caller]
fn only_the_container_bypasses(world: &World, excluded: &Cgroup) {
    let other = Cgroup::new();
    world.within(excluded, || {
        tcp_is_direct(world, APP_PROCESS);
        dns_is_direct(world, APP_PROCESS, RESOLVER);
        a_query_leaves_one_replied_entry(world, APP_PROCESS, OTHER_RESOLVER);
    });
    world.within(&other, || {
        tcp_is_captured(world, APP_PROCESS);
        dns_is_captured(world, APP_PROCESS, RESOLVER);
    });
    tcp_is_direct(world, PROXY);
    dns_is_direct(world, PROXY, RESOLVER);
    inbound_is_captured(world);
}

#[track_caller]
fn everything_is_captured(world: &World) {
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
}

in_both_dialects! {
    fn an_excluded_container_bypasses_the_sidecar_and_another_one_with_its_uid_does_not(dialect) {
        let world = World::new(Families::Both);
        let configuration = dialect.of(excluding(&world, Dns::Captured, "all"));
        world.add(&configuration);
        let cgroup = Cgroup::new();
        world.within(&cgroup, || everything_is_captured(&world));
        let element = element(ContainerScope::All, &cgroup);
        world.change_containers(&[], slice::from_ref(&element));
        only_the_container_bypasses(&world, &cgroup);
        world.call("CHECK", &configuration).run().done();
        world.change_containers(&[element], &[]);
        world.within(&cgroup, || everything_is_captured(&world));
    }

    fn only_queries_bypass_in_scope_dns(dialect) {
        let (world, cgroup) = world(Dns::Captured, ContainerScope::Dns, dialect);
        world.within(&cgroup, || {
            tcp_is_captured(&world, APP_PROCESS);
            dns_is_direct(&world, APP_PROCESS, RESOLVER);
            a_query_leaves_one_replied_entry(&world, APP_PROCESS, OTHER_RESOLVER);
        });
        everything_is_captured(&world);
    }

    /// As for other exclusions, only DNS that would be captured bypasses over lo.
    fn over_lo_only_queries_bypass(dialect) {
        let (world, cgroup) = world(Dns::Captured, ContainerScope::All, dialect);
        let local: SocketAddr = "127.0.0.1:53".parse().expect("an address");
        let root = Process { uid: 0, gid: 0 };
        let _udp = world.pod_serves(root, "udp:127.0.0.1:53");
        let _tcp = world.pod_serves(root, "tcp:127.0.0.1:53");
        world.within(&cgroup, || {
            for protocol in [Protocol::Udp, Protocol::Tcp] {
                assert_eq!(world.pod_sends(APP_PROCESS, protocol, local), Arrival::direct(local, local.ip()));
            }
            let entries = world.datagrams_to(local);
            assert!(entries.len() == 1 && entries[0].replied, "{entries:#?}");
            loopback_is_as_istio_has_it(&world, APP_PROCESS, PROXY);
        });
        let captured = world.pod_sends(APP_PROCESS, Protocol::Udp, local);
        assert_eq!(captured, Arrival::captured_datagram(DNS_PROXY));
    }

    fn an_established_connection_survives_the_end_of_the_bypass(dialect) {
        let (world, cgroup) = world(Dns::Captured, ContainerScope::All, dialect);
        for &family in world.families() {
            let to = SERVER.at(family, HTTPS);
            let mut connection = world.within(&cgroup, || world.pod_connects(APP_PROCESS, to));
            assert_eq!(connection.send(), Arrival::direct(to, POD.ip(family)));
            let element = element(ContainerScope::All, &cgroup);
            world.change_containers(slice::from_ref(&element), &[]);
            assert_eq!(connection.send(), Arrival::direct(to, POD.ip(family)));
            world.within(&cgroup, || everything_is_captured(&world));
            world.change_containers(&[], &[element]);
        }
    }

    /// The level of a container's control group depends on the node.
    fn control_groups_at_any_level_and_their_descendants_bypass(dialect) {
        let world = World::new(Families::V4);
        world.add(&dialect.of(excluding(&world, Dns::Captured, "all")));
        let mut groups = vec![Cgroup::new()];
        while groups.len() < 13 {
            groups.push(groups[groups.len() - 1].child("below"));
        }
        for (index, cgroup) in groups.iter().enumerate().take(12) {
            let element = element(ContainerScope::All, cgroup);
            world.change_containers(&[], slice::from_ref(&element));
            for below in [index, index + 1, 12] {
                world.within(&groups[below], || tcp_is_direct(&world, APP_PROCESS));
            }
            if index > 0 {
                world.within(&groups[index - 1], || tcp_is_captured(&world, APP_PROCESS));
            }
            world.change_containers(&[element], &[]);
        }
        while groups.pop().is_some() {}
    }

    /// An element lives as long as its set: also through a second attachment, a repair, and a changed input.
    fn live_elements_survive_changes_of_the_table(dialect) {
        let (world, cgroup) = world(Dns::Captured, ContainerScope::All, dialect);
        let elements = world.containers();
        let all = dialect.of(excluding(&world, Dns::Captured, "all"));
        let sub_plugins = json!([{ "type": "container-exclude", "containers": [NAME], "scope": "dns" }]);
        let dns = dialect.of(chain(&story(&world, Dns::Captured, &[]), sub_plugins));
        world.call("ADD", &dns).interface("net2").run().done();
        let in_dns = element(ContainerScope::Dns, &cgroup);
        world.change_containers(&[], slice::from_ref(&in_dns));
        world.nft("flush chain inet detour-exclusions NAT_OUTPUT");
        world.within(&cgroup, || tcp_is_captured(&world, APP_PROCESS));
        world.add(&all);
        assert_eq!(world.containers(), [[in_dns].to_vec(), elements.clone()].concat());
        only_the_container_bypasses(&world, &cgroup);
        world.call("DEL", &dns).interface("net2").run().done();
        assert_eq!(world.containers(), elements);
        only_the_container_bypasses(&world, &cgroup);
        // Another input: fewer rules.
        world.add(&dialect.of(excluding(&world, Dns::Left, "all")));
        assert_eq!(world.containers(), elements);
        world.within(&cgroup, || tcp_is_direct(&world, APP_PROCESS));
    }

    /// The kernel counts levels from the cgroup namespace of the process that writes a rule, and the plugin enters the
    /// node's.
    fn from_a_private_cgroup_namespace_the_rules_are_right(dialect) {
        let (world, cgroup) = (World::new(Families::V4), Cgroup::new());
        let outer = Cgroup::new();
        let output = add_from(&world, &outer.child("runtime"), "", &dialect.of(excluding(&world, Dns::Captured, "all")));
        output.done();
        world.change_containers(&[], &[element(ContainerScope::All, &cgroup)]);
        only_the_container_bypasses(&world, &cgroup);
    }

    /// Process 1 is in the same private namespace, as in a container.
    fn if_the_nodes_cgroup_namespace_is_not_reachable_the_attachment_is_refused(dialect) {
        let world = World::new(Families::V4);
        let outer = Cgroup::new();
        let private = "exec unshare --cgroup";
        let configuration = dialect.of(excluding(&world, Dns::Captured, "all"));
        let output = add_from(&world, &outer.child("runtime"), private, &configuration);
        assert_eq!(output.refused().0, 102, "{}", output.stdout);
        let msg = output.stdout["msg"].as_str().expect("text");
        assert!(msg.contains("container-exclude") && msg.contains("cgroup namespace"), "{msg}");
        assert!(state(&world).is_empty(), "{:?}", state(&world));
        // Without excluded containers, the namespace does not matter.
        let configuration = dialect.of(exclude_1337(&story(&world, Dns::Captured, &[])));
        add_from(&world, &outer.child("other"), private, &configuration).done();
    }
}

/// Calls ADD from the control group `cgroup` in a new cgroup namespace. `first` is the command that runs as
/// process 1 of a PID namespace; its last argument is a shell that calls the plugin.
fn add_from(world: &World, cgroup: &Cgroup, first: &str, configuration: &Value) -> Called {
    use std::os::unix::fs::PermissionsExt;
    let (directory, plugin) = (cgroup.directory().display(), env!("CARGO_BIN_EXE_detour"));
    let text = format!(
        "#!/bin/sh\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\nexec unshare --pid --fork --mount-proc sh -c \
         'echo 0 > {directory}/cgroup.procs && {first} sh -c \"unshare --cgroup {plugin}; exit \\$?\"'\n"
    );
    let path = world.manifests(&[&text]).join("0.yaml");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it exists");
    world.call("ADD", configuration).run_as(&path)
}

/// Returns all rules of the pod as text.
fn state(world: &World) -> Vec<String> {
    let iptables = world.families().iter().map(|&family| world.iptables_save(family).to_string());
    let without_elements = |table: String| {
        let lines = table.lines().filter(|line| !line.trim_start().starts_with("elements = "));
        lines.map(|line| line.to_owned() + "\n").collect::<String>()
    };
    iptables.chain(world.native_tables().into_iter().map(without_elements)).filter(|text| !text.is_empty()).collect()
}

/// `hostUsers: false`: the network namespace belongs to another user namespace.
#[test]
fn containers_of_a_pod_with_its_own_users_are_excluded() {
    let world = World::with_own_users(Families::Both);
    world.add(&excluding(&world, Dns::Captured, "all"));
    let cgroup = Cgroup::new();
    world.change_containers(&[], &[element(ContainerScope::All, &cgroup)]);
    only_the_container_bypasses(&world, &cgroup);
}

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
    let element = |cgroup, name| ContainerElement::new(ContainerScope::All, cgroup, name, WHOLE_ID);
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

    let bypassing = json!([{"name": NAME, "id": WHOLE_ID, "cgroup": 1, "scope": "all"}]);
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
