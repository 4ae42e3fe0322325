//! `detour explain`: reports what a configuration does with a pod's traffic, and why. `detour trace`: follows one packet
//! through desired or live rules.

use super::cluster::{NodeArguments, ON_NODE};
use super::output::{CommandError, CommandOutput, OutputArguments};
use super::subject::{NetnsArguments, SubjectArguments, interface_of};
use super::{print_error, print_message};
use clap::{ArgGroup, Args};
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{Destination, RuleFormat, Ruleset, RulesetView, Sender, native, restore_text};
use detour_cni::inspect::{ContainerSender, Explanation, SenderArgument, explained, picture, planned_format, trace};
use detour_cni::pod::Pod;
use detour_cni::policy::Ipv6;
use detour_cni::printable::Text;
use detour_cni::sub_plugins::{bypasses_inbound, default_interface, own_addresses};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

const EXPLAIN_EXAMPLES: &str = "\
Examples:
  kubectl get pod -n shop web-0 -o yaml | detour explain -f - --config FILE
  istioctl kube-inject -f web.yaml | detour explain -f - deployment/web
        explain a pod template (Deployment, CronJob, ...) in the file; without a name, all of them
  detour explain -f pod.yaml --rules nft | nft --check -f -
  detour explain -f pod.yaml --format svg > web-0.svg";

const TRACE_EXAMPLES: &str = "\
Examples:
  detour trace -f pod.yaml --config FILE --from container=vault-agent-init --to 10.96.0.10:53/udp
  detour trace -f pod.yaml --from container=web --to '[2001:db8::1]:443/tcp' -o json
  detour trace --live -n shop web-0 --from container=vault-agent-init --to 10.88.0.2:8200/tcp";

