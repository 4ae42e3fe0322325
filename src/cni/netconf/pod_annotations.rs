//! The pod's annotations as the container runtime passes them. The runtime has them from the kubelet, so they are
//! available without an API server.

use crate::cni::list::wrong_type;
use serde_json::{Map, Value};

/// The capability with which runtimes pass all annotations of the pod (containerd, `internal/cri/annotations`; CRI-O,
/// `ocicni`).
pub const POD_ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";

/// The maximum size of all keys and values. The API server accepts 256 KiB (apimachinery, `TotalAnnotationSizeLimitB`),
/// and the kubelet adds a few annotations.
const MAX_SIZE: usize = 512 << 10;

/// Checks the annotations in `runtimeConfig`. Removes invalid ones with a warning, all of them together: a part could
/// lack the annotation that decides. Replaces `null`, as which containerd passes a pod without annotations.
pub(super) fn check(runtime_config: &mut Map<String, Value>, warnings: &mut Vec<String>) {
    let problem = match runtime_config.get_mut(POD_ANNOTATIONS) {
        None => return,
        Some(absent @ Value::Null) => {
            *absent = Value::Object(Map::new());
            return;
        }
        Some(Value::Object(annotations)) => problem_of(annotations),
        Some(other) => Some(wrong_type(&place(), other, "an object of strings").msg),
    };
    if let Some(problem) = problem {
        runtime_config.shift_remove(POD_ANNOTATIONS);
        warnings.push(format!("{problem}; the annotations from the runtime are ignored"));
    }
}

fn problem_of(annotations: &Map<String, Value>) -> Option<String> {
    let mut size = 0;
    for (key, value) in annotations {
        let Value::String(text) = value else {
            return Some(wrong_type(&format!("{}.{key}", place()), value, "a string").msg);
        };
        size += key.len() + text.len();
    }
    (size > MAX_SIZE).then(|| format!("{}: expected at most {MAX_SIZE} bytes, got {size}", place()))
}

fn place() -> String {
    format!("runtimeConfig.{POD_ANNOTATIONS}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, NetConf};
    use serde_json::json;

    fn conf(runtime_config: &Value) -> NetConf {
        let conf = json!({"name": "n", "type": "detour", "runtimeConfig": runtime_config});
        NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("accepted")
    }

    fn passed(annotations: &Value) -> NetConf {
        conf(&json!({POD_ANNOTATIONS: annotations, "mac": "m"}))
    }

    #[test]
    fn annotations_of_the_runtime_are_read() {
        assert_eq!(conf(&json!({})).pod_annotations(), None);
        let read = passed(&json!({"a": "1", "b": ""}));
        assert_eq!(read.pod_annotations(), json!({"a": "1", "b": ""}).as_object());
        assert_eq!(read.warnings, [""; 0]);
        let none = passed(&Value::Null);
        assert_eq!((none.pod_annotations(), none.warnings.len()), (Some(&Map::new()), 0));
    }

    #[test]
    fn invalid_annotations_are_ignored_as_a_whole_with_a_warning() {
        let key = "x".repeat(MAX_SIZE);
        let table = [
            (json!([]), "runtimeConfig.io.kubernetes.cri.pod-annotations: invalid value []; expected an object"),
            (json!("a"), "expected an object of strings; the annotations from the runtime are ignored"),
            (json!({"a": "1", "b": 7}), "pod-annotations.b: invalid value 7; expected a string; the annotations"),
            (json!({"a": null}), "pod-annotations.a: invalid value null"),
            (json!({key.as_str(): "1"}), "expected at most 524288 bytes, got 524289"),
        ];
        for (annotations, warning) in table {
            let ignored = passed(&annotations);
            assert_eq!(ignored.pod_annotations(), None);
            assert_eq!(Value::Object(ignored.runtime_config), json!({"mac": "m"}), "other keys remain");
            assert!(ignored.warnings[0].contains(warning), "{warning}: {:?}", ignored.warnings);
        }
        assert!(passed(&json!({key[1..]: "1"})).pod_annotations().is_some());
    }
}
