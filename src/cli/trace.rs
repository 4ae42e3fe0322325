//! `detour trace`

use super::output::OutputArguments;
use super::subject::SubjectArguments;
use super::subject::{LiveArguments, NetnsSelector};
use super::{CommandError, CommandOutput};
use clap::{ArgGroup, Args};
use detour_cni::cni::Error;
use detour_cni::inspect::{Destination, Named, Rulebook, Sender, explain, trace};
use detour_cni::pod::Pod;
use detour_cni::sub_plugins::own_addresses;
use std::net::IpAddr;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  detour trace -f pod.yaml --config istio-cni.conf --from uid=1337 --to 10.96.0.10:53/udp
  detour trace -f pod.yaml --from container=web --to 10.88.0.2:8080/tcp
  detour trace -f pod.yaml --from uid=1000,gid=1000 --to '[2001:db8::1]:443/tcp' -o json
  detour trace -f pod.yaml --from inbound --to 10.88.0.2:8080/tcp
  detour trace --live -n shop web-0 --from uid=1000 --to 10.96.0.10:53/udp
  detour trace --container 5f0c1f2ab34d --from uid=1000 --to 10.88.0.2:8080/tcp
  detour trace --netns /run/netns/cni-0c1f --from uid=1000 --to 10.88.0.2:8080/tcp

arrives_at is sidecar:PORT, direct, dropped, or redirected:PORT where no rule of Istio's did it.
Live rules are read on the pod's own node, as root; elsewhere, the command to run there is printed.
Exit codes: 0 traced, 1 something is wrong with the pod or its rules, 2 wrong usage or input.";

/// Where one packet arrives, rule by rule
///
/// Takes the first packet of a connection through the rules that a configuration makes for a pod or, with
/// --live, --container, --pid, --pod-uid or --netns, through those that are in the kernel.
#[derive(Debug, Args)]
#[command(
    after_help = EXAMPLES,
    group(ArgGroup::new("of_kernel").args(["live", "netns", "pid", "container", "pod_uid"])),
    group(ArgGroup::new("whose").args(["netns", "pid", "container", "pod_uid"]).conflicts_with_all(["file", "pod"])),
)]
pub(super) struct TraceArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// Take the live rules of the pod named with -n
    #[arg(long, requires = "pod", conflicts_with = "file")]
    live: bool,
    /// Take the live rules of this network namespace: a path, or a name in /run/netns
    #[arg(long, value_name = "PATH")]
    netns: Option<PathBuf>,
    #[command(flatten)]
    whose: LiveArguments,
    /// Who sends: uid=U[,gid=G] (GID 0 by default), container=NAME (the IDs that the manifest sets), or
    /// inbound[:ADDRESS]
    #[arg(long, value_name = "WHO")]
    from: String,
    /// Where to: ADDRESS:PORT/tcp or /udp
    #[arg(long, value_name = "WHERE")]
    to: String,
    /// The pod's own addresses, separated by commas: traffic to them goes over lo [default: status.podIPs and those of the annotation k8s.v1.cni.cncf.io/network-status]
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', conflicts_with = "of_kernel")]
    pod_ip: Vec<IpAddr>,
    /// The interface by which other traffic leaves and comes in
    #[arg(long, value_name = "NAME", default_value = "eth0")]
    interface: String,
    #[command(flatten)]
    output: OutputArguments,
}

/// The packet's way.
pub(super) fn run(arguments: TraceArguments) -> Result<CommandOutput, CommandError> {
    let usage = |error: Error| CommandError::Usage(format!("--{}", error.msg));
    let named: Named = arguments.from.parse().map_err(usage)?;
    let to: Destination = arguments.to.parse().map_err(usage)?;
    if let Named::Sender(Sender::Inbound(Some(address))) = named
        && address.is_ipv4() != to.address.is_ipv4()
    {
        let msg = format!(
            "--from {address} and --to {} are of different families; accepted: two IPv4 or two IPv6 addresses",
            to.address.ip()
        );
        return Err(CommandError::Usage(msg));
    }
    let whose = match &arguments.netns {
        Some(path) => Some(NetnsSelector::Netns(path.clone())),
        None if arguments.live => Some(NetnsSelector::Pod(Box::new(arguments.subject.read()?))),
        None => arguments.whose.named(),
    };
    let refused = |error: Error| CommandError::Input(Error { msg: format!("--{}", error.msg), ..error });
    let sender = |pod: Option<&Pod>| named.of_pod(pod).map_err(refused);
    let (from, book, own) = match whose {
        Some(whose) => {
            let pod = if let NetnsSelector::Pod(subject) = &whose { Some(&subject.facts.pod) } else { None };
            let from = sender(pod)?;
            let question = format!("trace --from '{from}' --to '{}'", arguments.to);
            let found = arguments.whose.read(&whose, &question)?.rules;
            (from, found.rulebook(), found.addresses)
        }
        None => {
            let subject = arguments.subject.read()?;
            let from = sender(Some(&subject.facts.pod))?;
            let policy = explain(&subject)?.policy;
            let own = if arguments.pod_ip.is_empty() { own_addresses(&subject.facts.pod) } else { arguments.pod_ip };
            (from, Rulebook::of_policy(&policy), own)
        }
    };
    arguments.output.answer(&trace(&book, from, to, &own, &arguments.interface))
}
