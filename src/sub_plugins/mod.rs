//! Sub-plugins: facts of a pod and configuration → contributions to one traffic policy.
//!
//! Everything here is a pure function: no file, no socket, no kernel. That is why the order of
//! the blocks can't matter, and why what will happen to a pod can be told without touching it.
//!
//! | file | what it knows |
//! |---|---|
//! | `sub_plugin`, `note` | the blocks of a chain, and what of the pod's wishes is not heard |
//! | `unknown_annotations` | which annotations look like Istio's or detour's and are neither |
//! | `decision` | who is redirected |
//! | `origin` | where each setting and exclusion comes from |
//! | `istio_redirect` | the redirection, from four layers of `settings`: the block, `proxy_container`, `args.cni`, `istio_annotations` |
//! | `uid_exclude`, `dns_exclude`, `asked` | who is exempt |
//! | `ids`, `rules`, `destinations`, `ports`, `protocols`, `ranges`, `interfaces`, `groups` | how each kind of list is written |
//! | `scene`, `annotation`, `parse_bool` | what lists and flags are resolved against |

mod asked;
mod context;
mod decision;
mod destinations;
mod dns_exclude;
mod ids;
mod istio_redirect;
mod note;
mod rules;
#[cfg(test)]
mod scenario;
mod secondary;
mod settings;
mod sub_plugin;
mod uid_exclude;
mod unknown_annotations;
mod values;

pub use decision::{ConsideredRule, Decision, SkipReason, considered};
pub use ids::namespace_uids;
pub use note::{Note, Severity};
pub use note::{Origins, SettingSource};
pub use secondary::own_addresses;
pub use sub_plugin::SubPlugin;
pub use unknown_annotations::{Ignored, ignored};

use crate::cni::{Block, BlockReader, Code, Error, at_most};
use crate::pod::{Container, Facts, PROXY_CONTAINER, Pod};
use crate::policy::{Conflict, Exclusion, Interception, Policy};
use asked::RequestedExclusions;
use context::{ListAuthor, PodContext, SOURCES};
use dns_exclude::DnsExclude;
use istio_redirect::OverridingLayers;
use serde_json::{Map, Value};
use settings::Settings;
use std::collections::BTreeSet;
use std::net::IpAddr;
use sub_plugin::{ParsedChain, argument};
use uid_exclude::UidExclude;

/// Everything that a chain knows of one pod.
#[derive(Clone, Copy)]
pub struct ChainInput<'a> {
    /// The pod and its namespace; `None` where the attachment has no source of facts.
    pub facts: Option<&'a Facts>,
    /// `args.cni`: the pod's blocks, by sub-plugin.
    pub args: &'a Map<String, Value>,
    /// What `resolv-conf` can mean.
    pub resolvers: Resolvers<'a>,
    /// The GID of a group of the host's `/etc/group`.
    pub group_id: &'a dyn Fn(&str) -> Option<u32>,
}

/// Addresses of DNS servers, by where they are known from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resolvers<'a> {
    /// `runtimeConfig.dns.servers`: the pod's, as the runtime has them.
    pub runtime: &'a [IpAddr],
    /// `kubernetes.cluster_dns`.
    pub cluster_dns: &'a [IpAddr],
    /// `prevResult.dns.nameservers`.
    pub previous: &'a [IpAddr],
}

/// What a chain asks for, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainOutput {
    /// All sub-plugins' contributions together.
    pub policy: Policy,
    /// Whether the pod is redirected by this chain.
    pub decision: Decision,
    /// Where what is in the policy comes from.
    pub origins: Origins,
    /// What should be said to people, none twice.
    pub notes: Vec<Note>,
}

/// Which facts a chain can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeededFacts {
    /// The pod's.
    pub pod: bool,
    /// Its namespace's.
    pub namespace: bool,
}

