//! The result of a plugin that makes no interface.

use crate::cni::version::{self, ResultShape};
use crate::cni::{Code, Error, NetConf};
use serde_json::{Map, Value, json};

/// The result of a plugin that makes no interface: the configuration's `prevResult` with
/// everything in it, or where there is none an empty result, in the configuration's version.
///
/// Versions of one family have the same shape, so that another version is another label.
///
/// # Errors
/// [`Code::InvalidConfig`]: `prevResult` is no object or speaks a version of another family.
pub fn passed_through(conf: &NetConf) -> Result<Value, Error> {
    let Some(previous) = &conf.prev_result else { return Ok(empty(&conf.cni_version)) };
    let Value::Object(previous) = previous else {
        return Err(Error::new(Code::InvalidConfig, "prevResult: an object is needed; it is the runtime that sets it"));
    };
    check_family(previous, &conf.cni_version)?;
    let mut result = previous.clone();
    let version = Value::String(conf.cni_version.clone());
    match result.get_mut("cniVersion") {
        Some(label) => *label = version,
        None => drop(result.shift_insert(0, "cniVersion".to_owned(), version)),
    }
    Ok(Value::Object(result))
}

/// A result without interfaces, addresses and DNS. Up to 0.4.0 `dns` is always there (reference
/// library, `pkg/types/020` and `040`), and there are runtimes that count on it.
fn empty(cni_version: &str) -> Value {
    match ResultShape::of(cni_version) {
        Some(ResultShape::V0_1 | ResultShape::V0_3) => json!({"cniVersion": cni_version, "dns": {}}),
        Some(ResultShape::V1_0) | None => json!({"cniVersion": cni_version}),
    }
}

fn check_family(previous: &Map<String, Value>, cni_version: &str) -> Result<(), Error> {
    let accepted = ResultShape::of(cni_version).map_or(&version::SUPPORTED[..], ResultShape::versions);
    match previous.get("cniVersion") {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(label)) if label.is_empty() || accepted.contains(&label.as_str()) => Ok(()),
        Some(other) => {
            let accepted = accepted.join(", ");
            let msg = format!(
                "prevResult.cniVersion: {other} is not accepted; accepted where cniVersion is {cni_version}: {accepted}"
            );
            Err(Error::new(Code::InvalidConfig, msg))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::CniCommand;

    fn result(conf: &Value) -> Result<Value, Error> {
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("a configuration");
        passed_through(&conf)
    }

    fn conf(version: &str, previous: &Value) -> Value {
        json!({"cniVersion": version, "name": "n", "type": "detour", "prevResult": previous})
    }

    #[test]
    fn without_a_previous_result_it_is_empty() {
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
    fn everything_in_it_is_handed_on_in_its_order() {
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
    fn a_result_without_a_version_is_in_the_configurations() {
        let labelled = result(&conf("0.4.0", &json!({"ips": []}))).expect("a result");
        assert_eq!(labelled.to_string(), r#"{"cniVersion":"0.4.0","ips":[]}"#);
        let labelled = result(&conf("0.4.0", &json!({"ips": [], "cniVersion": ""}))).expect("a result");
        assert_eq!(labelled.to_string(), r#"{"ips":[],"cniVersion":"0.4.0"}"#);
    }

    #[test]
    fn another_family_is_refused() {
        let error = result(&conf("1.0.0", &json!({"cniVersion": "0.4.0"}))).expect_err("refused");
        assert_eq!(error.code, Code::InvalidConfig);
        let wanted =
            r#"prevResult.cniVersion: "0.4.0" is not accepted; accepted where cniVersion is 1.0.0: 1.0.0, 1.1.0"#;
        assert_eq!(error.msg, wanted);
        assert!(result(&conf("0.3.1", &json!({"cniVersion": "0.2.0"}))).is_err());
        assert!(result(&conf("0.3.1", &json!({"cniVersion": 1}))).is_err());
        assert!(result(&conf("0.3.1", &json!("x"))).is_err());
        assert!(result(&conf("0.3.1", &json!({"cniVersion": "0.4.0"}))).is_ok());
    }
}
