//! A session with an API server: the client, the event loop on which its requests run, and what it receives: answers of
//! limited size, lists in pages, and the events of watches.
//!
//! This is below kube's `Api`, which reads answers of any size, drops the header `Retry-After`, and parses the parts of
//! objects that this program does not need, such as `managedFields`.

use super::failure::Failure;
use super::request::{ApiRequest, Collection};
use super::retry::{Deadline, ServerAddress, retry};
use crate::cluster::kubeconfig::{Kubeconfig, connects_to, server_address};
use crate::cni::{Code, Error};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use hyper::{Request, Response};
use kube::Client;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Mutex;
use tokio::time::timeout;

/// The maximum size of an answer and of an event, so that a server that is not an API server can't exhaust the memory of
/// this process. The API server accepts objects of at most 1.5 MiB (etcd, `--max-request-bytes`); as JSON, an object can
/// be six times as large if all of its text needs escapes. Answers are not compressed: kube is built without `gzip`.
const MAX_ANSWER: usize = 16 << 20;
/// The number of objects of a page. The objects of a page that exceeds the limit are requested one by one.
const PAGE: u32 = 250;
/// The version at which a list or a watch starts if the server may answer from its cache, which takes no request to etcd
/// (kubernetes.io, "API Concepts", "Get State and Start at Any").
const ANY_VERSION: &str = "0";
/// The limit for the pages of a list: more than a database of etcd (8 GiB) has if each object has the largest size and a
/// page of its own.
const MAX_PAGES: usize = 6000;
/// How long a watch may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// The duration of a watch, after which the API server ends it: less than the read timeout of the client.
const WATCH_SECONDS: u32 = 290;

/// A client and the event loop on which its requests run.
pub(super) struct Session {
    /// The event loop of the calling thread, so that no thread is started; `None` if another thread runs it.
    own: Option<Runtime>,
    handle: Handle,
    client: Client,
    /// The server's address for messages.
    server: String,
    /// Where to connect to it.
    address: ServerAddress,
    /// The kubeconfig, or the directory of a service account.
    kubeconfig: PathBuf,
    /// Held while a page of a list is in memory.
    page: Mutex<()>,
}

/// A page of a list.
#[derive(Deserialize)]
struct Page<'a> {
    #[serde(default)]
    metadata: ListMetadata,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

/// `metadata` of a list (apimachinery, `ListMeta`).
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMetadata {
    resource_version: String,
    r#continue: String,
}

impl Session {
    /// Creates the client; the first request connects.
    pub(super) fn open(kubeconfig: &Kubeconfig<'_>, path: PathBuf, shared: Option<Handle>) -> Result<Self, Error> {
        let own = match &shared {
            Some(_) => None,
            None => Some(Builder::new_current_thread().enable_io().enable_time().build().map_err(|error| {
                Error::new(Code::Internal, "event loop for API requests not started").with_details(error.to_string())
            })?),
        };
        let handle = shared.or_else(|| own.as_ref().map(|runtime| runtime.handle().clone()));
        let handle = handle.ok_or_else(|| Error::new(Code::Internal, "no event loop for API requests"))?;
        let config = kubeconfig.config(own.is_none())?;
        let (server, address) = (server_address(&config), connects_to(&config));
        // A client spawns tasks.
        let client = {
            let _inside = handle.enter();
            kubeconfig.client(config)?
        };
        Ok(Self { own, handle, client, server, address, kubeconfig: path, page: Mutex::default() })
    }

