use super::super::sub_plugin::SettingSource;
use super::super::tests::scenario::{Scenario, chain, container};
use super::super::{Decision, SkipReason, check};
use super::*;
use crate::cni::{Block, Bounds, Code};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Returns a scenario with one block, for a pod with the init containers `vault-init`, `istio-validation` and
/// `db-migrate`, and the native sidecar `log`; all containers have the same UID.
fn block(keys: Value) -> Scenario {
    let mut block = keys;
    block["type"] = "container-exclude".into();
    chain(json!([block])).pod(|pod| {
        pod.run_as_user = Some(1000);
        pod.init_containers =
            ["vault-init", "istio-validation", "log", "db-migrate"].map(|name| container(name, None)).into();
        pod.init_containers[2].restarts_always = true;
    })
}

/// Makes `istio-proxy` a native sidecar at position `index`.
fn native(scenario: Scenario, index: usize) -> Scenario {
    scenario.pod(|pod| {
        let proxy = Container { restarts_always: true, ..pod.containers.pop().expect("a proxy") };
        pod.init_containers.insert(index, proxy);
    })
}

#[test]
fn a_block_without_containers_excludes_nothing_and_needs_no_facts() {
    for keys in [json!({}), json!({"containers": []}), json!({"containers": "", "scope": "dns"})] {
        let scenario = block(keys.clone());
        assert_eq!(scenario.output().policy, chain(json!([])).output().policy, "{keys}");
        assert!(scenario.notes().is_empty() && scenario.without_facts().containers().is_empty(), "{keys}");
    }
}

#[test]
fn without_facts_a_block_with_containers_is_an_error() {
    let error = block(json!({"containers": "vault-init"})).without_facts().run().expect_err("no facts");
    assert_eq!(error.code, Code::InvalidConfig);
    let start = "chain[0].containers: \"vault-init\" needs facts of the pod: set kubernetes.kubeconfig";
    assert!(error.msg.starts_with(start), "{error}");
}

#[test]
fn every_form_of_the_list_is_resolved_against_the_pod() {
    for (items, expected) in [
        (json!("vault-init"), vec!["vault-init"]),
        (json!(["app", "db-migrate"]), vec!["app", "db-migrate"]),
        (json!("*-init"), vec!["vault-init"]),
        (json!("*-init,*i*"), vec!["db-migrate", "vault-init"]),
        (json!("*"), vec!["app", "db-migrate", "log", "vault-init"]),
        (json!("init-containers"), vec!["db-migrate", "vault-init"]),
        (json!("init-containers, vault-init ,app"), vec!["app", "db-migrate", "vault-init"]),
        (json!("istio-*"), vec![]),
    ] {
        let containers = block(json!({"containers": items})).output().policy.containers;
        let names: Vec<&str> = containers.iter().map(|exclusion| exclusion.name.as_str()).collect();
        assert_eq!(names, expected, "{items}");
    }
}

#[test]
fn the_scope_applies_to_the_containers_of_its_block() {
    let keys = json!({"containers": "app,vault-init", "scope": "dns"});
    let scenario = block(keys).annotated(EXCLUDE_CONTAINERS, "db-migrate");
    assert_eq!(scenario.containers(), ["app dns", "db-migrate all", "vault-init dns"]);
}

#[test]
fn the_pods_annotation_replaces_its_namespaces() {
    let scenario = block(json!({})).namespace(EXCLUDE_CONTAINERS, "app, *-init");
    assert_eq!(scenario.containers(), ["app all", "vault-init all"]);
    let pod = scenario.clone().annotated(EXCLUDE_CONTAINERS, "db-migrate");
    assert_eq!(pod.containers(), ["db-migrate all"]);
    assert!(scenario.annotated(EXCLUDE_CONTAINERS, "").containers().is_empty(), "an empty one replaces it, too");
}

#[test]
fn exclusions_of_all_sources_are_united_with_their_sources() {
    let scenario = block(json!({"containers": "app"}))
        .args(json!({"container-exclude": {"containers": ["db-migrate"], "scope": "dns"}}))
        .annotated(EXCLUDE_CONTAINERS, "app,db-migrate");
    let expected = ["app all", "db-migrate dns", "db-migrate all"];
    assert_eq!(scenario.containers(), expected);
    let origins = scenario.output().origins.containers;
    let origins: Vec<_> = origins.iter().map(|(one, source)| format!("{} {}: {source}", one.name, one.scope)).collect();
    let expected = [
        "app all: configuration, chain[0]",
        "db-migrate dns: args.cni.container-exclude",
        "db-migrate all: pod, detour.io/exclude-containers",
        "app all: pod, detour.io/exclude-containers",
    ];
    assert_eq!(origins, expected);
    let namespace = block(json!({})).namespace(EXCLUDE_CONTAINERS, "app").output().origins.containers;
    assert_eq!(namespace[0].1, SettingSource::Namespace(EXCLUDE_CONTAINERS));
}

