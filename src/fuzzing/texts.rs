//! Targets for text: annotations, definitions, configurations, configuration lists, results, manifests.

use super::{check_error, check_printed, check_warnings, laws, sections, text_sections};
use crate::agent::install::conflist::ConfList;
use crate::cluster::{Definition, ObjectRef};
use crate::cni::result::{AddResult, passed_through};
use crate::cni::{CniCommand, Document, Error, NetConf, NodeConf, PROGRAM, Request, configuration, version};
use crate::firewall::rule::Family;
use crate::firewall::{MAX_RULES, RuleFormat, Ruleset, max_rules};
use crate::inspect::{
    AppliedConf, ConfigurationOrigin, Explanation, Format, ManifestTexts, PodManifest, PodSelector, Screen, Subject,
    explain, picture, render, validate_text,
};
use crate::networks::{
    RunnableConfiguration, Selection, check_default_routes, default_network, interface_names, networks,
};
use crate::plugin::{TargetNode, validate};
use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS, PROXY_CONTAINER};
use crate::pod::{Container, Facts, Namespace, Pod};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The versions of a result: one of each format.
const VERSIONS: [&str; 4] = ["0.2.0", "0.4.0", "1.0.0", "1.1.0"];
/// The maximum length of an annotation in bytes.
const MAX_ANNOTATION: usize = 256 << 10;

fn annotated(key: &str, text: &str) -> Pod {
    let annotations = [(key.to_owned(), text.to_owned())].into();
    Pod { namespace: "shop".into(), name: "web-0".into(), annotations, ..Pod::default() }
}

/// Returns the fields of a selection as in the JSON form of the annotation.
fn element(selection: &Selection) -> Value {
    let mut fields = Map::new();
    fields.insert("namespace".into(), json!(selection.object.namespace));
    fields.insert("name".into(), json!(selection.object.name));
    fields.insert("interface".into(), json!(selection.interface));
    let field = |key: &String| if key == "infinibandGUID" { "infiniband-guid".to_owned() } else { key.clone() };
    fields.extend(selection.runtime_config.iter().map(|(key, value)| (field(key), value.clone())));
    fields.insert("cni-args".into(), json!(selection.cni_args));
    fields.insert("default-route".into(), json!(selection.default_route));
    fields.into()
}

fn without_places(mut elements: Vec<Selection>) -> Vec<Selection> {
    elements.iter_mut().for_each(|selection| selection.place.clear());
    elements
}

/// The annotation that selects networks: what is selected can be written in the JSON form, and names alone in the
/// shorthand.
pub(super) fn annotation(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let parse = |text: &str| networks(&annotated(NETWORKS, text));
    let parsed = parse(text);
    assert_eq!(parsed, parse(text));
    if let Err(error) = default_network(&annotated(DEFAULT_NETWORK, text), "kube-system") {
        check_error(&error);
    }
    let selections = match parsed {
        Ok(selections) => selections,
        Err(error) => return check_error(&error),
    };
    check_warnings(&selections.warnings, input.len());
    let elements = selections.elements;
    let of_pod: Vec<(String, Option<&Selection>)> = elements.iter().map(|one| (one.place.clone(), Some(one))).collect();
    for result in [interface_names("eth0", &of_pod).map(drop), check_default_routes(&elements)] {
        result.unwrap_or_else(|error| check_error(&error));
    }
    let whole = Value::Array(elements.iter().map(element).collect()).to_string();
    let is_name = |one: &Selection| {
        let interface = one.interface.as_deref().unwrap_or_default();
        Selection { place: String::new(), ..one.clone() }
            == Selection { object: one.object.clone(), interface: one.interface.clone(), ..Selection::default() }
            && interface.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
    };
    let names: Vec<String> = elements
        .iter()
        .filter(|one| is_name(one))
        .map(|one| {
            let interface = one.interface.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
            format!("{}{interface}", one.object)
        })
        .collect();
    let elements = without_places(elements);
    if whole.len() <= MAX_ANNOTATION {
        let again = parse(&whole).unwrap_or_else(|error| panic!("{whole}: {error}"));
        assert_eq!(without_places(again.elements), elements, "{whole}");
    }
    let shorthand = names.join(",");
    if names.len() == elements.len() && shorthand.len() <= MAX_ANNOTATION {
        let again = parse(&shorthand).unwrap_or_else(|error| panic!("{shorthand}: {error}"));
        assert_eq!(without_places(again.elements), elements, "{shorthand}");
    }
}

