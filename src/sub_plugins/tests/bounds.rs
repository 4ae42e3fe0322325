//! Bounds: the table that the admission policy shares, and what it does not contain.

use super::super::run::{explain, run};
use super::*;
use crate::cluster;
use crate::cni::{CniCommand, NetConf};
use crate::pod::Facts;
use crate::pod::well_known::{
    EXCLUDE_CONTAINERS, EXCLUDE_DESTINATION_PORTS, EXCLUDE_DESTINATION_RANGES, EXCLUDE_PORTS_FOR_UIDS,
    OPENSHIFT_UID_RANGE,
};
use crate::policy::{Exclusion, IdRange, TrafficOwner};
use scenario::{container, facts, meshed_pod};
use serde_json::Map;
use std::path::Path;

/// All sub-plugins, without keys.
fn excludes() -> Scenario {
    chain(json!(SUB_PLUGINS.map(|kind| json!({"type": kind}))))
}

/// The cases of the table with their facts and their configuration.
fn cases() -> Vec<(Value, Facts, NetConf)> {
    let text = include_str!("../../../tests/bounds/cases.yaml");
    // The table repeats a few pods in many cases.
    let options = serde_saphyr::options! { budget: None };
    let cases: Vec<Value> = serde_saphyr::from_str_with_options(text, options).expect("YAML");
    let facts = |case: &Value| {
        let (namespace, pod) = (&case["namespace"], &case["pod"]);
        let objects = json!([
            {"apiVersion": "v1", "kind": "Namespace", "metadata": namespace},
            {"apiVersion": "v1", "kind": "Pod", "spec": pod["spec"],
                "metadata": {"name": "cart-1", "namespace": namespace["name"], "annotations": pod["annotations"]}},
        ]);
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let mut objects = cluster::objects(Path::new("cases.yaml"), &list, "shop").expect("objects");
        Facts { pod: objects.pods.pop().expect("a pod").pod, namespace: objects.namespaces.pop() }
    };
    let conf = |case: &Value| {
        let keys = ["allow", "outside_bounds", "chain"].map(|key| (key.to_owned(), case[key].clone()));
        let mut conf = json!({"cniVersion": "1.1.0", "name": "istio-cni", "type": "detour"});
        conf.as_object_mut().expect("an object").extend(keys);
        if conf["chain"].is_null() {
            conf["chain"] = json!(SUB_PLUGINS.map(|kind| json!({"type": kind})));
        }
        NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("a configuration")
    };
    cases.into_iter().map(|case| (case.clone(), facts(&case), conf(&case))).collect()
}

