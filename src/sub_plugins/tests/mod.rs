//! Whole sub-plugin chains.

mod bounds;
pub(super) mod scenario;

use super::ignored::annotations;
use super::*;
use crate::cni::{Block, Bounds, Code, SUB_PLUGINS};
use crate::pod::Pod;
use crate::pod::well_known::{
    EXCLUDE_DNS, EXCLUDE_GIDS, EXCLUDE_INBOUND_PORTS, EXCLUDE_INTERFACES, EXCLUDE_UIDS, INTERCEPTION_MODE,
    KUBEVIRT_INTERFACES,
};
use crate::policy::{Guard, Interception, InterceptionMode, Redirect};
use proptest::prelude::*;
use scenario::{Scenario, chain};
use serde_json::{Value, json};

fn all_three() -> Value {
    json!([
        {"type": "istio-redirect"},
        {"type": "uid-exclude", "uids": ["5"]},
        {"type": "dns-exclude", "uids": ["6"], "protocols": "udp"},
    ])
}

fn blocks(values: Value) -> Vec<Block> {
    let values = values.as_array().expect("an array").clone();
    values.iter().map(|value| Block::new("chain", value).expect("an object")).collect()
}

fn reason(scenario: &Scenario) -> SkipReason {
    match scenario.output().decision {
        Decision::LeaveAlone(reason) => reason,
        Decision::Redirect => panic!("redirected"),
    }
}

#[test]
fn the_sub_plugins_defaults_redirect_and_exclude_nothing() {
    let output = chain(json!([{"type": "istio-redirect"}, {"type": "uid-exclude"}, {"type": "dns-exclude"}])).output();
    assert_eq!(output.decision, Decision::Redirect);
    assert_eq!(output.policy.redirect(), Some(&Redirect::default()));
    assert!(output.policy.exclusions.is_empty() && output.notes.is_empty());
}

#[test]
fn the_order_of_the_blocks_does_not_matter() {
    let Value::Array(values) = all_three() else { panic!("no array") };
    let expected = chain(all_three()).output().policy;
    assert_eq!(expected.exclusions.len(), 2);
    for order in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let blocks: Vec<_> = order.iter().map(|&i| values[i].clone()).collect();
        assert_eq!(chain(blocks.into()).output().policy, expected, "{order:?}");
    }
}

#[test]
fn a_host_network_pod_is_skipped_by_all_sub_plugins() {
    let output = chain(all_three()).annotated(EXCLUDE_UIDS, "no uid").pod(|pod| pod.host_network = true).output();
    assert_eq!(output.decision, Decision::LeaveAlone(SkipReason::HostNetwork));
    assert!(output.policy.is_empty() && output.policy.exclusions.is_empty() && output.notes.is_empty());
}

#[test]
fn a_pod_without_a_sidecar_is_skipped_and_its_annotations_are_not_parsed() {
    let scenario = chain(all_three()).without_sidecar();
    let wrong = scenario
        .annotated(EXCLUDE_UIDS, "no uid")
        .annotated(EXCLUDE_INBOUND_PORTS, "x")
        .args(json!({"dns-exclude": 7}));
    let output = wrong.output();
    assert_eq!(output.decision, Decision::LeaveAlone(SkipReason::NoProxy));
    assert!(output.policy.is_empty() && output.policy.exclusions.is_empty() && output.notes.is_empty());
    let only_exclusions = chain(json!([{"type": "uid-exclude", "uids": [1]}])).without_sidecar();
    assert_eq!(reason(&only_exclusions), SkipReason::NoProxy);
}

#[test]
fn exclusions_apply_to_a_pod_in_the_ambient_mesh_which_is_never_redirected() {
    let scenario = chain(all_three()).ambient().annotated(INTERCEPTION_MODE, "NONE");
    assert_eq!(reason(&scenario), SkipReason::Ambient(EnrolledBy::Namespace));
    assert_eq!(scenario.exclusions(), ["uid 5", "uid 6 udp 53"]);
    let policy = scenario.output().policy;
    assert_eq!((&policy.interception, policy.ambient), (&Interception::Unset, true));
    let only_exclusions = chain(json!([{"type": "uid-exclude", "uids": [5]}])).ambient();
    assert_eq!(
        reason(&only_exclusions).to_string(),
        "the pod is in the ambient mesh (label istio.io/dataplane-mode of the namespace is ambient): istio-cni redirects \
         it to ztunnel"
    );
    assert_eq!(only_exclusions.exclusions(), ["uid 5"]);
    let none = chain(json!([{"type": "istio-redirect"}, {"type": "uid-exclude"}])).ambient().output().policy;
    assert!(none.is_empty());
    let sidecar = chain(all_three()).ambient().pod(|pod| {
        pod.containers.push(scenario::container("istio-proxy", None));
        pod.annotations.insert("sidecar.istio.io/status".into(), "{}".into());
    });
    let output = sidecar.output();
    assert_eq!((output.decision, output.policy.ambient), (Decision::Redirect, false));
}

