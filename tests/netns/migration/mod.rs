//! The procedures of docs/migrate.md, step by step on a node's directories with real agents, plugins and packets.
//! istio-cni is simulated by a program that writes its rules.

mod kept;
mod node;
mod runtime;

use crate::expectations::*;
use crate::pod::{self, APP_PROCESS, PROXY, VAULT_INIT};
use crate::scene::CALICO;
use crate::world::*;
use kept::Kept;
use node::{Caller, LIST, Node};
use serde_json::Value;

/// Asserts the effect of istio-cni alone: UID 1337 is captured like any other.
#[track_caller]
fn istio_cni_redirects(world: &World) {
    redirected_once(world);
    tcp_is_captured(world, VAULT_INIT);
}

/// Asserts the effect of detour: UID 1337 bypasses the sidecar.
#[track_caller]
fn detour_redirects(world: &World) {
    redirected_once(world);
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
}

#[track_caller]
fn redirected_once(world: &World) {
    for &family in world.families() {
        let rules = world.iptables_save(family);
        let jumps = |chain: &str, to: &str| rules.chain("nat", chain).iter().filter(|rule| rule.ends_with(to)).count();
        // On OpenShift, detour's redirection is native.
        let once = usize::from(world.native_redirection().is_empty());
        assert_eq!((jumps("OUTPUT", "ISTIO_OUTPUT"), jumps("PREROUTING", "ISTIO_INBOUND")), (once, once), "{rules}");
    }
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    tcp_is_direct(world, PROXY);
    inbound_is_captured(world);
}

/// Asserts that a new pod is redirected in this way, and that running pods are not affected.
#[track_caller]
fn one_more(pods: &mut Vec<Kept>, node: &Node, is_redirected: fn(&World)) {
    let pod = Kept::new(node.new_pod());
    is_redirected(&pod.world);
    pods.push(pod);
    Kept::all_notice_nothing(pods);
}

/// With both in the configuration list, the first one redirects, and detour's exclusions precede the redirection.
#[test]
fn from_istio_cni_without_multus_and_back() {
    let node = Node::new("chained", Caller::Runtime);
    node.istio_cni_comes();
    let before = node.configurations();
    let mut pods = vec![Kept::new(node.new_pod())];
    istio_cni_redirects(&pods[0].world);

    // 2. Install detour.
    let agent = node.at_each_instant(|| node.detour_comes());
    assert_eq!(node.types(), ["istio-cni", "detour"]);
    one_more(&mut pods, &node, detour_redirects);

    // 3. Remove istio-cni.
    node.at_each_instant(|| node.istio_cni_goes());
    assert_eq!(node.types(), ["detour"]);
    one_more(&mut pods, &node, detour_redirects);
    node.delete(&pods.remove(0).world);

    // Back, 1. and 2. Remove detour on a cordoned node.
    node.detour_goes(agent);
    assert!(node.types().is_empty());
    let without_mesh: Value = serde_json::from_str(CALICO).expect("JSON");
    assert_eq!(node.scene.json(LIST), without_mesh);
    Kept::all_notice_nothing(&mut pods);

    // Back, 3. Install istio-cni.
    node.istio_cni_comes();
    assert_eq!(node.configurations(), before);
    one_more(&mut pods, &node, istio_cni_redirects);
}

#[test]
fn from_istio_cni_with_multus_and_back() {
    let node = Node::new("multus", Caller::Multus);
    let empty = node.configurations();
    node.istio_cni_comes();
    let before = node.configurations();
    let mut pods = vec![Kept::new(node.new_pod())];
    istio_cni_redirects(&pods[0].world);

    // 2. Remove istio-cni; new pods wait, because Multus finds no configuration.
    node.istio_cni_goes();
    assert!(node.types().is_empty());
    Kept::all_notice_nothing(&mut pods);

    // 3. Install detour.
    let agent = node.detour_comes();
    assert_eq!(node.types(), ["detour"]);
    one_more(&mut pods, &node, detour_redirects);
    node.delete(&pods.remove(0).world);

    // Back, 1. Remove detour.
    node.detour_goes(agent);
    assert_eq!(node.configurations(), empty);
    Kept::all_notice_nothing(&mut pods);

    // Back, 2. Install istio-cni.
    node.istio_cni_comes();
    assert_eq!(node.configurations(), before);
    one_more(&mut pods, &node, istio_cni_redirects);
}

#[test]
fn from_istio_init_and_back() {
    let node = Node::new("istio-init", Caller::Runtime);
    let before = node.configurations();
    let with_plugin = pod::manifest(true, PROXY, &[]);
    let with_istio_init = with_plugin.replace("  initContainers:\n", "  initContainers:\n  - name: istio-init\n");
    let init_container = |world: &World| {
        for &family in world.families() {
            let rules = crate::istio::rules(family, crate::istio::Dns::Captured, PROXY.uid);
            world.iptables_restore(family, &rules);
        }
    };
    // 1. Install detour; it skips pods with istio-init.
    node.injector_makes(&with_istio_init);
    let agent = node.detour_comes();
    let world = node.new_pod();
    init_container(&world);
    detour_redirects(&world);
    let mut pods = vec![Kept::new(world)];

    // 2. pilot.cni.enabled=true: new pods have no istio-init.
    node.injector_makes(&with_plugin);
    one_more(&mut pods, &node, detour_redirects);

    // Back, 1. pilot.cni.enabled=false.
    node.injector_makes(&with_istio_init);
    let world = node.new_pod();
    init_container(&world);
    detour_redirects(&world);
    pods.push(Kept::new(world));

    // Back, 2. Remove detour.
    node.detour_goes(agent);
    assert_eq!(node.configurations(), before);
    Kept::all_notice_nothing(&mut pods);
}
