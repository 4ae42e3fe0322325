//! Endless inputs and outputs that are not read: plugin and agent stop waiting after a timeout, and their memory is
//! limited.

mod support;

use support::directory;

use directory::Directory;
use nix::fcntl::OFlag;
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
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
    for (command, text) in [("ADD", ""), ("DEL", "{\"name\":")] {
        let mut process = call(command).spawn().expect("it starts");
        let mut stdin = process.stdin.take().expect("a pipe");
        stdin.write_all(text.as_bytes()).expect("it fits into the pipe");
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
    fs::write(
        &program,
        "#!/bin/sh\ni=0\nwhile [ $i -lt 3000 ]; do echo \"line $i of many, many others\" >&2; i=$((i+1)); done\n",
    )
    .expect("written");
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("set");
    let mut conf: Value = serde_json::from_str(&conf()).expect("JSON");
    conf["chain"] = json!([{"type": "noisy"}]);
    let (_reader, writer) = full_pipe();
    let mut process = call("ADD").env("CNI_PATH", &*directory).stderr(writer).spawn().expect("it starts");
    process.stdin.take().expect("a pipe").write_all(conf.to_string().as_bytes()).expect("written");
    let (status, _) = end(&mut process);
    assert!(status.success(), "{:?}", error(&mut process));
}

#[test]
fn a_full_stdout_is_a_failure() {
    let (_reader, writer) = full_pipe();
    let mut process = call("VERSION").stdout(writer).spawn().expect("it starts");
    assert_eq!(end(&mut process).0.code(), Some(1));
}

fn directory(name: &str) -> Directory {
    Directory::new(&format!("limits-{name}"))
}

/// Starts a server that answers each request with `head` and an endless sequence of the chunk `piece`.
fn endless(head: &'static str, piece: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || flood(&stream, head, piece));
        }
    });
    address
}

fn flood(mut stream: &TcpStream, head: &str, piece: &str) {
    let mut lines = BufReader::new(stream).lines();
    while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
    let mut sent = stream.write_all(head.as_bytes());
    let piece = piece.repeat(10_000);
    let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
    while sent.is_ok() {
        sent = stream.write_all(chunk.as_bytes());
    }
}

const CHUNKED: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
const REFUSED: &str = "HTTP/1.1 500 no\r\ntransfer-encoding: chunked\r\n\r\n";
const ANNOUNCED: &str = "HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n";

#[test]
fn an_endless_response_is_read_up_to_the_limit() {
    for (head, piece) in [(CHUNKED, "x"), (CHUNKED, "{\"kind\":\"Pod\"}\n"), (REFUSED, " "), (ANNOUNCED, " ")] {
        let directory = directory("endless");
        let kubeconfig = directory.join("kubeconfig");
        let server = format!("http://admin:s3cr3t@{}", endless(head, piece));
        let text = json!({
            "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": ""}}],
            "clusters": [{"name": "k", "cluster": {"server": server}}],
        });
        fs::write(&kubeconfig, text.to_string()).expect("written");
        let conf = json!({
            "cniVersion": "1.1.0", "name": "n", "type": "detour", "kubernetes": {"kubeconfig": kubeconfig},
            "chain": [{"type": "istio-redirect"}],
        });
        let mut detour = call("ADD");
        // The pod is looked up before its network namespace.
        detour.env("CNI_NETNS", "/run/netns/detour-absent");
        let mut process = detour.spawn().expect("it starts");
        process.stdin.take().expect("a pipe").write_all(conf.to_string().as_bytes()).expect("written");
        let (_, memory) = end(&mut process);
        let (code, text) = error(&mut process);
        let expected =
            "GET /api/v1/namespaces/shop/pods/web-0: expected a response of at most 16777216 bytes, got more";
        assert!(code == 7 && text.contains(expected) && text.contains("pod shop/web-0"), "{text}");
        assert!(!text.contains("s3cr3t") && !text.contains("admin"), "{text}");
        assert!(memory < MEMORY, "{memory} KiB");
    }
}

#[test]
fn the_agent_limits_lists_to_a_page() {
    let root = directory("agent");
    fs::create_dir_all(root.join("sa")).expect("made");
    // No server is checked by it: this one is asked in plain HTTP.
    let authority = rcgen::generate_simple_self_signed(["api".to_owned()]).expect("a certificate");
    fs::write(root.join("sa/ca.crt"), authority.cert.pem()).expect("written");
    fs::write(root.join("sa/token"), "token").expect("written");
    let mut process = Command::new(env!("CARGO_BIN_EXE_detour"))
        .args(["agent", "--node-name=n", "--socket=", "--repair=off"])
        .arg(format!("--root={}", root.display()))
        .arg(format!("--service-account={}/sa", root.display()))
        .arg(format!("--api-server=http://{}", endless(CHUNKED, "{\"items\":[")))
        .env_clear()
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let lines = BufReader::new(process.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    let (sender, log) = channel();
    thread::spawn(move || lines.into_iter().try_for_each(|line| sender.send(line)));
    let mut wanted = vec!["GET /api/v1/pods", "GET /api/v1/namespaces"];
    let is_reason = |line: &str, request: &str| {
        line.contains(&format!("{request}: expected a page of at most 67108864 bytes, got more"))
    };
    let mut seen = Vec::new();
    while !wanted.is_empty() {
        let Ok(line) = log.recv_timeout(DEADLINE) else { break };
        wanted.retain(|request| !is_reason(&line, request));
        seen.push(line);
    }
    process.kill().expect("a child");
    process.wait().expect("a child");
    assert!(wanted.is_empty(), "{wanted:?} in {seen:#?}");
}