/// A running pod gets no sidecar. Its label takes it out of the mesh.
#[test]
fn an_annotation_does_not_end_the_guard_of_a_running_pod_in_the_ambient_mesh() {
    let scenario = chain(json!([{"type": "mesh-guard"}])).ambient();
    let guard = scenario.output().policy.guard;
    assert!(matches!(guard, Some(Guard::Ambient(_))), "{guard:?}");
    let annotated = scenario.annotated("sidecar.istio.io/status", "{}");
    assert_eq!(annotated.output().policy.guard, None, "a new pod");
    let started = StartedWith { ambient_guard: true, ..StartedWith::default() };
    for with_requests in [true, false] {
        assert_eq!(annotated.run_again_with(started, with_requests).policy.guard, guard);
    }
    let left = annotated.pod(|pod| drop(pod.labels.insert("istio.io/dataplane-mode".into(), "none".into())));
    assert_eq!(left.run_again_with(started, true).policy.guard, None);
}

#[test]
fn istio_cni_decides_about_the_dns_of_an_ambient_pod_unless_the_pod_does() {
    let scenario = chain(all_three()).ambient();
    for (value, expected) in [("true", Some(true)), ("false", Some(false)), ("0", Some(false)), ("yes", None)] {
        let annotated = scenario.clone().annotated("ambient.istio.io/dns-capture", value);
        assert_eq!(annotated.output().policy.dns_captured_elsewhere, expected, "{value}");
    }
    assert_eq!(scenario.output().policy.dns_captured_elsewhere, None);
}

#[test]
fn exclusions_apply_to_every_sidecar_even_if_another_program_redirects() {
    let expected = ["uid 5", "uid 6 udp 53"];
    for (reason, change) in [
        (SkipReason::IstioInit, (|pod| pod.containers[0].name = "istio-init".into()) as fn(&mut Pod)),
        (SkipReason::EnvoyDisabled, |pod| pod.containers[1].env.push(("DISABLE_ENVOY".into(), "true".into()))),
        (SkipReason::NotASidecar("router".into()), |pod| pod.containers[1].args[1] = "router".into()),
        (SkipReason::InjectionRefused, |pod| drop(pod.labels.insert("sidecar.istio.io/inject".into(), "false".into()))),
        (SkipReason::NotInjected, |pod| pod.annotations.clear()),
    ] {
        let scenario = chain(all_three()).pod(change).annotated(EXCLUDE_INBOUND_PORTS, "not ours to read");
        assert_eq!(self::reason(&scenario), reason);
        assert_eq!(scenario.output().policy.interception, Interception::Unset);
        assert_eq!(scenario.exclusions(), expected, "{reason:?}");
    }
    let without_redirect = chain(json!([{"type": "uid-exclude", "uids": [5]}]));
    assert_eq!(reason(&without_redirect), SkipReason::NotInChain);
    assert_eq!(without_redirect.exclusions(), ["uid 5"]);
}

#[test]
fn mode_none_means_neither_redirection_nor_exclusions() {
    let mut block = all_three();
    block[0]["inbound_interception_mode"] = "NONE".into();
    let args = json!({"istio-redirect": {"inbound_interception_mode": "NONE"}});
    for scenario in
        [chain(block), chain(all_three()).args(args), chain(all_three()).annotated(INTERCEPTION_MODE, "NONE")]
    {
        let policy = scenario.output().policy;
        assert_eq!(policy.interception, Interception::Off);
        assert!(policy.is_empty() && policy.exclusions.is_empty());
        assert_eq!(reason(&scenario), SkipReason::ModeNone);
    }
}

