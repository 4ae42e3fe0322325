//! What a kubelet asks (`/healthz`: is the agent alive, `/readyz`: is the node ready) and what Prometheus
//! collects (`/metrics`).
//!
//! Every pod that reaches the port can occupy it, so no restart depends on it: the agent itself notices
//! that it is stuck, and ends ([`Health::supervise`]).
//!
//! The connections that a server of the agent has open: a limited number, in which silent clients can't
//! keep others out.

use super::metrics;
use super::metrics::Metrics;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::{sleep, timeout};

/// The most connections; at this limit a new one replaces the oldest.
const CONNECTIONS: usize = 64;
/// The most connections that wait in the kernel; a burst beyond it makes clients wait for a second.
const BACKLOG: i32 = 1024;
/// How long the head of a request may take. Kubelets send it at once and wait for one second by default.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a connection may take from its start to its end.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The size of a request's head, in bytes: the least that hyper allows.
const HEAD_SIZE: usize = 8192;
/// The pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often the agent must be found overdue, one check after another, to count as stuck. A process that
/// was frozen is overdue until its next turn.
const CHECKS: u32 = 3;

/// What is known, shared with who answers.
#[derive(Debug, Clone)]
pub(super) struct Health(Arc<Mutex<HealthState>>);

#[derive(Debug)]
struct HealthState {
    /// Why the node isn't ready.
    obstacle: Option<String>,
    /// Until when the next turn must have come.
    alive_until: Instant,
}

impl Health {
    /// Of an agent that has done nothing yet and has `patience` to do so.
    pub(super) fn new(patience: Duration) -> Self {
        let state = HealthState { obstacle: Some("not installed yet".into()), alive_until: Instant::now() + patience };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Says what keeps the node from being ready, and within what time there will be news.
    pub(super) fn tell(&self, obstacle: Option<String>, patience: Duration) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *state = HealthState { obstacle, alive_until: Instant::now() + patience };
    }

    /// Looks every `interval`, on a thread of its own, whether the agent is stuck; if so, calls `end`.
    ///
    /// # Errors
    /// The kernel has no thread left.
    pub(super) fn supervise(&self, interval: Duration, end: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let health = self.clone();
        let work = move || {
            let mut overdue = 0;
            while overdue < CHECKS {
                thread::park_timeout(interval);
                overdue = if health.status("/healthz", Instant::now()).0.is_success() { 0 } else { overdue + 1 };
            }
            end();
        };
        thread::Builder::new().name("watchdog".into()).spawn(work).map(drop)
    }

    /// Answers at `address` from now on, on a thread of its own. Gives the address that it has.
    ///
    /// # Errors
    /// The address can't be had; the kernel has no thread or no event queue left.
    pub(super) fn serve(&self, address: SocketAddr, metrics: Metrics) -> io::Result<SocketAddr> {
        // A node can have IPv6 switched off.
        let every_v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
        let listener = std::net::TcpListener::bind(address).or_else(|error| {
            let any = address.ip() == Ipv6Addr::UNSPECIFIED;
            if any { std::net::TcpListener::bind(every_v4) } else { Err(error) }
        })?;
        listener.set_nonblocking(true)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let bound = listener.local_addr()?;
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let health = self.clone();
        let work = move || runtime.block_on(health.answer_all(&listener, &metrics));
        thread::Builder::new().name("health".into()).spawn(work)?;
        Ok(bound)
    }

