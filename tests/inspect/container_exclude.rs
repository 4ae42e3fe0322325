//! Containers that bypass the sidecar by name, as `explain` and `trace` show them. cases.yaml has more cases.

use crate::explain::{Case, annotate};
use crate::run::file;
use serde_json::{Value, json};

const ANNOTATION: &str = "detour.io/exclude-containers";

/// A pod as under OpenShift's default SCC, where all containers except the sidecar run as one UID, with a sub-plugin
/// chain of `istio-redirect` and `blocks`.
fn one_uid(blocks: &[Value]) -> Case {
    let mut case = Case::named("container-exclude-of-no-container");
    case.conf["chain"] = json!([&[json!({"type": "istio-redirect"})], blocks].concat());
    case
}

fn excludes(containers: &str, scope: &str) -> Case {
    one_uid(&[json!({"type": "container-exclude", "containers": containers, "scope": scope})])
}

fn codes(report: &Value) -> Vec<&str> {
    let warnings = report["warnings"].as_array().expect("warnings");
    warnings.iter().map(|warning| warning["code"].as_str().expect("a code")).collect()
}

#[test]
fn each_excluded_container_is_reported_with_its_traffic_and_its_source() {
    let expected = json!([
        {
            "name": "vault-agent-init", "scope": "all",
            "sources": ["configuration, chain[1]", "pod, detour.io/exclude-containers"],
        },
        {"name": "web", "scope": "dns", "sources": ["configuration, chain[2]"]},
    ]);
    assert_eq!(Case::named("container-exclude").report()["excluded_containers"], expected);
}

#[test]
fn exclusions_that_a_native_sidecar_makes_needless_have_their_sources() {
    let sample =
        |name: &str| std::fs::read_to_string(format!("{}/conf/{name}", env!("CARGO_MANIFEST_DIR"))).expect("text");
    let mut case = Case::named("redirected");
    case.pod = serde_saphyr::from_str(&sample("openshift-vault-pod.yaml")).expect("YAML");
    case.conf = serde_json::from_str(&sample("openshift-vault.conf")).expect("JSON");
    case.conf["chain"].as_array_mut().expect("a list").push(json!({"type": "uid-exclude", "uids": [7]}));
    case.pod["spec"]["initContainers"][1]["securityContext"]["runAsUser"] = json!(7);
    let needless = |case: &Case| {
        let report = case.report();
        let init = report["init_containers"].as_array().expect("a list").iter();
        let vault = init.clone().find(|one| one["name"] == "vault-agent-init").expect("it").clone();
        (vault["needless_exclusions"].clone(), codes(&report).contains(&"excluded-after-proxy"))
    };
    assert_eq!(needless(&case), (json!([]), false), "the sidecar starts later");
    let mut proxy = case.pod["spec"]["containers"].as_array_mut().expect("a list").pop().expect("istio-proxy");
    proxy["restartPolicy"] = json!("Always");
    case.pod["spec"]["initContainers"].as_array_mut().expect("a list").insert(0, proxy);
    let by_name = "container vault-agent-init (pod, detour.io/exclude-containers)";
    assert_eq!(needless(&case), (json!([by_name, "uid 7 (configuration, chain[2])"]), true));
    // Another container with the ID starts before the sidecar.
    let early = json!({"name": "early", "image": "early", "securityContext": {"runAsUser": 7}});
    case.pod["spec"]["initContainers"].as_array_mut().expect("a list").insert(0, early);
    assert_eq!(needless(&case), (json!([by_name]), true));
    case.pod["metadata"]["annotations"].as_object_mut().expect("annotations").remove(ANNOTATION);
    assert_eq!(needless(&case), (json!([]), false));
}

