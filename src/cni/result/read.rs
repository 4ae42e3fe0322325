//! Parses results of any version, and passes the previous result through.

use super::{AddResult, Dns, InterfaceAddress, Route};
use crate::cni::block::wrong_type;
use crate::cni::document::null_is_empty;
use crate::cni::error::{Code, Error};
use crate::cni::netconf::NetConf;
use crate::cni::version::{self, ResultShape};
use ipnet::{IpNet, Ipv4Net};
use serde::de::{DeserializeOwned, Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::net::IpAddr;

/// A result up to 0.2.0: one address of each address family, with its routes.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct SingleAddresses {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ip4: Option<SingleAddress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ip6: Option<SingleAddress>,
    #[serde(default, deserialize_with = "null_is_empty")]
    pub(super) dns: Dns,
}

#[derive(Serialize, Deserialize)]
pub(super) struct SingleAddress {
    #[serde(deserialize_with = "prefix")]
    pub(super) ip: IpNet,
    #[serde(default, deserialize_with = "gateway", skip_serializing_if = "Option::is_none")]
    pub(super) gateway: Option<IpAddr>,
    #[serde(default, deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub(super) routes: Vec<Route>,
}

impl AddResult {
    /// Parses a result. `unstated` is its version if it has none: that of the configuration for which it was
    /// returned.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with the path of the invalid key, which starts with `result`.
    pub fn read(value: &Value, unstated: &str) -> Result<Self, Error> {
        // serde would read an array as the fields in their order.
        if !value.is_object() {
            return Err(wrong_type("result", value, "an object"));
        }
        let version = match value.get("cniVersion") {
            None | Some(Value::Null) => unstated,
            Some(Value::String(version)) => Some(&**version).filter(|version| !version.is_empty()).unwrap_or(unstated),
            Some(other) => return Err(wrong_type("result.cniVersion", other, "a string")),
        };
        let Some(shape) = ResultShape::of(version) else {
            let supported = format!("one of {}", version::SUPPORTED.join(", "));
            return Err(wrong_type("result.cniVersion", &version.into(), &supported));
        };
        match shape {
            ResultShape::V0_1 => parse(value).map(|SingleAddresses { ip4, ip6, dns }| {
                let mut result = Self { dns, ..Self::default() };
                for SingleAddress { ip, gateway, routes } in [ip4, ip6].into_iter().flatten() {
                    result.ips.push(InterfaceAddress { interface: None, address: ip, gateway });
                    result.routes.extend(routes);
                }
                result
            }),
            ResultShape::V0_3 | ResultShape::V1_0 => parse(value),
        }
    }
}

fn parse<T: DeserializeOwned>(value: &Value) -> Result<T, Error> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let (path, cause) = (error.path().to_string(), error.inner());
        // The path of the value itself.
        let path = if path == "." { String::new() } else { format!(".{path}") };
        Error::new(Code::InvalidConfig, format!("result{path}: {cause}"))
    })
}

/// Parses an address with its prefix length as the reference library does: an IPv4-mapped IPv6 address is an IPv4
/// address.
pub(super) fn prefix<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpNet, D::Error> {
    let text = String::deserialize(deserializer)?;
    let net = text.parse::<IpNet>().map_err(|_| {
        D::Error::custom(format!("invalid value {text:?}; expected an address with its prefix length, as 10.0.0.1/24"))
    })?;
    Ok(match (net.addr().to_canonical(), net.prefix_len().checked_sub(96)) {
        (IpAddr::V4(address), Some(length)) if net.addr().is_ipv6() => {
            Ipv4Net::new(address, length).map_or(net, IpNet::V4)
        }
        _ => net,
    })
}

/// Parses an address; `None` for an empty string.
pub(super) fn gateway<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)?.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let invalid = |_| D::Error::custom(format!("invalid value {text:?}; expected an IPv4 or IPv6 address"));
    text.parse().map(|address: IpAddr| Some(address.to_canonical())).map_err(invalid)
}

/// Returns the result of a plugin that creates no interface: the configuration's `prevResult` with all its keys, or
/// without one an empty result, in the version of the configuration.
///
/// Versions with the same result format differ only in `cniVersion`.
///
/// # Errors
/// [`Code::InvalidConfig`]: `prevResult` is not an object or has a version with another result format.
pub fn passed_through(conf: &NetConf) -> Result<Value, Error> {
    let Some(previous) = &conf.prev_result else { return Ok(empty(&conf.cni_version)) };
    let Value::Object(previous) = previous else {
        return Err(Error::new(Code::InvalidConfig, "prevResult: expected an object, which the runtime sets"));
    };
    check_version(previous, &conf.cni_version)?;
    let mut result = previous.clone();
    let version = Value::String(conf.cni_version.clone());
    match result.get_mut("cniVersion") {
        Some(label) => *label = version,
        None => drop(result.shift_insert(0, "cniVersion".to_owned(), version)),
    }
    Ok(Value::Object(result))
}

