//! A session with an API server: the client, the event loop on which its requests run, their retries until a deadline, and
//! what it receives: answers of limited size, lists in pages, and the events of watches.
//!
//! A session replaces kube's `Api`, which reads answers of any size and drops the header `Retry-After`.

use super::request::{ApiRequest, Collection, Failure};
use crate::cluster::kubeconfig::{Kubeconfig, connects_to, server_address};
use crate::cni::{Code, Error};
use crate::wait::Backoff;
use futures_util::future::{Either, ready, select};
use futures_util::{Stream, StreamExt, TryStreamExt};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use hyper::{Request, Response};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::Client;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::cell::RefCell;
use std::path::PathBuf;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Mutex;
use tokio::time::{sleep, sleep_until, timeout};

/// The maximum size of an answer other than a watch, so that a server that is not an API server can't exhaust the memory
/// of this process. The API server accepts objects of at most 1.5 MiB (etcd, `--max-request-bytes`); as JSON, an object can
/// be six times as large if all of its text needs escapes. Answers are not compressed: kube is built without `gzip`.
const MAX_ANSWER: usize = 16 << 20;
/// The number of objects of a page. The objects of a page that exceeds the limit are requested one by one.
const PAGE: u32 = 250;
/// The limit for the pages of a list: more than a database of etcd (8 GiB) has if each object has the largest size and a
/// page of its own.
const MAX_PAGES: usize = 6000;
/// How long a watch may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// The duration of a watch, after which the API server ends it: less than the read timeout of the client.
const WATCH_SECONDS: u32 = 290;

/// A client and the event loop on which its requests run.
pub(crate) struct Session {
    /// The event loop for callers that block, which runs on their thread, so that no thread is started; `None` if the
    /// callers are tasks.
    own: Option<Runtime>,
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
    metadata: ListMeta,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

impl Session {
    /// Creates the client; the first request connects. If `of_tasks` is set, the caller must be a task.
    pub(super) fn open(kubeconfig: &Kubeconfig<'_>, of_tasks: bool) -> Result<Self, Error> {
        let own = (!of_tasks).then(|| Builder::new_current_thread().enable_io().enable_time().build()).transpose();
        let own = own.map_err(|error| no_event_loop("not started").with_details(error.to_string()))?;
        let config = kubeconfig.config(of_tasks)?;
        let (server, address) = (server_address(&config), connects_to(&config));
        // A client spawns tasks.
        let inside = own.as_ref().map(Runtime::enter);
        let client = kubeconfig.client(config)?;
        drop(inside);
        let kubeconfig = kubeconfig.path().to_owned();
        Ok(Self { own, client, server, address, kubeconfig, page: Mutex::default() })
    }

    /// Runs `work` on the event loop until it ends. Not for tasks.
    pub(super) fn run<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.own.as_ref().ok_or_else(|| no_event_loop("only for tasks"))?.block_on(work)
    }

    /// Sends a request until `accept` takes an answer, a retry can't help, or the deadline has passed.
    pub(super) async fn send<T: DeserializeOwned, U>(
        &self,
        request: &ApiRequest,
        limits: Limits,
        accept: impl Fn(T) -> Result<U, Failure>,
    ) -> Result<U, Error> {
        let attempt = async || {
            let response = self.transmit(request.http.clone()).await?;
            accept(parsed(&receive(response).await?)?)
        };
        retry(limits, &self.address, attempt).await.map_err(|last| self.error(request, last))
    }

    /// Returns the error for the last failure of a request.
    pub(super) fn error(&self, request: &ApiRequest, last: Failure) -> Error {
        request.error(&self.server, &self.kubeconfig, last)
    }

    async fn transmit(&self, request: Request<Vec<u8>>) -> Result<Response<Body>, kube::Error> {
        self.client.send(request.map(Body::from)).await
    }

