//! Warnings about a configuration or a pod that is valid, but hardly ever has the intended effect.

use super::evaluation::{Evaluation, NOT_IN_CHAIN};
use super::exclusions::{ContainerTraffic, ExcludedPart, InitContainer, application_containers, covers_everything};
use super::settings::excluded_ports;
use crate::cni::{NetConf, RuleFormat};
use crate::inspect::subject::Subject;
use crate::inspect::terminal::joined;
use crate::pod::well_known::{
    EXCLUDE_CONTAINERS, EXCLUDE_DESTINATION_PORTS, EXCLUDE_DESTINATION_RANGES, EXCLUDE_OUTBOUND_PORTS,
    EXCLUDE_OUTBOUND_RANGES, EXCLUDE_UIDS,
};
use crate::pod::{Facts, Namespace, Pod};
use crate::policy::{
    DnsCapture, Exclusion, IdRange, Policy, PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner,
};
use crate::sub_plugins::{self, Warning};
use ipnet::IpNet;
use std::collections::BTreeSet;

/// Warns about excluded addresses on a node whose socket load balancing replaces Services' addresses.
fn addresses_of_services(subject: &Subject, policy: &Policy) -> Option<Warning> {
    let is_one = |network: &IpNet| network.prefix_len() == network.max_prefix_len();
    let excluded = policy.exclusions.iter().filter_map(|exclusion| exclusion.destination).filter(is_one);
    let addresses: BTreeSet<String> = excluded.map(|network| network.addr().to_string()).collect();
    (!subject.socket_lb.is_empty() && !addresses.is_empty()).then(|| {
        let what = format!(
            "{} on the pod's node replaces a Service's address before the rules see it: the exclusion of {} has no effect \
             if this is a ClusterIP",
            joined(subject.socket_lb.iter().map(|product| product.name)),
            joined(addresses)
        );
        let settings: Vec<_> = subject.socket_lb.iter().map(|product| product.setting).collect();
        Warning::new("socket-load-balancing", what, settings.join("; "))
    })
}

/// Warns about executables of the chain whose iptables rules can't exclude traffic from native rules.
fn executables_beside_native_rules(conf: &NetConf) -> Option<Warning> {
    let executables = joined(sub_plugins::executables(&conf.chain).map(|(kind, _)| kind));
    (conf.rule_format == Some(RuleFormat::Nftables) && !executables.is_empty()).then(|| {
        let what = format!(
            "the redirection is in format nftables: iptables rules of {executables} can't exclude traffic from it"
        );
        let next = "set \"dialect\": \"iptables\", or use uid-exclude or dns-exclude instead of the executable";
        Warning::new("executable-beside-native-rules", what, next)
    })
}

