//! The cached objects of one kind, as a watch reports them, and whether they are complete and current.

use super::objects::{ObservedPod, WatchedKind};
use crate::cluster::{Definition, ObjectRef};
use crate::pod::Namespace;
use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// All caches, shared by the watches, the answers and the repairs.
#[derive(Clone)]
pub(in crate::agent) struct SharedFacts(Arc<Caches>);

struct Caches {
    pods: Cache<ObservedPod>,
    namespaces: Cache<Namespace>,
    definitions: Cache<Definition>,
}

impl SharedFacts {
    /// Creates empty caches.
    pub(in crate::agent) fn new() -> Self {
        Self(Arc::new(Caches { pods: Cache::new(), namespaces: Cache::new(), definitions: Cache::new() }))
    }

    /// Returns the last observed state of the node's pods.
    pub(in crate::agent) fn all_pods(&self) -> Vec<Arc<ObservedPod>> {
        self.pods().all()
    }

    /// Returns the last observed state of a namespace. It is the same `Arc` until the namespace changes.
    pub(in crate::agent) fn namespace(&self, name: &str) -> Option<Arc<Namespace>> {
        self.namespaces().get_any(&ObjectRef { namespace: String::new(), name: name.to_owned() })
    }

    /// Whether pods and namespaces are complete and current, except for the lag of a watch.
    pub(in crate::agent) fn are_current(&self) -> bool {
        self.pods().is_synced() && self.namespaces().is_synced()
    }

    /// Returns the numbers of changes of pods and of namespaces, for tasks that wait.
    pub(in crate::agent) fn changes(&self) -> [watch::Receiver<u64>; 2] {
        [self.pods().changes.subscribe(), self.namespaces().changes.subscribe()]
    }

    pub(super) fn pods(&self) -> &Cache<ObservedPod> {
        &self.0.pods
    }

    pub(super) fn namespaces(&self) -> &Cache<Namespace> {
        &self.0.namespaces
    }

    pub(super) fn definitions(&self) -> &Cache<Definition> {
        &self.0.definitions
    }
}

/// The maximum weight of all cached objects of one kind. Further ones are incomplete.
const MAX_TOTAL: usize = 24 << 20;
/// The maximum weight of a reduced object: more than its annotations may have (256 KiB), with hundreds of containers.
const MAX_REDUCED: usize = 512 << 10;
/// The part of [`MAX_TOTAL`] that reduced objects may take, so that they leave room for ordinary ones.
const MAX_TOTAL_WITH_REDUCED: usize = MAX_TOTAL / 2;

/// An event of a watch, or of the list before it.
#[derive(Debug)]
pub(super) enum CacheEvent<S> {
    /// A list begins.
    Init,
    /// An object of the list.
    InitApply(S),
    /// The list is complete.
    InitDone,
    /// An object was added or changed.
    Apply(S),
    /// An object was deleted.
    Delete(S),
}

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
    /// Whether a list has been completed.
    complete: bool,
    /// Whether the watch is broken.
    broken: bool,
}

/// Objects by name.
struct CachedObjects<T> {
    by_name: BTreeMap<ObjectRef, CachedObject<T>>,
    /// The sum of the weights, and the number of whole objects.
    total: usize,
    whole: usize,
}

/// An object of the cache.
enum CachedObject<T> {
    Whole(Arc<T>),
    /// It is too heavy; only what the agent itself needs is cached, or less if no memory is left.
    Reduced(Arc<T>),
    /// It is too heavy, or no memory is left, and the agent needs nothing of it.
    Name,
}

impl<T> CachedObject<T> {
    const fn whole(&self) -> Option<&Arc<T>> {
        match self {
            Self::Whole(object) => Some(object),
            Self::Reduced(_) | Self::Name => None,
        }
    }

    const fn any(&self) -> Option<&Arc<T>> {
        match self {
            Self::Whole(object) | Self::Reduced(object) => Some(object),
            Self::Name => None,
        }
    }
}

impl<T: WatchedKind> CachedObjects<T> {
    const fn new() -> Self {
        Self { by_name: BTreeMap::new(), total: 0, whole: 0 }
    }

    /// Stores an object, reduced or by its name only if it is too heavy.
    fn insert(&mut self, name: ObjectRef, object: &Arc<T>) {
        self.remove(&name);
        let has_room = |object: &T, limit, total| object.weight() <= limit && self.total + object.weight() <= total;
        let cached = if has_room(object, T::MAX_WEIGHT, MAX_TOTAL) {
            CachedObject::Whole(Arc::clone(object))
        } else {
            let reduced = object.reduced().filter(|it| has_room(it, MAX_REDUCED, MAX_TOTAL_WITH_REDUCED));
            let reduced = reduced.or_else(|| object.minimal());
            reduced.map_or(CachedObject::Name, |reduced| CachedObject::Reduced(Arc::new(reduced)))
        };
        self.total += cached.any().map_or(0, |object| object.weight());
        self.whole += usize::from(cached.whole().is_some());
        self.by_name.insert(name, cached);
    }

