//! What each configuration makes of the pod that asks for something: the one that there is or, of a
//! primary plugin, those of the pod's attachments.

use super::subject::Subject;
use crate::chain::{Output, Severity, Source, SubPlugin};
use crate::cluster;
use crate::cni::{Block, Error, NetConf};
use crate::networks::{NETWORKS, default_network, networks};
use crate::plugin::primary::about;
use crate::plugin::wish;
use crate::pod::PodRef;
use crate::policy::{Exclusion, Policy};

const NO_SOURCE: &str = "the configuration names no source of facts, without which an ADD fails: set kubernetes.kubeconfig, \
    kubernetes.agent_socket or kubernetes.manifests_dir";
const CONFIGURATION_ALONE: &str = "the configuration names no source of facts: what the pod is does not count";

/// A configuration, and what it makes of the pod.
pub(super) struct Heard<'a> {
    /// The attachment's name, where the configuration is one's.
    pub(super) attachment: Option<&'a str>,
    pub(super) conf: &'a NetConf,
    /// What it makes of the pod, or why it is not for it.
    pub(super) answer: Result<Output, String>,
    notes: Vec<String>,
}

/// All that are heard for the pod.
///
/// # Errors
/// Those with which an ADD would fail.
pub(super) fn hear(subject: &Subject) -> Result<Vec<Heard<'_>>, Error> {
    let Some(networks) = &subject.networks else {
        let unselected = |why| Heard { attachment: None, conf: &subject.conf, answer: Err(why), notes: Vec::new() };
        return Ok(vec![match unselected_network(subject)? {
            Some(why) => unselected(why),
            None => Heard::of(subject, None, &subject.conf)?,
        }]);
    };
    let own = |name: &str| networks.networks.iter().any(|network| network.name == name);
    let asking = networks.asking.iter();
    asking.map(|one| Heard::of(subject, own(&one.name).then_some(one.name.as_str()), &one.conf)).collect()
}

/// Why Multus does not run the configuration for the pod.
///
/// # Errors
/// An annotation that selects networks is wrong.
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
        (false, _) => "which is not set".to_owned(),
        (true, true) => "which selects none".to_owned(),
        (true, false) => format!("which selects {}", names.join(", ")),
    };
    Ok(Some(format!("network {name} is not selected by annotation {NETWORKS}, {found}")))
}

/// Whether the chain has a redirection.
pub(super) fn redirects(chain: &[Block]) -> bool {
    chain.iter().any(|block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect))
}

impl<'a> Heard<'a> {
    fn of(subject: &Subject, attachment: Option<&'a str>, conf: &'a NetConf) -> Result<Self, Error> {
        let pod = &subject.facts.pod;
        let wanted = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
        if let Some(why) = wish::left_out(conf, &wanted) {
            return Ok(Self { attachment, conf, answer: Err(why), notes: Vec::new() });
        }
        let (in_chain, is_primary) = (redirects(&conf.chain), conf.primary.is_some());
        let has_facts = cluster::source(&conf.kubernetes).is_some();
        // An attachment without a source of facts goes by its configuration alone, where that can be.
        let facts = (has_facts || in_chain || is_primary).then_some(&subject.facts);
        let named = |error| match attachment {
            Some(name) => about(name, error),
            None => error,
        };
        let mut output = wish::output(&conf.chain, conf, facts).map_err(named)?;
        let mut notes = Vec::new();
        // A primary plugin may have the environment of a pod of the cluster for a source.
        if !has_facts && !is_primary {
            notes.push(if in_chain { NO_SOURCE } else { CONFIGURATION_ALONE }.to_owned());
        }
        notes.extend(std::mem::take(&mut output.notes).into_iter().map(|note| match note.severity {
            Severity::Info => note.text,
            Severity::Warning => format!("warning: {}", note.text),
        }));
        Ok(Self { attachment, conf, answer: Ok(output), notes })
    }

    /// What it asks for.
    pub(super) fn policy(&self) -> Policy {
        self.answer.as_ref().map(|output| output.policy.clone()).unwrap_or_default()
    }

    /// Why, or why not, in one line.
    pub(super) fn decision(&self) -> String {
        match &self.answer {
            Ok(output) => output.decision.to_string(),
            Err(why) => format!("not redirected: {why}"),
        }
    }

    /// Whose word each setting of the redirection is.
    pub(super) fn settings(&self) -> impl Iterator<Item = (&'static str, String)> {
        let settings = self.answer.iter().flat_map(|output| &output.origins.settings);
        settings.map(|(key, source)| (*key, word(source)))
    }

    /// Whose word each exclusion is.
    pub(super) fn exclusions(&self) -> impl Iterator<Item = (&Exclusion, String)> {
        let exclusions = self.answer.iter().flat_map(|output| &output.origins.exclusions);
        exclusions.map(|(exclusion, source)| (exclusion, word(source)))
    }

    /// What the log of an ADD would say.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        self.notes.iter().map(|note| match self.attachment {
            Some(name) => format!("network {name}: {note}"),
            None => note.clone(),
        })
    }
}

/// A source; the path of an attachment's block names the attachment.
fn word(source: &Source) -> String {
    match source {
        Source::Configuration(path) if path.starts_with("network ") => path.clone(),
        other => other.to_string(),
    }
}
