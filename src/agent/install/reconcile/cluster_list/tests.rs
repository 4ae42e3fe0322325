//! The own list and the edited list, as plans of the same node.

use super::*;
use crate::agent::install::plan::undo;
use crate::agent::install::reconcile::reconcile;
use crate::agent::install::state::{ConfigurationTarget, DesiredState};
use serde_json::json;

const CALICO: &str = r#"{"cniVersion":"0.3.1","name":"k8s","plugins":[{"type":"calico"},{"type":"portmap"}]}"#;
const PODMAN: &str = r#"{"name":"podman","plugins":[{"type":"bridge"}]}"#;
const MULTUS: &str = r#"{"name":"m","type":"multus-shim","clusterNetwork":"/etc/cni/net.d/00-detour.conflist"}"#;

fn dir() -> HostPath {
    "/etc/cni/net.d".parse().expect("a path")
}

fn desired(kind: &str, own_list: bool) -> DesiredState {
    let entry = json!({"type": kind});
    DesiredState {
        installer: "a".into(),
        owner: None,
        program: Digest::of(b""),
        programs: Vec::new(),
        kubeconfig: None,
        node: None,
        configurations: vec![ConfigurationTarget::Listed { dir: dir(), file: None, entry, own_list }],
        multus_chain: None,
        expired: None,
    }
}

/// A node with these configurations.
fn node(files: &[(&str, &str)]) -> FoundState {
    let mut found = FoundState::default();
    files.iter().for_each(|(name, text)| write(&mut found, name, text));
    found
}

fn write(found: &mut FoundState, name: &str, text: &str) {
    remove(found, name);
    let (mode, digest) = (PRIVATE_MODE, Digest::of(text.as_bytes()));
    found.configurations.push(ConfFile { name: name.into(), contents: text.into(), mode, ..ConfFile::default() });
    let file = FoundFile { digest, text: Some(text.into()), mode, trusted: true };
    found.files.insert(dir().join(name), file);
}

fn remove(found: &mut FoundState, name: &str) {
    found.configurations.retain(|file| file.name != name);
    found.files.remove(&dir().join(name));
}

fn text(found: &FoundState, name: &str) -> String {
    let file = found.files.get(&dir().join(name)).unwrap_or_else(|| panic!("{name} exists"));
    file.text.clone().expect("text")
}

fn types(found: &FoundState, name: &str) -> String {
    conflist::types(&text(found, name)).expect("a list").join(",")
}

/// Applies the plan. After each change of an installation, the list that runtimes use has the entry.
fn apply(found: &mut FoundState, plan: &InstallPlan) {
    let is_installed = !found.record.is_empty();
    for action in &plan.actions {
        match action {
            FileAction::Write { path, text, .. } => write(found, &path.name(), text),
            FileAction::Remove { path, .. } => remove(found, &path.name()),
            other => panic!("{other}"),
        }
        let lists = found.configurations.iter().filter(|file| !file.name.contains("multus"));
        let first = lists.min_by(|a, b| a.name.cmp(&b.name)).expect("a list");
        let has_entry = text(found, &first.name).contains("\"detour\"");
        assert!(has_entry || !is_installed, "{action}: {} has no entry", first.name);
    }
    found.record = plan.record.clone();
}

/// Installs on the node. A second installation changes nothing.
fn install(found: &mut FoundState, desired: &DesiredState) -> InstallPlan {
    let plan = reconcile(desired, found).expect("a plan");
    apply(found, &plan);
    let again = reconcile(desired, found).expect("a plan");
    assert_eq!(again.actions, []);
    plan
}

