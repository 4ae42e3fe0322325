//! Sessions with real runtimes, recorded by `hack/record-nri.sh` in `tests/golden/nri`. A line of a `.session` file is
//! what one side sent, in Base64. The `.calls` file contains the calls of the handler.

use super::plugin::{Call, Plugin, Report, socket_path};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use detour_cni::agent::nri::NriStatus;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nri").join(name)
}

/// Returns the status and the calls as text, up to the removal of a container.
fn reports_until_removal(plugin: &Plugin) -> String {
    let (mut text, mut removed) = (String::new(), false);
    while !removed {
        match plugin.next() {
            // A runtime that starts has a socket before it listens.
            Report::Status(NriStatus::Disconnected(_)) => continue,
            Report::Status(status) => writeln!(text, "{status:#?}").expect("written"),
            Report::Call(call) => {
                removed = matches!(call, Call::Removed(..));
                writeln!(text, "{call:#?}").expect("written");
            }
        }
    }
    text
}

fn replay(name: &str) {
    let (_directory, path) = socket_path();
    let listener = UnixListener::bind(&path).expect("bound");
    let plugin = Plugin::start(&path);
    let (mut peer, _) = listener.accept().expect("accepted");
    peer.set_read_timeout(Some(super::plugin::DEADLINE)).expect("set");
    for line in fs::read_to_string(golden(&format!("{name}.session"))).expect("recorded").lines() {
        let (side, bytes) = line.split_once(' ').expect("a side");
        let bytes = BASE64_STANDARD.decode(bytes).expect("Base64");
        if side == "runtime" {
            peer.write_all(&bytes).expect("sent");
        } else {
            let mut sent = vec![0; bytes.len()];
            peer.read_exact(&mut sent).expect("received");
            assert_eq!(sent, bytes, "an answer to {name}");
        }
    }
    let expected = fs::read_to_string(golden(&format!("{name}.calls"))).expect("recorded");
    assert_eq!(reports_until_removal(&plugin), expected);
}

#[test]
fn a_session_of_containerd_is_answered_as_recorded() {
    replay("containerd");
}

#[test]
fn a_session_of_cri_o_is_answered_as_recorded() {
    replay("cri-o");
}

/// Not a test: `hack/record-nri.sh` runs it to record a session with the runtime on the socket `NRI_SOCKET`.
#[test]
fn records_a_session() {
    let (Some(socket), Ok(name)) = (std::env::var_os("NRI_SOCKET"), std::env::var("NRI_NAME")) else { return };
    let (_directory, path) = socket_path();
    let listener = UnixListener::bind(&path).expect("bound");
    let plugin = Plugin::start(&path);
    let (peer, _) = listener.accept().expect("accepted");
    let runtime = UnixStream::connect(socket).expect("connected");
    let lines = Arc::new(Mutex::new(Vec::<(&str, Vec<u8>)>::new()));
    let copy = |side, mut from: UnixStream, mut to: UnixStream| {
        let lines = Arc::clone(&lines);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 20];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                let mut lines = lines.lock().expect("no panic");
                match lines.last_mut() {
                    Some((last, bytes)) if *last == side => bytes.extend(&buffer[..length]),
                    _ => lines.push((side, buffer[..length].to_vec())),
                }
                // Fails if the plugin has ended.
                let _ = to.write_all(&buffer[..length]);
            }
        })
    };
    let clone = |stream: &UnixStream| stream.try_clone().expect("copied");
    let to_plugin = copy("runtime", clone(&runtime), clone(&peer));
    let to_runtime = copy("plugin", peer, clone(&runtime));
    println!("ready");
    let calls = reports_until_removal(&plugin);
    plugin.end();
    to_runtime.join().expect("no panic");
    runtime.shutdown(Shutdown::Both).expect("closed");
    to_plugin.join().expect("no panic");
    let lines = lines.lock().expect("no panic");
    let lines: String =
        lines.iter().map(|(side, bytes)| format!("{side} {}\n", BASE64_STANDARD.encode(bytes))).collect();
    fs::write(golden(&format!("{name}.session")), lines).expect("written");
    fs::write(golden(&format!("{name}.calls")), calls).expect("written");
}