/// Another attachment's redirection honors the annotation, or is pinned and does not.
#[test]
fn the_annotation_none_disables_exclusions_of_another_attachment_only_with_its_redirection() {
    let exclusions = chain(json!([{"type": "uid-exclude", "uids": [5]}])).annotated(INTERCEPTION_MODE, "NONE").output();
    assert_eq!(exclusions.decision, Decision::LeaveAlone(SkipReason::NotInChain));
    for (pod_overrides, captured) in [(true, false), (false, true)] {
        let redirect = json!([{"type": "istio-redirect", "pod_overrides": pod_overrides}]);
        let redirect = chain(redirect).annotated(INTERCEPTION_MODE, "NONE").output().policy;
        for policy in [redirect.union(&exclusions.policy), exclusions.policy.union(&redirect)] {
            let policy = policy.expect("no conflict");
            assert_eq!((policy.is_empty(), policy.redirect().is_some()), (!captured, captured));
            assert!(!captured || !policy.exclusions.is_empty(), "{policy:?}");
        }
    }
    let block =
        json!([{"type": "istio-redirect", "inbound_interception_mode": "NONE"}, {"type": "uid-exclude", "uids": [5]}]);
    let others = chain(block).pod(|pod| pod.containers[0].name = "istio-init".into());
    assert_eq!(others.exclusions(), ["uid 5"]);
}

#[test]
fn the_annotation_overrides_a_block_with_mode_none() {
    let scenario = chain(
        json!([{"type": "istio-redirect", "inbound_interception_mode": "NONE"}, {"type": "uid-exclude", "uids": [5]}]),
    );
    let annotated = scenario.annotated(INTERCEPTION_MODE, "TPROXY");
    assert_eq!(annotated.redirect().inbound_interception_mode, InterceptionMode::Tproxy);
    assert_eq!(annotated.exclusions(), ["uid 5"]);
}

#[test]
fn pod_overrides_false_pins_the_administrators_settings() {
    let mut pinned = all_three();
    for i in 0..3 {
        pinned[i]["pod_overrides"] = false.into();
    }
    let args = json!({"uid-exclude": {"uids": "nonsense"}, "istio-redirect": {"proxy_port": 1}});
    let scenario = chain(pinned)
        .annotated(EXCLUDE_UIDS, "nonsense")
        .annotated(INTERCEPTION_MODE, "NONE")
        .namespace(EXCLUDE_DNS, "nonsense")
        .args(args);
    let output = scenario.output();
    assert_eq!(output.decision, Decision::Redirect);
    assert_eq!(output.policy, chain(all_three()).output().policy);
    let texts: Vec<_> = output.notes.iter().map(|note| (note.severity, note.text.as_str())).collect();
    assert_eq!(
        texts,
        [
            (
                Severity::Info,
                "annotation \"sidecar.istio.io/interceptionMode\" of pod shop/cart-1, args.cni.istio-redirect: ignored: \
                 chain[0].pod_overrides is false"
            ),
            (
                Severity::Info,
                "annotation \"detour.io/exclude-uids\" of pod shop/cart-1, args.cni.uid-exclude: ignored: \
                 chain[1].pod_overrides is false"
            ),
            (
                Severity::Info,
                "annotation \"detour.io/exclude-dns\" of namespace shop: ignored: chain[2].pod_overrides is false"
            ),
        ]
    );
}

#[test]
fn a_misspelled_sub_plugin_in_the_pods_arguments_is_a_warning() {
    let args = json!({"uid-exclud": {"uids": [7]}, "ips": [], "ISTIO-REDIRECT": {}});
    let output = chain(all_three()).args(args).output();
    let texts: Vec<_> = output.notes.iter().map(|note| (note.severity, note.text.as_str())).collect();
    let wanted = [
        (Severity::Warning, "args.cni.uid-exclud: unknown, ignored; did you mean \"uid-exclude\"?"),
        (Severity::Warning, "args.cni.ISTIO-REDIRECT: unknown, ignored; did you mean \"istio-redirect\"?"),
    ];
    assert_eq!(texts, wanted);
}

