//! Delegates: other CNI plugins, run as child processes, one by one or as a configuration list.
//!
//! A child runs in the namespaces of this process: never call this module from a thread that has entered a
//! pod's network namespace. A child inherits no descriptors except stdin, stdout and stderr.

use crate::cni::result::AddResult;
use crate::cni::version::ResultShape;
use crate::cni::{CniCommand, Code, Error};
pub use call::{Call, Executables, Runner};
use process::{ChildExit, stderr_note};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

mod call;
mod network;
pub(crate) mod process;

/// The maximum number of characters that an error quotes of invalid output.
const MAX_QUOTED_CHARS: usize = 200;
/// The reference library's code for an error without a code of its own (`pkg/types`, `ErrInternal`).
const UNSPECIFIC: u32 = 999;

/// Returns the result on stdout: for ADD only, and `None` if stdout is empty.
///
/// # Errors
/// The plugin's own error with its code, message and details. [`Code::Delegate`] if the plugin has no error
/// code, prints nothing or invalid output, or is killed by a signal.
pub(crate) fn parse(program: &Path, command: CniCommand, exit: &ChildExit) -> Result<Option<Value>, Error> {
    if !exit.status.success() {
        return Err(failure(program, exit));
    }
    let has_result = command == CniCommand::Add && !exit.stdout.trim_ascii().is_empty();
    if !has_result {
        return Ok(None);
    }
    serde_json::from_slice(&exit.stdout).map(Some).map_err(|error| {
        let (program, output) = (program.display(), quoted(&exit.stdout));
        let msg = format!("{program}: invalid result on stdout: expected JSON, got {output}: {error}");
        Error::new(Code::Delegate, msg)
    })
}

/// A plugin's error object. The code is optional because plugins written in shell often omit it; the reference
/// library has no default for it.
#[derive(Deserialize)]
struct PluginError {
    #[serde(default)]
    code: u32,
    msg: String,
    #[serde(default)]
    details: String,
}

fn failure(program: &Path, exit: &ChildExit) -> Error {
    // The last object counts: `pkg/skel` checks the plugin's namespace after the plugin has printed its result.
    let objects = serde_json::Deserializer::from_slice(&exit.stdout).into_iter::<Value>();
    let last = objects.map_while(Result::ok).last();
    if let Some(reported) = last.and_then(|object| serde_json::from_value::<PluginError>(object).ok()) {
        let unexplained = || format!("{}: plugin failed without a message", program.display());
        let msg = if reported.msg.is_empty() { unexplained() } else { reported.msg };
        let error = Error::new(Code::Delegate, msg).with_details(reported.details);
        return if [0, UNSPECIFIC].contains(&reported.code) { error } else { error.answered_with(reported.code) };
    }
    let got = if exit.stdout.trim_ascii().is_empty() { "nothing".to_owned() } else { quoted(&exit.stdout) };
    let msg = format!(
        "{}: plugin failed ({}): expected a CNI error object on stdout, got {got}{}",
        program.display(),
        exit.status,
        stderr_note(&exit.stderr_tail)
    );
    Error::new(Code::Delegate, msg)
}

fn quoted(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let start: String = text.chars().take(MAX_QUOTED_CHARS).collect();
    if start.len() < text.len() { format!("{start:?}…") } else { format!("{start:?}") }
}