#[test]
fn pod_overrides_false_pins_the_administrators_containers() {
    let scenario = block(json!({"containers": "app", "pod_overrides": false}))
        .annotated(EXCLUDE_CONTAINERS, "No Label")
        .args(json!({"container-exclude": {"containers": "log"}}));
    assert_eq!(scenario.containers(), ["app all"]);
    let wanted = "Info: annotation \"detour.io/exclude-containers\" of pod shop/cart-1, args.cni.container-exclude: \
                  ignored: chain[0].pod_overrides is false";
    assert_eq!(scenario.notes(), [wanted]);
}

/// An author can give an application the name of an init container.
#[test]
fn kinds_bind_names_to_init_containers_or_applications() {
    let excluded = |keys: Value| {
        let containers = block(keys).output().policy.containers;
        containers.into_iter().map(|exclusion| exclusion.name).collect::<Vec<_>>()
    };
    for (kinds, expected) in [
        (json!(null), vec!["app", "log", "vault-init"]),
        (json!("init"), vec!["vault-init"]),
        (json!(["app"]), vec!["app", "log"]),
        (json!(["init", "app"]), vec!["app", "log", "vault-init"]),
        (json!([]), vec![]),
    ] {
        assert_eq!(excluded(json!({"containers": "app,log,vault-init", "kinds": kinds})), expected, "{kinds}");
    }
    let scenario = block(json!({"containers": "app", "kinds": "init", "pod_overrides": false}));
    assert_eq!(scenario.notes(), ["Info: chain[0].containers: \"app\": not excluded: not of the kinds in \"kinds\""]);
    let error = block(json!({"kinds": "sidecar"})).error();
    assert_eq!(error, "chain[0].kinds: invalid value \"sidecar\"; expected init, app");
}

#[test]
fn an_unused_annotation_is_reported_if_the_sub_plugin_is_not_in_the_chain() {
    let scenario = chain(json!([{"type": "uid-exclude"}]));
    for (scenario, place) in [
        (scenario.clone().annotated(EXCLUDE_CONTAINERS, "app"), "pod shop/cart-1"),
        (scenario.namespace(EXCLUDE_CONTAINERS, "app"), "namespace shop"),
    ] {
        assert!(scenario.containers().is_empty());
        let wanted = format!(
            "Warning: annotation \"detour.io/exclude-containers\" of {place}: ignored: the sub-plugin chain has no \
             container-exclude"
        );
        assert_eq!(scenario.notes(), [wanted]);
    }
}

#[test]
fn an_unknown_name_is_a_note_with_the_names_of_the_pod() {
    let has = "pod shop/cart-1 has no such container; it has vault-init, istio-validation, log, db-migrate, app, \
               istio-proxy";
    let annotated = block(json!({})).annotated(EXCLUDE_CONTAINERS, "x-*,app,vault-agent,vaultinit");
    assert_eq!(annotated.containers(), ["app all"]);
    let wanted = format!(
        "Warning: annotation \"detour.io/exclude-containers\" of pod shop/cart-1: \"x-*\", \"vault-agent\", \
         \"vaultinit\": {has}; did you mean \"vault-init\"?"
    );
    assert_eq!(annotated.notes(), [wanted]);
    let namespace = block(json!({})).namespace(EXCLUDE_CONTAINERS, "job").notes();
    assert_eq!(
        namespace,
        [format!("Info: annotation \"detour.io/exclude-containers\" of namespace shop: \"job\": {has}")]
    );
    let configured = block(json!({"containers": ["job", "init-containers"]})).pod(|pod| pod.init_containers.clear());
    let wanted =
        "Info: chain[0].containers: \"job\": pod shop/cart-1 has no such container; it has app, istio-proxy".to_owned();
    assert_eq!(configured.notes(), [wanted]);
}

