//! Records that another version of the plugin wrote: upgrade and downgrade.

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

/// Every version writes the redirection: a record without it is damaged.
#[test]
fn a_record_without_the_redirection_is_refused_and_del_leaves_nothing() {
    on_a_node(|| {
        for golden in &GOLDEN[..4] {
            let pod = Pod::new();
            golden.call(&pod, "ADD").done();
            let mut record = saved(&pod);
            record["policy"].as_object_mut().expect("an object").remove("interception");
            save(&pod, &record);
            for verb in ["CHECK", "ADD"] {
                let error = golden.call(&pod, verb).refused(105);
                assert!(error.contains("interception") && error.contains("delete the pod"), "{error}");
            }
            golden.call(&pod, "DEL").done();
            // Rules in built-in chains for interfaces and UIDs that are missing in the record remain.
            let left = Kernel::of(&pod);
            assert!(!left.rules.keys().any(|chain| chain.contains('_')), "{}: {left:?}", golden.name);
            let routing = "ip rule; ip -6 rule; ip route show table 133; ip -6 route show table 133; :";
            let routing = pod.tool("sh", &["-c", routing], "");
            assert!(!routing.contains("fwmark") && !routing.contains("local default"), "{routing}");
        }
    });
}

#[test]
fn a_record_without_fixtures_is_used_and_del_leaves_nothing() {
    on_a_node(|| {
        for golden in &GOLDEN {
            let pod = Pod::new();
            let before = Kernel::of(&pod);
            golden.call(&pod, "ADD").done();
            let (mut record, right) = (saved(&pod), Kernel::of(&pod));
            record.as_object_mut().expect("an object").remove("fixtures");
            for verb in ["CHECK", "ADD"] {
                save(&pod, &record);
                golden.call(&pod, verb).done();
                Kernel::of(&pod).assert_is(&right, golden.name);
            }
            save(&pod, &record);
            golden.call(&pod, "DEL").done();
            Kernel::of(&pod).assert_is(&before, golden.name);
        }
    });
}
