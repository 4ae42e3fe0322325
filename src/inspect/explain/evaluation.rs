//! Evaluates the sub-plugin chains that apply to a pod: the one of the configuration or, for a primary plugin, those of
//! the pod's attachments. Also what excluded traffic lacks in the ambient mesh.

use crate::cluster::{self, ObjectRef};
use crate::cni::{Block, Error, GLOBAL_NAMESPACE, NetConf, RuleFormat, SYSTEM_NAMESPACE};
use crate::inspect::subject::{ConfigurationSource, Subject};
use crate::inspect::terminal::joined;
use crate::networks::{InstalledNetwork, networks};
use crate::plugin::evaluation;
use crate::pod::well_known::{AMBIENT_BYPASS_INBOUND, AMBIENT_REDIRECTION, NETWORKS};
use crate::pod::{Facts, PodRef};
use crate::policy::Policy;
use crate::sub_plugins::{
    self, ChainOutput, DecidedRequest, Note, Severity, SubPlugin, Warning, bypasses_inbound, labeled_by, skip_reason,
};

/// The code of a warning that an ADD would fail.
pub(super) const ADD_FAILS: &str = "add-fails";
/// The code of the warning about a request whose sub-plugin is not in the chain.
pub(super) const NOT_IN_CHAIN: &str = "not-in-chain";

const WITHOUT_FACTS: &str =
    "the configuration has no source of pod facts: the plugin uses the configuration alone, and ignores the pod";

/// A configuration, and its result for the pod.
pub(super) struct Evaluation<'a> {
    /// The name of the attachment; `None` for the node's or the only configuration.
    pub(in crate::inspect) attachment: Option<&'a str>,
    pub(in crate::inspect) conf: &'a NetConf,
    /// The output of the sub-plugin chain, or why the configuration does not apply to the pod.
    pub(in crate::inspect) result: Result<ChainOutput, String>,
    /// The parts of this configuration that have no effect, or with which an ADD fails.
    pub(super) warnings: Vec<Warning>,
    /// The notes that an ADD would log.
    pub(super) notes: Vec<String>,
}

/// Evaluates all configurations that apply to the pod.
///
/// # Errors
/// An ADD would fail.
pub(super) fn evaluate(subject: &Subject) -> Result<Vec<Evaluation<'_>>, Error> {
    if let Some(failure) = &subject.failure {
        return Err(failure.clone());
    }
    let Some(preview) = &subject.networks else {
        return Ok(vec![match unselected_network(subject) {
            Some((why, next)) => {
                let what = format!("Multus does not run this configuration for the pod: {why}");
                let warnings = vec![Warning::new("network-not-selected", what, next)];
                Evaluation { warnings, ..Evaluation::skipped(None, &subject.conf, why) }
            }
            None => Evaluation::of(subject, None, &subject.conf)?,
        }]);
    };
    let is_network = |name: &str| preview.networks.iter().any(|(network, _)| network.name == name);
    let with_chain = preview.evaluated.iter();
    with_chain
        .map(|one| Evaluation::of(subject, is_network(&one.name).then_some(one.name.as_str()), &one.conf))
        .collect()
}

/// Returns why Multus does not run the configuration for the pod, and what to do; `None` if it does.
fn unselected_network(subject: &Subject) -> Option<(String, String)> {
    let (name, pod) = (&subject.conf.name, &subject.facts.pod);
    let shared = format!("{GLOBAL_NAMESPACE}/{name}");
    let is_shared = |object: &ObjectRef| [GLOBAL_NAMESPACE, SYSTEM_NAMESPACE].contains(&&*object.namespace);
    Some(match subject.attachment.as_ref()? {
        InstalledNetwork::Runs => return None,
        // Multus has added the networks of a pod with an address: the definition existed then.
        InstalledNetwork::Unknown(_) | InstalledNetwork::Missing(_) if !pod.addresses.is_empty() => return None,
        // The chart creates it, and Istio's injector selects it.
        InstalledNetwork::Unknown(object) if is_shared(object) => return None,
        InstalledNetwork::Unknown(object) | InstalledNetwork::Missing(object) => (
            format!("the pod selects {object}, and no such NetworkAttachmentDefinition is known"),
            format!("select {shared} in annotation {NETWORKS}; if {object} exists, add it: --definitions FILE"),
        ),
        InstalledNetwork::HasOwn(object, types) => (
            format!("NetworkAttachmentDefinition {object} has its own configuration (plugins: {})", types.join(", ")),
            format!("remove spec.config of {object}; to explain its configuration, omit --config"),
        ),
        InstalledNetwork::NotSelected => {
            let selected = networks(pod).map(|selections| selections.elements).unwrap_or_default();
            let names = joined(selected.iter().map(|one| &one.object.name));
            let found = match pod.annotations.contains_key(NETWORKS) {
                false => "is not set".to_owned(),
                true if names.is_empty() => "selects no network".to_owned(),
                true => format!("selects {names}"),
            };
            (
                format!("the pod does not select network {name}: annotation {NETWORKS} {found}"),
                format!(
                    "add {shared} to annotation {NETWORKS}; if the plugin runs for every pod, use the container runtime's \
                     configuration list (--config FILE.conflist) or the file in Multus's auxiliary chain (--config \
                     {name}/FILE.conf)"
                ),
            )
        }
    })
}