/// Show what happens to a pod's traffic, and why
///
/// The report shows whether the pod is redirected and which condition decided, every setting with its value and
/// source, the traffic that bypasses the sidecar, and warnings. --rules and --format require exactly one pod. Only
/// --rules nft has the exclusions, which are native.
///
/// For a pod of the cluster, use kubectl detour explain: it runs on the pod's node, with the node's configuration. The
/// command changes nothing. With -f, it needs neither root nor a cluster.
///
/// Exit codes: 0 success, 1 an ADD of this pod would fail, 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(after_help = EXPLAIN_EXAMPLES)]
pub(super) struct ExplainArguments {
    #[command(flatten)]
    pub(super) subject: SubjectArguments,
    /// Also print settings with their default, all conditions and requests, and long lists in full
    #[arg(long, conflicts_with_all = ["rules", "format"])]
    all: bool,
    /// Print the rules instead of the report, as input for iptables-restore and ip6tables-restore, or nft -f
    #[arg(long, value_name = "FORMAT", conflicts_with = "output")]
    rules: Option<RuleFormat>,
    /// Print a picture instead of the report
    #[arg(long, value_name = "FORMAT", value_parser = ["svg"], conflicts_with_all = ["output", "rules"])]
    format: Option<String>,
    #[command(flatten)]
    place: NodeArguments,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

pub(super) fn run_explain(arguments: &ExplainArguments) -> Result<CommandOutput, CommandError> {
    let needs_one = arguments.rules.is_some() || arguments.format.is_some();
    let subjects = arguments.subject.read_all(arguments.place.root()?, needs_one)?;
    let of = |subject| Explanation { all: arguments.all, ..explained(subject) };
    if let [subject] = &subjects[..] {
        let explanation = of(subject);
        let add_fails = &explanation.add_fails;
        let text = match (arguments.rules, &arguments.format) {
            (Some(format), _) => rules(&explanation, format),
            (None, Some(_)) => picture(subject, &explanation),
            (None, None) => return arguments.output.render_verdict(&explanation, add_fails.is_none()),
        };
        let code = match add_fails {
            Some(cause) => {
                print_error(format_args!("pod {}: an ADD fails: {cause}", subject.name()), ExitCode::FAILURE)
            }
            None => ExitCode::SUCCESS,
        };
        return Ok(CommandOutput { text: Text::lines(&text), code });
    }
    let explanations: Vec<_> = subjects.iter().map(of).collect();
    let fine = explanations.iter().all(|one| one.add_fails.is_none());
    arguments.output.render_verdict(&explanations, fine)
}

/// Returns the rules as text, and prints a note about those that the text does not have.
fn rules(Explanation { pod, policy, decision, .. }: &Explanation, format: RuleFormat) -> String {
    let ipv6 = policy.redirect().map(|redirect| redirect.ipv6);
    let rules = Ruleset::of(policy, if ipv6 == Some(Ipv6::Off) { &[Family::Ip] } else { &Family::ALL });
    if policy.is_empty() {
        print_message("note", format_args!("pod {pod}: no rules: {decision}"));
    } else if format == RuleFormat::Iptables && rules.excluded.is_some() {
        let what = "iptables shows only the redirection: exclusions are native nftables rules; use --rules nft";
        print_message("note", format_args!("pod {pod}: {what}"));
    }
    match format {
        RuleFormat::Iptables => restore_text(&rules),
        RuleFormat::Nftables => native::text(&RuleFormat::Nftables.native(&rules)),
    }
}

/// Follow one packet through the rules and show where it arrives
///
/// By default, the rules are those that a configuration creates for a pod. With --live, or an option that names a network
/// namespace, they are those in the kernel, which requires root on the pod's node. The packet is the first one of a
/// connection. It arrives at sidecar:PORT, ztunnel:PORT (ambient mesh), direct, dropped, rejected (by the guard),
/// redirected:PORT (by another tool) or unknown.
///
/// Exit codes: 0 success, 1 an ADD of this pod would fail or unreadable rules, 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(
    after_help = TRACE_EXAMPLES,
    group(ArgGroup::new("of_kernel").args(["live", "netns", "pid", "container"])),
    group(ArgGroup::new("target").args(["netns", "pid", "container"]).conflicts_with_all(["file", "pod"])),
)]
pub(super) struct TraceArguments {
    #[command(flatten)]
    pub(super) subject: SubjectArguments,
    /// Use the live rules of the pod that -n and POD select
    #[arg(long, requires = "pod", conflicts_with = "file")]
    pub(super) live: bool,
    /// Use the live rules of this network namespace: a path, or a name in /run/netns
    #[arg(long, value_name = "NETNS", help_heading = ON_NODE)]
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

pub(super) fn run_trace(arguments: &TraceArguments) -> Result<CommandOutput, CommandError> {
    let (sender, to) = (&arguments.from, arguments.to);
    if let Some(Sender::Inbound(Some(address))) = sender.sender
        && address.is_ipv4() != to.address.is_ipv4()
    {
        let msg = format!("expected two IPv4 or two IPv6 addresses, got --from {address} and --to {}", to.address.ip());
        return Err(CommandError::usage(msg));
    }
    let root = arguments.namespace.place.root()?;
    let is_live = arguments.live || arguments.netns.is_some() || arguments.namespace.is_given();
    let resolve = |pod: Option<&Pod>| sender.resolve(pod).map_err(CommandError::input);
    let container = sender.container.as_deref();
    let report = if is_live {
        let pod = arguments.subject.live_pod(root)?;
        let from = resolve(pod.as_ref())?;
        let command = format!("trace --live --from '{}' --to '{}/{}'", sender.text, to.address, to.protocol);
        let rules = arguments.namespace.read(pod.as_ref(), arguments.netns.as_deref(), &command)?;
        let interface = match &arguments.interface {
            Some(interface) => interface.clone(),
            None => interface_of(&rules.netns, from, to)?,
        };
        let container = container.map(|name| ContainerSender::live(name, &rules));
        trace(&rules.view(), (from, container), to, &rules.addresses, &interface)
    } else {
        let subject = arguments.subject.read(root)?;
        let pod = &subject.facts.pod;
        let from = resolve(Some(pod))?;
        let explanation = explained(&subject);
        let policy = &explanation.policy;
        let mut view = RulesetView::of_policy(policy, planned_format(&subject).format);
        if policy.ambient && bypasses_inbound(pod) {
            view = view.without_ambient_inbound();
        }
        let container = container.map(|name| ContainerSender::planned(name, policy));
        let own = if arguments.pod_ip.is_empty() { own_addresses(pod) } else { arguments.pod_ip.clone() };
        let interface = arguments.interface.clone().unwrap_or_else(|| default_interface(pod));
        trace(&view, (from, container), to, &own, &interface).planned(&subject, &explanation)
    };
    arguments.output.render_verdict(&report, report.add_fails.is_none())
}