    fn remove(&mut self, name: &ObjectRef) {
        let Some(removed) = self.by_name.remove(name) else { return };
        self.total -= removed.any().map_or(0, |object| object.weight());
        self.whole -= usize::from(removed.whole().is_some());
    }
}

impl<T: WatchedKind> Cache<T> {
    pub(super) fn new() -> Self {
        let state = CacheState { objects: CachedObjects::new(), listed: None, complete: false, broken: false };
        Self { state: Mutex::new(state), changes: watch::Sender::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, CacheState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last observed state of an object; `None` if it is too large for the cache.
    pub(super) fn get(&self, object: &ObjectRef) -> Option<Arc<T>> {
        self.state().objects.by_name.get(object)?.whole().cloned()
    }

    /// Like [`Self::get`], also of an object that is reduced.
    pub(super) fn get_any(&self, object: &ObjectRef) -> Option<Arc<T>> {
        self.state().objects.by_name.get(object)?.any().cloned()
    }

    /// Whether the object existed when it was observed last, but is too large for the cache.
    pub(super) fn is_too_large(&self, object: &ObjectRef) -> bool {
        self.state().objects.by_name.get(object).is_some_and(|object| object.whole().is_none())
    }

    /// Returns the names of all objects, sorted.
    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<ObjectRef> {
        self.state().objects.by_name.keys().cloned().collect()
    }

    /// Returns all objects, also those that are reduced, sorted by namespace and name.
    pub(super) fn all(&self) -> Vec<Arc<T>> {
        self.state().objects.by_name.values().filter_map(CachedObject::any).cloned().collect()
    }

    /// Returns the number of objects, and how many of them are too large for the cache.
    pub(super) fn len(&self) -> (usize, usize) {
        let CacheState { objects, .. } = &*self.state();
        (objects.by_name.len(), objects.by_name.len() - objects.whole)
    }

    /// Whether the cache is complete and current, except for the lag of a watch: a list was completed, and the watch
    /// after it works. Then an object that is not cached does not exist.
    pub(super) fn is_synced(&self) -> bool {
        let state = self.state();
        state.complete && !state.broken
    }

    /// Applies an event of the watch. Returns whether it made the cache synced.
    pub(super) fn apply(&self, event: CacheEvent<T::Sent>) -> bool {
        let mut state = self.state();
        let mut completed = false;
        match event {
            CacheEvent::Init => state.listed = Some(CachedObjects::new()),
            CacheEvent::InitApply(sent) => {
                let (name, object) = with_name(sent);
                if let Some(listed) = &mut state.listed {
                    listed.insert(name.clone(), &object);
                }
                state.objects.insert(name, &object);
            }
            CacheEvent::InitDone => {
                if let Some(listed) = state.listed.take() {
                    state.objects = listed;
                }
                completed = mem::replace(&mut state.broken, false) | !mem::replace(&mut state.complete, true);
            }
            CacheEvent::Apply(sent) => {
                let (name, object) = with_name(sent);
                state.objects.insert(name, &object);
            }
            CacheEvent::Delete(sent) => state.objects.remove(&with_name::<T>(sent).0),
        }
        drop(state);
        self.changes.send_modify(|count| *count += 1);
        completed
    }

    /// Marks the watch as broken. Returns whether it worked before.
    pub(super) fn mark_broken(&self) -> bool {
        !mem::replace(&mut self.state().broken, true)
    }

    /// Marks the watch as working. Returns whether it was broken before. A list that was not completed shows that only by
    /// its end.
    pub(super) fn mark_working(&self) -> bool {
        let mut state = self.state();
        state.listed.is_none() && mem::replace(&mut state.broken, false)
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

fn with_name<T: WatchedKind>(sent: T::Sent) -> (ObjectRef, Arc<T>) {
    let object = T::from_sent(sent);
    (object.name(), Arc::new(object))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::Namespace;
    use serde_json::{from_value, json};

    fn sent(name: &str, value: &str) -> <Namespace as WatchedKind>::Sent {
        from_value(json!({"metadata": {"name": name, "annotations": {"detour.io/a": value}}})).expect("a namespace")
    }

    fn value(cache: &Cache<Namespace>, name: &str) -> Option<String> {
        let object = ObjectRef { namespace: String::new(), name: name.into() };
        cache.get(&object).map(|namespace| namespace.annotations["detour.io/a"].clone())
    }

    #[test]
    fn a_completed_list_replaces_the_cached_objects() {
        let cache = Cache::<Namespace>::new();
        assert!(!cache.is_synced());
        for (event, completes) in
            [(CacheEvent::Init, false), (CacheEvent::InitApply(sent("a", "1")), false), (CacheEvent::InitDone, true)]
        {
            assert_eq!(cache.apply(event), completes);
        }
        assert!(cache.is_synced());
        cache.apply(CacheEvent::Apply(sent("b", "1")));
        cache.apply(CacheEvent::Apply(sent("b", "2")));
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (Some("1".into()), Some("2".into())));
        cache.apply(CacheEvent::Init);
        cache.apply(CacheEvent::InitApply(sent("b", "3")));
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (Some("1".into()), Some("3".into())), "not complete yet");
        assert!(!cache.apply(CacheEvent::InitDone), "it was synced all the time");
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (None, Some("3".into())));
        cache.apply(CacheEvent::Delete(sent("b", "3")));
        assert!(cache.all().is_empty());
    }

    #[test]
    fn the_cache_is_synced_again_when_a_broken_watch_works_or_a_list_is_completed() {
        let cache = Cache::<Namespace>::new();
        assert!(!cache.mark_working() && !cache.is_synced(), "nothing was listed");
        cache.apply(CacheEvent::Init);
        cache.apply(CacheEvent::InitDone);
        assert!(cache.mark_broken() && !cache.mark_broken());
        assert!(!cache.is_synced());
        assert!(cache.mark_working() && cache.is_synced());
        cache.mark_broken();
        cache.apply(CacheEvent::Init);
        assert!(!cache.mark_working() && !cache.is_synced(), "the list may hang");
        assert!(cache.apply(CacheEvent::InitDone) && cache.is_synced());
    }

    fn labelled(name: &str, labels: usize) -> <Namespace as WatchedKind>::Sent {
        let labels: BTreeMap<String, String> =
            (0..labels).map(|number| (format!("{}{number}", "l".repeat(300)), "v".repeat(63))).collect();
        from_value(json!({"metadata": {"name": name, "labels": labels}})).expect("a namespace")
    }

    #[test]
    fn large_objects_are_reduced_to_what_decides_and_leave_room_for_others() {
        const MAX_WEIGHT: usize = <Namespace as WatchedKind>::MAX_WEIGHT;
        let cache = Cache::<Namespace>::new();
        cache.apply(CacheEvent::Init);
        cache.apply(CacheEvent::InitApply(sent("fat", &"x".repeat(MAX_WEIGHT))));
        cache.apply(CacheEvent::InitApply(sent("thin", "1")));
        cache.apply(CacheEvent::InitDone);
        let name = |name: &str| ObjectRef { namespace: String::new(), name: name.into() };
        assert!(cache.is_too_large(&name("fat")) && !cache.is_too_large(&name("thin")));
        assert_eq!((value(&cache, "fat"), value(&cache, "thin"), cache.len()), (None, Some("1".into()), (2, 1)));
        assert!(cache.get_any(&name("fat")).is_some_and(|fat| fat.annotations.is_empty()) && cache.all().len() == 2);
        cache.apply(CacheEvent::Apply(sent("fat", "2")));
        assert_eq!((value(&cache, "fat"), cache.len()), (Some("2".into()), (2, 0)), "it is small now");

        // Its labels may decide, so they stay, or else the object is incomplete.
        for (labels, incomplete) in [(30, false), (3000, true)] {
            cache.apply(CacheEvent::Apply(labelled("fat", labels)));
            let fat = cache.get_any(&name("fat")).expect("it is known");
            assert_eq!((fat.incomplete, fat.labels.len()), (incomplete, if incomplete { 0 } else { labels }));
        }
        cache.apply(CacheEvent::Delete(sent("fat", "")));

        // As many as fit; the others are incomplete.
        let many = MAX_TOTAL / MAX_WEIGHT + 99;
        for number in 0..many {
            cache.apply(CacheEvent::Apply(sent(&number.to_string(), &"x".repeat(MAX_WEIGHT - 300))));
        }
        let (all, too_large) = cache.len();
        assert!(all == many + 1 && (1..120).contains(&too_large), "{too_large}");
        assert_eq!(cache.all().iter().filter(|it| it.incomplete).count(), too_large);
        let total = || cache.state().objects.total;
        assert!((MAX_TOTAL - MAX_WEIGHT..=MAX_TOTAL + 99 * MAX_WEIGHT).contains(&total()));
        for object in cache.names() {
            cache.apply(CacheEvent::Delete(sent(&object.name, "")));
        }
        assert_eq!((total(), cache.len()), (0, (0, 0)));
    }

    #[tokio::test]
    async fn a_task_finds_an_object_as_soon_as_the_watch_reports_it() {
        let cache = Cache::<Namespace>::new();
        let find = || value(&cache, "b");
        assert_eq!(cache.find_within(Duration::from_secs(60), find).await, None, "there is no watch yet");
        cache.apply(CacheEvent::Init);
        cache.apply(CacheEvent::InitDone);
        let change = async {
            tokio::task::yield_now().await;
            cache.apply(CacheEvent::Apply(sent("a", "1")));
            tokio::task::yield_now().await;
            cache.apply(CacheEvent::Apply(sent("b", "2")));
        };
        let (found, ()) = tokio::join!(cache.find_within(Duration::from_secs(60), find), change);
        assert_eq!(found, Some("2".into()));
    }
}
