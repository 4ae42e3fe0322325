//! The objects in etcd: saved before the first test, and restored after each one.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

/// Keys and values in Base64.
pub(crate) type Objects = BTreeMap<String, String>;

/// Returns the objects of the etcd on this port.
pub(crate) fn objects(port: u16) -> Objects {
    let all = json!({"key": BASE64_STANDARD.encode("/registry/"), "range_end": BASE64_STANDARD.encode("/registry0")});
    let answer = post(port, "range", &all);
    let text = |value: &Value| value.as_str().expect("Base64").to_owned();
    let pairs = answer["kvs"].as_array().expect("keys").iter();
    let mut found: Objects = pairs.map(|pair| (text(&pair["key"]), text(&pair["value"]))).collect();
    // The API server renews its lease all the time.
    found.retain(|key, _| {
        !BASE64_STANDARD.decode(key).expect("Base64").starts_with(b"/registry/leases/kube-system/apiserver-")
    });
    found
}

/// Deletes the objects that were created since, and restores those that were changed or deleted.
pub(crate) fn restore(port: u16, before: &Objects) {
    let now = objects(port);
    for key in now.keys().filter(|key| !before.contains_key(*key)) {
        post(port, "deleterange", &json!({"key": key}));
    }
    for (key, value) in before.iter().filter(|(key, value)| now.get(*key) != Some(value)) {
        post(port, "put", &json!({"key": key, "value": value}));
    }
}

/// Sends a request to the JSON gateway of etcd, with HTTP 1.0 so that the answer ends with the connection.
fn post(port: u16, method: &str, body: &Value) -> Value {
    let body = body.to_string();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("etcd listens");
    write!(stream, "POST /v3/kv/{method} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (_, json) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method}: {answer:?}"));
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{method}: {error}: {answer:?}"))
}
