//! Labels that enroll running pods in the ambient mesh, beside the rules of Istio's own code.

use crate::live_policy::api::{Api, NAMESPACES};
use crate::live_policy::node::{Process, Where, id};
use crate::live_policy::scene::{EXCLUDE_UIDS, Pod, Scene, events, publish, sample, scene, wait_for_event};
use crate::support::new_netns::{in_netns, tool_in};
use crate::support::wait::{DEADLINE, until, until_within};
use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const MODE: &str = "istio.io/dataplane-mode";

/// The format of istio-cni's rules.
#[derive(Debug, Clone, Copy)]
enum Format {
    Iptables,
    Native,
}

impl Format {
    /// Redirects the pod to ztunnel, as istio-cni does.
    fn redirect(self, pod: &Pod) {
        match self {
            Self::Iptables => {
                for (program, rules) in [
                    ("iptables-restore", include_str!("../../golden/ambient.v4.rules")),
                    ("ip6tables-restore", include_str!("../../golden/ambient.v6.rules")),
                ] {
                    tool_in(&pod.netns(), program, &["--noflush"], rules);
                }
            }
            Self::Native => drop(tool_in(&pod.netns(), "nft", &["-f", "-"], include_str!("../../golden/ambient.nft"))),
        }
    }

    /// Removes the redirection.
    fn remove(self, pod: &Pod) {
        match self {
            Self::Iptables => {
                for (program, table) in ["iptables", "ip6tables"]
                    .into_iter()
                    .flat_map(|program| ["raw", "mangle", "nat"].map(|table| (program, table)))
                {
                    tool_in(&pod.netns(), program, &["-t", table, "-F"], "");
                    tool_in(&pod.netns(), program, &["-t", table, "-X"], "");
                }
            }
            Self::Native => {
                let tables = ["nat", "mangle", "raw"].map(|table| format!("delete table inet istio-ambient-{table}\n"));
                tool_in(&pod.netns(), "nft", &["-f", "-"], &tables.concat());
            }
        }
    }
}

fn label_namespace(api: &Api, mode: Option<&str>) {
    let labels = mode.map(|mode| json!({MODE: mode})).unwrap_or_default();
    api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "labels": labels}}));
}

/// Creates a pod without a sidecar, with exclusions, and calls ADD for it. It has no rules yet.
fn added(scene: &Scene<'_>, api: &Api, name: &str) -> Pod {
    let pod = Pod::new(scene, name).without_sidecar();
    pod.unset("sidecar.istio.io/status");
    pod.annotate(api, EXCLUDE_UIDS, "0,7000");
    pod.call(scene, "ADD").expect("added");
    assert!(!pod.rules().contains("detour-exclusions"), "{}", pod.rules());
    pod
}

fn enroll_and_leave(format: Format, redirected_first: bool) {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = added(scene, api, "web-0");
        let order = [format!("{format:?}"), format!("istio-cni first: {redirected_first}")].join(", ");
        if redirected_first {
            format.redirect(&pod);
        }
        let labeled = Instant::now();
        label_namespace(api, Some("ambient"));
        pod.until(|pod| pod.excludes_uid(7000));
        println!("{order}: {:?} from the label to the rules", labeled.elapsed());
        if !redirected_first {
            format.redirect(&pod);
        }
        wait_for_event(api, &pod, "DetourPolicyChanged", "excluded: UID 0, UID 7000");
        pod.call(scene, "CHECK").expect("no drift");
        // An excluded connection continues while istio-cni writes its rules again and while the pod leaves.
        let traffic = Traffic::start(scene, &pod, &[8443]);
        format.remove(&pod);
        format.redirect(&pod);
        pod.call(scene, "CHECK").expect("no drift");
        if redirected_first {
            format.remove(&pod);
        }
        label_namespace(api, None);
        pod.until(|pod| !pod.rules().contains("detour-exclusions"));
        if !redirected_first {
            format.remove(&pod);
        }
        wait_for_event(api, &pod, "DetourPolicyChanged", "no longer excluded: UID 0, UID 7000");
        assert!(traffic.end().iter().all(|exchanges| *exchanges > 1));
        // The pod's own label overrides that of the namespace.
        pod.label(MODE, "ambient");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_uid(7000));
        pod.label(MODE, "none");
        label_namespace(api, Some("ambient"));
        publish(api, &pod);
        pod.until(|pod| !pod.excludes_uid(7000));
        assert_eq!(events(api, &pod, "DetourPolicyRejected"), [""; 0]);
        pod.call(scene, "DEL").expect("deleted");
    });
}

/// ztunnel's listeners in the pod, until the result is dropped.
fn ztunnel(pod: &Pod) -> Vec<TcpListener> {
    in_netns(&pod.netns(), || {
        [15001, 15006, 15008].map(|port| TcpListener::bind(("0.0.0.0", port)).expect("a port")).into()
    })
}

#[test]
fn a_pod_outside_of_the_ambient_mesh_is_reported_with_what_it_lacks() {
    const OUTSIDE: &str = "DetourOutsideMesh";
    scene(|scene, api| {
        let (_agent, metrics) = scene.agent_with_metrics(&[]);
        let outside = || sample(&metrics, "detour_pods{policy=\"outside\"}");
        let pods = ["web-0", "web-1", "web-2"].map(|name| added(scene, api, name));
        let [enrolled, without_listeners, without_rules] = &pods;
        Format::Native.redirect(enrolled);
        Format::Native.redirect(without_listeners);
        let _listeners = [enrolled, without_rules].map(ztunnel);
        label_namespace(api, Some("ambient"));
        // After a minute, at the next check.
        let reported = |pod: &Pod, lacking: &str| {
            until_within(3 * DEADLINE, lacking, || events(api, pod, OUTSIDE).iter().any(|text| text.contains(lacking)));
        };
        reported(without_listeners, "lacks ztunnel's listener on port 15001, ");
        reported(without_rules, "lacks istio-cni's redirection;");
        until("the metric counts them", || outside() == Some(2));
        assert_eq!(events(api, enrolled, OUTSIDE), [""; 0]);
        // Enrolled again, it is no finding any more.
        Format::Native.redirect(without_rules);
        without_rules.label("changed", "true");
        publish(api, without_rules);
        until("the metric counts one", || outside() == Some(1));
    });
}

#[test]
fn a_running_pod_follows_the_labels_if_istio_cni_redirects_it_first() {
    enroll_and_leave(Format::Iptables, true);
    enroll_and_leave(Format::Native, true);
}

#[test]
fn a_running_pod_follows_the_labels_if_istio_cni_redirects_it_later() {
    enroll_and_leave(Format::Iptables, false);
    enroll_and_leave(Format::Native, false);
}

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
