//! What a plugin printed, as a result in the version of the configuration.

use crate::cni::result::AddResult;
use crate::cni::version::ResultShape;
use crate::cni::{Code, Error};
use serde_json::{Map, Value};

/// The result in the configuration's version. One without a version is in the configuration's,
/// `null` is an empty one (reference library, `pkg/invoke/exec.go`). Where only the label differs,
/// everything in it stays as it is; a result of another shape is converted.
///
/// # Errors
/// [`Code::Delegate`]: it can't be understood, or has no place for what is in it in that version.
pub(super) fn accept(answer: Value, cni_version: &str) -> Result<Value, Error> {
    let answer = if answer.is_null() { Value::Object(Map::new()) } else { answer };
    let wrong = |error: Error| Error { code: Code::Delegate, ..error };
    let understood = AddResult::read(&answer, cni_version).map_err(wrong)?;
    match answer {
        Value::Object(mut same) if has_shape(&same, cni_version) => {
            same.insert("cniVersion".to_owned(), cni_version.into());
            Ok(Value::Object(same))
        }
        _ => understood.to_json(cni_version).map_err(wrong),
    }
}

fn has_shape(result: &Map<String, Value>, cni_version: &str) -> bool {
    let label = result.get("cniVersion").and_then(Value::as_str).filter(|label| !label.is_empty());
    label.is_none_or(|label| ResultShape::of(label) == ResultShape::of(cni_version))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn of_the_same_shape_all_stays_but_the_label() {
        for (answer, wanted) in [
            (json!({"cniVersion": "1.0.0", "own": {"x": 1}}), json!({"cniVersion": "1.1.0", "own": {"x": 1}})),
            (json!({"cniVersion": ""}), json!({"cniVersion": "1.1.0"})),
            (json!({"dns": {}}), json!({"dns": {}, "cniVersion": "1.1.0"})),
            (Value::Null, json!({"cniVersion": "1.1.0"})),
        ] {
            assert_eq!(accept(answer, "1.1.0"), Ok(wanted));
        }
    }

    #[test]
    fn another_shape_is_converted() {
        let older = json!({"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.0.0.1/8"}], "dns": {}});
        let newer = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.1/8"}]});
        assert_eq!(accept(older.clone(), "1.0.0"), Ok(newer.clone()));
        assert_eq!(accept(newer, "0.4.0"), Ok(older));
    }

    #[test]
    fn what_is_no_result_is_refused() {
        for answer in [json!({"cniVersion": "9.0.0"}), json!({"cniVersion": 1}), json!([]), json!({"ips": "10.0.0.1"})]
        {
            let error = accept(answer, "1.1.0").expect_err("refused");
            assert_eq!(error.code, Code::Delegate);
            assert!(error.msg.starts_with("result") && error.msg.contains("is not accepted"), "{error}");
        }
        let without_address = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]});
        assert_eq!(accept(without_address, "0.2.0").map_err(|error| error.code), Err(Code::Delegate));
    }
}
