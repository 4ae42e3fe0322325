//! `explain`: what a configuration does with a pod's traffic, and why; for a primary plugin, also the pod's networks.

mod evaluation;
mod exclusions;
mod picture;
mod settings;
mod warnings;

pub use crate::sub_plugins::Warning;
pub(super) use exclusions::application_containers;
pub use exclusions::{ExcludedContainer, ExcludedPart, ExcludedTraffic, InitContainer};
pub use picture::picture;
pub use settings::{ExplainedGuard, Setting};

use crate::cni::Error;
use crate::inspect::configurations::SelectedNetwork;
use crate::inspect::elements::scope_text;
use crate::inspect::subject::{ConfigurationOrigin, PlannedFormat, Subject, planned_format};
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone, cut_list, joined};
use crate::plugin::primary::{NetworkRunner, UNREAD, united};
use crate::policy::Policy;
use crate::sub_plugins::{
    ChainOutput, ConsideredRule, DecidedRequest, Decision, Origins, SkipReason, considered, guards, pod_skip_reason,
};
use evaluation::{ADD_FAILS, Evaluation, ambient_notes, evaluate, has_redirect};
use exclusions::{excluded_containers, excluded_traffic, grouped, init_containers, sources_of, unowned};
use serde::Serialize;
use settings::{settings, uncaptured};
use std::collections::HashSet;
use warnings::warnings;

/// The report about one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// `NAMESPACE/NAME`.
    pub pod: String,
    /// The object with the pod template, `KIND NAMESPACE/NAME`; `None` for a pod.
    pub template_of: Option<String>,
    /// Why an ADD of the pod fails; `None` if it succeeds.
    pub add_fails: Option<String>,
    /// The configuration's `name`.
    pub network: String,
    /// Where the configuration comes from.
    pub configuration: ConfigurationOrigin,
    /// The rule format of the redirection; `None` without one.
    pub rule_format: Option<PlannedFormat>,
    /// The pod's networks; empty unless the configuration is a primary plugin's.
    pub networks: Vec<NetworkReport>,
    /// Whether this configuration redirects the pod's traffic to its sidecar.
    pub redirected: bool,
    /// Whether and why the pod is redirected, in one line.
    pub decision: String,
    /// The evaluated conditions, up to the one that decided.
    pub considered: Vec<ConsideredRule>,
    /// The proxy; `None` if the pod is not redirected.
    pub proxy: Option<Proxy>,
    /// Every setting of the redirection; empty if the pod is not redirected.
    pub settings: Vec<Setting>,
    /// What the guard does with other packets; `None` without a guard.
    pub guard: Option<ExplainedGuard>,
    /// The traffic that bypasses the sidecar, except for what Istio excludes by default.
    #[serde(rename = "exempt")]
    pub exclusions: Vec<ExcludedTraffic>,
    /// The containers whose traffic bypasses the sidecar.
    pub excluded_containers: Vec<ExcludedContainer>,
    /// When the init containers run; empty if nothing redirects the pod's traffic.
    pub init_containers: Vec<InitContainer>,
    /// The requests of the pod and its namespace, each with the bound that decides about it.
    pub requests: Vec<DecidedRequest>,
    /// Problems that the configuration or the pod will cause.
    pub warnings: Vec<Warning>,
    /// Further notes: those that an ADD would log, and what excluded containers require on the node.
    pub notes: Vec<String>,
    /// The policy from which rules are made.
    #[serde(skip)]
    pub policy: Policy,
    /// Whether the text contains everything: all conditions, settings and requests, and long lists.
    #[serde(skip)]
    pub all: bool,
}

/// The IDs that identify the proxy's own traffic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Proxy {
    /// UIDs.
    pub uid: Vec<u32>,
    /// The sources of the UIDs.
    pub uid_sources: Vec<String>,
    /// GIDs.
    pub gid: Vec<u32>,
    /// The sources of the GIDs.
    pub gid_sources: Vec<String>,
}

const NO_CHAIN: &str =
    "not redirected: neither the pod's networks nor the node's configuration have a sub-plugin chain";

const NEEDED_ON_NODE: &str = "excluded containers need the agent with --nri-socket on the pod's node; \
    otherwise, their traffic is captured";

impl Explanation {
    /// Returns what is known before the pod's traffic is decided.
    fn of(subject: &Subject) -> Self {
        Self {
            pod: subject.name(),
            template_of: subject.template_of.clone(),
            network: subject.conf.name.clone(),
            configuration: subject.origin.clone(),
            networks: networks_of(subject),
            ..Self::default()
        }
    }
}

