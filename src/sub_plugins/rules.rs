//! Exclusions of only some traffic of a UID, as Kuma's `exclude-outbound-ports-for-uids` writes
//! them: `[proto[,proto]:][ports:]uids`.

use super::Note;
use super::asked::RequestedExclusions;
use super::context::{ListAuthor, PodContext};
use super::ids::{IdKind, IdList};
use super::values;
use crate::cni::{BlockReader, Error, ItemList};
use crate::policy::{PortRange, Ports, Protocol};
use serde_json::Value;

const ACCEPTED: &str = "[proto[,proto]:][ports:]uids, for example udp:53:1001 or 1337, with proto tcp, udp or * and uids in any form of \
     the key uids";

/// The separator of rules in a text; the comma stands within a rule.
const SEPARATOR: char = ';';

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    /// `None` is every protocol.
    protocols: Vec<Option<Protocol>>,
    /// As in [`crate::policy::Exclusion::ports`].
    ports: Vec<PortRange>,
    uids: IdList,
}

/// The rules of a text, `;` between them.
pub(super) fn from_text(place: impl Into<String>, text: &str, author: ListAuthor) -> Result<Vec<Rule>, Error> {
    from_list(&ItemList::split(place, text, SEPARATOR)?, author)
}

/// The rules under `key`: an array, or a text as above.
pub(super) fn from_block(
    r: &BlockReader<'_>,
    key: &'static str,
    author: ListAuthor,
) -> Result<Option<Vec<Rule>>, Error> {
    let rules = |value: &Value| match value {
        Value::String(text) => from_text(r.place(key), text, author),
        other => from_list(&ItemList::from_json(r.place(key), other)?, author),
    };
    r.value(key).map(rules).transpose()
}

fn from_list(list: &ItemList, author: ListAuthor) -> Result<Vec<Rule>, Error> {
    list.items.iter().map(|item| Rule::parse(item, list, author)).collect()
}

impl Rule {
    fn parse(item: &str, list: &ItemList, author: ListAuthor) -> Result<Self, Error> {
        let (conditions, uids) = split(item);
        let (protocols, ports) = match conditions[..] {
            [] => ("", ""),
            [one] if one.split(',').any(|word| values::is_named(word.trim())) => (one, ""),
            [ports] => ("", ports),
            [protocols, ports] => (protocols, ports),
            _ => return Err(list.reject(item, ACCEPTED)),
        };
        let part = |text| ItemList::from_text(&list.place, text);
        let uids = part(uids)?;
        if uids.items.is_empty() {
            return Err(list.reject(item, ACCEPTED));
        }
        let mut protocols = values::parse_protocols(&part(protocols)?)?;
        if protocols.is_empty() {
            protocols.push(None);
        }
        let ports = match values::parse_ports(&part(ports)?)? {
            Ports::All => Vec::new(),
            Ports::List(ranges) => values::sorted(ranges),
        };
        Ok(Self { protocols, ports, uids: IdList::parse(&uids, author)? })
    }

    /// Adds what the rule exempts in one pod.
    pub(super) fn exclusions(
        &self,
        scene: &PodContext<'_>,
        notes: &mut Vec<Note>,
        asked: &mut RequestedExclusions,
    ) -> Result<(), Error> {
        let owners = self.uids.owners(IdKind::User, scene, notes)?;
        asked.add(self.uids.place(), &owners, &[None], &self.protocols, &self.ports)
    }
}

/// The conditions, and the UIDs: what follows the last colon, or begins with the first
/// `container:`, whose colon is its own.
fn split(item: &str) -> (Vec<&str>, &str) {
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
    use super::super::context::tests::scene;
    use super::super::scenario::{container, facts, meshed_pod};
    use super::*;
    use crate::cni::Block;
    use crate::policy::{Exclusion, IdRange, TrafficOwner};
    use proptest::prelude::*;
    use serde_json::json;

    const TCP: Option<Protocol> = Some(Protocol::Tcp);
    const UDP: Option<Protocol> = Some(Protocol::Udp);

    fn of(text: &str) -> Result<Vec<Rule>, Error> {
        from_text("k", text, ListAuthor::Pod)
    }

    fn exclusions(text: &str) -> Vec<Exclusion> {
        let mut pod = meshed_pod();
        pod.init_containers = vec![container("a", Some(11)), container("b", Some(12))];
        let facts = facts(pod, &[("openshift.io/sa.scc.uid-range", "500/10")]);
        let mut asked = RequestedExclusions::default();
        for rule in of(text).expect(text) {
            rule.exclusions(&scene(Some(&facts)), &mut Vec::new(), &mut asked).expect(text);
        }
        asked.exclusions
    }

    fn uid(first: u32, last: u32) -> TrafficOwner {
        TrafficOwner::Uid(IdRange { first, last })
    }

    fn exclusion(owner: TrafficOwner, protocol: Option<Protocol>, ports: &[(u16, u16)]) -> Exclusion {
        let ports = ports.iter().map(|&(first, last)| PortRange { first, last }).collect();
        Exclusion { owner, destination: None, protocol, ports }
    }

    #[test]
    fn each_form() {
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
    fn what_is_no_rule_is_refused_by_place() {
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
            let error = of(text).expect_err(text);
            assert!(error.msg.starts_with("k: ") && error.msg.contains("; expected "), "{error}");
        }
    }

    #[test]
    fn a_block_has_a_list_or_a_text_with_semicolons() {
        let rules = |value| {
            let block = Block::new("chain[0]", &json!({ "rules": value })).expect("an object");
            from_block(&block.reader(), "rules", ListAuthor::Administrator)
        };
        let two = rules(json!(["tcp,udp:53:1", "22:2"])).expect("a list").expect("rules");
        assert_eq!(two.len(), 2);
        assert_eq!(rules(json!("tcp,udp:53:1;22:2")).expect("a text").expect("rules"), two);
        assert_eq!(rules(json!(1337)).expect("a number").expect("rules").len(), 1);
        assert_eq!(rules(json!(null)).expect("absent"), None);
        assert_eq!(rules(json!([])).expect("empty"), Some(vec![]));
        let error = rules(json!({"a": 1})).expect_err("an object");
        assert!(error.msg.starts_with("chain[0].rules: "), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9/*, a-z:;-]{0,40}|(tcp|udp|53|container|,|:|;|1-2){0,12}|.{0,20}") {
            let _ = of(&text);
        }

        #[test]
        fn a_rule_is_read_as_it_was_meant(
            protocol in prop::sample::select(vec![("*", None), ("tcp", TCP), ("udp", UDP)]),
            first in 1u16..1000, more in 0u16..1000, id in 0..u32::MAX,
        ) {
            let ports = PortRange { first, last: first + more };
            let read = exclusions(&format!("{}:{ports}:{id}", protocol.0));
            prop_assert_eq!(read, [exclusion(uid(id, id), protocol.1, &[(first, first + more)])]);
        }
    }
}
