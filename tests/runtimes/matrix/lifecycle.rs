//! What happens to a node from the installation of the plugin to its removal, with pods, faults and an upgrade.

use super::agent::{Agent, image};
use super::cluster::{Cluster, SYSTEM};
use super::scene::{NODE, PROXY_USER, define_second_network, files, install_multus, plugin_processes, until_used};
use super::{Cell, Mode, Report};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, DIRECT, Pod, Sandbox, USER, printed};
use crate::{repetitions, result};
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// The UID that an annotation excludes.
const EXCLUDED_USER: u32 = 2000;
/// The parts of an exit status of [`Sandbox::once_as`] that IPv6 contributes.
const CAPTURED_TCP6: u64 = 27;
const CAPTURED_DNS6: u64 = 81;
const CAPTURED_TCP4: u64 = 1;

/// A pod that runs.
struct Running<'a> {
    pod: Pod,
    sandbox: Sandbox<'a>,
    addresses: Vec<String>,
}

/// A node of a cell, with its cluster.
struct Scene<'a> {
    cell: Cell,
    node: &'a Node,
    cluster: &'a Cluster,
}

pub(super) fn run(cell: Cell, report: &mut Report) {
    let node = cell.node();
    let cluster = Cluster::start();
    let mut entrance = Some(cluster.open(&node));
    if cell.mode == Mode::Attachment {
        install_multus(&cluster, &node);
    }
    define_second_network(&cluster);
    let before = files(&node);
    let scene = Scene { cell, node: &node, cluster: &cluster };

    let chart = cluster.install_chart(&node.path("chart.yaml"), &cell.values());
    let (first_image, second_image) = (image(&node, 1), image(&node, 2));
    let mut agent = Agent::start(&cluster, &node, &chart, "detour-agent-a", &first_image);
    report.check("the agent installs the plugin", |_| {
        agent.until_ready();
        if cell.mode != Mode::Attachment {
            until_used(&node, "detour");
        }
    });
    let web = scene.pods_with_a_sidecar(&agent, report);
    scene.other_pods(report);

    report.check("the runtime restarts: pods keep their rules, and new ones get theirs", |_| {
        node.restart_runtime();
        scene.is_captured(&web);
        scene.starts_and_ends("after-restart");
    });
    report.check("the API server is down and the agent is killed: pods end", |_| {
        let (with_agent, without_agent) = (scene.start("api-down"), scene.start("both-down"));
        drop(entrance.take());
        scene.remove(with_agent);
        agent.kill();
        scene.remove(without_agent);
    });
    let entrance = entrance.unwrap_or_else(|| cluster.open(&node));
    report.check("without the agent, pods start and end", |_| {
        scene.is_captured(&web);
        scene.starts_and_ends("without-agent");
    });
    report.check("the agent returns", |_| {
        if !agent.is_running() {
            agent.run(&first_image);
        }
        agent.until_ready();
    });
    let mut agent = Some(agent);
    report.check("an upgrade replaces the binary, and pods keep their rules", |_| {
        let new = Agent::start(&cluster, &node, &chart, "detour-agent-b", &second_image);
        new.until_ready();
        let mut old = agent.replace(new).expect("it runs");
        let logged = old.stop();
        assert!(logged.iter().any(|line| line.contains("stays on the node")), "{logged:#?}");
        old.remove();
        assert!(fs::read(node.path("bin/detour")).expect("installed") == fs::read(&second_image).expect("written"));
        scene.is_captured(&web);
        scene.starts_and_ends("after-upgrade");
    });
    report.check("the last pod leaves nothing behind", |_| scene.remove(web));
    report.check("uninstallation restores the node", |_| {
        let mut agent = agent.take().expect("it runs");
        let daemon_set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": chart.0["metadata"]});
        cluster.admin.delete(&daemon_set).expect("deleted");
        let logged = agent.stop();
        let own = agent.sandbox.id.clone();
        agent.remove();
        if logged.iter().any(|line| line.contains("/opt/cni/bin/detour is not reverted")) {
            // The runtime needed the program to delete the agent's own pod. The log shows this command.
            node.ok(&["/opt/cni/bin/detour", "uninstall"]);
        }
        cluster.kubectl(&[
            "delete",
            "--ignore-not-found",
            "--filename",
            &node.path("chart.yaml").display().to_string(),
        ]);
        let mut after = files(&node);
        if cell.runtime == Runtime::Containerd {
            // containerd deletes the agent's own pod with the restored list, so DEL does not reach the plugin.
            after.retain(|file| !(file.contains("/detour/") && file.contains(&own)));
        }
        assert!(after == before, "before: {before:#?}\nafter: {after:#?}\nlog of the agent: {logged:#?}");
        assert_eq!(plugin_processes(&node), Vec::<String>::new());
    });
    drop(entrance);
    if cell.mode != Mode::Attachment {
        report.check("without the plugin, pods start without rules", |_| {
            let pod = scene.start_pod(Pod::plain("shop", "after-uninstallation"));
            assert_eq!(pod.sandbox.once_as("web", USER), Ok(DIRECT));
            scene.remove(pod);
        });
    }
}

