//! The redirection in each rule format, as packets and iptables-save see it; late IPv6 addresses; an ADD starts no process.
//! `tests/rules` compares committed rules with those that the tools write, and `tests/convergence` has drift.

use crate::dialect::Dialect;
use crate::example::*;
use crate::expectations::*;
use crate::support::wait::until;
use crate::world::*;
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Stdio};

/// A pod keeps the rule format of its redirection: `auto` uses the live one, and an ADD that requires the other one fails.
/// Exclusions have no rule format.
#[test]
fn rule_formats_are_never_mixed() {
    for (first, other) in [(Dialect::Iptables, Dialect::Nftables), (Dialect::Nftables, Dialect::Iptables)] {
        let world = World::new(Families::Both);
        let manifests = story(&world, Dns::Captured, &[]);
        world.add(&first.of(exclude_1337(&manifests)));
        let before = (world.native_tables(), world.iptables_save(Family::V4));
        let output = world.call("ADD", &other.of(istio_cni(&manifests))).interface("net2").run();
        assert_eq!(output.refused().0, 7);
        assert_eq!((world.native_tables(), world.iptables_save(Family::V4)), before);
        world.call("ADD", &other.of(excludedns())).interface("net2").run().done();
        world.call("ADD", &istio_cni(&manifests)).interface("net3").run().done();
        assert_eq!((world.native_tables(), world.iptables_save(Family::V4)), before);
        assert_eq!(world.native_redirection().is_empty(), first == Dialect::Iptables);
        assert_eq!(world.iptables_save(Family::V4).is_empty(), first == Dialect::Nftables);
    }
}

/// UIDs are those inside the pod, as in its manifest.
#[test]
fn auto_selects_nftables_and_traffic_is_redirected_correctly() {
    let world = World::with_own_users(Families::Both);
    let configuration = exclude_1337(&story(&world, Dns::Captured, &[]));
    world.add(&configuration);
    assert!(!world.native_redirection().is_empty());
    assert!(world.families().iter().all(|&family| world.iptables_save(family).is_empty()));
    tcp_is_captured(&world, APP_PROCESS);
    dns_is_captured(&world, APP_PROCESS, RESOLVER);
    tcp_is_direct(&world, PROXY);
    dns_is_direct(&world, PROXY, RESOLVER);
    tcp_is_direct(&world, VAULT_INIT);
    inbound_is_captured(&world);
    loopback_is_as_istio_has_it(&world, APP_PROCESS, PROXY);
    a_query_leaves_one_replied_entry(&world, VAULT_INIT, OTHER_RESOLVER);
    world.call("CHECK", &configuration).run().done();
    world.add(&configuration);
    world.call("DEL", &configuration).run().done();
    assert!(world.native_tables().is_empty());
}

#[test]
fn dialect_iptables_is_refused_with_a_hint() {
    let world = World::with_own_users(Families::V4);
    let mut configuration = exclude_1337(&story(&world, Dns::Captured, &[]));
    configuration["dialect"] = json!("iptables");
    let output = world.call("ADD", &configuration).run();
    assert_eq!(output.refused().0, 102);
    assert!(output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("nftables")), "{}", output.stdout);
    configuration["dialect"] = json!("nftables");
    world.add(&configuration);
    tcp_is_direct(&world, VAULT_INIT);
}

