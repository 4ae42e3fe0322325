//! `livePolicy`: the flag of the agent, its permissions, and the capabilities and mounts to enter pods' network namespaces.

use crate::helm::{agent, flag, merged, notes, objects, parsed, render_file};
use serde_json::{Value, json};

fn scope(values: &Value) -> String {
    flag(&agent(values), "live-policy").expect("the chart always sets the flag")
}

#[test]
fn the_scope_is_empty_by_default_and_then_depends_on_the_repair() {
    for (repair, default) in [(true, "exclusions"), (false, "off")] {
        let repair = json!({"repair": {"enabled": repair}});
        for (given, wanted) in [
            (json!(""), default),
            (Value::Null, default),
            (json!("exclusions"), "exclusions"),
            (json!("all"), "all"),
            (json!("off"), "off"),
            (json!(false), "off"),
        ] {
            let values = merged(&repair, &json!({"livePolicy": given}));
            assert_eq!(scope(&values), wanted, "{values}");
        }
    }
}

/// Helm reads YAML 1.1, in which some unquoted words are booleans.
#[test]
fn the_unquoted_word_off_of_a_values_file_means_off() {
    for (text, wanted) in
        [("off", "off"), ("\"off\"", "off"), ("false", "off"), ("all", "all"), ("exclusions", "exclusions")]
    {
        let rendered = render_file(&format!("livePolicy: {text}\n"), "1.33.0").expect(text);
        assert!(rendered.contains(&format!("- --live-policy={wanted}\n")), "{text}");
    }
    for text in ["on", "true", "exclude", "Off ly"] {
        let error = render_file(&format!("livePolicy: {text}\n"), "1.33.0").map(drop).expect_err(text);
        let expected = "at '/livePolicy': value must be one of '', 'exclusions', 'all', 'off', false";
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn the_notes_tell_which_changes_running_pods_follow() {
    for (scope, sentence) in [
        ("off", " Running pods keep their rules until they are recreated.\n"),
        (
            "exclusions",
            " Running pods follow only changes of exclusions, ports and ranges until they\nare recreated.\n",
        ),
        ("all", "\n"),
    ] {
        let notes = notes(&json!({"livePolicy": scope}));
        assert!(notes.ends_with(&format!("\nkubectl detour check checks all nodes.{sentence}")), "{scope}: {notes}");
    }
}

/// What an agent needs to enter pods.
fn enters_pods(objects: &[Value]) -> bool {
    let daemon_set = objects.iter().find(|object| object["kind"] == "DaemonSet").expect("a DaemonSet");
    let template = &daemon_set["spec"]["template"];
    let container = &template["spec"]["containers"][0];
    let has_capabilities = ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"].map(|name| {
        container["securityContext"]["capabilities"]["add"].as_array().expect("a list").contains(&json!(name))
    });
    let has_mounts = ["/run/detour", "/host/proc", "/host/run/netns", "/host/var/lib/cni"].map(|path| {
        container["volumeMounts"].as_array().expect("a list").iter().any(|mount| mount["mountPath"] == path)
    });
    let annotation = &template["metadata"]["annotations"]["container.apparmor.security.beta.kubernetes.io/agent"];
    let is_unconfined =
        annotation == "unconfined" || container["securityContext"]["appArmorProfile"]["type"] == "Unconfined";
    let found: Vec<bool> = [&has_capabilities[..], &has_mounts, &[is_unconfined]].concat();
    assert!(found.iter().all(|has| *has == found[0]), "{found:?}");
    found[0]
}

#[test]
fn only_an_explicit_scope_gives_an_agent_without_repairs_what_it_needs_to_enter_pods() {
    for version in ["1.25.0", "1.29.0", "1.30.0", "1.33.0"] {
        for (values, wanted) in [
            ("{}", true),
            ("livePolicy: off", true),
            ("repair: {enabled: false}", false),
            ("{repair: {enabled: false}, livePolicy: \"\"}", false),
            ("{repair: {enabled: false}, livePolicy: off}", false),
            ("{repair: {enabled: false}, livePolicy: exclusions}", true),
            ("{repair: {enabled: false}, livePolicy: all}", true),
            ("{repair: {enabled: false}, containerExclusion: {enabled: true}}", true),
        ] {
            let objects = parsed(&render_file(values, version).expect(values));
            assert_eq!(enters_pods(&objects), wanted, "{version}: {values}");
        }
    }
}

/// Returns (API group, resource, verb) of each rule of the agent's ClusterRole.
fn permissions(values: &Value) -> Vec<[String; 3]> {
    let objects = objects(values);
    let is_role = |object: &&Value| object["kind"] == "ClusterRole" && object["metadata"]["name"] == "detour-agent";
    let role = objects.iter().find(is_role).expect("a ClusterRole");
    let mut found = Vec::new();
    for rule in role["rules"].as_array().expect("rules") {
        let strings = |key: &str| -> Vec<String> { serde_json::from_value(rule[key].clone()).expect("strings") };
        for group in strings("apiGroups") {
            for resource in strings("resources") {
                found.extend(strings("verbs").into_iter().map(|verb| [group.clone(), resource.clone(), verb]));
            }
        }
    }
    found
}

#[test]
fn the_agent_may_write_conditions_unless_the_scope_is_off_and_each_right_is_granted_once() {
    let has = |permissions: &[[String; 3]], resource: &str, verb: &str| {
        permissions.iter().any(|permission| permission[1] == resource && permission[2] == verb)
    };
    for repair in [true, false] {
        for (labels, primary, exclusion) in [
            (false, false, false),
            (true, false, false),
            (false, true, false),
            (false, false, true),
            (true, true, true),
        ] {
            let values = |scope: &str| {
                json!({
                    "repair": {"enabled": repair, "repairPods": !labels, "labelPods": labels}, "primaryPlugin": {"enabled": primary},
                    "containerExclusion": {"enabled": exclusion}, "livePolicy": scope,
                })
            };
            let off = permissions(&values("off"));
            assert_eq!(has(&off, "pods/status", "patch"), primary || (repair && labels), "{}", values("off"));
            assert!(has(&off, "events", "create"), "{}", values("off"));
            for scope in ["exclusions", "all"] {
                let values = values(scope);
                let mut live = permissions(&values);
                let mut wanted = off.clone();
                let permission = ["", "pods/status", "patch"].map(str::to_owned);
                if !wanted.contains(&permission) {
                    wanted.push(permission);
                }
                live.sort_unstable();
                wanted.sort_unstable();
                // Equal lists: also without duplicates.
                assert_eq!(live, wanted, "{values}");
            }
        }
    }
    let mut distinct = permissions(
        &json!({"livePolicy": "all", "repair": {"repairPods": false, "labelPods": true}, "primaryPlugin": {"enabled": true}}),
    );
    let count = distinct.len();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), count);
}
