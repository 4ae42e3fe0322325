//! Bounds: which requests of pods and namespaces the administrator's grants permit. Each item of a request is decided on
//! its own: one grant must permit it.

use super::container_exclude::ContainerGrant;
use super::context::{ListAuthor, PodContext};
use super::dns_exclude::ResolverList;
use super::exclude::Exclude;
use super::ids::{IdKind, IdList};
use super::sub_plugin::{SettingSource, SubPlugin};
use super::values;
use crate::cni::{BlockReader, Bounds, Code, Error, ItemList, excerpt, wrong_type};
use crate::pod::Facts;
use crate::policy::{IdRange, ListOrAll, PortRange, Ports, Ranges};
use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt};
use serde_json::Value;
use std::fmt::{self, Display};

/// The maximum number of IDs in a range that the default bounds permit: OpenShift assigns 10,000 to a namespace.
const DEFAULT_IDS: u32 = 65_536;
/// The maximum number of ports in a range that the default bounds permit.
const DEFAULT_PORTS: u16 = 1024;
/// The shortest prefix that the default bounds permit.
const DEFAULT_PREFIX: u8 = 8;
/// The name of the bounds that apply if no key `allow` is set.
const DEFAULT_PLACE: &str = "the default bounds";
/// The number of bounds that a message names.
const MAX_NAMED: usize = 3;

/// The bounds of all sub-plugins.
#[derive(Debug, Default)]
pub(super) struct ParsedBounds {
    top: Option<Allow>,
    blocks: Vec<(SubPlugin, Allow)>,
}

impl ParsedBounds {
    /// Parses the grants.
    ///
    /// # Errors
    /// A grant is invalid, or two blocks of a sub-plugin have grants ([`Code::InvalidConfig`]).
    pub(super) fn parse(bounds: &Bounds) -> Result<Self, Error> {
        let with_author = |error: Error| Error { msg: format!("{}: {}", bounds.set_by, error.msg), ..error };
        let parse = |place: &str, allow: &Value| {
            Allow::parse(place, allow, &bounds.set_by).map_err(|error| with_author(error).naming_network())
        };
        let mut parsed = Self::default();
        if let Some(allow) = &bounds.allow {
            parsed.top = Some(parse("allow", allow)?);
        }
        for block in &bounds.blocks {
            let Some(sub_plugin) = Exclude::SUB_PLUGINS.into_iter().find(|one| one.name() == block.kind) else {
                continue;
            };
            if let Some((_, other)) = parsed.blocks.iter().find(|(other, _)| *other == sub_plugin) {
                let msg =
                    format!("{}: {} is already set for {}; remove one of them", block.place, other.place, block.kind);
                return Err(with_author(Error::new(Code::InvalidConfig, msg)).naming_network());
            }
            parsed.blocks.push((sub_plugin, parse(&block.place, &block.allow)?));
        }
        Ok(parsed)
    }

    /// Returns the bounds of a sub-plugin for one pod.
    pub(super) fn of_pod<'a>(&'a self, sub_plugin: SubPlugin, context: &PodContext<'a>) -> PodBounds<'a> {
        let of_block = self.blocks.iter().find(|(own, _)| *own == sub_plugin).map(|(_, allow)| allow);
        PodBounds::new(of_block.or(self.top.as_ref()), context)
    }
}

/// The grants of one key `allow`.
#[derive(Debug)]
struct Allow {
    place: String,
    set_by: String,
    grants: Vec<Grant>,
}

impl Allow {
    fn parse(place: &str, value: &Value, set_by: &str) -> Result<Self, Error> {
        let grants = match value {
            Value::Array(items) => {
                let grant = |(i, item)| Grant::parse(&format!("{place}[{i}]"), item);
                items.iter().enumerate().map(grant).collect::<Result<_, _>>()?
            }
            Value::Object(_) => vec![Grant::parse(place, value)?],
            _ => {
                return Err(wrong_type(
                    place,
                    value,
                    "an object with what pods may request, or a list of such objects",
                ));
            }
        };
        Ok(Self { place: place.to_owned(), set_by: set_by.to_owned(), grants })
    }
}

