//! All objects of one kind, for the agent's watches: a list in pages, and a watch that continues it.

use super::call::{causes, status_message};
use super::pages::{ListMetadata, PageRead, read_pages};
use super::request::Page;
use super::service_account::ServiceAccount;
use crate::cluster::response_limit::TooLarge;
use crate::cni::Error;
use crate::printable::without_tokens;
use futures_util::{Stream, StreamExt};
use hyper::Request as HttpRequest;
use kube::api::{ListParams, Request, WatchEvent, WatchParams};
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// The limit for the pages of a list: more than a database of etcd (8 GiB) has if each object has the largest size and a
/// page of its own.
const MAX_PAGES: usize = 20_000;
/// The timeout of a page. The API server answers within a minute.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a watch may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// The duration of a watch, after which the API server ends it: less than the read timeout of the client.
const WATCH_SECONDS: u32 = 290;

/// The objects of one kind at an API server.
pub(crate) struct Collection<'a> {
    /// Whose credentials are used.
    pub(crate) account: &'a ServiceAccount,
    /// The path of the collection.
    pub(crate) path: &'static str,
    /// Whether the server sends only `metadata` of each object.
    pub(crate) metadata_only: bool,
    /// Selects some of the objects by their fields; `None` for all.
    pub(crate) fields: Option<String>,
    /// Limits the pages that are in memory at the same time, of all collections.
    pub(crate) pages: &'a Semaphore,
}

/// Why a list or a watch failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CollectionError {
    /// The status of the API server's answer; 0 without one.
    pub(crate) status: u16,
    /// Whether a part of the answer exceeds its limit.
    pub(crate) is_too_large: bool,
    /// The cause in one line.
    pub(crate) cause: String,
}

impl fmt::Display for CollectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)
    }
}

impl CollectionError {
    /// Returns an error with this cause.
    pub(crate) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), ..Self::default() }
    }

    fn silent(what: &str, time: Duration) -> Self {
        Self::new(format!("{what} within {} s", time.as_secs()))
    }

    fn of_status(status: u16, message: &str) -> Self {
        Self { status, cause: format!("{status}, {}", without_tokens(message)), ..Self::default() }
    }
}

impl From<kube::Error> for CollectionError {
    fn from(error: kube::Error) -> Self {
        match (&error, TooLarge::find_in(&error)) {
            (kube::Error::Api(status), _) => Self::of_status(status.code, &status.message),
            (_, Some(too_large)) => Self { is_too_large: true, cause: too_large.to_string(), ..Self::default() },
            (_, None) => Self::new(causes(&error)),
        }
    }
}

impl From<Error> for CollectionError {
    fn from(error: Error) -> Self {
        Self::new(error.to_string())
    }
}

/// A page of a list. Only the requested parts of each object are parsed.
#[derive(Deserialize)]
struct ListedPage<T> {
    metadata: ListMetadata,
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

impl Collection<'_> {
    /// Calls `each` with every object. Returns the version of the list, at which a watch continues. `from_cache` is
    /// whether the server may answer from its cache, as for the first list of a client: that takes no request to etcd,
    /// which would have to read the pods of all nodes.
    ///
    /// # Errors
    /// The API server rejects a request or does not answer, an object is too large, or the list does not end.
    pub(crate) async fn list<T: DeserializeOwned>(
        &self,
        from_cache: bool,
        mut each: impl FnMut(T),
    ) -> Result<String, CollectionError> {
        let read = async |page: Page<'_>| {
            // Closed never.
            let _in_memory = self.pages.acquire().await;
            let mut params = ListParams { field_selector: self.fields.clone(), ..ListParams::default() };
            // The cache of a server before 1.34 ignores the size of pages.
            if from_cache && page.is_first() {
                params = params.match_any();
            }
            match timeout(PAGE_TIMEOUT, self.page::<T>(&page.of(params))).await {
                Err(_) => Err(CollectionError::silent("no page of the list", PAGE_TIMEOUT)),
                Ok(Err(error)) if error.is_too_large && page.can_shrink() => Ok(PageRead::TooLarge),
                Ok(Err(error)) => Err(error),
                Ok(Ok(ListedPage { metadata, items })) => {
                    items.into_iter().for_each(&mut each);
                    Ok(PageRead::Done(metadata))
                }
            }
        };
        let version = read_pages(MAX_PAGES, read).await?;
        version.ok_or_else(|| CollectionError::new(format!("a list of more than {MAX_PAGES} pages")))
    }

    async fn page<T: DeserializeOwned>(&self, params: &ListParams) -> Result<ListedPage<T>, CollectionError> {
        let builder = Request::new(self.path);
        let list = if self.metadata_only { builder.list_metadata(params) } else { builder.list(params) };
        let response = self.account.client()?.send(request(list)?.map(Body::from)).await?;
        let status = response.status();
        let body = response.into_body().collect_bytes().await?;
        if !status.is_success() {
            return Err(CollectionError::of_status(status.as_u16(), &status_message(&body)));
        }
        let unexpected = |error| format!("200, but the body is not the expected list: {error}");
        serde_json::from_slice(&body).map_err(|error| CollectionError::new(unexpected(error)))
    }

    /// Watches the objects from `version` on. The server has started the watch when this returns. The stream ends when
    /// the server ends the watch.
    ///
    /// # Errors
    /// The API server rejects the request or does not answer. In the stream: the connection breaks, or the server reports
    /// an error.
    pub(crate) async fn watch<T: DeserializeOwned + Clone>(
        &self,
        version: &str,
    ) -> Result<impl Stream<Item = Result<WatchEvent<T>, CollectionError>> + use<T>, CollectionError> {
        let params = WatchParams { field_selector: self.fields.clone(), ..WatchParams::default() };
        let params = params.timeout(WATCH_SECONDS);
        let builder = Request::new(self.path);
        let watch =
            if self.metadata_only { builder.watch_metadata(&params, version) } else { builder.watch(&params, version) };
        let (client, request) = (self.account.client()?, request(watch)?);
        let started = timeout(START_TIMEOUT, client.request_events::<T>(request)).await;
        let events = started.map_err(|_| CollectionError::silent("no answer to the watch", START_TIMEOUT))??;
        Ok(events.map(|event| event.map_err(CollectionError::from)))
    }
}

fn request(request: Result<HttpRequest<Vec<u8>>, impl fmt::Display>) -> Result<HttpRequest<Vec<u8>>, CollectionError> {
    request.map_err(|error| CollectionError::new(error.to_string()))
}
