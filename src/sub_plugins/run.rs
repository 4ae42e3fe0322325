//! Evaluation of a sub-plugin chain: blocks and facts of a pod become one traffic policy.
//!
//! For a running pod, each sub-plugin that fails, for example because of an invalid annotation, keeps its part of the
//! pod's policy within the bounds; the parts of the others follow the configuration ([`SeparatePolicy`]).

use super::ambient::{self, is_meshed};
use super::bounds::{DnsPorts, PodBounds};
use super::chain::{ChainInput, ParsedBlock, ParsedChain};
use super::context::{self, FACT_SOURCES, ListAuthor, PodContext, RequestedExclusions, Resolvers};
use super::decision::{self, Decision, SkipReason};
use super::exclude::Exclude;
use super::istio_redirect::{self, OverridingLayers};
use super::sub_plugin::{DecidedRequest, Note, Origins, SettingSource, SubPlugin};
use super::{guarded, ignored, settings};
use crate::cni::{Block, Bounds, Code, Error, OutsideBounds, at_most};
use crate::pod::well_known::PROXY_CONTAINER;
use crate::pod::{Container, Facts, Pod};
use crate::policy::{ContainerExclusion, Exclusion, Interception, Policy};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashSet;
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

/// Checks the blocks of `chain` and of `args`, each alone and together, as completely as possible without a pod.
/// `has_facts` is whether a source of facts is configured.
///
/// # Errors
/// A block is invalid, two contradict each other, or one needs facts that no source provides
/// ([`Code::InvalidConfig`]); the message contains the path and the accepted values.
pub fn check(
    chain: &[Block],
    bounds: &Bounds,
    args: &Map<String, Value>,
    group_id: &dyn Fn(&str) -> Option<u32>,
    has_facts: bool,
) -> Result<(), Error> {
    if !has_facts {
        // Whether a pod has a resolver depends on its call.
        let resolvers = Resolvers { runtime: &[IpAddr::V4(Ipv4Addr::LOCALHOST)], ..Resolvers::default() };
        return run(chain, &ChainInput { facts: None, args, bounds, resolvers, group_id }).map(drop);
    }
    let chain = ParsedChain::parse(chain, bounds, group_id)?;
    // The redirection of a pod with a sidecar as Istio injects it, and without annotations.
    let id = Some(1337);
    let proxy =
        Container { name: PROXY_CONTAINER.to_owned(), run_as_user: id, run_as_group: id, ..Container::default() };
    let facts = Facts { pod: Pod { containers: vec![proxy], ..Pod::default() }, namespace: None };
    let input = ChainInput { facts: Some(&facts), args, bounds, resolvers: Resolvers::default(), group_id };
    interception(&chain, &input, &mut Vec::new(), &mut Vec::new())?;
    for sub_plugin in Exclude::SUB_PLUGINS {
        if chain.excludes(sub_plugin).any(|block| block.pod_overrides) {
            input.excluded(sub_plugin)?;
        }
    }
    Ok(())
}

/// Runs the sub-plugins in `chain` and skips executables.
///
/// # Errors
/// As [`explain`], and of [`ChainOutput::rejection`].
pub(super) fn run(chain: &[Block], input: &ChainInput<'_>) -> Result<ChainOutput, Error> {
    let output = explain(chain, input)?;
    match output.rejection(input.bounds) {
        Some(error) => Err(error),
        None => Ok(output),
    }
}

/// Runs the sub-plugins in `chain` and skips executables. Requests outside the bounds are without effect, even if an ADD
/// would fail.
///
/// # Errors
/// A block, an annotation or an object that they refer to is invalid ([`Code::InvalidConfig`]); the message contains the
/// place and the accepted values. Blocks are always parsed; the pod's annotations and `args.cni` only if the pod has a
/// sidecar.
pub fn explain(chain: &[Block], input: &ChainInput<'_>) -> Result<ChainOutput, Error> {
    let (output, failures) = evaluate(&ParsedChain::parse(chain, input.bounds, input.group_id)?, input)?;
    failures.0.into_iter().next().map_or(Ok(output), |(_, error)| Err(error))
}

