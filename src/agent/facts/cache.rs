//! Objects of one kind as a watch tells them, and how far that can be relied on.

use super::objects::WatchedKind;
use crate::cluster::ObjectRef;
use kube::runtime::watcher::Event;
use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// What is known of one kind.
pub(super) struct Cache<T> {
    state: Mutex<CacheState<T>>,
    /// Counts the changes, for tasks; threads wait for `changed`.
    changes: watch::Sender<u64>,
    changed: Condvar,
}

struct CacheState<T> {
    known: CachedObjects<T>,
    /// Filled by a list that is under way.
    listed: Option<CachedObjects<T>>,
    /// Whether a list was complete once.
    complete: bool,
    /// Whether the watch is broken.
    broken: bool,
}

type CachedObjects<T> = BTreeMap<ObjectRef, Arc<T>>;

impl<T: WatchedKind> Cache<T> {
    pub(super) fn new() -> Self {
        let state = CacheState { known: CachedObjects::new(), listed: None, complete: false, broken: false };
        Self { state: Mutex::new(state), changes: watch::Sender::new(0), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, CacheState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object of this name, as the watch saw it last.
    pub(super) fn get(&self, object: &ObjectRef) -> Option<Arc<T>> {
        self.state().known.get(object).cloned()
    }

    /// All objects, sorted by namespace and name.
    pub(super) fn all(&self) -> Vec<Arc<T>> {
        self.state().known.values().cloned().collect()
    }

    /// How many objects there are.
    pub(super) fn len(&self) -> usize {
        self.state().known.len()
    }

    /// Whether what is known is what there is, but for the moment that a watch takes: there was a list
    /// and the watch after it works. Then what is not known does not exist.
    pub(super) fn is_whole(&self) -> bool {
        let state = self.state();
        state.complete && !state.broken
    }

    /// Takes a change over. Gives whether the whole list is known with it that was not before.
    pub(super) fn apply(&self, event: Event<T::Sent>) -> bool {
        let mut state = self.state();
        let mut completed = false;
        match event {
            Event::Init => state.listed = Some(CachedObjects::new()),
            Event::InitApply(sent) => {
                let (object, kept) = named(sent);
                if let Some(listed) = &mut state.listed {
                    listed.insert(object.clone(), Arc::clone(&kept));
                }
                state.known.insert(object, kept);
            }
            Event::InitDone => {
                if let Some(listed) = state.listed.take() {
                    state.known = listed;
                }
                completed = mem::replace(&mut state.broken, false) | !mem::replace(&mut state.complete, true);
            }
            Event::Apply(sent) => {
                let (object, kept) = named(sent);
                state.known.insert(object, kept);
            }
            Event::Delete(sent) => drop(state.known.remove(&named::<T>(sent).0)),
        }
        // Before the lock is given back, lest a thread that is about to wait miss it.
        self.changes.send_modify(|count| *count += 1);
        drop(state);
        self.changed.notify_all();
        completed
    }

    /// The watch is broken; gives whether it was not before.
    pub(super) fn breaks(&self) -> bool {
        !mem::replace(&mut self.state().broken, true)
    }

    /// The watch has gone on; gives whether it was broken before. A list that is under way shows that by
    /// its end only.
    pub(super) fn goes_on(&self) -> bool {
        let mut state = self.state();
        state.listed.is_none() && mem::replace(&mut state.broken, false)
    }

    /// What `find` finds, now or after a change before `time` is over; `None` at once where no change is
    /// to be expected.
    pub(super) async fn find_within<R>(&self, time: Duration, find: impl Fn() -> Option<R>) -> Option<R> {
        let mut changes = self.changes.subscribe();
        let found = async {
            loop {
                changes.mark_unchanged();
                if let Some(found) = find() {
                    return Some(found);
                }
                if !self.is_whole() || changes.changed().await.is_err() {
                    return None;
                }
            }
        };
        tokio::time::timeout(time, found).await.ok().flatten()
    }

    /// Waits until there were more than `seen` changes, `time` at the longest. Gives how many there were.
    pub(super) fn wait_for_change(&self, seen: u64, time: Duration) -> u64 {
        let unchanged = |_: &mut CacheState<T>| *self.changes.borrow() == seen;
        drop(self.changed.wait_timeout_while(self.state(), time, unchanged));
        *self.changes.borrow()
    }
}

fn named<T: WatchedKind>(sent: T::Sent) -> (ObjectRef, Arc<T>) {
    let kept = T::of(sent);
    (kept.object(), Arc::new(kept))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::Namespace;
    use serde_json::{from_value, json};
    use std::thread;

    fn sent(name: &str, value: &str) -> <Namespace as WatchedKind>::Sent {
        from_value(json!({"metadata": {"name": name, "annotations": {"a": value}}})).expect("a namespace")
    }

    fn value(cache: &Cache<Namespace>, name: &str) -> Option<String> {
        let object = ObjectRef { namespace: String::new(), name: name.into() };
        cache.get(&object).map(|namespace| namespace.annotations["a"].clone())
    }

    #[test]
    fn a_list_replaces_what_was_known_once_it_is_complete() {
        let cache = Cache::<Namespace>::new();
        assert!(!cache.is_whole());
        for (event, completes) in
            [(Event::Init, false), (Event::InitApply(sent("a", "1")), false), (Event::InitDone, true)]
        {
            assert_eq!(cache.apply(event), completes);
        }
        assert!(cache.is_whole());
        cache.apply(Event::Apply(sent("b", "1")));
        cache.apply(Event::Apply(sent("b", "2")));
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (Some("1".into()), Some("2".into())));
        cache.apply(Event::Init);
        cache.apply(Event::InitApply(sent("b", "3")));
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (Some("1".into()), Some("3".into())), "not complete yet");
        assert!(!cache.apply(Event::InitDone), "it was whole all the time");
        assert_eq!((value(&cache, "a"), value(&cache, "b")), (None, Some("3".into())));
        cache.apply(Event::Delete(sent("b", "3")));
        assert!(cache.all().is_empty());
    }

