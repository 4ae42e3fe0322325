//! Why an attempt to change the rules failed.

use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::NfError;
use crate::firewall::{self, Transaction};
use nix::errno::Errno;

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
    if error.is_lack_of_resources() {
        let msg =
            format!("the pod's rules: {error}: the node lacks memory or file descriptors; the runtime should retry");
        return Error::new(Code::TryAgain, msg);
    }
    if matches!(error, NfError::Socket(Errno::EPERM)) {
        let msg = format!("the pod's rules: {error}; check that the plugin runs with CAP_NET_ADMIN");
        return Error::new(Code::KernelRefused, msg);
    }
    let place = match error {
        NfError::Refused { index: Some(index), .. } => transaction.and_then(|plan| plan.describe(*index)),
        _ => None,
    };
    let place = place.unwrap_or_else(|| "the pod's rules".to_owned());
    if is_owned(error) {
        let msg = format!(
            "{place}: {error}: a process in the pod owns the table (flag owner); end that process, or delete the pod"
        );
        return Error::new(Code::ForeignRules, msg);
    }
    let is_about_containers = |index| transaction.is_some_and(|plan| plan.is_about_containers(index));
    if matches!(error, NfError::Refused { index: Some(index), .. } if is_about_containers(*index)) {
        let msg = format!(
            "container-exclude: {place}: {error}; check that the node's kernel can match control groups (cgroup v2 in \
             nft_socket: CONFIG_NFT_SOCKET and CONFIG_SOCK_CGROUP_DATA, 5.13 or later), or remove container-exclude"
        );
        return Error::new(Code::KernelRefused, msg);
    }
    let is_in_iptables = match (error, transaction) {
        (NfError::Refused { index: Some(index), .. }, Some(plan)) => plan.is_in_iptables(*index),
        (_, plan) => plan.is_none_or(|plan| !plan.iptables.is_empty()),
    };
    let needed = if is_in_iptables {
        "nf_tables with nft_compat and the xtables extensions (rule format nftables needs only nf_tables)"
    } else {
        "nf_tables with nat, redirect, tproxy and ct expressions for family inet (5.2 or later)"
    };
    let msg = format!("{place}: {error}; check that the node's kernel has {needed}");
    Error::new(Code::KernelRefused, msg)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::rule::Family;
    use crate::firewall::{CreatedTables, LiveRuleset, RuleFormat, Ruleset};
    use crate::policy::{ContainerExclusion, ContainerScope, Interception, Policy};

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
