//! The cached objects of one kind, as a watch reports them, and whether they are complete and current.

use super::objects::{ObservedPod, Sent, WatchedKind};
use crate::cluster::resources::Metadata;
use crate::cluster::{Definition, ObjectRef};
use crate::pod::Namespace;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// All caches, shared by the watches, the answers and the repairs.
pub(in crate::agent) type SharedFacts = Arc<Caches>;

/// The cached objects of all kinds.
#[derive(Default)]
pub(in crate::agent) struct Caches {
    pub(super) pods: Cache<ObservedPod>,
    pub(super) namespaces: Cache<Namespace>,
    pub(super) definitions: Cache<Definition>,
}

impl Caches {
    /// Returns the last observed state of the node's pods.
    pub(in crate::agent) fn all_pods(&self) -> Vec<Arc<ObservedPod>> {
        self.pods.all()
    }

    /// Returns the last observed state of a namespace. It is the same `Arc` until the namespace changes.
    pub(in crate::agent) fn namespace(&self, name: &str) -> Option<Arc<Namespace>> {
        self.namespaces.get_any(&ObjectRef { namespace: String::new(), name: name.to_owned() })
    }

    /// Whether pods and namespaces are complete and current, except for the lag of a watch.
    pub(in crate::agent) fn are_current(&self) -> bool {
        self.pods.is_synced() && self.namespaces.is_synced()
    }

    /// Returns the problems of watches that have lasted for long, each in words.
    pub(in crate::agent) fn lasting_problems(&self, now: Instant) -> Vec<String> {
        let problems = [
            self.pods.lasting_problem(now),
            self.namespaces.lasting_problem(now),
            self.definitions.lasting_problem(now),
        ];
        problems.into_iter().flatten().collect()
    }

    /// Returns the numbers of changes of pods and of namespaces, for tasks that wait.
    pub(in crate::agent) fn changes(&self) -> [watch::Receiver<u64>; 2] {
        [self.pods.changes.subscribe(), self.namespaces.changes.subscribe()]
    }
}

/// The maximum weight of all cached objects of one kind. Further ones are incomplete.
const MAX_TOTAL: usize = 24 << 20;
/// The maximum weight of a large object: more than its annotations may have (256 KiB), with hundreds of containers. Large
/// objects leave half of the room for ordinary ones.
const MAX_LARGE: usize = 512 << 10;
/// How long a watch may be broken before the agent reports it: an API server that restarts breaks all watches.
const GRACE: Duration = Duration::from_secs(60);

/// The cached objects of one kind.
pub(super) struct Cache<T> {
    state: Mutex<CacheState<T>>,
    /// The number of changes, for tasks that wait.
    changes: watch::Sender<u64>,
}

struct CacheState<T> {
    objects: CachedObjects<T>,
    /// The objects of a list in progress.
    listed: Option<CachedObjects<T>>,
    /// Why the cache is not complete and current, except for the lag of a watch.
    problem: Option<Problem>,
}

/// Why a watch is not synchronized.
struct Problem {
    since: Instant,
    /// `None` if there is no watch, or the cluster has no such kind: nothing can be synchronized.
    cause: Option<String>,
}

/// Objects by name.
struct CachedObjects<T> {
    by_name: BTreeMap<ObjectRef, CachedObject<T>>,
    /// The sum of the weights.
    total: usize,
}

struct CachedObject<T> {
    object: Arc<T>,
    /// Whether nothing of it is missing.
    is_whole: bool,
}

impl<T> Default for CachedObjects<T> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new(), total: 0 }
    }
}

impl<T: WatchedKind> CachedObjects<T> {
    /// Stores an object, or only the part that every object may have.
    fn insert(&mut self, name: ObjectRef, object: &Arc<T>) {
        self.remove(&name);
        let (weight, total) = (object.weight(), self.total + object.weight());
        let is_whole =
            (weight <= T::MAX_WEIGHT && total <= MAX_TOTAL) || (weight <= MAX_LARGE && total <= MAX_TOTAL / 2);
        let object = if is_whole { Arc::clone(object) } else { Arc::new(object.minimal()) };
        self.total += object.weight();
        self.by_name.insert(name, CachedObject { object, is_whole });
    }

    fn remove(&mut self, name: &ObjectRef) {
        if let Some(removed) = self.by_name.remove(name) {
            self.total -= removed.object.weight();
        }
    }
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        let problem = Some(Problem { since: Instant::now(), cause: None });
        let state = CacheState { objects: CachedObjects::default(), listed: None, problem };
        Self { state: Mutex::new(state), changes: watch::Sender::new(0) }
    }
}

impl<T: WatchedKind> Cache<T> {
    fn state(&self) -> MutexGuard<'_, CacheState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last observed state of an object; `None` if the cache has only a part of it.
    pub(super) fn get(&self, object: &ObjectRef) -> Option<Arc<T>> {
        let state = self.state();
        state.objects.by_name.get(object).filter(|it| it.is_whole).map(|it| Arc::clone(&it.object))
    }