/// The configuration of a NetworkAttachmentDefinition: it parses to the same again, also with the node's keys.
pub(super) fn definition(input: &[u8]) {
    let Ok([config, node]) = text_sections(input) else { return };
    let object = ObjectRef { namespace: "shop".into(), name: "a.b".into() };
    let definition = Definition { object, config: config.to_owned(), ..Definition::default() };
    let mut warnings = Vec::new();
    let read = crate::networks::configuration(&definition, Path::new("/absent"), &mut warnings);
    let parsed = match read {
        Ok(parsed) => parsed,
        Err(error) => return check_error(&error),
    };
    check_warnings(&warnings, input.len());
    let again = RunnableConfiguration::parse("again", &parsed.text, None).expect("its own text");
    assert_eq!((&again.name, &again.cni_version, &again.text), (&parsed.name, &parsed.cni_version, &parsed.text));
    assert!(again.types().eq(parsed.types()));
    for plugin in &parsed.plugins {
        let mut keys = plugin.keys.clone();
        keys.insert("name".into(), parsed.name.clone().into());
        conf(Value::Object(keys).to_string().as_bytes());
    }
    let Ok((node, _)) = NodeConf::parse("node.json", node.as_bytes()) else { return };
    let Ok(value) = serde_json::from_str(&parsed.text) else { return };
    match node.govern_all(&value, &["detour"]) {
        Ok(Some((governed, _))) => {
            let again = node.govern_all(&governed, &["detour"]).expect("governed once");
            assert_eq!(again.map(|(value, _)| value), Some(governed), "the node's keys are applied twice");
        }
        Ok(None) => {}
        Err(error) => check_error(&error),
    }
}

/// Parses the configuration of a call for each command.
fn conf(stdin: &[u8]) {
    let document = match Document::parse(stdin) {
        Ok(document) => document,
        Err(error) => return check_error(&error),
    };
    if let Err(error) = NetConf::from_document_for_del(&document) {
        check_error(&error);
    }
    for command in [CniCommand::Add, CniCommand::Del, CniCommand::Check, CniCommand::Gc, CniCommand::Status] {
        let read = NetConf::from_document(&document, command, PROGRAM);
        assert_eq!(read, NetConf::from_document(&document, command, PROGRAM));
        match read {
            Ok(conf) => check_conf(&conf, stdin.len()),
            Err(error) => check_error(&error),
        }
    }
}

fn check_conf(conf: &NetConf, length: usize) {
    check_warnings(&conf.warnings, length);
    match passed_through(conf) {
        Ok(result) => assert_eq!(result["cniVersion"], conf.cni_version.as_str()),
        Err(error) => check_error(&error),
    }
    let node = TargetNode { is_installed: &|_, _| Some(true), group_file: None, may_name_source: false };
    match validate(conf, node) {
        Ok(warnings) => check_warnings(&warnings, length),
        Err(error) => check_error(&error),
    }
    let _ = (conf.pod_annotations(), conf.runtime_nameservers(), conf.prev_result_nameservers());
}

/// A call: the lines `NAME=VALUE` of its environment, then stdin.
pub(super) fn stdin(input: &[u8]) {
    let [environment, stdin] = sections(input);
    let environment = String::from_utf8_lossy(environment);
    let read = |name: &str| {
        let lines = environment.lines().filter_map(|line| line.split_once('='));
        lines.filter(|(key, _)| *key == name).map(|(_, value)| value.to_owned()).next_back()
    };
    match Request::parse(read) {
        Ok(request) => check_printed(&request.about),
        Err(error) => check_error(&error),
    }
    conf(stdin);
    if let Ok(text) = std::str::from_utf8(stdin) {
        match configuration(Path::new("10-x.conflist"), stdin) {
            Ok(conf) => check_conf(&conf, input.len()),
            Err(error) => check_error(&error),
        }
        match validate_text(Path::new("x"), text, None, &|_, _| None) {
            Ok(report) => check_rendered(&report),
            Err(error) => check_error(&error),
        }
    }
}

