//! Names that CNI and Kubernetes allow.
//!
//! Resolvers that runtimes and plugins speak of.

use super::{Code, Error, NetConf};
use serde_json::Value;
use std::net::IpAddr;

/// The kernel's `IFNAMSIZ`, less the terminating zero.
const LONGEST_INTERFACE_NAME: usize = 15;

/// The interface of a pod's default network: kubelets' runtimes give it no other name.
pub const DEFAULT_INTERFACE: &str = "eth0";

/// A container ID or the name of a network: `[a-zA-Z0-9][a-zA-Z0-9_.-]*` (reference library, `pkg/utils`).
#[must_use]
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

/// Refuses what the kernel does not take as an interface's name (`dev_valid_name`), in the
/// reference library's words.
///
/// # Errors
/// [`Code::Environment`], without the name itself.
pub fn check_interface_name(name: &str) -> Result<(), Error> {
    let refuse = |msg| Err(Error::new(Code::Environment, msg));
    if name.is_empty() {
        return refuse("interface name is empty");
    }
    if name.len() > LONGEST_INTERFACE_NAME {
        let limit = format!("interface name should be less than {} characters", LONGEST_INTERFACE_NAME + 1);
        return refuse("interface name is too long").map_err(|error| error.with_details(limit));
    }
    if name == "." || name == ".." {
        return refuse("interface name is . or ..");
    }
    if name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) {
        return refuse("interface name contains / or : or whitespace characters");
    }
    Ok(())
}

/// Whether a rule can name the interface: one that the kernel can have, and that `iptables` does not take for a
/// prefix (`eth+`). An alias such as `eth0:7` is a label of an address: no packet comes or goes by it.
#[must_use]
pub fn is_interface_of_rules(name: &str) -> bool {
    check_interface_name(name).is_ok() && !name.ends_with('+')
}

/// An RFC 1123 label, as Kubernetes wants the name of a namespace.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_label(text)
}

/// An RFC 1123 subdomain, as Kubernetes wants the name of a pod. A label in it may have more than
/// 63 characters, unlike in DNS (apimachinery, `IsDNS1123Subdomain`).
#[must_use]
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

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

    #[test]
    fn identifiers_start_with_a_letter_or_digit() {
        assert!(is_identifier("a") && is_identifier("9_a.b-C"));
        assert!(["", "-a", ".a", "a/b", "a b", "ä", "a\n"].iter().all(|bad| !is_identifier(bad)));
    }

    #[test]
    fn interface_names_are_those_that_the_kernel_takes() {
        for good in ["e", "eth0", "123456789012345", "...", "a@b"] {
            assert_eq!(check_interface_name(good), Ok(()), "{good}");
        }
        for bad in ["", "1234567890123456", ".", "..", "a/b", "a:b", "a b", "a\t", "a\u{a0}b", "äääääääää"] {
            assert_eq!(check_interface_name(bad).map_err(|e| e.code), Err(Code::Environment), "{bad}");
        }
    }

    #[test]
    fn rules_name_interfaces_and_neither_aliases_nor_prefixes() {
        assert!(["eth0", "eth0.7", "a@b", "a+b"].into_iter().all(is_interface_of_rules));
        assert!(["eth0:7", "eth+", "+", "a b", "", ".."].into_iter().all(|name| !is_interface_of_rules(name)));
    }

    #[test]
    fn kubernetes_names_can_be_put_into_urls_and_paths() {
        assert!(is_dns_label("a") && is_dns_label("a-1") && is_dns_label(&"a".repeat(63)));
        let long = "a".repeat(64);
        assert!(["", "-a", "a-", "A", "a.b", "..", "a/b", long.as_str()].iter().all(|bad| !is_dns_label(bad)));
        assert!(is_dns_subdomain("a.b-1.c") && is_dns_subdomain(&"a".repeat(253)));
        let long = "a".repeat(254);
        assert!(["", ".", "..", "a..b", "a.-b", "a_b", "A", "a/b", long.as_str()].iter().all(|b| !is_dns_subdomain(b)));
    }

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
