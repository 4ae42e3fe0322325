//! `uid-exclude`: outbound traffic of certain UIDs or GIDs, or part of it, bypasses the sidecar.
//!
//! Its `rules` exclude part of a UID's traffic in the syntax of Kuma's `exclude-outbound-ports-for-uids`:
//! `[proto[,proto]:][ports:]uids`.

use super::context::{AnnotationValue, ListAuthor, PodContext, RequestedExclusions};
use super::ids::{IdKind, IdList};
use super::sub_plugin::Note;
use super::values;
use crate::cni::{BlockReader, Error, ItemList};
use crate::pod::well_known::{EXCLUDE_GIDS, EXCLUDE_PORTS_FOR_UIDS, EXCLUDE_UIDS};
use crate::policy::{Ports, Protocol};
use serde_json::Value;
use std::fmt;

/// The annotations of a pod or namespace that this sub-plugin reads.
pub(super) const ANNOTATIONS: [&str; 3] = [EXCLUDE_UIDS, EXCLUDE_GIDS, EXCLUDE_PORTS_FOR_UIDS];

const ACCEPTED_RULES: &str = "[proto[,proto]:][ports:]uids, for example udp:53:1001 or 1337, with proto tcp, udp or * and uids in any form of \
     the key uids";

/// Separates the rules of a text. A comma separates items within a rule.
const RULE_SEPARATOR: char = ';';

/// The exclusions that one block, argument or annotation requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct UidExclude {
    pub(super) uids: Option<IdList>,
    pub(super) gids: Option<IdList>,
    pub(super) rules: Vec<PortRule>,
}

impl UidExclude {
    /// Parses a block's keys.
    pub(super) fn parse(r: &BlockReader<'_>, author: ListAuthor) -> Result<Self, Error> {
        let ids = |key| r.list(key)?.map(|list| IdList::parse(&list, author)).transpose();
        let rules = rules_of_block(r, "rules", author)?.unwrap_or_default();
        Ok(Self { uids: ids("uids")?, gids: ids("gids")?, rules })
    }

    /// Parses one of [`ANNOTATIONS`].
    pub(super) fn of_annotation(key: &str, annotation: &AnnotationValue<'_>) -> Result<Self, Error> {
        let ids = || IdList::parse(&annotation.list()?, annotation.author).map(Some);
        Ok(match key {
            EXCLUDE_UIDS => Self { uids: ids()?, ..Self::default() },
            EXCLUDE_GIDS => Self { gids: ids()?, ..Self::default() },
            _ => {
                let rules = rules_of_text(annotation.place.clone(), annotation.value, annotation.author)?;
                Self { rules, ..Self::default() }
            }
        })
    }

    /// Returns the exclusions for one pod.
    pub(super) fn exclusions(
        &self,
        context: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<RequestedExclusions, Error> {
        let mut requested = RequestedExclusions::default();
        for (ids, kind) in [(&self.uids, IdKind::User), (&self.gids, IdKind::Group)] {
            let Some(ids) = ids else { continue };
            requested.add(ids.place(), &ids.owners(kind, context, notes)?, &[None], &[None], &[])?;
        }
        for rule in &self.rules {
            rule.add_exclusions(context, notes, &mut requested)?;
        }
        Ok(requested)
    }
}

/// An exclusion of part of a UID's traffic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PortRule {
    /// As it was written.
    text: String,
    /// `None` is every protocol.
    protocols: Vec<Option<Protocol>>,
    /// As they were written; an empty list is every port.
    pub(super) ports: Ports,
    pub(super) uids: IdList,
}

impl PortRule {
    fn parse(item: &str, list: &ItemList, author: ListAuthor) -> Result<Self, Error> {
        let (conditions, uids) = split_rule(item);
        let (protocols, ports) = match conditions[..] {
            [] => ("", ""),
            [one] if one.split(',').any(|word| values::is_protocol_name(word.trim())) => (one, ""),
            [ports] => ("", ports),
            [protocols, ports] => (protocols, ports),
            _ => return Err(list.reject(item, ACCEPTED_RULES)),
        };
        let part = |text| ItemList::from_text(&list.place, text);
        let uids = part(uids)?;
        if uids.items.is_empty() {
            return Err(list.reject(item, ACCEPTED_RULES));
        }
        let mut protocols = values::parse_protocols(&part(protocols)?)?;
        if protocols.is_empty() {
            protocols.push(None);
        }
        let ports = values::parse_requested_ports(&part(ports)?)?;
        Ok(Self { text: item.to_owned(), protocols, ports, uids: IdList::parse(&uids, author)? })
    }

