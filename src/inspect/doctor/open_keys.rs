//! Keys of configurations, kubeconfigs and records whose values are no secrets.

use crate::printable::REDACTED;
use serde_json::Value;

/// Keys whose values are shown. A value below any other key is hidden, whatever its own key is.
const OPEN: [&str; 6] = [
    // The plugin's configuration, and istio-cni's.
    "cniVersion cniVersions name type log_level plugin_log_level log_file kubernetes kubeconfig agent_socket
    manifests_dir exclude_namespaces cni_bin_dir timeout_seconds agent_namespace agent_pod_prefixes cluster_dns dialect
    delegate_timeout_seconds chain native_nftables pod_namespace cni_agent_run_dir ambient_enabled",
    // Sub-plugins, and the policy in a state file.
    "proxy_uid proxy_gid proxy_port inbound_capture_port inbound_tunnel_port inbound_interception_mode
    inbound_tproxy_mark inbound_tproxy_route_table inbound_ports_include inbound_ports_exclude outbound_ports_include
    outbound_ports_exclude outbound_ip_ranges_include outbound_ip_ranges_exclude owner_groups_include
    owner_groups_exclude reroute_virtual_interfaces exclude_interfaces capture_secondary_networks redirect_dns
    capture_all_dns dns_servers_v4 dns_servers_v6 drop_invalid dual_stack enable_ipv6 host_ipv4_loopback_cidr uids gids
    rules resolvers ports protocols pod_overrides containers scope until policy made tables hooks fixtures device inode
    netns ip6 ipv6 proxy_loopback routing mark table interception exclusions On Off All List Servers Any Uid Gid owner
    destination protocol first last v4 v6 dns_captured_elsewhere",
    // The primary plugin, as Multus.
    "clusterNetwork delegates defaultNetworks systemNamespaces multusNamespace confDir cniDir binDir
    namespaceIsolation globalNamespaces readinessindicatorfile readiness_timeout_seconds retryDeleteOnError
    in_process_types chain_types merge_addresses network_status capabilities daemonSocketDir auxiliaryCNIChainName
    logLevel logFile logToStderr logOptions maxAge maxSize maxBackups compress",
    // Plugin lists, and the plugins of the CNI project.
    "plugins disableCheck bridge master mode mtu vlan ipam subnet rangeStart rangeEnd range_start range_end range ranges
    gateway routes dst gw address addresses dns nameservers domain search options interface interfaces ifname mac sandbox
    ips version",
    // Kubeconfigs. Of a user, what kind of credential it has; `env` shows names, for `value` is not open.
    "current-context contexts clusters users user cluster context namespace server certificate-authority proxy-url
    tls-server-name tokenFile client-certificate client-key exec command apiVersion kind interactiveMode env
    auth-provider",
    // The installation's record.
    "installer role ours before aside",
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
    OPEN.iter().any(|keys| keys.split_whitespace().any(|open| open == key))
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