impl ChainOutput {
    /// Returns the requests outside the bounds.
    pub fn outside(&self) -> impl Iterator<Item = &DecidedRequest> {
        self.origins.requests.iter().filter(|request| !request.permitted)
    }

    /// Returns the first request outside the bounds if an ADD fails because of it.
    #[must_use]
    pub fn rejected(&self, bounds: &Bounds) -> Option<&DecidedRequest> {
        self.outside().next().filter(|_| bounds.outside == OutsideBounds::Reject)
    }

    /// Returns the error of an ADD because of this request.
    #[must_use]
    pub fn rejection(&self, bounds: &Bounds) -> Option<Error> {
        self.rejected(bounds).map(DecidedRequest::error)
    }
}

/// Runs each sub-plugin in `chain` separately, for a running pod with the policy `applied`: one that fails does not affect
/// the others, and keeps its part of that policy. Requests outside the bounds are without effect.
#[must_use]
pub fn run_separately(chain: &[Block], input: &ChainInput<'_>, applied: &Policy) -> SeparatePolicy {
    let evaluated = ParsedChain::parse(chain, input.bounds, input.group_id).and_then(|chain| {
        let (output, failures) = evaluate(&chain, input)?;
        Ok(SeparatePolicy::new(output, failures, &chain, input, applied))
    });
    // A block is invalid, or facts are missing.
    let unchanged = |error| SeparatePolicy { policy: applied.clone(), errors: vec![error], ignored: None };
    evaluated.unwrap_or_else(unchanged)
}

/// Runs all sub-plugins. The output lacks the contributions of those that fail.
fn evaluate(chain: &ParsedChain, input: &ChainInput<'_>) -> Result<(ChainOutput, Failures), Error> {
    let (mut notes, mut origins, mut failures) = (Vec::new(), Origins::default(), Failures::default());
    let mut decision = decide(chain, input)?;
    let is_ambient = input.enrolled_by().is_some();
    let dns_captured_elsewhere = match input.facts {
        Some(facts) if is_ambient => ambient::captures_dns(&facts.pod),
        facts => facts.map(|facts| settings::captures_dns(&facts.pod)),
    };
    let mut policy = Policy { dns_captured_elsewhere, ambient: is_ambient, ..Policy::default() };
    if input.facts.is_none_or(|facts| is_meshed(&facts.pod, facts.namespace.as_ref())) {
        if decision == Decision::Redirect {
            let interception = interception(chain, input, &mut origins.settings, &mut notes);
            policy.interception = failures.or_default(SubPlugin::IstioRedirect, interception);
        }
        let guard = guarded::guard(chain, input, &policy.interception, &mut notes);
        policy.guard = failures.or_default(SubPlugin::MeshGuard, guard);
        // Without istio-redirect, whether `NONE` counts is unknown: another attachment's redirection can be pinned. If it
        // counts there, the union of both policies has no rules; without a redirection, exclusions have no effect.
        if policy.interception == Interception::Off {
            decision = Decision::LeaveAlone(SkipReason::ModeNone);
        } else {
            let (facts, resolvers) = (input.facts, input.resolvers);
            let context = PodContext { facts, resolvers, redirect: policy.redirect(), reads_annotations: true };
            let mut count = 0;
            for sub_plugin in Exclude::SUB_PLUGINS {
                let requested = requested(sub_plugin, chain, input, &context, &mut count, &mut notes);
                let requested = failures.or_default(sub_plugin, requested);
                origins.exclusions.extend(requested.exclusions);
                origins.containers.extend(requested.containers);
                origins.requests.extend(requested.requests);
            }
            policy.exclusions = origins.exclusions.iter().map(|(exclusion, _)| exclusion.clone()).collect();
            policy.containers = origins.containers.iter().map(|(exclusion, _)| exclusion.clone()).collect();
        }
        notes.extend(ignored::unused_requests(chain, input));
        notes.extend(ignored::misspelled_arguments(input));
    }
    let mut seen = HashSet::new();
    notes.retain(|note| seen.insert(note.clone()));
    Ok((ChainOutput { policy: policy.normalized(), decision, origins, notes }, failures))
}