#[test]
fn an_installation_changes_between_its_own_list_and_the_original_one() {
    let single = r#"{"name":"weave","type":"weave-net"}"#;
    let conf = [("10-a.conf", single), ("20-b.conflist", PODMAN)];
    for files in [&[("10-a.conflist", CALICO), ("20-b.conflist", PODMAN)], &conf] {
        let (original, mut found) = (node(files), node(files));
        install(&mut found, &desired("detour", false));
        assert!(types(&found, "10-a.conflist").ends_with(",detour"));
        install(&mut found, &desired("detour", true));
        assert!(types(&found, OWN_LIST).ends_with(",detour"));
        assert_eq!(text(&found, files[0].0), files[0].1, "the original list is restored");
        install(&mut found, &desired("detour", false));
        assert!(!found.files.contains_key(&dir().join(OWN_LIST)), "the own list is removed");
        install(&mut found, &desired("detour", true));
        let undone = undo(&found);
        assert!(undone.record.is_empty() && undone.notes.is_empty());
        assert_eq!(undone.actions.len(), 1, "only the own list is removed");
        remove(&mut found, OWN_LIST);
        assert_eq!(found.files, original.files);
    }
}

#[test]
fn a_change_of_the_source_is_followed_and_is_no_repair() {
    let mut found = node(&[("10-a.conflist", CALICO)]);
    assert!(!install(&mut found, &desired("detour", true)).follows, "the installation");
    write(&mut found, "10-a.conflist", &CALICO.replace("portmap", "bandwidth"));
    assert!(install(&mut found, &desired("detour", true)).follows);
    assert_eq!(types(&found, OWN_LIST), "calico,bandwidth,detour");
    // A network with a name that sorts first takes its place, as it does for runtimes.
    write(&mut found, "05-first.conflist", PODMAN);
    assert!(install(&mut found, &desired("detour", true)).follows);
    assert_eq!(types(&found, OWN_LIST), "bridge,detour");
    let edited = text(&found, OWN_LIST).replace("bridge", "macvlan");
    write(&mut found, OWN_LIST, &edited);
    assert!(!install(&mut found, &desired("detour", true)).follows, "another process edited the own list");
}

