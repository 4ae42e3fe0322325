//! What a kubelet asks (`/healthz`: does it live, `/readyz`: is the node ready) and what Prometheus
//! collects (`/metrics`).

use super::metrics::{self, Metrics};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Kubelets wait for a second unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(1);
/// After a connection that could not be taken.
const AGAIN: Duration = Duration::from_millis(100);
/// As many are answered at the same time: whoever says nothing keeps no kubelet waiting.
const AT_ONCE: usize = 8;

const OK: &str = "200 OK";

/// What is known, shared with who answers.
#[derive(Debug, Clone)]
pub(super) struct Health(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Why the node isn't ready.
    obstacle: Option<String>,
    /// Until when the next turn must have come.
    alive_until: Instant,
}

impl Health {
    /// Of an agent that has done nothing yet and has `patience` to do so.
    pub(super) fn new(patience: Duration) -> Self {
        let state = State { obstacle: Some("not installed yet".into()), alive_until: Instant::now() + patience };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Says what keeps the node from being ready, and within what time there will be news.
    pub(super) fn tell(&self, obstacle: Option<String>, patience: Duration) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State { obstacle, alive_until: Instant::now() + patience };
    }

    /// Answers at `address` from now on, a few at the same time. Gives the address that it has.
    pub(super) fn serve(&self, address: SocketAddr, metrics: Metrics) -> io::Result<SocketAddr> {
        // A node can have IPv6 switched off.
        let every_v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
        let listener = TcpListener::bind(address).or_else(|error| {
            if address.ip() == Ipv6Addr::UNSPECIFIED { TcpListener::bind(every_v4) } else { Err(error) }
        })?;
        let bound = listener.local_addr()?;
        for _ in 0..AT_ONCE {
            let (listener, health, metrics) = (listener.try_clone()?, self.clone(), metrics.clone());
            thread::Builder::new().name("health".into()).spawn(move || {
                for connection in listener.incoming() {
                    match connection {
                        Ok(connection) => {
                            if let Err(error) = health.answer(connection, &metrics) {
                                tracing::debug!(%error, "a probe went away");
                            }
                        }
                        // Out of descriptors, most of all: some are given back soon.
                        Err(_) => thread::park_timeout(AGAIN),
                    }
                }
            })?;
        }
        Ok(bound)
    }

    fn answer(&self, mut connection: TcpStream, metrics: &Metrics) -> io::Result<()> {
        connection.set_write_timeout(Some(PATIENCE))?;
        let request = head_of(&mut Timed { connection: &connection, until: Instant::now() + PATIENCE })?;
        let line = String::from_utf8_lossy(&request);
        let (status, kind, text) = match line.split_whitespace().nth(1).unwrap_or_default() {
            "/metrics" => (OK, metrics::CONTENT_TYPE, metrics.text()),
            path => {
                let (status, text) = self.status(path, Instant::now());
                (status, "text/plain; charset=utf-8", text + "\n")
            }
        };
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n");
        write!(connection, "{head}Content-Length: {}\r\n\r\n{text}", text.len())
    }

    fn status(&self, path: &str, now: Instant) -> (&'static str, String) {
        const UNAVAILABLE: &str = "503 Service Unavailable";
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (path, &state.obstacle) {
            ("/healthz", _) if now <= state.alive_until => (OK, "alive".into()),
            ("/healthz", _) => (UNAVAILABLE, "stuck: the file system does not answer".into()),
            ("/readyz", None) => (OK, "installed".into()),
            ("/readyz", Some(why)) => (UNAVAILABLE, why.clone()),
            _ => ("404 Not Found", "there are /healthz, /readyz and /metrics".into()),
        }
    }
}

/// A connection that is read from until a moment.
struct Timed<'a> {
    connection: &'a TcpStream,
    until: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.connection.set_read_timeout(Some(left))?;
        self.connection.read(piece)
    }
}

/// A request up to its empty line, however many pieces it comes in: an answer to part of it would
/// be lost with the connection.
fn head_of(connection: &mut impl Read) -> io::Result<Vec<u8>> {
    const LONGEST: usize = 4096;
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < LONGEST {
        match connection.read(&mut piece)? {
            0 => break,
            read => head.extend_from_slice(&piece[..read]),
        }
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_in_pieces_is_read_to_its_end() {
        let mut pieces = "GET ".as_bytes().chain("/readyz HTTP/1.1\r\n".as_bytes()).chain("\r\nrest".as_bytes());
        assert_eq!(head_of(&mut pieces).expect("readable"), b"GET /readyz HTTP/1.1\r\n\r\nrest");
    }

    #[test]
    fn whoever_says_nothing_or_little_keeps_nobody_waiting() {
        let health = Health::new(Duration::from_secs(60));
        let address = health.serve((Ipv4Addr::LOCALHOST, 0).into(), Metrics::default()).expect("bound");
        let started = Instant::now();
        let silent: Vec<_> = (1..AT_ONCE).map(|_| TcpStream::connect(address).expect("it listens")).collect();
        let mut probe = TcpStream::connect(address).expect("it listens");
        probe.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").expect("sent");
        let mut answer = String::new();
        probe.read_to_string(&mut answer).expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && started.elapsed() < PATIENCE, "{answer}");
        drop(silent);

        let mut drips = TcpStream::connect(address).expect("it listens");
        drips.set_read_timeout(Some(PATIENCE / 10)).expect("set");
        let ended = |drips: &mut TcpStream| {
            let read = drips.write_all(b"x").and_then(|()| drips.read(&mut [0]));
            !matches!(&read, Err(error) if error.kind() == ErrorKind::WouldBlock)
        };
        while !ended(&mut drips) {
            assert!(started.elapsed() < 5 * PATIENCE, "it is still read from");
        }
    }

    #[test]
    fn alive_while_turns_come_and_ready_once_nothing_is_in_the_way() {
        let health = Health::new(Duration::from_secs(60));
        let now = Instant::now();
        let code = |path: &str, at: Instant| health.status(path, at).0[..3].to_owned();
        assert_eq!((code("/healthz", now), code("/readyz", now)), ("200".into(), "503".into()));
        assert_eq!(code("/healthz", now + Duration::from_secs(120)), "503");
        health.tell(None, Duration::ZERO);
        assert_eq!((code("/readyz", now), code("/else", now)), ("200".into(), "404".into()));
    }
}
