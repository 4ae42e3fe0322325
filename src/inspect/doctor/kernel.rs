//! Checks of the kernel: features are tried in a new network namespace, which is removed with the thread that created
//! it. Also runs programs for their output, with a timeout.

use super::checks;
use super::report::{CheckVerdict, Results};
use crate::cni::NetConf;
use crate::firewall::nfnetlink::NfSocket;
use crate::firewall::rule::Family;
use crate::firewall::{CreatedTables, LiveRuleset, RuleFormat, Ruleset};
use crate::policy::{BypassEnd, ContainerExclusion, ContainerScope};
use crate::policy::{DnsCapture, Exclusion, IdRange, Interception, Policy, Redirect, TrafficOwner};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

const MODULES: &str = "load the modules on the node: modprobe -a nf_tables nft_compat nft_nat nft_ct nf_nat nf_conntrack \
    xt_owner xt_REDIRECT xt_multiport xt_CT";

/// Tries the features in a new network namespace and adds the checks.
pub(super) fn examine(conf: Option<&NetConf>, results: &mut Results) {
    let tried = in_new_netns(Tried::new);
    results.add(
        checks::KERNEL_NETNS,
        match &tried {
            Ok(_) => CheckVerdict::pass("created one for the other checks"),
            Err(why) if why == NOT_PERMITTED => CheckVerdict::NotChecked(
                "this needs root (CAP_SYS_ADMIN)".to_owned(),
                Some("run detour doctor as root on the node, or in the agent's pod".to_owned()),
            ),
            Err(why) => CheckVerdict::fail(
                why.clone(),
                "enable CONFIG_NET_NS in the kernel, and set user.max_net_namespaces above 0",
            ),
        },
    );
    let Tried { netfilter, iptables, native, conntrack } = tried.unwrap_or_else(Tried::failed);
    let refused = |why: &String| CheckVerdict::fail(why.clone(), MODULES);
    results.run(checks::KERNEL_NFTABLES, || match &netfilter {
        Ok(()) => CheckVerdict::pass("the ruleset's generation can be read"),
        Err(why) => refused(why),
    });
    let asked = conf.and_then(|conf| conf.rule_format);
    let formats = [
        (checks::KERNEL_IPTABLES_RULES, &iptables, RuleFormat::Iptables, &native),
        (checks::KERNEL_NATIVE_RULES, &native, RuleFormat::Nftables, &iptables),
    ];
    for (check, own, rule_format, other) in formats {
        results.run(check, || match own {
            Ok(()) => CheckVerdict::pass("the rules of a pod were committed and read back, for IPv4 and IPv6"),
            Err(why) if asked != Some(rule_format) && other.is_ok() => {
                CheckVerdict::NotChecked(format!("refused ({why}), but not needed: the other dialect is used"), None)
            }
            Err(why) => refused(why),
        });
    }
    results.run(checks::KERNEL_CONNTRACK, || match &conntrack {
        Ok(()) => CheckVerdict::pass("the connection tracking table can be read"),
        Err(why) => refused(why),
    });
}

/// The outcome of each feature in a new network namespace.
struct Tried {
    netfilter: Result<(), String>,
    iptables: Result<(), String>,
    native: Result<(), String>,
    conntrack: Result<(), String>,
}

impl Tried {
    fn new() -> Self {
        let socket = || NfSocket::open().map_err(|error| error.to_string());
        Self {
            netfilter: socket().and_then(|mut socket| socket.generation().map(drop).map_err(|e| e.to_string())),
            iptables: commit(RuleFormat::Iptables),
            native: commit(RuleFormat::Nftables),
            conntrack: socket()
                .and_then(|mut socket| socket.connections(|_| false).map(drop).map_err(|error| error.to_string())),
        }
    }

    fn failed(why: String) -> Self {
        let failed = || Err(why.clone());
        Self { netfilter: failed(), iptables: failed(), native: failed(), conntrack: failed() }
    }
}

/// Tries the rules of excluded containers in a new network namespace.
///
/// # Errors
/// [`NOT_PERMITTED`] if this process can't create one; otherwise why the kernel refuses them.
pub(super) fn try_container_rules() -> Result<(), String> {
    in_new_netns(|| {
        let of = |scope| ContainerExclusion { name: "a".to_owned(), scope, until: BypassEnd::ContainerExit };
        let containers = [of(ContainerScope::All), of(ContainerScope::Dns)].into();
        try_rules(RuleFormat::Iptables, &Policy { containers, ..Policy::default() })
    })?
}

/// The error if this process can't create a network namespace.
pub(super) const NOT_PERMITTED: &str = "EPERM";

/// Calls `work` in a new network namespace, with a thread that ends afterwards.
fn in_new_netns<T: Send + 'static>(work: fn() -> T) -> Result<T, String> {
    #![expect(clippy::disallowed_methods, reason = "the one place that creates a namespace")]
    let thread = thread::Builder::new().spawn(move || match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => Ok(work()),
        Err(Errno::EPERM) => Err(NOT_PERMITTED.to_owned()),
        Err(errno) => Err(errno.to_string()),
    });
    let thread = thread.map_err(|error| format!("can't start a thread: {error}"))?;
    thread.join().unwrap_or_else(|_| Err("the thread panicked".to_owned()))
}

/// Tries the rules of a pod with every feature except excluded containers.
fn commit(rule_format: RuleFormat) -> Result<(), String> {
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
        crate::firewall::nfnetlink::NfError::Refused { index: Some(index), .. } => {
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

/// The timeout of a program.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum output of a program, in bytes.
const MAX_OUTPUT: u64 = 4 << 20;

/// Runs a program and returns its stdout.
///
/// # Errors
/// The program can't be started, fails, or exceeds the timeout.
pub(super) fn output(command: &mut Command) -> Result<String, String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("can't start the program: {error}"))?;
    let (to, text) = sync_channel(1);
    let stdout = child.stdout.take();
    let read = move || {
        let mut text = Vec::new();
        let read = stdout.map(|pipe| pipe.take(MAX_OUTPUT).read_to_end(&mut text));
        // The receiver may be gone after the timeout.
        let _ = to.send(read.map(|_| text).unwrap_or_default());
    };
    if let Err(error) = thread::Builder::new().spawn(read) {
        let _ = child.kill().and_then(|()| child.wait());
        return Err(format!("can't start a thread: {error}"));
    }
    let text = text.recv_timeout(TIMEOUT);
    if text.is_err() {
        // The program may have ended by itself.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| format!("can't wait for the program: {error}"))?;
    match text {
        Err(_) => Err(format!("timeout after {} s", TIMEOUT.as_secs())),
        // A program whose output is cut ends with SIGPIPE.
        Ok(text) if !status.success() && (text.len() as u64) < MAX_OUTPUT => Err(format!("failed ({status})")),
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_prints_or_why_not() {
        assert_eq!(output(Command::new("echo").arg("a b")), Ok("a b\n".to_owned()));
        assert!(output(&mut Command::new("false")).is_err_and(|why| why.starts_with("failed (")));
        assert!(
            output(&mut Command::new("/no/such/program"))
                .is_err_and(|why| why.starts_with("can't start the program: "))
        );
    }
}