/// Returns whether the sub-plugin chain contains `istio-redirect`.
pub(super) fn has_redirect(chain: &[Block]) -> bool {
    chain.iter().any(|block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect))
}

impl<'a> Evaluation<'a> {
    /// Returns the evaluation of a configuration that does not apply to the pod.
    const fn skipped(attachment: Option<&'a str>, conf: &'a NetConf, why: String) -> Self {
        Self { attachment, conf, result: Err(why), warnings: Vec::new(), notes: Vec::new() }
    }

    fn of(subject: &Subject, attachment: Option<&'a str>, conf: &'a NetConf) -> Result<Self, Error> {
        let pod = &subject.facts.pod;
        let pod_ref = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
        if let Some(reason) = skip_reason(conf, &pod_ref) {
            return Ok(Self::skipped(attachment, conf, reason.to_string()));
        }
        // A primary plugin can also use the service account of the pod in which it runs.
        let has_source = conf.primary.is_some() || cluster::source(&conf.kubernetes).is_some();
        let needs_facts = conf.chain.iter().filter_map(SubPlugin::of).any(SubPlugin::needs_facts);
        let facts = (has_source || needs_facts).then_some(&subject.facts);
        let with_name = |error: Error| error.of_network(attachment);
        let mut output = evaluation::output(&conf.chain, conf, facts).map_err(with_name)?;
        let of_network = |text: String| match attachment {
            Some(name) => format!("network {name}: {text}"),
            None => text,
        };
        // Without the network's name, so that the report has the first ones once for all configurations.
        let (mut notes, mut warnings) = (Vec::new(), Vec::new());
        // The built-in configuration has no source.
        if subject.origin.source != ConfigurationSource::BuiltIn && !has_source {
            if needs_facts {
                let next = "set kubernetes.kubeconfig, kubernetes.agent_socket or kubernetes.manifests_dir";
                warnings.push(Warning::new(ADD_FAILS, "the configuration has no source of pod facts", next));
            } else {
                notes.push(of_network(WITHOUT_FACTS.to_owned()));
            }
        }
        let is_iptables = conf.rule_format == Some(RuleFormat::Iptables) && output.policy.redirect().is_some();
        // xt_owner.c requires that the writer of a rule is in the user namespace of the network namespace.
        if is_iptables && pod.has_own_users {
            let what = "the pod has its own user namespace (hostUsers: false), in which the kernel refuses the redirection \
                        in format iptables";
            warnings.push(Warning::new(ADD_FAILS, what, "set dialect to nftables, or remove it"));
        }
        let rejected = output.rejected(&conf.bounds);
        warnings.extend(
            rejected.map(|request| Warning::new(ADD_FAILS, of_network(request.reason()), DecidedRequest::NEXT)),
        );
        for Note { text, severity } in std::mem::take(&mut output.notes) {
            match (sub_plugins::missing_sub_plugin(&text), severity) {
                (Some(next), _) => warnings.push(Warning::new(NOT_IN_CHAIN, of_network(text), next)),
                (None, Severity::Info) => notes.push(of_network(text)),
                (None, Severity::Warning) => notes.push(of_network(format!("warning: {text}"))),
            }
        }
        Ok(Self { attachment, conf, result: Ok(output), warnings, notes })
    }

    /// Returns the policy of this configuration alone.
    pub(in crate::inspect) fn policy(&self) -> Policy {
        self.result.as_ref().map(|output| output.policy.clone()).unwrap_or_default()
    }

    /// Returns in one line whether and why this configuration redirects the pod.
    pub(in crate::inspect) fn decision(&self) -> String {
        match &self.result {
            Ok(output) => output.decision.to_string(),
            Err(why) => format!("not redirected: {why}"),
        }
    }
}

/// Returns notes about a pod of the ambient mesh, and about one with a sidecar although a label asks for the ambient mesh.
pub(super) fn ambient_notes(Facts { pod, namespace }: &Facts, policy: &Policy) -> Vec<String> {
    if !policy.ambient {
        let label = labeled_by(pod, namespace.as_ref()).filter(|_| !pod.host_network && pod.proxy().is_some());
        let note = |label| format!("{label}, but the pod has a sidecar, which takes precedence");
        return label.map(note).into_iter().collect();
    }
    let without_mtls = "excluded traffic has no mTLS: a peer whose policy is STRICT rejects it, and authorization policies and \
        telemetry do not see it";
    let notes = [
        (!pod.annotations.contains_key(AMBIENT_REDIRECTION))
            .then(|| format!("annotation {AMBIENT_REDIRECTION} is missing: istio-cni has not redirected the pod yet")),
        bypasses_inbound(pod)
            .then(|| format!("annotation {AMBIENT_BYPASS_INBOUND} is true: inbound connections bypass ztunnel")),
        (!policy.is_empty()).then(|| without_mtls.to_owned()),
    ];
    notes.into_iter().flatten().collect()
}
