//! Executables in a sub-plugin chain: their order, input and result; reference plugins; the pod's default route, with plugins
//! that run plain `ip route add default`. The unit tests of `src/delegate` have the faults of executables.

use crate::delegates::pod::{Pod, call, conf, with};
use crate::delegates::recorders::{add_prints, fails};
use crate::node::Node;
use crate::recorders::Recorders;
use nix::unistd::{Uid, chown};
use serde_json::{Value, json};
use std::path::Path;

fn result(address: &str) -> Value {
    json!({"cniVersion": "1.0.0", "ips": [{"address": address}]})
}

fn chain() -> [Value; 2] {
    [json!({"type": "first", "own": {"a": [1, null]}}), json!({"type": "second"})]
}

#[test]
fn an_executable_inherits_environment_and_namespace() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let pod = Pod::new();
    let mut environment = pod.environment("ADD", "/nonexistent:/opt/cni/bin");
    environment.insert("TRACEPARENT".to_owned(), "00-1".to_owned());
    let conf = with(conf("1.0.0", &chain()), &json!({"kubernetes": {"cni_bin_dir": recorders.bin()}}));
    // With a pod's name but without a source of facts, the sub-plugins use the configuration only.
    assert!(call(&environment, &conf).success);
    let path = format!("{}:/nonexistent:/opt/cni/bin", recorders.bin().display());
    environment.insert("CNI_PATH".to_owned(), path);
    let host = std::fs::read_link("/proc/self/ns/net").expect("exists").display().to_string();
    for mut seen in recorders.seen() {
        // The shell sets these.
        ["PWD", "SHLVL", "_", "OLDPWD"].iter().for_each(|name| drop(seen.environment.remove(*name)));
        assert_eq!((&seen.environment, &seen.netns), (&environment, &host));
    }
}

#[test]
fn del_runs_executables_in_reverse_order_before_it_removes_the_rules() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let pod = Pod::new();
    for (version, known) in [("0.3.1", false), ("1.0.0", true)] {
        let conf = conf(version, &chain());
        assert!(pod.call("ADD", &recorders.bin(), &conf).success);
        let previous = json!({"cniVersion": version});
        assert!(pod.call("DEL", &recorders.bin(), &with(conf, &json!({"prevResult": previous}))).success);
        let seen = recorders.seen();
        let [.., second, first] = &seen[..] else { panic!("{seen:?}") };
        assert_eq!([&second.kind, &first.kind], ["second", "first"]);
        for seen in [first, second] {
            assert_eq!(seen.command, "DEL");
            assert_eq!(seen.stdin.get("prevResult"), known.then_some(&previous));
        }
        assert_eq!(pod.rules(), [""; 0]);
    }
}

/// The kernel gives the identity of a namespace that is gone to a new one, here with the path of the old one.
#[test]
fn a_late_del_of_an_earlier_pod_passes_no_network_namespace_to_executables() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let (pod, conf) = (Pod::new(), conf("1.0.0", &chain()));
    assert!(pod.call("ADD", &recorders.bin(), &conf).success);
    let rules = pod.rules();
    let state = Path::new("/run/detour/attachments");
    let earlier = format!("{}-earlier", pod.name);
    std::fs::create_dir(state.join(&earlier)).expect("writable");
    for file in std::fs::read_dir(state.join(&pod.name)).expect("saved").flatten() {
        std::fs::copy(file.path(), state.join(&earlier).join(file.file_name())).expect("copied");
    }
    let mut environment = pod.environment("DEL", &recorders.bin().display().to_string());
    environment.insert("CNI_CONTAINERID".to_owned(), earlier.clone());
    assert!(call(&environment, &conf).success);
    assert!(pod.call("DEL", &recorders.bin(), &conf).success);
    let netns: Vec<_> = recorders.seen()[2..].iter().map(|seen| seen.environment["CNI_NETNS"].clone()).collect();
    let own = pod.netns().display().to_string();
    assert_eq!(netns, ["", "", &own, &own]);
    assert!(!state.join(&earlier).exists() && !rules.is_empty() && pod.rules().is_empty());
}

#[test]
fn check_passes_the_runtimes_result_and_stops_at_the_first_failure() {
    let drift = fails("CHECK", &json!({"code": 7, "msg": "drift", "details": "x"}));
    let recorders = Recorders::new().with("first", "").with("second", &drift).with("third", "");
    let executables = [json!({"type": "first"}), json!({"type": "second"}), json!({"type": "third"})];
    let pod = Pod::new();
    let conf = with(conf("1.0.0", &executables), &json!({"prevResult": result("10.0.0.1/8")}));
    assert!(pod.call("ADD", &recorders.bin(), &conf).success);
    let output = pod.call("CHECK", &recorders.bin(), &conf);
    let answer = json!({
        "cniVersion": "1.0.0", "code": 7, "msg": "plugin type=\"second\" failed (check): drift", "details": "x",
    });
    assert_eq!(output.stdout, answer);
    assert_eq!(recorders.order()[3..], ["CHECK first", "CHECK second"]);
    assert_eq!(recorders.seen()[4].stdin["prevResult"], result("10.0.0.1/8"));
}

