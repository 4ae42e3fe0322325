//! The order of the reports: namespaces take turns, and the pods of a namespace too. Each pod and each namespace has a
//! limited rate, so that a pod's author can neither delay the reports of others nor keep the API server busy.

use crate::agent::token_bucket::TokenBucket;
use crate::cluster::Event;
use crate::pod::PodRef;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// The limit of Events that wait for the API server, of all pods and of one pod.
const MAX_EVENTS: usize = 256;
const MAX_EVENTS_OF_POD: usize = 4;
/// The reports of one pod: this many at once, then one in each refill time.
const POD_BURST: u32 = 10;
const POD_REFILL_TIME: Duration = Duration::from_secs(10);
/// The reports of one namespace: at once, those of all pods of a large node.
const NAMESPACE_BURST: u32 = 1024;
const NAMESPACE_REFILL_TIME: Duration = Duration::from_millis(200);
/// The number of pods whose rates are stored.
const MAX_RATES: usize = 2048;

/// A namespace and the name of a pod.
type PodName = (String, String);

/// The waiting reports.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// By namespace, the oldest first.
    events: BTreeMap<String, VecDeque<(PodRef, Event)>>,
    /// The namespace of the last Event.
    last_namespace: String,
    pod_rates: BTreeMap<PodName, TokenBucket>,
    namespace_rates: BTreeMap<String, TokenBucket>,
    /// Whether an Event was dropped since one was written.
    has_dropped: bool,
    pub(super) has_ended: bool,
}

impl Queue {
    /// Adds an Event. If too many wait, the pod, or the namespace with the most, loses its oldest one.
    pub(super) fn add_event(&mut self, pod: &PodRef, event: Event) {
        let of_namespace = self.events.entry(pod.namespace.clone()).or_default();
        of_namespace.push_back((pod.clone(), event));
        let mut of_pod = of_namespace.iter().enumerate().filter(|(_, (other, _))| other == pod).map(|(index, _)| index);
        if let (Some(oldest), MAX_EVENTS_OF_POD..) = (of_pod.next(), of_pod.count()) {
            of_namespace.remove(oldest);
            self.warn_once();
        } else if self.events.values().map(VecDeque::len).sum::<usize>() > MAX_EVENTS {
            if let Some(longest) = self.events.values_mut().max_by_key(|events| events.len()) {
                longest.pop_front();
            }
            self.warn_once();
        }
    }

    fn warn_once(&mut self) {
        if !std::mem::replace(&mut self.has_dropped, true) {
            tracing::warn!(
                "Events dropped: at most {MAX_EVENTS} Events wait for the API server, and {MAX_EVENTS_OF_POD} of one pod"
            );
        }
    }

    /// Removes and returns the next report whose pod and namespace have not exceeded their rates. The error is the time
    /// when there is one; `None` if none waits.
    pub(super) fn next(&mut self, now: Instant) -> Result<(PodRef, Event), Option<Instant>> {
        let mut namespaces: Vec<String> = self.events.keys().cloned().collect();
        let next = namespaces.partition_point(|namespace| *namespace <= self.last_namespace);
        namespaces.rotate_left(next);
        let mut later: Option<Instant> = None;
        for namespace in namespaces {
            let rate = self.namespace_rates.get_mut(&namespace).and_then(|rate| rate.next(now));
            let found = match rate {
                Some(time) => Err(Some(time)),
                None => self.next_event(&namespace, now),
            };
            match found {
                Ok(report) => {
                    self.last_namespace = namespace;
                    return Ok(report);
                }
                Err(time) => later = later.into_iter().chain(time).min(),
            }
        }
        Err(later)
    }

    fn next_event(&mut self, namespace: &str, now: Instant) -> Result<(PodRef, Event), Option<Instant>> {
        let Some(events) = self.events.get_mut(namespace) else { return Err(None) };
        let mut later = None;
        for index in 0..events.len() {
            let key = (namespace.to_owned(), events[index].0.name.clone());
            match self.pod_rates.get_mut(&key).and_then(|rate| rate.next(now)) {
                Some(time) => later = later.into_iter().chain([time]).min(),
                None => {
                    let removed = events.remove(index);
                    if events.is_empty() {
                        self.events.remove(namespace);
                    }
                    return removed.ok_or(None);
                }
            }
        }
        Err(later)
    }