#[test]
fn requests_without_a_block_are_reported() {
    let scenario = chain(json!([{"type": "uid-exclude"}]))
        .annotated(EXCLUDE_DNS, "nonsense")
        .annotated(EXCLUDE_INBOUND_PORTS, "x");
    let output = scenario.args(json!({"istio-redirect": {}, "dns-exclude": 1, "ips": []})).output();
    let texts: Vec<_> = output.notes.iter().map(|note| (note.severity, note.text.as_str())).collect();
    assert_eq!(
        texts,
        [
            (Severity::Warning, "args.cni.istio-redirect: ignored: the sub-plugin chain has no istio-redirect"),
            (
                Severity::Warning,
                "annotation \"detour.io/exclude-dns\" of pod shop/cart-1, args.cni.dns-exclude: ignored: \
                 the sub-plugin chain has no dns-exclude"
            ),
        ]
    );
}

#[test]
fn two_blocks_of_a_sub_plugin_are_united() {
    let scenario = chain(json!([
        {"type": "istio-redirect", "exclude_interfaces": "net2"},
        {"type": "uid-exclude", "uids": [5]},
        {"type": "istio-redirect", "exclude_interfaces": "net1"},
        {"type": "uid-exclude", "uids": [6], "gids": [7]},
    ]));
    assert_eq!(scenario.redirect().exclude_interfaces, ["net1", "net2"]);
    assert_eq!(scenario.exclusions(), ["uid 5", "uid 6", "gid 7"]);
}

#[test]
fn a_note_of_two_blocks_is_reported_once() {
    let scenario = chain(json!([{"type": "istio-redirect"}, {"type": "istio-redirect"}]));
    assert_eq!(scenario.env("INVALID_DROP", "nonsense").output().notes.len(), 1);
}

#[test]
fn contradicting_blocks_are_an_error_that_names_both() {
    let scenario = chain(json!([
        {"type": "istio-redirect", "proxy_port": 15001},
        {"type": "istio-redirect", "exclude_interfaces": "net1"},
        {"type": "istio-redirect", "proxy_port": 15002},
    ]));
    let error = scenario.run().expect_err("a contradiction");
    assert_eq!(error.code, Code::InvalidConfig);
    assert_eq!(
        error.msg,
        "chain[0] and chain[2] contradict each other: proxy_port is 15001 in one and 15002 in the other; a pod \
         has one redirection: set the same value in both"
    );
    let none = chain(json!(
        ["REDIRECT", "NONE"].map(|mode| json!({"type": "istio-redirect", "inbound_interception_mode": mode}))
    ));
    assert!(none.error().contains("inbound_interception_mode is REDIRECT in one and NONE in the other"));
}

#[test]
fn an_unset_key_neither_contradicts_nor_resets_another_blocks_key() {
    let scenario = chain(json!([
        {"type": "istio-redirect"},
        {"type": "istio-redirect", "drop_invalid": true, "inbound_ports_include": "80", "proxy_port": 15002},
        {"type": "istio-redirect", "proxy_port": "15002", "inbound_ports_include": [443]},
    ]));
    let redirect = scenario.redirect();
    let ports = [80, 443].map(crate::policy::PortRange::one);
    assert_eq!((redirect.drop_invalid, redirect.proxy_port), (true, 15002));
    assert_eq!(redirect.inbound_ports_include, crate::policy::Ports::List(ports.to_vec()));
    let origins = scenario.output().origins.settings;
    let of = |wanted| origins.iter().filter(|(key, _)| *key == wanted).map(|(_, source)| source.to_string()).collect();
    let wanted = ["configuration, chain[1].proxy_port", "configuration, chain[2].proxy_port"];
    assert_eq!((of("proxy_port"), of("dns")), (wanted.map(str::to_owned).to_vec(), Vec::<String>::new()));
}

#[test]
fn a_block_without_pod_overrides_pins_the_redirection_of_all_blocks() {
    let scenario = chain(json!([{"type": "istio-redirect"}, {"type": "istio-redirect", "pod_overrides": false}]))
        .annotated("sidecar.istio.io/interceptionMode", "TPROXY");
    assert_eq!(scenario.redirect().inbound_interception_mode, InterceptionMode::Redirect);
}

