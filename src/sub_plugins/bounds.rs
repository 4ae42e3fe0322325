//! Bounds: which requests of pods and namespaces the administrator's grants permit. Each item of a request is decided on
//! its own: one grant must permit it.

use super::container_exclude::{ContainerExclude, ContainerForm};
use super::context::{MAX_CONTAINERS, PodContext};
use super::dns_exclude::{ResolverForm, ResolverList};
use super::exclude::Exclude;
use super::grants::{Allow, Grant};
use super::ids::{IdForm, IdKind, IdList};
use super::sub_plugin::{DecidedRequest, SettingSource, SubPlugin};
use super::uid_exclude::PortRule;
use super::values;
use crate::cni::{Bounds, Code, Error, ItemList};
use crate::pod::{Facts, Pod};
use crate::policy::{IdRange, ListOrAll, PortRange, Ports, Ranges};
use ipnet::IpNet;
use serde_json::Value;
use std::cell::Cell;
use std::fmt::Display;

/// The maximum number of IDs in a range that the default bounds permit: OpenShift assigns 10,000 to a namespace.
const DEFAULT_IDS: u32 = 65_536;
/// The maximum number of ports in a range that the default bounds permit.
const DEFAULT_PORTS: u32 = 1024;
/// The shortest prefix that the default bounds permit.
const DEFAULT_PREFIX: u8 = 8;
/// In one annotation or argument, the default bounds permit as many ports and addresses as this number of ranges of the
/// maximum size has: a list of ranges must not stand for all traffic either.
const DEFAULT_RANGES: u32 = 4;
/// The longest prefix whose addresses count: a longer one counts as this one.
const COUNTED_PREFIX: u8 = 32;
/// The name of the bounds that apply if no key `allow` is set.
const DEFAULT_PLACE: &str = "the default bounds";
/// Stands for the keys of a grant that permit a rule: its UIDs, or its ports.
const RULES: &str = "rules";
/// The number of bounds that a message names.
const MAX_NAMED: usize = 3;

/// Parses a list whose item `*` stands for everything.
type ListParser<T> = fn(&ItemList) -> Result<ListOrAll<T>, Error>;

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
        let with_author = |error: Error| error.at(&bounds.set_by);
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

/// What the default bounds have permitted in one annotation or argument.
#[derive(Debug, Default)]
struct Total {
    ports: Cell<u32>,
    addresses: Cell<u32>,
}

impl Total {
    /// Adds the number of a range of ports or addresses, unless the range or the sum exceeds the limit.
    fn add(sum: &Cell<u32>, count: u32, limit: u32) -> bool {
        let total = sum.get().saturating_add(count);
        let is_within = count <= limit && total <= DEFAULT_RANGES * limit;
        if is_within {
            sum.set(total);
        }
        is_within
    }

    fn add_ports(&self, range: &PortRange) -> bool {
        Self::add(&self.ports, u32::from(range.last - range.first) + 1, DEFAULT_PORTS)
    }

    fn add_addresses(&self, range: &IpNet) -> bool {
        let count = |prefix: u8| 1u32.checked_shl((COUNTED_PREFIX.saturating_sub(prefix)).into()).unwrap_or(u32::MAX);
        Self::add(&self.addresses, count(range.prefix_len()), count(DEFAULT_PREFIX))
    }
}

/// A bound against which an item of a request is decided.
enum Bound<'a> {
    /// That of an administrator who set none.
    Default(&'a Total),
    /// A grant for the pod's namespace.
    Grant(&'a AppliedGrant<'a>),
}

/// A grant for the namespace of a pod, with the IDs that it means there.
struct AppliedGrant<'a> {
    grant: &'a Grant,
    uids: Vec<IdRange>,
    gids: Vec<IdRange>,
}

