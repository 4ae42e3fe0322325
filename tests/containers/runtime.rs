//! The simulated runtime: it reports the pods and containers of a node to the plugins that are connected.

use crate::container::Container;
use crate::nri::peer::{Peer, Runtime as Socket, bytes, integer};
use crate::scene::Pod;
use std::path::Path;
use std::time::{Duration, Instant};

/// The numbers of `CONTAINER_CREATED` and `CONTAINER_RUNNING`.
const CREATED: u64 = 2;
const RUNNING: u64 = 3;

/// The runtime's socket.
pub(crate) struct Runtime(Socket);

/// A registered plugin.
pub(crate) struct Plugin(Peer);

impl Runtime {
    pub(crate) fn listen(path: &Path) -> Self {
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        Self(Socket::listen(path))
    }

    /// Waits for a plugin and registers it, with these containers running.
    pub(crate) fn register(&self, pods: &[&Pod], containers: &[&Container<'_>]) -> Plugin {
        let pods = pods.iter().map(|pod| bytes(1, encoded_pod(pod)));
        let containers = containers.iter().map(|container| bytes(2, encoded(container, RUNNING)));
        let list: Vec<u8> = pods.chain(containers).flatten().collect();
        Plugin(self.0.register(&list))
    }
}

impl Plugin {
    /// Reports the start of a container, and lets it run when the plugin has answered. Returns how long that took.
    pub(crate) fn start(&mut self, container: &Container<'_>) -> Duration {
        let started = Instant::now();
        self.0.call("StartContainer", &event(container, CREATED));
        let waited = started.elapsed();
        self.0.call("PostStartContainer", &event(container, RUNNING));
        waited
    }

    /// Creates a container, and starts it.
    pub(crate) fn run<'a>(&mut self, pod: &'a Pod, name: &'static str) -> Container<'a> {
        let container = Container::create(pod, name);
        self.start(&container);
        container
    }

    /// Reports the removal of a container.
    pub(crate) fn remove(&mut self, container: &Container<'_>) {
        self.0.call("RemoveContainer", &event(container, RUNNING));
    }

    /// Reports the end of a container.
    pub(crate) fn stop(&mut self, container: &Container<'_>) {
        self.0.call("StopContainer", &event(container, RUNNING));
    }
}

fn event(container: &Container<'_>, state: u64) -> Vec<u8> {
    [bytes(1, encoded_pod(container.pod)), bytes(2, encoded(container, state))].concat()
}

fn encoded_pod(pod: &Pod) -> Vec<u8> {
    [bytes(1, &pod.sandbox), bytes(2, pod.name()), bytes(3, &pod.uid), bytes(4, "shop")].concat()
}

fn encoded(container: &Container<'_>, state: u64) -> Vec<u8> {
    [
        bytes(1, &container.id),
        bytes(2, &container.pod.sandbox),
        bytes(3, container.name),
        integer(4, state),
        bytes(11, bytes(5, container.cgroups_path())),
        integer(12, container.pid().into()),
    ]
    .concat()
}
