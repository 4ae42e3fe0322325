//! Checks of the kernel: features are tried in a new network namespace. Also runs programs for their output, with a
//! timeout.

use super::checks;
use super::report::{CheckTarget, CheckVerdict, Results};
use crate::cni::{Block, NetConf};
use crate::firewall::RuleFormat;
use crate::firewall::nfnetlink::NfSocket;
use crate::inspect::child::{ProgramOutput, run_program};
use crate::inspect::socket_lb;
use crate::inspect::terminal::joined;
use crate::plugin::probe::{NOT_PERMITTED, in_new_netns, try_guard_rules, try_redirection};
use crate::sub_plugins::SubPlugin;
use std::process::Command;
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
            Err(why) if why == NOT_PERMITTED => CheckVerdict::to_do(
                "this needs root (CAP_SYS_ADMIN)",
                "run detour doctor as root on the node, or in the agent's pod",
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
    let is_guard = |block: &Block| SubPlugin::of(block) == Some(SubPlugin::MeshGuard);
    conf.filter(|conf| conf.chain.iter().any(is_guard))?;
    let why = try_guard_rules().err().filter(|why| why != NOT_PERMITTED)?;
    let next = "load the modules on the node: modprobe -a nft_reject_inet nft_fib_inet; or remove mesh-guard";
    Some(CheckVerdict::fail(format!("the rules of mesh-guard: {why}"), next))
}

/// Checks whether eBPF programs replace Service addresses before netfilter sees them. Nodes whose BPF file system is not
/// visible to this process have no such check.
pub(super) fn examine_socket_lb(target: &CheckTarget, results: &mut Results) {
    let Ok(products) = socket_lb::products(&target.mount) else { return };
    results.run(checks::SOCKET_LB, || match products {
        products if products.is_empty() => CheckVerdict::pass("no programs of Cilium or Calico are attached"),
        products => CheckVerdict::warn(
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

/// Runs a program and returns its stdout, which may be cut.
///
/// # Errors
/// The program can't be started, fails, or exceeds the timeout.
pub(super) fn output(command: &mut Command) -> Result<String, String> {
    let ProgramOutput { stdout, status, .. } = run_program(command, MAX_OUTPUT, TIMEOUT)?;
    match status.success() || stdout.len() as u64 > MAX_OUTPUT {
        true => Ok(String::from_utf8_lossy(&stdout).into_owned()),
        false => Err(format!("failed ({status})")),
    }
}
