//! Evaluation of a sub-plugin chain: blocks and facts of a pod become one traffic policy.

use super::ambient::{self, is_meshed};
use super::bounds::PodBounds;
use super::chain::{ChainInput, ParsedBlock, ParsedChain};
use super::context::{self, FACT_SOURCES, ListAuthor, PodContext, RequestedExclusions, Resolvers};
use super::context::{Requests, StartedWith};
use super::decision::{self, Decision, SkipReason};
use super::exclude::Exclude;
use super::istio_redirect::{self, OverridingLayers};
use super::sub_plugin::{DecidedRequest, Note, Origins, SettingSource, SubPlugin};
use super::{guarded, ignored, settings};
use crate::cni::{Block, Bounds, Code, Error, OutsideBounds, at_most};
use crate::pod::well_known::PROXY_CONTAINER;
use crate::pod::{Container, Facts, Pod};
use crate::policy::{Interception, Policy};
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
    interception(&chain, &input, true, &mut Requests::Strict, &mut Vec::new(), &mut Vec::new())?;
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
    evaluate(&ParsedChain::parse(chain, input.bounds, input.group_id)?, input, None, &mut Requests::Strict)
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

/// Runs the sub-plugins in `chain` for a running pod. A request of the pod or its namespace that is invalid or outside the
/// bounds counts as absent. What began with the pod stays, whatever the pod says now; its lists are evaluated. Without
/// `with_requests`, all requests count as absent.
///
/// # Errors
/// A block is invalid, or facts are missing.
pub fn run_again(
    chain: &[Block],
    input: &ChainInput<'_>,
    started: StartedWith,
    with_requests: bool,
) -> Result<RepeatedOutput, Error> {
    let chain = ParsedChain::parse(chain, input.bounds, input.group_id)?;
    let mut absent = Vec::new();
    let mut requests = if with_requests { Requests::Lenient(&mut absent) } else { Requests::Ignored };
    let output = evaluate(&chain, input, Some(started), &mut requests)?;
    absent.extend(output.outside().map(DecidedRequest::error));
    let unguarded = output.notes.iter().any(|note| note.text == guarded::UNGUARDED);
    Ok(RepeatedOutput { policy: output.policy, absent, unguarded })
}

/// The result of a sub-plugin chain for a running pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RepeatedOutput {
    /// The policy of a new pod without the requests that count as absent.
    pub policy: Policy,
    /// Why requests count as absent: the errors of a new pod's ADD.
    pub absent: Vec<Error>,
    /// Whether the pod has no guard because of its init container istio-init.
    pub unguarded: bool,
}