fn decide(chain: &ParsedChain, input: &ChainInput<'_>) -> Result<Decision, Error> {
    if let Some(enrolled_by) = input.enrolled_by() {
        return Ok(Decision::LeaveAlone(SkipReason::Ambient(enrolled_by)));
    }
    let skip_reason = input.facts.map(|facts| decision::pod_skip_reason(&facts.pod));
    match (chain.redirects.first(), skip_reason) {
        (Some(_), Some(skip_reason)) => Ok(skip_reason.map_or(Decision::Redirect, Decision::LeaveAlone)),
        (Some(block), None) => {
            let name = SubPlugin::IstioRedirect.name();
            let msg = format!("{}: {name} needs facts of the pod: {FACT_SOURCES}", block.path);
            Err(Error::new(Code::InvalidConfig, msg).naming_network())
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
    let args = if pod_overrides { input.settings()? } else { None };
    let overriding = OverridingLayers { pod, proxy, args, pod_overrides };
    istio_redirect::interception(&chain.redirects, overriding, origins, notes)
}

/// Returns what the blocks of an excluding sub-plugin request and, as far as they allow it, the pod. `count` is the number
/// of the pod's exclusions, of all sub-plugins.
fn requested(
    sub_plugin: SubPlugin,
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    context: &PodContext<'_>,
    count: &mut usize,
    notes: &mut Vec<Note>,
) -> Result<Origins, Error> {
    let (mut origins, mut bounds) = (Origins::default(), chain.bounds.of_pod(sub_plugin, context));
    let mut add = |source, requested| add_requested(&mut origins, count, context, &source, requested);
    for block in chain.excludes(sub_plugin) {
        let of_block = PodContext { reads_annotations: block.pod_overrides, ..*context };
        let (requested, of_node) = (permitted(block, &mut bounds)?, of_node(block)?);
        let requested = requested.exclusions(&of_block, notes).map_err(Error::naming_network)?;
        add(SettingSource::Configuration(block.path.clone()), requested)?;
        if !block.pod_overrides {
            continue;
        }
        if let Some(mut argument) = input.excluded(sub_plugin)? {
            let source = SettingSource::Argument(sub_plugin);
            bounds.apply(&mut argument, &source, &of_node)?;
            add(source, argument.exclusions(context, notes)?)?;
        }
        for (source, mut annotation) in
            input.facts.map(|facts| of_node.annotated(facts)).transpose()?.unwrap_or_default()
        {
            bounds.apply(&mut annotation, &source, &of_node)?;
            let requested = annotation.exclusions(context, notes);
            add(source.clone(), requested.map_err(|error| source.named_in(error))?)?;
        }
    }
    notes.extend(bounds.decided.iter().filter(|it| !it.permitted).map(|it| Note::warning(it.reason())));
    origins.requests = bounds.decided;
    Ok(origins)
}

/// Returns what a block requests; of a definition's author, what is within the bounds.
fn permitted<'a>(block: &'a ParsedBlock<Exclude>, bounds: &mut PodBounds<'_>) -> Result<Cow<'a, Exclude>, Error> {
    let mut permitted = Cow::Borrowed(&block.parsed);
    if block.is_request {
        let source = SettingSource::Configuration(block.path.clone());
        bounds.apply(permitted.to_mut(), &source, &*of_node(block)?)?;
    }
    Ok(permitted)
}

/// Returns the block to which the requests of a pod add: the node's. A definition's block adds to one with the defaults.
fn of_node(block: &ParsedBlock<Exclude>) -> Result<Cow<'_, Exclude>, Error> {
    if !block.is_request {
        return Ok(Cow::Borrowed(&block.parsed));
    }
    let default = Block { path: block.path.clone(), keys: Map::new() };
    let parsed = Exclude::parse(block.parsed.sub_plugin(), &default.reader(), ListAuthor::Administrator)?;
    Ok(parsed.map_or(Cow::Borrowed(&block.parsed), Cow::Owned))
}

fn add_requested(
    origins: &mut Origins,
    count: &mut usize,
    context: &PodContext<'_>,
    source: &SettingSource,
    requested: RequestedExclusions,
) -> Result<(), Error> {
    *count += requested.count;
    if *count > context::MAX_EXCLUSIONS {
        let pod = |facts: &Facts| format!("pod {}", context::name_of(&facts.pod));
        let pod = context.facts.map_or_else(|| "the pod".to_owned(), pod);
        let place = format!("{pod}: exclusions of all sources, up to {source}");
        return at_most(context::MAX_EXCLUSIONS, "exclusions", &place, *count).map_err(Error::naming_pod);
    }
    let exclusions = requested.exclusions.into_iter().map(|exclusion| (exclusion, source.clone()));
    origins.exclusions.extend(exclusions);
    let containers = requested.containers.into_iter().map(|exclusion| (exclusion, source.clone()));
    origins.containers.extend(containers);
    Ok(())
}

/// The sub-plugins that failed, with their errors, in the order of evaluation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Failures(Vec<(SubPlugin, Error)>);

impl Failures {
    /// Returns the contribution of a sub-plugin; none if it failed.
    fn or_default<T: Default>(&mut self, sub_plugin: SubPlugin, result: Result<T, Error>) -> T {
        result.unwrap_or_else(|error| {
            self.0.push((sub_plugin, error));
            T::default()
        })
    }
}

/// The policy of a running pod, whose sub-plugins were evaluated separately.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeparatePolicy {
    /// The policy that the pod gets.
    pub policy: Policy,
    /// Why an ADD would fail.
    pub errors: Vec<Error>,
    /// The first request outside the bounds that an ADD would ignore.
    pub ignored: Option<String>,
}