/// The report about several pods.
impl TextReport for Vec<Explanation> {
    fn write(&self, screen: &mut Screen) {
        for explanation in self {
            let pod = || format!("Pod {}", explanation.pod);
            screen.heading(&explanation.template_of.clone().unwrap_or_else(pod));
            explanation.write(screen);
        }
    }
}

/// Explains a pod, also one whose ADD fails: as far as its configuration can be evaluated.
#[must_use]
pub fn explained(subject: &Subject) -> Explanation {
    explain(subject).unwrap_or_else(|error| Explanation {
        add_fails: Some(error.to_string()),
        decision: "not redirected: it does not start".to_owned(),
        warnings: vec![Warning::new(ADD_FAILS, error.to_string(), "")],
        ..Explanation::of(subject)
    })
}

/// Evaluates the pod as an ADD would.
///
/// # Errors
/// An ADD would fail: the configuration or the pod is invalid, or two attachments contradict each other.
pub fn explain(subject: &Subject) -> Result<Explanation, Error> {
    let evaluations = evaluate(subject)?;
    let policies: Vec<(&str, Policy)> =
        evaluations.iter().map(|one| (one.attachment.unwrap_or_default(), one.policy())).collect();
    let policy = united(&policies)?;
    let redirects = |one: &&Evaluation<'_>| one.policy().redirect().is_some();
    let applies = |one: &&Evaluation<'_>| one.result.is_ok();
    let decisive =
        evaluations.iter().find(redirects).or_else(|| evaluations.iter().find(applies)).or(evaluations.first());
    let mut origins = Origins::default();
    for ChainOutput { origins: own, .. } in evaluations.iter().filter_map(|one| one.result.as_ref().ok()) {
        origins.settings.extend_from_slice(&own.settings);
        origins.exclusions.extend_from_slice(&own.exclusions);
        origins.containers.extend_from_slice(&own.containers);
        origins.requests.extend_from_slice(&own.requests);
    }
    // With a primary plugin, several networks can decide about one.
    let mut known = HashSet::new();
    origins.requests.retain(|request| known.insert(request.clone()));
    let redirect = policy.redirect();
    let settings = redirect.map(|redirect| settings(redirect, &origins.settings)).unwrap_or_default();
    let mut exclusions = excluded_traffic(&policy, &origins);
    exclusions.extend(redirect.into_iter().flat_map(|redirect| uncaptured(redirect, &settings)));
    let pod = &subject.facts.pod;
    exclusions.iter_mut().for_each(|traffic| traffic.note = unowned(traffic.owner, pod));
    // Another tool redirects the pod by the same rules.
    let is_captured = redirect.is_some() || (!policy.is_empty() && pod_skip_reason(pod).is_none());
    let containers = if is_captured { application_containers(pod) } else { Vec::new() };
    let init_containers = init_containers(&containers, &policy, &origins);
    let warnings = warnings(subject, &evaluations, &policy, &init_containers);
    let failing = warnings.iter().find(|warning| warning.code == ADD_FAILS);
    Ok(Explanation {
        add_fails: failing.map(ToString::to_string),
        rule_format: redirect.map(|_| planned_format(subject)),
        redirected: redirect.is_some(),
        decision: decisive.map_or_else(|| NO_CHAIN.to_owned(), Evaluation::decision),
        considered: decisive.map(|decisive| conditions(subject, decisive)).unwrap_or_default(),
        proxy: redirect.map(|redirect| Proxy {
            uid: redirect.proxy_uid.clone(),
            uid_sources: sources_of(&origins.settings, |key| *key == "proxy_uid"),
            gid: redirect.proxy_gid.clone(),
            gid_sources: sources_of(&origins.settings, |key| *key == "proxy_gid"),
        }),
        guard: policy.guard.as_ref().map(|_| {
            let blocks = evaluations.iter().flat_map(|one| guards(&one.conf.chain));
            ExplainedGuard { unexplained: "rejected", sources: blocks.map(|block| block.path.clone()).collect() }
        }),
        excluded_containers: excluded_containers(&policy, &origins),
        requests: origins.requests,
        notes: notes(subject, &evaluations, &policy),
        settings,
        exclusions,
        init_containers,
        warnings,
        policy,
        ..Explanation::of(subject)
    })
}

