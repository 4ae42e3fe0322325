//! The check whether the proxy listens on the ports that the rules redirect to, and as which user. A pod with its own user
//! namespace knows its users by other UIDs than this process.

use super::checks;
use super::report::{CheckVerdict, Results};
use super::rules::LOCK_TIMEOUT;
use crate::cni::{Code, Error};
use crate::firewall::DNS_PROXY_PORT;
use crate::inspect::terminal::joined;
use crate::netns::find::FoundNetns;
use crate::netns::listening_ports;
use crate::policy::{DnsCapture, Policy, Redirect};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// A TCP port on which a process listens, and the UID of the process as the pod knows it.
type Listener = (u16, u32);

/// Runs the check.
pub(super) fn examine(found: Option<&FoundNetns>, policy: Option<&Policy>, results: &mut Results) {
    results.run(checks::PROXY_LISTENING, || {
        let Some((found, redirect)) = found.zip(policy.and_then(Policy::redirect)) else {
            return CheckVerdict::not_checked("this plugin redirects nothing in the pod");
        };
        let listeners = || -> Result<Vec<Listener>, Error> {
            let users = Users::here()?;
            Ok(listening_ports()?.into_iter().map(|(port, uid)| (port, users.inside(uid))).collect())
        };
        match found.open().and_then(|netns| netns.enter(LOCK_TIMEOUT, listeners)) {
            Ok(listeners) => CheckVerdict::merged([listening(&listeners, redirect), user(&listeners, redirect)]),
            Err(error) => CheckVerdict::not_checked(error.to_string()),
        }
    });
}

fn listening(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let dns = (redirect.dns != DnsCapture::Off).then_some(DNS_PROXY_PORT);
    let wanted = [redirect.proxy_port, redirect.inbound_capture_port].into_iter().chain(dns);
    let (there, missing): (Vec<u16>, Vec<u16>) = wanted.partition(|port| listeners.iter().any(|one| one.0 == *port));
    let spelled = |ports: Vec<u16>| joined(ports.iter().map(|port| format!("{port}/tcp")));
    if missing.is_empty() {
        return CheckVerdict::pass(spelled(there));
    }
    CheckVerdict::fail(
        format!("no process listens on {}: redirected connections are refused", spelled(missing)),
        "see kubectl logs POD -c istio-proxy; the proxy starts after the init containers, whose traffic must be excluded \
         (see detour explain)",
    )
}

fn user(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let excluded = joined(&redirect.proxy_uid);
    let own = listeners.iter().filter(|(port, _)| *port == redirect.proxy_port).map(|(_, uid)| uid);
    match own.into_iter().find(|uid| !redirect.proxy_uid.contains(uid)) {
        None => CheckVerdict::pass(format!("UID {excluded}")),
        Some(other) => CheckVerdict::fail(
            format!(
                "the proxy listens as UID {other}, but the rules exclude UID {excluded}: its own traffic returns to \
                 it"
            ),
            format!(
                "set runAsUser of istio-proxy to {excluded}, or proxy_uid in the configuration to {other}, and delete the \
                 pod"
            ),
        ),
    }
}

/// The UID and GID that a probe is sent as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbeUser {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// A file whose owner is the root user of the user namespace that owns the thread's network namespace
/// (`net_ctl_set_ownership`, net/sysctl_net.c).
const OF_ROOT: &str = "/proc/sys/net/ipv4/ip_forward";
/// The number of UIDs of a pod with `hostUsers: false`, from 0 (KEP-127).
const OWN: u32 = 65536;

/// Maps UIDs between this process and the pod that owns a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Users {
    /// The pod's root user, as this process knows it.
    root: ProbeUser,
}

impl Users {
    /// Returns the mapping of the thread's network namespace.
    ///
    /// # Errors
    /// /proc/sys can't be read.
    pub(super) fn here() -> Result<Self, Error> {
        let root = fs::metadata(OF_ROOT).map(|of| ProbeUser { uid: of.uid(), gid: of.gid() });
        let root = root.map_err(|error| Error::new(Code::Io, format!("can't read the owner of {OF_ROOT}: {error}")))?;
        Ok(Self { root })
    }

    /// Returns the pod's `user` as this process knows it; `None` if the pod has no such user.
    pub(super) fn outside(self, user: ProbeUser) -> Option<ProbeUser> {
        let ProbeUser { uid, gid } = self.root;
        let is_own = |id: u32, root: u32| root == 0 || id < OWN;
        let is_there = is_own(user.uid, uid) && is_own(user.gid, gid);
        is_there.then(|| ProbeUser { uid: uid.saturating_add(user.uid), gid: gid.saturating_add(user.gid) })
    }

    /// Returns this process's `uid` as the pod knows it; unchanged if it is not one of the pod's.
    pub(super) fn inside(self, uid: u32) -> u32 {
        match uid.checked_sub(self.root.uid) {
            Some(own) if self.root.uid == 0 || own < OWN => own,
            _ => uid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_port_is_named_and_dns_only_where_it_is_captured() {
        let redirect = Redirect { dns: DnsCapture::All, ..Redirect::default() };
        let both = [(15001, 1337), (15006, 1337)];
        assert_eq!(listening(&both, &Redirect::default()), CheckVerdict::pass("15001/tcp, 15006/tcp"));
        let found = listening(&both, &redirect).found;
        assert!(found.contains("15053/tcp") && !found.contains("15001"), "{found}");
    }

    #[test]
    fn a_proxy_of_another_uid_is_named() {
        let found = user(&[(15001, 7)], &Redirect::default()).found;
        assert!(found.contains("UID 7") && found.contains("1337"), "{found}");
    }

    #[test]
    fn a_pod_with_its_own_users_counts_them_from_its_root() {
        let of = |root| Users { root: ProbeUser { uid: root, gid: root } };
        let both = |id| ProbeUser { uid: id, gid: id };
        assert_eq!(of(200_000).outside(both(1337)), Some(both(201_337)));
        assert_eq!(of(200_000).outside(both(OWN)), None);
        assert_eq!((of(200_000).inside(201_337), of(200_000).inside(7)), (1337, 7));
        assert_eq!(of(0).outside(both(1_000_650_000)), Some(both(1_000_650_000)));
        assert_eq!(of(0).inside(1_000_650_000), 1_000_650_000);
    }
}
