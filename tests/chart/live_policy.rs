//! `livePolicy`: the flag of the agent, and the capabilities and mounts to enter pods' network namespaces.

use crate::helm::{agent, flag, merged, objects_in, render_file};
use serde_json::{Value, json};

fn given(values: &Value) -> String {
    flag(&agent(values), "live-policy").expect("the chart always sets the flag")
}

#[test]
fn the_value_is_empty_by_default_and_then_depends_on_the_repair() {
    for (repair, default) in [(true, "on"), (false, "off")] {
        let repair = json!({"repair": {"enabled": repair}});
        for (value, wanted) in [
            (json!(""), default),
            (Value::Null, default),
            (json!("on"), "on"),
            (json!(true), "on"),
            (json!("off"), "off"),
            (json!(false), "off"),
        ] {
            let values = merged(&repair, &json!({"livePolicy": value}));
            assert_eq!(given(&values), wanted, "{values}");
        }
    }
}

/// Helm reads YAML 1.1, in which some unquoted words are booleans.
#[test]
fn the_unquoted_words_of_a_values_file_mean_the_same() {
    for (text, wanted) in [("off", "off"), ("\"off\"", "off"), ("false", "off"), ("on", "on"), ("\"on\"", "on")] {
        let rendered = render_file(&format!("livePolicy: {text}\n"), "1.33.0").expect(text);
        assert!(rendered.contains(&format!("- --live-policy={wanted}\n")), "{text}");
    }
    for text in ["exclusions", "all"] {
        let error = render_file(&format!("livePolicy: {text}\n"), "1.33.0").map(drop).expect_err(text);
        assert!(
            error.contains("at '/livePolicy': value must be one of '', 'on', 'off', true, false"),
            "{text}: {error}"
        );
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
fn only_an_explicit_value_gives_an_agent_without_repairs_what_it_needs_to_enter_pods() {
    for version in ["1.25.0", "1.29.0", "1.30.0", "1.33.0"] {
        for (values, wanted) in [
            ("{}", true),
            ("livePolicy: off", true),
            ("repair: {enabled: false}", false),
            ("{repair: {enabled: false}, livePolicy: \"\"}", false),
            ("{repair: {enabled: false}, livePolicy: off}", false),
            ("{repair: {enabled: false}, livePolicy: on}", true),
            ("{repair: {enabled: false}, containerExclusion: {enabled: true}}", true),
        ] {
            let objects = objects_in(&render_file(values, version).expect(values));
            assert_eq!(enters_pods(&objects), wanted, "{version}: {values}");
        }
    }
}