/// What an administrator permits pods to request.
#[derive(Debug)]
pub(super) struct Grant {
    place: String,
    pub(super) uids: Option<IdList>,
    pub(super) gids: Option<IdList>,
    pub(super) containers: Option<ContainerGrant>,
    ports: Option<Ports>,
    ip_ranges: Option<Ranges>,
    pub(super) resolvers: Option<ResolverList>,
    namespaces: Option<Vec<String>>,
    selector: Option<Selector>,
}

impl Grant {
    fn parse(place: &str, value: &Value) -> Result<Self, Error> {
        let r = BlockReader::new(place, value)?;
        let ids = |key| r.list(key)?.map(|list| IdList::parse(&list, ListAuthor::Administrator)).transpose();
        let namespaces = |list: ItemList| {
            list.distinct("names of namespaces", |item| crate::cni::is_dns_label(item).then(|| item.to_owned()))
        };
        let grant = Self {
            place: place.to_owned(),
            uids: ids("uids")?,
            gids: ids("gids")?,
            containers: ContainerGrant::parse(&r)?,
            ports: r.list("ports")?.map(|list| values::parse_ports(&list)).transpose()?,
            ip_ranges: r.list("ip_ranges")?.map(|list| values::parse_ranges(&list)).transpose()?,
            resolvers: r.list("resolvers")?.map(|list| ResolverList::parse(&list)).transpose()?,
            namespaces: r.list("namespaces")?.map(namespaces).transpose()?,
            selector: r.block("namespace_selector")?.map(|block| selector(block, &r)).transpose()?,
        };
        r.finish()?;
        Ok(grant)
    }

    /// Returns whether the grant names nothing in particular.
    const fn permits_everything(&self) -> bool {
        let Self { uids, gids, containers, ports, ip_ranges, resolvers, .. } = self;
        uids.is_none()
            && gids.is_none()
            && containers.is_none()
            && ports.is_none()
            && ip_ranges.is_none()
            && resolvers.is_none()
    }

    /// Returns whether the grant is for pods of this namespace. Without facts, the namespace is unknown.
    fn is_for(&self, facts: Option<&Facts>) -> bool {
        if self.namespaces.is_none() && self.selector.is_none() {
            return true;
        }
        let Some(facts) = facts else { return false };
        let is_named = |names: &Vec<String>| names.contains(&facts.pod.namespace);
        let is_selected = |selector: &Selector| facts.namespace.as_ref().is_some_and(|it| selector.matches(&it.labels));
        self.namespaces.as_ref().is_some_and(is_named) || self.selector.as_ref().is_some_and(is_selected)
    }
}

/// Reads a `LabelSelector` (k8s.io/apimachinery, `meta/v1`). Unlike the API server's types, kube's accept unknown keys.
fn selector(block: BlockReader<'_>, grant: &BlockReader<'_>) -> Result<Selector, Error> {
    const EXPECTED: &str = "a LabelSelector with matchLabels, matchExpressions, or both";
    let value = Value::Object(block.all().clone());
    let invalid = || wrong_type(&grant.place("namespace_selector"), &value, EXPECTED);
    block.value("matchLabels");
    for (i, expression) in block.value("matchExpressions").and_then(Value::as_array).into_iter().flatten().enumerate() {
        let keys = BlockReader::new(format!("{}[{i}]", block.place("matchExpressions")), expression)?;
        let operators = [("In", true), ("NotIn", true), ("Exists", false), ("DoesNotExist", false)];
        let needs_values = keys.one_of("operator", &operators)?;
        let has_values = keys.list("values")?.is_some_and(|list| !list.items.is_empty());
        if keys.string("key")?.is_none_or(str::is_empty) || needs_values != Some(has_values) {
            return Err(invalid());
        }
        keys.finish()?;
    }
    block.finish()?;
    let selector: LabelSelector = serde_json::from_value(value.clone()).map_err(|_| invalid())?;
    selector.try_into().map_err(|_| invalid())
}

/// A bound against which an item of a request is decided.
pub(super) enum Bound<'a> {
    /// That of an administrator who set none.
    Default,
    /// A grant for the pod's namespace.
    Grant(&'a AppliedGrant<'a>),
}

/// A grant for the namespace of a pod, with the IDs that it means there.
pub(super) struct AppliedGrant<'a> {
    pub(super) grant: &'a Grant,
    uids: Vec<IdRange>,
    gids: Vec<IdRange>,
}

