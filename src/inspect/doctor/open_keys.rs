//! Keys of configurations, kubeconfigs and records whose values are no secrets.

use crate::printable::REDACTED;
use serde_json::Value;

/// In the order of the alphabet. A value below any other key is hidden, whatever its own key is.
const OPEN: [&str; 188] = [
    "All",
    "Any",
    "Gid",
    "List",
    "Off",
    "On",
    "Servers",
    "Uid",
    "address",
    "addresses",
    "agent_namespace",
    "agent_pod_prefixes",
    "agent_socket",
    "ambient_enabled",
    "apiVersion",
    "aside",
    "auth-provider",
    "auxiliaryCNIChainName",
    "before",
    "binDir",
    "bridge",
    "capabilities",
    "capture_all_dns",
    "capture_secondary_networks",
    "certificate-authority",
    "chain",
    "chain_types",
    "client-certificate",
    "client-key",
    "cluster",
    "clusterNetwork",
    "cluster_dns",
    "clusters",
    "cniDir",
    "cniVersion",
    "cniVersions",
    "cni_agent_run_dir",
    "cni_bin_dir",
    "command",
    "compress",
    "confDir",
    "containers",
    "context",
    "contexts",
    "current-context",
    "daemonSocketDir",
    "defaultNetworks",
    "delegate_timeout_seconds",
    "delegates",
    "destination",
    "device",
    "dialect",
    "disableCheck",
    "dns",
    "dns_captured_elsewhere",
    "dns_servers_v4",
    "dns_servers_v6",
    "domain",
    "drop_invalid",
    "dst",
    "dual_stack",
    "enable_ipv6",
    "enablement_selectors",
    "env",
    "exclude_interfaces",
    "exclude_namespaces",
    "exclusions",
    "exec",
    "first",
    "fixtures",
    "forceAddress",
    "gateway",
    "gids",
    "globalNamespaces",
    "gw",
    "hairpinMode",
    "hooks",
    "host_ipv4_loopback_cidr",
    "ifname",
    "in_process_types",
    "inbound_capture_port",
    "inbound_interception_mode",
    "inbound_ports_exclude",
    "inbound_ports_include",
    "inbound_tproxy_mark",
    "inbound_tproxy_route_table",
    "inbound_tunnel_port",
    "inode",
    "installer",
    "interactiveMode",
    "interception",
    "interface",
    "interfaces",
    "ip6",
    "ipMasq",
    "ipam",
    "ips",
    "isDefaultGateway",
    "isGateway",
    "kind",
    "kubeconfig",
    "kubernetes",
    "last",
    "logFile",
    "logLevel",
    "logOptions",
    "logToStderr",
    "log_file",
    "log_level",
    "mac",
    "made",
    "manifests_dir",
    "mark",
    "master",
    "maxAge",
    "maxBackups",
    "maxSize",
    "merge_addresses",
    "mode",
    "mtu",
    "multusNamespace",
    "name",
    "nameservers",
    "namespace",
    "namespaceIsolation",
    "native_nftables",
    "netns",
    "network_status",
    "options",
    "ours",
    "outbound_ip_ranges_exclude",
    "outbound_ip_ranges_include",
    "outbound_ports_exclude",
    "outbound_ports_include",
    "owner",
    "owner_groups_exclude",
    "owner_groups_include",
    "plugin_log_level",
    "plugins",
    "pod_namespace",
    "pod_overrides",
    "policy",
    "ports",
    "promiscMode",
    "protocol",
    "protocols",
    "proxy-url",
    "proxy_gid",
    "proxy_loopback",
    "proxy_port",
    "proxy_uid",
    "range",
    "rangeEnd",
    "rangeStart",
    "range_end",
    "range_start",
    "ranges",
    "readiness_timeout_seconds",
    "readinessindicatorfile",
    "redirect",
    "redirect_dns",
    "reroute_virtual_interfaces",
    "resolvers",
    "retryDeleteOnError",
    "role",
    "routes",
    "routing",
    "rules",
    "sandbox",
    "scope",
    "search",
    "server",
    "subnet",
    "systemNamespaces",
    "table",
    "tables",
    "timeout_seconds",
    "tls-server-name",
    "tokenFile",
    "type",
    "uids",
    "until",
    "user",
    "users",
    "v4",
    "v6",
    "version",
    "vlan",
];
/// Keys of objects whose members have names of their own, such as paths.
const MAPS: [&str; 2] = ["files", "lists"];

/// Hides the values of all keys that are not known to be harmless. What stays: keys, `true`, `false`, `null`,
/// and how many there are of what.
pub(super) fn only_open(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                if MAPS.contains(&key.as_str()) && value.is_object() {
                    value.as_object_mut().into_iter().flatten().for_each(|(_, value)| only_open(value));
                } else if is_open(key) {
                    only_open(value);
                } else {
                    close(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(only_open),
        _ => {}
    }
}

/// Whether the values of a key are shown.
pub(super) fn is_open(key: &str) -> bool {
    OPEN.binary_search(&key).is_ok()
}

fn close(value: &mut Value) {
    match value {
        Value::Object(members) => members.iter_mut().for_each(|(_, value)| close(value)),
        Value::Array(items) => items.iter_mut().for_each(close),
        Value::Null | Value::Bool(_) => {}
        Value::Number(_) | Value::String(_) => *value = REDACTED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_list_is_sorted() {
        assert!(OPEN.is_sorted());
    }

    #[test]
    fn a_value_is_shown_only_below_known_keys() {
        let mut file = json!({
            "files": {"/a": {"role": "program", "before": {"text": ["s", 384]}}},
            "lists": "s", "chain": [{"type": "x", "own": {"type": "s"}}], "n": 1, "mtu": 2, "flag": true,
        });
        only_open(&mut file);
        let gone = REDACTED;
        let wanted = json!({
            "files": {"/a": {"role": "program", "before": {"text": [gone, gone]}}},
            "lists": gone, "chain": [{"type": "x", "own": {"type": gone}}], "n": gone, "mtu": 2, "flag": true,
        });
        assert_eq!(file, wanted);
    }
}
