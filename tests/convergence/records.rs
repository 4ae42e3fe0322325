//! Records that another version of the plugin wrote: upgrade and downgrade; policies that several attachments share.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::{STATE, on_a_node};
use crate::pod::Pod;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const ATTACHMENT: Slot = Slot::Detour;
const EXCLUSIONS: &str = "exclusions";

/// A record of a released version, and the configuration that wrote it.
struct Golden {
    name: &'static str,
    facts: Facts,
    dialect: &'static str,
}

const GOLDEN: [Golden; 5] = [
    Golden { name: "annotated", facts: Facts::AnnotatedOtherwise, dialect: "iptables" },
    Golden { name: "tproxy", facts: Facts::Tproxy, dialect: "nftables" },
    Golden { name: "tproxy-iptables", facts: Facts::Tproxy, dialect: "iptables" },
    Golden { name: "dns-captured", facts: Facts::DnsCaptured, dialect: "iptables" },
    Golden { name: EXCLUSIONS, facts: Facts::Plain, dialect: "iptables" },
];

/// Changes that a newer version may make to records.
type Change = (&'static str, fn(&mut Value));

impl Golden {
    fn path(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/records/v0.2.0/{}.json", self.name))
    }

    fn read(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.path()).expect("a golden record")).expect("JSON")
    }

    /// Writes the record of this version, until it is released.
    fn update(&self, pod: &Pod) {
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(self.path(), format!("{}\n", saved(pod))).expect("writable");
        }
    }

    fn call(&self, pod: &Pod, verb: &str) -> Answer {
        let mut configuration = Attachment { slot: ATTACHMENT, facts: self.facts }.configuration();
        configuration["dialect"] = self.dialect.into();
        if self.name == EXCLUSIONS {
            configuration["chain"].as_array_mut().expect("an array").remove(0);
        }
        pod.call_with(verb, ATTACHMENT.ifname(), &configuration, &pod.netns().display().to_string())
    }
}

fn path(pod: &Pod) -> PathBuf {
    let name = format!("{}@{}.json", ATTACHMENT.network(), ATTACHMENT.ifname());
    Path::new(STATE).join("attachments").join(&pod.container_id).join(name)
}

fn saved(pod: &Pod) -> Value {
    serde_json::from_slice(&std::fs::read(path(pod)).expect("a record")).expect("JSON")
}

fn save(pod: &Pod, record: &Value) {
    std::fs::write(path(pod), record.to_string()).expect("writable");
}

/// Returns the record of the released version, adapted to this pod.
fn of_this_pod(golden: &Golden, pod: &Pod) -> Value {
    let (mut record, now) = (golden.read(), saved(pod));
    for place in ["netns_id", "netns"] {
        record[place] = now[place].clone();
    }
    record
}

#[test]
fn records_of_each_released_version_are_checked_reconciled_and_removed() {
    on_a_node(|| {
        for golden in &GOLDEN {
            let pod = Pod::new();
            let before = Kernel::of(&pod);
            golden.call(&pod, "ADD").done();
            let right = Kernel::of(&pod);
            golden.update(&pod);
            let record = of_this_pod(golden, &pod);
            save(&pod, &record);
            golden.call(&pod, "CHECK").done();
            golden.call(&pod, "ADD").done();
            Kernel::of(&pod).assert_is(&right, golden.name);
            save(&pod, &record);
            golden.call(&pod, "DEL").done();
            Kernel::of(&pod).assert_is(&before, golden.name);
        }
    });
}

#[test]
fn a_missing_setting_has_its_default_and_del_leaves_nothing() {
    on_a_node(|| {
        let golden = &GOLDEN[2];
        let fields = |record: &Value| -> Vec<String> {
            let of = |pointer: &str| -> Vec<String> {
                let object = record.pointer(pointer).and_then(Value::as_object).expect("an object");
                object.keys().map(|key| format!("{pointer}/{key}")).collect()
            };
            [of(""), of("/policy"), of("/policy/interception/On"), of("/made"), of("/fixtures")].concat()
        };
        for field in fields(&golden.read()) {
            // These identify the record or the pod, or their values are not the default.
            let necessary = ["/policy", "/policy/interception", "/netns_id"].map(str::to_owned);
            let others = ["inbound_interception_mode", "proxy_uid", "proxy_gid"]
                .map(|key| format!("/policy/interception/On/{key}"));
            if necessary.contains(&field) || others.contains(&field) {
                continue;
            }
            let pod = Pod::new();
            golden.call(&pod, "ADD").done();
            let (mut record, right) = (of_this_pod(golden, &pod), Kernel::of(&pod));
            let (parent, key) = field.rsplit_once('/').expect("a pointer");
            record.pointer_mut(parent).and_then(Value::as_object_mut).expect("an object").remove(key);
            save(&pod, &record);
            golden.call(&pod, "ADD").done();
            Kernel::of(&pod).assert_is(&right, &field);
            save(&pod, &record);
            golden.call(&pod, "DEL").done();
            assert!(!Kernel::of(&pod).has_rules(), "{field}: {:#?}", Kernel::of(&pod).rules);
        }
    });
}