#[test]
fn gc_and_status_are_forwarded() {
    let recorders =
        Recorders::new().with("first", &fails("STATUS", &json!({"code": 51, "msg": "no"}))).with("second", "");
    let pod = Pod::new();
    let list = json!([{"containerID": pod.name, "ifname": "eth0"}]);
    let valid = json!({"cni.dev/valid-attachments": list});
    // A network of its own: GC removes the attachments that other tests have in this one.
    let conf = with(conf("1.1.0", &chain()), &json!({"name": "mesh-gc"}));
    assert!(pod.call("GC", &recorders.bin(), &with(conf.clone(), &valid)).success);
    let output = pod.call("STATUS", &recorders.bin(), &conf);
    assert_eq!((output.success, &output.stdout["code"]), (false, &json!(51)));
    assert_eq!(recorders.order(), ["GC first", "GC second", "STATUS first"]);
    let seen = recorders.seen();
    assert_eq!((&seen[1].stdin["cni.dev/valid-attachments"], &seen[1].stdin["cni.dev/attachments"]), (&list, &list));
    assert_eq!(seen[2].environment["CNI_CONTAINERID"], "");
}

#[test]
fn executables_run_for_pods_whose_sub_plugins_are_skipped() {
    let recorders = Recorders::new().with("first", "").with("second", "");
    let pod = Pod::new();
    let excluded = json!({"kubernetes": {"exclude_namespaces": ["shop"]}});
    assert!(pod.call("ADD", &recorders.bin(), &with(conf("1.0.0", &chain()), &excluded)).success);
    assert_eq!(recorders.order(), ["ADD first", "ADD second"]);
    assert_eq!(pod.rules(), [""; 0]);
}

#[test]
fn a_chain_of_executables_alone_works() {
    let recorders = Recorders::new().with("first", &add_prints(&result("10.0.0.1/8")));
    let pod = Pod::new();
    let conf = json!({"cniVersion": "1.0.0", "name": "mesh", "type": "detour", "chain": [{"type": "first"}]});
    assert_eq!(pod.call("ADD", &recorders.bin(), &conf).stdout, result("10.0.0.1/8"));
    assert!(pod.call("DEL", &recorders.bin(), &conf).success);
    assert_eq!(recorders.order(), ["ADD first", "DEL first"]);
}

/// Like stopping the runtime's service.
const ATTACKER: u32 = 12345;

fn give(path: &Path) {
    chown(path, Some(Uid::from_raw(ATTACKER)), None).expect("root");
}

/// `bridge` searches `CNI_PATH`, which includes `cni_bin_dir`, for its IPAM plugin.
#[test]
fn a_trusted_plugin_gets_no_untrusted_directory_in_cni_path() {
    let recorders = Recorders::new().with("evil-ipam", "");
    give(&recorders.bin());
    let pod = Pod::new();
    let bridge = json!({"type": "bridge", "bridge": "dtrust0", "ipam": {"type": "evil-ipam"}});
    let definition = with(conf("1.0.0", &[bridge]), &json!({"kubernetes": {"cni_bin_dir": recorders.bin()}}));
    let output = pod.call("ADD", Path::new("/usr/lib/cni"), &definition);
    let msg = output.stdout["msg"].as_str().unwrap_or_default();
    assert!(msg.starts_with("plugin \"bridge\" is not executed: "), "{output:?}");
    assert_eq!(recorders.order(), [""; 0]);
    assert!(!Path::new("/sys/class/net/dtrust0").exists(), "nothing was made on the node");

    // Another user could create a missing directory while the plugin runs.
    let missing = Recorders::new().with("first", "");
    let absent = json!({"kubernetes": {"cni_bin_dir": "/tmp/detour-not-there"}});
    let definition = with(conf("1.0.0", &[json!({"type": "first"})]), &absent);
    assert!(pod.call("ADD", &missing.bin(), &definition).success);
    assert_eq!(missing.seen()[0].environment["CNI_PATH"], missing.bin().display().to_string());
}

const BIN: &str = "/usr/lib/cni";

#[track_caller]
fn succeeds(pod: &Pod, command: &str, conf: &Value) -> Value {
    let output = pod.call(command, Path::new(BIN), conf);
    assert!(output.success, "{output:?}");
    output.stdout
}

