//! A simulated runtime and Multus: which plugins they call when a pod starts and ends, according to the node's
//! directories.

use super::node::{Caller, LIST, Node, OWN_FILE};
use crate::world::{Families, World};
use serde_json::{Value, json};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The plugins that redirect.
const MESHES: [&str; 2] = ["istio-cni", "detour"];

impl Node {
    /// Returns the mesh plugins that are called for a new pod, in order. Asserts that all files of the directory are
    /// valid, and that each plugin exists as a program.
    #[track_caller]
    pub(super) fn plugins(&self) -> Vec<Value> {
        let plugins = match self.caller {
            Caller::Runtime => members(&read(self, LIST).expect("the cluster network is there")),
            Caller::Multus => read(self, OWN_FILE).into_iter().collect(),
        };
        let mesh = |plugin: &Value| MESHES.iter().any(|kind| plugin["type"] == *kind);
        plugins.into_iter().filter(mesh).collect()
    }

    /// Returns the types of the plugins.
    #[track_caller]
    pub(super) fn types(&self) -> Vec<String> {
        self.plugins().iter().map(|plugin| plugin["type"].as_str().expect("text").to_owned()).collect()
    }

    /// Runs `work`, and asserts that throughout it a new pod gets a plugin that exists.
    pub(super) fn at_each_instant<T>(&self, work: impl FnOnce() -> T) -> T {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let types = self.types();
                    assert!(types.iter().any(|kind| self.bin_dir().join(kind).exists()), "{types:?}");
                    thread::yield_now();
                }
            });
            let result = work();
            done.store(true, Ordering::Relaxed);
            watch.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result
        })
    }

    /// Starts a pod.
    #[track_caller]
    pub(super) fn new_pod(&self) -> World {
        let world = World::new(Families::Both);
        let plugins = self.plugins();
        assert!(!plugins.is_empty(), "no plugin would redirect the pod");
        self.call(&world, "ADD", plugins);
        world
    }

    /// Stops a pod, with the plugins in reverse order.
    #[track_caller]
    pub(super) fn delete(&self, world: &World) {
        self.call(world, "DEL", self.plugins().into_iter().rev());
    }

    #[track_caller]
    fn call(&self, world: &World, command: &str, plugins: impl IntoIterator<Item = Value>) {
        for mut plugin in plugins {
            if self.caller == Caller::Runtime {
                let version = plugin["cniVersion"].clone();
                plugin["prevResult"] = json!({ "cniVersion": version, "ips": [], "dns": {} });
            }
            let program = self.bin_dir().join(plugin["type"].as_str().expect("text"));
            world.call(command, &plugin).run_as(&program).done();
        }
    }
}

/// Reads a file of the node, if it exists.
#[track_caller]
fn read(node: &Node, within: &str) -> Option<Value> {
    let text = fs::read_to_string(node.scene.path(within)).ok()?;
    Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{within}: {error}: {text}")))
}

/// Returns the configuration of each plugin of a list (SPEC.md, "Deriving request configuration from plugin
/// configuration").
fn members(list: &Value) -> Vec<Value> {
    let mut plugins = list["plugins"].as_array().expect("a list").clone();
    for plugin in &mut plugins {
        plugin["name"] = list["name"].clone();
        plugin["cniVersion"] = list["cniVersion"].clone();
    }
    plugins
}
