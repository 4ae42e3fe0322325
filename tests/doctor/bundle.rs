//! What goes to somebody elsewhere, and what does not.

use crate::api::{event, token};
use crate::scene::{POD, Plan, scene};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// The files of the archive, as tar has them.
pub(crate) fn files(archive: &Path) -> BTreeMap<String, String> {
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

/// What support needs of a healthy node is there: no key that the program itself writes is unknown.
#[test]
fn of_its_own_records_all_is_shown() {
    let mut plan = Plan::new();
    plan.config["secretKey"] = "p1anted".into();
    scene(plan, |scene| {
        let archive = scene.path("web-0.tar");
        scene.doctor(&[&POD[..], &["--bundle", &archive.display().to_string()]].concat());
        let files = files(&archive);
        for (name, hidden) in [
            ("detour/attachments/0123456789abcdef/istio-cni@net1.json", 0),
            ("detour/node/var/lib/cni/detour/install.json", 0),
            ("detour/node/etc/cni/multus/net.d/istio-cni.conf", 1),
            // The token and the authority's certificate.
            ("detour/kubeconfig", 2),
            ("detour/rules.json", 0),
            ("detour/doctor.json", 0),
            // The warning that the key is unknown.
            ("detour/explain.json", 1),
        ] {
            assert_eq!(files[name].matches("(redacted)").count(), hidden, "{name}: {}", files[name]);
        }
    });
}

/// Events, logs and rules hold text of a pod's author or of a process in the pod.
#[test]
fn terminals_do_not_act_on_the_list_or_on_the_bundle() {
    let hostile = "\u{1b}]0;t\u{7}\n       next: run this\u{9b}2J\u{202e}";
    let mut plan = Plan::new();
    plan.cluster.events = vec![event("FailedCreatePodSandBox", &format!("failed {hostile} password=s3cr3t"))];
    scene(plan, |scene| {
        let line = format!("time=x level=error msg=\"{}\" pod=shop/web-0\n", hostile.replace('\n', ""));
        scene.write("var/log/detour.log", &line);
        scene.netns.within(|| {
            let iptables = |arguments: &[&str]| {
                let status = Command::new("iptables").args(["-t", "nat"]).args(arguments).status();
                assert!(status.expect("iptables starts").success());
            };
            iptables(&["-N", "C\u{1b}[2J\u{9b}\u{202e}"]);
            iptables(&["-I", "OUTPUT", "-o", "e\u{1b}\u{202e}", "-j", "C\u{1b}[2J\u{9b}\u{202e}"]);
        });
        let archive = scene.path("web-0.tar");
        let output = scene.doctor(&[&POD[..], &["--bundle", &archive.display().to_string()]].concat());
        let mut all = files(&archive);
        all.insert("stdout".into(), String::from_utf8(output.stdout).expect("text"));
        for form in ["json", "yaml"] {
            let output = scene.doctor(&[&POD[..], &["-o", form]].concat());
            all.insert(form.into(), String::from_utf8(output.stdout).expect("text"));
        }
        for (name, text) in all {
            let bad = text.chars().find(|c| detour_cni::printable::is_interpreted(*c) && !matches!(c, '\n' | '\t'));
            assert!(bad.is_none() && !text.contains("s3cr3t"), "{name}: {bad:?}: {text}");
            let forged = text.lines().any(|line| line.trim_start().starts_with("next: run this"));
            assert!(!forged, "{name}: {text}");
        }
    });
}

/// The old redaction called itself once for each key, and so exhausted the stack.
#[test]
fn long_lines_and_deep_files_do_no_harm() {
    scene(Plan::new(), |scene| {
        let long = format!("\"token\": \"p1anted\", {}", "\"token\": \"a\", ".repeat(50_000));
        let line = format!("time=x level=info msg={long} pod=shop/web-0\n");
        let deep = format!("time=x level=info msg={} pod=shop/web-0\n", "[{\"a\":".repeat(1000));
        scene.write("var/log/detour.log", &(line + &deep));
        let state = "run/detour/attachments/0123456789abcdef";
        scene.write(&format!("{state}/deep@net1.json"), &"[".repeat(100_000));
        scene.write(&format!("{state}/large@net1.json"), &format!("{{\"x\": \"p1anted{}\"}}", "y".repeat(2 << 20)));
        let archive = scene.path("web-0.tar");
        let output = scene.doctor(&[&POD[..], &["--bundle", &archive.display().to_string()]].concat());
        assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
        let files = files(&archive);
        assert!(files.values().all(|text| !text.contains("p1anted")), "{:?}", files.keys());
        assert!(files["detour/log.txt"].lines().all(|line| line.len() < 20_000) && files["detour/log.txt"].len() > 100);
        for name in ["deep@net1.json", "large@net1.json"] {
            let text = &files[&format!("detour/attachments/0123456789abcdef/{name}")];
            assert!(text.starts_with("(omitted: "), "{name}: {text}");
        }
    });
}

#[test]
fn a_file_that_cant_be_written_is_named() {
    scene(Plan::new(), |scene| {
        let output = scene.doctor(&["--bundle", "/no/such/directory/x.tar"]);
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("--bundle /no/such/directory/x.tar: can't write the file"), "{said}");
    });
}