impl<'a> Scene<'a> {
    /// Starts a pod as the kubelet does.
    #[track_caller]
    fn start_pod(&self, mut pod: Pod) -> Running<'a> {
        self.cluster.create(&mut pod);
        let sandbox = self.start_sandbox(&pod);
        let addresses = sandbox.addresses();
        assert_eq!(addresses.len(), 2, "one of each family: {addresses:?}");
        self.cluster.has_started(&pod, &addresses);
        Running { pod, sandbox, addresses }
    }

    /// Starts the pod's sandbox. containerd runs the loopback plugin and the plugins of the pod's network at the same
    /// time, and the loopback plugin fails if lo already has the proxy's address. The kubelet retries too.
    #[track_caller]
    fn start_sandbox(&self, pod: &Pod) -> Sandbox<'a> {
        const LOST_RACE: &str = "loopback interface found with non-loopback address";
        for attempt in 0.. {
            match pod.start_again(self.node, attempt) {
                Ok(sandbox) => return sandbox,
                Err(error) if attempt < 3 && error.contains(LOST_RACE) => {
                    result(self.cell.runtime, "pod started again: plugin before loopback plugin", &pod.name);
                }
                Err(error) => panic!("pod {}: {error}", pod.name),
            }
        }
        unreachable!("the last attempt returns or panics")
    }

    /// Starts a pod with a sidecar.
    #[track_caller]
    fn start(&self, name: &str) -> Running<'a> {
        self.start_pod(self.cell.meshed(name))
    }

    /// Starts a pod with a sidecar, and removes it.
    #[track_caller]
    fn starts_and_ends(&self, name: &str) {
        let pod = self.start(name);
        pod.sandbox.run_proxy();
        self.is_captured(&pod);
        self.remove(pod);
    }

    #[track_caller]
    fn is_captured(&self, pod: &Running<'_>) {
        assert_eq!(pod.sandbox.once_as("web", USER), Ok(CAPTURED));
    }

    /// Removes a pod, of which nothing may stay on the node.
    #[track_caller]
    fn remove(&self, running: Running<'_>) {
        let Running { pod, sandbox, .. } = running;
        let netns = sandbox.netns();
        sandbox.remove();
        // A file with the ID in its name or its content: saved state and results, leases of host-local.
        let script = format!(
            "find /run/detour /var/lib/cni {netns} -name '*{id}*'; grep -rlsF {id} /run/detour /var/lib/cni; ls {netns}",
            id = sandbox.id
        );
        let left = String::from_utf8_lossy(&self.node.run(&["sh", "-c", &script]).stdout).into_owned();
        assert_eq!(left, "", "pod {} left files", pod.name);
        self.cluster.admin.delete(&pod.manifest()).expect("deleted");
    }

    /// Checks pods with a sidecar, and leaves one of them.
    fn pods_with_a_sidecar(&self, agent: &Agent<'_>, report: &mut Report) -> Running<'a> {
        for number in 1..repetitions("PODS", 1) {
            report.check("pods with a sidecar start and end", |times| {
                let pod = self.timed(agent, &format!("web-{number}"), times);
                pod.sandbox.run_proxy();
                self.is_captured(&pod);
                self.remove(pod);
            });
        }
        let web = self.timed(agent, "web", report);
        let mut proxy = PathBuf::new();
        report.check("an init container with the proxy's UID bypasses the sidecar", |_| {
            assert_eq!(web.sandbox.once_as("init", PROXY_USER), Ok(DIRECT));
        });
        report.check("outbound TCP of both families and DNS arrive at the sidecar", |_| {
            proxy = web.sandbox.start_proxy();
            self.is_captured(&web);
        });
        report.check("the sidecar sees the original destinations", |_| {
            for destination in [format!("{}:8000", NODE[0]), format!("[{}]:8000", NODE[1])] {
                logs(&proxy, &format!("15001 {destination}"));
            }
        });
        report.check("inbound connections of both families arrive at the sidecar", |_| {
            for address in &web.addresses {
                let destination = SocketAddr::new(address.parse::<IpAddr>().expect("an address"), 8080);
                assert_eq!(answer(self.node, destination), 'P');
                logs(&proxy, &format!("15006 {destination}"));
            }
        });
        report.check("the runtime has saved the result", |_| {
            let script = format!("cat /var/lib/cni/results/*{}*", web.sandbox.id);
            let saved = self.node.ok(&["sh", "-c", &script]);
            for address in &web.addresses {
                assert!(saved.contains(address), "{address} in {saved}");
            }
        });
        report.check("the rules have the dialect of the configuration", |_| {
            let (xtables, native) = (web.sandbox.rules(), web.sandbox.ok_inside(&["nft", "list", "tables"]));
            let is_native = self.cell.dialect == "nftables";
            assert_eq!(native.contains("detour-nat"), is_native, "{native}");
            assert_eq!(xtables.iter().any(|rule| rule == "-A OUTPUT -j ISTIO_OUTPUT"), !is_native, "{xtables:#?}");
        });
        if self.cell.has_networks() {
            report
                .check("the pod has its second network, and its network-status shows it", |_| self.has_networks(&web));
        }
        // The configuration of an attachment has the version 0.3.1, which has no CHECK.
        if self.cell.runtime == Runtime::CriO && self.cell.mode != Mode::Attachment {
            report.check("CHECK succeeds", |_| assert!(agent.calls("CHECK").0 > 0.0));
        }
        web
    }

    /// Starts a pod with a sidecar and records the times.
    fn timed(&self, agent: &Agent<'_>, name: &str, times: &mut Report) -> Running<'a> {
        let mut pod = self.cell.meshed(name);
        self.cluster.create(&mut pod);
        let (adds, seconds) = agent.calls("ADD");
        let begin = Instant::now();
        let sandbox = self.start_sandbox(&pod);
        times.starts.push(begin.elapsed());
        // The plugin reports a call after its answer.
        until("the plugin has reported the call", || agent.calls("ADD").0 > adds);
        times.adds.push(agent.calls("ADD").1 - seconds);
        let addresses = sandbox.addresses();
        assert_eq!(addresses.len(), 2, "one of each family: {addresses:?}");
        self.cluster.has_started(&pod, &addresses);
        Running { pod, sandbox, addresses }
    }

    fn has_networks(&self, web: &Running<'_>) {
        let links: Value = serde_json::from_str(&web.sandbox.ok_inside(&["ip", "-json", "address"])).expect("JSON");
        let names: Vec<_> =
            links.as_array().expect("links").iter().filter_map(|link| link["ifname"].as_str()).collect();
        assert_eq!(names, ["lo", "eth0", "data0"]);
        let pod = self.cluster.admin.get(&web.pod.manifest()).expect("it exists");
        let text = pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"].as_str().expect("written");
        let status: Value = serde_json::from_str(text).expect("JSON");
        let of = |interface: &str| {
            let all = status.as_array().expect("a list").iter();
            all.clone()
                .find(|network| network["interface"] == interface)
                .unwrap_or_else(|| panic!("{interface}: {text}"))
        };
        assert_eq!((&of("eth0")["default"], &of("eth0")["ips"]), (&json!(true), &json!(web.addresses)), "{text}");
        assert_eq!(of("data0")["name"], "shop/second", "{text}");
    }

    /// Checks pods that are excluded, and pods with exclusions.
    fn other_pods(&self, report: &mut Report) {
        report.check("a pod without a sidecar gets no rules", |_| {
            let plain = self.start_pod(Pod::plain("shop", "plain"));
            assert_eq!(plain.sandbox.once_as("web", USER), Ok(DIRECT));
            assert!(!plain.sandbox.rules().iter().any(|rule| rule.starts_with("-A")));
            self.remove(plain);
        });
        report.check("a pod of an excluded namespace gets no rules", |_| {
            let mut pod = self.cell.meshed("excluded").in_namespace(SYSTEM);
            if self.cell.has_networks() {
                let networks = if self.cell.mode == Mode::Attachment { "default/istio-cni" } else { "shop/second" };
                pod.annotate("k8s.v1.cni.cncf.io/networks", networks);
            }
            let excluded = self.start_pod(pod);
            assert_eq!(excluded.sandbox.once_as("web", USER), Ok(DIRECT));
            self.remove(excluded);
        });
        report.check("annotations exclude a UID, and the IPv4 resolver for all processes", |_| {
            let mut pod = self.cell.meshed("excluded");
            pod.annotate("detour.io/exclude-uids", &EXCLUDED_USER.to_string());
            pod.annotate("detour.io/exclude-dns", NODE[0]);
            let excluded = self.start_pod(pod);
            excluded.sandbox.run_proxy();
            let others = CAPTURED_TCP4 + CAPTURED_TCP6 + CAPTURED_DNS6;
            assert_eq!(excluded.sandbox.once_as("web", USER), Ok(others));
            assert_eq!(excluded.sandbox.once_as("web", EXCLUDED_USER), Ok(DIRECT));
            self.remove(excluded);
        });
    }
}

/// Waits until the proxy has printed this line.
#[track_caller]
fn logs(log: &std::path::Path, line: &str) {
    until(line, || printed(log).iter().any(|printed| printed.split_once(' ').is_some_and(|(_, rest)| rest == line)));
}

/// Connects from the node. Returns the letter of the program that answers.
fn answer(node: &Node, to: SocketAddr) -> char {
    let netns = format!("/proc/{}/ns/net", node.first_process());
    let ask = move || {
        setns(File::open(netns).expect("the node runs"), CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
        let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(10)).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        stream.write_all(b"q").expect("written");
        let mut letter = [0];
        stream.read_exact(&mut letter).expect("an answer");
        char::from(letter[0])
    };
    thread::spawn(ask).join().expect("it is answered")
}