impl AppliedGrant<'_> {
    /// Returns the granted list of IDs, and the ranges that it means for the pod.
    pub(super) fn ids(&self, kind: IdKind) -> Option<(&IdList, &[IdRange])> {
        match kind {
            IdKind::User => self.grant.uids.as_ref().map(|ids| (ids, self.uids.as_slice())),
            IdKind::Group => self.grant.gids.as_ref().map(|ids| (ids, self.gids.as_slice())),
        }
    }
}

impl Bound<'_> {
    /// Returns whether the default bounds permit a range of IDs.
    pub(super) const fn permits_by_default(range: IdRange) -> bool {
        range.last - range.first < DEFAULT_IDS
    }

    /// Returns whether the bound permits a range of ports.
    pub(super) fn permits_ports(&self, range: PortRange) -> bool {
        match self {
            Self::Default => range.last - range.first < DEFAULT_PORTS,
            Self::Grant(applied) => match &applied.grant.ports {
                None => false,
                Some(Ports::All) => true,
                Some(Ports::List(granted)) => granted.iter().any(|it| it.first <= range.first && range.last <= it.last),
            },
        }
    }

    /// Returns whether the bound permits an IP range; `None` is every address.
    pub(super) fn permits_destination(&self, range: Option<IpNet>) -> bool {
        match (self, range) {
            (Self::Default, range) => range.is_some_and(is_narrow),
            (Self::Grant(applied), range) => match (&applied.grant.ip_ranges, range) {
                (None, _) | (Some(Ranges::List(_)), None) => false,
                (Some(Ranges::All), _) => true,
                (Some(Ranges::List(granted)), Some(range)) => granted.iter().any(|it| it.contains(&range)),
            },
        }
    }
}

/// Returns whether the default bounds permit an IP range.
pub(super) fn is_narrow(range: IpNet) -> bool {
    range.prefix_len() >= DEFAULT_PREFIX
}

/// A request of a pod or its namespace, and the bound that decides about it. `Display` shows one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecidedRequest {
    /// Who requests it.
    pub source: SettingSource,
    /// The annotation or argument, for messages.
    pub place: String,
    /// The item.
    pub item: String,
    /// Whether it is within the bounds.
    pub permitted: bool,
    /// The bound that permits it, or those that do not.
    pub bound: String,
}

impl DecidedRequest {
    /// Returns why the request is outside the bounds, without the next step.
    #[must_use]
    pub fn reason(&self) -> String {
        format!("{}: {:?} is outside the bounds: not permitted by {}", self.place, excerpt(&self.item), self.bound)
    }

    /// Returns the error of an ADD.
    pub(super) fn error(&self) -> Error {
        let next = "remove it, or ask the administrator to permit it with \"allow\"";
        self.source.named_in(Error::new(Code::InvalidConfig, format!("{}; {next}", self.reason())))
    }
}

impl Display for DecidedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.permitted { "allowed" } else { "refused" };
        write!(f, "{}: {:?}: {verdict} by {}", self.place, excerpt(&self.item), self.bound)
    }
}

/// The bounds of one sub-plugin for one pod, and what they decided.
pub(super) struct PodBounds<'a> {
    allow: Option<&'a Allow>,
    grants: Vec<AppliedGrant<'a>>,
    facts: Option<&'a Facts>,
    pub(super) decided: Vec<DecidedRequest>,
}

