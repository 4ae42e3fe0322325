//! An ADD starts no process and no thread, so that it depends on no tool of the host.

use crate::configuration::{exclude_1337, story};
use crate::istio::Dns;
use crate::pod;
use crate::world::*;
use std::io::Write;
use std::process::{Command, Stdio};

#[test]
fn add_starts_no_process_and_no_thread() {
    let world = World::new(Families::Both);
    let configuration = exclude_1337(&story(&world, Dns::Captured, &[]));
    let log = std::env::temp_dir().join(format!("detour-processes-{}", std::process::id()));
    let args = format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID={}", pod::UID);
    let mut traced = Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=execve,fork,vfork,clone,clone3", "-o"])
        .args([log.as_os_str(), "-E".as_ref(), "PATH=".as_ref(), env!("CARGO_BIN_EXE_detour").as_ref()])
        .env("CNI_COMMAND", "ADD")
        .env("CNI_CONTAINERID", "processes")
        .env("CNI_NETNS", world.netns())
        .env("CNI_IFNAME", "net1")
        .env("CNI_PATH", "/nowhere")
        .env("CNI_ARGS", args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("strace is there");
    traced.stdin.take().expect("a pipe").write_all(configuration.to_string().as_bytes()).expect("writable");
    assert!(traced.wait().expect("it ends").success());
    assert!(!world.iptables_save(Family::V4).is_empty());
    let calls = std::fs::read_to_string(&log).expect("written");
    std::fs::remove_file(&log).expect("removable");
    let (started, threads): (Vec<_>, Vec<_>) = calls.lines().partition(|line| !line.contains("CLONE_THREAD"));
    let started: Vec<_> = started.into_iter().filter(|line| line.contains('(')).collect();
    assert_eq!(started.len(), 1, "only the plugin itself: {started:#?}");
    assert!(started[0].contains("execve") && threads.is_empty(), "{calls}");
    std::fs::remove_dir_all("/run/detour/attachments/processes").expect("its state is there");
}
