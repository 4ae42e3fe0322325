//! What of a call's log somebody else is told.

use super::EventFields;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// As many warnings are kept, and so much of each, in characters.
const MOST_EVENTS: usize = 8;
const LONGEST: usize = 400;

/// Fills while events are logged, whatever the level of the log.
#[derive(Debug, Clone, Default)]
pub struct EventCollector(Arc<Mutex<KeptEvents>>);

#[derive(Debug, Default)]
struct KeptEvents {
    warnings: Vec<String>,
    facts: String,
}

impl EventCollector {
    fn kept(&self) -> MutexGuard<'_, KeptEvents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The warnings so far; those after the eighth are lost.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.kept().warnings.clone()
    }

    /// Who gave facts: the field `facts` of an event. Where several did, not the agent.
    #[must_use]
    pub fn facts(&self) -> String {
        self.kept().facts.clone()
    }
}

impl<S: Subscriber> Layer<S> for EventCollector {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut source = FactsSource::default();
        event.record(&mut source);
        let mut kept = self.kept();
        if !source.0.is_empty() && (kept.facts.is_empty() || kept.facts == "agent") {
            kept.facts = source.0;
        }
        if *event.metadata().level() == Level::WARN && kept.warnings.len() < MOST_EVENTS {
            let mut fields = EventFields::default();
            event.record(&mut fields);
            kept.warnings.push((fields.message + &fields.others).chars().take(LONGEST).collect());
        }
    }
}

/// The value of the field `facts`.
#[derive(Default)]
struct FactsSource(String);

impl Visit for FactsSource {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "facts" {
            value.clone_into(&mut self.0);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    #[test]
    fn warnings_and_the_source_of_facts_are_kept() {
        let noticed = EventCollector::default();
        let subscriber = tracing_subscriber::registry().with(noticed.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("nothing");
            tracing::warn!(why = "so", "look {}", 1);
            tracing::debug!(facts = "agent", "answered");
            tracing::debug!(facts = "api", "answered");
            tracing::debug!(facts = "agent", "answered");
            (0..20).for_each(|_| tracing::warn!("{}", "long ".repeat(1000)));
        });
        assert_eq!(noticed.facts(), "api");
        assert_eq!((noticed.warnings()[0].as_str(), noticed.warnings().len()), ("look 1 why=so", MOST_EVENTS));
        assert!(noticed.warnings().iter().all(|warning| warning.len() <= LONGEST));
    }
}
