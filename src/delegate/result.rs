//! Whether what a plugin printed is a result in the version of the configuration.

use crate::cni::version::Family;
use crate::cni::{Code, Error};
use serde_json::Value;

/// The same result, labelled with the configuration's version. A result without a version is in
/// the configuration's, `null` is an empty one (reference library, `pkg/invoke/exec.go`).
///
/// # Errors
/// [`Code::Delegate`]: it is no object, or of a version whose results have another shape.
pub(super) fn accept(answer: Value, cni_version: &str) -> Result<Value, Error> {
    let mut result = match answer {
        Value::Object(result) => result,
        Value::Null => serde_json::Map::new(),
        other => return Err(Error::new(Code::Delegate, format!("its result is no object but {other}"))),
    };
    match result.get("cniVersion") {
        None | Some(Value::Null) => {}
        Some(Value::String(label)) if label.is_empty() || same_shape(label, cni_version) => {}
        Some(other) => {
            let family = Family::of(cni_version).map_or_else(|| cni_version.to_owned(), |f| f.versions().join(", "));
            let msg = format!(
                "its result has cniVersion {other}; accepted where the configuration's is {cni_version}: {family}"
            );
            return Err(Error::new(Code::Delegate, msg));
        }
    }
    result.insert("cniVersion".to_owned(), cni_version.into());
    Ok(Value::Object(result))
}

fn same_shape(label: &str, cni_version: &str) -> bool {
    label == cni_version || Family::of(label).is_some_and(|family| Family::of(cni_version) == Some(family))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn versions_of_one_family_are_accepted_and_labelled() {
        for (answer, wanted) in [
            (json!({"cniVersion": "1.0.0", "ips": []}), json!({"cniVersion": "1.1.0", "ips": []})),
            (json!({"cniVersion": "1.1.0"}), json!({"cniVersion": "1.1.0"})),
            (json!({"cniVersion": ""}), json!({"cniVersion": "1.1.0"})),
            (json!({"dns": {}}), json!({"dns": {}, "cniVersion": "1.1.0"})),
            (Value::Null, json!({"cniVersion": "1.1.0"})),
        ] {
            assert_eq!(accept(answer, "1.1.0"), Ok(wanted));
        }
    }

    #[test]
    fn others_are_refused() {
        for answer in [json!({"cniVersion": "0.4.0"}), json!({"cniVersion": 1}), json!([]), json!("x")] {
            assert_eq!(accept(answer, "1.1.0").map_err(|e| e.code), Err(Code::Delegate));
        }
        let error = accept(json!({"cniVersion": "0.4.0"}), "1.0.0").expect_err("refused");
        assert!(error.msg.ends_with("accepted where the configuration's is 1.0.0: 1.0.0, 1.1.0"), "{error}");
    }
}
