//! Saved state that is gone, and network namespaces that are gone or replaced. `faults` has damaged state.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::expect::from_scratch;
use crate::kernel::Kernel;
use crate::node::{STATE, on_a_node};
use crate::pod::Pod;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

const REDIRECT: Attachment = Slot::Detour.with(Facts::DnsCaptured);
const OTHER: Attachment = Slot::ExcludeDns.with(Facts::Plain);

fn record_path(pod: &Pod, attachment: Attachment) -> PathBuf {
    let name = format!("{}@{}.json", attachment.slot.network(), attachment.slot.ifname());
    Path::new(STATE).join("attachments").join(&pod.container_id).join(name)
}

#[test]
fn a_container_in_a_new_namespace_starts_without_rules() {
    on_a_node(|| {
        let first = Pod::new();
        first.add(REDIRECT).done();
        first.add(OTHER).done();
        let second = first.replaced();
        second.check(REDIRECT).refused(104);
        second.add(REDIRECT).done();
        let alone = from_scratch(None, &[REDIRECT].into()).expect("accepted");
        Kernel::of(&second).assert_is(&alone, "without what another namespace had");
        second.check(REDIRECT).done();
        second.del(OTHER).done();
        Kernel::of(&second).assert_is(&alone, "after the DEL of what another namespace had");
        second.del(REDIRECT).done();
        assert!(!Kernel::of(&second).has_rules());
    });
}

/// The path of a late DEL may be that of another pod's network namespace.
#[test]
fn a_del_in_the_namespace_of_another_pod_removes_nothing_from_it() {
    on_a_node(|| {
        let (gone, live) = (Pod::new(), Pod::new());
        gone.add(OTHER).done();
        live.add(OTHER).done();
        let netns = live.netns().display().to_string();
        for _ in ["of what was added elsewhere", "of what was never added"] {
            gone.call_with("DEL", OTHER.slot.ifname(), &OTHER.configuration(), &netns).done();
            live.check(OTHER).done();
        }
        assert!(!record_path(&gone, OTHER).exists());
        live.del(OTHER).done();
    });
}

/// Like after a reboot, or after a runtime lost the ADD.
#[test]
fn without_state_del_removes_only_chains_with_detours_names() {
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(REDIRECT).done();
        let redirected: Vec<_> =
            Kernel::of(&pod).rules.into_iter().filter(|(chain, _)| chain.contains("ISTIO_")).collect();
        std::fs::remove_dir_all(Path::new(STATE).join("attachments")).expect("there is some");
        pod.del(REDIRECT).done();
        let left = Kernel::of(&pod);
        assert!(!left.has_exclusions(), "{left:?}");
        assert_eq!(
            left.rules.into_iter().filter(|(chain, _)| chain.contains("ISTIO_")).collect::<Vec<_>>(),
            redirected
        );
        assert_eq!(pod.del(REDIRECT), Answer::Done);
    });
}

/// The names of native tables identify them, and with them the fixtures of their rules.
#[test]
fn native_rules_without_state_are_removed_with_their_routing() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    on_a_node(|| {
        for (settings, again) in [
            ("{}", None),
            ("{}", Some("auto")),
            ("{}", Some("nftables")),
            (r#"{"inbound_tproxy_mark": 77, "inbound_tproxy_route_table": 1000}"#, None),
            (r#"{"inbound_tproxy_mark": 77, "inbound_tproxy_route_table": 1000}"#, Some("auto")),
        ] {
            let settings: Map<String, Value> = serde_json::from_str(settings).expect("JSON");
            let pod = Pod::new();
            let before = Kernel::of(&pod);
            let netns = pod.netns().display().to_string();
            let call = |verb, dialect: &str| {
                let mut configuration = attachment.configuration();
                configuration["dialect"] = dialect.into();
                if verb != "DEL" {
                    configuration["chain"][0].as_object_mut().expect("a block").extend(settings.clone());
                }
                pod.call_with(verb, attachment.slot.ifname(), &configuration, &netns).done();
            };
            call("ADD", "nftables");
            let right = Kernel::of(&pod);
            std::fs::remove_dir_all(Path::new(STATE).join("attachments")).expect("there is some");
            if let Some(again) = again {
                call("ADD", again);
                Kernel::of(&pod).assert_is(&right, "after the second ADD");
                call("CHECK", again);
            }
            call("DEL", "auto");
            Kernel::of(&pod).assert_is(&before, "after DEL");
        }
    });
}
