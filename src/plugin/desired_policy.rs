//! What a call asks for: from the configuration, the caller and the pod's facts to one policy and
//! the reason for it. `explain` asks the same of a pod that no call was made for.
//!
//! What the kernel should hold for a policy.

use crate::cni::{Block, Error, NetConf, Request, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{LiveRuleset, MOST_RULES, Ruleset, most_rules};
use crate::netns::{Fixtures, Routing};
use crate::pod::{Facts, PodRef};
use crate::policy::{InterceptionMode, Ipv6, Policy, Redirect};
use crate::sub_plugins::{ChainInput, Ignored, Resolvers, Severity, SkipReason, SubPlugin, skip_reason};
use crate::trusted_file::read_text;
use crate::{cluster, sub_plugins};
use std::cell::OnceCell;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// The policy that a call asks for, and a line that says why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DesiredPolicy {
    pub(super) policy: Policy,
    pub(super) why: String,
    /// What the pod asks for in vain.
    pub(super) ignored: Vec<Ignored>,
}

impl DesiredPolicy {
    fn nothing(why: &SkipReason) -> Self {
        Self { policy: Policy::default(), why: why.to_string(), ignored: Vec::new() }
    }
}

/// Facts of a pod, with its namespace where the flag says so.
pub(super) type FactsOf<'a> = dyn Fn(&PodRef, bool) -> Result<Facts, Error> + 'a;

/// Finds out, with facts from where the configuration says.
///
/// # Errors
/// As [`wish_by`].
pub(super) fn wish(request: &Request, conf: &NetConf) -> Result<DesiredPolicy, Error> {
    let pod = request.args.pod.as_ref();
    match cluster::source(&conf.kubernetes) {
        Some(source) => wish_by(pod, conf, Some(&|pod: &PodRef, with_namespace| source.facts(pod, with_namespace))),
        None => wish_by(pod, conf, None),
    }
}

/// Finds out, with facts from `facts`; `None` where there are none to be had. Namespaces that are
/// excluded and the agent's own pods need none.
///
/// # Errors
/// Facts can't be known, or the configuration or the pod asks for something impossible.
pub(super) fn wish_by(
    pod: Option<&PodRef>,
    conf: &NetConf,
    facts: Option<&FactsOf<'_>>,
) -> Result<DesiredPolicy, Error> {
    if let Some(why) = pod.and_then(|pod| skip_reason(conf, pod)) {
        return Ok(DesiredPolicy::nothing(&why));
    }
    match (pod, facts) {
        (None, Some(_)) => Ok(DesiredPolicy::nothing(&SkipReason::NoPodName)),
        (None, None) => {
            let redirect = |block: &&Block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect);
            let others: Vec<Block> = conf.chain.iter().filter(|block| !redirect(block)).cloned().collect();
            run(&others, conf, None)
        }
        (Some(_), None) => run(&conf.chain, conf, None),
        (Some(pod), Some(facts)) => {
            let wants = sub_plugins::wants(&conf.chain);
            if !wants.pod {
                return Ok(DesiredPolicy::nothing(&SkipReason::NoSubPlugin));
            }
            run(&conf.chain, conf, Some(&facts(pod, wants.namespace)?))
        }
    }
}

/// Returns whether `pod` is the node agent's, which must start before anything else works.
pub(super) fn is_agent(conf: &NetConf, pod: &PodRef) -> bool {
    skip_reason(conf, pod) == Some(SkipReason::AgentPod)
}

fn run(blocks: &[Block], conf: &NetConf, facts: Option<&Facts>) -> Result<DesiredPolicy, Error> {
    let output = output(blocks, conf, facts).map_err(|error| about(facts, error))?;
    for note in output.notes {
        match note.severity {
            Severity::Info => tracing::info!("{}", note.text),
            Severity::Warning => tracing::warn!("{}", note.text),
        }
    }
    let ignored = facts.map(sub_plugins::ignored).unwrap_or_default();
    Ok(DesiredPolicy { policy: output.policy, why: output.decision.to_string(), ignored })
}

