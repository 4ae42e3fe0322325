//! Calls at the same time as the runtime's loopback plugin. containerd runs that plugin concurrently with the plugins of
//! the pod's network. It sets lo up, and fails if lo then has an address that is not a loopback address.

use crate::attachment::{Attachment, Facts, Slot};
use crate::node::on_a_node;
use crate::pod::Pod;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);
/// The number of runs, unless the environment variable `LOOPBACK_RUNS` sets another.
const RUNS: usize = 10;

/// Starts the reference plugin, as containerd does.
fn start_loopback(pod: &Pod) -> Child {
    let mut command = Command::new("/usr/lib/cni/loopback");
    command.env_clear().envs([
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", &pod.container_id),
        ("CNI_NETNS", &pod.netns().display().to_string()),
        ("CNI_IFNAME", "lo"),
        ("CNI_PATH", "/usr/lib/cni"),
    ]);
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let configuration = br#"{ "cniVersion": "0.3.1", "name": "cni-loopback", "type": "loopback" }"#;
    writer.write_all(configuration).expect("it fits into the pipe");
    drop(writer);
    command.stdin(reader).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the loopback plugin is needed")
}

fn ended(call: Child) -> Output {
    call.wait_with_output().expect("it ends")
}

/// Waits until the call has ended, or has recorded what it is about to add.
fn wait_until_recorded(call: &mut Child, pod: &Pod) {
    let records = Path::new("/run/detour/attachments").join(&pod.container_id);
    let deadline = Instant::now() + DEADLINE;
    while !records.exists() && call.try_wait().expect("it is a child").is_none() {
        assert!(Instant::now() < deadline, "no record");
        thread::yield_now();
    }
}

fn has_proxy_address(pod: &Pod) -> bool {
    pod.tool("ip", &["-6", "address", "show", "dev", "lo"], "").contains("inet6 ::6/128")
}

/// Runs both plugins; neither may fail. The loopback plugin starts first, at the same time, or last.
fn start_both(attachment: Attachment, order: usize) -> Result<(), String> {
    let pod = Pod::with_lo_down();
    let early = (order == 0).then(|| start_loopback(&pod));
    let mut add = pod.start("ADD", attachment);
    if order == 2 {
        wait_until_recorded(&mut add, &pod);
    }
    let loopback = ended(early.unwrap_or_else(|| start_loopback(&pod)));
    let add = ended(add);
    for output in [loopback, add] {
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stdout).into_owned());
        }
    }
    assert!(has_proxy_address(&pod));
    pod.check(attachment).done();
    pod.del(attachment).done();
    assert!(!has_proxy_address(&pod));
    Ok(())
}

#[test]
fn an_add_does_not_make_a_concurrent_loopback_plugin_fail() {
    let runs = std::env::var("LOOPBACK_RUNS").map_or(RUNS, |text| text.parse().expect("a number"));
    on_a_node(move || {
        let mut failures = Vec::new();
        for run in 0..runs {
            let facts = [Facts::Plain, Facts::Tproxy][run % 2];
            let failure = start_both(Slot::Detour.with(facts), run % 3).err();
            failures.extend(failure.map(|failure| format!("{run}, {facts:?}: {failure}")));
        }
        assert!(failures.is_empty(), "{} of {runs} failed: {failures:#?}", failures.len());
    });
}

#[test]
fn an_add_completes_if_lo_stays_down() {
    on_a_node(|| {
        let pod = Pod::with_lo_down();
        let attachment = Slot::Detour.with(Facts::Plain);
        pod.add(attachment).done();
        assert!(has_proxy_address(&pod));
        pod.check(attachment).done();
        pod.del(attachment).done();
    });
}
