//! What of a policy will surprise: what it does that hardly anybody means.

use super::evaluation::unselected_network;
use super::packet::{ContainerTraffic, Exempt, is_everything, processes};
use super::subject::Subject;
use crate::cni::Error;
use crate::pod::Namespace;
use crate::pod::well_known::NETWORKS;
use crate::policy::{
    DnsCapture, Exclusion, IdRange, Policy, PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner,
};
use crate::sub_plugins;
use ipnet::IpNet;
use serde::Serialize;

/// Ports of the proxy's own, which Istio excludes both ways by itself.
const PROXY_PORTS: [PortRange; 3] = [PortRange::one(15020), PortRange::one(15021), PortRange::one(15090)];

/// Something that will surprise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Which kind it is; stable.
    pub code: &'static str,
    /// What will happen.
    pub what: String,
    /// What can be done.
    pub next: String,
}

/// Everything of that kind.
///
/// # Errors
/// An annotation that selects networks is wrong.
pub(super) fn surprises(subject: &Subject, policy: &Policy) -> Result<Vec<Warning>, Error> {
    let processes = processes(&subject.facts.pod);
    let mut all = excluded_with_application(&processes, policy);
    all.extend(unselected_network(subject)?.map(|_| not_selected(&subject.conf.name)));
    all.extend(not_yet_injected(subject));
    if let Some(redirect) = policy.redirect() {
        all.extend(captured_too_early(subject, &processes, policy));
        all.extend(ranges_without_dns(redirect, policy));
        all.extend(excluded_both_ways(redirect));
        all.extend(without_effect(redirect));
    }
    if let (Some(namespace), false) = (&subject.facts.namespace, policy.is_empty()) {
        all.extend(outside_range(subject, namespace));
    }
    all.extend(sub_plugins::ignored(&subject.facts).into_iter().map(Warning::from));
    Ok(all)
}

/// The configuration of one plugin, and a pod that does not select its network.
fn not_selected(name: &str) -> Warning {
    Warning {
        code: "network-not-selected",
        what: format!(
            "this is the configuration of one plugin, which Multus runs for the pods that select network {name}; \
             it does not run for this pod"
        ),
        next: format!(
            "add {name} to annotation {NETWORKS}; if the container runtime runs the plugin for every pod, give its \
             plugin list: --config FILE.conflist"
        ),
    }
}

/// A pod template as its author wrote it.
fn not_yet_injected(subject: &Subject) -> Option<Warning> {
    let pod = &subject.facts.pod;
    let object = subject.template_of.as_ref().filter(|_| !pod.host_network && pod.proxy().is_none())?;
    Some(Warning {
        code: "template-without-sidecar",
        what: format!("the pod template of {object} has no container istio-proxy; Istio adds it to each new pod"),
        next: "explain a running pod (kubectl get pod NAME -o yaml), or inject the template first: \
               istioctl kube-inject -f FILE | detour explain -f -"
            .to_owned(),
    })
}

impl From<sub_plugins::Ignored> for Warning {
    fn from(sub_plugins::Ignored { code, what, next }: sub_plugins::Ignored) -> Self {
        Self { code, what, next }
    }
}

