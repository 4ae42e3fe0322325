//! The sets of excluded containers in the table `inet detour-exclusions`, and their elements. A set has one element per
//! running excluded container, with its cgroup ID as the key and its name and ID as the comment. The rules that look
//! them up are in `native::exclusions`.

use super::nfnetlink::{Batch, NfError, NfSocket, Verb, nfta, retry_changed};
use super::rule::NFPROTO_INET;
use crate::cni::{Code, Error};
use crate::netlink::attributes::{self, Attributes, find, find_be32};
use crate::netlink::{DumpLimit, NLM_F_CREATE};
use crate::policy::ContainerScope;
use nix::errno::Errno;
use std::collections::{BTreeMap, BTreeSet};

/// The name of the table.
pub(super) const TABLE: &str = "detour-exclusions";
/// The maximum number of elements of a set. A pod has fewer running containers; a stale element is removed later.
pub(super) const MAX_ELEMENTS: u32 = 1024;
/// The length of a cgroup ID in a register.
const KEY_LENGTH: u32 = 8;
/// `TYPE_CGROUPV2` (nftables, include/datatype.h), which `nft` needs to print the elements.
const CGROUP_TYPE: u32 = 46;
/// `NFTNL_UDATA_SET_ELEM_COMMENT` (libnftnl, udata.h), and the longest text that `nft` accepts, with its zero byte.
const COMMENT: u8 = 0;
const MAX_COMMENT: usize = 128;
/// The scopes, each of which has a set, the narrower scope first.
pub(super) const SCOPES: [ContainerScope; 2] = [ContainerScope::Dns, ContainerScope::All];
/// The limit for reading: the elements of both sets, at worst each in its own message.
const MAX_READ: DumpLimit = DumpLimit { objects: 4096, bytes: 4 << 20 };

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerElement {
    /// The set that has the element.
    pub scope: ContainerScope,
    /// The ID of the container's control group.
    pub cgroup: u64,
    /// The comment: the container's name and the beginning of its ID; `None` if the comment is missing or has another
    /// form.
    pub container: Option<ContainerLabel>,
}

/// The container of an element.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerLabel {
    /// The container's name.
    pub name: String,
    /// The first [`ContainerLabel::ID_LENGTH`] characters of the container's ID.
    pub id: String,
}

impl ContainerLabel {
    /// The number of characters of a container's ID in a comment, which `nft` limits to 128 bytes.
    pub const ID_LENGTH: usize = 16;

    /// Returns the label of the container `name` with the full ID `id`.
    #[must_use]
    pub fn new(name: &str, id: &str) -> Self {
        Self { name: name.to_owned(), id: id.chars().take(Self::ID_LENGTH).collect() }
    }

    /// Parses the user data of an element: attributes of one byte each for type and length.
    fn parse(user_data: &[u8]) -> Option<Self> {
        let [COMMENT, length, text @ ..] = user_data else { return None };
        let text = text.get(..usize::from(*length))?.strip_suffix(&[0])?;
        let (name, id) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        let is_label = !name.is_empty() && !id.is_empty() && !id.contains(' ') && id.len() <= Self::ID_LENGTH;
        is_label.then(|| Self { name: name.to_owned(), id: id.to_owned() })
    }

    /// Returns the user data of an element; `None` if the comment is too long.
    fn user_data(&self) -> Option<Vec<u8>> {
        let text = format!("{} {}\0", self.name, self.id);
        let length = u8::try_from(text.len()).ok().filter(|length| usize::from(*length) <= MAX_COMMENT)?;
        Some([&[COMMENT, length], text.as_bytes()].concat())
    }
}

impl ContainerElement {
    /// Returns the element for the control group of the container `name` with the full ID `id`.
    #[must_use]
    pub fn new(scope: ContainerScope, cgroup: u64, name: &str, id: &str) -> Self {
        Self { scope, cgroup, container: Some(ContainerLabel::new(name, id)) }
    }

    /// Returns whether both are the same element of the same set, regardless of the comments.
    #[must_use]
    pub fn has_key_of(&self, other: &Self) -> bool {
        (self.scope, self.cgroup) == (other.scope, other.cgroup)
    }

    /// Reads the elements of a set in a message of the kernel; skips elements whose key is not a cgroup ID.
    pub(super) fn read(scope: ContainerScope, message: &[u8]) -> impl Iterator<Item = Self> {
        let list = find(message, nfta::ELEMENTS).unwrap_or_default();
        let elements = attributes::parse(list).filter(|(kind, _)| *kind == nfta::LIST_ELEMENT);
        elements.filter_map(move |(_, element)| {
            let key = find(find(element, nfta::ELEMENT_KEY)?, nfta::ELEMENT_VALUE)?;
            let container = find(element, nfta::ELEMENT_USER_DATA).and_then(ContainerLabel::parse);
            Some(Self { scope, cgroup: u64::from_ne_bytes(key.try_into().ok()?), container })
        })
    }

