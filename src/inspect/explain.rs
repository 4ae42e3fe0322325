//! What a configuration makes of a pod, and why.
//!
//! The networks of a pod under a primary plugin, and what each contributes.

use super::evaluation::{Evaluation, hear, redirects};
use super::evaluation::{Exemption, exemptions};
use super::settings::{Setting, settings};
use super::subject::Subject;
use super::terminal::{Cell, Screen, TextReport, Tone};
use super::warnings::{Warning, surprises};
use crate::cni::Error;
use crate::plugin::primary::{NetworkRunner, PreviewedNetwork, united};
use crate::policy::{Policy, Redirect};
use crate::sub_plugins::{Decision, SettingSource, SkipReason, considered};
use serde::Serialize;

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// `NAMESPACE/NAME`.
    pub pod: String,
    /// The object whose pod template it is, `KIND NAMESPACE/NAME`; none for a pod.
    pub template_of: Option<String>,
    /// The configuration's `name`.
    pub network: String,
    /// The pod's networks; none where the configuration is not a primary plugin's.
    pub networks: Vec<NetworkReport>,
    /// Whether this configuration sends the pod's traffic to its sidecar.
    pub redirected: bool,
    /// Why or why not, in one line.
    pub decision: String,
    /// What was looked at, up to what decided.
    pub considered: Vec<ExplainedRule>,
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
pub struct ExplainedRule {
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

const NOBODY: &str = "not redirected: no network of the pod asks for it, and the node has no chain";

/// Several explanations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Explanations(pub Vec<Explanation>);

impl TextReport for Explanations {
    fn write(&self, page: &mut Screen) {
        for explanation in &self.0 {
            let pod = || format!("Pod {}", explanation.pod);
            page.heading(&explanation.template_of.clone().unwrap_or_else(pod));
            explanation.write(page);
        }
    }
}

/// Finds out, as an ADD would.
///
/// # Errors
/// Those with which an ADD would fail: the configuration or the pod asks for something impossible, or two
/// attachments contradict each other.
pub fn explain(subject: &Subject) -> Result<Explained, Error> {
    let heard = hear(subject)?;
    let all: Vec<(&str, Policy)> = heard.iter().map(|one| (one.attachment.unwrap_or_default(), one.policy())).collect();
    let policy = united(&all)?;
    let speaks = |one: &&Evaluation<'_>| one.policy().redirect().is_some();
    let speaker = heard.iter().find(speaks).or_else(|| heard.iter().find(|one| one.answer.is_ok())).or(heard.first());
    let used = subject.networks.as_ref();
    let settings = policy.redirect().map(|redirect| settings(redirect, heard.iter().flat_map(Evaluation::settings)));
    let explanation = Explanation {
        pod: subject.name(),
        template_of: subject.template_of.clone(),
        network: subject.conf.name.clone(),
        networks: used.iter().flat_map(|used| &used.networks).map(|one| NetworkReport::of(one, &heard)).collect(),
        redirected: policy.redirect().is_some(),
        decision: speaker.map_or_else(|| NOBODY.to_owned(), Evaluation::decision),
        considered: speaker.map(|speaker| considered_by(subject, speaker)).unwrap_or_default(),
        proxy: policy.redirect().zip(settings.as_ref()).map(|(redirect, settings)| Proxy::of(redirect, settings)),
        settings: settings.unwrap_or_default(),
        exempt: exemptions(&policy.exclusions_in_effect(), heard.iter().flat_map(Evaluation::exclusions)),
        warnings: surprises(subject, &policy)?,
        notes: notes(subject, &heard),
    };
    Ok(Explained { explanation, policy })
}

fn notes(subject: &Subject, heard: &[Evaluation<'_>]) -> Vec<String> {
    let of_networks = subject.networks.iter().flat_map(|used| used.warnings.iter().cloned());
    let said = subject.conf.warnings.iter().cloned().chain(of_networks).chain(heard.iter().flat_map(Evaluation::notes));
    said.collect()
}

impl Proxy {
    fn of(redirect: &Redirect, settings: &[Setting]) -> Self {
        let sources = |key: &str| {
            let setting = settings.iter().find(|setting| setting.key == key);
            setting.map(|setting| setting.sources.clone()).unwrap_or_default()
        };
        Self {
            uid: redirect.proxy_uid.clone(),
            uid_sources: sources("proxy_uid"),
            gid: redirect.proxy_gid.clone(),
            gid_sources: sources("proxy_gid"),
        }
    }
}

/// What was looked at, up to what decided.
fn considered_by(subject: &Subject, heard: &Evaluation<'_>) -> Vec<ExplainedRule> {
    let namespace = &subject.facts.pod.namespace;
    let is_for_it = ExplainedRule {
        wanted: "the configuration is for it".to_owned(),
        found: heard.answer.as_ref().map_or_else(Clone::clone, |_| format!("namespace {namespace} is not excluded")),
        holds: heard.answer.is_ok(),
    };
    let output = heard.answer.iter();
    let more = output.flat_map(|output| rules(subject, heard, &output.decision, &output.origins.settings));
    [is_for_it].into_iter().chain(more).collect()
}

/// The pod's own rules with those that are the chain's.
fn rules(
    subject: &Subject,
    heard: &Evaluation<'_>,
    decision: &Decision,
    origins: &[(&'static str, SettingSource)],
) -> Vec<ExplainedRule> {
    let chain = &heard.conf.chain;
    let in_chain = redirects(chain);
    let types: Vec<&str> = chain.iter().filter_map(|block| block.keys.get("type")?.as_str()).collect();
    let own = ExplainedRule {
        wanted: "the chain has istio-redirect".to_owned(),
        found: format!("chain {}", types.join(", ")),
        holds: in_chain,
    };
    let pods = considered(&subject.facts.pod);
    let pods =
        pods.into_iter().map(|rule| ExplainedRule { wanted: rule.wanted.into(), found: rule.found, holds: rule.holds });
    match decision {
        Decision::LeaveAlone(SkipReason::NotInChain) => vec![own],
        Decision::LeaveAlone(SkipReason::ModeNone) => {
            let source = origins.iter().find(|(key, _)| *key == "inbound_interception_mode");
            let source = source.map_or_else(|| "pod".to_owned(), |(_, source)| source.to_string());
            let found = format!("the interception mode is NONE ({source})");
            let none = ExplainedRule { wanted: "interception is wanted".to_owned(), found, holds: false };
            let heard = pods.filter(|_| in_chain);
            in_chain.then_some(own).into_iter().chain(heard).chain([none]).collect()
        }
        _ if in_chain => [own].into_iter().chain(pods).collect(),
        _ => pods.collect(),
    }
}

impl TextReport for Explanation {
    fn write(&self, page: &mut Screen) {
        let tone = if self.redirected { Tone::Good } else { Tone::Notable };
        let who = match &self.template_of {
            Some(object) => format!("Pod {} of {object} is", self.pod),
            None => format!("Pod {} is", self.pod),
        };
        page.line(&[Cell::of(who), Cell::of(&self.decision).tone(tone)]);
        if !self.networks.is_empty() {
            page.heading("Networks");
            page.table(&self.networks.iter().map(NetworkReport::row).collect::<Vec<_>>());
        }
        page.heading("Why");
        let rule = |rule: &ExplainedRule| {
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

/// A network of the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetworkReport {
    /// `NAMESPACE/NAME` of its definition, else its configuration's name.
    pub name: String,
    /// `pod`, where the pod selects it, else `configuration`.
    pub selected_by: &'static str,
    /// Its interface; none where it has none of its own.
    pub interface: Option<String>,
    /// Its plugins' types; empty where its configuration is on the node only.
    pub types: Vec<String>,
    /// `delegate`: executables, with an interface of their own; `chain`: an executable on the default
    /// network's result; `in-process`: no executable.
    pub runs: &'static str,
    /// What it says of the redirection; none where it has no say.
    pub decision: Option<String>,
    /// How many exclusions it asks for.
    pub exclusions: usize,
}

impl NetworkReport {
    pub(super) fn of(used: &PreviewedNetwork, heard: &[Evaluation<'_>]) -> Self {
        let own =
            heard.iter().find(|one| one.attachment == Some(used.name.as_str()) && used.place == NetworkRunner::Here);
        Self {
            name: used.name.clone(),
            selected_by: if used.selected { "pod" } else { "configuration" },
            interface: used.interface.clone(),
            types: used.types.clone(),
            runs: match used.place {
                NetworkRunner::Delegate => "delegate",
                NetworkRunner::Chain => "chain",
                NetworkRunner::Here => "in-process",
            },
            decision: own.map(|own| match redirects(&own.conf.chain) {
                true => own.decision(),
                false => "istio-redirect is not in its chain".to_owned(),
            }),
            exclusions: own.map_or(0, |own| own.policy().exclusions_in_effect().len()),
        }
    }

    /// Its line of a table.
    pub(super) fn row(&self) -> Vec<Cell> {
        let says = match (&self.decision, self.exclusions) {
            (None, _) => String::new(),
            (Some(decision), 0) => decision.clone(),
            (Some(decision), 1) => format!("{decision}; 1 exclusion"),
            (Some(decision), n) => format!("{decision}; {n} exclusions"),
        };
        vec![
            Cell::of(&self.name).tone(Tone::Strong),
            Cell::of(self.interface.as_deref().unwrap_or("-")),
            Cell::of(if self.types.is_empty() { "not looked at".to_owned() } else { self.types.join(", ") }),
            Cell::of(self.runs),
            Cell::of(format!("by {}", self.selected_by)).tone(Tone::Faint),
            Cell::of(says),
        ]
    }
}
