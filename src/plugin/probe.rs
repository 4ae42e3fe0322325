//! What the kernel accepts: rules that are tried in a new network namespace, which is removed with the thread that created
//! it; and why an attempt to change the rules of a pod failed.

use crate::cni::{Block, Code, Error, RuleFormat};
use crate::firewall::nfnetlink::{NfError, NfSocket};
use crate::firewall::rule::Family;
use crate::firewall::{self, CreatedTables, LiveRuleset, Ruleset, Transaction};
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

/// Why an attempt failed.
pub(super) enum Failure {
    /// Another process changed the rules concurrently.
    Retry,
    /// The kernel does not support the rule format.
    OtherFormat(Error),
    /// An error that a retry does not solve.
    Fatal(Error),
}

impl Failure {
    pub(super) fn of(error: NfError, transaction: Option<&Transaction<'_>>) -> Self {
        match error {
            NfError::Changed => Self::Retry,
            _ => Self::Fatal(refused(&error, transaction)),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Fatal(error)
    }
}

/// Returns whether the kernel does not support the iptables format: it has no nft_compat, lacks an extension, or the
/// pod has a user namespace of its own (`owner_check` of net/netfilter/xt_owner.c: EINVAL). A refused transaction
/// changes nothing, so trying it is the cheapest probe.
pub(super) fn is_unsupported(error: &NfError, transaction: &Transaction<'_>) -> bool {
    let errnos = [Errno::EINVAL, Errno::ENOENT, Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT];
    let NfError::Refused { errno, index } = error else { return false };
    // Exclusions are the same in both formats.
    errnos.contains(errno) && index.map_or(!transaction.iptables.is_empty(), |index| transaction.is_in_iptables(index))
}

/// Returns whether the kernel refuses a step because another process owns the table: its flag `owner` reserves it for one
/// socket (net/netfilter/nf_tables_api.c, `nft_table_lookup`).
pub(super) const fn is_owned(error: &NfError) -> bool {
    matches!(error, NfError::Refused { errno: Errno::EPERM, .. })
}

/// Returns the error of a transaction, with the rule that the kernel refused and what the kernel must support.
pub(super) fn refused(error: &NfError, transaction: Option<&Transaction<'_>>) -> Error {
    if matches!(error, NfError::TooMany(_) | NfError::TooManyDeletions { .. }) {
        return firewall::failed("change", *error);
    }
    let (lacks_resources, is_owned) = (error.is_lack_of_resources(), is_owned(error));
    let step = match (error, transaction) {
        (NfError::Refused { index: Some(index), .. }, Some(plan)) if !lacks_resources => Some((plan, *index)),
        _ => None,
    };
    let mut place = step.and_then(|(plan, index)| plan.describe(index)).unwrap_or_else(|| "the pod's rules".to_owned());
    let next = if lacks_resources {
        ": the node lacks memory or file descriptors; the runtime should retry"
    } else if matches!(error, NfError::Socket(Errno::EPERM)) {
        "; check that the plugin runs with CAP_NET_ADMIN"
    } else if is_owned {
        ": a process in the pod owns the table (flag owner); end that process, or delete the pod"
    } else if step.is_some_and(|(plan, index)| plan.is_about_containers(index)) {
        place.insert_str(0, "container-exclude: ");
        "; check that the node's kernel can match control groups (cgroup v2 in nft_socket: CONFIG_NFT_SOCKET and \
         CONFIG_SOCK_CGROUP_DATA, 5.13 or later), or remove container-exclude"
    } else if step.map_or(transaction.is_none_or(|plan| !plan.iptables.is_empty()), |(plan, i)| plan.is_in_iptables(i))
    {
        "; check that the node's kernel has nf_tables with nft_compat and the xtables extensions (rule format nftables \
         needs only nf_tables)"
    } else {
        "; check that the node's kernel has nf_tables with nat, redirect, tproxy and ct expressions for family inet (5.2 \
         or later)"
    };
    let code = match (lacks_resources, is_owned) {
        (true, _) => Code::TryAgain,
        (false, true) => Code::ForeignRules,
        (false, false) => Code::KernelRefused,
    };
    Error::new(code, format!("{place}: {error}{next}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel has no expression `socket`, or can't compare control groups.
    #[test]
    fn a_kernel_that_refuses_control_groups_is_named_and_no_other_format_is_tried() {
        let container = ContainerExclusion { name: "vault".to_owned(), scope: ContainerScope::All };
        let interception = Interception::On(Box::default());
        let policy = Policy { containers: [container].into(), interception, ..Policy::default() };
        let (live, nothing) = (LiveRuleset::default(), Ruleset::default());
        let desired = Ruleset::of(&policy, &Family::ALL);
        let plan = RuleFormat::Iptables.plan(&live, &nothing, &desired, &CreatedTables::default());
        let has_cgroup = |index: &usize| plan.describe(*index).is_some_and(|text| text.contains("socket cgroupv2"));
        let index = (0..plan.len()).find(has_cgroup);
        for errno in [Errno::ENOENT, Errno::EOPNOTSUPP] {
            let error = NfError::Refused { index, errno };
            assert!(!is_unsupported(&error, &plan));
            let error = refused(&error, Some(&plan));
            assert_eq!(error.code, Code::KernelRefused);
            for word in ["container-exclude", "socket cgroupv2 level 1 @excluded-all", "cgroup v2", "nft_socket"] {
                assert!(error.msg.contains(word), "{error}");
            }
            assert!(is_unsupported(&NfError::Refused { index: Some(0), errno }, &plan));
        }
    }
    #[test]
    fn a_missing_capability_is_named_and_a_lack_of_memory_is_temporary() {
        let error = refused(&NfError::Socket(Errno::EPERM), None);
        assert!(error.code == Code::KernelRefused && error.msg.contains("CAP_NET_ADMIN"), "{error}");
        for errno in [Errno::ENOMEM, Errno::ENOBUFS] {
            assert_eq!(refused(&NfError::Refused { index: None, errno }, None).code, Code::TryAgain);
        }
    }
}