/// Which facts the sub-plugins in `chain` can use.
#[must_use]
pub fn wants(chain: &[Block]) -> NeededFacts {
    let own: BTreeSet<_> = chain.iter().filter_map(SubPlugin::of).collect();
    let namespace = own.contains(&SubPlugin::UidExclude) || own.contains(&SubPlugin::DnsExclude);
    NeededFacts { pod: !own.is_empty(), namespace }
}

/// The blocks that are not a sub-plugin's, each with its `type`, in their order.
pub fn executables(chain: &[Block]) -> impl Iterator<Item = (&str, &Block)> {
    let foreign = chain.iter().filter(|block| SubPlugin::of(block).is_none());
    foreign.filter_map(|block| Some((block.keys.get("type")?.as_str()?, block)))
}

/// Checks the blocks of `chain` and of `args`, each alone and together, as far as that is possible without a pod
/// and without the host's groups.
///
/// # Errors
/// A block is wrong, or two contradict each other ([`Code::InvalidConfig`]); the message has its path and the
/// accepted values.
pub fn check(chain: &[Block], args: &Map<String, Value>) -> Result<(), Error> {
    let group_id = |_: &str| Some(0);
    let chain = ParsedChain::parse(chain, &group_id)?;
    // What a pod with a sidecar and nothing of its own gets.
    let pod = Pod {
        containers: vec![Container { name: PROXY_CONTAINER.to_owned(), ..Container::default() }],
        ..Pod::default()
    };
    let facts = Facts { pod, namespace: None };
    let input = ChainInput { facts: Some(&facts), args, resolvers: Resolvers::default(), group_id: &group_id };
    interception(&chain, &input, &mut Vec::new(), &mut Vec::new())?;
    if chain.uid_excludes.iter().any(|entry| entry.pod_overrides) {
        argument(SubPlugin::UidExclude, &input, |r| UidExclude::parse(r, ListAuthor::Pod))?;
    }
    if chain.dns_excludes.iter().any(|entry| entry.pod_overrides) {
        argument(SubPlugin::DnsExclude, &input, |r| DnsExclude::parse(r, ListAuthor::Pod))?;
    }
    Ok(())
}

/// Runs the sub-plugins in `chain`; executables are passed over.
///
/// # Errors
/// A block, an annotation or what they refer to is wrong ([`Code::InvalidConfig`]); the message
/// names its place and what is accepted. A block is read whatever the pod; the pod's annotations
/// and `args.cni` only where the pod has a sidecar.
pub fn run(chain: &[Block], input: &ChainInput<'_>) -> Result<ChainOutput, Error> {
    let chain = ParsedChain::parse(chain, input.group_id)?;
    let (mut notes, mut origins) = (Vec::new(), Origins::default());
    let mut decision = decide(&chain, input)?;
    let pod = input.facts.map(|facts| &facts.pod);
    let mut policy = Policy { dns_captured_elsewhere: pod.map(settings::captures_dns), ..Policy::default() };
    if pod.is_none_or(|pod| !pod.host_network && pod.proxy().is_some()) {
        let mut silenced = pod.is_some_and(settings::wants_none);
        if decision == Decision::Redirect {
            policy.interception = interception(&chain, input, &mut origins.settings, &mut notes)?;
            silenced = policy.interception == Interception::Off;
        }
        if silenced {
            decision = Decision::LeaveAlone(SkipReason::ModeNone);
        } else {
            origins.exclusions = exclusions(&chain, input, &policy, &mut notes)?;
            policy.exclusions = origins.exclusions.iter().map(|(exclusion, _)| exclusion.clone()).collect();
        }
        notes.extend(note::unheard(&chain, input));
        notes.extend(note::misspelled(input));
    }
    let policy = policy.union(&Policy::default()).map_err(internal)?;
    Ok(ChainOutput { policy, decision, origins, notes: note::each_once(notes) })
}

