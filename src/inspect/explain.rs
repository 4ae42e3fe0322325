//! What a configuration makes of a pod, and why.

use super::exemption::{Exemption, exemptions};
use super::page::{Cell, Page, Sheet, Tone};
use super::settings::{Setting, settings};
use super::subject::Subject;
use super::surprise::{Warning, surprises};
use crate::chain::{Decision, Reason, Severity, Source, SubPlugin, considered};
use crate::cluster;
use crate::cni::{Block, Error};
use crate::plugin::wish;
use crate::pod::PodRef;
use crate::policy::Policy;
use serde::Serialize;

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// `NAMESPACE/NAME`.
    pub pod: String,
    /// The configuration's `name`.
    pub network: String,
    /// Whether this configuration sends the pod's traffic to its sidecar.
    pub redirected: bool,
    /// Why or why not, in one line.
    pub decision: String,
    /// What was looked at, up to what decided.
    pub considered: Vec<Rule>,
    /// The proxy; none where nothing is redirected.
    pub proxy: Option<Proxy>,
    /// Every setting of the redirection; none where nothing is redirected.
    pub settings: Vec<Setting>,
    /// What leaves untouched.
    pub exempt: Vec<Exemption>,
    /// What will surprise.
    pub warnings: Vec<Warning>,
    /// What the configuration and the pod ask for that is not as it seems, as the log has it.
    pub notes: Vec<String>,
}

/// A rule of the decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rule {
    /// What must hold.
    pub wanted: String,
    /// What there is.
    pub found: String,
    /// Whether it holds; the first that does not decides.
    pub holds: bool,
}

/// By what the proxy's own traffic is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Proxy {
    /// Its UIDs.
    pub uid: Vec<u32>,
    /// Whose word they are.
    pub uid_sources: Vec<String>,
    /// Its GIDs.
    pub gid: Vec<u32>,
    /// Whose word they are.
    pub gid_sources: Vec<String>,
}

/// An explanation, and the policy that it explains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explained {
    /// For people and programs.
    pub explanation: Explanation,
    /// For rules.
    pub policy: Policy,
}

const NO_SOURCE: &str = "the configuration names no source of facts, without which an ADD fails: set kubernetes.kubeconfig, \
    kubernetes.agent_socket or kubernetes.manifests_dir";

/// Finds out, as an ADD would.
///
/// # Errors
/// Those with which an ADD would fail: the configuration or the pod asks for something impossible.
pub fn explain(subject: &Subject) -> Result<Explained, Error> {
    let (conf, facts) = (&subject.conf, &subject.facts);
    let wanted = PodRef { namespace: facts.pod.namespace.clone(), name: facts.pod.name.clone(), uid: None };
    let mut explanation = Explanation {
        pod: subject.name(),
        network: conf.name.clone(),
        redirected: false,
        decision: String::new(),
        considered: Vec::new(),
        proxy: None,
        settings: Vec::new(),
        exempt: Vec::new(),
        warnings: Vec::new(),
        notes: conf.warnings.clone(),
    };
    let left_out = wish::left_out(conf, &wanted);
    explanation.considered.push(Rule {
        wanted: "the configuration is for it".to_owned(),
        found: left_out.clone().unwrap_or_else(|| format!("namespace {} is not excluded", wanted.namespace)),
        holds: left_out.is_none(),
    });
    if let Some(why) = left_out {
        explanation.decision = format!("not redirected: {why}");
        return Ok(Explained { explanation, policy: Policy::default() });
    }
    // An attachment without a source of facts goes by its configuration alone, where that can be.
    let in_chain = redirects(&conf.chain);
    let has_facts = cluster::source(&conf.kubernetes).is_some();
    let output = wish::output(&conf.chain, conf, (has_facts || in_chain).then_some(facts))?;
    if !has_facts {
        let msg = if in_chain {
            NO_SOURCE
        } else {
            "the configuration names no source of facts: what the pod is does not count"
        };
        explanation.notes.push(msg.to_owned());
    }
    let policy = output.policy;
    explanation.redirected = policy.redirect().is_some();
    explanation.decision = output.decision.to_string();
    explanation.considered.extend(rules(subject, &output.decision, &output.origins.settings));
    explanation.exempt = exemptions(&policy.exclusions, &output.origins.exclusions);
    explanation.warnings = surprises(subject, &policy);
    explanation.notes.extend(output.notes.into_iter().map(|note| match note.severity {
        Severity::Info => note.text,
        Severity::Warning => format!("warning: {}", note.text),
    }));
    if let Some(redirect) = policy.redirect() {
        explanation.settings = settings(redirect, &output.origins.settings);
        let sources = |key: &str| {
            let setting = explanation.settings.iter().find(|setting| setting.key == key);
            setting.map(|setting| setting.sources.clone()).unwrap_or_default()
        };
        explanation.proxy = Some(Proxy {
            uid: redirect.proxy_uid.clone(),
            uid_sources: sources("proxy_uid"),
            gid: redirect.proxy_gid.clone(),
            gid_sources: sources("proxy_gid"),
        });
    }
    Ok(Explained { explanation, policy })
}

