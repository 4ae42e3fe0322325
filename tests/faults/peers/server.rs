//! An API server whose connections are scripts: it can stop, reset or send anything at each byte.

use super::expected::TOKEN;
use crate::subject::FACTS;
use nix::libc;
use nix::sys::socket::{Backlog, listen, setsockopt, sockopt};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// A script for each connection.
pub(crate) type Script = Arc<dyn Fn(&mut Connection) + Send + Sync>;

/// A server, until the process ends.
pub(crate) struct Server {
    address: SocketAddr,
    scheme: &'static str,
    requests: Arc<Mutex<Vec<String>>>,
    connections: Arc<AtomicUsize>,
    /// Connections that fill its queue.
    _queue: Vec<TcpStream>,
}

/// An accepted connection.
pub(crate) struct Connection {
    stream: BufReader<Box<dyn ReadWrite>>,
    tcp: TcpStream,
    /// The lines of all requests to the server before the current one.
    earlier: Arc<Mutex<Vec<String>>>,
}

trait ReadWrite: Read + Write + Send {}

impl<T: Read + Write + Send> ReadWrite for T {}

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// For example `GET /api/v1/namespaces/a HTTP/1.1`.
    pub(crate) line: String,
    /// The value of the header `Authorization`.
    pub(crate) authorization: String,
    /// The number of earlier requests with the same line.
    pub(crate) nth: usize,
}

impl Server {
    pub(crate) fn start(script: Script) -> Self {
        Self::with(None, "http", script)
    }

    /// Starts a server whose URL has this scheme, and whose connections are not encrypted.
    pub(crate) fn start_as(scheme: &'static str, script: Script) -> Self {
        Self::with(None, scheme, script)
    }

    pub(crate) fn tls(config: ServerConfig, script: Script) -> Self {
        Self::with(Some(Arc::new(config)), "https", script)
    }

    fn with(tls: Option<Arc<ServerConfig>>, scheme: &'static str, script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = Self::of(listener.local_addr().expect("an address"), scheme);
        let (requests, connections) = (Arc::clone(&server.requests), Arc::clone(&server.connections));
        thread::spawn(move || {
            for tcp in listener.incoming().flatten() {
                connections.fetch_add(1, Ordering::SeqCst);
                let (earlier, script, tls) = (Arc::clone(&requests), Arc::clone(&script), tls.clone());
                thread::spawn(move || {
                    let stream = tcp.try_clone().expect("a descriptor");
                    let stream: Box<dyn ReadWrite> = match tls {
                        None => Box::new(stream),
                        Some(config) => {
                            let session = ServerConnection::new(config).expect("a TLS configuration");
                            Box::new(StreamOwned::new(session, stream))
                        }
                    };
                    script(&mut Connection { stream: BufReader::new(stream), tcp, earlier });
                });
            }
        });
        server
    }

    fn of(address: SocketAddr, scheme: &'static str) -> Self {
        Self { address, scheme, requests: Arc::default(), connections: Arc::default(), _queue: Vec::new() }
    }

    /// A server that has the pod.
    pub(crate) fn healthy() -> Self {
        Self::start(Arc::new(|connection: &mut Connection| connection.serve(|request| Some(healthy(&request.line)))))
    }

    /// A port on which nothing listens.
    pub(crate) fn closed() -> Self {
        let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        Self::of(address.expect("a port"), "http")
    }

