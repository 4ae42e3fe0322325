//! The pod's default route, with plugins that run plain `ip route add default`, for IPv4 and IPv6.

use crate::node::Node;
use crate::recorders::Recorders;
use serde_json::{Value, json};

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

/// Adds a pod that selects these networks, named `one` and `two`.
fn added(selections: &Value) -> Result<(Node, Value), String> {
    let node =
        Node::with(Recorders::new().with("first", &plain("10")).with("one", &plain("11")).with("two", &plain("12")));
    for name in ["one", "two"] {
        node.definition("shop", name, &json!({"cniVersion": "1.0.0", "type": name}));
    }
    node.pod_selects(&selections.to_string());
    let conf = node.conf(&json!({"cniVersion": "1.0.0", "name": "cluster", "type": "first"}), &json!({}));
    let output = node.call("ADD", &conf);
    if !output.success {
        return Err(format!("{output:?}"));
    }
    node.done("CHECK", &conf);
    Ok((node, output.stdout))
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
        let (node, result) = added(&selections).expect("added");
        assert_eq!(routes(&node), wanted, "{selections}");
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

#[test]
fn without_the_key_a_second_default_route_fails_in_the_plugin() {
    let error = added(&json!([{"name": "one"}])).map(drop).expect_err("refused");
    assert!(error.contains("File exists"), "{error}");
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