fn decide(chain: &ParsedChain, input: &ChainInput<'_>) -> Result<Decision, Error> {
    let decision = input.facts.map(|facts| decision::decide(&facts.pod));
    match (chain.redirects.first(), decision) {
        (Some(_), Some(decision)) => Ok(decision),
        (Some(entry), None) => {
            let name = SubPlugin::IstioRedirect.name();
            let msg = format!("{}: {name} needs facts of the pod: {SOURCES}", entry.path);
            Err(Error::new(Code::InvalidConfig, msg))
        }
        (None, Some(decision @ Decision::LeaveAlone(SkipReason::HostNetwork | SkipReason::NoProxy))) => Ok(decision),
        (None, _) => Ok(Decision::LeaveAlone(SkipReason::NotInChain)),
    }
}

fn interception(
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    origins: &mut Vec<(&'static str, SettingSource)>,
    notes: &mut Vec<Note>,
) -> Result<Interception, Error> {
    let Some((pod, proxy)) = input.facts.and_then(|facts| Some((&facts.pod, facts.pod.proxy()?))) else {
        return Ok(Interception::Unsaid);
    };
    if chain.redirects.is_empty() {
        return Ok(Interception::Unsaid);
    }
    // Whatever one block leaves to pods, another one pins.
    let pod_overrides = chain.redirects.iter().all(|entry| entry.pod_overrides);
    let parse = |r: &BlockReader<'_>| Settings::parse(r, input.group_id);
    let args = if pod_overrides { argument(SubPlugin::IstioRedirect, input, parse)? } else { None };
    let above = OverridingLayers { pod, proxy, args, annotations: pod_overrides };
    istio_redirect::interception(&chain.redirects, above, origins, notes)
}

fn exclusions(
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    policy: &Policy,
    notes: &mut Vec<Note>,
) -> Result<Vec<(Exclusion, SettingSource)>, Error> {
    let (facts, resolvers) = (input.facts, input.resolvers);
    let scene = PodContext { facts, resolvers, redirect: policy.redirect() };
    let (mut exclusions, mut count) = (Vec::new(), 0);
    let mut add = |source: SettingSource, asked: RequestedExclusions| {
        count += asked.count;
        exclusions.extend(asked.exclusions.into_iter().map(|exclusion| (exclusion, source.clone())));
        let pod = facts.map_or_else(|| "the pod".to_owned(), |facts| format!("pod {}", context::name_of(&facts.pod)));
        at_most(asked::MOST, "exclusions", &format!("{pod}: all that is excluded, up to {source}"), count)
    };
    for entry in &chain.uid_excludes {
        add(SettingSource::Configuration(entry.path.clone()), entry.own.exclusions(&scene, notes)?)?;
        if entry.pod_overrides {
            let own = SubPlugin::UidExclude;
            if let Some(asked) = argument(own, input, |r| UidExclude::parse(r, ListAuthor::Pod))? {
                add(SettingSource::Argument(own), asked.exclusions(&scene, notes)?)?;
            }
            for (source, asked) in facts.map(UidExclude::annotated).transpose()?.into_iter().flatten() {
                add(source, asked.exclusions(&scene, notes)?)?;
            }
        }
    }
    for entry in &chain.dns_excludes {
        add(SettingSource::Configuration(entry.path.clone()), entry.own.exclusions(&scene, notes)?)?;
        if entry.pod_overrides {
            let own = SubPlugin::DnsExclude;
            if let Some(asked) = argument(own, input, |r| DnsExclude::parse(r, ListAuthor::Pod))? {
                add(SettingSource::Argument(own), asked.exclusions(&scene, notes)?)?;
            }
            if let Some((source, asked)) = facts.map(|facts| entry.own.annotated(facts)).transpose()?.flatten() {
                add(source, asked.exclusions(&scene, notes)?)?;
            }
        }
    }
    Ok(exclusions)
}

fn internal(conflict: Conflict) -> Error {
    Error::new(Code::Internal, format!("contributions that agree could not be united: {conflict}"))
}

#[cfg(test)]
mod tests;
