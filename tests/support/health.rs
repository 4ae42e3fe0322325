//! Requests to the health address of an agent.

use std::io::{Read, Write};
use std::net::TcpStream;

/// Returns head and body of the answer.
pub(crate) fn fetch(address: &str, path: &str) -> (String, String) {
    let mut connection = TcpStream::connect(address).expect("it listens");
    write!(connection, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    (head.to_owned(), body.to_owned())
}

/// Returns status and body of the answer.
pub(crate) fn get(address: &str, path: &str) -> (String, String) {
    let (head, body) = fetch(address, path);
    (head.split(' ').nth(1).expect("a status").to_owned(), body.trim().to_owned())
}

/// Returns whether the node is ready.
pub(crate) fn is_ready(address: &str) -> bool {
    get(address, "/readyz").0 == "200"
}