#[test]
fn tuning_and_loopback_in_a_chain() {
    let pod = Pod::new();
    pod.run(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other"]);
    let sysctl = json!({"net.ipv4.conf.all.log_martians": "1"});
    let conf = conf("1.0.0", &[json!({"type": "loopback"}), json!({"type": "tuning", "sysctl": sysctl})]);
    let previous = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": pod.netns()}], "ips": []});
    let conf = with(conf, &json!({"prevResult": previous}));
    let result = succeeds(&pod, "ADD", &conf);
    assert_eq!(result["interfaces"][0]["name"], "eth0");
    assert_eq!(pod.run(&["cat", "/proc/sys/net/ipv4/conf/all/log_martians"]), "1\n");
    assert!(pod.run(&["ip", "link", "show", "lo"]).contains("UP"));
    assert!(!pod.rules().is_empty());
    succeeds(&pod, "CHECK", &with(conf.clone(), &json!({"prevResult": result})));
    pod.run(&["ip", "link", "set", "lo", "down"]);
    let output = pod.call("CHECK", Path::new(BIN), &with(conf.clone(), &json!({"prevResult": result})));
    assert!(!output.success && output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("loopback")), "{output:?}");
    assert_eq!(succeeds(&pod, "DEL", &conf), Value::Null);
    assert_eq!(pod.rules(), [""; 0]);
}

/// Shell: adds an interface whose addresses end in 2, and the routes in `routes`.
fn adds(network: &str, routes: &str) -> String {
    let result = json!({
        "cniVersion": "1.0.0", "interfaces": [{"name": "IFNAME", "sandbox": "/run/netns/x"}],
        "ips": [{"interface": 0, "address": format!("10.{network}.0.2/24")}, {"interface": 0, "address": format!("fd{network}::2/64")}],
        "routes": [{"dst": "0.0.0.0/0", "gw": format!("10.{network}.0.1")}, {"dst": "::/0", "gw": format!("fd{network}::1")}],
    });
    let result = result.to_string().replace("IFNAME", "'$CNI_IFNAME'");
    format!(
        "set -e
        in_pod() {{ /usr/bin/nsenter --net=\"$CNI_NETNS\" ip \"$@\"; }}
        case $CNI_COMMAND in
        ADD)
            in_pod link add $CNI_IFNAME type veth peer name peer-$CNI_IFNAME
            in_pod link set peer-$CNI_IFNAME up
            in_pod link set $CNI_IFNAME up
            in_pod address add 10.{network}.0.2/24 dev $CNI_IFNAME
            in_pod -6 address add fd{network}::2/64 dev $CNI_IFNAME nodad
            {routes}
            printf '%s' '{result}' ;;
        DEL) in_pod link delete $CNI_IFNAME || : ;;
        esac"
    )
}

fn plain(network: &str) -> String {
    adds(
        network,
        &format!(
            "in_pod route add default via 10.{network}.0.1
            in_pod -6 route add default via fd{network}::1"
        ),
    )
}

/// Adds a pod that selects these networks, named `one` and `two`. Returns the result with the addresses of all.
fn added(selections: &Value) -> (Node, Value) {
    let node =
        Node::with(Recorders::new().with("first", &plain("10")).with("one", &plain("11")).with("two", &plain("12")));
    for name in ["one", "two"] {
        node.definition("shop", name, &json!({"cniVersion": "1.0.0", "type": name}));
    }
    node.pod_selects(&selections.to_string());
    let first = json!({"cniVersion": "1.0.0", "name": "cluster", "type": "first"});
    let conf = node.conf(&first, &json!({"merge_addresses": true}));
    let result = node.done("ADD", &conf);
    node.done("CHECK", &conf);
    (node, result)
}

/// Returns the default routes of both families, each as gateway and interface.
fn routes(node: &Node) -> [Vec<String>; 2] {
    ["-4", "-6"].map(|family| {
        let text = node.pod.run(&["ip", family, "route", "show", "default"]);
        let hop = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let after = |name| words.iter().position(|word| *word == name).map_or("", |at| words[at + 1]);
            (line.contains(" dev ")).then(|| format!("{} {}", after("via"), after("dev")))
        };
        text.lines().filter_map(hop).collect()
    })
}