/// An excluded UID that an application runs as.
fn excluded_with_application(processes: &[ContainerTraffic<'_>], policy: &Policy) -> Vec<Warning> {
    let excluded = policy.exclusions.iter().filter(|e| is_everything(e) && e.owner != TrafficOwner::Any);
    let staying = || processes.iter().filter(|process| !process.ends_before);
    let pairs = excluded.flat_map(|e| staying().filter(|process| process.is(e.owner)).map(move |process| (e, process)));
    let warning = |(exclusion, process): (&Exclusion, &ContainerTraffic<'_>)| {
        let name = &process.container.name;
        let runs_as = match exclusion.owner {
            TrafficOwner::Gid(_) => format!("gid {}", process.gid().unwrap_or_default()),
            TrafficOwner::Uid(_) | TrafficOwner::Any => format!("uid {}", process.uid().unwrap_or_default()),
        };
        Warning {
            code: "excluded-with-application",
            what: format!(
                "container {name} runs as {runs_as}, which is excluded: all that it sends goes around the sidecar"
            ),
            next: format!(
                "exclude another ID, or only some ports of this one (detour.io/exclude-outbound-ports-for-uids), \
                 or give {name} an ID of its own"
            ),
        }
    };
    pairs.map(warning).collect()
}

/// Init containers that send before the sidecar listens.
fn captured_too_early(subject: &Subject, processes: &[ContainerTraffic<'_>], policy: &Policy) -> Vec<Warning> {
    let init = &subject.facts.pod.init_containers;
    let place = |name: &str| init.iter().position(|container| container.name == name);
    let native = place("istio-proxy").filter(|index| init[*index].restarts_always);
    let early = processes.iter().filter(|process| {
        process.ends_before && native.is_none_or(|proxy| place(&process.container.name) < Some(proxy))
    });
    let captured = early.map(|process| (process, process.exempt(policy))).filter(|(_, exempt)| *exempt != Exempt::All);
    let warning = |(process, exempt): (&ContainerTraffic<'_>, Exempt)| {
        let name = &process.container.name;
        let but = if exempt == Exempt::Some { ", but for what is excluded of it" } else { "" };
        Warning {
            code: "init-container-too-early",
            what: format!("init container {name} runs before the sidecar: what it sends is captured and lost{but}"),
            next: help_for(process, processes),
        }
    };
    captured.map(warning).collect()
}

fn help_for(process: &ContainerTraffic<'_>, all: &[ContainerTraffic<'_>]) -> String {
    let native = "or make istio-proxy a native sidecar that stands before it (ENABLE_NATIVE_SIDECARS of istiod)";
    let stays = |uid: u32| all.iter().any(|other| !other.ends_before && other.uid() == Some(uid));
    match process.uid() {
        Some(uid) if !stays(uid) => format!("exclude it: annotation detour.io/exclude-uids: \"{uid}\"; {native}"),
        Some(uid) => format!(
            "give it a UID of its own, for {uid} is an application's too, and exclude that (detour.io/exclude-uids); \
             {native}"
        ),
        None => format!("set its runAsUser and exclude that UID (detour.io/exclude-uids); {native}"),
    }
}

/// Excluded ranges are not looked at before DNS is captured.
fn ranges_without_dns(redirect: &Redirect, policy: &Policy) -> Option<Warning> {
    let exempt = |destination: Option<IpNet>| {
        let (owner, protocol) = (TrafficOwner::Any, Some(Protocol::Udp));
        let query = Exclusion { owner, destination, protocol, ports: vec![PortRange::one(53)] };
        policy.exclusions.iter().any(|exclusion| exclusion.covers(&query))
    };
    let captured: Vec<String> = match &redirect.outbound_ip_ranges_exclude {
        Ranges::All => (!exempt(None)).then(|| "*".to_owned()).into_iter().collect(),
        Ranges::List(nets) => nets.iter().filter(|net| !exempt(Some(**net))).map(ToString::to_string).collect(),
    };
    (redirect.dns != DnsCapture::Off && !captured.is_empty()).then(|| Warning {
        code: "excluded-ranges-without-dns",
        what: format!("DNS to the excluded ranges ({}) is captured all the same", captured.join(", ")),
        next: "exclude it too: annotation detour.io/exclude-dns: excluded-ranges".to_owned(),
    })
}

fn excluded_both_ways(redirect: &Redirect) -> Option<Warning> {
    let (Ports::List(inbound), Ports::List(outbound)) =
        (&redirect.inbound_ports_exclude, &redirect.outbound_ports_exclude)
    else {
        return None;
    };
    let both = inbound.iter().filter(|port| outbound.contains(port) && !PROXY_PORTS.contains(port));
    let both = both.map(ToString::to_string).collect::<Vec<_>>().join(", ");
    (!both.is_empty()).then(|| Warning {
        code: "port-excluded-both-ways",
        what: format!(
            "port {both} is excluded inbound and outbound: the sidecar sees neither calls to it nor from here"
        ),
        next:
            "exclude it one way only: excludeInboundPorts where it is served, excludeOutboundPorts where it is called"
                .to_owned(),
    })
}

fn without_effect(redirect: &Redirect) -> Option<Warning> {
    let own = Redirect::default().inbound_ports_exclude;
    (redirect.inbound_ports_include != Ports::All && redirect.inbound_ports_exclude != own).then(|| Warning {
        code: "inbound-exclusion-without-effect",
        what: "inbound_ports_exclude does nothing: only the ports of inbound_ports_include are captured".to_owned(),
        next: "take the ports out of includeInboundPorts, or set that to *".to_owned(),
    })
}

/// UIDs that OpenShift would not give.
fn outside_range(subject: &Subject, namespace: &Namespace) -> Vec<Warning> {
    let Some(ranges) = sub_plugins::namespace_uids(namespace) else { return Vec::new() };
    let shown = ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let pod = &subject.facts.pod;
    let all = pod.all_containers().filter_map(|container| {
        let uid = u32::try_from(pod.user_of(container)?).ok()?;
        (!ranges.iter().any(|range| range.covers(IdRange::one(uid)))).then_some((&container.name, uid))
    });
    let warning = |(name, uid): (&String, u32)| Warning {
        code: "uid-outside-namespace-range",
        what: format!(
            "container {name} runs as uid {uid}, which is outside namespace {}'s range {shown}",
            namespace.name
        ),
        next: "its service account needs an SCC that allows it (nonroot-v2, anyuid); restricted-v2 refuses the pod"
            .to_owned(),
    };
    all.map(warning).collect()
}
