//! Evaluates the sub-plugin chains that apply to a pod: the one of the configuration or, for a primary plugin, those of
//! the pod's attachments.

use crate::cluster;
use crate::cni::{Block, Error, NetConf};
use crate::inspect::subject::Subject;
use crate::networks::{default_network, networks};
use crate::plugin::desired_policy;
use crate::plugin::desired_policy::about;
use crate::pod::PodRef;
use crate::pod::well_known::NETWORKS;
use crate::policy::{ContainerExclusion, Exclusion, Policy};
use crate::sub_plugins::{ChainOutput, SettingSource, Severity, SubPlugin, skip_reason};

const ADD_NEEDS_FACTS: &str = "an ADD would fail: the configuration has no source of pod facts; set \
    kubernetes.kubeconfig, kubernetes.agent_socket or kubernetes.manifests_dir";
const WITHOUT_FACTS: &str =
    "the configuration has no source of pod facts: the plugin uses the configuration alone, and ignores the pod";

/// A configuration, and its result for the pod.
pub(in crate::inspect) struct Evaluation<'a> {
    /// The name of the attachment; `None` for the node's or the only configuration.
    pub(in crate::inspect) attachment: Option<&'a str>,
    pub(in crate::inspect) conf: &'a NetConf,
    /// The output of the sub-plugin chain, or why the configuration does not apply to the pod.
    pub(in crate::inspect) result: Result<ChainOutput, String>,
    notes: Vec<String>,
}

/// Evaluates all configurations that apply to the pod.
///
/// # Errors
/// An ADD would fail.
pub(in crate::inspect) fn evaluate(subject: &Subject) -> Result<Vec<Evaluation<'_>>, Error> {
    let Some(preview) = &subject.networks else {
        let unselected =
            |why| Evaluation { attachment: None, conf: &subject.conf, result: Err(why), notes: Vec::new() };
        return Ok(vec![match unselected_network(subject)? {
            Some(why) => unselected(why),
            None => Evaluation::of(subject, None, &subject.conf)?,
        }]);
    };
    let is_network = |name: &str| preview.networks.iter().any(|network| network.name == name);
    let with_chain = preview.evaluated.iter();
    with_chain
        .map(|one| Evaluation::of(subject, is_network(&one.name).then_some(one.name.as_str()), &one.conf))
        .collect()
}

/// Returns why Multus does not run the configuration for the pod, `None` if it does.
///
/// # Errors
/// An annotation that selects networks is malformed.
pub(super) fn unselected_network(subject: &Subject) -> Result<Option<String>, Error> {
    let (name, pod) = (&subject.conf.name, &subject.facts.pod);
    if !subject.as_attachment {
        return Ok(None);
    }
    let selected = networks(pod)?.elements;
    let default = default_network(pod, &pod.namespace)?.elements;
    if selected.iter().chain(&default).any(|one| one.name == *name) {
        return Ok(None);
    }
    let names: Vec<&str> = selected.iter().map(|one| one.name.as_str()).collect();
    let found = match (pod.annotations.contains_key(NETWORKS), names.is_empty()) {
        (false, _) => "is not set".to_owned(),
        (true, true) => "selects no network".to_owned(),
        (true, false) => format!("selects {}", names.join(", ")),
    };
    Ok(Some(format!("the pod does not select network {name}: annotation {NETWORKS} {found}")))
}

/// Returns whether the sub-plugin chain contains `istio-redirect`.
pub(in crate::inspect) fn has_redirect(chain: &[Block]) -> bool {
    chain.iter().any(|block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect))
}

impl<'a> Evaluation<'a> {
    fn of(subject: &Subject, attachment: Option<&'a str>, conf: &'a NetConf) -> Result<Self, Error> {
        let pod = &subject.facts.pod;
        let pod_ref = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
        if let Some(reason) = skip_reason(conf, &pod_ref) {
            return Ok(Self { attachment, conf, result: Err(reason.to_string()), notes: Vec::new() });
        }
        let (has_redirect, is_primary) = (has_redirect(&conf.chain), conf.primary.is_some());
        let has_source = cluster::source(&conf.kubernetes).is_some();
        // Without a source of facts, the plugin evaluates an attachment by its configuration alone where it can.
        let facts = (has_source || has_redirect || is_primary).then_some(&subject.facts);
        let with_name = |error| match attachment {
            Some(name) => about(name, error),
            None => error,
        };
        let mut output = desired_policy::output(&conf.chain, conf, facts).map_err(with_name)?;
        let mut notes = Vec::new();
        // A primary plugin can also use the service account of the pod in which it runs.
        if !has_source && !is_primary {
            notes.push(if has_redirect { ADD_NEEDS_FACTS } else { WITHOUT_FACTS }.to_owned());
        }
        notes.extend(std::mem::take(&mut output.notes).into_iter().map(|note| match note.severity {
            Severity::Info => note.text,
            Severity::Warning => format!("warning: {}", note.text),
        }));
        Ok(Self { attachment, conf, result: Ok(output), notes })
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

    /// Returns the keys of all settings with their sources.
    pub(in crate::inspect) fn settings(&self) -> impl Iterator<Item = (&'static str, String)> {
        let settings = self.result.iter().flat_map(|output| &output.origins.settings);
        settings.map(|(key, source)| (*key, source_text(source)))
    }

    /// Returns the exclusions with their sources.
    pub(in crate::inspect) fn exclusions(&self) -> impl Iterator<Item = (&Exclusion, String)> {
        let exclusions = self.result.iter().flat_map(|output| &output.origins.exclusions);
        exclusions.map(|(exclusion, source)| (exclusion, source_text(source)))
    }

    /// Returns the excluded containers with their sources.
    pub(in crate::inspect) fn containers(&self) -> impl Iterator<Item = (&ContainerExclusion, String)> {
        let containers = self.result.iter().flat_map(|output| &output.origins.containers);
        containers.map(|(exclusion, source)| (exclusion, source_text(source)))
    }

    /// Returns the notes that an ADD would log.
    pub(in crate::inspect) fn notes(&self) -> impl Iterator<Item = String> {
        self.notes.iter().map(|note| match self.attachment {
            Some(name) => format!("network {name}: {note}"),
            None => note.clone(),
        })
    }
}

/// Returns a source in words. The path in an attachment's configuration already starts with the attachment's name.
fn source_text(source: &SettingSource) -> String {
    match source {
        SettingSource::Configuration(path) if path.starts_with("network ") => path.clone(),
        other => other.to_string(),
    }
}