#[test]
fn the_plugin_decides_as_the_table_says() {
    let all = cases();
    assert!(all.len() > 100, "{}", all.len());
    let mut wrong = Vec::new();
    for (case, facts, conf) in &all {
        let input = ChainInput {
            facts: Some(facts),
            args: &Map::new(),
            bounds: &conf.bounds,
            resolvers: Resolvers::default(),
            group_id: &|_| None,
        };
        let outcome = run(&conf.chain, &input);
        if outcome.is_ok() != case["permitted"].as_bool().expect("a verdict") {
            wrong.push(format!("{}: {:?}", case["name"], outcome.map(|_| ())));
        }
        if let Err(error) = run(&conf.chain, &input) {
            assert_eq!(error.code, Code::InvalidConfig, "{}", case["name"]);
        }
        // What is outside the bounds has no effect.
        let Ok(output) = explain(&conf.chain, &input) else { continue };
        assert_eq!(
            output.outside().next().is_none(),
            run(&conf.chain, &input).is_ok() && case["outside_bounds"].is_null()
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_error_names_object_annotation_item_bound_and_who_sets_it() {
    let bounded = excludes().annotated(EXCLUDE_UIDS, "7,0-9");
    let start =
        "annotation \"detour.io/exclude-uids\" of pod shop/cart-1: \"0-9\" is outside the bounds: not permitted by ";
    let next = "; remove it, or ask the administrator to permit it with \"allow\"";
    for (scenario, bound) in [
        (bounded.clone().allow(json!({"uids": 7})), "allow.uids (c)"),
        (bounded.clone().allow(json!([{"uids": 7}, {"gids": 7}])), "allow[0].uids, allow[1].uids (c)"),
        (
            bounded.clone().allow(json!([{"uids": 7}, {"uids": 1}, {"uids": 2}, {"uids": 3}])),
            "allow[0].uids, allow[1].uids, allow[2].uids and 1 more (c)",
        ),
        (bounded.clone().allow(json!({})).allow_in("uid-exclude", json!({"uids": 7})), "chain[0].allow.uids (c)"),
    ] {
        assert_eq!(scenario.error(), format!("{start}{bound}{next}"));
    }
    let error = bounded.clone().allow(json!({"namespaces": ["other"]})).error();
    assert!(
        error.contains(
            "\"7\" is outside the bounds: not permitted by allow (c), which has no grant for namespace shop;"
        )
    );
    let error = bounded.clone().allow(json!([])).error();
    assert!(error.contains("not permitted by allow (c);"), "{error}");
    let error = excludes().namespace(EXCLUDE_UIDS, "*").error();
    let of_namespace = "annotation \"detour.io/exclude-uids\" of namespace shop: \"*\" is outside the bounds: \
                        not permitted by the default bounds (no *, and at most 65536 IDs in a range); ";
    assert!(error.starts_with(of_namespace), "{error}");
    let error = excludes().annotated(EXCLUDE_UIDS, "1000/65537").error();
    assert!(error.contains(": \"1000/65537\" is outside the bounds: "), "as it was written: {error}");
}

/// Outside OpenShift, the namespace's author writes the annotation.
#[test]
fn a_namespace_range_with_too_many_ids_excludes_nothing() {
    let scenario = chain(json!([{"type": "uid-exclude", "uids": ["7", "namespace-range"]}]));
    let scenario = |range: &str| scenario.clone().namespace(OPENSHIFT_UID_RANGE, range);
    assert_eq!(scenario("1000/65536").exclusions(), ["uid 7", "uid 1000-66535"]);
    for range in ["1000/65537", "0/4294967294"] {
        assert_eq!(scenario(range).exclusions(), ["uid 7"], "{range}");
        assert!(
            scenario(range).notes().iter().any(|note| note.contains("expected at most 65536 IDs, got ")),
            "{range}"
        );
    }
}

#[test]
fn each_request_is_explained_with_its_bound() {
    let scenario = excludes()
        .annotated(EXCLUDE_UIDS, "7,8")
        .annotated(EXCLUDE_PORTS_FOR_UIDS, "443:9")
        .allow(json!([{"uids": 7}, {"ports": 443}, {"namespaces": "shop"}]))
        .ignoring();
    let requests = scenario.output().origins.requests;
    let shown: Vec<String> = requests.iter().map(ToString::to_string).collect();
    let expected = [
        "annotation \"detour.io/exclude-uids\" of pod shop/cart-1: \"7\": allowed by allow[0].uids (c)",
        "annotation \"detour.io/exclude-uids\" of pod shop/cart-1: \"8\": allowed by allow[2] (c)",
        "annotation \"detour.io/exclude-outbound-ports-for-uids\" of pod shop/cart-1: \"443:9\": allowed by allow[2] (c)",
    ];
    assert_eq!(shown, expected);
}

#[test]
fn ignored_items_have_no_effect_and_a_warning() {
    for (key, value, expected) in [
        (EXCLUDE_UIDS, "7,*,0-99999", vec!["uid 7"]),
        (EXCLUDE_GIDS, "*,7", vec!["gid 7"]),
        (EXCLUDE_PORTS_FOR_UIDS, "udp:53:7; *", vec!["uid 7 udp 53"]),
        (EXCLUDE_DNS, "10.0.0.1, 0.0.0.0/0", vec!["any tcp 53 to 10.0.0.1/32", "any udp 53 to 10.0.0.1/32"]),
        (EXCLUDE_DESTINATION_PORTS, "*, 443, 1-65535", vec!["any 443"]),
        (EXCLUDE_DESTINATION_RANGES, "*, 10.0.0.0/8, ::/0", vec!["any to 10.0.0.0/8"]),
    ] {
        let scenario = excludes().annotated(key, value).ignoring();
        assert_eq!(scenario.exclusions(), expected, "{key}");
        let warnings = scenario.notes().into_iter().filter(|note| note.contains("is outside the bounds")).count();
        assert_eq!(
            warnings,
            value.matches('*').count() + value.matches(['/', '-']).count() - usize::from(value.contains("10.0.0.0/8")),
            "{key}"
        );
    }
    // The first ranges count.
    let parts: Vec<String> = (0..64u32).map(|i| format!("{}-{}", (i * 1024).max(1), i * 1024 + 1023)).collect();
    let scenario = excludes().annotated(EXCLUDE_DESTINATION_PORTS, &parts.join(",")).ignoring();
    assert_eq!(scenario.exclusions(), ["any 1-4095"]);
    let parts: Vec<String> = (0..=255u8).map(|i| format!("{i}.0.0.0/8")).collect();
    let scenario = excludes().annotated(EXCLUDE_DESTINATION_RANGES, &parts.join(",")).ignoring();
    assert_eq!(scenario.exclusions().len(), 4);
    let scenario = excludes().annotated(EXCLUDE_CONTAINERS, "app,*").ignoring();
    assert_eq!(scenario.containers(), ["app all"]);
}

/// The admission policy can't read them: they are JSON in an annotation of Multus.
#[test]
fn arguments_are_bounded_list_by_list() {
    let pod = || facts(meshed_pod(), &[]);
    let allow = json!({"uids": "7", "ports": "443", "resolvers": "10.0.0.0/8", "containers": "app"});
    for (kind, block, permitted) in [
        ("uid-exclude", json!({"uids": [7], "rules": ["443:9"]}), true),
        ("uid-exclude", json!({"uids": [7, 8]}), false),
        ("uid-exclude", json!({"gids": [7]}), false),
        ("uid-exclude", json!({"rules": ["444:9"]}), false),
        // Permitted UIDs narrow everything else.
        ("dns-exclude", json!({"uids": [7]}), true),
        ("dns-exclude", json!({"uids": [7], "resolvers": "all", "ports": [1]}), true),
        ("dns-exclude", json!({"uids": [8], "resolvers": "10.0.0.1"}), false),
        ("dns-exclude", json!({"uids": [7], "gids": [7]}), false),
        ("dns-exclude", json!({"resolvers": "10.0.0.1"}), true),
        ("dns-exclude", json!({"resolvers": "11.0.0.1"}), false),
        // The ports of the administrator's block need no permission.
        ("dns-exclude", json!({"resolvers": "10.0.0.1", "ports": [53]}), true),
        ("dns-exclude", json!({"resolvers": "10.0.0.1", "ports": [443]}), true),
        ("dns-exclude", json!({"resolvers": "10.0.0.1", "ports": [444]}), false),
        ("dns-exclude", json!({"resolvers": "10.0.0.1", "ports": "*"}), false),
        ("destination-exclude", json!({"ports": [443]}), true),
        ("destination-exclude", json!({"ports": [444]}), false),
        ("destination-exclude", json!({"ip_ranges": ["10.0.0.1"]}), false),
        ("destination-exclude", json!({"ports": "*", "ip_ranges": "*", "uids": [7]}), true),
        ("destination-exclude", json!({"ports": [443], "uids": [8]}), false),
        ("container-exclude", json!({"containers": "app"}), true),
        ("container-exclude", json!({"containers": "other"}), false),
        ("container-exclude", json!({"containers": "app", "kinds": "init"}), true),
    ] {
        let scenario = excludes().facts(pod()).allow(allow.clone()).args(json!({ kind: block }));
        let outcome = scenario.run();
        assert_eq!(outcome.is_ok(), permitted, "{kind} {block}: {outcome:?}");
        if let Err(error) = outcome {
            let start = format!("args.cni.{kind}.");
            assert!(error.msg.starts_with(&start) && error.msg.contains("is outside the bounds"), "{error}");
            let remaining = scenario.ignoring().output();
            let is_permitted = |it: &Exclusion| it.owner == TrafficOwner::Uid(IdRange::one(7));
            assert!(remaining.policy.exclusions.iter().all(is_permitted), "{kind} {block}");
            assert!(remaining.policy.containers.is_empty(), "{kind} {block}");
        }
    }
}

#[test]
fn namespace_ranges_and_containers_count_with_their_ids() {
    let openshift = [("openshift.io/sa.scc.uid-range", "500/10")];
    let mut pod = meshed_pod();
    pod.containers.push(container("other", None));
    let request = |item: &str, uids: &str| {
        let scenario = excludes().facts(facts(pod.clone(), &openshift)).annotated(EXCLUDE_UIDS, item);
        scenario.allow(json!({ "uids": uids })).run().is_ok()
    };
    for (item, uids, permitted) in [
        ("505", "namespace-range", true),
        ("510", "namespace-range", false),
        ("500", "namespace-range-first", true),
        ("501", "namespace-range-first", false),
        ("namespace-range", "400-600", true),
        ("namespace-range", "505-600", false),
        ("namespace-range-last", "505-600", true),
        ("container:app", "namespace-range,1000", true),
        ("container:app", "namespace-range", false),
        // Its UID is unknown, so the request is an error even if the word is granted.
        ("container:other", "0-4294967294", false),
    ] {
        assert_eq!(request(item, uids), permitted, "{item} with {uids}");
    }
}

#[test]
fn invalid_grants_are_rejected_with_their_place() {
    for (allow, wanted) in [
        (json!("all"), "allow: invalid value \"all\"; expected an object with what pods may request, or a list"),
        (json!([7]), "allow[0]: invalid value 7; expected an object"),
        (json!({"uids": null}), "allow.uids: invalid value null; expected a value; without one, remove the key"),
        (json!([{"namespaces": null, "uids": 7}]), "allow[0].namespaces: invalid value null; expected a value"),
        (
            json!({"uid": 7}),
            "allow.uid: unknown key; did you mean \"uids\"? expected one of containers, gids, ip_ranges, kinds",
        ),
        (json!([{}, {"uids": "root"}]), "allow[1].uids: invalid value \"root\"; expected numbers"),
        (json!({"containers": "Web"}), "allow.containers: invalid value \"Web\"; expected names of containers"),
        (json!({"containers": "a", "kinds": "job"}), "allow.kinds: invalid value \"job\"; expected init, app"),
        (json!({"kinds": "init"}), "allow.kinds: restricts the key \"containers\", which is missing"),
        (json!({"ports": "http"}), "allow.ports: invalid value \"http\"; expected ports"),
        (json!({"ip_ranges": "x"}), "allow.ip_ranges: invalid value \"x\"; expected IP addresses"),
        (json!({"resolvers": "x"}), "allow.resolvers: invalid value \"x\"; expected all"),
        (json!({"namespaces": "a*"}), "allow.namespaces: invalid value \"a*\"; expected names of namespaces"),
        (json!({"namespace_selector": "a=b"}), "allow.namespace_selector: invalid value \"a=b\"; expected an object"),
        (json!({"namespace_selector": {"matchLabel": {}}}), "allow.namespace_selector.matchLabel: unknown key"),
        (json!({"namespace_selector": {"matchLabels": []}}), "allow.namespace_selector: invalid value"),
        (
            json!({"namespace_selector": {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}}),
            "allow.namespace_selector.matchExpressions[0].operator: invalid value \"Gt\"; expected one of In, NotIn",
        ),
        (
            json!({"namespace_selector": {"matchExpressions": [{"key": "a", "operator": "NotIn"}]}}),
            "allow.namespace_selector: invalid value",
        ),
    ] {
        let error = excludes().allow(allow.clone()).run().expect_err("invalid");
        assert!(
            error.code == Code::InvalidConfig && error.msg.starts_with(&format!("c: {wanted}")),
            "{allow}: {error}"
        );
    }
    let two = excludes().allow_in("uid-exclude", json!({})).allow_in("uid-exclude", json!([])).error();
    assert!(two.contains("chain[1].allow: chain[0].allow is already set for uid-exclude; remove one of them"), "{two}");
}

#[test]
fn a_running_pod_loses_what_is_outside_and_keeps_the_rest() {
    let bounded = excludes().annotated(EXCLUDE_UIDS, "7,8").allow(json!({"uids": 7}));
    let expected = excludes().annotated(EXCLUDE_UIDS, "7").output().policy;
    let repeated = bounded.run_again(true, true);
    assert_eq!(repeated.absent.iter().map(|error| error.msg.clone()).collect::<Vec<_>>(), [bounded.error()]);
    assert_eq!(repeated.policy, expected);
    assert_eq!(bounded.ignoring().run_again(true, true).policy, expected);
}

/// The node marks the blocks of a definition that it did not install.
#[test]
fn blocks_of_a_definition_are_bounded_as_the_requests_of_a_pod() {
    let outside = |mut block: Value, allow: Value| {
        block["is_request"] = true.into();
        chain(json!([block])).allow(allow).annotated(EXCLUDE_DNS, "10.0.0.1")
    };
    for (block, item) in [
        (json!({"type": "uid-exclude", "uids": ["*"]}), "chain[0].uids: \"*\""),
        (json!({"type": "uid-exclude", "gids": [7]}), "chain[0].gids: \"7\""),
        (json!({"type": "uid-exclude", "rules": "tcp:443:*"}), "chain[0].rules: \"tcp:443:*\""),
        (json!({"type": "dns-exclude", "resolvers": "all", "ports": "1-65535"}), "chain[0].ports: \"1-65535\""),
        (json!({"type": "container-exclude", "containers": "app"}), "chain[0].containers: \"app\""),
        (json!({"type": "destination-exclude", "ip_ranges": ["10.0.0.0/8"]}), "chain[0].ip_ranges: \"10.0.0.0/8\""),
    ] {
        let scenario = outside(block.clone(), json!({"resolvers": "all"}));
        let error = scenario.error();
        assert!(error.starts_with(item) && error.contains("outside the bounds"), "{error}");
        let ignored = scenario.ignoring();
        assert!(
            ignored.exclusions().iter().all(|exclusion| exclusion.contains("10.0.0.1")),
            "{:?}",
            ignored.exclusions()
        );
        assert_eq!(ignored.containers(), [""; 0]);
        assert_eq!(outside(block, json!({})).output().origins.requests.first().map(|it| it.permitted), Some(true));
    }
    // An annotation adds to a block with the defaults, not to the ports of the author.
    let ports = outside(json!({"type": "dns-exclude", "ports": [443]}), json!({"resolvers": "all"}));
    assert_eq!(
        ports.exclusions(),
        chain(json!([{"type": "dns-exclude"}])).annotated(EXCLUDE_DNS, "10.0.0.1").exclusions()
    );
}
