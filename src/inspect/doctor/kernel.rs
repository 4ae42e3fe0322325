//! Checks of the kernel: features are tried in a new network namespace. Also runs programs for their output, with a
//! timeout.

use super::checks;
use super::report::{CheckTarget, CheckVerdict, Results};
use crate::cni::NetConf;
use crate::firewall::RuleFormat;
use crate::firewall::nfnetlink::NfSocket;
use crate::inspect::socket_lb;
use crate::inspect::terminal::joined;
use crate::plugin::probe::{NOT_PERMITTED, in_new_netns, refused_guard, try_redirection};
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

const MODULES: &str = "load the modules on the node: modprobe -a nf_tables nft_compat nft_nat nft_ct nf_nat nf_conntrack \
    xt_owner xt_REDIRECT xt_multiport xt_CT";

/// Tries the rules of a pod in a new network namespace.
pub(super) fn examine(conf: Option<&NetConf>, results: &mut Results) {
    results.add(
        checks::KERNEL_RULES,
        match in_new_netns(Tried::new) {
            Ok(tried) => {
                let redirection = tried.verdict(conf.and_then(|conf| conf.rule_format));
                CheckVerdict::merged([redirection].into_iter().chain(guard(conf)))
            }
            Err(why) if why == NOT_PERMITTED => CheckVerdict::NotChecked(
                "this needs root (CAP_SYS_ADMIN)".to_owned(),
                Some("run detour doctor as root on the node, or in the agent's pod".to_owned()),
            ),
            Err(why) => CheckVerdict::fail(
                format!("can't create a network namespace: {why}"),
                "enable CONFIG_NET_NS in the kernel, and set user.max_net_namespaces above 0",
            ),
        },
    );
}

/// Returns a failure if a configuration uses the guard, and the kernel refuses its rules.
fn guard(conf: Option<&NetConf>) -> Option<CheckVerdict> {
    let why = refused_guard(&conf?.chain)?;
    let next = "load the modules on the node: modprobe -a nft_reject_inet nft_fib_inet; or remove mesh-guard";
    Some(CheckVerdict::fail(format!("the rules of mesh-guard: {why}"), next))
}

/// Checks whether eBPF programs replace Service addresses before netfilter sees them. Nodes whose BPF file system is not
/// visible to this process have no such check.
pub(super) fn examine_socket_lb(target: &CheckTarget, results: &mut Results) {
    let Ok(products) = socket_lb::products(&target.mount) else { return };
    results.run(checks::SOCKET_LB, || match products {
        products if products.is_empty() => CheckVerdict::pass("no programs of Cilium or Calico are attached"),
        products => CheckVerdict::Warn(
            format!(
                "{}: a process connects to a backend instead of the Service's address, so the sidecar does not route by \
                 Service, and an exclusion of a ClusterIP has no effect",
                joined(products.iter().map(|product| product.name()))
            ),
            products.iter().map(|product| product.setting()).collect::<Vec<_>>().join("; "),
        ),
    });
}

/// What the kernel accepts.
struct Tried {
    /// nf_tables and connection tracking.
    netfilter: Result<(), String>,
    iptables: Result<(), String>,
    native: Result<(), String>,
}

impl Tried {
    fn new() -> Self {
        let netfilter = || {
            let mut socket = NfSocket::open()?;
            socket.generation()?;
            socket.connections(|_| false).map(drop)
        };
        Self {
            netfilter: netfilter().map_err(|error| error.to_string()),
            iptables: try_redirection(RuleFormat::Iptables),
            native: try_redirection(RuleFormat::Nftables),
        }
    }

    /// Exclusions are native; the redirection needs the format that the configuration sets, or one of both.
    fn verdict(self, format: Option<RuleFormat>) -> CheckVerdict {
        let refused = |what: &str, why: &str| CheckVerdict::fail(format!("{what}: {why}"), MODULES);
        match (&self.netfilter, &self.iptables, &self.native, format) {
            (Err(why), ..) => refused("nf_tables and connection tracking", why),
            (_, Err(why), Ok(()), Some(RuleFormat::Iptables)) => CheckVerdict::fail(
                format!("rules in format iptables: {why}"),
                format!("set \"dialect\": \"nftables\" or \"auto\"; or {MODULES}"),
            ),
            (_, _, Err(why), _) => refused("rules in format nftables, as all exclusions", why),
            (_, Err(why), ..) => CheckVerdict::pass(format!("rules in format nftables; not in format iptables: {why}")),
            _ => CheckVerdict::pass("rules in both formats, for IPv4 and IPv6"),
        }
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
