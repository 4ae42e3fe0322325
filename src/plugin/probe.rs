//! Tries rules in a new network namespace, which is removed with the thread that created it.

use crate::cni::{Block, RuleFormat};
use crate::firewall::nfnetlink::{NfError, NfSocket};
use crate::firewall::rule::Family;
use crate::firewall::{CreatedTables, LiveRuleset, Ruleset};
use crate::policy::{
    ContainerExclusion, ContainerScope, DnsCapture, Exclusion, Guard, IdRange, Interception, Policy, Redirect,
    TrafficOwner,
};
use crate::sub_plugins::guards;
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use std::thread;

/// Returns the rule format for a node whose kernel refuses the default one and accepts the other: without it, every ADD
/// would begin with a transaction that the kernel refuses. `None` if the default works, or if that is unknown.
#[must_use]
pub fn needed_format() -> Option<RuleFormat> {
    let tried = in_new_netns(|| {
        let refused = try_redirection(RuleFormat::Iptables).err()?;
        try_redirection(RuleFormat::Nftables).ok().map(|()| refused)
    });
    let refused = tried.ok().flatten()?;
    tracing::info!("redirections of new pods get the rule format nftables: the kernel refuses iptables: {refused}");
    Some(RuleFormat::Nftables)
}

/// Tries the rules of excluded containers in a new network namespace.
///
/// # Errors
/// [`NOT_PERMITTED`] if this process can't create one; otherwise why the kernel refuses them.
pub fn try_container_rules() -> Result<(), String> {
    in_new_netns(|| {
        let of = |scope| ContainerExclusion { name: "a".to_owned(), scope };
        let containers = [of(ContainerScope::All), of(ContainerScope::Dns)].into();
        try_rules(RuleFormat::Iptables, &Policy { containers, ..Policy::default() })
    })?
}

/// Returns why the kernel refuses the rules of the guard, which need modules for `reject` and `fib`; `None` if the chain has
/// no guard, or this process can't create a network namespace to try them in.
#[must_use]
pub fn refused_guard(chain: &[Block]) -> Option<String> {
    guards(chain).next()?;
    let tried = in_new_netns(|| {
        let guard = Some(Guard::Sidecar(Box::default()));
        try_rules(RuleFormat::Iptables, &Policy { guard, ..Policy::default() })
    });
    tried.and_then(|tried| tried).err().filter(|why| why != NOT_PERMITTED)
}

/// The error if this process can't create a network namespace.
pub const NOT_PERMITTED: &str = "EPERM";

/// Calls `work` in a new network namespace, with a thread that ends afterwards.
///
/// # Errors
/// [`NOT_PERMITTED`], or why there is no new network namespace.
pub fn in_new_netns<T: Send + 'static>(work: fn() -> T) -> Result<T, String> {
    #![expect(clippy::disallowed_methods, reason = "the one place that creates a namespace")]
    let thread = thread::Builder::new().spawn(move || match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => Ok(work()),
        Err(Errno::EPERM) => Err(NOT_PERMITTED.to_owned()),
        Err(errno) => Err(errno.to_string()),
    });
    let thread = thread.map_err(|error| format!("can't start a thread: {error}"))?;
    thread.join().unwrap_or_else(|_| Err("the thread panicked".to_owned()))
}

/// Tries the rules of a pod with every feature except excluded containers. Call it in a new network namespace.
///
/// # Errors
/// Why the kernel refuses them.
pub fn try_redirection(rule_format: RuleFormat) -> Result<(), String> {
    let redirect = Redirect { dns: DnsCapture::All, drop_invalid: true, ..Redirect::default() };
    let exclusion = Exclusion {
        owner: TrafficOwner::Uid(IdRange::one(1337)),
        destination: None,
        protocol: None,
        ports: Vec::new(),
    };
    let policy = Policy {
        interception: Interception::On(Box::new(redirect)),
        exclusions: [exclusion].into(),
        ..Policy::default()
    };
    try_rules(rule_format, &policy)
}

/// Commits the rules of a policy, and reads them back.
fn try_rules(rule_format: RuleFormat, policy: &Policy) -> Result<(), String> {
    let desired = Ruleset::of(policy, &Family::ALL);
    let mut socket = NfSocket::open().map_err(|error| error.to_string())?;
    let live = LiveRuleset::read(&mut socket).map_err(|error| error.to_string())?;
    let plan = rule_format.plan(&live, &Ruleset::default(), &desired, &CreatedTables::default());
    plan.commit(&mut socket, &live).map_err(|error| match error {
        NfError::Refused { index: Some(index), .. } => {
            format!("{}: {error}", plan.describe(index).unwrap_or_default())
        }
        other => other.to_string(),
    })?;
    let live = LiveRuleset::read(&mut socket).map_err(|error| error.to_string())?;
    match rule_format.drift(&live, &desired).first() {
        Some(drift) => Err(format!("the committed rules read back differently: {drift}")),
        None => Ok(()),
    }
}