    #[test]
    fn a_broken_watch_is_whole_again_when_it_goes_on_or_a_list_ends() {
        let cache = Cache::<Namespace>::new();
        assert!(!cache.goes_on() && !cache.is_whole(), "nothing was listed");
        cache.apply(Event::Init);
        cache.apply(Event::InitDone);
        assert!(cache.breaks() && !cache.breaks());
        assert!(!cache.is_whole());
        assert!(cache.goes_on() && cache.is_whole());
        cache.breaks();
        cache.apply(Event::Init);
        assert!(!cache.goes_on() && !cache.is_whole(), "the list may hang");
        assert!(cache.apply(Event::InitDone) && cache.is_whole());
    }

    #[test]
    fn a_thread_is_woken_by_a_change() {
        let cache = Cache::<Namespace>::new();
        assert_eq!(cache.wait_for_change(0, Duration::ZERO), 0);
        thread::scope(|scope| {
            let waits = scope.spawn(|| cache.wait_for_change(0, Duration::from_secs(60)));
            cache.apply(Event::Apply(sent("a", "1")));
            assert_eq!(waits.join().expect("no panic"), 1);
        });
        assert_eq!(cache.wait_for_change(0, Duration::from_secs(60)), 1, "it is not missed");
    }

    #[tokio::test]
    async fn a_task_is_woken_by_the_change_that_it_waits_for() {
        let cache = Cache::<Namespace>::new();
        let find = || value(&cache, "b");
        assert_eq!(cache.find_within(Duration::from_secs(60), find).await, None, "there is no watch yet");
        cache.apply(Event::Init);
        cache.apply(Event::InitDone);
        let change = async {
            tokio::task::yield_now().await;
            cache.apply(Event::Apply(sent("a", "1")));
            tokio::task::yield_now().await;
            cache.apply(Event::Apply(sent("b", "2")));
        };
        let (found, ()) = tokio::join!(cache.find_within(Duration::from_secs(60), find), change);
        assert_eq!(found, Some("2".into()));
    }
}
