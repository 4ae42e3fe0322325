//! The order of the reports: namespaces take turns, and the pods of a namespace too. Each pod and each namespace has a
//! limited rate, so that a pod's author can neither delay the reports of others nor keep the API server busy.

use crate::agent::token_bucket::TokenBucket;
use crate::cluster::{Event, PolicyCondition};
use crate::pod::PodRef;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// The limit of Events that wait for the API server, of all pods and of one pod.
const MAX_EVENTS: usize = 256;
const MAX_EVENTS_OF_POD: usize = 4;
/// The limit of pods whose conditions wait for the API server: twice the pods of a large node.
const MAX_CONDITIONS: usize = 1024;
/// The reports of one pod: this many at once, then one in each refill time.
const POD_BURST: u32 = 10;
const POD_REFILL_TIME: Duration = Duration::from_secs(10);
/// The reports of one namespace: at once, those of all pods of a large node.
const NAMESPACE_BURST: u32 = 1024;
const NAMESPACE_REFILL_TIME: Duration = Duration::from_millis(200);
/// The number of pods whose rates are stored.
const MAX_RATES: usize = 2 * MAX_CONDITIONS;

/// A namespace and the name of a pod.
type PodName = (String, String);

/// A report about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Report {
    Event(PodRef, Event),
    Condition(PodRef, PolicyCondition, bool),
}

impl Report {
    fn pod(&self) -> &PodRef {
        match self {
            Self::Event(pod, _) | Self::Condition(pod, ..) => pod,
        }
    }
}

