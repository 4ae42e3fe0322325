//! Checks of the kernel: features are tried in a new network namespace. Also runs programs for their output, with a
//! timeout.

use super::checks;
use super::report::{CheckTarget, CheckVerdict, Results};
use crate::cni::{Block, NetConf};
use crate::firewall::RuleFormat;
use crate::firewall::nfnetlink::NfSocket;
use crate::host_path::HostPath;
use crate::inspect::socket_lb;
use crate::inspect::terminal::joined;
use crate::plugin::probe::{NOT_PERMITTED, in_new_netns, try_guard_rules, try_redirection};
use crate::sub_plugins::SubPlugin;
use crate::trusted_file::read_text;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

const MODULES: &str = "load the modules on the node: modprobe -a nf_tables nft_compat nft_nat nft_ct nf_nat nf_conntrack \
    xt_owner xt_REDIRECT xt_multiport xt_CT";

/// The maximum size of os-release in bytes.
const MAX_RELEASE: u64 = 64 << 10;

/// Tries the features in a new network namespace and adds the checks.
pub(super) fn examine(target: &CheckTarget, conf: Option<&NetConf>, results: &mut Results) {
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
    let is_guard = |block: &Block| SubPlugin::of(block) == Some(SubPlugin::MeshGuard);
    let has_guard = conf.is_some_and(|conf| conf.chain.iter().any(is_guard));
    let guard = if has_guard { try_guard_rules() } else { Ok(()) }.err().filter(|why| why != NOT_PERMITTED);
    for (check, own, rule_format, other) in formats {
        if let Some(why) = guard.as_ref().filter(|_| rule_format == RuleFormat::Nftables) {
            let next = "load the modules on the node: modprobe -a nft_reject_inet nft_fib_inet; or remove mesh-guard";
            results.add(check, CheckVerdict::fail(format!("the rules of mesh-guard: {why}"), next));
            continue;
        }
        results.run(check, || match own {
            Ok(()) => CheckVerdict::pass("the rules of a pod were committed and read back, for IPv4 and IPv6"),
            Err(why) if asked != Some(rule_format) && other.is_ok() => CheckVerdict::NotChecked(
                format!("refused ({why}), but not needed: the other rule format is used"),
                None,
            ),
            Err(why) if rule_format == RuleFormat::Iptables && other.is_ok() => {
                CheckVerdict::fail(why.clone(), format!("{}{MODULES}", without_nft_compat(target)))
            }
            Err(why) => refused(why),
        });
    }
    results.run(checks::KERNEL_CONNTRACK, || match &conntrack {
        Ok(()) => CheckVerdict::pass("the connection tracking table can be read"),
        Err(why) => refused(why),
    });
}

/// Returns the next step on a node whose kernel accepts only native rules. RHEL 10 and its relatives have the module in
/// another package, and image-based systems don't let users add one.
fn without_nft_compat(target: &CheckTarget) -> String {
    const KEY: &str = "set \"dialect\": \"nftables\" or \"auto\"";
    let release = ["/etc/os-release", "/usr/lib/os-release"].map(|path| {
        let of_first_process = target.mount.join("proc/1/root").join(path.trim_start_matches('/'));
        let reached = HostPath::new(path).and_then(|path| target.reach(&path).ok());
        reached.into_iter().chain([of_first_process]).find_map(|path| read_text(&path, MAX_RELEASE).ok())
    });
    let release = release.into_iter().flatten().next().unwrap_or_default();
    let value = |key: &str| {
        let line = release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.unwrap_or_default().trim_matches('"').to_owned()
    };
    let (id, like) = (value("ID"), value("ID_LIKE"));
    let is_rhel = id == "rhel" || like.split(' ').any(|like| like == "rhel");
    match id.as_str() {
        "rhcos" | "scos" | "talos" | "bottlerocket" | "flatcar" => format!("{KEY}; or "),
        _ if is_rhel => format!("{KEY}, or install nft_compat: dnf install kernel-modules-extra; then "),
        _ => format!("{KEY}; or "),
    }
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