/// The error with the pod's name, where it has none yet.
fn about(facts: Option<&Facts>, error: Error) -> Error {
    match facts.map(|facts| format!("{}/{}", facts.pod.namespace, facts.pod.name)) {
        Some(pod) if !error.msg.contains(&pod) => Error { msg: format!("pod {pod}: {}", error.msg), ..error },
        _ => error,
    }
}

/// What `blocks` make of a pod under this configuration.
///
/// # Errors
/// As [`chain::run`].
pub fn output(blocks: &[Block], conf: &NetConf, facts: Option<&Facts>) -> Result<sub_plugins::ChainOutput, Error> {
    let (runtime, previous) = (conf.runtime_nameservers(), conf.prev_result_nameservers());
    let resolvers = Resolvers { runtime: &runtime, cluster_dns: &conf.kubernetes.cluster_dns, previous: &previous };
    let groups = OnceCell::new();
    let group_id = |name: &str| groups.get_or_init(|| host_groups(&conf.group_file)).get(name).copied();
    let input = ChainInput { facts, args: &conf.args, resolvers, group_id: &group_id };
    sub_plugins::run(blocks, &input)
}

/// A group file is larger only by mistake: directories of many users are served by NSS.
const LARGEST_GROUPS: u64 = 4 << 20;

/// The GIDs of the host's groups by name (group(5): `name:password:GID:members`); the first of a name counts.
fn host_groups(file: &Path) -> HashMap<String, u32> {
    let groups = read_text(file, LARGEST_GROUPS).unwrap_or_default();
    let group = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    groups.lines().rev().filter_map(group).collect()
}

/// The rules that `policy` needs in a pod that has IPv6 or not. Istio's rules for IPv4 are there
/// in every pod.
pub(super) fn ruleset(policy: &Policy, ip6: bool) -> Ruleset {
    Ruleset::of(policy, if writes_ip6(policy, ip6) { &Family::ALL } else { &[Family::Ip] })
}

/// Whether the rules for `policy` are there for IPv6 too, in a pod that has IPv6 or not.
pub(super) fn writes_ip6(policy: &Policy, ip6: bool) -> bool {
    match policy.redirect().map(|redirect| redirect.ipv6) {
        Some(Ipv6::On) => true,
        Some(Ipv6::Off) => false,
        Some(Ipv6::Auto) | None => ip6,
    }
}

/// What the rules for `policy` need of the namespace besides themselves.
pub(super) fn fixtures(policy: &Policy, ip6: bool) -> Fixtures {
    let Some(redirect) = policy.redirect() else { return Fixtures::default() };
    let ip6 = writes_ip6(policy, ip6);
    let (mark, table) = (redirect.inbound_tproxy_mark, redirect.inbound_tproxy_route_table);
    let tproxy = redirect.inbound_interception_mode == InterceptionMode::Tproxy;
    let routing = tproxy.then_some(Routing { mark, table, ip6 }).into_iter().collect();
    Fixtures { proxy_loopback: ip6, routing }
}

/// What the rules of detour's native tables needed besides themselves, if no record tells: the routing of the mark
/// that they give to packets. Without a policy rule for it, the routing table is the default one.
///
/// # Errors
/// The kernel does not list the policy rules.
pub(super) fn unrecorded_fixtures(live: &LiveRuleset) -> Result<Fixtures, Error> {
    let mut routing = BTreeSet::new();
    if let Some(mark) = live.native_tproxy_mark() {
        routing = Routing::of_mark(mark)?;
        if routing.is_empty() {
            routing.insert(Routing { mark, table: Redirect::default().inbound_tproxy_route_table, ip6: true });
        }
    }
    Ok(Fixtures { proxy_loopback: live.redirects_natively(), routing })
}

/// Refuses a policy that needs too many rules. Only an ADD does: what is there can always be repaired and
/// removed.
///
/// # Errors
/// [`Code::InvalidConfig`](crate::cni::Code::InvalidConfig) with `place` and both numbers.
pub(super) fn check_rules(policy: &Policy, place: &str) -> Result<(), Error> {
    let what = format!("{place}: the redirection with all exclusions, for IPv4 and IPv6");
    at_most(MOST_RULES, "rules", &what, most_rules(policy))
}