#[test]
fn a_block_that_excludes_nothing_does_not_change_the_rules() {
    let rules = |case: &Case, format: &str| {
        let run = case.explain(&["--rules", format]);
        assert_eq!(run.code, 0, "{run:?}");
        (run.stdout, run.stderr)
    };
    for format in ["iptables", "nft"] {
        assert_eq!(rules(&excludes("job-*", "all"), format), rules(&one_uid(&[]), format), "{format}");
    }
    let by_name = excludes("web", "all");
    assert!(rules(&by_name, "nft").0.contains("table inet detour-exclusions {"));
    let (iptables, hint) = rules(&by_name, "iptables");
    assert_eq!(iptables, rules(&one_uid(&[]), "iptables").0);
    let wanted = "note: pod shop/web-0: iptables shows only the redirection: exclusions are native nftables rules; \
                  use --rules nft\n";
    assert_eq!(hint, wanted);
}

/// The author needs no exclusion if Istio's own annotations leave all traffic alone.
#[test]
fn an_init_container_whose_traffic_is_not_captured_needs_no_exclusion() {
    for (annotation, value, captured) in [
        ("traffic.sidecar.istio.io/includeOutboundIPRanges", "", false),
        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "0.0.0.0/0,::/0", false),
        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "0.0.0.0/0", true),
        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "*", false),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", "1-65535", false),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", "443", true),
    ] {
        let mut case = one_uid(&[]);
        annotate(&mut case.pod, annotation, value);
        case.pod["spec"]["containers"][1]["env"] = json!([]);
        let report = case.report();
        assert_eq!(codes(&report).contains(&"init-container-too-early"), captured, "{annotation}: {value}: {report}");
        assert_eq!(report["init_containers"][0]["needs_exclusion"], captured, "{annotation}: {value}: {report}");
        let picture = case.picture();
        assert_eq!(picture.contains(">outbound TCP<"), captured, "{annotation}: {value}: {picture}");
    }
}

#[test]
fn the_picture_shows_the_bypass_of_each_excluded_container() {
    let drawn = |svg: &str, text: &str| svg.matches(&format!(">{text}<")).count();
    let plain = excludes("", "all").picture();
    assert_eq!((drawn(&plain, "vault-agent-init"), drawn(&plain, "everything")), (1, 0));
    let by_name = excludes("vault-*", "all").picture();
    assert_eq!(drawn(&by_name, "vault-agent-init"), 1, "only in its lane");
    let all = "all outbound traffic until it exits";
    assert_eq!((drawn(&by_name, all), drawn(&by_name, "configuration, chain[1]")), (1, 1));
    let mut annotated = excludes("", "all");
    annotate(&mut annotated.pod, ANNOTATION, "vault-agent-init,*");
    let bounded = annotated.explain(&["--format", "svg"]);
    assert!(bounded.code == 1 && bounded.stdout.contains("an ADD fails"), "{bounded:?}");
    let lasting = excludes("web", "all").picture();
    assert_eq!((drawn(&lasting, "web"), drawn(&lasting, all)), (1, 1));
    let dns = excludes("web", "dns").picture();
    assert_eq!((drawn(&dns, "web"), drawn(&dns, "DNS until it exits")), (2, 1));
    for (containers, scope, expected) in [("vault-*", "all", (1, 1)), ("*", "dns", (1, 2))] {
        let mut case = excludes(containers, scope);
        case.pod["spec"]["initContainers"].as_array_mut().expect("a list").push(json!({"name": "istio-init"}));
        let svg = case.picture();
        assert_eq!((drawn(&svg, "captured by istio-init"), svg.matches(" until it exits<").count()), expected);
    }
    for name in ["uid-of-the-proxy", "gid-of-the-proxy"] {
        let svg = Case::named(name).picture();
        assert_eq!(svg.matches("the UID or GID of istio-proxy").count(), 2, "{svg}");
    }
}