/// The waiting reports.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// By namespace, the oldest first.
    events: BTreeMap<String, VecDeque<(PodRef, Event)>>,
    /// The latest condition of each pod, and whether its status has changed.
    conditions: BTreeMap<PodName, (PodRef, PolicyCondition, bool)>,
    /// Until when no condition is written, because the API server refused one (403).
    conditions_paused: Option<Instant>,
    /// The namespace of the last report, and of each namespace the pod of the last condition.
    last_namespace: String,
    last_pods: BTreeMap<String, String>,
    /// Whether an Event is next if both wait, so that neither delays the other.
    prefers_event: bool,
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

    /// Sets a pod's condition, which replaces one that still waits.
    pub(super) fn add_condition(&mut self, pod: &PodRef, condition: PolicyCondition, has_changed_status: bool) {
        let key = (pod.namespace.clone(), pod.name.clone());
        // The status in the cluster is still the one before the replaced condition.
        let replaced = self.conditions.remove(&key);
        let has_changed = has_changed_status || replaced.is_some_and(|(_, _, has_changed)| has_changed);
        if self.conditions.len() < MAX_CONDITIONS {
            self.conditions.insert(key, (pod.clone(), condition, has_changed));
        }
    }

    /// Removes and returns the next report whose pod and namespace have not exceeded their rates. The error is the time
    /// when there is one; `None` if none waits.
    pub(super) fn next(&mut self, now: Instant) -> Result<Report, Option<Instant>> {
        let mut namespaces: Vec<String> = self.events.keys().cloned().collect();
        namespaces.extend(self.conditions.keys().map(|(namespace, _)| namespace.clone()));
        namespaces.sort_unstable();
        namespaces.dedup();
        let next = namespaces.partition_point(|namespace| *namespace <= self.last_namespace);
        namespaces.rotate_left(next);
        let mut later: Option<Instant> = None;
        for namespace in namespaces {
            let rate = self.namespace_rates.get_mut(&namespace).and_then(|rate| rate.next(now));
            let found = match rate {
                Some(time) => Err(Some(time)),
                None => self.next_of(&namespace, now),
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

    /// Like [`Self::next`], of one namespace.
    fn next_of(&mut self, namespace: &str, now: Instant) -> Result<Report, Option<Instant>> {
        type Next = fn(&mut Queue, &str, Instant) -> Result<Report, Option<Instant>>;
        self.prefers_event = !self.prefers_event;
        let order: [Next; 2] = [Self::next_event, Self::next_condition];
        let [first, second] = if self.prefers_event { order } else { [order[1], order[0]] };
        first(self, namespace, now)
            .or_else(|earlier| second(self, namespace, now).map_err(|later| earlier.into_iter().chain(later).min()))
    }

    fn next_event(&mut self, namespace: &str, now: Instant) -> Result<Report, Option<Instant>> {
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
                    return removed.map(|(pod, event)| Report::Event(pod, event)).ok_or(None);
                }
            }
        }
        Err(later)
    }

    fn next_condition(&mut self, namespace: &str, now: Instant) -> Result<Report, Option<Instant>> {
        if let Some(paused) = self.conditions_paused.filter(|paused| now < *paused) {
            return Err(Some(paused));
        }
        let first = (namespace.to_owned(), String::new());
        let of_namespace = self.conditions.range(first..).take_while(|((own, _), _)| own == namespace);
        let mut pods: Vec<PodName> = of_namespace.map(|(key, _)| key.clone()).collect();
        let last = self.last_pods.get(namespace).map_or("", String::as_str);
        let next = pods.partition_point(|(_, name)| name.as_str() <= last);
        pods.rotate_left(next);
        let mut later = None;
        for key in pods {
            match self.pod_rates.get_mut(&key).and_then(|rate| rate.next(now)) {
                Some(time) => later = later.into_iter().chain([time]).min(),
                None => {
                    let Some((pod, condition, has_changed)) = self.conditions.remove(&key) else { continue };
                    self.last_pods.insert(key.0, key.1);
                    return Ok(Report::Condition(pod, condition, has_changed));
                }
            }
        }
        Err(later)
    }

    /// Records that a report was written, or refused, at `now`.
    pub(super) fn record(&mut self, report: &Report, now: Instant) {
        self.has_dropped &= !matches!(report, Report::Event(..));
        let PodRef { namespace, name, .. } = report.pod();
        let new = || TokenBucket::new(POD_BURST, POD_REFILL_TIME);
        self.pod_rates.entry((namespace.clone(), name.clone())).or_insert_with(new).take(now);
        let new = || TokenBucket::new(NAMESPACE_BURST, NAMESPACE_REFILL_TIME);
        self.namespace_rates.entry(namespace.clone()).or_insert_with(new).take(now);
        if self.pod_rates.len() > MAX_RATES {
            self.pod_rates.retain(|_, rate| !rate.is_full(now));
            self.namespace_rates.retain(|_, rate| !rate.is_full(now));
            self.last_pods.clear();
        }
    }

    /// Writes no condition before `until`.
    pub(super) const fn pause_conditions(&mut self, until: Instant) {
        self.conditions_paused = Some(until);
    }

    /// Returns a report that was not accepted to its place.
    pub(super) fn put_back(&mut self, report: Report) {
        match report {
            Report::Event(pod, event) => {
                self.events.entry(pod.namespace.clone()).or_default().push_front((pod, event));
            }
            Report::Condition(pod, condition, has_changed) => {
                let key = (pod.namespace.clone(), pod.name.clone());
                // A later one takes precedence.
                let (.., later) = self.conditions.entry(key).or_insert((pod, condition, false));
                *later |= has_changed;
            }
        }
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
            self.events.is_empty() && self.conditions.is_empty()
        }
    }

    fn pod(namespace: &str, name: &str) -> PodRef {
        PodRef { namespace: namespace.into(), name: name.into(), uid: Some("u".into()) }
    }

    fn event() -> Event {
        Event { warning: false, reason: "E".into(), message: String::new() }
    }

    fn condition() -> PolicyCondition {
        PolicyCondition { reason: "C".into(), ..PolicyCondition::default() }
    }

    /// Writes everything that is allowed at `now`. Returns the namespaces of the reports.
    fn written(queue: &mut Queue, now: Instant) -> Vec<String> {
        let mut namespaces = Vec::new();
        while let Ok(report) = queue.next(now) {
            queue.record(&report, now);
            namespaces.push(report.pod().namespace.clone());
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
            queue.add_condition(&pod("attacker", &number.to_string()), condition(), true);
        }
        queue.add_condition(&pod("victim", "web-0"), condition(), true);
        queue.add_event(&pod("victim", "web-0"), event());
        let written = written(&mut queue, now);
        let last = written.iter().rposition(|namespace| namespace == "victim").expect("written");
        assert!(last < 4, "{written:?}");
        assert_eq!(written.len(), 2 + 30 * (1 + MAX_EVENTS_OF_POD));
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
            queue.add_condition(&pod("shop", "web-0"), condition(), true);
            queue.add_event(&pod("shop", "web-0"), event());
            count += written(&mut queue, now).len();
        }
        assert!((30..=41).contains(&count), "{count} reports in 5 minutes");
        // The last condition waits, and is written in time.
        let now = start + Duration::from_millis(299_950);
        let later = queue.next(now).expect_err("the rate").expect("a time");
        assert!(later <= now + Duration::from_secs(10));
        queue.next(later).expect("a report");
    }

    #[test]
    fn the_pods_of_a_namespace_take_turns() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let mut order = Vec::new();
        for _ in 0..4 {
            for name in ["a", "b", "c"] {
                queue.add_condition(&pod("shop", name), condition(), true);
            }
            let Ok(Report::Condition(pod, ..)) = queue.next(now) else { panic!("a condition") };
            order.push(pod.name);
        }
        assert_eq!(order, ["a", "b", "c", "a"]);
    }

    #[test]
    fn waiting_reports_have_a_limit_and_the_longest_queue_is_cut() {
        let mut queue = Queue::default();
        queue.add_event(&pod("victim", "web-0"), event());
        for number in 0..=MAX_EVENTS {
            queue.add_event(&pod("attacker", &number.to_string()), event());
        }
        for number in 0..=MAX_CONDITIONS {
            queue.add_condition(&pod("attacker", &number.to_string()), condition(), true);
        }
        assert_eq!((queue.waiting_events().count(), queue.conditions.len()), (MAX_EVENTS, MAX_CONDITIONS));
        assert_eq!(queue.events["victim"].len(), 1);
    }
}
