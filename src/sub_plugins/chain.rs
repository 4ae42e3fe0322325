//! Evaluation of a sub-plugin chain: blocks and facts of a pod become one traffic policy.

use super::container_exclude::ContainerExclude;
use super::context::{self, FACT_SOURCES, ListAuthor, PodContext, RequestedExclusions, Resolvers};
use super::decision::{self, Decision, SkipReason};
use super::dns_exclude::DnsExclude;
use super::istio_redirect::{self, OverridingLayers};
use super::note::{Note, without_repetitions};
use super::parsed_chain::{ChainInput, ParsedChain};
use super::separate::{Failures, SeparatePolicy};
use super::settings::Settings;
use super::sub_plugin::{Origins, SettingSource, SubPlugin};
use super::uid_exclude::UidExclude;
use super::{ignored, settings};
use crate::cni::{Block, BlockReader, Code, Error, at_most};
use crate::pod::well_known::PROXY_CONTAINER;
use crate::pod::{Container, Facts, Pod};
use crate::policy::{Conflict, ContainerExclusion, Exclusion, Interception, Policy};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

/// The result of a sub-plugin chain for one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainOutput {
    /// The contributions of all sub-plugins, united.
    pub policy: Policy,
    /// Whether this chain redirects the pod.
    pub decision: Decision,
    /// The sources of settings and exclusions.
    pub origins: Origins,
    /// Notes for the log and for `explain`, without repetitions.
    pub notes: Vec<Note>,
}

/// The facts that a sub-plugin chain needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeededFacts {
    /// Whether it needs the pod.
    pub pod: bool,
    /// Whether it needs the pod's namespace.
    pub namespace: bool,
}

/// Returns which facts the sub-plugins in `chain` need.
#[must_use]
pub fn wants(chain: &[Block]) -> NeededFacts {
    let sub_plugins: BTreeSet<_> = chain.iter().filter_map(SubPlugin::of).collect();
    let namespace = sub_plugins.iter().any(|sub_plugin| *sub_plugin != SubPlugin::IstioRedirect);
    NeededFacts { pod: !sub_plugins.is_empty(), namespace }
}

/// Returns the blocks of executables, each with its `type`, in order.
pub fn executables(chain: &[Block]) -> impl Iterator<Item = (&str, &Block)> {
    let blocks = chain.iter().filter(|block| SubPlugin::of(block).is_none());
    blocks.filter_map(|block| Some((block.keys.get("type")?.as_str()?, block)))
}

/// Checks the blocks of `chain` and of `args`, each alone and together, as completely as possible without a pod.
/// `has_facts` is whether a source of facts is configured.
///
/// # Errors
/// A block is invalid, two contradict each other, or one needs facts that no source provides
/// ([`Code::InvalidConfig`]); the message contains the path and the accepted values.
pub fn check(
    chain: &[Block],
    args: &Map<String, Value>,
    group_id: &dyn Fn(&str) -> Option<u32>,
    has_facts: bool,
) -> Result<(), Error> {
    if !has_facts {
        // Whether a pod has a resolver depends on its call.
        let resolvers = Resolvers { runtime: &[IpAddr::V4(Ipv4Addr::LOCALHOST)], ..Resolvers::default() };
        return run(chain, &ChainInput { facts: None, args, resolvers, group_id }).map(drop);
    }
    let chain = ParsedChain::parse(chain, group_id)?;
    // The redirection of a pod with a sidecar and without annotations.
    let proxy = Container { name: PROXY_CONTAINER.to_owned(), ..Container::default() };
    let facts = Facts { pod: Pod { containers: vec![proxy], ..Pod::default() }, namespace: None };
    let input = ChainInput { facts: Some(&facts), args, resolvers: Resolvers::default(), group_id };
    interception(&chain, &input, &mut Vec::new(), &mut Vec::new())?;
    if chain.uid_excludes.iter().any(|block| block.pod_overrides) {
        input.parsed_argument(SubPlugin::UidExclude, |r| UidExclude::parse(r, ListAuthor::Pod))?;
    }
    if chain.dns_excludes.iter().any(|block| block.pod_overrides) {
        input.parsed_argument(SubPlugin::DnsExclude, |r| DnsExclude::parse(r, ListAuthor::Pod))?;
    }
    if chain.container_excludes.iter().any(|block| block.pod_overrides) {
        input.parsed_argument(SubPlugin::ContainerExclude, |r| ContainerExclude::parse(r, ListAuthor::Pod))?;
    }
    Ok(())
}

