//! The HTTP server of the agent (`/healthz`: is the agent alive, `/readyz`: is the node ready, `/metrics` for
//! Prometheus), the watchdog, and the connection limit that `socket` shares.
//!
//! Every pod that reaches the port can occupy it, so no restart depends on it: the agent's own watchdog detects that
//! it is stuck, and ends it ([`Health::supervise`]).

use super::facts::SharedFacts;
use super::metrics::{self, Metrics};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

/// The limit of connections; further ones wait in the kernel.
const MAX_CONNECTIONS: usize = 64;
/// The limit of connections that wait in the kernel; a larger burst delays clients by a second.
const BACKLOG: i32 = 1024;
/// How long the head of a request may take. Kubelets send it at once and wait for one second by default.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a connection may last.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The limit for the head of a request, in bytes: the smallest value that hyper allows.
const MAX_HEAD_SIZE: usize = 8192;
/// The pause after a connection that could not be accepted.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// How long one iteration of the agent may take. After this time, `/healthz` fails, and the watchdog ends the agent.
pub(super) const STUCK_AFTER: Duration = Duration::from_secs(60);
/// The interval of the watchdog's checks. Two in a row must find the agent stuck: a process that was frozen is overdue
/// until its next iteration.
const WATCHDOG_INTERVAL: Duration = Duration::from_secs(5);

/// The state of the agent, shared with the server and the watchdog.
#[derive(Clone)]
pub(super) struct Health {
    state: Arc<Mutex<HealthState>>,
    /// A watch that is not synchronized is an obstacle too.
    facts: SharedFacts,
}

#[derive(Debug)]
struct HealthState {
    /// Why the node is not ready.
    obstacle: Option<String>,
    /// The deadline of the next iteration.
    alive_until: Instant,
}

impl Health {
    /// Creates the state of an agent before its first iteration.
    pub(super) fn new(facts: SharedFacts) -> Self {
        let state =
            HealthState { obstacle: Some("not installed yet".into()), alive_until: Instant::now() + STUCK_AFTER };
        Self { state: Arc::new(Mutex::new(state)), facts }
    }

    /// Sets why the node is not ready (`None` if it is). The next iteration starts after `delay` at the latest.
    pub(super) fn report(&self, obstacle: Option<String>, delay: Duration) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = HealthState { obstacle, alive_until: Instant::now() + delay + STUCK_AFTER };
    }

    /// Starts the watchdog, a task that calls `end` if the agent is stuck.
    pub(super) fn supervise(&self, end: impl FnOnce() + 'static) {
        let health = self.clone();
        spawn_local(async move {
            health.stuck(WATCHDOG_INTERVAL).await;
            end();
        });
    }

    /// Waits until two checks in a row find the agent stuck.
    async fn stuck(&self, interval: Duration) {
        let mut overdue = 0;
        while overdue < 2 {
            sleep(interval).await;
            overdue = if self.status("/healthz", Instant::now()).0.is_success() { 0 } else { overdue + 1 };
        }
    }

    /// Starts the server, a task that listens on `address`. Returns the address with the actual port.
    ///
    /// # Errors
    /// The address can't be bound.
    pub(super) fn serve(&self, address: SocketAddr, metrics: Metrics) -> io::Result<SocketAddr> {
        // IPv6 may be disabled on the node.
        let every_v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
        let listener = std::net::TcpListener::bind(address).or_else(|error| {
            let any = address.ip() == Ipv6Addr::UNSPECIFIED;
            if any { std::net::TcpListener::bind(every_v4) } else { Err(error) }
        })?;
        listener.set_nonblocking(true)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let bound = listener.local_addr()?;
        let (listener, health) = (TcpListener::from_std(listener)?, self.clone());
        spawn_local(async move {
            let answer = |(stream, _)| {
                let (health, metrics) = (health.clone(), metrics.clone());
                async move { health.answer(stream, &metrics).await }
            };
            accept_all(&Arc::new(Semaphore::new(MAX_CONNECTIONS)), async || listener.accept().await, answer).await;
        });
        Ok(bound)
    }

    /// Answers one request without reading its body.
    async fn answer(&self, stream: TcpStream, metrics: &Metrics) {
        let service = service_fn(async |request: Request<Incoming>| {
            Ok::<_, Infallible>(self.response(request.uri().path(), metrics))
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD_SIZE)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        match timeout(CONNECTION_TIMEOUT, connection).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "health request failed"),
            Err(_) => tracing::debug!("health request timed out"),
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
        // Fails only for an invalid header.
        Response::builder().status(status).header(CONTENT_TYPE, kind).body(text).unwrap_or_default()
    }

    fn status(&self, path: &str, now: Instant) -> (StatusCode, String) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let obstacle = state.obstacle.clone().or_else(|| self.facts.lasting_problems(now).into_iter().next());
        match (path, obstacle) {
            ("/healthz", _) if now <= state.alive_until => (StatusCode::OK, "alive".into()),
            ("/healthz", _) => (StatusCode::SERVICE_UNAVAILABLE, "stuck: the file system does not respond".into()),
            ("/readyz", None) => (StatusCode::OK, "installed".into()),
            ("/readyz", Some(reason)) => (StatusCode::SERVICE_UNAVAILABLE, reason),
            _ => (StatusCode::NOT_FOUND, "not found; expected /healthz, /readyz or /metrics".into()),
        }
    }
}

