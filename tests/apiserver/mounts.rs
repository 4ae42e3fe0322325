//! The agent's pod mounts every directory that the agent writes to.

use crate::node::{OWN_LIST, SETTLED, on_a_node};
use crate::shipped::{base, cluster_with, of_kind};

#[test]
fn the_agent_writes_only_to_mounted_volumes() {
    for (platform, conf) in [("kubernetes", OWN_LIST), ("openshift", "etc/cni/multus/net.d/istio-cni.conf")] {
        let plane = cluster_with(&base(platform));
        let objects = base(platform);
        on_a_node(&plane, &objects, |node| {
            let before = node.files();
            let agent = node.start_agent("a");
            agent.wait_for_log(SETTLED);
            let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
            let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts").iter();
            let mounts: Vec<&str> =
                mounts.filter_map(|mount| mount["mountPath"].as_str()?.strip_prefix("/host/")).collect();
            let written: Vec<_> = node.files().into_iter().filter(|path| !before.contains(path)).collect();
            for path in &written {
                assert!(mounts.iter().any(|mount| path.starts_with(mount)), "{path} is on no volume");
            }
            assert!(written.len() >= 3, "{written:?}");
            for volume in pod["volumes"].as_array().expect("volumes") {
                let Some(path) = volume["hostPath"]["path"].as_str() else { continue };
                assert!(mounts.contains(&path.trim_start_matches('/')), "{path} is mounted at its own place");
            }
            let written = node.read(conf);
            assert!(written.contains("\"uid-exclude\"") && written.contains("1337"), "{written}");
        });
    }
}