#[test]
fn without_facts_exclusions_depend_on_the_configuration_only() {
    let scenario = chain(json!([
        {"type": "uid-exclude", "uids": ["1337"]},
        {"type": "dns-exclude", "resolvers": "resolv-conf", "protocols": "udp"},
    ]));
    let output = scenario.clone().cluster_dns("10.96.0.10").without_facts();
    assert_eq!(output.exclusions(), ["any udp 53 to 10.96.0.10/32", "uid 1337"]);
    let output = output.output();
    assert_eq!(output.decision, Decision::LeaveAlone(SkipReason::NotInChain));
    assert_eq!(output.policy.dns_captured_elsewhere, None);
    assert!(scenario.without_facts().error().contains("no source of facts"));
}

#[test]
fn without_facts_a_redirection_is_an_error_that_names_the_sources_of_facts() {
    let error = chain(all_three()).without_facts().run().expect_err("no facts");
    assert_eq!(error.code, Code::InvalidConfig);
    assert!(error.msg.starts_with("chain[0]: istio-redirect needs facts of the pod: "), "{error}");
    assert!(error.msg.contains("kubernetes.kubeconfig") && error.msg.contains("kubernetes.manifests_dir"), "{error}");
}

#[test]
fn the_proxys_variable_determines_whether_dns_is_captured_elsewhere() {
    let scenario = chain(json!([{"type": "uid-exclude"}]));
    let captured = |scenario: &Scenario| scenario.output().policy.dns_captured_elsewhere;
    assert_eq!(captured(&scenario), Some(false));
    assert_eq!(captured(&scenario.clone().env("ISTIO_META_DNS_CAPTURE", "t")), Some(true));
    assert_eq!(captured(&scenario.clone().env("ISTIO_META_DNS_CAPTURE", "yes")), Some(false));
    assert_eq!(captured(&scenario.without_sidecar()), Some(false));
}

#[test]
fn an_invalid_block_is_an_error_for_every_pod() {
    for (block, start) in [
        (json!({"type": "istio-redirect", "proxy_prt": 1}), "chain[0].proxy_prt: unknown key; "),
        (json!({"type": "uid-exclude", "uid": 1}), "chain[0].uid: unknown key; "),
        (json!({"type": "dns-exclude", "rules": []}), "chain[0].rules: unknown key; "),
        (json!({"type": "destination-exclude", "gids": [1]}), "chain[0].gids: unknown key; "),
        (json!({"type": "uid-exclude", "pod_overrides": "no"}), "chain[0].pod_overrides: "),
        (
            json!({"uids": [1]}),
            "chain[0].type: missing; expected istio-redirect, uid-exclude, dns-exclude, container-exclude, \
             destination-exclude, mesh-guard, or an executable's name",
        ),
        (json!({"type": 7}), "chain[0].type: missing"),
    ] {
        let scenario = chain(json!([block]));
        for scenario in [scenario.clone().without_sidecar(), scenario.without_facts()] {
            let error = scenario.run().expect_err("wrong");
            assert!(error.msg.starts_with(start), "{error}");
            assert_eq!(error.code, Code::InvalidConfig);
        }
    }
}

#[test]
fn executables_are_listed_in_order_and_skipped() {
    let values = json!([{"type": "tuning", "sysctl": {}}, {"type": "uid-exclude", "uids": [5]}, {"type": "bandwidth"}]);
    let chain_blocks = blocks(values.clone());
    let listed: Vec<_> = executables(&chain_blocks).map(|(kind, block)| (kind, block.keys.len())).collect();
    assert_eq!(listed, [("tuning", 2), ("bandwidth", 1)]);
    assert_eq!(chain(values).exclusions(), ["uid 5"]);
}

#[test]
fn a_chain_needs_only_the_facts_that_it_uses() {
    for (values, pod, namespace) in [
        (json!([]), false, false),
        (json!([{"type": "tuning"}]), false, false),
        (json!([{"type": "istio-redirect"}, {"type": "tuning"}]), true, false),
        (json!([{"type": "uid-exclude"}]), true, true),
        (json!([{"type": "istio-redirect"}, {"type": "dns-exclude"}]), true, true),
        (json!([{"type": "container-exclude"}]), true, true),
    ] {
        assert_eq!(wants(&blocks(values.clone())), NeededFacts { pod, namespace }, "{values}");
    }
}