#[test]
fn a_record_of_a_newer_version_is_refused_with_a_next_step_and_del_leaves_nothing() {
    let changes: [Change; 5] = [
        ("an unknown field", |record| record["policy"]["interception"]["On"]["new"] = json!(true)),
        ("an unknown value", |record| record["policy"]["interception"]["On"]["dns"] = json!({"New": []})),
        ("an unknown redirection", |record| {
            let settings = record["policy"]["interception"]["On"].take();
            record["policy"]["interception"] = json!({"New": settings});
        }),
        ("an unknown exclusion", |record| record["policy"]["exclusions"] = json!([{"owner": {"New": 1}}])),
        ("unknown fixtures", |record| record["fixtures"] = json!("new")),
    ];
    on_a_node(|| {
        for golden in &GOLDEN[..4] {
            for (what, change) in changes {
                let pod = Pod::new();
                golden.call(&pod, "ADD").done();
                let mut record = saved(&pod);
                assert_eq!(record["version"], 1);
                record["version"] = json!(2);
                change(&mut record);
                save(&pod, &record);
                for verb in ["CHECK", "ADD"] {
                    let error = golden.call(&pod, verb).refused(105);
                    for part in ["expected format 1 or older, got 2", "delete the pod"] {
                        assert!(error.contains(part), "{what}: {error}");
                    }
                }
                golden.call(&pod, "DEL").done();
                let left = Kernel::of(&pod);
                assert!(!left.has_rules(), "{} with {what}: {:#?}", golden.name, left.rules);
            }
        }
    });
}

/// Returns a configuration that excludes `count` × `count` × 2 kinds of DNS queries; those of different `first` UIDs differ.
fn excluding(count: usize, first: usize) -> Value {
    let uids: Vec<usize> = (0..count).map(|i| first + 2 * i).collect();
    let resolvers: Vec<String> = (0..count).map(|i| format!("10.0.{i}.7")).collect();
    json!({
        "cniVersion": "1.1.0", "name": "policies", "type": "detour", "dialect": "nftables",
        "chain": [{ "type": "dns-exclude", "uids": uids, "resolvers": resolvers }],
    })
}

fn call(pod: &Pod, verb: &str, ifname: &str, configuration: &Value) -> Answer {
    pod.call_with(verb, ifname, configuration, &pod.netns().display().to_string())
}

/// Returns the names of the files of the pod's saved state.
fn files(pod: &Pod) -> Vec<String> {
    let directory = Path::new(STATE).join("attachments").join(&pod.container_id);
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect()
}

/// The files are in memory: each attachment of a pod could fill it further.
#[test]
fn more_than_1_mib_of_saved_policies_are_refused() {
    on_a_node(|| {
        let pod = Pod::new();
        let ifnames = ["net1", "net2", "net3", "net4"];
        let refused =
            (0..).zip(ifnames).find_map(|(i, ifname)| match call(&pod, "ADD", ifname, &excluding(40, 5000 + 2 * i)) {
                Answer::Done => None,
                refused => Some((ifname, refused)),
            });
        let (ifname, refused) = refused.expect("4 lists of about 400 KB are too many");
        let error = refused.refused(7);
        assert!(error.contains("expected at most 1048576 bytes of saved policies, got "), "{error}");
        assert!(!files(&pod).iter().any(|name| name.contains(ifname)), "{:?}", files(&pod));
        call(&pod, "CHECK", "net1", &excluding(40, 5000)).done();
        for ifname in ifnames {
            call(&pod, "DEL", ifname, &excluding(40, 5000)).done();
        }
        assert!(!Kernel::of(&pod).has_rules());
    });
}