/// Runs all sub-plugins. `running` is what a running pod has; `None` for a new pod.
fn evaluate(
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    running: Option<StartedWith>,
    requests: &mut Requests<'_>,
) -> Result<ChainOutput, Error> {
    let (mut notes, mut origins) = (Vec::new(), Origins::default());
    let mut decision = match running {
        Some(StartedWith { redirection: true, .. }) => Decision::Redirect,
        Some(_) => Decision::LeaveAlone(SkipReason::NotInChain),
        None => decide(chain, input)?,
    };
    let is_ambient = input.is_ambient(running);
    let dns_captured_elsewhere = match input.facts {
        Some(facts) if is_ambient => ambient::captures_dns(&facts.pod),
        facts => facts.map(|facts| settings::captures_dns(&facts.pod)),
    };
    let mut policy = Policy { dns_captured_elsewhere, ambient: is_ambient, ..Policy::default() };
    let is_meshed = is_ambient || input.facts.is_none_or(|facts| is_meshed(&facts.pod, facts.namespace.as_ref()));
    if is_meshed || running.is_some_and(|running| running.redirection) {
        if decision == Decision::Redirect {
            let is_new = running.is_none();
            policy.interception = interception(chain, input, is_new, requests, &mut origins.settings, &mut notes)?;
        }
        policy.guard = guarded::guard(chain, input, &policy.interception, running, requests, &mut notes)?;
        // Without istio-redirect, whether `NONE` counts is unknown: another attachment's redirection can be pinned. If it
        // counts there, the union of both policies has no rules; without a redirection, exclusions have no effect.
        if policy.interception == Interception::Off {
            decision = Decision::LeaveAlone(SkipReason::ModeNone);
        } else {
            let (facts, resolvers) = (input.facts, input.resolvers);
            let context = PodContext { facts, resolvers, redirect: policy.redirect(), reads_annotations: true };
            let mut count = 0;
            for sub_plugin in Exclude::SUB_PLUGINS {
                let requested = requested(sub_plugin, chain, input, &context, &mut count, requests, &mut notes)?;
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
    Ok(ChainOutput { policy: policy.normalized(), decision, origins, notes })
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
    is_new: bool,
    requests: &mut Requests<'_>,
    origins: &mut Vec<(&'static str, SettingSource)>,
    notes: &mut Vec<Note>,
) -> Result<Interception, Error> {
    let Some(pod) = input.facts.map(|facts| &facts.pod) else { return Ok(Interception::Unset) };
    let unknown = Container::default();
    // The redirection of a running pod, whose proxy may be unknown, keeps what the proxy decides.
    let Some(proxy) = pod.proxy().or_else(|| (!is_new).then_some(&unknown)) else { return Ok(Interception::Unset) };
    if chain.redirects.is_empty() {
        return Ok(Interception::Unset);
    }
    // One block without `pod_overrides` pins the redirection of all blocks.
    let pod_overrides = requests.count() && chain.redirects.iter().all(|block| block.pod_overrides);
    let args = if pod_overrides { requests.or_absent(input.settings())? } else { None };
    let overriding = OverridingLayers { pod, proxy, args, pod_overrides, is_new };
    istio_redirect::interception(&chain.redirects, overriding, requests, origins, notes)
}

/// Returns what the blocks of an excluding sub-plugin request and, as far as they allow it, the pod. `count` is the number
/// of the pod's exclusions, of all sub-plugins.
fn requested(
    sub_plugin: SubPlugin,
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    context: &PodContext<'_>,
    count: &mut usize,
    requests: &mut Requests<'_>,
    notes: &mut Vec<Note>,
) -> Result<Origins, Error> {
    let (mut origins, mut bounds) = (Origins::default(), chain.bounds.of_pod(sub_plugin, context));
    let mut add = |source, requested| add_requested(&mut origins, count, context, &source, requested);
    for block in chain.excludes(sub_plugin) {
        let of_block = PodContext { reads_annotations: block.pod_overrides, ..*context };
        // A block can mean something that only the pod or its namespace defines.
        let own = permitted(block, &mut bounds).and_then(|own| own.exclusions(&of_block, notes));
        let own = own.map_err(Error::naming_network);
        let own = own.and_then(|own| add(SettingSource::Configuration(block.path.clone()), own));
        requests.or_absent(own)?;
        if !block.pod_overrides || !requests.count() {
            continue;
        }
        let of_node = of_node(block)?;
        let argument =
            input.excluded(sub_plugin).map(|argument| Some((SettingSource::Argument(sub_plugin), argument?)));
        let annotations = input.facts.map(|facts| of_node.annotated(facts)).unwrap_or_default();
        for request in argument.transpose().into_iter().chain(annotations) {
            let added = request.and_then(|(source, mut request)| {
                bounds.apply(&mut request, &source, &of_node)?;
                let requested = request.exclusions(context, notes);
                add(source.clone(), requested.map_err(|error| source.named_in(error))?)
            });
            requests.or_absent(added)?;
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
    let total = *count + requested.count;
    if total > context::MAX_EXCLUSIONS {
        let pod = |facts: &Facts| format!("pod {}", context::name_of(&facts.pod));
        let pod = context.facts.map_or_else(|| "the pod".to_owned(), pod);
        let place = format!("{pod}: exclusions of all sources, up to {source}");
        return at_most(context::MAX_EXCLUSIONS, "exclusions", &place, total);
    }
    *count = total;
    let exclusions = requested.exclusions.into_iter().map(|exclusion| (exclusion, source.clone()));
    origins.exclusions.extend(exclusions);
    let containers = requested.containers.into_iter().map(|exclusion| (exclusion, source.clone()));
    origins.containers.extend(containers);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::{Scenario, chain};
    use super::*;
    use crate::pod::well_known::{
        EXCLUDE_CONTAINERS, EXCLUDE_DESTINATION_RANGES, EXCLUDE_DNS, EXCLUDE_OUTBOUND_PORTS, EXCLUDE_UIDS,
    };
    use serde_json::json;

    fn scenario() -> Scenario {
        let kinds = ["istio-redirect", "uid-exclude", "dns-exclude", "container-exclude", "destination-exclude"];
        chain(kinds.map(|kind| json!({ "type": kind })).to_vec().into())
    }

    /// A valid value and an invalid one of an annotation of each sub-plugin.
    const ANNOTATIONS: [(&str, &str, &str, &str); 5] = [
        ("istio-redirect", EXCLUDE_OUTBOUND_PORTS, "25", "x"),
        ("uid-exclude", EXCLUDE_UIDS, "7", "x"),
        ("dns-exclude", EXCLUDE_DNS, "10.0.0.1", "x"),
        ("container-exclude", EXCLUDE_CONTAINERS, "app", "X"),
        ("destination-exclude", EXCLUDE_DESTINATION_RANGES, "192.0.2.0/24", "x"),
    ];

    fn annotated(but: &str) -> Scenario {
        let others = ANNOTATIONS.iter().filter(|(kind, ..)| *kind != but);
        others.fold(scenario(), |scenario, (_, key, valid, _)| scenario.annotated(key, valid))
    }

    #[test]
    fn an_invalid_request_of_a_running_pod_counts_as_absent() {
        for (kind, key, _, invalid) in ANNOTATIONS {
            let broken = annotated("").annotated(key, invalid);
            let repeated = broken.run_again(true, true);
            assert_eq!(repeated.absent.iter().map(|error| error.msg.clone()).collect::<Vec<_>>(), [broken.error()]);
            assert_eq!(repeated.policy, annotated(kind).output().policy, "{kind}");
        }
        let whole = annotated("");
        assert_eq!(
            (whole.run_again(true, true).policy, whole.run_again(true, true).absent),
            (whole.output().policy, vec![])
        );
        assert_eq!(whole.run_again(true, false).policy, scenario().output().policy, "without requests");
    }

    #[test]
    fn what_a_running_pod_says_about_its_sidecar_does_not_end_its_redirection() {
        let plain = scenario().output().policy;
        for (key, value) in [("sidecar.istio.io/inject", "false"), ("sidecar.istio.io/interceptionMode", "NONE")] {
            assert_eq!(scenario().annotated(key, value).run_again(true, true).policy, plain, "{key}");
        }
        let without_status = |pod: &mut Pod| pod.annotations.clear();
        let unknown_proxy = |pod: &mut Pod| pod.containers.clear();
        let ambient = |pod: &mut Pod| drop(pod.labels.insert("istio.io/dataplane-mode".into(), "ambient".into()));
        for change in [without_status, unknown_proxy, ambient] {
            let repeated = scenario().pod(change).pod(|pod| pod.annotations.clear()).run_again(true, true);
            assert_eq!(repeated.policy.interception, plain.interception);
        }
        let not_begun = scenario().annotated(EXCLUDE_UIDS, "7").run_again(false, true).policy;
        assert_eq!((not_begun.interception, not_begun.exclusions.len()), (Interception::Unset, 1));
    }
}
