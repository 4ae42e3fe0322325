//! Resolvers that runtimes and plugins speak of.

use super::NetConf;
use serde_json::Value;
use std::net::IpAddr;

impl NetConf {
    /// The pod's resolvers as the runtime gives them in `runtimeConfig.dns` (capability `dns`).
    /// CONVENTIONS.md spells the key `servers`; containerd sends a Go structure whose fields have
    /// no other names, hence `Servers` (go-cni, `types.go`).
    #[must_use]
    pub fn runtime_nameservers(&self) -> Vec<IpAddr> {
        let dns = self.runtime_config.get("dns");
        dns.and_then(|dns| dns.get("servers").or_else(|| dns.get("Servers"))).map(addresses).unwrap_or_default()
    }

    /// `prevResult.dns.nameservers`.
    #[must_use]
    pub fn prev_result_nameservers(&self) -> Vec<IpAddr> {
        let dns = self.prev_result.as_ref().and_then(|result| result.get("dns"));
        dns.and_then(|dns| dns.get("nameservers")).map(addresses).unwrap_or_default()
    }
}

/// What is an address, less an IPv6 zone; the rest is left out, as resolv.conf(5)'s readers do.
fn addresses(list: &Value) -> Vec<IpAddr> {
    let texts = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    texts.filter_map(|text| text.split('%').next()?.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::CniCommand;
    use serde_json::json;

    fn conf(more: (&str, Value)) -> NetConf {
        let mut conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "detour"});
        conf[more.0] = more.1;
        NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("a configuration")
    }

    #[test]
    fn both_spellings_of_the_runtimes_servers() {
        let wanted: Vec<IpAddr> = vec!["10.0.0.10".parse().expect("v4"), "fd00::a".parse().expect("v6")];
        for key in ["servers", "Servers"] {
            let conf = conf(("runtimeConfig", json!({"dns": {key: ["10.0.0.10", "fd00::a"], "Options": null}})));
            assert_eq!(conf.runtime_nameservers(), wanted, "{key}");
        }
        for dns in [json!({}), json!({"dns": null}), json!({"dns": {"Servers": null}}), json!({"dns": []})] {
            assert!(conf(("runtimeConfig", dns)).runtime_nameservers().is_empty());
        }
    }

    #[test]
    fn what_is_no_address_is_left_out() {
        let conf = conf(("prevResult", json!({"dns": {"nameservers": ["fe80::1%eth0", "", 7, "x", "1.1.1.1"]}})));
        let wanted: Vec<IpAddr> = vec!["fe80::1".parse().expect("v6"), "1.1.1.1".parse().expect("v4")];
        assert_eq!(conf.prev_result_nameservers(), wanted);
    }
}