/// Runs the sub-plugins in `chain` and skips executables.
///
/// # Errors
/// A block, an annotation or an object that they refer to is invalid ([`Code::InvalidConfig`]); the message contains the
/// place and the accepted values. Blocks are always parsed; the pod's annotations and `args.cni` only if the pod has a
/// sidecar.
pub fn run(chain: &[Block], input: &ChainInput<'_>) -> Result<ChainOutput, Error> {
    let (output, failures) = evaluate(&ParsedChain::parse(chain, input.group_id)?, input)?;
    failures.into_first().map_or(Ok(output), Err)
}

/// Runs each sub-plugin in `chain` separately, for a running pod: one that fails does not affect the others.
#[must_use]
pub fn run_separately(chain: &[Block], input: &ChainInput<'_>) -> SeparatePolicy {
    let evaluated = ParsedChain::parse(chain, input.group_id).and_then(|chain| {
        let (output, failures) = evaluate(&chain, input)?;
        Ok(SeparatePolicy::new(output.policy, failures, chain, input))
    });
    evaluated.unwrap_or_else(SeparatePolicy::invalid)
}

/// Runs all sub-plugins. The output lacks the contributions of those that fail.
fn evaluate(chain: &ParsedChain, input: &ChainInput<'_>) -> Result<(ChainOutput, Failures), Error> {
    let (mut notes, mut origins, mut failures) = (Vec::new(), Origins::default(), Failures::default());
    let mut decision = decide(chain, input)?;
    let pod = input.facts.map(|facts| &facts.pod);
    let mut policy = Policy { dns_captured_elsewhere: pod.map(settings::captures_dns), ..Policy::default() };
    if pod.is_none_or(|pod| !pod.host_network && pod.proxy().is_some()) {
        if decision == Decision::Redirect {
            let interception = interception(chain, input, &mut origins.settings, &mut notes);
            policy.interception = failures.or_default(SubPlugin::IstioRedirect, interception);
        }
        // Without istio-redirect, whether `NONE` counts is unknown: another attachment's redirection can be pinned. If it
        // counts there, the union of both policies has no rules; without a redirection, exclusions have no effect.
        if policy.interception == Interception::Off {
            decision = Decision::LeaveAlone(SkipReason::ModeNone);
        } else {
            let redirect = policy.redirect();
            let (facts, resolvers) = (input.facts, input.resolvers);
            let context = PodContext { facts, resolvers, redirect, reads_annotations: true };
            let mut count = 0;
            let of_uids = uid_exclusions(chain, input, &context, &mut count, &mut notes);
            origins.exclusions = failures.or_default(SubPlugin::UidExclude, of_uids);
            let of_dns = dns_exclusions(chain, input, &context, &mut count, &mut notes);
            origins.exclusions.extend(failures.or_default(SubPlugin::DnsExclude, of_dns));
            let containers = excluded_containers(chain, input, &context, &mut notes);
            origins.containers = failures.or_default(SubPlugin::ContainerExclude, containers);
            policy.exclusions = origins.exclusions.iter().map(|(exclusion, _)| exclusion.clone()).collect();
            policy.containers.extend(origins.containers.iter().map(|(exclusion, _)| exclusion.clone()));
        }
        notes.extend(ignored::unused_requests(chain, input));
        notes.extend(ignored::misspelled_arguments(input));
    }
    let policy = policy.union(&Policy::default()).map_err(internal)?;
    Ok((ChainOutput { policy, decision, origins, notes: without_repetitions(notes) }, failures))
}

fn decide(chain: &ParsedChain, input: &ChainInput<'_>) -> Result<Decision, Error> {
    let skip_reason = input.facts.map(|facts| decision::pod_skip_reason(&facts.pod));
    match (chain.redirects.first(), skip_reason) {
        (Some(_), Some(skip_reason)) => Ok(skip_reason.map_or(Decision::Redirect, Decision::LeaveAlone)),
        (Some(block), None) => {
            let name = SubPlugin::IstioRedirect.name();
            let msg = format!("{}: {name} needs facts of the pod: {FACT_SOURCES}", block.path);
            Err(Error::new(Code::InvalidConfig, msg))
        }
        (None, Some(Some(reason @ (SkipReason::HostNetwork | SkipReason::NoProxy)))) => {
            Ok(Decision::LeaveAlone(reason))
        }
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
        return Ok(Interception::Unset);
    };
    if chain.redirects.is_empty() {
        return Ok(Interception::Unset);
    }
    // One block without `pod_overrides` pins the redirection of all blocks.
    let pod_overrides = chain.redirects.iter().all(|block| block.pod_overrides);
    let parse = |r: &BlockReader<'_>| Settings::of_block(r, input.group_id);
    let args = if pod_overrides { input.parsed_argument(SubPlugin::IstioRedirect, parse)? } else { None };
    let overriding = OverridingLayers { pod, proxy, args, pod_overrides };
    istio_redirect::interception(&chain.redirects, overriding, origins, notes)
}