    fn add_exclusions(
        &self,
        context: &PodContext<'_>,
        notes: &mut Vec<Note>,
        requested: &mut RequestedExclusions,
    ) -> Result<(), Error> {
        let owners = self.uids.owners(IdKind::User, context, notes)?;
        // In the form of `Exclusion::ports`.
        let ports = match &self.ports {
            Ports::All => Vec::new(),
            Ports::List(ranges) => values::merged(ranges.clone()),
        };
        requested.add(self.uids.place(), &owners, &[None], &self.protocols, &ports)
    }
}

impl fmt::Display for PortRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn rules_of_text(place: impl Into<String>, text: &str, author: ListAuthor) -> Result<Vec<PortRule>, Error> {
    rules_of_list(&ItemList::split(place, text, RULE_SEPARATOR)?, author)
}

/// Parses the rules under `key`: an array, or a text.
fn rules_of_block(r: &BlockReader<'_>, key: &'static str, author: ListAuthor) -> Result<Option<Vec<PortRule>>, Error> {
    let rules = |value: &Value| match value {
        Value::String(text) => rules_of_text(r.place(key), text, author),
        other => rules_of_list(&ItemList::from_json(r.place(key), other)?, author),
    };
    r.value(key).map(rules).transpose()
}

fn rules_of_list(list: &ItemList, author: ListAuthor) -> Result<Vec<PortRule>, Error> {
    list.items.iter().map(|item| PortRule::parse(item, list, author)).collect()
}