/// Returns all warnings about the pod.
pub(super) fn warnings(
    subject: &Subject,
    evaluations: &[Evaluation<'_>],
    policy: &Policy,
    init_containers: &[InitContainer],
) -> Vec<Warning> {
    let containers = application_containers(&subject.facts.pod);
    // The chain of another attachment can have the sub-plugin of a request.
    let is_missing = |next: &str| {
        let mut applied = evaluations.iter().filter(|one| one.result.is_ok());
        applied.all(|one| one.warnings.iter().any(|warning| warning.next == next))
    };
    let of_configurations = evaluations.iter().flat_map(|one| one.warnings.iter().cloned());
    let mut all: Vec<Warning> = Vec::new();
    for warning in of_configurations.filter(|one| one.code != NOT_IN_CHAIN || is_missing(&one.next)) {
        if !all.contains(&warning) {
            all.push(warning);
        }
    }
    all.extend(excluded_with_application(&containers, policy));
    all.extend(init_containers.iter().filter_map(excluded_after_proxy));
    all.extend(captured_too_early(init_containers, &containers, &subject.facts));
    match policy.ambient {
        true => all.extend(annotations_for_sidecars(&subject.facts.pod)),
        false => all.extend(not_yet_injected(subject)),
    }
    if let Some(redirect) = policy.redirect() {
        all.extend(ranges_without_dns(redirect, policy));
        all.extend(ports_with_captured_dns(redirect, policy));
        all.extend(executables_beside_native_rules(&subject.conf));
        all.extend(inbound_exclusion_without_effect(redirect));
    }
    if let (Some(namespace), false) = (&subject.facts.namespace, policy.is_empty()) {
        all.extend(outside_uid_range(subject, namespace));
    }
    all.extend(addresses_of_services(subject, policy));
    all.extend(sub_plugins::ignored(&subject.facts));
    all
}

/// Warns about Istio's annotations for sidecars.
fn annotations_for_sidecars(pod: &Pod) -> impl Iterator<Item = Warning> {
    let all =
        [(EXCLUDE_DESTINATION_PORTS, EXCLUDE_OUTBOUND_PORTS), (EXCLUDE_DESTINATION_RANGES, EXCLUDE_OUTBOUND_RANGES)];
    all.into_iter().filter(|(_, istios)| pod.annotations.contains_key(*istios)).map(|(own, istios)| {
        let next = format!("use {own}, with destination-exclude in the sub-plugin chain");
        Warning::new("annotation-for-sidecars", format!("annotation {istios} has no effect in the ambient mesh"), next)
    })
}

/// Warns about a pod template without a sidecar.
fn not_yet_injected(subject: &Subject) -> Option<Warning> {
    let pod = &subject.facts.pod;
    let object = subject.template_of.as_ref().filter(|_| !pod.host_network && pod.proxy().is_none())?;
    let what = format!("the pod template of {object} has no container istio-proxy; Istio injects it into each new pod");
    let next = "use the manifest of a running pod (kubectl get pod NAME -o yaml), or inject the template first: istioctl \
                kube-inject -f FILE | detour explain -f -";
    Some(Warning::new("template-without-sidecar", what, next))
}

/// Warns about an application that runs as an excluded ID, or as the proxy's.
fn excluded_with_application(containers: &[ContainerTraffic<'_>], policy: &Policy) -> Vec<Warning> {
    let warning = |container: &ContainerTraffic<'_>| {
        let name = container.name();
        let of_ids = policy.exclusions.iter().filter(|e| covers_everything(e) && e.owner != TrafficOwner::Any);
        let owner = of_ids.map(|e| e.owner).find(|owner| container.is_owned_by(*owner));
        let id = match owner {
            Some(TrafficOwner::Gid(_)) => format!("GID {}", container.gid()?),
            Some(_) => format!("UID {}", container.uid()?),
            None => container.proxys_id(policy)?,
        };
        let (whose, instead) = match owner {
            Some(_) => ("which is excluded", "exclude containers by name (detour.io/exclude-containers), or "),
            None => ("as istio-proxy does", ""),
        };
        let what = format!("container {name} runs as {id}, {whose}: all traffic that it sends bypasses the mesh");
        Some(Warning::new("excluded-with-application", what, format!("{instead}run {name} as another ID")))
    };
    containers.iter().filter(|container| !container.ends_before).filter_map(warning).collect()
}

/// Warns about an excluded init container that the proxy could serve: a native sidecar has started before it.
fn excluded_after_proxy(InitContainer { name, excluded, needless_exclusions, .. }: &InitContainer) -> Option<Warning> {
    (*excluded == ExcludedPart::All && !needless_exclusions.is_empty()).then(|| {
        let what = format!(
            "init container {name} runs after istio-proxy has started: it needs no exclusion, and its excluded traffic \
             loses mTLS"
        );
        let next = format!("remove the exclusion, unless {name} must reach servers outside of the mesh directly");
        Warning::new("excluded-after-proxy", what, next)
    })
}

/// Warns about init containers that send traffic before the sidecar listens.
fn captured_too_early(init: &[InitContainer], all: &[ContainerTraffic<'_>], facts: &Facts) -> Vec<Warning> {
    let warning = |lost: &InitContainer| {
        let container = all.iter().find(|container| container.name() == lost.name)?;
        let except = if lost.excluded == ExcludedPart::Some { ", except for excluded traffic" } else { "" };
        let next = match requesting_annotation(facts, container) {
            Some(key) => format!("annotation {key} names it already: see the warning about this annotation"),
            None => early_container_hint(container, all),
        };
        let name = &lost.name;
        let what = format!(
            "init container {name} runs before the sidecar: the traffic that it sends is captured and lost{except}"
        );
        Some(Warning::new("init-container-too-early", what, next))
    };
    init.iter().filter(|container| container.is_lost()).filter_map(warning).collect()
}

fn early_container_hint(container: &ContainerTraffic<'_>, all: &[ContainerTraffic<'_>]) -> String {
    let is_application = |uid: &u32| all.iter().any(|other| !other.ends_before && other.uid() == Some(*uid));
    let of_uid = |uid| format!("exclude its UID: annotation {EXCLUDE_UIDS}: \"{uid}\"; or ");
    let by_uid = container.uid().filter(|uid| !is_application(uid)).map(of_uid).unwrap_or_default();
    format!(
        "{by_uid}exclude it by name: annotation {EXCLUDE_CONTAINERS}: \"{}\", sub-plugin container-exclude; or make \
         istio-proxy a native sidecar that starts before it (the default since Istio 1.27; ENABLE_NATIVE_SIDECARS of istiod)",
        container.name()
    )
}

/// Returns the annotation that requests the exclusion of the container's traffic, but without effect.
fn requesting_annotation(facts: &Facts, container: &ContainerTraffic<'_>) -> Option<&'static str> {
    let uid = container.uid().map(|uid| uid.to_string());
    let requests = [(EXCLUDE_CONTAINERS, Some(container.name())), (EXCLUDE_UIDS, uid.as_deref())];
    let has = |key, item| facts.annotation(key).is_some_and(|(_, all)| all.split(',').any(|one| one.trim() == item));
    requests.into_iter().find_map(|(key, item)| has(key, item?).then_some(key))
}

/// Warns about excluded ports where the sidecar answers DNS: its answer may be an address that only it knows (Istio,
/// "DNS Proxying", address auto-allocation: 240.240.0.0/16).
fn ports_with_captured_dns(redirect: &Redirect, policy: &Policy) -> Option<Warning> {
    let of_istio = excluded_ports(&redirect.outbound_ports_exclude, &Redirect::default().outbound_ports_exclude);
    // All ports.
    let of_istio = of_istio.map(|ports| if ports.is_empty() { vec!["*".to_owned()] } else { ports });
    let is_dns = |port: &PortRange| port.first <= 53 && 53 <= port.last;
    let of_policy = policy.exclusions.iter().filter(|one| one.destination.is_none() && !one.ports.iter().any(is_dns));
    let of_policy = of_policy.flat_map(|one| one.ports.iter().map(ToString::to_string));
    let ports: BTreeSet<String> = of_istio.into_iter().flatten().chain(of_policy).collect();
    (redirect.dns != DnsCapture::Off && !ports.is_empty()).then(|| {
        let what = format!(
            "traffic to port {} bypasses the sidecar, but the sidecar answers DNS: for a ServiceEntry without addresses, \
             its answer is an address that only the sidecar knows (240.240.0.0/16)",
            joined(ports)
        );
        let next = "set addresses in such a ServiceEntry, or exclude the DNS queries too (detour.io/exclude-dns)";
        Warning::new("excluded-ports-with-captured-dns", what, next)
    })
}

/// Warns about excluded ranges while DNS is captured: the rules for DNS precede those for ranges.
fn ranges_without_dns(redirect: &Redirect, policy: &Policy) -> Option<Warning> {
    let is_excluded = |destination: Option<IpNet>| {
        let (owner, protocol) = (TrafficOwner::Any, Some(Protocol::Udp));
        let query = Exclusion { owner, destination, protocol, ports: vec![PortRange::one(53)] };
        policy.exclusions.iter().any(|exclusion| exclusion.covers(&query))
    };
    let captured: Vec<String> = match &redirect.outbound_ip_ranges_exclude {
        Ranges::All => (!is_excluded(None)).then(|| "*".to_owned()).into_iter().collect(),
        Ranges::List(nets) => nets.iter().filter(|net| !is_excluded(Some(**net))).map(ToString::to_string).collect(),
    };
    (redirect.dns != DnsCapture::Off && !captured.is_empty()).then(|| {
        let what = format!("DNS to the excluded ranges ({}) is still captured", captured.join(", "));
        let next = "exclude DNS, too: annotation detour.io/exclude-dns: excluded-ranges";
        Warning::new("excluded-ranges-without-dns", what, next)
    })
}

fn inbound_exclusion_without_effect(redirect: &Redirect) -> Option<Warning> {
    let default = Redirect::default().inbound_ports_exclude;
    (redirect.inbound_ports_include != Ports::All && redirect.inbound_ports_exclude != default).then(|| {
        let what = "inbound_ports_exclude has no effect: only the ports in inbound_ports_include are captured";
        let next = "remove the ports from includeInboundPorts, or set includeInboundPorts to *";
        Warning::new("inbound-exclusion-without-effect", what, next)
    })
}

/// Warns about UIDs outside of the namespace's range, which OpenShift's default SCC refuses.
fn outside_uid_range(subject: &Subject, namespace: &Namespace) -> Vec<Warning> {
    let Some(ranges) = sub_plugins::namespace_uids(namespace) else { return Vec::new() };
    let shown = joined(&ranges);
    let pod = &subject.facts.pod;
    let all = pod.all_containers().filter_map(|container| {
        let uid = u32::try_from(pod.user_of(container)?).ok()?;
        (!ranges.iter().any(|range| range.covers(IdRange::one(uid)))).then_some((&container.name, uid))
    });
    let warning = |(name, uid): (&String, u32)| {
        let of_namespace = &namespace.name;
        let what =
            format!("container {name} runs as UID {uid}, which is outside namespace {of_namespace}'s range {shown}");
        let next =
            "grant its service account an SCC that allows the UID (nonroot-v2, anyuid); restricted-v2 rejects the pod";
        Warning::new("uid-outside-namespace-range", what, next)
    };
    all.map(warning).collect()
}