fn notes(subject: &Subject, evaluations: &[Evaluation<'_>], policy: &Policy) -> Vec<String> {
    let networks = subject.networks.iter().flat_map(|preview| preview.warnings.iter().cloned());
    let evaluations = evaluations.iter().flat_map(|one| one.notes.iter().cloned());
    let on_node = (!policy.containers.is_empty()).then(|| NEEDED_ON_NODE.to_owned());
    let all = subject.conf.warnings.iter().cloned().chain(networks).chain(evaluations).chain(on_node);
    all.chain(ambient_notes(&subject.facts, policy)).collect()
}

/// Returns the evaluated conditions, up to the one that decided: that the configuration applies and redirects, those of the
/// pod, and the interception mode.
fn conditions(subject: &Subject, evaluation: &Evaluation<'_>) -> Vec<ConsideredRule> {
    let rule = |wanted, found, holds| ConsideredRule { wanted, found, holds };
    let (pod, applies) = (&subject.facts.pod, "the configuration applies to the pod");
    let ChainOutput { decision, origins, .. } = match &evaluation.result {
        Ok(output) => output,
        Err(why) => return vec![rule(applies, why.clone(), false)],
    };
    let mut all = vec![rule(applies, format!("namespace {} is not excluded", pod.namespace), true)];
    let in_chain = |holds| {
        let types = evaluation.conf.chain.iter().filter_map(|block| block.keys.get("type")?.as_str());
        rule("the sub-plugin chain contains istio-redirect", joined(types), holds)
    };
    match decision {
        Decision::LeaveAlone(SkipReason::Ambient(enrolled_by)) => {
            all.push(rule("the pod has its own network", "hostNetwork is false".to_owned(), true));
            all.push(rule("the pod is not in the ambient mesh", enrolled_by.to_string(), false));
        }
        Decision::LeaveAlone(SkipReason::NotInChain) => all.push(in_chain(false)),
        _ => {
            all.extend(has_redirect(&evaluation.conf.chain).then(|| in_chain(true)));
            all.extend(considered(pod));
        }
    }
    if *decision == Decision::LeaveAlone(SkipReason::ModeNone) {
        let sources = sources_of(&origins.settings, |key| *key == "inbound_interception_mode").join("; ");
        all.push(rule("interception is enabled", format!("the interception mode is NONE ({sources})"), false));
    }
    all
}

impl TextReport for Explanation {
    fn write(&self, screen: &mut Screen) {
        let shown = |text: String| if self.all { text } else { cut_list(&text) };
        let sources = |sources: &[String]| Cell::of(sources.join("; ")).tone(Tone::Faint);
        screen.failure(self.add_fails.as_deref());
        let tone = if self.redirected { Tone::Good } else { Tone::Notable };
        let of_template = self.template_of.as_ref().map(|object| format!(" of {object}")).unwrap_or_default();
        screen.labeled(format!("Pod {}{of_template} is", self.pod), &self.decision, tone);
        screen.labeled("Configuration:", self.configuration.text(), Tone::Faint);
        if let Some(PlannedFormat { format, source }) = &self.rule_format {
            screen.labeled("Rule format:", format!("{}, {source}", format.name()), Tone::Faint);
        }
        if let Some(guard) = &self.guard {
            let what = "packets that neither the redirection nor an exclusion explains are rejected";
            screen.line(&[Cell::of("Guard:"), Cell::of(what), sources(&guard.sources)]);
        }
        // The line above names the file of the only network.
        let is_named = |one: &NetworkReport| one.leads_to.as_ref() == self.configuration.places.first();
        if self.all || !matches!(&self.networks[..], [only] if is_named(only)) {
            screen.section("Networks", self.networks.iter().map(NetworkReport::row));
        }
        let warnings = self.warnings.iter().filter(|warning| warning.code != ADD_FAILS).flat_map(|warning| {
            let next = Cell::of(format!("→ {}", warning.next)).tone(Tone::Faint);
            [vec![Cell::of("!").tone(Tone::Notable), Cell::of(&warning.what)], vec![Cell::of(""), next]]
        });
        screen.section("Warnings", warnings);
        let container = |c: &ExcludedContainer| {
            let name = Cell::of(&c.name).tone(Tone::Strong);
            vec![name, Cell::of(scope_text(c.scope)), sources(&c.sources)]
        };
        let traffic = |e: &ExcludedTraffic| {
            let noted: Vec<String> = e.sources.iter().chain(&e.note).cloned().collect();
            vec![Cell::of(&e.who), Cell::of(shown(e.what())), sources(&noted)]
        };
        let grouped = if self.all { self.exclusions.clone() } else { grouped(&self.exclusions) };
        let bypassing = self.excluded_containers.iter().map(container).chain(grouped.iter().map(traffic));
        screen.section("Bypasses the sidecar", bypassing);
        screen.section("Init containers", self.init_containers.iter().map(InitContainer::row));
        let setting = |setting: &Setting| {
            let tone = if setting.differs() { Tone::Strong } else { Tone::Faint };
            vec![Cell::of(setting.key), Cell::of(shown(setting.shown())).tone(tone), sources(&setting.sources)]
        };
        let title = if self.all { "Settings" } else { "Settings that differ from their default (--all shows all)" };
        screen.section(title, self.settings.iter().filter(|one| self.all || one.differs()).map(setting));
        let request = |DecidedRequest { item, source, permitted, bound, .. }: &DecidedRequest| {
            let (verdict, tone) = if *permitted { ("allowed", Tone::Good) } else { ("refused", Tone::Bad) };
            let source = Cell::of(source.to_string()).tone(Tone::Faint);
            vec![Cell::of(item).tone(Tone::Strong), Cell::of(format!("{verdict} by {bound}")).tone(tone), source]
        };
        screen.section("Requests", self.requests.iter().filter(|one| self.all || !one.permitted).map(request));
        let rule = |rule: &ConsideredRule| {
            let (word, tone) = if rule.holds { ("yes", Tone::Good) } else { ("no", Tone::Bad) };
            vec![Cell::of(word).tone(tone), Cell::of(rule.wanted), Cell::of(&rule.found).tone(Tone::Faint)]
        };
        screen.section("Why", self.considered.iter().filter(|_| self.all).map(rule));
        screen.section("Notes", self.notes.iter().map(|note| vec![Cell::of(note)]));
    }
}

/// A network of the pod, for a primary plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NetworkReport {
    /// `NAMESPACE/NAME` of its definition, or the name of its configuration.
    pub name: String,
    /// `pod` or `configuration`.
    pub selected_by: &'static str,
    /// Its interface; `None` if it has no own interface.
    pub interface: Option<String>,
    /// The types of its plugins; empty if its configuration is only on the node.
    pub types: Vec<String>,
    /// How the plugin runs it: `delegate` for executables that create an interface, `chain` for an executable that gets
    /// the default network's result, `in-process` for sub-plugins.
    pub runs: &'static str,
    /// The file or definition to which the pod's selection leads; `None` for networks of the node's configuration.
    pub leads_to: Option<String>,
}

