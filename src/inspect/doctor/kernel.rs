//! Checks of the kernel: features are tried in a new network namespace. Also runs programs for their output, with a
//! timeout.

use super::report::{Check, CheckGroup, CheckVerdict, Results};
use crate::cni::NetConf;
use crate::firewall::RuleFormat;
use crate::firewall::nfnetlink::NfSocket;
use crate::plugin::probe::{NOT_PERMITTED, in_new_netns, try_redirection};
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

const NETNS: Check = Check::of(CheckGroup::Kernel, "kernel-netns", "network namespaces can be created");
const NETFILTER: Check = Check::of(CheckGroup::Kernel, "kernel-nftables", "nf_tables answers");
const IPTABLES: Check =
    Check::of(CheckGroup::Kernel, "kernel-iptables-rules", "rules of dialect iptables are accepted");
const NATIVE: Check = Check::of(CheckGroup::Kernel, "kernel-native-rules", "rules of dialect nftables are accepted");
const CONNTRACK: Check = Check::of(CheckGroup::Kernel, "kernel-conntrack", "connections are tracked");

const MODULES: &str = "load the modules on the node: modprobe -a nf_tables nft_compat nft_nat nft_ct nf_nat nf_conntrack \
    xt_owner xt_REDIRECT xt_multiport xt_CT";

/// Tries the features in a new network namespace and adds the checks.
pub(super) fn examine(conf: Option<&NetConf>, results: &mut Results) {
    let tried = in_new_netns(Tried::new);
    results.add(
        &NETNS,
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
    results.after(&[&NETNS], &NETFILTER, || match &netfilter {
        Ok(()) => CheckVerdict::pass("the ruleset's generation can be read"),
        Err(why) => refused(why),
    });
    let asked = conf.and_then(|conf| conf.rule_format);
    let formats =
        [(&IPTABLES, &iptables, RuleFormat::Iptables, &native), (&NATIVE, &native, RuleFormat::Nftables, &iptables)];
    for (check, own, rule_format, other) in formats {
        results.after(&[&NETFILTER], check, || match own {
            Ok(()) => CheckVerdict::pass("the rules of a pod were committed and read back, for IPv4 and IPv6"),
            Err(why) if asked != Some(rule_format) && other.is_ok() => {
                CheckVerdict::NotChecked(format!("refused ({why}), but not needed: the other dialect is used"), None)
            }
            Err(why) => refused(why),
        });
    }
    results.after(&[&NETFILTER], &CONNTRACK, || match &conntrack {
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
            iptables: try_redirection(RuleFormat::Iptables),
            native: try_redirection(RuleFormat::Nftables),
            conntrack: socket()
                .and_then(|mut socket| socket.connections(|_| false).map(drop).map_err(|error| error.to_string())),
        }
    }

    fn failed(why: String) -> Self {
        let failed = || Err(why.clone());
        Self { netfilter: failed(), iptables: failed(), native: failed(), conntrack: failed() }
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