impl Bound<'_> {
    fn permits_id(&self, form: &IdForm, kind: IdKind, facts: Option<&Facts>) -> bool {
        let Self::Grant(AppliedGrant { grant, uids, gids }) = self else { return form.is_limited(DEFAULT_IDS) };
        let (list, ranges) = match kind {
            IdKind::User => (&grant.uids, uids),
            IdKind::Group => (&grant.gids, gids),
        };
        list.as_ref().is_some_and(|list| list.permits(form, ranges, kind, facts))
    }

    fn permits_container(&self, request: &ContainerExclude, form: &ContainerForm, pod: &Pod) -> bool {
        let Self::Grant(AppliedGrant { grant, .. }) = self else { return form.is_specific() };
        grant.containers.as_ref().is_some_and(|granted| granted.permits(request, form, pod))
    }

    fn permits_resolver(&self, form: &ResolverForm) -> bool {
        match (self, form) {
            (Self::Default(total), ResolverForm::Range(range)) => total.add_addresses(range),
            (Self::Default(_), _) => true,
            (Self::Grant(it), form) => it.grant.resolvers.as_ref().is_some_and(|list| list.permits(form)),
        }
    }

    /// Decides about ports; `None` is every port.
    fn permits_ports(&self, range: Option<&PortRange>) -> bool {
        let all = PortRange { first: 1, last: u16::MAX };
        let range = range.unwrap_or(&all);
        match self {
            Self::Default(total) => total.add_ports(range),
            Self::Grant(it) => match &it.grant.ports {
                None => false,
                Some(Ports::All) => true,
                Some(Ports::List(granted)) => granted.iter().any(|it| it.first <= range.first && range.last <= it.last),
            },
        }
    }

    /// Decides about an IP range; `None` is every address.
    fn permits_destination(&self, range: Option<&IpNet>) -> bool {
        match self {
            Self::Default(total) => range.is_some_and(|range| total.add_addresses(range)),
            Self::Grant(it) => match (&it.grant.ip_ranges, range) {
                (None, _) | (Some(Ranges::List(_)), None) => false,
                (Some(Ranges::All), _) => true,
                (Some(Ranges::List(granted)), Some(range)) => granted.iter().any(|it| it.contains(range)),
            },
        }
    }
}

