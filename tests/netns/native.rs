//! The rule format `nftables`: drift and repair; pods with `hostUsers: false`; an ADD starts no process.

use crate::configuration::{exclude_1337, excludedns, istio_cni, story};
use crate::dialect::Dialect;
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod;
use crate::pod::{APP_PROCESS, PROXY, VAULT_INIT};
use crate::world::*;
use serde_json::json;
use std::io::Write;
use std::process::{Command, Stdio};

/// A rule is deleted, doubled, or preceded by another one, or its netfilter chain is flushed: one of them for each rule.
#[test]
fn check_finds_any_damage_and_add_repairs_it() {
    let world = World::new(Families::Both);
    let configuration = Dialect::Nftables.of(exclude_1337(&story(&world, Dns::Captured, &[])));
    world.add(&configuration);
    let whole = world.native_tables();
    let damages = world.native_rules().len();
    assert!(damages > 20, "{whole:?}");
    for index in 0..damages {
        let (place, handle) = world.native_rules()[index].clone();
        let damage = match index % 4 {
            0 => format!("delete rule inet {place} handle {handle}"),
            1 => format!("add rule inet {place} handle {handle} counter"),
            2 => format!("insert rule inet {place} handle {handle} meta l4proto icmp counter drop"),
            _ => format!("flush chain inet {place}"),
        };
        world.nft(&damage);
        assert_eq!(world.call("CHECK", &configuration).run().refused().0, 103, "{damage}");
        world.add(&configuration);
        assert_eq!(world.native_tables(), whole, "{damage}");
    }
    world.call("CHECK", &configuration).run().done();
}

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
    let args = format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID={}", pod::UID);
    let mut traced = Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=execve,fork,vfork,clone,clone3", "-o"])
        .args([log.as_os_str(), "-E".as_ref(), "PATH=".as_ref(), env!("CARGO_BIN_EXE_detour").as_ref()])
        .env("CNI_COMMAND", "ADD")
        .env("CNI_CONTAINERID", "processes")
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
    std::fs::remove_dir_all("/run/detour/attachments/processes").expect("its state is there");
}
