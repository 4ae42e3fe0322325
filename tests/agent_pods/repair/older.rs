//! Connections that were opened while the rules were missing, over a real link.

use crate::repair::scene::{Scene, assert_is, event, one, scene};
use crate::support::new_netns::in_netns;
use crate::support::node_pod::NodePod as Pod;
use crate::support::wait::DEADLINE;
use nix::unistd::{Uid, setfsuid};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

const FAR: &str = "10.88.0.1";
const PROXY: u32 = 1337;

/// A pod, and the pod at the other end of its link.
struct Link {
    pod: Pod,
    far: Pod,
}

/// Runs `work` in the pod's network namespace, with sockets owned by `uid`.
fn inside<T: Send>(pod: &Pod, uid: u32, work: impl FnOnce() -> T + Send) -> T {
    in_netns(&pod.netns(), || {
        setfsuid(Uid::from_raw(uid));
        work()
    })
}

impl Link {
    fn new(scene: &Scene<'_>) -> Self {
        let (pod, far) = (scene.pod(), scene.pod());
        far.tool("ip", &["link", "del", "eth0"], "");
        pod.tool("ip", &["link", "set", "peer0", "netns", &far.pause.pid().to_string()], "");
        let address = format!("{FAR}/24");
        far.tool("ip", &["-batch", "-"], &format!("addr add {address} dev peer0\nlink set peer0 up\n"));
        Self { pod, far }
    }

    /// Connects the two pods. Returns both ends.
    fn connect(from: &Pod, uid: u32, to: &Pod, address: &str) -> (TcpStream, TcpStream) {
        let address: SocketAddr = address.parse().expect("an address");
        let listener = inside(to, 0, || TcpListener::bind(address)).expect("it listens");
        let own = inside(from, uid, || TcpStream::connect(address)).expect("connected");
        let (other, _) = listener.accept().expect("accepted");
        for stream in [&own, &other] {
            stream.set_read_timeout(Some(DEADLINE)).expect("set");
        }
        (own, other)
    }
}

/// Whether data passes in both directions.
fn lives((one, other): &mut (TcpStream, TcpStream)) -> bool {
    let pass =
        |from: &mut TcpStream, to: &mut TcpStream| from.write_all(b"x").and_then(|()| to.read_exact(&mut [0])).is_ok();
    pass(one, other) && pass(other, one)
}

fn drifted(link: &Link) {
    link.pod.tool("iptables", &["-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT"], "");
    link.pod.tool("iptables", &["-t", "nat", "-D", "PREROUTING", "-p", "tcp", "-j", "ISTIO_INBOUND"], "");
}

#[test]
fn tracked_connections_continue_and_the_event_has_their_number() {
    scene(|scene| {
        let link = Link::new(scene);
        scene.call_in("iptables", &link.pod, "ADD");
        drifted(&link);
        let far = format!("{FAR}:80");
        let mut outbound = Link::connect(&link.pod, 0, &link.far, &far);
        let mut inbound = Link::connect(&link.far, 0, &link.pod, "10.88.0.2:8080");
        let _of_the_proxy = Link::connect(&link.pod, PROXY, &link.far, &format!("{FAR}:81"));
        let _never_captured = Link::connect(&link.far, 0, &link.pod, "10.88.0.2:15021");
        let _excluded = Link::connect(&link.pod, 0, &link.far, &format!("{FAR}:15020"));
        let done = one(scene.repair().run_pass(&[Arc::new(link.pod.observed())], Instant::now()));
        assert_is(&done, "DetourRepaired", "its rules had drifted from the desired rules; 2 TCP connections");
        assert!(lives(&mut outbound) && lives(&mut inbound));
        assert_eq!(scene.wait_for_events(1), [event("DetourRepaired", "Warning")]);
        let message = scene.api.bodies_of("POST /api/v1/namespaces/shop/events")[0]["message"].to_string();
        let expected = "2 TCP connections that existed before still bypass the sidecar until they close; recreate the \
                        pod to capture them";
        assert!(message.contains(expected), "{message}");
        assert_eq!(scene.counted("detour_repairs_total{type=\"repair\",result=\"done\"}"), 1);
        let proxy = inside(&link.pod, PROXY, || TcpListener::bind("127.0.0.1:15001")).expect("it listens");
        let _new = inside(&link.pod, 0, || TcpStream::connect(&far)).expect("redirected: nothing listens there");
        proxy.accept().expect("the sidecar has it");
    });
}

/// Without a conntrack entry, the kernel takes the next packet for one of a new connection.
#[test]
fn untracked_connections_are_reset_and_not_counted() {
    scene(|scene| {
        let link = Link::new(scene);
        scene.call(&link.pod, "ADD");
        link.pod.tool("nft", &["flush", "ruleset"], "");
        let mut outbound = Link::connect(&link.pod, 0, &link.far, &format!("{FAR}:80"));
        let done = one(scene.repair().run_pass(&[Arc::new(link.pod.observed())], Instant::now()));
        assert_is(&done, "DetourRepaired", "traffic is redirected to the sidecar again: its rules had drifted");
        outbound.0.write_all(b"x").expect("sent");
        let error = outbound.0.read(&mut [0]).expect_err("it is reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn dns_queries_of_an_open_socket_are_redirected_again() {
    scene(|scene| {
        scene.install(&serde_json::json!([{"type": "istio-redirect", "redirect_dns": true, "capture_all_dns": true}]));
        let link = Link::new(scene);
        let added = one(scene.repair().run_pass(&[link.pod.unvalidated()], Instant::now()));
        assert_is(&added, "DetourRepaired", "traffic is redirected to the sidecar again");
        drifted(&link);
        let bind = |pod, address: &'static str, uid| {
            let socket = inside(pod, uid, || UdpSocket::bind(address)).expect("bound");
            socket.set_read_timeout(Some(DEADLINE)).expect("set");
            socket
        };
        let (resolver, proxy) = (bind(&link.far, "10.88.0.1:53", 0), bind(&link.pod, "127.0.0.1:15053", PROXY));
        let client = bind(&link.pod, "10.88.0.2:4053", 0);
        client.send_to(b"before", "10.88.0.1:53").expect("sent");
        let (_, from) = resolver.recv_from(&mut [0; 9]).expect("the rule is gone");
        resolver.send_to(b"answer", from).expect("sent");
        client.recv(&mut [0; 9]).expect("answered");
        let done = one(scene.repair().run_pass(&[Arc::new(link.pod.observed())], Instant::now()));
        assert_is(&done, "DetourRepaired", "traffic is redirected to the sidecar again: its rules had drifted");
        client.send_to(b"after", "10.88.0.1:53").expect("sent");
        let mut query = [0; 5];
        proxy.recv(&mut query).expect("the sidecar has it");
        assert_eq!(&query, b"after");
    });
}
