//! The end of the plugin while an executable runs. `convergence::faults::executables` has the faults of executables.

use crate::delegates::pod::{Pod, conf, start};
use crate::delegates::recorders::Recorders;
use crate::support::called::Called;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::json;
use std::time::{Duration, Instant};

/// Like stopping the runtime's service.
#[test]
fn sigterm_to_the_plugin_kills_the_executable_and_undoes_the_add() {
    let hang = "if [ $CNI_COMMAND = ADD ]; then /bin/sleep 1000 & echo $$ > ${0%/bin/*}/pid; wait; fi";
    let recorders = Recorders::new().with("first", "").with("second", hang);
    let pod = Pod::new();
    let conf = conf("1.0.0", &[json!({"type": "first"}), json!({"type": "second"})]);
    let bin = recorders.bin();
    let child = start(&pod.environment("ADD", &bin.display().to_string()), &conf);
    let file = bin.with_file_name("pid");
    let deadline = Instant::now() + Duration::from_secs(120);
    let group = loop {
        assert!(Instant::now() < deadline, "it does not start");
        if let Some(pid) = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok()) {
            break Pid::from_raw(pid);
        }
        std::thread::yield_now();
    };
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).expect("it runs");
    let output = Called::ended(child);
    assert_eq!(output.stdout["code"], 11, "{}", output.stdout);
    assert!(output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("SIGTERM was received")), "{}", output.stdout);
    assert_eq!(recorders.order(), ["ADD first", "ADD second", "DEL second", "DEL first"]);
    assert_eq!(pod.rules(), [""; 0]);
    // Its child is killed too; init reaps it later.
    while killpg(group, None) != Err(Errno::ESRCH) {
        assert!(Instant::now() < deadline, "something of its process group still runs");
        std::thread::yield_now();
    }
}