/// The node configuration file, and an attachment's configuration: its text parses to the same, and applying it twice
/// changes nothing.
pub(super) fn node_conf(input: &[u8]) {
    let [node, attachment] = sections(input);
    let (node, warnings) = match NodeConf::parse("node.json", node) {
        Ok(parsed) => parsed,
        Err(error) => return check_error(&error),
    };
    check_warnings(&warnings, input.len());
    let text = node.text();
    let (again, _) = NodeConf::parse("node.json", text.as_bytes()).expect("its own text");
    assert_eq!(again.text(), text);
    check_printed(&crate::printable::line(&node.summary()));
    let Ok(Value::Object(attachment)) = serde_json::from_slice(attachment) else { return };
    let mut once = attachment;
    check_warnings(node.govern(&mut once, Some("n"), PROGRAM).as_slice(), input.len());
    let mut twice = once.clone();
    let ignored = node.govern(&mut twice, Some("n"), PROGRAM);
    assert_eq!(twice, once, "the node's keys are applied twice: {ignored:?}");
}

/// A result of any version: what is written for a version is read back as the same.
pub(super) fn result(input: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(input) else { return };
    for unstated in VERSIONS {
        let result = match AddResult::read(&value, unstated) {
            Ok(result) => result,
            Err(error) => {
                check_error(&error);
                continue;
            }
        };
        let own = value["cniVersion"].as_str().filter(|version| !version.is_empty()).unwrap_or(unstated);
        for version in version::SUPPORTED {
            let written = match result.to_json(version) {
                Ok(written) => written,
                Err(error) => {
                    check_error(&error);
                    continue;
                }
            };
            let read = AddResult::read(&written, "1.0.0").unwrap_or_else(|error| panic!("{written}: {error}"));
            if version == own {
                assert_eq!(read.to_json(version).expect("it was written"), written);
            }
        }
        let merged = result.clone().merged([&result], true);
        assert!(merged.ips.len() <= 2 * result.ips.len());
    }
}

/// A configuration list, and the entry: editing never changes other plugins or keys, nor their order.
pub(super) fn conflist(input: &[u8]) {
    let Ok([text, entry]) = text_sections(input) else { return };
    if let Ok(list) = ConfList::of_file("10-x.conf", text) {
        assert_eq!(list.types().count(), 1);
        assert_eq!(ConfList::parse(&list.text()), Ok(list));
    }
    let mut entry = match serde_json::from_str(entry) {
        Ok(Value::Object(keys)) => Value::Object(keys),
        _ => json!({"chain": [{"type": "uid-exclude", "uids": ["1337"]}]}),
    };
    entry["type"] = PROGRAM.into();
    let Ok(list) = ConfList::parse(text) else { return };
    let with = list.with(&entry);
    let value = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let (before, after) = (value(text), value(&with.text()));
    assert_eq!(with.entries(PROGRAM).collect::<Vec<_>>(), [&entry]);
    assert_eq!(with.with(&entry), with, "a second edit changes the list");
    let others = |list: &Value| {
        let all = list["plugins"].as_array().cloned().unwrap_or_default();
        all.into_iter().filter(|plugin| plugin["type"] != PROGRAM).collect::<Vec<_>>()
    };
    assert_eq!(others(&before), others(&after));
    let (mut rest_before, mut rest_after) = (before.clone(), after);
    rest_before["plugins"].take();
    rest_after["plugins"].take();
    assert_eq!(rest_before, rest_after);
    let removed = with.without(PROGRAM).text();
    assert_eq!(value(&removed)["plugins"], Value::Array(others(&before)));
    if others(&before).len() == before["plugins"].as_array().map_or(0, Vec::len) {
        assert_eq!(
            value(&removed).to_string(),
            before.to_string(),
            "removal restores the list and the order of its keys"
        );
    }
}

