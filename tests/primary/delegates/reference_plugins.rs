//! The reference plugins as packaged by Debian (1.1.1, CNI versions up to 1.0.0), chained after detour's own
//! sub-plugins.

use crate::delegates::pod::{Pod, conf, with};
use serde_json::{Value, json};
use std::path::Path;

const BIN: &str = "/usr/lib/cni";

#[track_caller]
fn succeeds(pod: &Pod, command: &str, conf: &Value) -> Value {
    let output = pod.call(command, Path::new(BIN), conf);
    assert!(output.success, "{output:?}");
    output.stdout
}

#[test]
fn tuning_and_loopback_in_a_chain() {
    let pod = Pod::new();
    pod.run(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other"]);
    let sysctl = json!({"net.ipv4.conf.all.log_martians": "1"});
    let conf = conf("1.0.0", &[json!({"type": "loopback"}), json!({"type": "tuning", "sysctl": sysctl})]);
    let previous = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": pod.netns()}], "ips": []});
    let conf = with(conf, &json!({"prevResult": previous}));
    let result = succeeds(&pod, "ADD", &conf);
    assert_eq!(result["interfaces"][0]["name"], "eth0");
    assert_eq!(pod.run(&["cat", "/proc/sys/net/ipv4/conf/all/log_martians"]), "1\n");
    assert!(pod.run(&["ip", "link", "show", "lo"]).contains("UP"));
    assert!(!pod.rules().is_empty());
    succeeds(&pod, "CHECK", &with(conf.clone(), &json!({"prevResult": result})));
    pod.run(&["ip", "link", "set", "lo", "down"]);
    let output = pod.call("CHECK", Path::new(BIN), &with(conf.clone(), &json!({"prevResult": result})));
    assert!(!output.success && output.stdout["msg"].as_str().is_some_and(|msg| msg.contains("loopback")), "{output:?}");
    assert_eq!(succeeds(&pod, "DEL", &conf), Value::Null);
    assert_eq!(pod.rules(), [""; 0]);
}

/// An interface plugin with IPAM creates a pod's interface and releases its address.
#[test]
fn bridge_and_host_local_make_an_interface() {
    let pod = Pod::new();
    let data = std::env::temp_dir().join(&pod.name);
    let bridge = format!("dd{}", std::process::id() % 1_000_000);
    let ipam = json!({"type": "host-local", "subnet": "10.213.7.0/24", "dataDir": data});
    let conf = conf("1.0.0", &[json!({"type": "bridge", "bridge": bridge, "ipam": ipam})]);
    let result = succeeds(&pod, "ADD", &conf);
    let address = result["ips"][0]["address"].as_str().expect("an address").to_owned();
    assert!(address.starts_with("10.213.7."), "{result}");
    assert!(pod.run(&["ip", "-4", "address", "show", "eth0"]).contains(&address));
    succeeds(&pod, "CHECK", &with(conf.clone(), &json!({"prevResult": result})));
    succeeds(&pod, "DEL", &with(conf.clone(), &json!({"prevResult": result})));
    succeeds(&pod, "DEL", &conf);
    assert!(!pod.run(&["ip", "link"]).contains("eth0"));
    assert!(!data.join("mesh").join(address.trim_end_matches("/24")).exists(), "the address is free again");
    let deleted = std::process::Command::new("ip").args(["link", "delete", &bridge]).status().expect("it runs");
    assert!(deleted.success());
    std::fs::remove_dir_all(&data).expect("removable");
}