#[test]
fn the_gateways_of_selections_replace_the_default_routes_of_plugins() {
    let none = [""; 0];
    for (one, two, wanted) in [
        (json!(["10.11.0.254", "fd11::fe"]), Value::Null, [vec!["10.11.0.254 net1"], vec!["fd11::fe net1"]]),
        (Value::Null, json!(["fd12::fe"]), [none.to_vec(), vec!["fd12::fe net2"]]),
        (json!(["10.11.0.254"]), json!(["fd12::fe"]), [vec!["10.11.0.254 net1"], vec!["fd12::fe net2"]]),
        (json!(["10.11.0.254"]), json!([]), [vec!["10.11.0.254 net1"], none.to_vec()]),
        (json!([]), Value::Null, [none.to_vec(), none.to_vec()]),
    ] {
        let selections = json!([{"name": "one", "default-route": one}, {"name": "two", "default-route": two}]);
        let (node, result) = added(&selections);
        assert_eq!(routes(&node), wanted, "{selections}");
        let text = node.pod.run(&["ip", "-4", "route", "show", "default"]);
        assert_eq!(text.matches("proto static").count(), wanted[0].len(), "{text}");
        let addresses = result["ips"].as_array().expect("a list").iter().map(|ip| ip["interface"].clone());
        assert_eq!(addresses.collect::<Value>(), json!([0, 0, 1, 1, 2, 2]), "each points to its own interface");
        assert_eq!(result["routes"], Value::Null, "the default network's have gone: {selections}");
    }
}

/// A DPDK device is not in the kernel, although the result of its plugin names an interface.
#[test]
fn a_network_without_a_device_has_no_default_route_to_remove() {
    let result = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "net2", "sandbox": "/run/netns/x"}]});
    let node = Node::with(
        Recorders::new()
            .with("first", &plain("10"))
            .with("one", &plain("11"))
            .with("dpdk", &format!("if [ $CNI_COMMAND = ADD ]; then printf '%s' '{result}'; fi")),
    );
    for name in ["one", "dpdk"] {
        node.definition("shop", name, &json!({"cniVersion": "1.0.0", "type": name}));
    }
    node.pod_selects(&json!([{"name": "one", "default-route": ["10.11.0.254"]}, {"name": "dpdk"}]).to_string());
    let conf = node.conf(&json!({"cniVersion": "1.0.0", "name": "cluster", "type": "first"}), &json!({}));
    node.done("ADD", &conf);
    assert_eq!(routes(&node), [vec!["10.11.0.254 net1"], vec![]]);
    node.done("DEL", &conf);
    // Its own default route can't exist.
    node.pod_selects(&json!([{"name": "one"}, {"name": "dpdk", "default-route": ["10.11.0.254"]}]).to_string());
    let (code, text) = node.refused("ADD", &conf);
    assert!(code == 102 && text.contains("can't replace the default route of net2: ENODEV"), "{code} {text}");
}

/// Returns the default routes that remain of those in `routes`, which use the default network's interface and another
/// one, if a selection sets an empty default route.
fn remaining_routes(routes: &str) -> [Vec<String>; 2] {
    let other = "in_pod link add other type veth peer name peer-other
            in_pod link set peer-other up
            in_pod link set other up
            in_pod address add 10.19.0.2/24 dev other
            in_pod -6 address add fd19::2/64 dev other nodad";
    let first =
        adds("10", &format!("{other}\n{routes}")).replace("DEL) in_pod", "DEL) in_pod link delete other || : ; in_pod");
    let node = Node::with(Recorders::new().with("first", &first).with("one", &adds("11", ":")));
    node.definition("shop", "one", &json!({"cniVersion": "1.0.0", "type": "one"}));
    node.pod_selects(&json!([{"name": "one", "default-route": []}]).to_string());
    let conf = node.conf(&json!({"cniVersion": "1.0.0", "name": "cluster", "type": "first"}), &json!({}));
    node.done("ADD", &conf);
    let left = self::routes(&node);
    node.done("DEL", &conf);
    left
}

#[test]
fn the_paths_of_multipath_routes_over_the_networks_interface_are_removed() {
    let multipath = "in_pod route add default nexthop via 10.10.0.1 nexthop via 10.10.0.3 nexthop via 10.19.0.1
            in_pod -6 route add default nexthop via fd10::1 nexthop via fd10::3 nexthop via fd19::1";
    assert_eq!(remaining_routes(multipath), [["10.19.0.1 other"], ["fd19::1 other"]]);
}

#[test]
fn routes_over_nexthop_objects_are_removed_like_others() {
    let objects = "in_pod nexthop add id 1 via 10.10.0.1 dev $CNI_IFNAME
            in_pod nexthop add id 2 via 10.19.0.1 dev other
            in_pod nexthop add id 3 group 1/2
            in_pod -6 nexthop add id 4 via fd10::1 dev $CNI_IFNAME
            in_pod -6 nexthop add id 5 via fd19::1 dev other
            in_pod nexthop add id 6 group 4/5";
    let over = |ip: u8, ip6: u8| {
        remaining_routes(&format!(
            "{objects}\nin_pod route add default nhid {ip}\nin_pod -6 route add default nhid {ip6}"
        ))
    };
    assert_eq!(over(1, 4), [[""; 0]; 2]);
    assert_eq!(over(2, 5), [["10.19.0.1 other"], ["fd19::1 other"]]);
    assert_eq!(over(3, 6), [["10.19.0.1 other"], ["fd19::1 other"]]);
}