#[test]
fn every_sub_plugin_is_complete() {
    assert_eq!(SubPlugin::ALL.map(SubPlugin::name), SUB_PLUGINS);
    for name in SUB_PLUGINS {
        let chain_blocks = blocks(json!([{ "type": name }]));
        let sub_plugin = SubPlugin::of(&chain_blocks[0]).expect(name);
        assert!(sub_plugin.name() == name && wants(&chain_blocks).pod, "{name}");
        assert!(chain(json!([{ "type": name, "nonsense": 1 }])).error().starts_with("chain[0].nonsense: "), "{name}");
        // Pods request nothing of it.
        if sub_plugin == SubPlugin::MeshGuard {
            continue;
        }
        let args = json!({ name: {"nonsense": 1} });
        let wanted = format!("args.cni.{name}.nonsense: ");
        let error = check(&chain_blocks, &Bounds::default(), args.as_object().expect("an object"), &|_| None, true)
            .expect_err(name);
        assert!(error.msg.starts_with(&wanted));
        assert!(chain(json!([{ "type": name }])).args(args.clone()).error().starts_with(&wanted), "{name}");
        let pinned = chain(json!([{ "type": name, "pod_overrides": false }])).args(args);
        assert!(pinned.notes()[0].ends_with("ignored: chain[0].pod_overrides is false"), "{name}");
        assert!(!annotations(sub_plugin).is_empty(), "{name}");
    }
}

#[test]
fn the_source_of_a_setting_is_the_layer_with_the_highest_precedence() {
    let scenario = chain(json!([{"type": "istio-redirect", "proxy_uid": 1, "proxy_port": 2, "drop_invalid": true}]))
        .env("INVALID_DROP", "true")
        .args(json!({"istio-redirect": {"proxy_port": 3, "exclude_interfaces": "a"}}))
        .annotated(EXCLUDE_INTERFACES, "b")
        .annotated(KUBEVIRT_INTERFACES, "c");
    let settings = scenario.output().origins.settings;
    assert_eq!(settings.len(), 26);
    for (key, source) in [
        ("proxy_uid", "container istio-proxy, runAsUser"),
        ("proxy_port", "args.cni.istio-redirect"),
        ("drop_invalid", "container istio-proxy, INVALID_DROP"),
        ("exclude_interfaces", "pod, traffic.sidecar.istio.io/excludeInterfaces"),
        ("reroute_virtual_interfaces", "pod, traffic.sidecar.istio.io/kubevirtInterfaces"),
        ("redirect_dns", "default"),
    ] {
        let found: Vec<String> =
            settings.iter().filter(|(k, _)| *k == key).map(|(_, source)| source.to_string()).collect();
        assert_eq!(found, [source], "{key}");
    }
    let plain = chain(json!([{"type": "istio-redirect", "proxy_port": 2}])).output().origins.settings;
    assert!(plain.contains(&("proxy_port", SettingSource::Configuration("chain[0].proxy_port".into()))));
}

#[test]
fn every_exclusion_has_its_source() {
    let scenario = chain(json!([{"type": "uid-exclude", "uids": 1}, {"type": "dns-exclude", "uids": 2}]))
        .args(json!({"uid-exclude": {"uids": 3}}))
        .annotated(EXCLUDE_UIDS, "4")
        .namespace(EXCLUDE_GIDS, "5")
        .namespace(EXCLUDE_DNS, "all");
    let sources: std::collections::BTreeSet<String> =
        scenario.output().origins.exclusions.iter().map(|(_, source)| source.to_string()).collect();
    let expected = [
        "args.cni.uid-exclude",
        "configuration, chain[0]",
        "configuration, chain[1]",
        "namespace, detour.io/exclude-dns",
        "namespace, detour.io/exclude-gids",
        "pod, detour.io/exclude-uids",
    ];
    assert_eq!(sources.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

proptest! {
    #[test]
    fn every_annotation_value_is_accepted_or_rejected_with_its_name(value in "[0-9a-z.:/*,; -]{0,30}|.{0,20}") {
        for key in SubPlugin::ALL.into_iter().flat_map(annotations) {
            match chain(all_three()).annotated(key, &value).run() {
                Ok(output) => prop_assert!(output.notes.iter().all(|note| !note.text.contains('\n'))),
                Err(error) => {
                    prop_assert_eq!(error.code, Code::InvalidConfig);
                    prop_assert!(error.msg.starts_with(&format!("annotation {key:?} of pod shop/cart-1: ")), "{}", error);
                }
            }
        }
    }
}
