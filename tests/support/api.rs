//! As much of a Kubernetes API as an agent and a plugin need: objects can be read, listed in pages and
//! watched; what is written is taken. Every request is counted.

use super::server::{Answer, Request, Server};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

pub(crate) const PODS: &str = "/api/v1/pods";
pub(crate) const NAMESPACES: &str = "/api/v1/namespaces";
pub(crate) const DEFINITIONS: &str = "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions";

/// The server; its state is shared with the threads that answer.
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    server: Server,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// By the collection's path for all namespaces, then by namespace and name.
    objects: BTreeMap<&'static str, BTreeMap<(String, String), Value>>,
    version: u64,
    requests: Vec<String>,
    writes: Vec<(String, Value)>,
    watches: Vec<(&'static str, Sender<Value>)>,
    /// What watches and lists are answered instead.
    refuses_watches: Option<u16>,
    /// What requests for one object are answered instead.
    refuses_reads: Option<u16>,
    /// Whether a watch from a version is answered 410.
    forgets_versions: bool,
    /// The status with which changes are refused.
    refuses_writes: Option<u16>,
    down: bool,
    /// Whether requests are taken and never answered.
    silent: bool,
    /// The only token that is accepted, if there is one.
    token: Option<String>,
}

impl Api {
    pub(crate) fn start() -> Self {
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        let server = Server::plain(move |request| answer(&mut shared.lock().expect("no panic while locked"), request));
        Self { address: server.address, server, state }
    }

    /// Answers the connections of another listener too, until that is shut down.
    pub(crate) fn serve(&self, listener: TcpListener) {
        self.server.serve(listener, None);
    }

    /// Answers requests with another token 401.
    pub(crate) fn accept_only(&self, token: &str) {
        self.state().token = Some(token.to_owned());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Adds or changes an object, and tells who watches.
    pub(crate) fn put(&self, collection: &'static str, object: &Value) {
        self.change(collection, object, true);
    }

    /// The same without a word to who watches: the watch lags.
    pub(crate) fn put_quietly(&self, collection: &'static str, object: &Value) {
        self.change(collection, object, false);
    }

    fn change(&self, collection: &'static str, object: &Value, tell: bool) {
        let mut state = self.state();
        state.version += 1;
        let mut object = object.clone();
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let all = state.objects.entry(collection).or_default();
        let kind = if all.insert(key(&object), object.clone()).is_some() { "MODIFIED" } else { "ADDED" };
        if tell {
            state.tell(collection, kind, &object);
        }
    }

    pub(crate) fn delete(&self, collection: &'static str, namespace: &str, name: &str) {
        let mut state = self.state();
        state.version += 1;
        let all = state.objects.entry(collection).or_default();
        let object = all.remove(&(namespace.to_owned(), name.to_owned())).expect("it is there");
        state.tell(collection, "DELETED", &object);
    }

    /// Ends every watch and every connection, and answers no more requests.
    pub(crate) fn go_down(&self) {
        let mut state = self.state();
        state.down = true;
        state.watches.clear();
    }

    /// Answers lists and watches with this status only.
    pub(crate) fn refuse_watches(&self, status: u16) {
        let mut state = self.state();
        state.refuses_watches = Some(status);
        state.watches.clear();
    }

    /// Answers requests for one object with this status only.
    pub(crate) fn refuse_reads(&self, status: u16) {
        self.state().refuses_reads = Some(status);
    }

    /// Answers lists and watches again.
    pub(crate) fn grant_watches(&self) {
        self.state().refuses_watches = None;
    }

    /// Answers changes with this status; `None` accepts them again.
    pub(crate) fn refuse_writes(&self, status: Option<u16>) {
        self.state().refuses_writes = status;
    }

    /// Ends every watch; each that would go on where it ended is answered 410 until there was a list.
    pub(crate) fn forget_versions(&self) {
        let mut state = self.state();
        state.forgets_versions = true;
        state.watches.clear();
    }

    /// Ends every watch, and answers no more requests, but keeps the connections.
    pub(crate) fn go_silent(&self) {
        let mut state = self.state();
        state.silent = true;
        state.watches.clear();
    }

    /// What was asked so far that is neither a list nor a watch: method and path.
    pub(crate) fn requests(&self) -> Vec<String> {
        let whole = [PODS, NAMESPACES, DEFINITIONS].map(|path| format!("GET {path}"));
        let mut requests = self.state().requests.clone();
        requests.retain(|request| !whole.contains(request));
        requests
    }

    /// How many lists and watches of a whole collection were asked for.
    pub(crate) fn asked_for(&self, collection: &str) -> usize {
        let line = format!("GET {collection}");
        self.state().requests.iter().filter(|request| **request == line).count()
    }

    /// What was written so far.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.bodies_of("")
    }