    /// Appends the message that adds the element to its set or deletes it from there.
    pub(super) fn write(&self, batch: &mut Batch<'_>, verb: Verb) {
        let user_data = self.container.as_ref().filter(|_| verb == Verb::NewSetElements);
        let user_data = user_data.and_then(ContainerLabel::user_data);
        let flags = if verb == Verb::NewSetElements { NLM_F_CREATE } else { 0 };
        batch.message(verb, flags, NFPROTO_INET, |list| {
            elements_of(list, self.scope).nested(nfta::ELEMENTS, |list| {
                list.nested(nfta::LIST_ELEMENT, |element| {
                    element.nested(nfta::ELEMENT_KEY, |key| key.bytes(nfta::ELEMENT_VALUE, &self.cgroup.to_ne_bytes()));
                    match &user_data {
                        Some(data) => element.bytes(nfta::ELEMENT_USER_DATA, data),
                        None => element,
                    }
                })
            })
        });
    }
}

/// Returns the name of a scope's set. `all` is a reserved word of `nft`.
#[must_use]
pub const fn set_name(scope: ContainerScope) -> &'static str {
    match scope {
        ContainerScope::Dns => "excluded-dns",
        ContainerScope::All => "excluded-all",
    }
}

/// Returns the scope of the set with this name.
pub(super) fn scope_of_set(name: &str) -> Option<ContainerScope> {
    SCOPES.into_iter().find(|scope| set_name(*scope) == name)
}

/// Returns whether a set that the kernel lists is as [`set`] creates it, apart from its size.
pub(super) fn is_container_set(listed: &[u8]) -> bool {
    let number = |kind| find_be32(listed, kind).unwrap_or_default();
    number(nfta::SET_FLAGS) == 0
        && number(nfta::SET_KEY_TYPE) == CGROUP_TYPE
        && number(nfta::SET_KEY_LENGTH) == KEY_LENGTH
}

/// Appends the attributes that select the elements of a set (`NFTA_SET_ELEM_LIST_…`).
fn elements_of(list: &mut Attributes, scope: ContainerScope) -> &mut Attributes {
    list.text(nfta::TABLE, TABLE).text(nfta::ELEMENTS_SET, set_name(scope))
}

/// Appends the attributes that create a set with the number `id` within its transaction (`NFTA_SET_…`).
pub(super) fn set(list: &mut Attributes, scope: ContainerScope, id: u32) -> &mut Attributes {
    list.text(nfta::TABLE, TABLE).text(nfta::SET_NAME, set_name(scope));
    list.be32(nfta::SET_FLAGS, 0).be32(nfta::SET_KEY_TYPE, CGROUP_TYPE).be32(nfta::SET_KEY_LENGTH, KEY_LENGTH);
    list.nested(nfta::SET_DESCRIPTION, |size| size.be32(nfta::SET_SIZE, MAX_ELEMENTS)).be32(nfta::SET_ID, id);
    list.bytes(nfta::SET_USER_DATA, &[&nfta::KEY_BYTE_ORDER[..], &nfta::HOST_ENDIAN.to_ne_bytes()].concat())
}

/// Lists the elements in the calling thread's network namespace; none if the table does not exist.
///
/// # Errors
/// The kernel refuses, or there are too many elements.
pub fn container_elements() -> Result<Vec<ContainerElement>, Error> {
    retried(read_all).map(|sets| sets.into_values().flatten().collect()).map_err(|error| failed("read", &error))
}

/// Lists the elements in the calling thread's network namespace, in which the sets of `required` must exist.
///
/// # Errors
/// As [`container_elements`]. [`Code::Drift`]: a set is missing.
pub fn required_container_elements(required: &BTreeSet<ContainerScope>) -> Result<Vec<ContainerElement>, Error> {
    let sets = retried(read_all).map_err(|error| failed("read", &error))?;
    match required.iter().find(|scope| !sets.contains_key(scope)) {
        Some(missing) => Err(Error::new(
            Code::Drift,
            format!(
                "table inet {TABLE}: expected set {}, got none: another process deleted the set or the table",
                set_name(*missing)
            ),
        )),
        None => Ok(sets.into_values().flatten().collect()),
    }
}