/// Converts a result to `cni_version`. As in the reference library (`pkg/invoke/exec.go`), a result without a
/// version has the configuration's version, and `null` is an empty result. A result of the same shape keeps all
/// its keys; only `cniVersion` changes.
///
/// # Errors
/// [`Code::Delegate`]: the result is invalid, or `cni_version` can't express it.
pub(crate) fn convert(result: Value, cni_version: &str) -> Result<Value, Error> {
    let result = if result.is_null() { Value::Object(Map::new()) } else { result };
    let invalid = |error: Error| Error { code: Code::Delegate, ..error };
    let parsed = AddResult::read(&result, cni_version).map_err(invalid)?;
    match result {
        Value::Object(mut same) if has_shape(&same, cni_version) => {
            same.insert("cniVersion".to_owned(), cni_version.into());
            Ok(Value::Object(same))
        }
        _ => parsed.to_json(cni_version).map_err(invalid),
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

    /// Parses with `status` as wait(2) encodes it: the exit code in the second byte, a signal in the first.
    fn parsed(command: CniCommand, status: i32, stdout: &str, stderr: &str) -> Result<Option<Value>, Error> {
        let status = ExitStatus::from_raw(status);
        let exit = ChildExit { status, stdout: stdout.into(), stderr_tail: stderr.into() };
        parse(Path::new("/bin/x"), command, &exit)
    }

    fn refused(status: i32, stdout: &str, stderr: &str) -> Error {
        parsed(CniCommand::Add, status, stdout, stderr).expect_err("it failed")
    }

    #[test]
    fn only_add_has_a_result() {
        let result = parsed(CniCommand::Add, 0, " {\"ips\": []}\n", "");
        assert_eq!(result, Ok(Some(json!({"ips": []}))));
        assert_eq!(parsed(CniCommand::Add, 0, " \n", ""), Ok(None));
        for command in [CniCommand::Del, CniCommand::Check, CniCommand::Gc, CniCommand::Status] {
            assert_eq!(parsed(command, 0, "done", ""), Ok(None));
        }
        let error = refused(0, "done", "");
        assert_eq!(error.code, Code::Delegate);
        assert!(error.msg.starts_with("/bin/x: invalid result on stdout: expected JSON, got \"done\": "), "{error}");
    }

    #[test]
    fn a_plugin_error_keeps_code_message_and_details() {
        let error = refused(256, r#"{"cniVersion": "1.0.0", "code": 11, "msg": "later", "details": "why"}"#, "noise");
        assert_eq!((error.code, error.number()), (Code::Delegate, 11));
        assert_eq!((error.msg.as_str(), error.details.as_str()), ("later", "why"));
        for unspecific in [r#"{"code": 999, "msg": "m"}"#, r#"{"code": 0, "msg": "m"}"#, r#"{"msg": "m"}"#] {
            let error = refused(256, unspecific, "");
            assert_eq!((error.number(), error.msg.as_str()), (106, "m"));
        }
    }

    #[test]
    fn an_error_without_a_message_names_the_plugin() {
        let error = refused(256, r#"{"code": 11, "msg": ""}"#, "");
        assert_eq!((error.number(), error.msg.as_str()), (11, "/bin/x: plugin failed without a message"));
    }

    #[test]
    fn a_result_before_the_error_object_is_ignored() {
        let error = refused(256, "{\"cniVersion\": \"1.0.0\"}\n{\"code\": 8, \"msg\": \"own netns\"}\n", "");
        assert_eq!((error.number(), error.msg.as_str()), (8, "own netns"));
    }

    #[test]
    fn a_failure_without_an_error_object_quotes_status_stdout_and_stderr() {
        let error = refused(3 << 8, "", "no such thing");
        let wanted = "/bin/x: plugin failed (exit status: 3): expected a CNI error object on stdout, got nothing \
                      (stderr: \"no such thing\")";
        assert_eq!((error.code, error.msg.as_str()), (Code::Delegate, wanted));
        assert!(refused(9, "", "").msg.contains("signal: 9"));
        for garbage in ["boom", "[]", r#"{"code": 7}"#, r#"{"code": -1, "msg": "m"}"#] {
            assert!(
                refused(256, garbage, "").msg.contains("expected a CNI error object on stdout, got \""),
                "{garbage}"
            );
        }
        let long = refused(256, &"ä".repeat(10_000), "");
        assert!(long.msg.ends_with('…') && long.msg.chars().count() < 300, "{long}");
    }

    #[test]
    fn a_result_of_the_same_shape_keeps_all_keys_but_the_version() {
        for (answer, wanted) in [
            (json!({"cniVersion": "1.0.0", "own": {"x": 1}}), json!({"cniVersion": "1.1.0", "own": {"x": 1}})),
            (json!({"cniVersion": ""}), json!({"cniVersion": "1.1.0"})),
            (json!({"dns": {}}), json!({"dns": {}, "cniVersion": "1.1.0"})),
            (Value::Null, json!({"cniVersion": "1.1.0"})),
        ] {
            assert_eq!(convert(answer, "1.1.0"), Ok(wanted));
        }
    }

    #[test]
    fn a_result_of_another_shape_is_converted() {
        let older = json!({"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.0.0.1/8"}], "dns": {}});
        let newer = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.1/8"}]});
        assert_eq!(convert(older.clone(), "1.0.0"), Ok(newer.clone()));
        assert_eq!(convert(newer, "0.4.0"), Ok(older));
    }

    #[test]
    fn an_invalid_result_is_refused() {
        for answer in [json!({"cniVersion": "9.0.0"}), json!({"cniVersion": 1}), json!([]), json!({"ips": "10.0.0.1"})]
        {
            let error = convert(answer, "1.1.0").expect_err("refused");
            assert_eq!(error.code, Code::Delegate);
            assert!(error.msg.starts_with("result") && error.msg.contains(": invalid "), "{error}");
        }
        let without_address = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]});
        assert_eq!(convert(without_address, "0.2.0").map_err(|error| error.code), Err(Code::Delegate));
    }
}