    /// Like [`Self::get`], also of an object of which the cache has only a part.
    pub(super) fn get_any(&self, object: &ObjectRef) -> Option<Arc<T>> {
        self.state().objects.by_name.get(object).map(|it| Arc::clone(&it.object))
    }

    /// Whether the object existed when it was observed last, but is too large for the cache.
    pub(super) fn is_too_large(&self, object: &ObjectRef) -> bool {
        self.state().objects.by_name.get(object).is_some_and(|it| !it.is_whole)
    }

    /// Returns the names of all objects, sorted.
    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<ObjectRef> {
        self.state().objects.by_name.keys().cloned().collect()
    }

    /// Returns all objects, also those of which the cache has only a part, sorted by namespace and name.
    pub(super) fn all(&self) -> Vec<Arc<T>> {
        self.state().objects.by_name.values().map(|it| Arc::clone(&it.object)).collect()
    }

    /// Returns the number of objects, and how many of them are too large for the cache.
    pub(super) fn len(&self) -> (usize, usize) {
        let by_name = &self.state().objects.by_name;
        (by_name.len(), by_name.values().filter(|it| !it.is_whole).count())
    }

    /// Whether the cache is complete and current, except for the lag of a watch: a list was completed, and the watch
    /// after it works. Then an object that is not cached does not exist.
    pub(super) fn is_synced(&self) -> bool {
        self.state().problem.is_none()
    }

    /// Begins a list, which replaces all objects when it is complete.
    pub(super) fn begin_list(&self) {
        self.state().listed = Some(CachedObjects::default());
    }

    /// Adds or changes an object.
    pub(super) fn add(&self, sent: Sent<T>) {
        let (name, object) = (name_of(&sent.metadata), Arc::new(T::from_sent(sent)));
        let CacheState { objects, listed, .. } = &mut *self.state();
        for objects in listed.iter_mut().chain([objects]) {
            objects.insert(name.clone(), &object);
        }
        self.changes.send_modify(|count| *count += 1);
    }

    /// Removes an object.
    pub(super) fn remove(&self, removed: &Metadata) {
        self.state().objects.remove(&name_of(removed));
        self.changes.send_modify(|count| *count += 1);
    }

    /// Records that the list is complete, or that the watch works. Returns whether the cache was not synced before.
    pub(super) fn set_synced(&self) -> bool {
        let mut state = self.state();
        if let Some(listed) = state.listed.take() {
            state.objects = listed;
        }
        let was_broken = state.problem.take().is_some();
        drop(state);
        self.changes.send_modify(|count| *count += 1);
        was_broken
    }

    /// Records why the cache is not synced; see [`Problem::cause`]. Returns whether it was.
    pub(super) fn set_broken(&self, cause: Option<&str>) -> bool {
        let mut state = self.state();
        let same = state.problem.as_ref().filter(|problem| problem.cause.is_some() == cause.is_some());
        let since = same.map_or_else(Instant::now, |problem| problem.since);
        state.problem.replace(Problem { since, cause: cause.map(str::to_owned) }).is_none()
    }

    /// Returns the problem of the watch in words if it has lasted for long.
    fn lasting_problem(&self, now: Instant) -> Option<String> {
        let state = self.state();
        let Problem { since, cause: Some(cause) } = state.problem.as_ref()? else { return None };
        let time = now.saturating_duration_since(*since);
        (time >= GRACE)
            .then(|| format!("the watch of {} is not synchronized for {} s: {cause}", T::PLURAL, time.as_secs()))
    }

    /// Returns the result of `find`, now or after a change within `timeout`; `None` without waiting if the cache is not
    /// synced.
    pub(super) async fn find_within<R>(&self, timeout: Duration, find: impl Fn() -> Option<R>) -> Option<R> {
        let mut changes = self.changes.subscribe();
        let found = async {
            loop {
                changes.mark_unchanged();
                if let Some(found) = find() {
                    return Some(found);
                }
                if !self.is_synced() || changes.changed().await.is_err() {
                    return None;
                }
            }
        };
        tokio::time::timeout(timeout, found).await.ok().flatten()
    }
}