#[test]
fn istios_containers_are_never_excluded() {
    let named = block(json!({})).annotated(EXCLUDE_CONTAINERS, "istio-proxy, istio-validation, app");
    assert_eq!(named.containers(), ["app all"]);
    let wanted = "Warning: annotation \"detour.io/exclude-containers\" of pod shop/cart-1: \"istio-proxy\", \
                  \"istio-validation\": containers of Istio are never excluded";
    assert_eq!(named.notes(), [wanted]);
    for items in ["*", "istio-*", "*validation", "init-containers"] {
        let scenario = native(block(json!({"containers": items})), 0);
        let containers = scenario.output().policy.containers;
        assert!(containers.iter().all(|exclusion| !exclusion.name.starts_with("istio-")), "{items}: {containers:?}");
        assert!(scenario.notes().is_empty(), "{items}");
    }
    assert_eq!(named.pod(|pod| pod.containers.swap(0, 1)).proxy(|_| ()).containers().len(), 1);
}

#[test]
fn an_invalid_item_is_an_error_with_its_place_and_the_accepted_forms() {
    let accepted = "expected names of containers, patterns such as *-init, init-containers";
    for (item, suggestion) in [
        ("Vault", ""),
        ("-init", ""),
        ("*-", ""),
        ("a.b", ""),
        ("a b", ""),
        ("a\u{1b}b", ""),
        ("a\nb", ""),
        ("ä", ""),
        ("init_containers", "; did you mean \"init-containers\"?"),
        ("container:vault-init", "; did you mean \"vault-init\"?"),
    ] {
        let msg = block(json!({})).annotated(EXCLUDE_CONTAINERS, item).error();
        let wanted = format!(
            "annotation \"detour.io/exclude-containers\" of pod shop/cart-1: invalid value {item:?}; {accepted}{suggestion}"
        );
        assert_eq!(msg, wanted);
        assert!(!msg.contains(char::is_control), "{msg:?}");
        let msg = block(json!({})).namespace(EXCLUDE_CONTAINERS, item).error();
        assert!(msg.starts_with("annotation \"detour.io/exclude-containers\" of namespace shop: invalid"), "{msg}");
        let msg = block(json!({"containers": [item]})).error();
        assert!(msg.starts_with("chain[0].containers: invalid value"), "{msg}");
        let msg = block(json!({})).args(json!({"container-exclude": {"containers": [item]}})).error();
        assert!(msg.starts_with("args.cni.container-exclude.containers: invalid value"), "{msg}");
    }
    let long = block(json!({})).annotated(EXCLUDE_CONTAINERS, &"a".repeat(64)).error();
    assert!(long.contains("invalid value \"aaaa"), "{long}");
    let longest = "a".repeat(60_000);
    assert!(block(json!({})).annotated(EXCLUDE_CONTAINERS, &longest).error().len() < 400);
}

#[test]
fn an_invalid_key_is_an_error_with_the_accepted_values() {
    for (keys, wanted) in [
        (json!({"scope": "tcp"}), "chain[0].scope: invalid value \"tcp\"; expected one of all, dns"),
        (json!({"scope": ["all"]}), "chain[0].scope: invalid value [\"all\"]; expected one of all, dns"),
        (json!({"containers": {}}), "chain[0].containers: invalid value {}; expected an array of strings"),
        (
            json!({"container": "app"}),
            "chain[0].container: unknown key; did you mean \"containers\"? expected one of allow, containers, kinds, \
             pod_overrides, scope, type",
        ),
    ] {
        let error = block(keys).run().expect_err("invalid");
        assert!(error.code == Code::InvalidConfig && error.msg.starts_with(wanted), "{error}");
    }
    let error = block(json!({})).args(json!({"container-exclude": {"pod_overrides": true}})).error();
    assert!(error.starts_with("args.cni.container-exclude.pod_overrides: unknown key; "), "{error}");
}

#[test]
fn lists_and_pods_that_are_too_large_are_errors_with_the_limit() {
    let many = vec!["app"; 101].join(",");
    let msg = block(json!({})).annotated(EXCLUDE_CONTAINERS, &many).error();
    let place = "annotation \"detour.io/exclude-containers\" of pod shop/cart-1";
    assert_eq!(msg, format!("{place}: expected at most 100 items, got 101"));
    let crowd = |pod: &mut Pod| pod.containers.extend((0..100).map(|i| container(&format!("c{i}"), None)));
    let msg = block(json!({})).annotated(EXCLUDE_CONTAINERS, "c1").pod(crowd).error();
    assert_eq!(msg, format!("{place}: pod shop/cart-1: expected at most 100 containers, got 106"));
    assert!(block(json!({})).pod(crowd).containers().is_empty(), "without a request");
}