/// Removes and adds elements in one transaction in the calling thread's network namespace. It is no error if an element
/// is already removed or present.
///
/// # Errors
/// The kernel refuses. [`Code::Drift`]: a set is missing.
pub fn change_container_elements(remove: &[ContainerElement], add: &[ContainerElement]) -> Result<(), Error> {
    if let Some(element) = add.iter().find(|e| e.container.as_ref().is_some_and(|label| label.user_data().is_none())) {
        let name = element.container.as_ref().map_or("", |label| &label.name);
        let msg = format!(
            "can't exclude the control group {}: invalid container name {name:?}; expected at most {} bytes",
            element.cgroup,
            MAX_COMMENT - ContainerLabel::ID_LENGTH - 2
        );
        return Err(Error::new(Code::Internal, msg));
    }
    let is_changed = |scope: &ContainerScope| remove.iter().chain(add).any(|element| element.scope == *scope);
    let scopes: Vec<ContainerScope> = SCOPES.into_iter().filter(is_changed).collect();
    let change = |socket: &mut NfSocket| {
        let generation = socket.generation()?;
        let live: Vec<ContainerElement> = read(socket, &scopes)?.into_values().flatten().collect();
        let found = |element: &ContainerElement| live.iter().find(|other| other.has_key_of(element));
        let is_new = |element: &&ContainerElement| found(element) != Some(*element);
        let added: Vec<&ContainerElement> = add.iter().filter(is_new).collect();
        // The kernel can't change the comment of an element, so the transaction replaces the element.
        let is_removed = |element: &ContainerElement| {
            let same = |other: &ContainerElement| other.has_key_of(element);
            added.iter().any(|new| same(new)) || (remove.iter().any(same) && !add.iter().any(same))
        };
        socket.transact(generation, |batch| {
            let removed = live.iter().filter(|element| is_removed(element));
            removed.for_each(|element| element.write(batch, Verb::DelSetElements));
            added.iter().for_each(|element| element.write(batch, Verb::NewSetElements));
        })
    };
    retried(change).map_err(|error| failed("change", &error))
}

/// The elements of the sets that exist.
type LiveSets = BTreeMap<ContainerScope, Vec<ContainerElement>>;

fn read_all(socket: &mut NfSocket) -> Result<LiveSets, NfError> {
    read(socket, &SCOPES)
}

/// Reads the sets of `scopes` that exist.
fn read(socket: &mut NfSocket, scopes: &[ContainerScope]) -> Result<LiveSets, NfError> {
    socket.allow(MAX_READ);
    let mut sets = LiveSets::new();
    for scope in scopes {
        let mut found = Vec::new();
        let each = |_, message: &[u8]| found.extend(ContainerElement::read(*scope, message));
        let which = Attributes::of(|list| elements_of(list, *scope));
        match socket.dump_of(Verb::GetSetElements, NFPROTO_INET, which, each) {
            Err(NfError::Socket(Errno::ENOENT)) => continue,
            other => other?,
        }
        sets.insert(*scope, found);
    }
    Ok(sets)
}

/// Repeats `work` while other processes change the rules.
fn retried<T>(mut work: impl FnMut(&mut NfSocket) -> Result<T, NfError>) -> Result<T, NfError> {
    let mut socket = NfSocket::open()?;
    retry_changed(|| work(&mut socket))
}

fn failed(action: &str, error: &NfError) -> Error {
    let (code, next) = match error {
        NfError::Changed => (Code::TryAgain, "; retry"),
        NfError::Refused { errno: Errno::ENOENT, .. } => {
            (Code::Drift, ": another process deleted the table or one of its sets")
        }
        error if error.is_lack_of_resources() => (Code::TryAgain, ": the node lacks memory or file descriptors; retry"),
        NfError::Refused { errno: Errno::ENFILE, .. } => (Code::KernelRefused, ": the set is full; delete the pod"),
        _ => (Code::KernelRefused, ""),
    };
    Error::new(code, format!("can't {action} the excluded containers: table inet {TABLE}: {error}{next}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_parsed_back_and_any_other_one_is_not_a_label() {
        let label = ContainerLabel::new("vault-agent-init", "0123456789abcdef0123456789abcdef");
        assert_eq!(label.id, "0123456789abcdef");
        let data = label.user_data().expect("short enough");
        assert_eq!(ContainerLabel::parse(&data), Some(label));
        for other in [&b""[..], b"\0", b"\0\xffab", b"\0\x04abc\0", b"\0\x05a b c\0", b"\x01\x04a b\0", b"\0\x03a b"] {
            assert_eq!(ContainerLabel::parse(other), None, "{other:?}");
        }
        assert_eq!(ContainerLabel::new(&"a".repeat(111), "0123456789abcdef").user_data(), None);
        assert!(ContainerLabel::new(&"a".repeat(110), "0123456789abcdef").user_data().is_some());
    }
}
