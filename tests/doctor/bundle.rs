//! What goes to somebody elsewhere, and what does not.

use crate::api::token;
use crate::scene::{POD, Plan, scene};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// The files of the archive, as tar has them.
fn files(archive: &Path) -> BTreeMap<String, String> {
    let tar = |arguments: &[&str]| {
        let output = Command::new("tar").arg("-f").arg(archive).args(arguments).output().expect("tar starts");
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    tar(&["-t"]).lines().map(|name| (name.to_owned(), tar(&["-xO", name]))).collect()
}

#[test]
fn all_that_was_found_is_in_it_and_no_byte_of_a_secret() {
    let mut plan = Plan::new();
    plan.config["password"] = "p1anted-passw0rd".into();
    let planted = plan.token.clone();
    scene(plan, |scene| {
        let line = format!("time=2026-01-01T00:00:00Z level=info msg=\"sent Bearer {planted}\" pod=shop/web-0\n");
        scene.write("var/log/detour.log", &line);
        let archive = scene.path("web-0.tar");
        let output = scene.doctor(&[&POD[..], &["--bundle", &archive.display().to_string()]].concat());
        assert!(output.status.success() && !output.stdout.is_empty(), "{output:?}");
        assert_eq!(std::fs::metadata(&archive).expect("written").permissions().mode() & 0o777, 0o600);
        let files = files(&archive);
        for name in [
            "detour/doctor.json",
            "detour/explain.json",
            "detour/rules.json",
            "detour/asked.iptables",
            "detour/asked.nft",
            "detour/kubeconfig",
            "detour/node/etc/cni/multus/net.d/istio-cni.conf",
            "detour/node/var/lib/cni/detour/install.json",
            "detour/attachments/0123456789abcdef/istio-cni@net1.json",
            "detour/kernel/proc/version",
            "detour/log.txt",
        ] {
            assert!(files.get(name).is_some_and(|text| text.len() > 1), "{name}: {:?}", files.keys());
        }
        let report: Value = serde_json::from_str(&files["detour/doctor.json"]).expect("JSON");
        assert_eq!(report["pod"], "shop/web-0");
        assert!(files["detour/asked.iptables"].contains("-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001"));
        let bytes = std::fs::read(&archive).expect("readable");
        let whole = String::from_utf8_lossy(&bytes);
        let ca = std::fs::read_to_string(scene.path("sa/ca.crt")).expect("readable");
        let kubeconfig = scene.json(crate::scene::KUBECONFIG);
        let ca_data = kubeconfig["clusters"][0]["cluster"]["certificate-authority-data"].as_str().expect("text");
        let parts = planted.split('.').chain(ca.lines().filter(|line| !line.starts_with('-')));
        for secret in parts.chain([ca_data, "p1anted-passw0rd", planted.as_str()]) {
            assert!(!whole.contains(secret), "{secret}");
        }
        assert!(files["detour/kubeconfig"].contains("\"server\": \"http://"), "{}", files["detour/kubeconfig"]);
        assert_ne!(planted, token(1));
    });
}

#[test]
fn a_file_that_cant_be_written_is_named() {
    scene(Plan::new(), |scene| {
        let output = scene.doctor(&["--bundle", "/no/such/directory/x.tar"]);
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("--bundle /no/such/directory/x.tar: it can't be written"), "{said}");
    });
}