    /// A server whose queue of connections is full: the kernel does not answer another one.
    pub(crate) fn full() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listen(&listener, Backlog::new(0).expect("valid")).expect("shortened");
        let mut server = Self::of(listener.local_addr().expect("an address"), "http");
        let timeout = std::time::Duration::from_millis(300);
        while let Ok(stream) = TcpStream::connect_timeout(&server.address, timeout) {
            server._queue.push(stream);
        }
        // Never accepts, and stays open.
        std::mem::forget(listener);
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// Returns the lines of all requests so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().expect("no panic while locked").clone()
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

impl Connection {
    /// Reads the next request; `None` at the end of the connection.
    pub(crate) fn request(&mut self) -> Option<Request> {
        let (mut line, mut authorization, mut length) = (String::new(), String::new(), 0);
        loop {
            let mut header = String::new();
            if self.stream.read_line(&mut header).ok()? == 0 {
                return None;
            }
            let header = header.trim_end();
            match header.split_once(": ") {
                _ if header.is_empty() => break,
                _ if line.is_empty() => line = header.to_owned(),
                Some((name, value)) if name.eq_ignore_ascii_case("authorization") => authorization = value.to_owned(),
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => length = value.parse().ok()?,
                _ => {}
            }
        }
        self.stream.read_exact(&mut vec![0; length]).ok()?;
        let mut earlier = self.earlier.lock().expect("no panic while locked");
        let nth = earlier.iter().filter(|other| **other == line).count();
        earlier.push(line.clone());
        Some(Request { line, authorization, nth })
    }

    /// Reads what the client has sent so far, at least one byte.
    pub(crate) fn read_some(&mut self) {
        let _ = self.stream.read(&mut [0; 4096]);
    }

    /// Sends bytes; returns whether the client still receives.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> bool {
        let stream = self.stream.get_mut();
        stream.write_all(bytes).and_then(|()| stream.flush()).is_ok()
    }

    /// Waits until the client closes the connection.
    pub(crate) fn hang(&mut self) {
        while self.stream.read(&mut [0; 4096]).is_ok_and(|length| length > 0) {}
    }

    /// Returns whether the client has closed the connection.
    pub(crate) fn is_closed(&self) -> bool {
        self.tcp.set_nonblocking(true).expect("a socket");
        let peeked = self.tcp.peek(&mut [0]);
        self.tcp.set_nonblocking(false).expect("a socket");
        peeked.map_or_else(|error| error.kind() != std::io::ErrorKind::WouldBlock, |length| length == 0)
    }

    /// Closes the connection with a reset.
    pub(crate) fn reset(&mut self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        setsockopt(&self.tcp, sockopt::Linger, &linger).expect("a TCP socket");
    }

    /// Sends an answer to each request; closes the connection at the first without one.
    pub(crate) fn serve(&mut self, answer: impl Fn(&Request) -> Option<Vec<u8>>) {
        while let Some(request) = self.request() {
            if !answer(&request).is_some_and(|answer| self.send(&answer)) {
                return;
            }
        }
    }
}

/// Returns a response with more headers, each with its line end.
pub(crate) fn response(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status} x\r\n{headers}content-length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// Returns the pod of all calls, with a UID.
pub(crate) fn pod() -> Value {
    let mut pod: Value = serde_saphyr::from_str(&FACTS.manifest()).expect("YAML");
    pod["metadata"]["uid"] = "uid-1".into();
    pod
}

pub(crate) fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
}

/// Returns the response of a healthy server.
pub(crate) fn healthy(line: &str) -> Vec<u8> {
    let (code, body) = match line.split(' ').collect::<Vec<_>>()[..] {
        ["GET", "/api/v1/namespaces/shop/pods/web-0", ..] => (200, pod()),
        ["GET", "/api/v1/namespaces/shop", ..] => (200, namespace()),
        ["PATCH" | "POST", ..] => (200, json!({})),
        _ => return status(404, "", "no such thing"),
    };
    response(code, "content-type: application/json\r\n", body.to_string().as_bytes())
}

/// Writes a kubeconfig with the token of all requests; returns its path.
pub(crate) fn kubeconfig(directory: &Path, cluster: &Value) -> PathBuf {
    let path = directory.join("kubeconfig");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": cluster}], "users": [{"name": "u", "user": {"token": TOKEN}}],
    });
    fs::write(&path, text.to_string()).expect("writable");
    path
}

/// Returns a response with a `Status`, as the API server refuses a request.
pub(crate) fn status(code: u16, headers: &str, message: &str) -> Vec<u8> {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code,
    });
    response(code, headers, body.to_string().as_bytes())
}