    /// The Events that were written so far. An agent on a busy machine sends an Event again, with the current time, if it was
    /// not accepted within 2 s; both count as one.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut events = self.bodies_of("POST /api/v1/namespaces/shop/events");
        let sent =
            |event: &Value| event["firstTimestamp"].as_str().expect("text").parse::<Timestamp>().expect("a time");
        let is_same = |later: &Value, earlier: &Value| {
            ["involvedObject", "reason", "message"].iter().all(|key| later[key] == earlier[key])
        };
        events.dedup_by(|later, earlier| {
            is_same(later, earlier) && sent(later).as_second() - sent(earlier).as_second() >= 2
        });
        events
    }

    /// What was written so far with requests that start with `start`.
    pub(crate) fn bodies_of(&self, start: &str) -> Vec<Value> {
        let state = self.state();
        state.writes.iter().filter(|(line, _)| line.starts_with(start)).map(|(_, body)| body.clone()).collect()
    }
}

impl State {
    fn tell(&mut self, collection: &str, kind: &str, object: &Value) {
        let event = json!({"type": kind, "object": object});
        self.watches.retain(|(watched, watch)| *watched != collection || watch.send(event.clone()).is_ok());
    }
}

fn key(object: &Value) -> (String, String) {
    let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
    (text("namespace"), text("name"))
}

fn answer(state: &mut State, request: &Request) -> Answer {
    let mut words = request.line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    state.requests.push(format!("{method} {path}"));
    if state.down || state.silent {
        return if state.down { Answer::Close } else { Answer::Hang };
    }
    let token = request.headers.get("authorization").map(|value| value.trim_start_matches("Bearer "));
    if state.token.as_deref().is_some_and(|accepted| Some(accepted) != token) {
        return refused(401, "Unauthorized");
    }
    if method != "GET" {
        if let Some(status) = state.refuses_writes {
            return refused(status, "refused");
        }
        if let Ok(body) = serde_json::from_slice(&request.body) {
            state.writes.push((format!("{method} {path}"), body));
        }
        return Answer::json(200, &json!({}));
    }
    let parameter = |name: &str| {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    };
    let Some(collection) = [PODS, NAMESPACES, DEFINITIONS].into_iter().find(|whole| *whole == path) else {
        if let Some(status) = state.refuses_reads {
            return refused(status, "refused");
        }
        let found = find(state, path);
        return found.map_or_else(|| refused(404, &format!("{path} not found")), |object| Answer::json(200, object));
    };
    if let Some(status) = state.refuses_watches {
        return refused(status, "refused");
    }
    if parameter("watch").is_some() {
        if state.forgets_versions {
            return refused(410, "too old");
        }
        let (sender, events) = channel();
        state.watches.push((collection, sender));
        return Answer::Events(events);
    }
    state.forgets_versions = false;
    let all: Vec<&Value> = state.objects.get(collection).into_iter().flat_map(BTreeMap::values).collect();
    let number = |name: &str, usual: usize| parameter(name).map_or(usual, |text| text.parse().expect("a number"));
    let (from, limit) = (number("continue", 0), number("limit", usize::MAX));
    let items: Vec<_> = all.iter().skip(from).take(limit).collect();
    let next = from + items.len();
    let more = if next < all.len() { next.to_string() } else { String::new() };
    let metadata = json!({"resourceVersion": state.version.to_string(), "continue": more});
    Answer::json(200, &json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items}))
}

fn refused(code: u16, message: &str) -> Answer {
    Answer::json(code, &json!({"kind": "Status", "message": message, "code": code}))
}

/// The object of a path such as `/api/v1/namespaces/NAMESPACE/pods/NAME`.
fn find<'a>(state: &'a State, path: &str) -> Option<&'a Value> {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let (collection, key) = match parts.as_slice() {
        ["api", "v1", "namespaces", name] => (NAMESPACES, ("", *name)),
        ["api", "v1", "namespaces", namespace, "pods", name] => (PODS, (*namespace, *name)),
        ["apis", _, "v1", "namespaces", namespace, _, name] => (DEFINITIONS, (*namespace, *name)),
        _ => return None,
    };
    state.objects.get(collection)?.get(&(key.0.to_owned(), key.1.to_owned()))
}

/// Returns a kubeconfig with these values of its cluster and its user; `null`: its context names no user.
pub(crate) fn kubeconfig_of(cluster: &Value, user: &Value) -> String {
    let name = if user.is_null() { "" } else { "u" };
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": name}}],
        "clusters": [{"name": "k", "cluster": cluster}], "users": [{"name": "u", "user": user}],
    })
    .to_string()
}