/// A pod's annotations, one `KEY: VALUE` per line, evaluated with a configuration. Lines that start with `namespace ` or
/// `env ` are annotations of the namespace and variables of the sidecar.
pub(super) fn pod(input: &[u8]) {
    let Ok([pod, conf]) = text_sections(input) else { return };
    let conf = if conf.is_empty() { r#"{"name": "n", "type": "detour"}"# } else { conf };
    let conf = match AppliedConf::parse(Path::new("x.conf"), conf.as_bytes()) {
        Ok(AppliedConf { conf, .. }) if conf.primary.is_none() => conf,
        Ok(_) => return,
        Err(error) => return check_error(&error),
    };
    let mut facts = facts();
    for line in pod.lines() {
        let Some((key, value)) = line.split_once(": ") else { continue };
        let (key, value) = (key.to_owned(), value.to_owned());
        if let Some(key) = key.strip_prefix("namespace ") {
            facts.namespace.get_or_insert_default().annotations.insert(key.to_owned(), value);
        } else if let Some(key) = key.strip_prefix("env ") {
            facts.pod.containers[1].env.push((key.to_owned(), value));
        } else {
            facts.pod.annotations.insert(key, value);
        }
    }
    let origin = ConfigurationOrigin::default();
    explained(&Subject {
        conf,
        attachment: None,
        facts,
        template_of: None,
        networks: None,
        selected: Vec::new(),
        failure: None,
        origin,
        socket_lb: Vec::new(),
    });
}

fn facts() -> Facts {
    let container = |name: &str| Container { name: name.to_owned(), ..Container::default() };
    let pod = Pod {
        containers: vec![container("web"), container(PROXY_CONTAINER)],
        init_containers: vec![container("vault-agent-init")],
        dns_nameservers: vec!["10.96.0.10".to_owned()],
        ..annotated("sidecar.istio.io/status", "{}")
    };
    Facts { pod, namespace: Some(Namespace { name: "shop".into(), ..Namespace::default() }) }
}

/// Manifests as `detour explain` reads them, a configuration, manifests of namespaces, and of definitions.
pub(super) fn manifests(input: &[u8]) {
    let Ok([pods, conf, namespace, definitions]) = text_sections(input) else { return };
    let conf = if conf.is_empty() { r#"{"name": "n", "type": "detour"}"# } else { conf };
    let conf = match AppliedConf::parse(Path::new("x.conf"), conf.as_bytes()) {
        Ok(conf) => conf,
        Err(error) => return check_error(&error),
    };
    let texts = ManifestTexts {
        pods: ("pods.yaml".into(), pods.to_owned()),
        namespace: Some(("ns.yaml".into(), namespace.to_owned())).filter(|(_, text)| !text.is_empty()),
        definitions: vec![("definitions.yaml".into(), definitions.to_owned())],
    };
    let manifest = match PodManifest::read(&texts, &PodSelector::default()) {
        Ok(manifest) => manifest,
        Err(error) => return check_error(&error),
    };
    for given in &manifest.pods {
        match manifest.subject(given, std::slice::from_ref(&conf)) {
            Ok(subject) => explained(&subject),
            Err(error) => check_error(&error),
        }
    }
}

/// Explains a pod; its policy obeys all laws of policies.
fn explained(subject: &Subject) {
    let explanation = match explain(subject) {
        Ok(explanation) => explanation,
        Err(error) => return check_error(&error),
    };
    let policy = &explanation.policy;
    assert_eq!(Ok(policy), explain(subject).as_ref().map(|again| &again.policy));
    check_rendered(&explanation);
    check_rendered(&Explanation { all: true, ..explanation.clone() });
    check_printed(&crate::printable::lines(&picture(subject, &explanation)));
    if max_rules(policy) <= MAX_RULES / 8 {
        laws::check_format(&Ruleset::of(policy, &Family::ALL), RuleFormat::Nftables);
    }
}

fn check_rendered<R: serde::Serialize + crate::inspect::TextReport>(report: &R) {
    for format in [Format::Table, Format::Json, Format::Yaml] {
        let text = render(report, format, Screen::plain()).unwrap_or_else(|error: Error| panic!("{error}"));
        check_printed(text.as_str());
    }
}