#[test]
fn an_unusable_source_is_replaced_only_after_the_timeout() {
    let files = [("10-a.conflist", CALICO), ("87-podman-bridge.conflist", PODMAN)];
    for broken in [Some(""), Some("{"), Some(r#"{"name":"k8s","plugins":[]}"#), None] {
        for has_other in [true, false] {
            let mut found = node(&files[..1 + usize::from(has_other)]);
            install(&mut found, &desired("detour", true));
            let copy = text(&found, OWN_LIST);
            match broken {
                Some(text) => write(&mut found, "10-a.conflist", text),
                None => remove(&mut found, "10-a.conflist"),
            }
            let held = reconcile(&desired("detour", true), &found).expect("a plan");
            assert_eq!((held.source_timeout, &held.waits_for), (Some(SOURCE_TIMEOUT), &None));
            assert!(held.actions.is_empty() && held.notes.is_empty() && held.record == found.record);
            found.source_expired = true;
            let plan = reconcile(&desired("detour", true), &found).expect("a plan");
            apply(&mut found, &plan);
            assert_eq!(plan.notes.len(), usize::from(broken.is_some()), "{:?}", plan.notes);
            assert_eq!(text(&found, OWN_LIST) == copy, !has_other);
            let missing = plan.waits_for.unwrap_or_default();
            let expected = "the cluster network's configuration in /etc/cni/net.d; pods start with the last copy of it; \
                            check the pods of the cluster network on this node";
            assert_eq!(missing, if has_other { "" } else { expected });
            // The network comes back.
            write(&mut found, "10-a.conflist", CALICO);
            install(&mut found, &desired("detour", true));
            assert_eq!(text(&found, OWN_LIST), copy);
        }
    }
}

/// The entry's configuration can change while the source is missing.
#[test]
fn the_last_copy_gets_a_new_entry() {
    let mut found = node(&[("10-a.conflist", CALICO)]);
    install(&mut found, &desired("detour", true));
    remove(&mut found, "10-a.conflist");
    found.source_expired = true;
    let mut newer = desired("detour", true);
    let ConfigurationTarget::Listed { entry, .. } = &mut newer.configurations[0] else { panic!("a list") };
    entry["log_level"] = "debug".into();
    let plan = reconcile(&newer, &found).expect("a plan");
    apply(&mut found, &plan);
    assert!(plan.waits_for.is_some() && text(&found, OWN_LIST).contains("debug"));
    assert_eq!(types(&found, OWN_LIST), "calico,portmap,detour");
}

#[test]
fn a_node_without_a_cluster_network_names_the_next_step() {
    let expected = "the cluster network's configuration in /etc/cni/net.d; check the pods of the cluster network on this \
                    node";
    for own_list in [true, false] {
        let plan = reconcile(&desired("detour", own_list), &node(&[])).expect("a plan");
        assert_eq!(plan.waits_for.as_deref(), Some(expected));
    }
}

/// A list of another user than root, who could otherwise decide about a file of root. Its own entry is edited in place.
const UNTRUSTED: &str = r#"{"name":"k8s","plugins":[{"type":"calico"},{"type":"tuning"}]}"#;

/// Without such files, runtimes refuse the list.
#[test]
fn a_list_without_plugins_and_without_files_is_passed_over() {
    let mut found = node(&[("10-a.conflist", r#"{"name":"k8s"}"#), ("20-b.conflist", CALICO)]);
    let plan = install(&mut found, &desired("detour", false));
    assert_eq!(plan.waits_for, None);
    assert!(types(&found, "20-b.conflist").ends_with(",detour"));
}

/// Runtimes may use a list that can't be copied, so the next list is not copied instead.
#[test]
fn a_list_that_only_runtimes_can_read_is_not_passed_over() {
    let nested =
        format!(r#"{{"name":"k8s","x":{}{},"plugins":[{{"type":"calico"}}]}}"#, "[".repeat(200), "]".repeat(200));
    let rows = [
        (r#"{"name":"k8s","loadOnlyInlinedPlugins":false}"#, "files in the directory of its name"),
        (r#"{"name":"k8s","plugins":[]}"#, "files in the directory of its name"),
        (r#"{"name":"k8s","cniVersion":"9.0.0","plugins":[{"type":"calico"}]}"#, "unsupported cniVersion \"9.0.0\""),
        (UNTRUSTED, "another user can change the file: /etc/cni/net.d/10-a.conflist is owned by UID 1001"),
        (nested.as_str(), "recursion limit exceeded"),
        (r#"{"name":"k8s","x":"\ud800","plugins":[{"type":"calico"}]}"#, "without lone surrogates"),
        (r#"{"name":"k8s","x":"\ud800\u0020","plugins":[{"type":"calico"}]}"#, "without lone surrogates"),
        (r#"{"name":"k8s","x":"\udc00","plugins":[{"type":"calico"}]}"#, "without lone surrogates"),
    ];
    for (uncopied, reason) in rows {
        for is_copied in [false, true] {
            let mut found = node(&[("10-a.conflist", CALICO), ("87-podman-bridge.conflist", PODMAN)]);
            if is_copied {
                install(&mut found, &desired("detour", true));
            }
            write(&mut found, "10-a.conflist", uncopied);
            let source = found.configurations.iter_mut().find(|file| file.name == "10-a.conflist").expect("written");
            source.has_directory = true;
            source.untrusted = (uncopied == UNTRUSTED)
                .then(|| "/etc/cni/net.d/10-a.conflist is owned by UID 1001; expected root".to_owned());
            found.source_expired = true;
            if uncopied != UNTRUSTED && !is_copied {
                let edited = reconcile(&desired("detour", false), &found).expect("a plan");
                assert!(edited.actions.is_empty(), "{:?}", edited.actions);
                let missing = edited.waits_for.unwrap_or_default();
                assert!(missing.starts_with("a list that can be extended: runtimes may use"), "{missing}");
            }
            let plan = reconcile(&desired("detour", true), &found).expect("a plan");
            assert!(plan.actions.is_empty(), "{:?}", plan.actions);
            assert!(plan.notes.iter().any(|note| note.contains(reason)), "{reason}: {:?}", plan.notes);
            let missing = plan.waits_for.unwrap_or_default();
            assert!(missing.contains("runtimes may use /etc/cni/net.d/10-a.conflist"), "{missing}");
            assert_eq!(missing.contains("pods start with the last copy"), is_copied, "{missing}");
        }
    }
}

#[test]
fn the_original_list_is_edited_if_runtimes_must_not_use_the_own_list() {
    let chained = |kind: &str, more: &str| {
        format!(r#"{{"name":"aws","plugins":[{{"type":"aws-cni"}},{{"type":"{kind}"{more}}}]}}"#)
    };
    let cilium = chained("cilium-cni", r#","chaining-mode":"generic-veth""#);
    let rows = [
        (("00-multus.conf", MULTUS), "10-a.conflist", "Multus (00-multus.conf); restart Multus on this node"),
        (("99-multus.conf", "{invalidated}"), "10-a.conflist", "runtimes would bypass Multus (99-multus.conf)"),
        (("00-a.conflist", PODMAN), "00-a.conflist", "runtimes use 00-a.conflist before it"),
        ((OWN_LIST, PODMAN), OWN_LIST, "belongs to another tool, and runtimes use it"),
        (("05-cilium.conflist", &cilium), "05-cilium.conflist", "Cilium (cni.chainingTarget)"),
    ];
    for ((name, other), edited, reason) in rows {
        let aws = chained("portmap", "");
        let first = if name.contains("cilium") { aws.as_str() } else { CALICO };
        let mut found = node(&[("10-a.conflist", first)]);
        install(&mut found, &desired("detour", true));
        let own = text(&found, OWN_LIST);
        write(&mut found, name, other);
        if name == OWN_LIST {
            found.record = crate::agent::install::InstallRecord::default();
        }
        let plan = install(&mut found, &desired("detour", true));
        assert!(plan.notes.iter().any(|note| note.contains(reason)), "{:?}", plan.notes);
        assert!(types(&found, edited).ends_with(",detour"), "{name}");
        assert_eq!(found.files.contains_key(&dir().join(OWN_LIST)), edited == OWN_LIST, "{name}");
        remove(&mut found, name);
        install(&mut found, &desired("detour", true));
        assert_eq!((text(&found, OWN_LIST), text(&found, "10-a.conflist").as_str()), (own, first), "{name}");
    }
    let mut found = node(&[("10-a.conflist", CALICO)]);
    found.multus = HostPath::new("/opt/cni/bin/multus-shim");
    let plan = install(&mut found, &desired("detour", true));
    assert!(plan.notes[0].contains("Multus (/opt/cni/bin/multus-shim)"), "{:?}", plan.notes);
    assert_eq!(types(&found, "10-a.conflist"), "calico,portmap,detour");
}

#[test]
fn entries_in_the_original_list_never_outlive_the_installation() {
    // The record of an earlier installation was lost.
    let stale = CALICO.replace("]}", r#",{"type":"detour","old":1}]}"#);
    let mut found = node(&[("10-a.conflist", &stale)]);
    install(&mut found, &desired("detour", true));
    assert_eq!(types(&found, "10-a.conflist"), "calico,portmap");
    // Another tool made the cluster network's list of the own list.
    let copy = text(&found, OWN_LIST);
    write(&mut found, "05-derived.conflist", &copy);
    install(&mut found, &desired("detour", true));
    assert_eq!(text(&found, "05-derived.conflist"), copy);
    let undone = undo(&found);
    apply_all(&mut found, &undone);
    assert_eq!(types(&found, "05-derived.conflist"), "calico,portmap");
    assert!(undone.record.is_empty() && !found.files.contains_key(&dir().join(OWN_LIST)));
}

fn apply_all(found: &mut FoundState, plan: &InstallPlan) {
    for action in &plan.actions {
        match action {
            FileAction::Write { path, text, .. } => write(found, &path.name(), text),
            FileAction::Remove { path, .. } => remove(found, &path.name()),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_tool_that_edits_the_own_list_is_named_and_the_list_can_be_removed() {
    let mut found = node(&[("10-a.conflist", CALICO)]);
    install(&mut found, &desired("detour", true));
    let edited = conflist::rewrite(&text(&found, OWN_LIST), &json!({"type": "linkerd-cni"})).expect("a list");
    write(&mut found, OWN_LIST, &edited);
    let undone = undo(&found);
    assert!(undone.record.is_empty() && undone.actions.len() == 1, "{undone:?}");
    let plan = install(&mut found, &desired("detour", true));
    assert!(plan.notes[0].contains("another tool added the plugin \"linkerd-cni\""), "{:?}", plan.notes);
    assert_eq!(types(&found, OWN_LIST), "calico,portmap,detour");
}