impl<'a> PodBounds<'a> {
    fn new(allow: Option<&'a Allow>, context: &PodContext<'a>) -> Self {
        let facts = context.facts;
        let ranges = |ids: &Option<IdList>, kind| ids.as_ref().map(|ids| ids.granted(kind, facts)).unwrap_or_default();
        let applied = |grant: &'a Grant| AppliedGrant {
            grant,
            uids: ranges(&grant.uids, IdKind::User),
            gids: ranges(&grant.gids, IdKind::Group),
        };
        let grants = allow.iter().flat_map(|allow| &allow.grants);
        Self { allow, grants: grants.filter(|it| it.is_for(facts)).map(applied).collect(), facts, decided: Vec::new() }
    }

    /// Returns the facts of the pod.
    pub(super) const fn facts(&self) -> Option<&'a Facts> {
        self.facts
    }

    /// Returns the first bound that permits an item; `key` is the key of a grant that can.
    pub(super) fn permitting(&self, key: &str, permits: impl Fn(&Bound<'_>) -> bool) -> Option<String> {
        let Some(allow) = self.allow else {
            return permits(&Bound::Default).then(|| DEFAULT_PLACE.to_owned());
        };
        let permits = |it: &&AppliedGrant<'_>| it.grant.permits_everything() || permits(&Bound::Grant(it));
        let AppliedGrant { grant, .. } = self.grants.iter().find(permits)?;
        let key = if grant.permits_everything() { String::new() } else { format!(".{key}") };
        Some(format!("{}{key} ({})", grant.place, allow.set_by))
    }

    /// Records the decision about an item at a place and returns whether it is permitted: `by` this bound.
    pub(super) fn record(
        &mut self,
        (source, place): (&SettingSource, &str),
        item: &dyn Display,
        key: &str,
        by: Option<String>,
    ) -> bool {
        let (permitted, source, place, item) = (by.is_some(), source.clone(), place.to_owned(), item.to_string());
        let bound = by.unwrap_or_else(|| self.crossed(key));
        self.decided.push(DecidedRequest { source, place, item, permitted, bound });
        permitted
    }

    fn decide(
        &mut self,
        from: (&SettingSource, &str),
        item: &dyn Display,
        key: &str,
        permits: impl Fn(&Bound<'_>) -> bool,
    ) -> bool {
        let by = self.permitting(key, permits);
        self.record(from, item, key, by)
    }

    /// Keeps the items that are permitted.
    pub(super) fn retain<T: Display>(
        &mut self,
        from: (&SettingSource, &str),
        items: &mut Vec<T>,
        key: &str,
        permits: impl Fn(&Bound<'_>, &T) -> bool,
    ) {
        items.retain(|item| self.decide(from, item, key, |bound| permits(bound, item)));
    }

    /// Keeps the ports that are permitted. `list` is as it was written: without a permitted `*`, its other items count.
    pub(super) fn retain_ports(
        &mut self,
        source: &SettingSource,
        list: &ItemList,
        ports: &mut Ports,
    ) -> Result<(), Error> {
        let all = PortRange { first: 1, last: u16::MAX };
        self.retain_or_all(source, list, ("ports", values::parse_ports), ports, |bound, range| {
            bound.permits_ports(range.copied().unwrap_or(all))
        })
    }

    /// Keeps the IP ranges that are permitted, as [`Self::retain_ports`] does.
    pub(super) fn retain_ranges(
        &mut self,
        source: &SettingSource,
        list: &ItemList,
        ranges: &mut Ranges,
    ) -> Result<(), Error> {
        self.retain_or_all(source, list, ("ip_ranges", values::parse_ranges), ranges, |bound, range| {
            bound.permits_destination(range.copied())
        })
    }

    fn retain_or_all<T: Display>(
        &mut self,
        source: &SettingSource,
        list: &ItemList,
        (key, parse): (&str, fn(&ItemList) -> Result<ListOrAll<T>, Error>),
        values: &mut ListOrAll<T>,
        permits: impl Fn(&Bound<'_>, Option<&T>) -> bool,
    ) -> Result<(), Error> {
        let from = (source, list.place.as_str());
        if matches!(values, ListOrAll::All) {
            if self.decide(from, &"*", key, |bound| permits(bound, None)) {
                return Ok(());
            }
            let others = list.items.iter().filter(|item| *item != "*").cloned().collect();
            *values = parse(&ItemList { place: list.place.clone(), items: others })?;
        }
        if let ListOrAll::List(items) = values {
            self.retain(from, items, key, |bound, item| permits(bound, Some(item)));
        }
        Ok(())
    }

    /// Returns the bounds that do not permit an item, for messages.
    fn crossed(&self, key: &str) -> String {
        let Some(allow) = self.allow else { return DEFAULT_PLACE.to_owned() };
        let set_by = &allow.set_by;
        if self.grants.is_empty() {
            return match self.facts {
                Some(facts) if !allow.grants.is_empty() => {
                    format!("{} ({set_by}), which has no grant for namespace {}", allow.place, facts.pod.namespace)
                }
                _ => format!("{} ({set_by})", allow.place),
            };
        }
        let places = self.grants.iter().take(MAX_NAMED).map(|it| format!("{}.{key}", it.grant.place));
        let more = match self.grants.len().saturating_sub(MAX_NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("{}{more} ({set_by})", places.collect::<Vec<_>>().join(", "))
    }
}
