//! IPv6 addresses that are added after ADD: CHECK reports them, and a second ADD redirects them.

use crate::configuration::{chain, story};
use crate::expectations::tcp_is_direct;
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, PROXY};
use crate::world::*;
use serde_json::{Value, json};

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
    world.iptables_restore(Family::V6, &crate::istio::rules(Family::V6, Dns::Left, PROXY.uid));
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
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !world.ip(&["addr", "show", "dev", "eth0"]).contains("dadfailed") {
        assert!(std::time::Instant::now() < deadline, "the kernel finds no duplicate");
        std::thread::yield_now();
    }
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