fn redirects(chain: &[Block]) -> bool {
    chain.iter().any(|block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect))
}

/// The pod's own rules with those that are the chain's.
fn rules(subject: &Subject, decision: &Decision, origins: &[(&'static str, Source)]) -> Vec<Rule> {
    let chain = &subject.conf.chain;
    let in_chain = redirects(chain);
    let types: Vec<&str> = chain.iter().filter_map(|block| block.keys.get("type")?.as_str()).collect();
    let own = Rule {
        wanted: "the chain has istio-redirect".to_owned(),
        found: format!("chain {}", types.join(", ")),
        holds: in_chain,
    };
    let pods = considered(&subject.facts.pod);
    let pods = pods.into_iter().map(|rule| Rule { wanted: rule.wanted.into(), found: rule.found, holds: rule.holds });
    match decision {
        Decision::LeaveAlone(Reason::NotInChain) => vec![own],
        Decision::LeaveAlone(Reason::ModeNone) => {
            let source = origins.iter().find(|(key, _)| *key == "inbound_interception_mode");
            let source = source.map_or_else(|| "pod".to_owned(), |(_, source)| source.to_string());
            let found = format!("the interception mode is NONE ({source})");
            let none = Rule { wanted: "interception is wanted".to_owned(), found, holds: false };
            let heard = pods.filter(|_| in_chain);
            in_chain.then_some(own).into_iter().chain(heard).chain([none]).collect()
        }
        _ if in_chain => [own].into_iter().chain(pods).collect(),
        _ => pods.collect(),
    }
}

impl Sheet for Explanation {
    fn write(&self, page: &mut Page) {
        let tone = if self.redirected { Tone::Good } else { Tone::Notable };
        page.line(&[Cell::of(format!("Pod {} is", self.pod)), Cell::of(&self.decision).tone(tone)]);
        page.heading("Why");
        let rule = |rule: &Rule| {
            let (word, tone) = if rule.holds { ("yes", Tone::Good) } else { ("no", Tone::Bad) };
            vec![Cell::of(word).tone(tone), Cell::of(&rule.wanted), Cell::of(&rule.found).tone(Tone::Faint)]
        };
        page.table(&self.considered.iter().map(rule).collect::<Vec<_>>());
        if let Some(proxy) = &self.proxy {
            page.heading("Proxy");
            let row = |name: &str, ids: &[u32], sources: &[String]| {
                let ids = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                vec![Cell::of(name), Cell::of(ids).tone(Tone::Strong), Cell::of(sources.join("; ")).tone(Tone::Faint)]
            };
            page.table(&[row("UID", &proxy.uid, &proxy.uid_sources), row("GID", &proxy.gid, &proxy.gid_sources)]);
        }
        if !self.settings.is_empty() {
            page.heading("Settings");
            let row = |setting: &Setting| {
                let tone = if setting.is_default() { Tone::Faint } else { Tone::Strong };
                let (value, sources) = (setting.shown(), setting.sources.join("; "));
                vec![Cell::of(setting.key), Cell::of(value).tone(tone), Cell::of(sources).tone(Tone::Faint)]
            };
            page.table(&self.settings.iter().map(row).collect::<Vec<_>>());
        }
        if !self.exempt.is_empty() {
            page.heading("Leaves untouched");
            let row = |e: &Exemption| {
                vec![Cell::of(&e.who), Cell::of(e.what()), Cell::of(e.sources.join("; ")).tone(Tone::Faint)]
            };
            page.table(&self.exempt.iter().map(row).collect::<Vec<_>>());
        }
        if !self.warnings.is_empty() {
            page.heading("What may surprise");
            for warning in &self.warnings {
                page.table(&[vec![Cell::of("!").tone(Tone::Notable), Cell::of(&warning.what)]]);
                page.table(&[vec![Cell::of(" "), Cell::of(format!("→ {}", warning.next)).tone(Tone::Faint)]]);
            }
        }
        if !self.notes.is_empty() {
            page.heading("Notes");
            page.table(&self.notes.iter().map(|note| vec![Cell::of(note)]).collect::<Vec<_>>());
        }
    }
}