/// Returns the networks of a pod: those of a primary plugin, and those that its annotation selects.
fn networks_of(subject: &Subject) -> Vec<NetworkReport> {
    let selected = subject.selected.iter().map(|SelectedNetwork { name, leads_to }| NetworkReport {
        name: name.clone(),
        selected_by: "pod",
        leads_to: Some(leads_to.text()),
        ..NetworkReport::default()
    });
    let mut all: Vec<NetworkReport> = Vec::new();
    for (network, runner) in subject.networks.iter().flat_map(|preview| &preview.networks) {
        let types = network.configuration.types().filter(|kind| *kind != UNREAD);
        all.push(NetworkReport {
            name: network.name.clone(),
            selected_by: if network.selection.is_some() { "pod" } else { "configuration" },
            interface: (*runner == NetworkRunner::Delegate).then(|| network.interface.clone()),
            types: types.map(str::to_owned).collect(),
            runs: match runner {
                NetworkRunner::Delegate => "delegate",
                NetworkRunner::Chain => "chain",
                NetworkRunner::Here => "in-process",
            },
            leads_to: selected.clone().find(|one| one.name == network.name).and_then(|one| one.leads_to),
        });
    }
    let others: Vec<_> = selected.filter(|one| all.iter().all(|known| known.name != one.name)).collect();
    all.extend(others);
    all
}

impl NetworkReport {
    fn row(&self) -> Vec<Cell> {
        let types = self.types.iter().map(String::as_str);
        let runs = joined(types.chain([self.runs]).chain(self.interface.as_deref()));
        let leads_to = match &self.leads_to {
            Some(lead) => format!("→ {lead}"),
            None => format!("selected by {}", self.selected_by),
        };
        vec![Cell::of(&self.name).tone(Tone::Strong), Cell::of(leads_to).tone(Tone::Faint), Cell::of(runs)]
    }
}