/// Splits a rule into its conditions and its UIDs. The UIDs follow the last colon, or begin with the first
/// `container:`, which contains a colon itself.
fn split_rule(item: &str) -> (Vec<&str>, &str) {
    let mut conditions = Vec::new();
    let mut rest = item;
    while let Some((condition, after)) = rest.split_once(':') {
        if condition.rsplit(',').next().is_some_and(|last| last.trim() == "container") {
            break;
        }
        conditions.push(condition);
        rest = after;
    }
    (conditions, rest)
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::{chain, container, context, facts, meshed_pod};
    use super::*;
    use crate::cni::{Block, Code};
    use crate::policy::{Exclusion, IdRange, PortRange, TrafficOwner};
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn an_empty_block_excludes_nothing() {
        for block in [json!({}), json!({"uids": [], "gids": "", "rules": []})] {
            let mut block = block;
            block["type"] = "uid-exclude".into();
            assert!(chain(json!([block])).exclusions().is_empty());
        }
    }

    #[test]
    fn uids_gids_and_rules_of_a_block_are_excluded() {
        let scenario = chain(json!([{
            "type": "uid-exclude",
            "uids": [1337, "2000-2999", "1000650000/10"],
            "gids": "55",
            "rules": ["udp:53:7", "22:8"],
        }]));
        let all = ["uid 7 udp 53", "uid 8 22", "uid 1337", "uid 2000-2999", "uid 1000650000-1000650009", "gid 55"];
        assert_eq!(scenario.exclusions(), all);
    }

    #[test]
    fn an_exclusion_that_another_one_covers_is_omitted() {
        let scenario = chain(json!([{"type": "uid-exclude", "uids": "0-9,5", "rules": "udp:53:7"}]));
        assert_eq!(scenario.exclusions(), ["uid 0-9"]);
        let scenario = chain(json!([{"type": "uid-exclude", "uids": "*,5"}]));
        assert_eq!(scenario.exclusions(), ["any"]);
    }

    #[test]
    fn each_annotation_adds_to_the_block() {
        let block = json!([{"type": "uid-exclude", "uids": [1], "gids": [1]}]);
        for (key, value, added) in [
            (EXCLUDE_UIDS, "container:app, 5", ["uid 5", "uid 1000"]),
            (EXCLUDE_GIDS, "6,8", ["gid 6", "gid 8"]),
            (EXCLUDE_PORTS_FOR_UIDS, "udp:53:5; 22:5", ["uid 5 22", "uid 5 udp 53"]),
        ] {
            let mut expected = vec!["gid 1".to_owned(), "uid 1".to_owned()];
            expected.extend(added.map(str::to_owned));
            expected.sort();
            let mut of_pod = chain(block.clone()).annotated(key, value).exclusions();
            of_pod.sort();
            assert_eq!(of_pod, expected, "{key} of the pod");
            let mut of_namespace = chain(block.clone()).namespace(key, value).exclusions();
            of_namespace.sort();
            assert_eq!(of_namespace, expected, "{key} of the namespace");
        }
    }

    #[test]
    fn the_pods_annotation_overrides_its_namespaces_key_by_key() {
        let scenario =
            chain(json!([{"type": "uid-exclude"}])).namespace(EXCLUDE_UIDS, "1").namespace(EXCLUDE_GIDS, "2");
        assert_eq!(scenario.clone().annotated(EXCLUDE_UIDS, "3").exclusions(), ["uid 3", "gid 2"]);
        assert_eq!(scenario.annotated(EXCLUDE_UIDS, "").exclusions(), ["gid 2"]);
    }

    #[test]
    fn an_error_names_the_invalid_annotation_and_its_object() {
        let scenario = chain(json!([{"type": "uid-exclude"}]));
        for key in ANNOTATIONS {
            let msg = scenario.clone().annotated(key, "root").error();
            let start = format!("annotation {key:?} of pod shop/cart-1: ");
            assert!(msg.starts_with(&start) && msg.contains("\"root\""), "{msg}");
            let msg = scenario.clone().namespace(key, "root").error();
            let start = format!("annotation {key:?} of namespace shop: ");
            assert!(msg.starts_with(&start) && msg.contains("\"root\""), "{msg}");
        }
    }

    #[test]
    fn an_unknown_container_is_accepted_on_the_namespace_and_rejected_on_the_pod() {
        let scenario = chain(json!([{"type": "uid-exclude"}]));
        assert!(scenario.clone().namespace(EXCLUDE_UIDS, "container:vault").exclusions().is_empty());
        assert!(scenario.annotated(EXCLUDE_UIDS, "container:vault").error().contains("no such container"));
    }

    #[test]
    fn the_pods_argument_accepts_no_administrators_keys() {
        let scenario = chain(json!([{"type": "uid-exclude", "uids": [1]}]));
        let args = |block| scenario.clone().args(json!({ "uid-exclude": block }));
        assert_eq!(args(json!({"uids": "2", "rules": ["22:3"]})).exclusions(), ["uid 1", "uid 2", "uid 3 22"]);
        assert_eq!(args(json!(null)).exclusions(), ["uid 1"]);
        assert_eq!(args(json!({"type": "uid-exclude", "uids": 2})).exclusions(), ["uid 1", "uid 2"]);
        assert!(args(json!({"type": "dns-exclude"})).error().starts_with("args.cni.uid-exclude.type: "));
        for key in ["pod_overrides", "uid"] {
            let start = format!("args.cni.uid-exclude.{key}: unknown key; ");
            assert!(args(json!({ key: "uid-exclude" })).error().starts_with(&start));
        }
        assert!(args(json!([])).error().starts_with("args.cni.uid-exclude: "));
    }

    const TCP: Option<Protocol> = Some(Protocol::Tcp);
    const UDP: Option<Protocol> = Some(Protocol::Udp);

    fn rules(text: &str) -> Result<Vec<PortRule>, Error> {
        rules_of_text("k", text, ListAuthor::Pod)
    }

    fn exclusions(text: &str) -> Vec<Exclusion> {
        let mut pod = meshed_pod();
        pod.init_containers = vec![container("a", Some(11)), container("b", Some(12))];
        let facts = facts(pod, &[("openshift.io/sa.scc.uid-range", "500/10")]);
        let mut requested = RequestedExclusions::default();
        for rule in rules(text).expect(text) {
            rule.add_exclusions(&context(Some(&facts)), &mut Vec::new(), &mut requested).expect(text);
        }
        requested.exclusions
    }

    fn uid(first: u32, last: u32) -> TrafficOwner {
        TrafficOwner::Uid(IdRange { first, last })
    }

    fn exclusion(owner: TrafficOwner, protocol: Option<Protocol>, ports: &[(u16, u16)]) -> Exclusion {
        let ports = ports.iter().map(|&(first, last)| PortRange { first, last }).collect();
        Exclusion { owner, destination: None, protocol, ports }
    }

    #[test]
    fn every_form_of_a_rule_is_parsed() {
        let dns = &[(53, 53)][..];
        for (text, expected) in [
            ("", vec![]),
            ("1337", vec![exclusion(uid(1337, 1337), None, &[])]),
            ("53:1337", vec![exclusion(uid(1337, 1337), None, dns)]),
            ("udp:53:1001", vec![exclusion(uid(1001, 1001), UDP, dns)]),
            ("53:106-108", vec![exclusion(uid(106, 108), None, dns)]),
            ("tcp,udp:53:1", vec![exclusion(uid(1, 1), TCP, dns), exclusion(uid(1, 1), UDP, dns)]),
            ("tcp:443,80,8000-8010:1", vec![exclusion(uid(1, 1), TCP, &[(80, 80), (443, 443), (8000, 8010)])]),
            ("*:*:1", vec![exclusion(uid(1, 1), None, &[])]),
            ("::1", vec![exclusion(uid(1, 1), None, &[])]),
            (":1", vec![exclusion(uid(1, 1), None, &[])]),
            ("*:22:1", vec![exclusion(uid(1, 1), None, &[(22, 22)])]),
            ("tcp:*:1", vec![exclusion(uid(1, 1), TCP, &[])]),
            ("tcp:1", vec![exclusion(uid(1, 1), TCP, &[])]),
            ("22:*", vec![exclusion(TrafficOwner::Any, None, &[(22, 22)])]),
            (" udp : 53 : 1 - 2 ", vec![exclusion(uid(1, 2), UDP, dns)]),
            ("22:1000650000/10", vec![exclusion(uid(1000650000, 1000650009), None, &[(22, 22)])]),
            ("22:1,2", vec![exclusion(uid(1, 1), None, &[(22, 22)]), exclusion(uid(2, 2), None, &[(22, 22)])]),
            ("namespace-range-last", vec![exclusion(uid(509, 509), None, &[])]),
            ("container:a", vec![exclusion(uid(11, 11), None, &[])]),
            ("53:container:a", vec![exclusion(uid(11, 11), None, dns)]),
            ("udp:53:container:a", vec![exclusion(uid(11, 11), UDP, dns)]),
            (
                "53:7,container:a,container:b",
                vec![
                    exclusion(uid(7, 7), None, dns),
                    exclusion(uid(11, 11), None, dns),
                    exclusion(uid(12, 12), None, dns),
                ],
            ),
            (
                "22:init-containers",
                vec![exclusion(uid(11, 11), None, &[(22, 22)]), exclusion(uid(12, 12), None, &[(22, 22)])],
            ),
            ("1; udp:53:2 ;;", vec![exclusion(uid(1, 1), None, &[]), exclusion(uid(2, 2), UDP, dns)]),
        ] {
            assert_eq!(exclusions(text), expected, "{text:?}");
        }
    }

    #[test]
    fn invalid_rules_are_rejected_with_their_place() {
        for text in [
            "tcp:53:",
            ":",
            "tcp:53:1:2",
            "sctp:53:1",
            "53:tcp:1",
            "0:1",
            "65536:1",
            "90-80:1",
            "udp:53:root",
            "tcp,x:1",
        ] {
            let error = rules(text).expect_err(text);
            assert!(error.code == Code::InvalidConfig && error.msg.starts_with("k: "), "{error}");
        }
    }

    #[test]
    fn a_block_contains_a_list_or_a_text_with_semicolons() {
        let parse = |value| {
            let block = Block::new("chain[0]", &json!({ "rules": value })).expect("an object");
            rules_of_block(&block.reader(), "rules", ListAuthor::Administrator)
        };
        let two = parse(json!(["tcp,udp:53:1", "22:2"])).expect("a list").expect("rules");
        assert_eq!(two.len(), 2);
        assert_eq!(parse(json!("tcp,udp:53:1;22:2")).expect("a text").expect("rules"), two);
        assert_eq!(parse(json!(1337)).expect("a number").expect("rules").len(), 1);
        assert_eq!(parse(json!(null)).expect("absent"), None);
        assert_eq!(parse(json!([])).expect("empty"), Some(vec![]));
        let error = parse(json!({"a": 1})).expect_err("an object");
        assert!(error.msg.starts_with("chain[0].rules: "), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in "[0-9/*, a-z:;-]{0,40}|(tcp|udp|53|container|,|:|;|1-2){0,12}|.{0,20}") {
            let _ = rules(&text);
        }

        #[test]
        fn a_rule_keeps_protocol_ports_and_uid(
            protocol in prop::sample::select(vec![("*", None), ("tcp", TCP), ("udp", UDP)]),
            first in 1u16..1000, more in 0u16..1000, id in 0..u32::MAX,
        ) {
            let ports = PortRange { first, last: first + more };
            let parsed = exclusions(&format!("{}:{ports}:{id}", protocol.0));
            prop_assert_eq!(parsed, [exclusion(uid(id, id), protocol.1, &[(first, first + more)])]);
        }
    }
}
