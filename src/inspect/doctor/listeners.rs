//! Checks whether the proxy listens on the ports that the rules redirect to, and as which user. A pod with its own user
//! namespace knows its users by other UIDs than this process.

use super::checks;
use super::report::{CheckVerdict, Results};
use super::rules::LOCK_TIMEOUT;
use crate::cni::{Code, Error};
use crate::firewall::DNS_PROXY_PORT;
use crate::inspect::terminal::joined;
use crate::netns::find::FoundNetns;
use crate::policy::{DnsCapture, Policy, Redirect};
use crate::trusted_file::follow;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The maximum size of a table of sockets: a pod can open any number of sockets.
const READ_LIMIT: u64 = 16 << 20;
/// `TCP_LISTEN` (include/net/tcp_states.h), in hexadecimal.
const LISTEN: &str = "0A";

/// A listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Listener {
    pub(super) port: u16,
    /// The UID as the pod knows it.
    pub(super) uid: u32,
    pub(super) tcp: bool,
}

/// Runs the checks. Returns the listening sockets; `None` if they are not known.
pub(super) fn examine(
    found: Option<&FoundNetns>,
    policy: Option<&Policy>,
    results: &mut Results,
) -> Option<Vec<Listener>> {
    let listeners = found.map(|found| found.open()?.enter(LOCK_TIMEOUT, listeners));
    let redirect = policy.and_then(Policy::redirect);
    results.run(checks::PROXY_LISTENING, || match (&listeners, redirect) {
        (Some(Ok(listeners)), Some(redirect)) => {
            CheckVerdict::merged([listening(listeners, redirect), user(listeners, redirect)])
        }
        (Some(Err(error)), _) => CheckVerdict::not_checked(error.to_string()),
        _ => CheckVerdict::not_checked("this plugin redirects nothing in the pod"),
    });
    listeners.and_then(Result::ok)
}

fn wanted(redirect: &Redirect) -> Vec<(u16, bool)> {
    let dns = (redirect.dns != DnsCapture::Off).then_some([(DNS_PROXY_PORT, true), (DNS_PROXY_PORT, false)]);
    let tcp = [(redirect.proxy_port, true), (redirect.inbound_capture_port, true)];
    tcp.into_iter().chain(dns.into_iter().flatten()).collect()
}

fn listening(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let spelled = |(port, tcp): &(u16, bool)| format!("{port}/{}", if *tcp { "tcp" } else { "udp" });
    let wanted = wanted(redirect);
    let is_there = |(port, tcp): &&(u16, bool)| listeners.iter().any(|l| (l.port, l.tcp) == (*port, *tcp));
    let missing: Vec<String> = wanted.iter().filter(|one| !is_there(one)).map(spelled).collect();
    if missing.is_empty() {
        return CheckVerdict::pass(joined(wanted.iter().map(spelled)));
    }
    CheckVerdict::fail(
        format!("no process listens on {}: redirected connections are refused", missing.join(", ")),
        "see kubectl logs POD -c istio-proxy; the proxy starts after the init containers, whose traffic must be excluded \
         (see detour explain)",
    )
}

fn user(listeners: &[Listener], redirect: &Redirect) -> CheckVerdict {
    let own = listeners.iter().filter(|l| l.tcp && l.port == redirect.proxy_port);
    let uids: Vec<u32> = own.map(|listener| listener.uid).collect();
    let excluded = joined(&redirect.proxy_uid);
    match uids.iter().find(|uid| !redirect.proxy_uid.contains(uid)) {
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

/// Reads the listening sockets of the thread's network namespace (proc_net_tcp(5)).
fn listeners() -> Result<Vec<Listener>, Error> {
    let users = Users::here()?;
    let mut all = Vec::new();
    for (file, tcp) in [("tcp", true), ("tcp6", true), ("udp", false), ("udp6", false)] {
        let path = format!("/proc/thread-self/net/{file}");
        let failed = |error| Error::new(Code::Io, format!("can't read the sockets: {path}: {error}"));
        let table = match follow(Path::new(&path)) {
            Ok(table) => BufReader::new(table.take(READ_LIMIT)),
            // The kernel may have no IPv6.
            Err(_) if file.ends_with('6') => continue,
            Err(error) => return Err(failed(error)),
        };
        let mut read = 0;
        for line in table.lines() {
            let line = line.map_err(failed)?;
            read += line.len() as u64 + 1;
            all.extend(listener(&line, tcp));
        }
        if read >= READ_LIMIT {
            let mebibytes = READ_LIMIT >> 20;
            let msg = format!("can't read the sockets: {path}: expected at most {mebibytes} MiB, got more");
            return Err(Error::new(Code::Io, msg));
        }
    }
    all.iter_mut().for_each(|listener: &mut Listener| listener.uid = users.inside(listener.uid));
    Ok(all)
}

fn listener(line: &str, tcp: bool) -> Option<Listener> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, port) = fields.get(1)?.split_once(':')?;
    // UDP has no listening state: a socket without a peer receives from everyone.
    let waits = if tcp { *fields.get(3)? == LISTEN } else { fields.get(2)?.ends_with(":0000") };
    waits.then_some(Listener { port: u16::from_str_radix(port, 16).ok()?, uid: fields.get(7)?.parse().ok()?, tcp })
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

    const TCP: &str =
        "   0: 0100007F:3A99 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1337        0 123 1";

    #[test]
    fn listeners_are_read_and_connections_are_not() {
        assert_eq!(listener(TCP, true), Some(Listener { port: 15001, uid: 1337, tcp: true }));
        assert_eq!(listener(&TCP.replace(" 0A ", " 01 "), true), None);
        assert_eq!(listener(&TCP.replace(" 0A ", " 07 "), false).map(|l| l.tcp), Some(false));
        assert_eq!(listener(&TCP.replace("00000000:0000 0A", "0100007F:1234 07"), false), None);
        assert_eq!(listener("garbage", true), None);
    }

    #[test]
    fn each_missing_port_is_named_and_dns_only_where_it_is_captured() {
        let at = |port, tcp| Listener { port, uid: 1337, tcp };
        let redirect = Redirect { dns: DnsCapture::All, ..Redirect::default() };
        let both = [at(15001, true), at(15006, true)];
        assert!(matches!(listening(&both, &Redirect::default()), CheckVerdict::Pass(_)));
        let verdict = listening(&[&both[..], &[at(15053, true)]].concat(), &redirect);
        assert!(
            matches!(verdict, CheckVerdict::Fail(found, _) if found.contains("15053/udp") && !found.contains("15001"))
        );
    }

    #[test]
    fn a_proxy_of_another_uid_is_named() {
        let verdict = user(&[Listener { port: 15001, uid: 7, tcp: true }], &Redirect::default());
        assert!(matches!(verdict, CheckVerdict::Fail(found, _) if found.contains("UID 7") && found.contains("1337")));
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