/// The bounds of one sub-plugin for one pod, and what they decided.
pub(super) struct PodBounds<'a> {
    allow: Option<&'a Allow>,
    grants: Vec<AppliedGrant<'a>>,
    facts: Option<&'a Facts>,
    total: Total,
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
        let grants = grants.filter(|it| it.is_for(facts)).map(applied).collect();
        Self { allow, grants, facts, total: Total::default(), decided: Vec::new() }
    }

    /// Removes what is outside the bounds from a request of a pod or its namespace. `block` is the administrator's block.
    pub(super) fn apply(
        &mut self,
        request: &mut Exclude,
        source: &SettingSource,
        block: &Exclude,
    ) -> Result<(), Error> {
        self.total = Total::default();
        match (request, block) {
            (Exclude::Uid(request), _) => {
                self.retain_ids(source, &mut request.uids, &mut request.gids);
                request.rules.retain(|rule| {
                    let by = self.permitting_rule(rule);
                    self.record((source, rule.uids.place()), rule, RULES, by)
                });
            }
            (Exclude::Container(request), _) => self.retain_containers(source, request),
            // UIDs and GIDs narrow everything else.
            (Exclude::Dns(request), Exclude::Dns(block)) => {
                self.retain_ids(source, &mut request.uids, &mut request.gids);
                if let (Some(ResolverList { place, forms }), None, None) =
                    (&mut request.resolvers, &request.uids, &request.gids)
                {
                    self.retain((source, place), forms, "resolvers", |bound, form| bound.permits_resolver(form));
                    // The administrator's ports need no permission.
                    if let Some(list) = request.written_ports.as_ref().filter(|_| request.ports != block.ports) {
                        self.retain_ports(source, list, &mut request.ports)?;
                    }
                }
            }
            (Exclude::Dns(_), _) => {}
            (Exclude::Destination(request), _) if request.uids.is_some() => {
                self.retain_ids(source, &mut request.uids, &mut None);
            }
            (Exclude::Destination(request), _) => {
                if let Some((list, ports)) = &mut request.ports {
                    self.retain_ports(source, list, ports)?;
                }
                if let Some((list, ranges)) = &mut request.ip_ranges {
                    let parse = ("ip_ranges", values::parse_requested_ranges as ListParser<IpNet>);
                    self.retain_or_all(source, list, parse, ranges, |bound, range| bound.permits_destination(range))?;
                }
            }
        }
        Ok(())
    }

    fn retain_ids(&mut self, source: &SettingSource, uids: &mut Option<IdList>, gids: &mut Option<IdList>) {
        let facts = self.facts;
        for (ids, kind) in [(uids, IdKind::User), (gids, IdKind::Group)] {
            let Some(ids) = ids else { continue };
            let place = ids.place().to_owned();
            self.retain((source, &place), &mut ids.forms, kind.grant_key(), |bound, form| {
                bound.permits_id(form, kind, facts)
            });
        }
    }

    fn retain_containers(&mut self, source: &SettingSource, request: &mut ContainerExclude) {
        // Without facts, or with too many containers, it is an error later.
        let Some(pod) = self.facts.map(|facts| &facts.pod) else { return };
        if pod.all_containers().count() > MAX_CONTAINERS {
            return;
        }
        let Some(mut list) = request.containers.take() else { return };
        self.retain((source, &list.place), &mut list.forms, "containers", |bound, form| {
            bound.permits_container(request, form, pod)
        });
        request.containers = Some(list);
    }

    /// Returns the bounds that permit all UIDs of a rule, or else all ports that it names.
    fn permitting_rule(&self, rule: &PortRule) -> Option<String> {
        let by_id = |form| self.permitting("uids", |bound| bound.permits_id(form, IdKind::User, self.facts));
        let by_range = |range| self.permitting("ports", |bound| bound.permits_ports(range));
        let by_ports = || match &rule.ports {
            Ports::All => Some(vec![by_range(None)?]),
            Ports::List(ranges) if ranges.is_empty() => None,
            Ports::List(ranges) => ranges.iter().map(|range| by_range(Some(range))).collect(),
        };
        let mut by: Vec<String> = rule.uids.forms.iter().map(by_id).collect::<Option<_>>().or_else(by_ports)?;
        by.dedup();
        Some(by.join(", "))
    }

    /// Returns the first bound that permits an item; `key` is the key of a grant that can.
    fn permitting(&self, key: &str, permits: impl Fn(&Bound<'_>) -> bool) -> Option<String> {
        let Some(allow) = self.allow else {
            return permits(&Bound::Default(&self.total)).then(|| DEFAULT_PLACE.to_owned());
        };
        let permits = |it: &&AppliedGrant<'_>| it.grant.permits_everything() || permits(&Bound::Grant(it));
        let AppliedGrant { grant, .. } = self.grants.iter().find(permits)?;
        let key = if grant.permits_everything() { String::new() } else { format!(".{key}") };
        Some(format!("{}{key} ({})", grant.place, allow.set_by))
    }

    /// Records the decision about an item at a place and returns whether it is permitted: `by` this bound.
    fn record(
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
    fn retain<T: Display>(
        &mut self,
        from: (&SettingSource, &str),
        items: &mut Vec<T>,
        key: &str,
        permits: impl Fn(&Bound<'_>, &T) -> bool,
    ) {
        items.retain(|item| self.decide(from, item, key, |bound| permits(bound, item)));
    }

    fn retain_ports(&mut self, source: &SettingSource, list: &ItemList, ports: &mut Ports) -> Result<(), Error> {
        let parse = ("ports", values::parse_requested_ports as ListParser<PortRange>);
        self.retain_or_all(source, list, parse, ports, |bound, range| bound.permits_ports(range))
    }

    /// Keeps the items that are permitted. `list` is as it was written: without a permitted `*`, its other items count.
    fn retain_or_all<T: Display>(
        &mut self,
        source: &SettingSource,
        list: &ItemList,
        (key, parse): (&str, ListParser<T>),
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
        let Some(allow) = self.allow else { return format!("{DEFAULT_PLACE} ({})", default_of(key)) };
        let key = if key == RULES { IdKind::User.grant_key() } else { key };
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

/// Returns what the default bounds permit under a key of a grant.
fn default_of(key: &str) -> String {
    match key {
        RULES => format!("UIDs, or ports: {}; {}", default_of("uids"), default_of("ports")),
        "containers" => "names, and patterns other than *".to_owned(),
        "ports" => {
            format!("no *, at most {DEFAULT_PORTS} ports in a range, and {DEFAULT_RANGES} times as many in total")
        }
        "ip_ranges" | "resolvers" => {
            let all = if key == "ip_ranges" { "no *, " } else { "" };
            format!("{all}CIDRs of at least /{DEFAULT_PREFIX}, and {DEFAULT_RANGES} of this size in total")
        }
        _ => format!("no *, and at most {DEFAULT_IDS} IDs in a range"),
    }
}