    /// Runs `work` on the event loop until it ends. Not for tasks of a shared event loop.
    pub(super) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        match &self.own {
            Some(runtime) => runtime.block_on(work),
            None => self.handle.block_on(work),
        }
    }

    /// Sends a request until `accept` takes an answer, a retry can't help, or the deadline has passed.
    pub(super) async fn send<T: DeserializeOwned, U>(
        &self,
        request: &ApiRequest,
        deadline: Deadline,
        accept: impl Fn(T) -> Result<U, Failure>,
    ) -> Result<U, Error> {
        let attempt = async || {
            let response = self.transmit(request.http.clone()).await?;
            let body = receive(response).await.map_err(|failure| match &request.confirmed_by {
                // The server does not serve all resources yet, or a proxy in front of it answers.
                Some(name) if failure.missing.as_ref() != Some(name) && failure.status == 404 => {
                    Failure { status: 0, ..failure }
                }
                _ => failure,
            })?;
            accept(parsed(&body)?)
        };
        retry(deadline, &self.address, attempt).await.map_err(|last| self.error(request, last))
    }

    /// Returns the error for the last failure of a request.
    pub(super) fn error(&self, request: &ApiRequest, last: Failure) -> Error {
        request.error(&self.server, &self.kubeconfig, last)
    }

    async fn transmit(&self, request: Request<Vec<u8>>) -> Result<Response<Body>, kube::Error> {
        self.client.send(request.map(Body::from)).await
    }

    /// Calls `each` with every object of a collection. Returns the version of the list, at which a watch continues.
    /// `from_cache` is whether the server may answer from its cache.
    pub(super) async fn list<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        from_cache: bool,
        page_timeout: Duration,
        mut each: impl FnMut(T),
    ) -> Result<String, Failure> {
        let (mut continued, mut singles) = (None, 0);
        for _ in 0..MAX_PAGES {
            let size = if singles > 0 { 1 } else { PAGE };
            let (list, field_selector) = collection.requests();
            let mut params = ListParams { field_selector, ..ListParams::default() };
            (params.limit, params.continue_token) = (Some(size), continued.clone());
            // The cache of a server before 1.34 ignores the size of pages.
            if from_cache && size == PAGE && continued.is_none() {
                params = params.match_any();
            }
            let list = if collection.metadata_only { list.list_metadata(&params) } else { list.list(&params) };
            let list = list.map_err(kube::Error::BuildRequest)?;
            let _page = self.page.lock().await;
            let received = timeout(page_timeout, async { receive(self.transmit(list).await?).await });
            let body = match received.await {
                Ok(Err(failure)) if failure.is_too_large && size > 1 => {
                    singles = PAGE;
                    continue;
                }
                received => received.map_err(|_| silent("answer to a list", page_timeout))??,
            };
            let page: Page<'_> = parsed(&body)?;
            for item in page.items.into_iter().flatten() {
                each(parsed(item.get().as_bytes())?);
            }
            if page.metadata.r#continue.is_empty() {
                return Ok(page.metadata.resource_version);
            }
            continued = Some(page.metadata.r#continue);
            singles = singles.saturating_sub(1);
        }
        Err(Failure::new(format!("expected at most {MAX_PAGES} pages, got more")))
    }

    /// Watches a collection from `version` on, or from any, with all objects first, for some minutes. The server has started
    /// the watch when this returns.
    pub(super) async fn watch<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        version: Option<&str>,
    ) -> Result<Events<T>, Failure> {
        let (watch, field_selector) = collection.requests();
        let mut params = WatchParams { field_selector, ..WatchParams::default() };
        // A watch from any version fails with 500 if it requests bookmarks and etcd reports no progress on request
        // (kube-apiserver 1.35 with etcd 3.4.23).
        params.bookmarks = version.is_some();
        let (params, version) = (params.timeout(WATCH_SECONDS), version.unwrap_or(ANY_VERSION));
        let watch = if collection.metadata_only {
            watch.watch_metadata(&params, version)
        } else {
            watch.watch(&params, version)
        };
        let watch = watch.map_err(kube::Error::BuildRequest)?;
        let started = timeout(START_TIMEOUT, async {
            let response = self.transmit(watch).await?;
            if response.status().is_success() {
                return Ok(Events { body: response.into_body(), line: Vec::new(), kind: PhantomData });
            }
            Err(receive(response).await.err().unwrap_or_default())
        });
        started.await.map_err(|_| silent("answer to the watch", START_TIMEOUT))?
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Dropping the runtime would wait for a name lookup that still runs.
        if let Some(runtime) = self.own.take() {
            runtime.shutdown_background();
        }
    }
}

fn silent(what: &str, time: Duration) -> Failure {
    Failure::new(format!("no {what} within {} s", time.as_secs()))
}

/// Returns the body of a successful answer.
async fn receive(response: Response<Body>) -> Result<Vec<u8>, Failure> {
    let (head, mut body) = response.into_parts();
    let mut bytes = Vec::new();
    loop {
        if bytes.len() as u64 + body.size_hint().lower() > MAX_ANSWER as u64 {
            return Err(Failure::too_large("a response", MAX_ANSWER));
        }
        match body.frame().await.transpose()? {
            Some(frame) => bytes.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
            None if head.status.is_success() => return Ok(bytes),
            None => return Err(Failure::of_answer(&head, &bytes)),
        }
    }
}

fn parsed<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(Failure::unexpected)
}

/// The events of a watch.
pub(crate) struct Events<T> {
    body: Body,
    /// The beginning of the next event.
    line: Vec<u8>,
    kind: PhantomData<T>,
}

impl<T: DeserializeOwned> Events<T> {
    /// Returns the next event; `None` if the watch has ended, or the connection is broken: the next watch shows whether the
    /// server is reachable.
    ///
    /// # Errors
    /// The event is too large or not valid, or the server reports an error.
    pub(crate) async fn next(&mut self) -> Result<Option<WatchEvent<T>>, Failure> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.line[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.line.split_off(searched + end + 1);
                return match parsed(&std::mem::replace(&mut self.line, rest))? {
                    WatchEvent::Error(status) => Err(Failure::of_status(status.code, &status.message)),
                    event => Ok(Some(event)),
                };
            }
            searched = self.line.len();
            if searched > MAX_ANSWER {
                return Err(Failure::too_large("an event", MAX_ANSWER));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.line.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
                Some(Err(_)) | None => return Ok(None),
            }
        }
    }
}