/// Returns an empty result. Up to 0.4.0 it has `dns` (reference library, `pkg/types/020` and `040`), on which some
/// runtimes rely.
fn empty(cni_version: &str) -> Value {
    match ResultShape::of(cni_version) {
        Some(ResultShape::V0_1 | ResultShape::V0_3) => json!({"cniVersion": cni_version, "dns": {}}),
        Some(ResultShape::V1_0) | None => json!({"cniVersion": cni_version}),
    }
}

fn check_version(previous: &Map<String, Value>, cni_version: &str) -> Result<(), Error> {
    let expected = ResultShape::of(cni_version).map_or(&version::SUPPORTED[..], ResultShape::versions);
    match previous.get("cniVersion") {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(label)) if label.is_empty() || expected.contains(&label.as_str()) => Ok(()),
        Some(other) => {
            let expected = expected.join(", ");
            let msg = format!(
                "prevResult.cniVersion: invalid value {other}; expected one of {expected}, since cniVersion is {cni_version}"
            );
            Err(Error::new(Code::InvalidConfig, msg))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;
    use crate::cni::CniCommand;
    use serde_json::json;

    #[test]
    fn the_version_of_the_result_takes_precedence_over_that_of_the_configuration() {
        let old = json!({"ip4": {"ip": "10.0.0.2/24"}});
        assert_eq!(AddResult::read(&old, "0.2.0").expect("a result").ips.len(), 1);
        let read = AddResult::read(&old, "1.0.0").expect("a result");
        assert_eq!(read, AddResult::default());
        let labelled = json!({"cniVersion": "0.1.0", "ip4": {"ip": "10.0.0.2/24"}});
        assert_eq!(AddResult::read(&labelled, "1.0.0").expect("a result").ips.len(), 1);
        let error = AddResult::read(&json!({"cniVersion": "2.0.0"}), "1.0.0").expect_err("another version");
        assert!(
            error.msg.starts_with(r#"result.cniVersion: invalid value "2.0.0"; expected one of 0.1.0, "#),
            "{error}"
        );
    }

    #[test]
    fn index_0_differs_from_a_missing_index() {
        let ips = json!({"ips": [{"interface": 0, "address": "10.0.0.2/24"}, {"address": "10.0.0.3/24"}]});
        let read = AddResult::read(&ips, "1.0.0").expect("a result");
        assert_eq!(read.ips.iter().map(|ip| ip.interface).collect::<Vec<_>>(), [Some(0), None]);
    }

    #[test]
    fn null_and_an_empty_gateway_count_as_absent() {
        let odd = json!({
            "interfaces": null, "dns": null, "routes": [{"dst": "::/0", "gw": "", "mtu": null}],
            "ips": [{"address": "::ffff:10.0.0.2/120", "gateway": "::ffff:10.0.0.1", "interface": null}],
        });
        let read = AddResult::read(&odd, "0.4.0").expect("a result");
        assert_eq!((read.routes[0].gw, &read.routes[0].metrics), (None, &Metrics::default()));
        assert_eq!(read.ips[0].address.to_string(), "10.0.0.2/24");
        assert_eq!(read.ips[0].gateway, Some("10.0.0.1".parse().expect("an address")));
        assert!(read.has_interface() && read.dns.is_empty());
    }

    #[test]
    fn errors_have_the_path_of_the_key() {
        for (value, wanted) in [
            (json!([]), "result: invalid value []; expected an object"),
            (json!({"ips": {}}), "result.ips: invalid type: map, expected a sequence"),
            (json!({"ips": [7]}), "result.ips[0]: invalid type: integer `7`"),
            (json!({"ips": [{}]}), "result.ips[0]: missing field `address`"),
            (
                json!({"ips": [{"address": "10.0.0.1"}]}),
                r#"result.ips[0].address: invalid value "10.0.0.1"; expected "#,
            ),
            (json!({"ips": [{"address": "::/0", "gateway": "x"}]}), r#"result.ips[0].gateway: invalid value "x""#),
            (json!({"ips": [{"address": "::/0", "interface": "0"}]}), "result.ips[0].interface: invalid type: string"),
            (json!({"interfaces": [{"name": 1}]}), "result.interfaces[0].name: invalid type: integer `1`"),
            (json!({"routes": [{"dst": "::/0", "table": "x"}]}), "result.routes[0]: invalid type: string"),
            (json!({"dns": {"search": "a"}}), "result.dns.search: invalid type: string"),
            (json!({"cniVersion": 1}), "result.cniVersion: invalid value 1; expected a string"),
        ] {
            let error = AddResult::read(&value, "1.0.0").expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(wanted), "{error}");
        }
        let error = AddResult::read(&json!({"ip4": {}}), "0.2.0").expect_err("refused");
        assert!(error.msg.starts_with("result.ip4: missing field `ip`"), "{error}");
    }

    #[test]
    fn default_routes_can_be_removed_and_added() {
        let routes = json!({"routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}, {"dst": "::/0"}, {"dst": "0.0.0.0/1"}]});
        let mut read = AddResult::read(&routes, "1.0.0").expect("a result");
        assert_eq!(read.default_gateways().collect::<Vec<_>>(), ["10.0.0.1".parse::<IpAddr>().expect("an address")]);
        read.remove_default_routes();
        read.add_default_route("fd::1".parse().expect("an address"));
        let json = read.to_json("1.0.0").expect("JSON");
        assert_eq!(json["routes"], json!([{"dst": "0.0.0.0/1"}, {"dst": "::/0", "gw": "fd::1"}]));
    }

    fn result(conf: &Value) -> Result<Value, Error> {
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("a configuration");
        passed_through(&conf)
    }

    fn conf(version: &str, previous: &Value) -> Value {
        json!({"cniVersion": version, "name": "n", "type": "detour", "prevResult": previous})
    }

    #[test]
    fn without_a_previous_result_the_result_is_empty() {
        for (version, wanted) in [
            ("0.1.0", r#"{"cniVersion":"0.1.0","dns":{}}"#),
            ("0.3.1", r#"{"cniVersion":"0.3.1","dns":{}}"#),
            ("0.4.0", r#"{"cniVersion":"0.4.0","dns":{}}"#),
            ("1.0.0", r#"{"cniVersion":"1.0.0"}"#),
            ("1.1.0", r#"{"cniVersion":"1.1.0"}"#),
        ] {
            assert_eq!(result(&conf(version, &Value::Null)).expect("a result").to_string(), wanted);
        }
        let unstated = result(&json!({"name": "n", "type": "detour"})).expect("a result");
        assert_eq!(unstated["cniVersion"], "0.1.0");
    }

    #[test]
    fn all_keys_of_the_previous_result_are_preserved_in_order() {
        let previous = json!({
            "zz": {"b": 1, "a": [null, 1.5]},
            "cniVersion": "1.0.0",
            "ips": [{"address": "10.0.0.1/8", "interface": 0, "own": true}, {"address": "fd::1/64"}],
            "interfaces": [{"name": "eth0", "mtu": 1400}],
        });
        let same = result(&conf("1.0.0", &previous)).expect("a result");
        assert_eq!(same.to_string(), previous.to_string());
        let newer = result(&conf("1.1.0", &previous)).expect("a result");
        assert_eq!(newer.to_string(), previous.to_string().replace("1.0.0", "1.1.0"));
    }

    #[test]
    fn a_result_without_a_version_gets_that_of_the_configuration() {
        let labelled = result(&conf("0.4.0", &json!({"ips": []}))).expect("a result");
        assert_eq!(labelled.to_string(), r#"{"cniVersion":"0.4.0","ips":[]}"#);
        let labelled = result(&conf("0.4.0", &json!({"ips": [], "cniVersion": ""}))).expect("a result");
        assert_eq!(labelled.to_string(), r#"{"ips":[],"cniVersion":"0.4.0"}"#);
    }

    #[test]
    fn a_previous_result_with_another_format_is_refused() {
        let error = result(&conf("1.0.0", &json!({"cniVersion": "0.4.0"}))).expect_err("refused");
        assert_eq!(error.code, Code::InvalidConfig);
        let wanted =
            r#"prevResult.cniVersion: invalid value "0.4.0"; expected one of 1.0.0, 1.1.0, since cniVersion is 1.0.0"#;
        assert_eq!(error.msg, wanted);
        assert!(result(&conf("0.3.1", &json!({"cniVersion": "0.2.0"}))).is_err());
        assert!(result(&conf("0.3.1", &json!({"cniVersion": 1}))).is_err());
        assert!(result(&conf("0.3.1", &json!("x"))).is_err());
        assert!(result(&conf("0.3.1", &json!({"cniVersion": "0.4.0"}))).is_ok());
    }
}
