//! An API server for tests: HTTP/1.1 on loopback, plain or TLS. It answers by a script and records the requests.

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// For example `GET /api/v1/namespaces/a HTTP/1.1`.
    pub(crate) line: String,
    /// By lower-case name.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
    /// The number of earlier requests with the same line.
    pub(crate) nth: usize,
}

/// A script's answer to a request.
pub(crate) enum Answer {
    /// A status, headers (each with its line end), a body.
    Reply(u16, String, Vec<u8>),
    /// What arrives here, one object in each line, as in a watch of Kubernetes.
    Events(Receiver<Value>),
    /// No response; the connection stays open.
    Hang,
    /// No response; the connection is closed.
    Close,
}

impl Answer {
    pub(crate) fn json(status: u16, body: &Value) -> Self {
        Self::Reply(status, String::new(), body.to_string().into_bytes())
    }

    pub(crate) fn text(status: u16, body: &str) -> Self {
        Self::Reply(status, String::new(), body.into())
    }
}

type Script = dyn Fn(&Request) -> Answer + Send + Sync;

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    connections: Arc<Mutex<usize>>,
    script: Arc<Script>,
}

impl Server {
    pub(crate) fn plain(script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::start(None, script)
    }

    pub(crate) fn tls(config: ServerConfig, script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::start(Some(Arc::new(config)), script)
    }

    fn start(tls: Option<Arc<ServerConfig>>, script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = Self { address, requests: Arc::default(), connections: Arc::default(), script: Arc::new(script) };
        server.serve(listener, tls);
        server
    }

    /// Answers the connections of another listener too, until that is shut down.
    pub(crate) fn serve(&self, listener: TcpListener, tls: Option<Arc<ServerConfig>>) {
        let (requests, connections) = (self.requests.clone(), self.connections.clone());
        let script = self.script.clone();
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                *connections.lock().expect("no panic while locked") += 1;
                let (requests, script, tls) = (requests.clone(), script.clone(), tls.clone());
                thread::spawn(move || match tls {
                    None => serve(stream, &requests, &*script),
                    Some(config) => {
                        let tls = ServerConnection::new(config).expect("a TLS configuration");
                        serve(StreamOwned::new(tls, stream), &requests, &*script);
                    }
                });
            }
        });
    }

    /// Returns all requests so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("no panic while locked").clone()
    }

    /// Returns the request lines so far, sorted.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.requests().into_iter().map(|r| r.line).collect();
        lines.sort();
        lines
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        *self.connections.lock().expect("no panic while locked")
    }

    /// `http://ADDRESS`.
    pub(crate) fn http(&self) -> String {
        format!("http://{}", self.address)
    }

    /// `https://ADDRESS`.
    pub(crate) fn https(&self) -> String {
        format!("https://{}", self.address)
    }
}

/// Waits like a slow server.
pub(crate) fn takes(time: Duration) {
    let (_answer, silence) = mpsc::channel::<()>();
    let _ = silence.recv_timeout(time);
}

/// A port on which nothing listens. The kernel gives it to no listener of a parallel test.
pub(crate) fn closed_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1))
}

fn serve(stream: impl Read + Write, requests: &Mutex<Vec<Request>>, script: &Script) {
    let mut stream = BufReader::new(stream);
    while let Some((line, headers)) = head(&mut stream) {
        let length = headers.get("content-length").and_then(|length: &String| length.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).is_err() {
            return;
        }
        let request = {
            let mut requests = requests.lock().expect("no panic while locked");
            let nth = requests.iter().filter(|r| r.line == line).count();
            requests.push(Request { line, headers, body, nth });
            requests.last().cloned().expect("just pushed")
        };
        match script(&request) {
            Answer::Close => return,
            Answer::Hang => {
                let _ = stream.read(&mut [0]);
                return;
            }
            Answer::Events(events) => return stream_events(stream.get_mut(), &events),
            Answer::Reply(status, headers, body) => {
                let length = if request.line.starts_with("CONNECT") {
                    String::new()
                } else {
                    format!("content-length: {}\r\n", body.len())
                };
                let out = stream.get_mut();
                // In one packet: the second of two would wait 40 ms for the client's acknowledgment.
                let head = format!("HTTP/1.1 {status} x\r\n{headers}{length}\r\n");
                if out.write_all(&[head.as_bytes(), &body].concat()).and_then(|()| out.flush()).is_err() {
                    return;
                }
            }
        }
    }
}

fn stream_events(stream: &mut impl Write, events: &Receiver<Value>) {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut sent = stream.write_all(head.as_bytes());
    while let (Ok(()), Ok(event)) = (&sent, events.recv()) {
        let line = format!("{event}\n");
        sent = stream.write_all(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes());
    }
}

fn head(stream: &mut impl BufRead) -> Option<(String, BTreeMap<String, String>)> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let first = lines.first()?.clone();
    let headers = lines[1..].iter().filter_map(|l| l.split_once(": ")).map(|(k, v)| (k.to_lowercase(), v.to_owned()));
    Some((first, headers.collect()))
}
