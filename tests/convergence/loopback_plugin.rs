//! Calls at the same time as the runtime's loopback plugin. containerd runs that plugin concurrently with the plugins of
//! the pod's network. It sets lo up, and fails if lo then has an address that is not a loopback address.

use crate::attachment::{Attachment, Facts, Slot};
use crate::node::on_a_node;
use crate::pod::Pod;
use crate::support::called::start;
use crate::support::wait::until;
use std::path::Path;
use std::process::{Child, Command, Output};

const RUNS: usize = 4;

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
    start(&mut command, r#"{ "cniVersion": "0.3.1", "name": "cni-loopback", "type": "loopback" }"#)
}

fn ended(call: Child) -> Output {
    call.wait_with_output().expect("it ends")
}

/// Waits until the call has ended, or has recorded what it is about to add.
fn wait_until_recorded(call: &mut Child, pod: &Pod) {
    let records = Path::new("/run/detour/attachments").join(&pod.container_id);
    until("a record", || records.exists() || call.try_wait().expect("it is a child").is_some());
}

fn has_proxy_address(pod: &Pod) -> bool {
    pod.tool("ip", &["-6", "address", "show", "dev", "lo"], "").contains("inet6 ::6/128")
}

/// Runs both plugins and returns the error of the one that fails. The loopback plugin starts when lo is the only thing
/// for which the ADD waits.
fn run_both(attachment: Attachment) -> Option<String> {
    let pod = Pod::with_lo_down();
    let mut add = pod.start("ADD", attachment);
    wait_until_recorded(&mut add, &pod);
    let loopback = ended(start_loopback(&pod));
    let failed = [loopback, ended(add)].into_iter().find(|output| !output.status.success());
    if let Some(output) = failed {
        return Some(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    assert!(has_proxy_address(&pod));
    pod.check(attachment).done();
    pod.del(attachment).done();
    assert!(!has_proxy_address(&pod));
    None
}

#[test]
fn an_add_that_finds_lo_down_waits_for_the_loopback_plugin() {
    on_a_node(|| {
        for run in 0..RUNS {
            assert_eq!(run_both(Slot::Detour.with([Facts::Plain, Facts::Tproxy][run % 2])), None);
        }
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
