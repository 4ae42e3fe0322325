//! What a plugin's exit and stdout mean (SPEC.md, "Success" and "Error").
//!
//! What a plugin printed, as a result in the version of the configuration.

use super::process::{ChildExit, said};
use crate::cni::result::AddResult;
use crate::cni::version::ResultShape;
use crate::cni::{CniCommand, Code, Error};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// How much of a text that makes no sense an error quotes, in characters.
const QUOTED: usize = 200;
/// The reference library's code for an error that has none of its own (`pkg/types`, `ErrInternal`).
const UNSPECIFIC: u32 = 999;

/// The result on stdout, where the call has one; `None` where there is nothing on it.
///
/// # Errors
/// The plugin's own, with its code, message and details. [`Code::Delegate`] where it has no code of
/// its own, said nothing, nothing that makes sense, or was ended by a signal.
pub(super) fn of(program: &Path, command: CniCommand, ended: &ChildExit) -> Result<Option<Value>, Error> {
    if !ended.status.success() {
        return Err(failure(program, ended));
    }
    let has_result = command == CniCommand::Add && !ended.stdout.trim_ascii().is_empty();
    if !has_result {
        return Ok(None);
    }
    serde_json::from_slice(&ended.stdout).map(Some).map_err(|error| {
        let program = program.display();
        let printed = quoted(&ended.stdout);
        Error::new(Code::Delegate, format!("{program}: what it printed is not JSON ({error}): {printed}"))
    })
}

/// A plugin's error object. The reference library has no default for the code; a plugin in shell
/// may well forget it.
#[derive(Deserialize)]
struct PluginError {
    #[serde(default)]
    code: u32,
    msg: String,
    #[serde(default)]
    details: String,
}

fn failure(program: &Path, ended: &ChildExit) -> Error {
    // A plugin whose work was refused afterwards has printed a result before (`pkg/skel`, the
    // check of namespaces): the last object counts.
    let objects = serde_json::Deserializer::from_slice(&ended.stdout).into_iter::<Value>();
    let last = objects.map_while(Result::ok).last();
    if let Some(answer) = last.and_then(|object| serde_json::from_value::<PluginError>(object).ok()) {
        let error = Error::new(Code::Delegate, answer.msg).with_details(answer.details);
        return if [0, UNSPECIFIC].contains(&answer.code) { error } else { error.answered_with(answer.code) };
    }
    let what = if ended.stdout.trim_ascii().is_empty() {
        "without a message".to_owned()
    } else {
        format!("and what it printed is no CNI error: {}", quoted(&ended.stdout))
    };
    let msg = format!("{}: it failed ({}) {what}{}", program.display(), ended.status, said(&ended.last_words));
    Error::new(Code::Delegate, msg)
}

fn quoted(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let beginning: String = text.chars().take(QUOTED).collect();
    if beginning.len() < text.len() { format!("{beginning:?}…") } else { format!("{beginning:?}") }
}

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
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    /// `status` is wait(2)'s: the exit code in the second byte, a signal in the first.
    fn answer(command: CniCommand, status: i32, stdout: &str, stderr: &str) -> Result<Option<Value>, Error> {
        let status = ExitStatus::from_raw(status);
        let ended = ChildExit { status, stdout: stdout.into(), last_words: stderr.into() };
        of(Path::new("/bin/x"), command, &ended)
    }

    fn refused(status: i32, stdout: &str, stderr: &str) -> Error {
        answer(CniCommand::Add, status, stdout, stderr).expect_err("it failed")
    }

    #[test]
    fn a_result_is_adds() {
        let result = answer(CniCommand::Add, 0, " {\"ips\": []}\n", "");
        assert_eq!(result, Ok(Some(json!({"ips": []}))));
        assert_eq!(answer(CniCommand::Add, 0, " \n", ""), Ok(None));
        for command in [CniCommand::Del, CniCommand::Check, CniCommand::Gc, CniCommand::Status] {
            assert_eq!(answer(command, 0, "done", ""), Ok(None));
        }
        let error = refused(0, "done", "");
        assert_eq!(error.code, Code::Delegate);
        assert!(error.msg.starts_with("/bin/x: what it printed is not JSON") && error.msg.ends_with("\"done\""));
    }

    #[test]
    fn an_error_keeps_code_message_and_details() {
        let error = refused(256, r#"{"cniVersion": "1.0.0", "code": 11, "msg": "later", "details": "why"}"#, "noise");
        assert_eq!((error.code, error.number()), (Code::Delegate, 11));
        assert_eq!((error.msg.as_str(), error.details.as_str()), ("later", "why"));
        for unspecific in [r#"{"code": 999, "msg": "m"}"#, r#"{"code": 0, "msg": "m"}"#, r#"{"msg": "m"}"#] {
            let error = refused(256, unspecific, "");
            assert_eq!((error.number(), error.msg.as_str()), (106, "m"));
        }
    }

    #[test]
    fn a_result_before_the_error_is_passed_over() {
        let error = refused(256, "{\"cniVersion\": \"1.0.0\"}\n{\"code\": 8, \"msg\": \"own netns\"}\n", "");
        assert_eq!((error.number(), error.msg.as_str()), (8, "own netns"));
    }

    #[test]
    fn without_an_error_object_it_is_said_what_was_seen() {
        let error = refused(3 << 8, "", "no such thing");
        let wanted = r#"/bin/x: it failed (exit status: 3) without a message (stderr: "no such thing")"#;
        assert_eq!((error.code, error.msg.as_str()), (Code::Delegate, wanted));
        assert!(refused(9, "", "").msg.contains("signal: 9"));
        for garbage in ["boom", "[]", r#"{"code": 7}"#, r#"{"code": -1, "msg": "m"}"#] {
            assert!(refused(256, garbage, "").msg.contains("is no CNI error: "), "{garbage}");
        }
        let long = refused(256, &"ä".repeat(10_000), "");
        assert!(long.msg.ends_with('…') && long.msg.chars().count() < 300, "{long}");
    }

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
            assert!(error.msg.starts_with("result") && error.msg.contains("invalid value "), "{error}");
        }
        let without_address = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]});
        assert_eq!(accept(without_address, "0.2.0").map_err(|error| error.code), Err(Code::Delegate));
    }
}
