//! Endless inputs and outputs that are not read: plugin and agent stop waiting after a timeout, and their memory is
//! limited.

use crate::support::directory;
use crate::support::program::write_executable;

use directory::Directory;
use nix::fcntl::OFlag;
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The maximum duration of each call, also on a slow machine.
const DEADLINE: Duration = Duration::from_secs(60);
/// The maximum memory of a call, in KiB.
const MEMORY: u64 = 64 << 10;

/// Returns a call of the plugin for a pod, with a pipe as stdin.
fn call(command: &str) -> Command {
    let mut detour = Command::new(env!("CARGO_BIN_EXE_detour"));
    detour.env_clear().envs([
        ("CNI_COMMAND", command),
        ("CNI_CONTAINERID", "limits-test"),
        ("CNI_NETNS", "/run/netns/limits-test-none"),
        ("CNI_IFNAME", "net1"),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
        ("CNI_PATH", "/opt/cni/bin"),
    ]);
    detour.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    detour
}

/// Returns a configuration that skips the pod and causes a warning.
fn conf() -> String {
    let kubernetes = json!({"odd": "x".repeat(1000), "exclude_namespaces": ["shop"]});
    json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "kubernetes": kubernetes}).to_string()
}

/// Waits for the end of a process; returns its status and its maximum memory, in KiB.
#[track_caller]
fn end(process: &mut Child) -> (ExitStatus, u64) {
    let (started, status_file) = (Instant::now(), format!("/proc/{}/status", process.id()));
    let mut most = 0;
    loop {
        let text = fs::read_to_string(&status_file).unwrap_or_default();
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        most = most.max(peak.unwrap_or(0));
        if let Some(status) = process.try_wait().expect("a child") {
            return (status, most);
        }
        if started.elapsed() > DEADLINE {
            process.kill().expect("a child");
            panic!("it does not end; memory: {most} KiB");
        }
        thread::yield_now();
    }
}

/// Returns the error object on the stdout of a process that has ended.
fn error(process: &mut Child) -> (u64, String) {
    let mut text = String::new();
    process.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
    let error: Value = serde_json::from_str(&text).expect("JSON");
    let part = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
    (error["code"].as_u64().expect("a code"), format!("{}: {}", part("msg"), part("details")))
}

/// Returns a full pipe.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(OFlag::O_NONBLOCK.bits());
    let mut filler = options.open(format!("/proc/self/fd/{}", writer.as_raw_fd())).expect("opened again");
    while filler.write(&[b'-'; 4096]).is_ok() {}
    (reader, writer)
}

#[test]
fn reading_an_open_stdin_times_out() {
    let processes = [("ADD", ""), ("DEL", "{\"name\":")].map(|(command, text)| {
        let mut process = call(command).spawn().expect("it starts");
        let mut stdin = process.stdin.take().expect("a pipe");
        stdin.write_all(text.as_bytes()).expect("it fits into the pipe");
        (process, stdin)
    });
    for (mut process, stdin) in processes {
        let (status, _) = end(&mut process);
        assert_eq!(status.code(), Some(1));
        let (code, text) = error(&mut process);
        assert!(
            code == 5 && text.starts_with("error reading from stdin: expected the end of file within 10 s"),
            "{text}"
        );
        drop(stdin);
    }
}

#[test]
fn an_endless_stdin_is_read_up_to_the_limit() {
    for (opening, item) in [("", " "), ("{\"a\":[", "0,"), ("{\"a\":[", "{},"), ("{\"a\":\"", "x")] {
        let mut process = call("ADD").spawn().expect("it starts");
        let mut stdin = process.stdin.take().expect("a pipe");
        let writer = thread::spawn(move || {
            let piece = item.repeat(100_000);
            let mut sent = stdin.write_all(opening.as_bytes());
            // The plugin closes its end, or this would be 20 GB.
            for _ in 0..100_000 {
                sent = sent.and_then(|()| stdin.write_all(piece.as_bytes()));
            }
            sent.expect_err("it is not read to its end");
        });
        let (_, memory) = end(&mut process);
        let (code, text) = error(&mut process);
        assert!(code == 7 && text.contains("stdin: expected at most 4194304 bytes"), "{text}");
        assert!(memory < MEMORY, "{item:?}: {memory} KiB");
        writer.join().expect("no panic");
    }
}

#[test]
fn a_configuration_with_too_many_values_is_refused_before_parsing() {
    let mut process = call("ADD").spawn().expect("it starts");
    let text = format!("{{\"a\":[{}0]}}", "{},".repeat(1_000_000));
    let _ = process.stdin.take().expect("a pipe").write_all(text.as_bytes());
    let (_, memory) = end(&mut process);
    let (code, text) = error(&mut process);
    assert!(code == 7 && text.contains("expected at most 100000 values"), "{text}");
    assert!(memory < MEMORY, "{memory} KiB");
    let mut process = call("ADD").spawn().expect("it starts");
    let _ = process.stdin.take().expect("a pipe").write_all("[".repeat(4 << 20).as_bytes());
    end(&mut process);
    assert_ne!(error(&mut process).0, 108, "no stack overflow");
}

#[test]
fn a_full_stderr_does_not_delay_the_answer() {
    let (_reader, writer) = full_pipe();
    let mut process = call("ADD").stderr(writer).spawn().expect("it starts");
    process.stdin.take().expect("a pipe").write_all(conf().as_bytes()).expect("written");
    assert!(end(&mut process).0.success());
    let mut answer = String::new();
    process.stdout.take().expect("a pipe").read_to_string(&mut answer).expect("text");
    assert_eq!(answer, "{\"cniVersion\":\"1.1.0\"}\n");
}

#[test]
fn relaying_stderr_of_a_delegate_does_not_delay_the_answer() {
    let directory = directory("noisy");
    let program = directory.join("noisy");
    write_executable(
        &program,
        "#!/bin/sh\ni=0\nwhile [ $i -lt 3000 ]; do echo \"line $i of many, many others\" >&2; i=$((i+1)); done\n",
    );
    let mut conf: Value = serde_json::from_str(&conf()).expect("JSON");
    conf["chain"] = json!([{"type": "noisy"}]);
    let (_reader, writer) = full_pipe();
    let mut process = call("ADD").env("CNI_PATH", &*directory).stderr(writer).spawn().expect("it starts");
    process.stdin.take().expect("a pipe").write_all(conf.to_string().as_bytes()).expect("written");
    let (status, _) = end(&mut process);
    assert!(status.success(), "{:?}", error(&mut process));
}

fn directory(name: &str) -> Directory {
    Directory::new(&format!("limits-{name}"))
}