#[test]
fn containers_of_several_attachments_and_of_the_node_are_united() {
    let definition = |name: &str, containers: &str| {
        let chain = json!([{"type": "container-exclude", "containers": containers}]);
        let config = json!({"type": "detour", "cniVersion": "1.0.0", "name": name, "chain": chain});
        json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"namespace": "shop", "name": name}, "spec": {"config": config.to_string()}
        })
    };
    let definitions = format!("{}\n---\n{}\n", definition("one", "web"), definition("two", "vault-*"));
    let definitions = file("definitions.yaml", &definitions);
    let sorted = |networks: &str, pinned: bool| {
        let mut case = excludes("web", "dns");
        case.conf["chain"][1]["pod_overrides"] = (!pinned).into();
        (case.conf["name"], case.conf["clusterNetwork"]) = ("node".into(), "ovn-kubernetes".into());
        annotate(&mut case.pod, "k8s.v1.cni.cncf.io/networks", networks);
        annotate(&mut case.pod, ANNOTATION, "vault-agent-init");
        let report = case.explain(&["--definitions", &definitions, "-o", "json"]).json();
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let line = |one: &Value| format!("{} {} {}", text(&one["name"]), text(&one["scope"]), one["sources"]);
        let mut lines: Vec<_> =
            report["excluded_containers"].as_array().expect("containers").iter().map(line).collect();
        lines.sort();
        lines
    };
    let dns = r#"web dns ["configuration, chain[1]"]"#;
    let one = r#"web all ["network shop/one, chain[0]"]"#;
    let vault = r#"vault-agent-init all ["pod, detour.io/exclude-containers","network shop/two, chain[0]"]"#;
    let both = sorted("one,two", false);
    assert_eq!(both, [vault, one, dns]);
    assert_eq!(sorted("two,one", false).len(), both.len(), "the order does not matter");
    let pinned = r#"web dns ["network shop/one, chain[0]","configuration, chain[1]"]"#;
    assert_eq!(sorted("one", true), [pinned], "the node's block replaces that of the definition");
}

/// A pod whose init container is excluded, and whose sidecar answers DNS.
fn traced() -> Case {
    let mut case = excludes("vault-agent-init", "all");
    case.conf["chain"][0]["redirect_dns"] = true.into();
    case
}

#[test]
fn the_trace_of_an_excluded_container_shows_when_its_bypass_ends_and_where_the_packet_arrives_then() {
    let case = traced();
    for (to, port) in [("1.2.3.4:443/tcp", 15001), ("10.96.0.10:53/udp", 15053), ("[fd96::a]:53/tcp", 15053)] {
        let trace = |from: &str| case.trace(from, to, &["-o", "json"]).json();
        let report = trace("container=vault-agent-init");
        let decided = (&report["arrives_at"], &report["decided_by"]["table"]);
        assert_eq!(decided, (&"direct".into(), &"detour-exclusions".into()));
        let expected = json!({"name": "vault-agent-init", "excluded": true, "bypasses": "all"});
        assert_eq!(report["container"], expected, "{to}");
        let web = trace("container=web");
        assert_eq!(web["arrives_at"], format!("sidecar:{port}"), "the same UID: {to}");
        let expected = json!({"name": "web", "excluded": false, "bypasses": null});
        assert_eq!((&web["container"], &web["caveats"]), (&expected, &json!([])));
        let by_uid = trace("uid=1000650000");
        assert_eq!((&by_uid["arrives_at"], &by_uid["container"]), (&web["arrives_at"], &Value::Null));
    }
    let text = case.trace("container=vault-agent-init", "1.2.3.4:443/tcp", &[]).stdout;
    let expected = "1.2.3.4:443/tcp from container vault-agent-init (uid 1000650000, gid 0) via eth0 → direct\n\
                    Container vault-agent-init: all outbound traffic bypasses the sidecar until the container exits\n";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn a_container_is_traced_with_given_ids_and_an_unknown_one_is_refused_with_the_names() {
    let mut case = traced();
    case.pod["spec"]["initContainers"][0]["securityContext"] = Value::Null;
    let trace = |from: &str, more: &[&str]| case.trace(from, "1.2.3.4:443/tcp", more);
    let run = trace("container=vault-agent-init", &[]);
    assert!(run.code == 2 && run.stderr.contains("use container=vault-agent-init,uid=UID"), "{run:?}");
    let report = trace("container=vault-agent-init,uid=5,gid=6", &["-o", "json"]).json();
    assert_eq!((&report["from"]["process"], &report["arrives_at"]), (&json!({"uid": 5, "gid": 6}), &"direct".into()));
    let run = trace("container=vault,uid=5", &[]);
    assert!(run.code == 2 && run.stderr.contains("expected one of vault-agent-init, "), "{run:?}");
}