    async fn answer_all(&self, listener: &TcpListener, metrics: &Metrics) {
        let mut connections = Connections::new(CONNECTIONS);
        loop {
            connections.room().await;
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (health, metrics) = (self.clone(), metrics.clone());
                    // None counts as busy: an answer is ready as soon as its request is read.
                    connections.serve(|_| async move { health.answer(stream, &metrics).await });
                }
                // Out of descriptors, most of all: some are given back soon.
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    /// Answers one request, whose body is not read.
    async fn answer(&self, stream: TcpStream, metrics: &Metrics) {
        let service = service_fn(async |request: Request<Incoming>| {
            Ok::<_, Infallible>(self.response(request.uri().path(), metrics))
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(HEAD_SIZE)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        match timeout(TIMEOUT, connection).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a request for the agent's health failed"),
            Err(_) => tracing::debug!("a request for the agent's health took too long"),
        }
    }

    fn response(&self, path: &str, metrics: &Metrics) -> Response<String> {
        let (status, kind, text) = match path {
            "/metrics" => (StatusCode::OK, metrics::CONTENT_TYPE, metrics.text()),
            path => {
                let (status, text) = self.status(path, Instant::now());
                (status, "text/plain; charset=utf-8", text + "\n")
            }
        };
        let mut response = Response::new(text);
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }

    fn status(&self, path: &str, now: Instant) -> (StatusCode, String) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (path, &state.obstacle) {
            ("/healthz", _) if now <= state.alive_until => (StatusCode::OK, "alive".into()),
            ("/healthz", _) => (StatusCode::SERVICE_UNAVAILABLE, "stuck: the file system does not answer".into()),
            ("/readyz", None) => (StatusCode::OK, "installed".into()),
            ("/readyz", Some(why)) => (StatusCode::SERVICE_UNAVAILABLE, why.clone()),
            _ => (StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics".into()),
        }
    }
}

/// Connections, the oldest first.
#[derive(Debug)]
pub(super) struct Connections {
    limit: usize,
    tasks: JoinSet<()>,
    open: Vec<(AbortHandle, Busy)>,
}

/// Whether a connection has work in progress, which keeps it from being closed for another one.
#[derive(Debug, Clone, Default)]
pub(super) struct Busy(Arc<AtomicBool>);

impl Busy {
    /// The request has arrived.
    pub(super) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Connections {
    /// At most `limit` connections.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, tasks: JoinSet::new(), open: Vec::new() }
    }

    /// Waits until one more connection can be served: there are fewer than the limit, or one of them is
    /// idle.
    pub(super) async fn room(&mut self) {
        // A burst of connections must not close one that has not been read from yet.
        yield_now().await;
        loop {
            while self.tasks.try_join_next().is_some() {}
            self.open.retain(|(task, _)| !task.is_finished());
            if self.open.len() < self.limit || self.open.iter().any(|(_, busy)| !busy.is()) {
                return;
            }
            self.tasks.join_next().await;
        }
    }

    /// Serves a connection; at the limit, closes the oldest idle one for it.
    pub(super) fn serve<F: Future<Output = ()> + Send + 'static>(&mut self, work: impl FnOnce(Busy) -> F) {
        if self.open.len() >= self.limit
            && let Some(oldest) = self.open.iter().position(|(_, busy)| !busy.is())
        {
            self.open.remove(oldest).0.abort();
        }
        let busy = Busy::default();
        let task = self.tasks.spawn(work(busy.clone()));
        self.open.push((task, busy));
    }

    /// Closes the idle connections, and waits until the others have ended.
    pub(super) async fn finish(&mut self) {
        self.open.iter().filter(|(_, busy)| !busy.is()).for_each(|(task, _)| task.abort());
        while self.tasks.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;
    use std::sync::mpsc::channel;
    use std::time::Duration;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    /// More than any answer takes, less than a kubelet with `timeoutSeconds: 5` waits.
    const SOON: Duration = Duration::from_secs(4);
    const PATHS: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

    fn server() -> SocketAddr {
        let health = Health::new(Duration::from_secs(600));
        health.tell(None, Duration::from_secs(600));
        health.serve((Ipv4Addr::LOCALHOST, 0).into(), Metrics::default()).expect("bound")
    }

    fn connect(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect_timeout(&address, SOON).expect("it listens");
        stream.set_read_timeout(Some(SOON)).expect("set");
        stream
    }

    /// Returns the answer to `request`; empty if the server closes the connection without one.
    fn answer(mut stream: TcpStream, request: &[u8]) -> String {
        let mut answer = String::new();
        // A server that closes with unread data resets the connection.
        let _ = stream.write_all(request).and_then(|()| stream.read_to_string(&mut answer));
        answer
    }

    fn answers_all(address: SocketAddr) {
        for path in PATHS {
            let started = Instant::now();
            let answer = answer(connect(address), format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{path}: {answer:?}");
            assert!(started.elapsed() < SOON, "{path}: {:?}", started.elapsed());
        }
    }

    #[test]
    fn silent_connections_delay_no_answer() {
        let address = server();
        for count in [64, 500] {
            let silent: Vec<_> = (0..count).map(|_| connect(address)).collect();
            answers_all(address);
            drop(silent);
        }
        // Each of them has begun a request.
        let slow: Vec<_> = (0..200).map(|_| connect(address)).collect();
        slow.iter().for_each(|mut stream| drop(stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ")));
        answers_all(address);
    }

    #[test]
    fn clients_that_read_nothing_delay_no_answer() {
        let address = server();
        let deaf: Vec<_> = (0..200).map(|_| connect(address)).collect();
        deaf.iter().for_each(|mut stream| drop(stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")));
        answers_all(address);
    }

    #[test]
    fn a_request_that_never_ends_is_cut_off() {
        let started = Instant::now();
        let mut drips = connect(server());
        drips.set_read_timeout(Some(Duration::from_millis(50))).expect("set");
        let is_open = |drips: &mut TcpStream| {
            let read = drips.write_all(b"x").and_then(|()| drips.read(&mut [0; 1000]));
            matches!(&read, Err(error) if error.kind() == ErrorKind::WouldBlock)
        };
        while is_open(&mut drips) {
            assert!(started.elapsed() < 5 * HEAD_TIMEOUT, "it is still open");
        }
    }

    #[test]
    fn a_request_in_pieces_is_read_to_its_end() {
        let mut stream = connect(server());
        for piece in ["GET ", "/readyz HT", "TP/1.1\r\n"] {
            stream.write_all(piece.as_bytes()).expect("sent");
            stream.flush().expect("sent");
            thread::yield_now();
        }
        assert!(answer(stream, b"\r\n").starts_with("HTTP/1.1 200 OK\r\n"));
    }

    #[test]
    fn large_requests_are_refused_or_not_read() {
        let address = server();
        let head = format!("GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(2 * HEAD_SIZE));
        let refused = answer(connect(address), head.as_bytes());
        assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 431 "), "{refused:?}");
        let body = "POST /healthz HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n";
        let answered = answer(connect(address), body.as_bytes());
        assert!(answered.starts_with("HTTP/1.1 200 OK\r\n"), "{answered:?}");
        answers_all(address);
    }

    #[test]
    fn alive_while_turns_come_and_ready_once_nothing_is_in_the_way() {
        let health = Health::new(Duration::from_secs(60));
        let now = Instant::now();
        let code = |path: &str, at: Instant| health.status(path, at).0.as_u16();
        assert_eq!((code("/healthz", now), code("/readyz", now)), (200, 503));
        assert_eq!(code("/healthz", now + Duration::from_secs(120)), 503);
        health.tell(None, Duration::ZERO);
        assert_eq!((code("/readyz", now), code("/else", now)), (200, 404));
    }

    #[test]
    fn an_agent_that_is_stuck_is_ended() {
        let interval = Duration::from_millis(20);
        let (ends, ended) = channel();
        let health = Health::new(Duration::from_secs(600));
        health.supervise(interval, move || ends.send(()).expect("awaited")).expect("a thread");
        ended.recv_timeout(10 * interval).expect_err("it is alive");
        health.tell(None, Duration::ZERO);
        ended.recv_timeout(SOON).expect("it is stuck");
    }

    /// Tells by its end that a connection was closed.
    type Closed = oneshot::Receiver<()>;

    async fn add(connections: &mut Connections, is_busy: bool) -> Closed {
        let (open, closed) = oneshot::channel::<()>();
        connections.room().await;
        connections.serve(|busy| async move {
            let _open = open;
            if is_busy {
                busy.begin();
            }
            pending().await
        });
        yield_now().await;
        closed
    }

    #[tokio::test]
    async fn at_the_limit_the_oldest_idle_connection_is_closed() {
        let mut connections = Connections::new(3);
        let mut busy = add(&mut connections, true).await;
        let (first, mut second) = (add(&mut connections, false).await, add(&mut connections, false).await);
        let mut third = add(&mut connections, false).await;
        first.await.expect_err("closed");
        for open in [&mut busy, &mut second, &mut third] {
            assert_eq!(open.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        }
    }

    #[tokio::test]
    async fn with_all_connections_busy_the_next_one_waits() {
        let mut connections = Connections::new(2);
        let (ends, end) = oneshot::channel::<()>();
        connections.serve(|busy| async move {
            busy.begin();
            let _ = end.await;
        });
        let _busy = add(&mut connections, true).await;
        timeout(Duration::from_millis(10), connections.room()).await.expect_err("no room");
        drop(ends);
        connections.room().await;
    }

    #[tokio::test]
    async fn at_the_end_only_busy_connections_are_waited_for() {
        let mut connections = Connections::new(2);
        let idle = add(&mut connections, false).await;
        let (ends, end) = oneshot::channel::<()>();
        connections.serve(|busy| async move {
            busy.begin();
            let _ = end.await;
        });
        yield_now().await;
        timeout(Duration::from_millis(10), connections.finish()).await.expect_err("one is busy");
        idle.await.expect_err("closed");
        drop(ends);
        connections.finish().await;
    }
}