#[test]
fn add_starts_no_process_and_no_thread() {
    let world = World::new(Families::Both);
    let configuration = exclude_1337(&story(&world, Dns::Captured, &[]));
    let log = std::env::temp_dir().join(format!("detour-processes-{}", std::process::id()));
    let args = format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID={}", UID);
    let mut traced = Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=execve,fork,vfork,clone,clone3", "-o"])
        .args([log.as_os_str(), "-E".as_ref(), "PATH=".as_ref(), env!("CARGO_BIN_EXE_detour").as_ref()])
        .env("CNI_COMMAND", "ADD")
        .env("CNI_CONTAINERID", &world.name)
        .env("CNI_NETNS", world.netns())
        .env("CNI_IFNAME", "net1")
        .env("CNI_PATH", "/nowhere")
        .env("CNI_ARGS", args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("strace is there");
    traced.stdin.take().expect("a pipe").write_all(configuration.to_string().as_bytes()).expect("writable");
    assert!(traced.wait().expect("it ends").success());
    assert!(!world.iptables_save(Family::V4).is_empty());
    let calls = std::fs::read_to_string(&log).expect("written");
    std::fs::remove_file(&log).expect("removable");
    let (started, threads): (Vec<_>, Vec<_>) = calls.lines().partition(|line| !line.contains("CLONE_THREAD"));
    let started: Vec<_> = started.into_iter().filter(|line| line.contains('(')).collect();
    assert_eq!(started.len(), 1, "only the plugin itself: {started:#?}");
    assert!(started[0].contains("execve") && threads.is_empty(), "{calls}");
    std::fs::remove_dir_all(format!("/run/detour/attachments/{}", world.name)).expect("its state is there");
}

/// Exclusions are not in the tables of iptables: these look as if istio-cni had made them.
#[test]
fn rules_equal_those_of_istio_cni() {
    let default = Process { uid: DEFAULT_OWNER, gid: DEFAULT_OWNER };
    for (families, dns, proxy, excludes) in [
        (Families::Both, Dns::Left, default, false),
        (Families::Both, Dns::Captured, PROXY, false),
        (Families::V4, Dns::Captured, PROXY, false),
        (Families::Both, Dns::Captured, PROXY, true),
    ] {
        let world = World::new(families);
        let manifests = world.manifests(&[NAMESPACE, &manifest(dns == Dns::Captured, proxy, &[])]);
        world.add(&if excludes { exclude_1337(&manifests) } else { istio_cni(&manifests) });
        for family in Family::BOTH {
            let has = world.families().contains(&family);
            let expected = if has { ruleset(family, dns, proxy.uid) } else { Ruleset::default() };
            assert_eq!(world.iptables_save(family), expected, "{families:?} {dns:?} {excludes} {family:?}");
        }
        let excluded = |table: &String| table.contains("meta skuid 1337 counter goto DETOUR_DIRECT");
        assert_eq!(world.native_tables().iter().map(excluded).collect::<Vec<_>>(), vec![true; usize::from(excludes)]);
    }
}

/// Creates a world whose pod has no IPv6 address, but a route for it.
fn without_ip6() -> World {
    let world = World::new(Families::Both);
    world.ip(&["-6", "addr", "del", "fd88::2/64", "dev", "eth0"]);
    world
}

fn with_ip6(world: &World, flags: &[&str]) {
    let address = ["-6", "addr", "add", "fd88::2/64", "dev", "eth0"];
    world.ip(&[&address[..], flags].concat());
    world.ip(&["-6", "route", "replace", "default", "via", "fd88::1"]);
}

fn redirect(world: &World, settings: Value, dialect: &str) -> Value {
    let mut block = json!({ "type": "istio-redirect" });
    block.as_object_mut().expect("an object").extend(settings.as_object().expect("an object").clone());
    let mut configuration = chain(&story(world, Dns::Left, &[]), json!([block]));
    configuration["dialect"] = dialect.into();
    configuration
}

#[track_caller]
fn check_is_fine(world: &World, configuration: &Value) {
    world.call("CHECK", configuration).run().done();
}

#[track_caller]
fn check_says(world: &World, configuration: &Value, expected: &str) {
    let output = world.call("CHECK", configuration).run();
    assert_eq!(output.refused().0, 103);
    let details = output.stdout["details"].as_str().expect("text");
    assert!(details.contains(expected), "{details}");
}

#[test]
fn an_address_after_add_is_found_by_check_and_redirected_by_a_second_add() {
    for dialect in ["iptables", "nftables"] {
        let world = without_ip6();
        let configuration = redirect(&world, json!({}), dialect);
        world.add(&configuration);
        check_is_fine(&world, &configuration);
        with_ip6(&world, &["nodad"]);
        let server = SERVER.at(Family::V6, HTTPS);
        let send = || world.pod_sends(APP_PROCESS, Protocol::Tcp, server);
        assert_eq!(send(), Arrival::direct(server, POD.ip(Family::V6)), "{dialect}");
        let expected = "missing: rules for IPv6: address fd88::2 on interface \"eth0\" appeared after ADD: its traffic \
                        bypasses the sidecar; enable the agent's repair, repeat the ADD, or recreate the pod";
        check_says(&world, &configuration, expected);
        world.add(&configuration);
        check_is_fine(&world, &configuration);
        assert_eq!(send(), Arrival::captured(OUTBOUND, server), "{dialect}");
        assert_eq!(
            world.outside_sends(Protocol::Tcp, POD.at(Family::V6, APP)),
            Arrival::captured(INBOUND, POD.at(Family::V6, APP)),
            "{dialect}"
        );
        // The redirection stays, even if the address does not.
        world.ip(&["-6", "addr", "del", "fd88::2/64", "dev", "eth0"]);
        check_is_fine(&world, &configuration);
    }
}

#[test]
fn exclusions_without_a_redirection_apply_to_both_families() {
    let world = without_ip6();
    let configuration =
        chain(&story(&world, Dns::Left, &[]), json!([{ "type": "uid-exclude", "uids": [APP_PROCESS.uid] }]));
    world.add(&configuration);
    with_ip6(&world, &["nodad"]);
    check_is_fine(&world, &configuration);
    world.iptables_restore(Family::V6, &rules(Family::V6, Dns::Left, PROXY.uid));
    tcp_is_direct(&world, APP_PROCESS);
}

#[test]
fn a_tentative_address_counts_and_a_duplicate_does_not() {
    let world = without_ip6();
    let configuration = redirect(&world, json!({}), "auto");
    world.add(&configuration);
    world.ip(&["link", "add", "data0", "type", "veth", "peer", "name", "far"]);
    world.ip(&["link", "set", "far", "up"]);
    // Without a carrier, the address stays tentative.
    world.ip(&["addr", "add", "fd77::2/64", "dev", "data0"]);
    assert!(world.ip(&["addr", "show", "dev", "data0"]).contains("tentative"));
    check_says(&world, &configuration, "address fd77::2 on interface \"data0\"");
    world.ip(&["addr", "del", "fd77::2/64", "dev", "data0"]);
    check_is_fine(&world, &configuration);
    // The outside has this address already, on the same link.
    with_ip6(&world, &[]);
    world.ip(&["-6", "addr", "del", "fd88::2/64", "dev", "eth0"]);
    world.ip(&["-6", "addr", "add", "fd88::1/64", "dev", "eth0"]);
    until("the kernel finds the duplicate", || world.ip(&["addr", "show", "dev", "eth0"]).contains("dadfailed"));
    check_is_fine(&world, &configuration);
}

#[test]
fn ipv6_that_is_deliberately_not_captured_is_no_drift() {
    let rows = [
        (json!({}), "fe80::7/64", "eth0"),
        (json!({}), "fd77::2/64", "lo"),
        (json!({ "enable_ipv6": false }), "fd77::2/64", "eth0"),
        (json!({ "exclude_interfaces": ["data0"] }), "fd77::2/64", "data0"),
        (json!({ "capture_secondary_networks": false }), "fd77::2/64", "data0"),
    ];
    for (settings, address, interface) in rows {
        let world = without_ip6();
        let configuration = redirect(&world, settings.clone(), "auto");
        world.add(&configuration);
        world.ip(&["link", "add", "data0", "type", "veth", "peer", "name", "far"]);
        world.ip(&["addr", "add", address, "dev", interface, "nodad"]);
        let output = world.call("CHECK", &configuration).run();
        assert!(output.success, "{settings} {address} {interface}: {}", output.stdout);
    }
}
