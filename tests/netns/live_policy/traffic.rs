//! Connections that continue while the policy changes. Each runs on a thread of its own, with the owner of a process of
//! the pod.

use crate::world::{Arrival, Process};
use nix::sched::{CloneFlags, setns};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);
/// The time between two messages, so that the machine is not the limit.
const INTERVAL: Duration = Duration::from_millis(4);
const TOKEN: &[u8] = b"hello\n";

/// Traffic that repeats until it is stopped.
pub(super) struct Traffic {
    thread: JoinHandle<Vec<Arrival>>,
    stop: Arc<AtomicBool>,
    messages: Arc<AtomicUsize>,
}

impl Traffic {
    /// Opens a TCP connection and sends messages over it. Each must be answered.
    pub(super) fn connection(netns: PathBuf, process: Process, to: SocketAddr) -> Self {
        Self::start(netns, process, move || {
            let stream = TcpStream::connect_timeout(&to, TIMEOUT).expect("it is accepted");
            stream.set_read_timeout(Some(TIMEOUT)).expect("a socket");
            let mut answers = BufReader::new(stream);
            move || exchange(&mut answers, to)
        })
    }

    /// Opens TCP connections, one after another.
    pub(super) fn connections(netns: PathBuf, process: Process, to: SocketAddr) -> Self {
        Self::start(netns, process, move || {
            move || {
                let stream =
                    TcpStream::connect_timeout(&to, TIMEOUT).unwrap_or_else(|e| panic!("connect to {to}: {e}"));
                stream.set_read_timeout(Some(TIMEOUT)).expect("a socket");
                exchange(&mut BufReader::new(stream), to)
            }
        })
    }

    /// Sends queries over UDP from one port. A query without an answer is repeated once, as resolvers do.
    pub(super) fn queries(netns: PathBuf, process: Process, to: SocketAddr) -> Self {
        Self::start(netns, process, move || {
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).expect("a port");
            socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
            move || {
                let ask = || {
                    socket.send_to(TOKEN, to).expect("it is sent");
                    let mut answer = [0; 1024];
                    socket.recv(&mut answer).map(|length| answer[..length].to_vec())
                };
                let answer = ask().or_else(|_| ask()).unwrap_or_else(|error| panic!("query to {to}: {error}"));
                Arrival::parse(&answer).expect("an answer")
            }
        })
    }

    fn start<F: FnMut() -> Arrival>(
        netns: PathBuf,
        process: Process,
        open: impl FnOnce() -> F + Send + 'static,
    ) -> Self {
        let (stop, messages) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, counter) = (Arc::clone(&stop), Arc::clone(&messages));
        let run = move || {
            setns(File::open(netns).expect("it exists"), CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            // They apply to this thread only (setfsuid(2)), and the kernel compares them with owners in rules.
            setfsgid(Gid::from_raw(process.gid));
            setfsuid(Uid::from_raw(process.uid));
            let mut send = open();
            let mut arrivals = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let arrival = send();
                if !arrivals.contains(&arrival) {
                    arrivals.push(arrival);
                }
                counter.fetch_add(1, Ordering::Relaxed);
                std::thread::park_timeout(INTERVAL);
            }
            arrivals
        };
        let traffic = Self { thread: std::thread::spawn(run), stop, messages };
        traffic.wait_for(1);
        traffic
    }

    /// Waits for `count` more messages.
    #[track_caller]
    pub(super) fn wait_for(&self, count: usize) {
        let wanted = self.messages.load(Ordering::Relaxed) + count;
        let deadline = Instant::now() + 3 * TIMEOUT;
        while self.messages.load(Ordering::Relaxed) < wanted && !self.thread.is_finished() {
            assert!(Instant::now() < deadline, "no messages");
            std::thread::park_timeout(INTERVAL);
        }
    }

    /// Stops, and returns the places where messages arrived and their number.
    #[track_caller]
    pub(super) fn stop(self) -> (Vec<Arrival>, usize) {
        self.stop.store(true, Ordering::Relaxed);
        let arrivals = self.thread.join().expect("each message is answered");
        (arrivals, self.messages.load(Ordering::Relaxed))
    }
}

fn exchange(answers: &mut BufReader<TcpStream>, to: SocketAddr) -> Arrival {
    answers.get_mut().write_all(TOKEN).unwrap_or_else(|error| panic!("send to {to}: {error}"));
    let mut answer = String::new();
    answers.read_line(&mut answer).unwrap_or_else(|error| panic!("answer from {to}: {error}"));
    Arrival::parse(answer.as_bytes()).unwrap_or_else(|error| panic!("connection to {to}: {error}: {answer:?}"))
}
