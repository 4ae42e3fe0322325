//! `detour trace`: follows one packet through desired or live rules.

use super::output::{CommandError, CommandOutput, OutputArguments};
use super::subject::{NetnsArguments, SubjectArguments, interface_of};
use clap::{ArgGroup, Args};
use detour_cni::firewall::{Destination, RulesetView, Sender};
use detour_cni::inspect::{ExcludedSenders, SenderArgument, explained, planned_format};
use detour_cni::pod::Pod;
use detour_cni::sub_plugins::{bypasses_inbound, default_interface, own_addresses};
use std::net::IpAddr;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  detour trace -f pod.yaml --config istio-cni.conf --from uid=1337 --to 10.96.0.10:53/udp
  detour trace -f pod.yaml --from container=web --to '[2001:db8::1]:443/tcp' -o json
  detour trace --live -n shop web-0 --from container=vault-agent-init --to 10.88.0.2:8200/tcp
        also show whether, and until when, the container bypasses the sidecar

The packet arrives at sidecar:PORT, ztunnel:PORT (ambient mesh), direct, dropped, rejected (by the
guard), redirected:PORT (by another tool) or unknown. Live rules require root on the pod's node.

Exit codes: 0 success, 1 an ADD of this pod would fail or unreadable rules, 2 invalid arguments or
input.";

/// Follow one packet through the rules and show where it arrives
///
/// By default, the rules are those that a configuration creates for a pod. With --live, or an option that names a network
/// namespace, they are those in the kernel. The packet is the first one of a connection.
#[derive(Debug, Args)]
#[command(
    after_help = EXAMPLES,
    group(ArgGroup::new("of_kernel").args(["live", "netns", "pid", "container", "pod_uid"])),
    group(ArgGroup::new("target").args(["netns", "pid", "container", "pod_uid"]).conflicts_with_all(["file", "pod"])),
)]
pub(super) struct TraceArguments {
    #[command(flatten)]
    pub(super) subject: SubjectArguments,
    /// Use the live rules of the pod that -n and POD select
    #[arg(long, requires = "pod", conflicts_with = "file")]
    pub(super) live: bool,
    /// Use the live rules of this network namespace: a path, or a name in /run/netns
    #[arg(long, value_name = "NETNS")]
    netns: Option<PathBuf>,
    #[command(flatten)]
    namespace: NetnsArguments,
    /// Sender: uid=UID[,gid=GID] (default GID: 0), container=NAME[,uid=UID[,gid=GID]] (default IDs: those in the pod's manifest), or inbound[:ADDRESS]
    #[arg(long, value_name = "SENDER")]
    from: SenderArgument,
    /// Destination: ADDRESS:PORT/tcp or ADDRESS:PORT/udp
    #[arg(long, value_name = "DESTINATION")]
    to: Destination,
    /// The pod's addresses, separated by commas; traffic to them uses lo [default: from status.podIPs and the annotation k8s.v1.cni.cncf.io/network-status]
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', conflicts_with = "of_kernel")]
    pod_ip: Vec<IpAddr>,
    /// Interface for traffic that does not use lo [default: live rules: that of the route; a configuration: that of the default route in the pod's annotations, or eth0]
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

pub(super) fn run(arguments: &TraceArguments) -> Result<CommandOutput, CommandError> {
    let (sender, to) = (&arguments.from, arguments.to);
    if let Some(Sender::Inbound(Some(address))) = sender.sender
        && address.is_ipv4() != to.address.is_ipv4()
    {
        let msg = format!("expected two IPv4 or two IPv6 addresses, got --from {address} and --to {}", to.address.ip());
        return Err(CommandError::Usage(msg));
    }
    let root = arguments.namespace.place.root()?;
    let is_live = arguments.live || arguments.netns.is_some() || arguments.namespace.is_given();
    let resolve = |pod: Option<&Pod>| sender.resolve(pod).map_err(CommandError::Input);
    let container = sender.container.as_deref();
    let report = match is_live {
        true => {
            let pod = if arguments.live { Some(arguments.subject.live_pod(root)?) } else { None };
            let from = resolve(pod.as_ref())?;
            let command = format!("trace --live --from '{}' --to '{}/{}'", sender.text, to.address, to.protocol);
            let rules = arguments.namespace.read(pod.as_ref(), arguments.netns.as_deref(), &command)?;
            let interface = match &arguments.interface {
                Some(interface) => interface.clone(),
                None => interface_of(&rules.netns, from, to)?,
            };
            let (view, senders) = (rules.view(), ExcludedSenders::live(&rules));
            senders.trace(&view, (from, container), to, &rules.addresses, &interface)
        }
        false => {
            let subject = arguments.subject.read(root)?;
            let from = resolve(Some(&subject.facts.pod))?;
            let explanation = explained(&subject);
            let policy = &explanation.policy;
            let given = &arguments.pod_ip;
            let own = if given.is_empty() { own_addresses(&subject.facts.pod) } else { given.clone() };
            let mut view = RulesetView::of_policy(policy, planned_format(&subject).format);
            if policy.ambient && bypasses_inbound(&subject.facts.pod) {
                view = view.without_ambient_inbound();
            }
            let senders = ExcludedSenders::planned(policy);
            let interface = arguments.interface.clone().unwrap_or_else(|| default_interface(&subject.facts.pod));
            let traced = senders.trace(&view, (from, container), to, &own, &interface);
            traced.planned(&subject, &explanation)
        }
    };
    arguments.output.render_verdict(&report, report.add_fails.is_none())
}