impl SeparatePolicy {
    fn new(
        output: ChainOutput,
        failures: Failures,
        chain: &ParsedChain,
        input: &ChainInput<'_>,
        applied: &Policy,
    ) -> Self {
        let rejection = output.rejection(input.bounds);
        let ignored = output.outside().next().filter(|_| rejection.is_none());
        let ignored = ignored.map(|request| format!("{}, ignored", request.reason()));
        let mut policy = output.policy;
        for (sub_plugin, _) in &failures.0 {
            if *sub_plugin == SubPlugin::IstioRedirect {
                policy.interception.clone_from(&applied.interception);
            } else if *sub_plugin == SubPlugin::MeshGuard {
                policy.guard.clone_from(&applied.guard);
            } else {
                keep(*sub_plugin, chain, input, applied, &mut policy);
            }
        }
        // As the result of a chain, so that it compares with an applied policy.
        let policy = policy.normalized();
        Self { policy, errors: failures.0.into_iter().map(|(_, error)| error).chain(rejection).collect(), ignored }
    }
}

/// Adds what a failed sub-plugin keeps of the applied policy: what it could request for this pod within the bounds, so
/// that a pod's author gains nothing by an invalid annotation. The applied exclusions do not name their sub-plugin.
fn keep(sub_plugin: SubPlugin, chain: &ParsedChain, input: &ChainInput<'_>, applied: &Policy, policy: &mut Policy) {
    let blocks = || chain.excludes(sub_plugin);
    let is_overridable = blocks().any(|block| block.pod_overrides);
    let argument = if is_overridable { input.excluded(sub_plugin).ok().flatten() } else { None };
    let may_request = |exclusion: &Exclusion| {
        let mut requesters = blocks().map(|block| &block.parsed).chain(&argument);
        requesters.any(|requester| requester.may_request(exclusion))
    };
    let redirect = policy.redirect().cloned();
    let (facts, resolvers) = (input.facts, input.resolvers);
    let context = PodContext { facts, resolvers, redirect: redirect.as_ref(), reads_annotations: true };
    let mut bounds = chain.bounds.of_pod(sub_plugin, &context);
    let own = blocks().map(|block| {
        let of_block = PodContext { reads_annotations: block.pod_overrides, ..context };
        permitted(block, &mut bounds)?.exclusions(&of_block, &mut Vec::new())
    });
    let own: Result<Vec<RequestedExclusions>, Error> = own.collect();
    // If a block fails, what it has requested is unknown.
    let is_unknown = own.is_err();
    let dns = |exclusion: &Exclusion| {
        let is_blocks = || blocks().any(|block| !block.is_request && block.parsed.may_request(exclusion));
        let ports = || if is_blocks() { DnsPorts::OfBlock } else { DnsPorts::OfArgument };
        (sub_plugin == SubPlugin::DnsExclude).then(ports)
    };
    let kept = |exclusion: &&Exclusion| {
        may_request(exclusion) && (is_unknown || bounds.covers(exclusion, dns(exclusion), &context))
    };
    policy.exclusions.extend(applied.exclusions.iter().filter(kept).cloned());
    if sub_plugin == SubPlugin::ContainerExclude {
        let kept = |exclusion: &&ContainerExclusion| is_unknown || bounds.covers_container(exclusion);
        policy.containers.extend(applied.containers.iter().filter(kept).cloned());
    }
    for own in own.unwrap_or_default() {
        policy.exclusions.extend(own.exclusions);
        policy.containers.extend(own.containers);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::{Scenario, chain};
    use crate::pod::well_known::{
        EXCLUDE_CONTAINERS, EXCLUDE_DESTINATION_RANGES, EXCLUDE_DNS, EXCLUDE_OUTBOUND_PORTS, EXCLUDE_PORTS_FOR_UIDS,
        EXCLUDE_UIDS,
    };
    use serde_json::json;

    fn scenario(pinned: &str) -> Scenario {
        let block = |kind: &str| json!({"type": kind, "pod_overrides": kind != pinned});
        let kinds = ["istio-redirect", "uid-exclude", "dns-exclude", "container-exclude", "destination-exclude"];
        chain(kinds.map(block).to_vec().into())
    }

    /// A valid value and an invalid one of an annotation of each sub-plugin.
    const ANNOTATIONS: [(&str, &str, &str, &str); 5] = [
        ("istio-redirect", EXCLUDE_OUTBOUND_PORTS, "25", "x"),
        ("uid-exclude", EXCLUDE_UIDS, "7", "x"),
        ("dns-exclude", EXCLUDE_DNS, "10.0.0.1", "x"),
        ("container-exclude", EXCLUDE_CONTAINERS, "app", "X"),
        ("destination-exclude", EXCLUDE_DESTINATION_RANGES, "192.0.2.0/24", "x"),
    ];

    /// With every annotation of [`ANNOTATIONS`].
    fn annotated(pinned: &str) -> Scenario {
        ANNOTATIONS.iter().fold(scenario(pinned), |scenario, (_, key, valid, _)| scenario.annotated(key, valid))
    }

    #[test]
    fn an_invalid_annotation_does_not_keep_what_is_pinned_for_another_sub_plugin() {
        let applied = annotated("").output().policy;
        for (pinned, ..) in ANNOTATIONS {
            let expected = annotated(pinned).output().policy;
            assert_ne!(expected, applied, "{pinned}");
            for (_, key, _, invalid) in ANNOTATIONS.iter().filter(|(kind, ..)| *kind != pinned) {
                let broken = annotated(pinned).annotated(key, invalid);
                let separate = broken.run_separately(&applied);
                assert_eq!(separate.errors.iter().map(|error| error.msg.clone()).collect::<Vec<_>>(), [broken.error()]);
                assert_eq!(separate.policy, expected, "{pinned} {key}");
            }
        }
    }

    #[test]
    fn without_an_error_nothing_of_the_applied_policy_remains() {
        let separate = scenario("").run_separately(&annotated("").output().policy);
        assert_eq!((separate.errors, separate.policy), (Vec::new(), scenario("").output().policy));
    }

    #[test]
    fn dns_exclude_keeps_only_its_own_ports() {
        let rules = |rules| scenario("").annotated(EXCLUDE_PORTS_FOR_UIDS, rules);
        let applied = rules("tcp:443:1000; udp:53:1000").output().policy;
        let broken = scenario("uid-exclude").annotated(EXCLUDE_DNS, "x").run_separately(&applied).policy;
        assert_eq!(broken.exclusions, rules("udp:53:1000").output().policy.exclusions);
        let with_port = json!({"dns-exclude": {"ports": [443]}});
        let broken = scenario("uid-exclude").args(with_port).annotated(EXCLUDE_DNS, "x");
        assert_eq!(broken.run_separately(&applied).policy.exclusions, applied.exclusions);
    }
}