#[test]
fn pods_without_rules_have_no_excluded_containers() {
    let scenario = block(json!({"containers": "*"})).annotated(EXCLUDE_CONTAINERS, "app");
    let expected = scenario.containers();
    assert_eq!(expected.len(), 4);
    for (change, reason) in [
        ((|pod| pod.host_network = true) as fn(&mut Pod), SkipReason::HostNetwork),
        (|pod| pod.containers.truncate(1), SkipReason::NoProxy),
    ] {
        let output = scenario.clone().pod(change).output();
        assert_eq!(output.decision, Decision::LeaveAlone(reason));
        assert!(output.policy.containers.is_empty() && output.policy.is_empty());
    }
    let istio_init = scenario.pod(|pod| pod.init_containers.push(container("istio-init", None)));
    assert_eq!(istio_init.containers(), expected, "another program redirects the pod");
}

#[test]
fn a_pod_that_matches_nothing_has_the_policy_of_a_chain_without_the_block() {
    let redirect = json!({"type": "istio-redirect"});
    let expected = chain(json!([redirect])).output().policy;
    let with = chain(json!([redirect, {"type": "container-exclude", "containers": "vault-*,init-containers"}]));
    assert_eq!(with.output().policy, expected);
    assert_eq!(with.annotated(EXCLUDE_CONTAINERS, "other").output().policy, expected);
}

#[test]
fn arguments_are_checked_without_a_pod() {
    let chain = |overrides: bool| {
        let value = json!({"type": "container-exclude", "containers": "job", "pod_overrides": overrides});
        [Block::new("chain[0]", &value).expect("an object")]
    };
    let args = |value: Value| Map::from_iter([("container-exclude".to_owned(), value)]);
    assert_eq!(check(&chain(true), &Bounds::default(), &args(json!({"containers": "other"})), &|_| None, true), Ok(()));
    let error = check(&chain(true), &Bounds::default(), &args(json!({"containers": "A"})), &|_| None, true)
        .expect_err("invalid");
    assert!(error.msg.starts_with("args.cni.container-exclude.containers: invalid value \"A\""), "{error}");
    assert_eq!(check(&chain(false), &Bounds::default(), &args(json!({"containers": "A"})), &|_| None, true), Ok(()));
}

#[test]
fn a_container_name_that_kubernetes_refuses_is_never_excluded() {
    let scenario = block(json!({"containers": "*"})).pod(|pod| pod.containers[0].name = "a \u{1b}b".into());
    assert_eq!(scenario.containers().len(), 3);
}

/// Matches like [`matches`], one character at a time.
fn simple_match(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, _) => name.is_empty(),
        (Some((b'*', rest)), None) => simple_match(rest, name),
        (Some((b'*', rest)), Some((_, after))) => simple_match(rest, name) || simple_match(pattern, after),
        (Some((first, rest)), Some((other, after))) => first == other && simple_match(rest, after),
        (Some(_), None) => false,
    }
}

proptest! {
    #[test]
    fn patterns_match_as_a_simple_implementation_does(pattern in "[ab*]{0,8}", name in "[ab]{0,8}") {
        prop_assert_eq!(matches(&pattern, &name), simple_match(pattern.as_bytes(), name.as_bytes()));
    }

    #[test]
    fn the_order_of_items_does_not_matter(items in prop::collection::vec("app|log|\\*-init|init-containers|x", 0..5)) {
        let reversed: Vec<_> = items.iter().rev().cloned().collect();
        let containers = |items: Vec<String>| block(json!({ "containers": items })).containers();
        prop_assert_eq!(containers(items), containers(reversed));
    }

    #[test]
    fn the_union_of_two_lists_is_the_list_of_both(
        a in prop::collection::vec("app|log|\\*-init|init-containers|l\\*", 0..4),
        b in prop::collection::vec("app|log|\\*-init|init-containers|l\\*", 0..4),
    ) {
        let policy = |items: &[String]| block(json!({ "containers": items })).output().policy;
        let both = policy(&[&a[..], &b[..]].concat());
        let (a, b) = (policy(&a), policy(&b));
        prop_assert_eq!(&a.union(&b).expect("no conflict"), &both);
        prop_assert_eq!(&b.union(&a).expect("no conflict"), &both);
    }

    #[test]
    fn every_text_is_resolved_or_rejected_with_its_place(value in "[a-z*,-]{0,40}|.{0,20}") {
        match block(json!({})).annotated(EXCLUDE_CONTAINERS, &value).run() {
            Ok(output) => prop_assert!(output.policy.containers.iter().all(|one| is_dns_label(&one.name))),
            Err(error) => prop_assert!(!error.msg.contains(char::is_control), "{:?}", error),
        }
    }
}