    /// Records that a report was written, or refused, at `now`.
    pub(super) fn record(&mut self, PodRef { namespace, name, .. }: &PodRef, now: Instant) {
        self.has_dropped = false;
        let new = || TokenBucket::new(POD_BURST, POD_REFILL_TIME);
        self.pod_rates.entry((namespace.clone(), name.clone())).or_insert_with(new).take(now);
        let new = || TokenBucket::new(NAMESPACE_BURST, NAMESPACE_REFILL_TIME);
        self.namespace_rates.entry(namespace.clone()).or_insert_with(new).take(now);
        if self.pod_rates.len() > MAX_RATES {
            self.pod_rates.retain(|_, rate| !rate.is_full(now));
            self.namespace_rates.retain(|_, rate| !rate.is_full(now));
        }
    }

    /// Returns an Event that was not accepted to its place.
    pub(super) fn put_back(&mut self, (pod, event): (PodRef, Event)) {
        self.events.entry(pod.namespace.clone()).or_default().push_front((pod, event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Queue {
        /// Returns the waiting Events.
        pub(in crate::agent::pod_reports) fn waiting_events(&self) -> impl Iterator<Item = &Event> {
            self.events.values().flatten().map(|(_, event)| event)
        }

        /// Whether no report waits.
        pub(in crate::agent::pod_reports) fn is_empty(&self) -> bool {
            self.events.is_empty()
        }
    }

    fn pod(namespace: &str, name: &str) -> PodRef {
        PodRef { namespace: namespace.into(), name: name.into(), uid: Some("u".into()) }
    }

    fn event() -> Event {
        Event { warning: false, reason: "E".into(), message: String::new() }
    }

    /// Writes everything that is allowed at `now`. Returns the namespaces of the reports.
    fn written(queue: &mut Queue, now: Instant) -> Vec<String> {
        let mut namespaces = Vec::new();
        while let Ok(report) = queue.next(now) {
            queue.record(&report.0, now);
            namespaces.push(report.0.namespace);
        }
        assert!(queue.next(now).is_err());
        namespaces
    }

    #[test]
    fn the_reports_of_many_pods_delay_no_other_namespace() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for number in 0..30 {
            for _ in 0..9 {
                queue.add_event(&pod("attacker", &number.to_string()), event());
            }
        }
        queue.add_event(&pod("victim", "web-0"), event());
        let written = written(&mut queue, now);
        let last = written.iter().rposition(|namespace| namespace == "victim").expect("written");
        assert!(last < 4, "{written:?}");
        assert_eq!(written.len(), 1 + 30 * MAX_EVENTS_OF_POD);
    }

    #[test]
    fn of_too_many_events_of_a_pod_the_newest_remain() {
        let mut queue = Queue::default();
        queue.add_event(&pod("shop", "web-1"), event());
        for number in 0..9 {
            queue.add_event(&pod("shop", "web-0"), Event { message: number.to_string(), ..event() });
        }
        let messages: Vec<&str> = queue.waiting_events().map(|event| event.message.as_str()).collect();
        assert_eq!(messages, ["", "5", "6", "7", "8"]);
    }

    #[test]
    fn a_pod_that_changes_all_the_time_has_few_reports() {
        let (mut queue, start, mut count) = (Queue::default(), Instant::now(), 0);
        for tenth in 0..3000 {
            let now = start + Duration::from_millis(100 * tenth);
            queue.add_event(&pod("shop", "web-0"), event());
            count += written(&mut queue, now).len();
        }
        assert!((30..=41).contains(&count), "{count} reports in 5 minutes");
        // The last Event waits, and is written in time.
        let now = start + Duration::from_millis(299_950);
        let later = queue.next(now).expect_err("the rate").expect("a time");
        assert!(later <= now + Duration::from_secs(10));
        queue.next(later).expect("a report");
    }

    #[test]
    fn waiting_reports_have_a_limit_and_the_longest_queue_is_cut() {
        let mut queue = Queue::default();
        queue.add_event(&pod("victim", "web-0"), event());
        for number in 0..=MAX_EVENTS {
            queue.add_event(&pod("attacker", &number.to_string()), event());
        }
        assert_eq!(queue.waiting_events().count(), MAX_EVENTS);
        assert_eq!(queue.events["victim"].len(), 1);
    }
}