/// Returns the name of an object, with an empty namespace for a cluster-scoped one.
fn name_of(Metadata { namespace, name, .. }: &Metadata) -> ObjectRef {
    ObjectRef { namespace: namespace.clone().unwrap_or_default(), name: name.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::Namespace;
    use serde_json::{from_value, json};

    fn sent(name: &str, value: &str) -> Sent<Namespace> {
        from_value(json!({"metadata": {"name": name, "annotations": {"detour.io/a": value}}})).expect("a namespace")
    }

    fn name(name: &str) -> ObjectRef {
        ObjectRef { namespace: String::new(), name: name.into() }
    }

    fn value(cache: &Cache<Namespace>, of: &str) -> Option<String> {
        cache.get(&name(of)).map(|namespace| namespace.annotations["detour.io/a"].clone())
    }

    #[test]
    fn a_completed_list_replaces_the_cached_objects() {
        let cache = Cache::<Namespace>::default();
        assert!(!cache.is_synced());
        cache.begin_list();
        cache.add(sent("a", "1"));
        assert!(!cache.is_synced() && cache.set_synced() && cache.is_synced());
        cache.add(sent("b", "1"));
        cache.add(sent("b", "2"));
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (Some("1".into()), Some("2".into())));
        cache.begin_list();
        cache.add(sent("b", "3"));
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (Some("1".into()), Some("3".into())), "not complete yet");
        assert!(!cache.set_synced(), "it was synced all the time");
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (None, Some("3".into())));
        cache.remove(&sent("b", "3").metadata);
        assert!(cache.all().is_empty());
    }

    #[test]
    fn a_watch_that_is_broken_for_long_is_reported_with_its_last_cause() {
        let (cache, now) = (Cache::<Namespace>::default(), Instant::now());
        let lasting = || cache.lasting_problem(Instant::now() + GRACE);
        assert_eq!(lasting(), None, "there is no watch");
        cache.set_broken(Some("no list"));
        assert_eq!(cache.lasting_problem(now), None);
        assert!(!cache.set_broken(Some("403, no")) && !cache.is_synced());
        assert!(lasting().is_some_and(|it| it.contains("namespaces") && it.ends_with("s: 403, no")), "{:?}", lasting());
        assert!(cache.set_synced() && cache.is_synced() && lasting().is_none());
        assert!(cache.set_broken(None) && !cache.is_synced() && lasting().is_none(), "the cluster has no such kind");
    }

    fn labelled(name: &str, labels: usize) -> Sent<Namespace> {
        let labels: BTreeMap<String, String> =
            (0..labels).map(|number| (format!("{}{number}", "l".repeat(300)), "v".repeat(63))).collect();
        from_value(json!({"metadata": {"name": name, "labels": labels}})).expect("a namespace")
    }

    #[test]
    fn large_objects_are_incomplete_and_leave_room_for_others() {
        const MAX_WEIGHT: usize = <Namespace as WatchedKind>::MAX_WEIGHT;
        let cache = Cache::<Namespace>::default();
        cache.begin_list();
        cache.add(sent("fat", &"x".repeat(MAX_LARGE)));
        cache.add(sent("thin", "1"));
        cache.set_synced();
        assert!(cache.is_too_large(&name("fat")) && !cache.is_too_large(&name("thin")));
        assert_eq!((value(&cache, "fat"), value(&cache, "thin"), cache.len()), (None, Some("1".into()), (2, 1)));
        assert!(cache.get_any(&name("fat")).is_some_and(|fat| fat.incomplete) && cache.all().len() == 2);
        cache.add(sent("fat", "2"));
        assert_eq!((value(&cache, "fat"), cache.len()), (Some("2".into()), (2, 0)), "it is small now");
        for (labels, incomplete) in [(300, false), (3000, true)] {
            cache.add(labelled("fat", labels));
            let fat = cache.get_any(&name("fat")).expect("it is known");
            assert_eq!((fat.incomplete, fat.labels.len()), (incomplete, if incomplete { 0 } else { labels }));
        }
        cache.remove(&sent("fat", "").metadata);

        // Large ones take half of the room, and ordinary ones all of it; the others are incomplete.
        let total = || cache.state().objects.total;
        for number in 0..99 {
            cache.add(sent(&format!("large-{number}"), &"x".repeat(MAX_LARGE / 2)));
        }
        assert!(total() <= MAX_TOTAL / 2 + 99 * MAX_WEIGHT, "{}", total());
        let many = MAX_TOTAL / MAX_WEIGHT;
        for number in 0..many {
            cache.add(sent(&number.to_string(), &"x".repeat(MAX_WEIGHT - 300)));
        }
        assert!((MAX_TOTAL - MAX_WEIGHT..=MAX_TOTAL + many * 300).contains(&total()), "{}", total());
        assert_eq!(cache.all().iter().filter(|it| it.incomplete).count(), cache.len().1);
        for object in cache.names() {
            cache.remove(&sent(&object.name, "").metadata);
        }
        assert_eq!((total(), cache.len()), (0, (0, 0)));
    }

    #[tokio::test]
    async fn a_task_finds_an_object_as_soon_as_the_watch_reports_it() {
        let cache = Cache::<Namespace>::default();
        let find = || value(&cache, "b");
        assert_eq!(cache.find_within(Duration::from_secs(60), find).await, None, "there is no watch yet");
        cache.begin_list();
        cache.set_synced();
        let change = async {
            tokio::task::yield_now().await;
            cache.add(sent("a", "1"));
            tokio::task::yield_now().await;
            cache.add(sent("b", "2"));
        };
        let (found, ()) = tokio::join!(cache.find_within(Duration::from_secs(60), find), change);
        assert_eq!(found, Some("2".into()));
    }
}
