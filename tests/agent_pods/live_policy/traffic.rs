//! Long connections from a pod.

use crate::live_policy::node::{Process, Where, id};
use crate::live_policy::pod::Pod;
use crate::live_policy::scene::Scene;
use crate::support::new_netns::{in_netns, tool_in};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The address of the server outside of the pod.
const SERVER: &str = "10.88.0.1";
const PROXY_PORT: u16 = 15001;
/// How long one exchange may take: the retransmission of a lost packet would take less.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A process outside of the pod with a server, and the connections to it.
pub(crate) struct Traffic {
    _outside: Process,
    ends: Arc<AtomicBool>,
    connections: Vec<JoinHandle<Result<u64, String>>>,
}

impl Traffic {
    /// Starts the proxy, a server outside of the pod, and one connection to each of these ports of the server.
    pub(crate) fn start(scene: &Scene<'_>, pod: &Pod, ports: &[u16]) -> Self {
        let outside = scene.node.process("outside", &format!("outside/{}", id("o")), Where::New);
        tool_in(&pod.netns(), "ip", &["link", "set", "peer0", "netns", &outside.pid().to_string()], "");
        let links = format!("link set lo up\nlink set peer0 up\naddr add {SERVER}/24 dev peer0\n");
        tool_in(&outside.netns(), "ip", &["-batch", "-"], &links);
        serve(&pod.netns(), &format!("0.0.0.0:{PROXY_PORT}"));
        let ends = Arc::new(AtomicBool::new(false));
        let connect = |port: &u16| {
            serve(&outside.netns(), &format!("{SERVER}:{port}"));
            let address = format!("{SERVER}:{port}");
            let stream = in_netns(&pod.netns(), move || TcpStream::connect(address)).expect("connected");
            let ends = Arc::clone(&ends);
            thread::spawn(move || exchange(stream, &ends))
        };
        let connections = ports.iter().map(connect).collect();
        Self { _outside: outside, ends, connections }
    }

    /// Ends the connections. Returns the number of exchanges of each.
    pub(crate) fn end(self) -> Vec<u64> {
        self.ends.store(true, Ordering::Relaxed);
        let results = self.connections.into_iter().map(|connection| connection.join().expect("no panic"));
        results.collect::<Result<_, _>>().expect("no connection fails")
    }
}

/// Sends numbers, and reads each from the echo, until `ends`.
fn exchange(mut stream: TcpStream, ends: &AtomicBool) -> Result<u64, String> {
    stream.set_read_timeout(Some(TIMEOUT)).expect("a socket");
    let mut number = 0_u64;
    while !ends.load(Ordering::Relaxed) {
        number += 1;
        let mut echo = [0; 8];
        let result = stream.write_all(&number.to_be_bytes()).and_then(|()| stream.read_exact(&mut echo));
        match result {
            Ok(()) if u64::from_be_bytes(echo) == number => {}
            Ok(()) => return Err(format!("expected {number}, got {}", u64::from_be_bytes(echo))),
            Err(error) => return Err(format!("exchange {number}: {error}")),
        }
        thread::park_timeout(Duration::from_millis(5));
    }
    Ok(number)
}

/// Echoes at an address until the network namespace's processes end.
fn serve(netns: &Path, address: &str) {
    let address = address.to_owned();
    let listener = in_netns(netns, move || TcpListener::bind(address));
    let listener = match listener {
        // Another connection has the same server.
        Err(error) if error.kind() == ErrorKind::AddrInUse => return,
        listener => listener.expect("bound"),
    };
    let echo = |mut stream: TcpStream| {
        let mut buffer = [0; 8];
        while stream.read_exact(&mut buffer).and_then(|()| stream.write_all(&buffer)).is_ok() {}
    };
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || echo(stream));
        }
    });
}
