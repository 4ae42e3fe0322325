//! Containers that bypass the sidecar by name, as `explain` shows them.

use crate::explain::{annotate, compare, pod};
use crate::run::{Run, detour, file};
use serde_json::{Value, json};

const ANNOTATION: &str = "detour.io/exclude-containers";

/// A pod as under OpenShift's default SCC: all containers except the sidecar run as one UID.
fn one_uid() -> Value {
    let mut pod = pod();
    pod["spec"]["initContainers"][0]["securityContext"]["runAsUser"] = 1000650000.into();
    pod
}

/// Runs `explain` with a sub-plugin chain of `istio-redirect` and `blocks`.
fn explain(pod: &Value, blocks: &Value, more: &[&str]) -> Run {
    let mut chain = vec![json!({"type": "istio-redirect"})];
    chain.extend(blocks.as_array().expect("blocks").iter().cloned());
    let conf = json!({
        "cniVersion": "1.1.0", "name": "istio-cni", "type": "detour", "kubernetes": {"kubeconfig": "/k"}, "chain": chain
    });
    let conf = file("container-exclude.conf", &conf.to_string());
    detour(&[&["explain", "-f", "-", "--config", &conf], more].concat(), &pod.to_string(), &[])
}

fn report(pod: &Value, blocks: &Value) -> Value {
    let run = explain(pod, blocks, &["-o", "json"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    run.json()
}

fn codes(report: &Value) -> Vec<&str> {
    let warnings = report["warnings"].as_array().expect("warnings");
    warnings.iter().map(|warning| warning["code"].as_str().expect("a code")).collect()
}

fn notes(report: &Value) -> String {
    report["notes"].to_string()
}

#[test]
fn each_excluded_container_is_reported_with_its_traffic_and_its_source() {
    let mut pod = one_uid();
    annotate(&mut pod, ANNOTATION, "vault-agent-init");
    let blocks = json!([
        {"type": "container-exclude", "containers": "*-agent-init"},
        {"type": "container-exclude", "containers": ["web"], "scope": "dns"},
    ]);
    let run = explain(&pod, &blocks, &[]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    compare("container-exclude", &run.stdout);
    let report = report(&pod, &blocks);
    let expected = json!([
        {
            "name": "vault-agent-init", "scope": "all",
            "sources": ["configuration, chain[1]", "pod, detour.io/exclude-containers"],
        },
        {"name": "web", "scope": "dns", "sources": ["configuration, chain[2]"]},
    ]);
    assert_eq!(report["excluded_containers"], expected);
    assert_eq!(codes(&report), [""; 0], "an excluded init container is not captured too early");
    assert!(notes(&report).contains("need the agent with --nri-socket on"), "{report}");
}

#[test]
fn the_sample_for_vault_excludes_one_of_several_containers_with_the_same_uid() {
    let sample = |name: &str| format!("{}/conf/{name}", env!("CARGO_MANIFEST_DIR"));
    let (conf, pod) = (sample("openshift-vault.conf"), sample("openshift-vault-pod.yaml"));
    let explain = |more: &[&str]| {
        let run = detour(&[&["explain", "-f", &pod, "--config", &conf], more].concat(), "", &[]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
        run
    };
    let report = explain(&["-o", "json"]).json();
    let source = "pod, detour.io/exclude-containers";
    let expected = json!([{"name": "vault-agent-init", "scope": "all", "sources": [source]}]);
    assert_eq!((&report["redirected"], &report["excluded_containers"]), (&json!(true), &expected));
    assert_eq!((codes(&report), &report["exempt"]), (vec![], &json!([])));
    assert_eq!(detour(&["validate", &conf], "", &[]).code, 0);
}

#[test]
fn exclusions_that_a_native_sidecar_makes_needless_have_their_sources() {
    let sample =
        |name: &str| std::fs::read_to_string(format!("{}/conf/{name}", env!("CARGO_MANIFEST_DIR"))).expect("text");
    let mut pod: Value = serde_saphyr::from_str(&sample("openshift-vault-pod.yaml")).expect("YAML");
    let mut conf: Value = serde_json::from_str(&sample("openshift-vault.conf")).expect("JSON");
    conf["chain"].as_array_mut().expect("a list").push(json!({"type": "uid-exclude", "uids": [7]}));
    pod["spec"]["initContainers"][1]["securityContext"]["runAsUser"] = json!(7);
    let needless = |pod: &Value| {
        let (pod, conf) = (file("pod.json", &pod.to_string()), file("istio-cni.conf", &conf.to_string()));
        let report = detour(&["explain", "-f", &pod, "--config", &conf, "-o", "json"], "", &[]).json();
        let init = report["init_containers"].as_array().expect("a list").iter();
        let vault = init.clone().find(|one| one["name"] == "vault-agent-init").expect("it").clone();
        (vault["needless_exclusions"].clone(), codes(&report).contains(&"excluded-after-proxy"))
    };
    assert_eq!(needless(&pod), (json!([]), false), "the sidecar starts later");
    let mut proxy = pod["spec"]["containers"].as_array_mut().expect("a list").pop().expect("istio-proxy");
    proxy["restartPolicy"] = json!("Always");
    pod["spec"]["initContainers"].as_array_mut().expect("a list").insert(0, proxy);
    let by_name = "container vault-agent-init (pod, detour.io/exclude-containers)";
    assert_eq!(needless(&pod), (json!([by_name, "uid 7 (configuration, chain[2])"]), true));
    // Another container with the ID starts before the sidecar.
    let early = json!({"name": "early", "image": "early", "securityContext": {"runAsUser": 7}});
    pod["spec"]["initContainers"].as_array_mut().expect("a list").insert(0, early);
    assert_eq!(needless(&pod), (json!([by_name]), true));
    pod["metadata"]["annotations"].as_object_mut().expect("annotations").remove(ANNOTATION);
    assert_eq!(needless(&pod), (json!([]), false));
}

#[test]
fn a_block_that_excludes_nothing_does_not_change_the_rules() {
    let rules = |blocks: Value, format: &str| {
        let run = explain(&one_uid(), &blocks, &["--rules", format]);
        assert_eq!(run.code, 0, "{run:?}");
        (run.stdout, run.stderr)
    };
    for format in ["iptables", "nft"] {
        let without = rules(json!([]), format);
        assert_eq!(rules(json!([{"type": "container-exclude", "containers": "job-*"}]), format), without, "{format}");
    }
    let by_name = json!([{"type": "container-exclude", "containers": "web"}]);
    assert!(rules(by_name.clone(), "nft").0.contains("table inet detour-exclusions {"));
    let (iptables, hint) = rules(by_name, "iptables");
    assert_eq!(iptables, rules(json!([]), "iptables").0);
    let wanted = "note: pod shop/web-0: iptables shows only the redirection: exclusions are native nftables rules; \
                  use --rules nft\n";
    assert_eq!(hint, wanted);
}

#[test]
fn a_pod_without_excluded_containers_needs_nothing_on_the_node() {
    let report = report(&one_uid(), &json!([{"type": "container-exclude", "containers": "other"}]));
    assert_eq!(report["excluded_containers"], json!([]));
    assert!(!notes(&report).contains("nri-socket"), "{report}");
}

#[test]
fn an_unknown_name_is_a_note_and_no_error() {
    let mut pod = one_uid();
    annotate(&mut pod, ANNOTATION, "vault-init");
    let report = report(&pod, &json!([{"type": "container-exclude"}]));
    let wanted = "warning: annotation \"detour.io/exclude-containers\" of pod shop/web-0: \"vault-init\": pod \
                  shop/web-0 has no such container; it has vault-agent-init, web, istio-proxy";
    assert!(report["notes"][0].as_str().expect("a note").starts_with(wanted), "{report}");
    assert_eq!(codes(&report), ["init-container-too-early"]);
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
        let mut pod = one_uid();
        annotate(&mut pod, annotation, value);
        let proxy = &mut pod["spec"]["containers"].as_array_mut().expect("containers")[1];
        assert_eq!(proxy["name"], "istio-proxy");
        proxy["env"] = json!([]);
        let report = report(&pod, &json!([]));
        assert_eq!(codes(&report).contains(&"init-container-too-early"), captured, "{annotation}: {value}: {report}");
        assert_eq!(report["init_containers"][0]["needs_exclusion"], captured, "{annotation}: {value}: {report}");
        let picture = explain(&pod, &json!([]), &["--format", "svg"]).stdout;
        assert_eq!(picture.contains(">outbound TCP<"), captured, "{annotation}: {value}: {picture}");
    }
}

/// The proxy's answer can be an address that only it knows; an excluded port bypasses the proxy.
#[test]
fn an_excluded_port_beside_dns_that_the_sidecar_answers_is_a_warning() {
    for (ports, captured, warned) in [("443", "true", true), ("443", "false", false), ("", "true", false)] {
        let mut pod = one_uid();
        if !ports.is_empty() {
            annotate(&mut pod, "traffic.sidecar.istio.io/excludeOutboundPorts", ports);
        }
        let proxy = &mut pod["spec"]["containers"].as_array_mut().expect("containers")[1];
        proxy["env"] = json!([{"name": "ISTIO_META_DNS_CAPTURE", "value": captured}]);
        let report = report(&pod, &json!([]));
        assert_eq!(
            codes(&report).contains(&"excluded-ports-with-captured-dns"),
            warned,
            "{ports} {captured}: {report}"
        );
    }
}

#[test]
fn an_init_container_that_shares_its_uid_gets_the_hint_to_exclude_it_by_name() {
    let report = report(&one_uid(), &json!([{"type": "container-exclude"}]));
    assert_eq!(codes(&report), ["init-container-too-early"]);
    let next = report["warnings"][0]["next"].as_str().expect("a hint");
    let wanted = "exclude it by name: annotation detour.io/exclude-containers: \"vault-agent-init\", sub-plugin \
                  container-exclude; ";
    assert!(next.starts_with(wanted), "{next}");
    let dns_only = self::report(&one_uid(), &json!([{"type": "container-exclude", "containers": "*", "scope": "dns"}]));
    let what = dns_only["warnings"][0]["what"].as_str().expect("a warning");
    assert!(what.ends_with("is captured and lost, except for excluded traffic"), "{what}");
}

/// The redirection recognizes the proxy by its UID or GID, so it captures no other container that runs with one of them.
#[test]
fn containers_with_the_id_of_the_proxy_are_not_captured() {
    for (key, id) in [("runAsUser", "UID 1000659999"), ("runAsGroup", "GID 1000659999")] {
        let mut pod = one_uid();
        pod["spec"]["initContainers"][0]["securityContext"][key] = 1000659999.into();
        pod["spec"]["containers"][0]["securityContext"][key] = 1000659999.into();
        let blocks = json!([{"type": "container-exclude"}]);
        let report = report(&pod, &blocks);
        assert_eq!(codes(&report), ["excluded-with-application"]);
        let what =
            format!("container web runs as {id}, as istio-proxy does: all traffic that it sends bypasses the mesh");
        assert_eq!(report["warnings"][0]["what"], what);
        let init = &report["init_containers"][0];
        assert_eq!((&init["needs_exclusion"], &init["excluded"]), (&json!(false), &json!("all")));
        let table = explain(&pod, &blocks, &[]).stdout;
        assert!(table.contains("  needs no exclusion\n"), "{table}");
        let picture = explain(&pod, &blocks, &["--format", "svg"]).stdout;
        assert_eq!(picture.matches("the UID or GID of istio-proxy").count(), 2, "{picture}");
    }
}

#[test]
fn a_uid_exclusion_that_covers_the_application_gets_the_hint_to_exclude_the_container() {
    let mut pod = one_uid();
    annotate(&mut pod, "detour.io/exclude-uids", "container:vault-agent-init");
    let report = report(&pod, &json!([{"type": "uid-exclude"}]));
    assert_eq!(codes(&report), ["excluded-with-application"]);
    let next = report["warnings"][0]["next"].as_str().expect("a hint");
    let wanted = "exclude a container instead of its ID (annotation detour.io/exclude-containers: \
                  \"vault-agent-init\", sub-plugin container-exclude), ";
    assert!(next.starts_with(wanted), "{next}");
    assert!(notes(&report).contains("runAsUser 1000650000 is also that of container web"), "{report}");
}

#[test]
fn the_picture_shows_the_bypass_of_each_excluded_container() {
    let svg = |pod: &Value, blocks: Value| {
        let run = explain(pod, &blocks, &["--format", "svg"]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
        run.stdout
    };
    let drawn = |svg: &str, text: &str| svg.matches(&format!(">{text}<")).count();
    let plain = svg(&one_uid(), json!([{"type": "container-exclude"}]));
    assert_eq!((drawn(&plain, "vault-agent-init"), drawn(&plain, "everything")), (1, 0));
    let by_name = svg(&one_uid(), json!([{"type": "container-exclude", "containers": "vault-*"}]));
    assert_eq!(drawn(&by_name, "vault-agent-init"), 1, "only in its lane");
    let all = "all outbound traffic until it exits";
    assert_eq!((drawn(&by_name, all), drawn(&by_name, "configuration, chain[1]")), (1, 1));
    let mut annotated = one_uid();
    annotated["metadata"]["annotations"]["detour.io/exclude-containers"] = json!("vault-agent-init,*");
    let bounded = explain(&annotated, &json!([{"type": "container-exclude"}]), &["--format", "svg"]);
    assert!(bounded.code == 1 && bounded.stdout.contains("an ADD fails"), "{bounded:?}");
    let lasting = svg(&one_uid(), json!([{"type": "container-exclude", "containers": "web"}]));
    assert_eq!((drawn(&lasting, "web"), drawn(&lasting, all)), (1, 1));
    let dns = svg(&one_uid(), json!([{"type": "container-exclude", "containers": "web", "scope": "dns"}]));
    assert_eq!((drawn(&dns, "web"), drawn(&dns, "DNS until it exits")), (2, 1));
    let mut by_istio_init = one_uid();
    by_istio_init["spec"]["initContainers"].as_array_mut().expect("a list").push(json!({"name": "istio-init"}));
    let drawn_for = |containers: &str, scope: &str| {
        let block = json!([{"type": "container-exclude", "containers": containers, "scope": scope}]);
        let svg = svg(&by_istio_init, block);
        (drawn(&svg, "captured by istio-init"), svg.matches(" until it exits<").count())
    };
    assert_eq!((drawn_for("vault-*", "all"), drawn_for("*", "dns")), ((1, 1), (1, 2)));
}

#[test]
fn containers_of_several_attachments_and_of_the_node_are_united() {
    let definition = |name: &str, containers: &str| {
        let config = json!({
            "type": "detour", "cniVersion": "1.0.0", "name": name,
            "chain": [{"type": "container-exclude", "containers": containers}]
        });
        json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"namespace": "shop", "name": name}, "spec": {"config": config.to_string()}
        })
    };
    let definitions = format!("{}\n---\n{}\n", definition("one", "web"), definition("two", "vault-*"));
    let definitions = file("definitions.yaml", &definitions);
    let node = |pinned: bool| {
        json!({
            "cniVersion": "1.1.0", "name": "node", "type": "detour", "clusterNetwork": "ovn-kubernetes",
            "chain": [
                {"type": "istio-redirect"},
                {"type": "container-exclude", "containers": "web", "scope": "dns", "pod_overrides": !pinned}
            ]
        })
    };
    let names = |networks: &str, pinned: bool| {
        let mut pod = one_uid();
        annotate(&mut pod, "k8s.v1.cni.cncf.io/networks", networks);
        annotate(&mut pod, ANNOTATION, "vault-agent-init");
        let conf = file("00-node.conf", &node(pinned).to_string());
        let arguments = ["explain", "-f", "-", "--definitions", &definitions, "--config", &conf, "-o", "json"];
        let run = detour(&arguments, &pod.to_string(), &[]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
        let report = run.json();
        let line = |one: &Value| {
            format!(
                "{} {} {}",
                one["name"].as_str().expect("a name"),
                one["scope"].as_str().expect("a scope"),
                one["sources"]
            )
        };
        report["excluded_containers"].as_array().expect("containers").iter().map(line).collect::<Vec<_>>()
    };
    let sorted = |networks: &str, pinned: bool| {
        let mut names = names(networks, pinned);
        names.sort();
        names
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

/// Runs `trace` with a sub-plugin chain of `istio-redirect` and a block that excludes the init container.
fn trace(pod: &Value, from: &str, to: &str, more: &[&str]) -> Run {
    let chain = json!([{"type": "istio-redirect", "redirect_dns": true}, {"type": "container-exclude", "containers": "vault-agent-init"}]);
    let conf = json!({
        "cniVersion": "1.1.0", "name": "istio-cni", "type": "detour", "kubernetes": {"kubeconfig": "/k"}, "chain": chain
    });
    let conf = file("trace.conf", &conf.to_string());
    let arguments = ["trace", "-f", "-", "--config", &conf, "--from", from, "--to", to];
    detour(&[&arguments[..], more].concat(), &pod.to_string(), &[])
}

#[test]
fn the_trace_of_an_excluded_container_shows_when_its_bypass_ends_and_where_the_packet_arrives_then() {
    let pod = one_uid();
    for (to, port) in [("1.2.3.4:443/tcp", 15001), ("10.96.0.10:53/udp", 15053), ("[fd96::a]:53/tcp", 15053)] {
        let report = trace(&pod, "container=vault-agent-init", to, &["-o", "json"]).json();
        assert_eq!(
            (&report["arrives_at"], &report["decided_by"]["table"]),
            (&"direct".into(), &"detour-exclusions".into())
        );
        let expected = json!({"name": "vault-agent-init", "excluded": true, "bypasses": "all"});
        assert_eq!(report["container"], expected, "{to}");
        let web = trace(&pod, "container=web", to, &["-o", "json"]).json();
        assert_eq!(web["arrives_at"], format!("sidecar:{port}"), "the same UID: {to}");
        let expected = json!({"name": "web", "excluded": false, "bypasses": null});
        assert_eq!((&web["container"], &web["caveats"]), (&expected, &json!([])));
        let by_uid = trace(&pod, "uid=1000650000", to, &["-o", "json"]).json();
        assert_eq!((&by_uid["arrives_at"], &by_uid["container"]), (&web["arrives_at"], &Value::Null));
    }
    let text = trace(&pod, "container=vault-agent-init", "1.2.3.4:443/tcp", &[]).stdout;
    let lines: Vec<&str> = text.lines().collect();
    let first = "1.2.3.4:443/tcp from container vault-agent-init (uid 1000650000, gid 0) via eth0 → direct";
    assert_eq!(lines[0], first);
    let until = "until the container exits";
    assert_eq!(lines[1], format!("Container vault-agent-init: all outbound traffic bypasses the sidecar {until}"));
}

#[test]
fn a_container_is_traced_with_given_ids_and_an_unknown_one_is_refused_with_the_names() {
    let mut pod = one_uid();
    pod["spec"]["initContainers"][0]["securityContext"] = Value::Null;
    let to = "1.2.3.4:443/tcp";
    let run = trace(&pod, "container=vault-agent-init", to, &[]);
    assert!(run.code == 2 && run.stderr.contains("use container=vault-agent-init,uid=UID"), "{run:?}");
    let report = trace(&pod, "container=vault-agent-init,uid=5,gid=6", to, &["-o", "json"]).json();
    assert_eq!((&report["from"]["process"], &report["arrives_at"]), (&json!({"uid": 5, "gid": 6}), &"direct".into()));
    let run = trace(&pod, "container=vault,uid=5", to, &[]);
    assert!(run.code == 2 && run.stderr.contains("expected one of vault-agent-init, "), "{run:?}");
}