/// Accepts connections and handles as many at a time as `limit` allows, until the future is dropped.
pub(super) async fn accept_all<S, F: Future<Output = ()> + 'static>(
    limit: &Arc<Semaphore>,
    accept: impl AsyncFn() -> io::Result<S>,
    handle: impl Fn(S) -> F,
) {
    // Fails only if the semaphore is closed.
    while let Ok(connection) = Arc::clone(limit).acquire_owned().await {
        match accept().await {
            Ok(stream) => {
                let work = handle(stream);
                spawn_local(async move {
                    work.await;
                    drop(connection);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection");
                // Usually the limit of descriptors, of which some are closed soon.
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::run_tasks;
    use std::future::pending;
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;
    use tokio::time::timeout;

    /// Longer than any answer takes on a loaded machine. One connection after another would take minutes.
    const DEADLINE: Duration = Duration::from_secs(60);
    const PATHS: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

    fn server() -> SocketAddr {
        let (sender, bound) = channel();
        // It runs until the process ends.
        thread::spawn(move || {
            run_tasks(async {
                let health = Health::new(SharedFacts::default());
                health.report(None, Duration::from_secs(600));
                let bound = health.serve((Ipv4Addr::LOCALHOST, 0).into(), Metrics::default());
                sender.send(bound.expect("bound")).expect("the test waits");
                pending::<()>().await;
            })
        });
        bound.recv_timeout(DEADLINE).expect("it listens")
    }

    fn connect(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect_timeout(&address, DEADLINE).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("set");
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
            assert!(started.elapsed() < DEADLINE, "{path}: {:?}", started.elapsed());
        }
    }

    #[test]
    fn silent_connections_delay_answers_by_their_timeout() {
        let address = server();
        let silent: Vec<_> = (0..2 * MAX_CONNECTIONS).map(|_| connect(address)).collect();
        answers_all(address);
        drop(silent);
        // Each of them has begun a request.
        let slow: Vec<_> = (0..200).map(|_| connect(address)).collect();
        slow.iter().for_each(|mut stream| drop(stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ")));
        answers_all(address);
    }

    #[test]
    fn clients_that_do_not_read_delay_no_answer() {
        let address = server();
        let stalled: Vec<_> = (0..200).map(|_| connect(address)).collect();
        stalled.iter().for_each(|mut stream| drop(stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")));
        answers_all(address);
    }

    #[test]
    fn a_request_that_does_not_end_is_closed() {
        let started = Instant::now();
        let mut drips = connect(server());
        drips.set_read_timeout(Some(Duration::from_millis(50))).expect("set");
        let is_open = |drips: &mut TcpStream| {
            let read = drips.write_all(b"x").and_then(|()| drips.read(&mut [0; 1000]));
            matches!(&read, Err(error) if error.kind() == ErrorKind::WouldBlock)
        };
        while is_open(&mut drips) {
            assert!(started.elapsed() < 30 * HEAD_TIMEOUT, "it is still open");
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
    fn large_heads_are_refused_and_large_bodies_are_not_read() {
        let address = server();
        let head = format!("GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(2 * MAX_HEAD_SIZE));
        let refused = answer(connect(address), head.as_bytes());
        assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 431 "), "{refused:?}");
        let body = "POST /healthz HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n";
        let answered = answer(connect(address), body.as_bytes());
        assert!(answered.starts_with("HTTP/1.1 200 OK\r\n"), "{answered:?}");
        answers_all(address);
    }

    #[test]
    fn the_agent_is_alive_until_an_iteration_is_overdue_and_ready_without_an_obstacle() {
        let health = Health::new(SharedFacts::default());
        let now = Instant::now();
        let code = |path: &str, at: Instant| health.status(path, at).0.as_u16();
        assert_eq!((code("/healthz", now), code("/readyz", now)), (200, 503));
        assert_eq!(code("/healthz", now + 2 * STUCK_AFTER), 503);
        health.report(None, 2 * STUCK_AFTER);
        assert_eq!(
            (code("/healthz", now + 2 * STUCK_AFTER), code("/readyz", now), code("/else", now)),
            (200, 200, 404)
        );
    }

    #[tokio::test]
    async fn the_watchdog_ends_a_stuck_agent() {
        let interval = Duration::from_millis(20);
        let health = Health::new(SharedFacts::default());
        timeout(10 * interval, health.stuck(interval)).await.expect_err("it is alive");
        health.state.lock().expect("unpoisoned").alive_until = Instant::now();
        timeout(DEADLINE, health.stuck(interval)).await.expect("it is stuck");
    }
}