    /// Calls `each` with every object of a collection. Returns the version of the list, at which a watch continues.
    /// `from_cache` is whether the server may answer from its cache, as for the first list of a client: that takes no request
    /// to etcd, which would have to read the pods of all nodes.
    ///
    /// # Errors
    /// The API server rejects a request or does not answer, an object is too large, or the list does not end.
    pub(crate) async fn list<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        from_cache: bool,
        page_timeout: Duration,
        mut each: impl FnMut(T),
    ) -> Result<String, Failure> {
        let (mut continued, mut singles) = (None, 0);
        for _ in 0..MAX_PAGES {
            let size = if singles > 0 { 1 } else { PAGE };
            let mut params =
                ListParams { limit: Some(size), continue_token: continued.clone(), ..ListParams::default() };
            // The cache of a server before 1.34 ignores the size of pages.
            if from_cache && size == PAGE && continued.is_none() {
                params = params.match_any();
            }
            let list = collection.list(params).map_err(kube::Error::BuildRequest)?;
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
            continued = page.metadata.continue_.filter(|token| !token.is_empty());
            if continued.is_none() {
                return Ok(page.metadata.resource_version.unwrap_or_default());
            }
            singles = singles.saturating_sub(1);
        }
        Err(Failure::new(format!("expected at most {MAX_PAGES} pages, got more")))
    }

    /// Watches a collection from `version` on, for some minutes. The server has started the watch when this returns. The
    /// events end with the watch, or with the connection: the next watch shows whether the server is reachable.
    pub(crate) async fn watch<T: DeserializeOwned + Clone>(
        &self,
        collection: &Collection,
        version: &str,
    ) -> Result<impl Stream<Item = Result<WatchEvent<T>, Failure>> + Unpin + use<T>, Failure> {
        let params = WatchParams::default().timeout(WATCH_SECONDS);
        let watch = collection.watch(params, version).map_err(kube::Error::BuildRequest)?;
        let started = timeout(START_TIMEOUT, self.client.request_events::<T>(watch)).await;
        let events = started.map_err(|_| silent("answer to the watch", START_TIMEOUT))??;
        let connected = events.take_while(|event| ready(!matches!(event, Err(kube::Error::ReadEvents(_)))));
        let checked = |event| match event {
            WatchEvent::Error(status) => Err(Failure::of_status(status.code, &status.message)),
            event => Ok(event),
        };
        Ok(Box::pin(connected.map_err(Failure::from).and_then(move |event| ready(checked(event)))))
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

fn no_event_loop(why: &str) -> Error {
    Error::new(Code::Internal, format!("event loop for API requests {why}"))
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
            return Err(Failure::too_large(MAX_ANSWER));
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

/// How long "not found" is retried: the cache of the API server, or of a proxy in front of it, may lag behind the
/// kubelet.
const NOT_FOUND_TIMEOUT: Duration = Duration::from_secs(2);
/// The pauses after failures, unless the server requests a longer one.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// The last attempt starts this long before the deadline.
const LAST_ATTEMPT: Duration = Duration::from_millis(100);
/// When a lookup checks whether the server accepts connections, and how long the check may take: a call that fails
/// because of it takes less than two seconds in all.
const CONNECTION_CHECK: Duration = Duration::from_millis(1500);
const CONNECTION_TIMEOUT: Duration = Duration::from_millis(300);

/// The limits for the attempts of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The time for all attempts.
    pub(super) timeout: Duration,
    /// When the time began, if another source was asked first.
    pub(super) started: Option<Instant>,
    /// Whether the attempts end early if the server accepts no connection: no other source has accepted one.
    pub(super) needs_connection: bool,
    /// Whether transient failures are retried.
    pub(super) retries: bool,
    /// Whether an object that is not found may be about to appear; if not, the first "not found" is the result.
    pub(super) awaits: bool,
}

impl Limits {
    /// Returns the limits for a request that starts when it is sent, to the only source.
    pub(super) const fn of(timeout: Duration) -> Self {
        Self { timeout, started: None, needs_connection: true, retries: true, awaits: true }
    }
}

/// The host and the port of a server, or of the proxy in front of it.
pub(super) type ServerAddress = (String, u16);

/// Runs `attempt` until it succeeds, a retry can't help, or the deadline has passed. Returns the last failure.
pub(super) async fn retry<T>(
    limits: Limits,
    server: &ServerAddress,
    attempt: impl AsyncFn() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let started = limits.started.unwrap_or_else(Instant::now);
    let deadline = started + limits.timeout;
    let earlier = RefCell::new(String::new());
    let all = async {
        let (mut backoff, mut not_found_until) = (BACKOFF, None);
        loop {
            let result = attempt().await;
            let Err(failure) = result else { return result };
            let now = Instant::now();
            let end = match failure.status {
                404 if limits.awaits => *not_found_until.get_or_insert(now + NOT_FOUND_TIMEOUT),
                _ if limits.retries && failure.is_transient() => deadline,
                _ => now,
            };
            let left = end.min(deadline).saturating_duration_since(now);
            if left <= LAST_ATTEMPT {
                return Err(failure);
            }
            earlier.replace(format!("; an earlier attempt failed: {failure}"));
            let pause = failure.retry_after.unwrap_or_default().max(backoff.pause(now));
            sleep(pause.min(left - LAST_ATTEMPT)).await;
        }
    };
    match select(pin!(all), pin!(given_up(started, limits, server))).await {
        Either::Left((result, _)) => result,
        Either::Right((what, _)) => {
            let waited = started.elapsed().as_secs_f32();
            Err(Failure::new(format!("no {what} within {waited:.1} s{}", earlier.borrow())))
        }
    }
}

/// Waits until the deadline, or until it is clear that the server accepts no connection. Returns what is missing.
async fn given_up(started: Instant, limits: Limits, (host, port): &ServerAddress) -> &'static str {
    let (check_at, deadline) = (started + CONNECTION_CHECK, started + limits.timeout);
    if limits.needs_connection && check_at < deadline {
        sleep_until(check_at.into()).await;
        let connection = timeout(CONNECTION_TIMEOUT, TcpStream::connect((host.as_str(), *port))).await;
        if !matches!(connection, Ok(Ok(_))) {
            return "connection";
        }
    }
    sleep_until(deadline.into()).await;
    "answer"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const TIMEOUT: Duration = Duration::from_secs(10);

    /// The times of the attempts, if each one fails at once with the same error, and the result. A server listens.
    fn attempts(timeout: Duration, error: &Failure) -> (Vec<Duration>, Failure) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        failing(Limits::of(timeout), listener.local_addr().expect("an address").port(), error)
    }

    fn failing(limits: Limits, port: u16, error: &Failure) -> (Vec<Duration>, Failure) {
        let started = Instant::now();
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let times = RefCell::new(Vec::new());
        let attempt = async || {
            times.borrow_mut().push(started.elapsed());
            Err::<(), _>(error.clone())
        };
        let server = ("127.0.0.1".to_owned(), port);
        let last = runtime.block_on(retry(limits, &server, attempt)).expect_err("it fails");
        (times.into_inner(), last)
    }

    fn transient(cause: &str, seconds: Option<u64>) -> Failure {
        Failure { retry_after: seconds.map(Duration::from_secs), ..Failure::new(cause) }
    }

    /// A port on which nothing listens. The kernel gives it to no listener of a parallel test.
    const CLOSED_PORT: u16 = 1;

    #[test]
    fn transient_errors_are_retried_until_just_before_the_deadline() {
        let (times, last) = attempts(Duration::from_secs(3), &transient("no", None));
        let least = [100, 200, 400, 800].map(Duration::from_millis);
        for (pair, least) in times.windows(2).zip(least) {
            assert!(pair[1] - pair[0] >= least, "{times:?}");
        }
        assert!(times.len() <= 7 && times.last() >= Some(&Duration::from_millis(2900)), "{times:?}");
        // The seconds of "no answer within 3.0 s"; a busy machine notices the deadline later.
        let seconds = last.cause.strip_prefix("no answer within ").and_then(|rest| rest.split(' ').next());
        let is_over = seconds.and_then(|seconds| seconds.parse().ok()).is_some_and(|seconds: f32| seconds >= 3.0);
        assert!(last.cause == "no" || is_over, "{last:?}");
    }

    #[test]
    fn not_found_is_retried_for_two_seconds_after_its_first_occurrence() {
        let not_found = Failure::not_found("no".into());
        let (times, last) = attempts(Duration::from_secs(600), &not_found);
        assert!(times.len() > 1 && times.last() >= Some(&Duration::from_millis(1900)), "{times:?}");
        assert_eq!(last, not_found);
    }

    #[test]
    fn retry_after_is_honored() {
        let (times, _) = attempts(Duration::from_secs(3), &transient("busy", Some(2)));
        assert!(times.len() <= 3 && times[1] >= Duration::from_secs(2), "{times:?}");
    }

    #[test]
    fn a_permanent_error_is_not_retried() {
        let error = Failure::of_status(403, "no");
        let (times, last) = attempts(TIMEOUT, &error);
        assert_eq!((times.len(), last), (1, error));
    }

    #[test]
    fn a_server_that_accepts_no_connection_ends_the_attempts_unless_another_source_does() {
        let refused = transient("refused", None);
        let (times, last) = failing(Limits::of(Duration::from_secs(600)), CLOSED_PORT, &refused);
        let parts = ["no connection within", "an earlier attempt failed: refused"];
        assert!(parts.iter().all(|part| last.cause.contains(part)), "{last:?}");
        assert!(times.len() > 1);
        let connected = Limits { needs_connection: false, ..Limits::of(Duration::from_secs(3)) };
        let (times, _) = failing(connected, CLOSED_PORT, &refused);
        assert!(times.last() >= Some(&Duration::from_millis(2900)), "{times:?}");
    }
}