fn uid_exclusions(
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    context: &PodContext<'_>,
    count: &mut usize,
    notes: &mut Vec<Note>,
) -> Result<Vec<(Exclusion, SettingSource)>, Error> {
    let mut exclusions = Vec::new();
    let mut add = |source, requested| add_exclusions(&mut exclusions, count, context, source, requested);
    for block in &chain.uid_excludes {
        add(SettingSource::Configuration(block.path.clone()), block.parsed.exclusions(context, notes)?)?;
        if block.pod_overrides {
            let sub_plugin = SubPlugin::UidExclude;
            if let Some(argument) = input.parsed_argument(sub_plugin, |r| UidExclude::parse(r, ListAuthor::Pod))? {
                add(SettingSource::Argument(sub_plugin), argument.exclusions(context, notes)?)?;
            }
            for (source, annotation) in input.facts.map(UidExclude::annotated).transpose()?.into_iter().flatten() {
                add(source, annotation.exclusions(context, notes)?)?;
            }
        }
    }
    Ok(exclusions)
}

fn dns_exclusions(
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    context: &PodContext<'_>,
    count: &mut usize,
    notes: &mut Vec<Note>,
) -> Result<Vec<(Exclusion, SettingSource)>, Error> {
    let mut exclusions = Vec::new();
    let mut add = |source, requested| add_exclusions(&mut exclusions, count, context, source, requested);
    for block in &chain.dns_excludes {
        let of_block = PodContext { reads_annotations: block.pod_overrides, ..*context };
        add(SettingSource::Configuration(block.path.clone()), block.parsed.exclusions(&of_block, notes)?)?;
        if block.pod_overrides {
            let sub_plugin = SubPlugin::DnsExclude;
            if let Some(argument) = input.parsed_argument(sub_plugin, |r| DnsExclude::parse(r, ListAuthor::Pod))? {
                add(SettingSource::Argument(sub_plugin), argument.exclusions(context, notes)?)?;
            }
            let annotated = input.facts.map(|facts| block.parsed.annotated(facts)).transpose()?.flatten();
            if let Some((source, annotation)) = annotated {
                add(source, annotation.exclusions(context, notes)?)?;
            }
        }
    }
    Ok(exclusions)
}

/// Adds what one source requests. `count` is the number of the pod's exclusions, of all sub-plugins.
fn add_exclusions(
    exclusions: &mut Vec<(Exclusion, SettingSource)>,
    count: &mut usize,
    context: &PodContext<'_>,
    source: SettingSource,
    requested: RequestedExclusions,
) -> Result<(), Error> {
    *count += requested.count;
    if *count > context::MAX_EXCLUSIONS {
        let pod = |facts: &Facts| format!("pod {}", context::name_of(&facts.pod));
        let pod = context.facts.map_or_else(|| "the pod".to_owned(), pod);
        let place = format!("{pod}: exclusions of all sources, up to {source}");
        return at_most(context::MAX_EXCLUSIONS, "exclusions", &place, *count);
    }
    exclusions.extend(requested.exclusions.into_iter().map(|exclusion| (exclusion, source.clone())));
    Ok(())
}

fn excluded_containers(
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    context: &PodContext<'_>,
    notes: &mut Vec<Note>,
) -> Result<Vec<(ContainerExclusion, SettingSource)>, Error> {
    let mut containers = Vec::new();
    let mut add = |source: SettingSource, requested: Vec<ContainerExclusion>| {
        containers.extend(requested.into_iter().map(|exclusion| (exclusion, source.clone())));
    };
    for block in &chain.container_excludes {
        add(SettingSource::Configuration(block.path.clone()), block.parsed.exclusions(context, notes)?);
        if block.pod_overrides {
            let sub_plugin = SubPlugin::ContainerExclude;
            let argument = input.parsed_argument(sub_plugin, |r| ContainerExclude::parse(r, ListAuthor::Pod))?;
            if let Some(argument) = argument {
                add(SettingSource::Argument(sub_plugin), argument.exclusions(context, notes)?);
            }
            if let Some((source, annotation)) = input.facts.map(ContainerExclude::annotated).transpose()?.flatten() {
                add(source, annotation.exclusions(context, notes)?);
            }
        }
    }
    Ok(containers)
}

fn internal(conflict: Conflict) -> Error {
    Error::new(Code::Internal, format!("union of consistent contributions failed: {conflict}"))
}
