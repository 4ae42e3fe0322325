//! A panic of the plugin is reported as an error object.

use detour_cni::plugin;
use serde_json::Value;
use std::env;
use std::io::{self, Read};
use std::process::Command;

/// Set in the process that panics, which ends it.
const HERE: &str = "PANIC_HERE";

struct BrokenStdin;

impl Read for BrokenStdin {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        panic!("stdin broke")
    }
}

#[test]
fn a_panic_is_one_error_object_and_exit_code_1() {
    if env::var_os(HERE).is_some() {
        drop(plugin::call(|name| env::var_os(name), BrokenStdin, "detour"));
        unreachable!("the panic ends the process");
    }
    let mut child = Command::new(env::current_exe().expect("this test"));
    child.args(["--exact", "panic::a_panic_is_one_error_object_and_exit_code_1", "--nocapture"]);
    child.env_clear().envs([(HERE, "1"), ("CNI_COMMAND", "GC"), ("CNI_PATH", "/")]);
    let output = child.output().expect("it starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    let object = &stdout[stdout.find('{').expect("an object")..];
    let error: Value = serde_json::from_str(object).expect("one object and nothing after it");
    assert_eq!((&error["code"], &error["cniVersion"]), (&Value::from(108), &Value::from("1.1.0")));
    let msg = error["msg"].as_str().expect("a string");
    assert!(msg.contains("tests/plugin/panic.rs") && msg.contains("stdin broke"), "{msg}");
}
