//! Exclusions of only some traffic of a UID, as Kuma's `exclude-outbound-ports-for-uids` writes
//! them: `[proto[,proto]:][ports:]uids`.

use super::ids::{Ids, Kind};
use super::ports;
use super::scene::{Author, Scene};
use super::{Note, protocols};
use crate::cni::{Error, List, Reader};
use crate::policy::{Exclusion, PortRange, Ports, Protocol};
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
    /// As in [`Exclusion::ports`].
    ports: Vec<PortRange>,
    uids: Ids,
}

/// The rules of a text, `;` between them.
pub(super) fn from_text(place: impl Into<String>, text: &str, author: Author) -> Result<Vec<Rule>, Error> {
    from_list(&List::split(place, text, SEPARATOR), author)
}

/// The rules under `key`: an array, or a text as above.
pub(super) fn from_block(r: &Reader<'_>, key: &'static str, author: Author) -> Result<Option<Vec<Rule>>, Error> {
    let rules = |value: &Value| match value {
        Value::String(text) => from_text(r.place(key), text, author),
        other => from_list(&List::from_json(r.place(key), other)?, author),
    };
    r.value(key).map(rules).transpose()
}

fn from_list(list: &List, author: Author) -> Result<Vec<Rule>, Error> {
    list.items.iter().map(|item| Rule::parse(item, list, author)).collect()
}

impl Rule {
    fn parse(item: &str, list: &List, author: Author) -> Result<Self, Error> {
        let (conditions, uids) = split(item);
        let (protocols, ports) = match conditions[..] {
            [] => ("", ""),
            [one] if one.split(',').any(|word| protocols::is_named(word.trim())) => (one, ""),
            [ports] => ("", ports),
            [protocols, ports] => (protocols, ports),
            _ => return Err(list.reject(item, ACCEPTED)),
        };
        let part = |text| List::from_text(&list.place, text);
        let uids = part(uids);
        if uids.items.is_empty() {
            return Err(list.reject(item, ACCEPTED));
        }
        let mut protocols = protocols::parse(&part(protocols))?;
        if protocols.is_empty() {
            protocols.push(None);
        }
        let ports = match ports::parse(&part(ports))? {
            Ports::All => Vec::new(),
            Ports::List(ranges) => ports::sorted(ranges),
        };
        Ok(Self { protocols, ports, uids: Ids::parse(&uids, author)? })
    }

    /// What the rule exempts in one pod.
    pub(super) fn exclusions(&self, scene: &Scene<'_>, notes: &mut Vec<Note>) -> Result<Vec<Exclusion>, Error> {
        let owners = self.uids.owners(Kind::User, scene, notes)?;
        let of = |owner| {
            self.protocols.iter().map(move |&protocol| Exclusion {
                owner,
                destination: None,
                protocol,
                ports: self.ports.clone(),
            })
        };
        Ok(owners.into_iter().flat_map(of).collect())
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
