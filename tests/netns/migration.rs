//! The procedures of docs/migrate.md without Multus, step by step on a node's directories with real agents, plugins and packets.
//! istio-cni is simulated by a program that writes its rules.

use crate::agent_process::Agent;
use crate::example::*;
use crate::expectations::*;
use crate::scene::{CALICO, LIST, Scene};
use crate::world::*;
use nix::sys::signal::Signal;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, thread};

/// Asserts the effect of istio-cni alone: UID 1337 is captured like any other.
#[track_caller]
fn istio_cni_redirects(world: &World) {
    redirected_once(world);
    tcp_is_captured(world, VAULT_INIT);
}

/// Asserts the effect of detour: UID 1337 bypasses the sidecar.
#[track_caller]
fn detour_redirects(world: &World) {
    redirected_once(world);
    tcp_is_direct(world, VAULT_INIT);
    dns_is_direct(world, VAULT_INIT, RESOLVER);
}

#[track_caller]
fn redirected_once(world: &World) {
    for &family in world.families() {
        let rules = world.iptables_save(family);
        let jumps = |chain: &str, to: &str| rules.chain("nat", chain).iter().filter(|rule| rule.ends_with(to)).count();
        // On OpenShift, detour's redirection is native.
        let once = usize::from(world.native_redirection().is_empty());
        assert_eq!((jumps("OUTPUT", "ISTIO_OUTPUT"), jumps("PREROUTING", "ISTIO_INBOUND")), (once, once), "{rules}");
    }
    tcp_is_captured(world, APP_PROCESS);
    dns_is_captured(world, APP_PROCESS, RESOLVER);
    tcp_is_direct(world, PROXY);
    inbound_is_captured(world);
}

/// Asserts that a new pod is redirected in this way, and that running pods are not affected.
#[track_caller]
fn one_more(pods: &mut Vec<Kept>, node: &Node, is_redirected: fn(&World)) {
    let pod = Kept::new(node.new_pod());
    is_redirected(&pod.world);
    pods.push(pod);
    Kept::all_notice_nothing(pods);
}

/// With both in the configuration list, the first one redirects, and detour's exclusions precede the redirection.
#[test]
fn from_istio_cni_without_multus_and_back() {
    let node = Node::new("chained");
    node.istio_cni_comes();
    let before = node.configurations();
    let mut pods = vec![Kept::new(node.new_pod())];
    istio_cni_redirects(&pods[0].world);

    // 2. Install detour.
    let agent = node.at_each_instant(|| node.detour_comes());
    assert_eq!(node.types(), ["istio-cni", "detour"]);
    one_more(&mut pods, &node, detour_redirects);

    // 3. Remove istio-cni.
    node.at_each_instant(|| node.istio_cni_goes());
    assert_eq!(node.types(), ["detour"]);
    one_more(&mut pods, &node, detour_redirects);
    node.delete(&pods.remove(0).world);

    // Back, 1. and 2. Remove detour on a cordoned node.
    node.detour_goes(agent);
    assert!(node.types().is_empty());
    let without_mesh: Value = serde_json::from_str(CALICO).expect("JSON");
    assert_eq!(node.scene.json(LIST), without_mesh);
    Kept::all_notice_nothing(&mut pods);

    // Back, 3. Install istio-cni.
    node.istio_cni_comes();
    assert_eq!(node.configurations(), before);
    one_more(&mut pods, &node, istio_cni_redirects);
}

#[test]
fn from_istio_init_and_back() {
    let node = Node::new("istio-init");
    let before = node.configurations();
    let with_plugin = manifest(true, PROXY, &[]);
    let with_istio_init = with_plugin.replace("  initContainers:\n", "  initContainers:\n  - name: istio-init\n");
    let init_container = |world: &World| {
        for &family in world.families() {
            let rules = rules(family, Dns::Captured, PROXY.uid);
            world.iptables_restore(family, &rules);
        }
    };
    // 1. Install detour; it skips pods with istio-init.
    node.injector_makes(&with_istio_init);
    let agent = node.detour_comes();
    let world = node.new_pod();
    init_container(&world);
    detour_redirects(&world);
    let mut pods = vec![Kept::new(world)];

    // 2. pilot.cni.enabled=true: new pods have no istio-init.
    node.injector_makes(&with_plugin);
    one_more(&mut pods, &node, detour_redirects);

    // Back, 1. pilot.cni.enabled=false.
    node.injector_makes(&with_istio_init);
    let world = node.new_pod();
    init_container(&world);
    detour_redirects(&world);
    pods.push(Kept::new(world));

    // Back, 2. Remove detour.
    node.detour_goes(agent);
    assert_eq!(node.configurations(), before);
    Kept::all_notice_nothing(&mut pods);
}

/// A pod, its rules when it started, and an open connection of its application in each family through the sidecar.
struct Kept {
    connections: Vec<(SocketAddr, Connection)>,
    rules: Vec<Ruleset>,
    world: World,
}

impl Kept {
    fn new(world: World) -> Self {
        let connect = |&family: &Family| {
            let to = SERVER.at(family, HTTPS);
            (to, world.pod_connects(APP_PROCESS, to))
        };
        let connections = world.families().iter().map(connect).collect();
        Self { connections, rules: saved(&world), world }
    }

    /// Asserts that its connections still work, new ones reach the sidecar, and its rules are unchanged.
    #[track_caller]
    fn notices_nothing(&mut self) {
        for (to, connection) in &mut self.connections {
            assert_eq!(connection.send(), Arrival::captured(OUTBOUND, *to));
        }
        tcp_is_captured(&self.world, APP_PROCESS);
        inbound_is_captured(&self.world);
        assert_eq!(saved(&self.world), self.rules);
    }

    #[track_caller]
    fn all_notice_nothing(pods: &mut [Self]) {
        for pod in pods {
            pod.notices_nothing();
        }
    }
}

fn saved(world: &World) -> Vec<Ruleset> {
    world.families().iter().map(|&family| world.iptables_save(family)).collect()
}

/// Removed with the value.
struct Node {
    scene: Scene,
}

impl Node {
    fn new(name: &str) -> Self {
        let scene = Scene::with(&format!("migration-{name}"), "10-calico.conflist", CALICO);
        for family in [Family::V4, Family::V6] {
            scene.write(&format!("istio-cni/{family:?}.rules"), &rules(family, Dns::Captured, PROXY.uid));
        }
        scene.write("manifests/namespace.yaml", NAMESPACE);
        let node = Self { scene };
        node.injector_makes(&manifest(true, PROXY, &[]));
        node
    }

    /// Sets the manifest of new pods.
    fn injector_makes(&self, manifest: &str) {
        self.scene.write("manifests/pod.yaml", manifest);
    }

    fn bin_dir(&self) -> PathBuf {
        self.scene.path("opt/cni/bin")
    }

    /// Starts detour's agent with the chart's sub-plugin chain, and waits until the installation is complete.
    fn detour_comes(&self) -> Agent {
        let config = json!({
            "kubernetes": { "manifests_dir": self.scene.path("manifests") },
            "chain": [
                { "type": "istio-redirect" },
                { "type": "uid-exclude", "uids": ["1337"] },
                { "type": "dns-exclude", "uids": ["1337"] },
            ],
        });
        Agent::settled(&self.scene, "a", &[&self.scene.config("c", &config), "--on-exit=remove"])
    }

    /// Stops detour's agent, which reverts its changes of the node.
    fn detour_goes(&self, agent: Agent) {
        assert!(agent.end(Signal::SIGTERM).success());
    }

    /// Installs istio-cni as its agent does at startup and after changes (istio, `cni/pkg/install`): first the program,
    /// then the configuration.
    fn istio_cni_comes(&self) {
        let program = self.bin_dir().join("istio-cni");
        fs::create_dir_all(self.bin_dir()).expect("made");
        replace(&program, &istio_cni(&self.scene.path("istio-cni")), 0o755);
        self.rewrite_list(|plugins| plugins.push(istio_cni_conf()));
    }

    /// Uninstalls istio-cni as its agent does when it stops.
    fn istio_cni_goes(&self) {
        self.rewrite_list(|_| ());
        fs::remove_file(self.bin_dir().join("istio-cni")).expect("removed");
    }

    /// Removes istio-cni's entry and writes the configuration list again.
    fn rewrite_list(&self, change: impl FnOnce(&mut Vec<Value>)) {
        let mut list = self.scene.json(LIST);
        let plugins = list["plugins"].as_array_mut().expect("a list");
        plugins.retain(|plugin| plugin["type"] != "istio-cni");
        change(plugins);
        replace(&self.scene.path(LIST), &as_go_writes(&list), 0o644);
    }

    /// Returns the files that runtimes read, with contents and mode.
    fn configurations(&self) -> BTreeMap<PathBuf, (String, u32)> {
        let mut files = self.scene.files();
        files.retain(|path, _| path.starts_with("etc/cni"));
        files
    }
}

fn istio_cni_conf() -> Value {
    json!({
        "type": "istio-cni", "name": "istio-cni", "plugin_log_level": "info",
        "cni_agent_run_dir": "/var/run/istio-cni", "exclude_namespaces": ["istio-system"],
        "pod_namespace": "istio-cni", "ambient_enabled": false,
    })
}

/// A simulated istio-cni: like the real one, it adds its rules atomically and fails if they exist.
fn istio_cni(rules: &Path) -> String {
    let rules = rules.display();
    format!(
        r#"#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
cat >/dev/null
[ "$CNI_COMMAND" = ADD ] || exit 0
restore() {{ nsenter --net="$CNI_NETNS" "$1" --noflush "$2"; }}
restore iptables-restore {rules}/V4.rules >&2 && restore ip6tables-restore {rules}/V6.rules >&2 && exit 0
echo '{{"code":999,"msg":"iptables-restore failed"}}'
exit 1
"#
    )
}

/// Formats JSON with sorted keys and an indentation of two (Go, `json.MarshalIndent` of a map).
fn as_go_writes(value: &Value) -> String {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(keys) => {
                let keys: BTreeMap<_, _> = keys.iter().map(|(key, value)| (key.clone(), sorted(value))).collect();
                Value::Object(Map::from_iter(keys))
            }
            Value::Array(items) => items.iter().map(sorted).collect(),
            other => other.clone(),
        }
    }
    format!("{:#}\n", sorted(value))
}

/// Replaces a file atomically.
fn replace(path: &Path, text: &str, mode: u32) {
    let new = path.with_file_name(".new");
    fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    fs::write(&new, text).expect("written");
    fs::set_permissions(&new, PermissionsExt::from_mode(mode)).expect("set");
    fs::rename(&new, path).expect("renamed");
}

/// The plugins that redirect.
const MESHES: [&str; 2] = ["istio-cni", "detour"];

impl Node {
    /// Returns the mesh plugins that are called for a new pod, in order. Asserts that all files of the directory are
    /// valid, and that each plugin exists as a program.
    #[track_caller]
    fn plugins(&self) -> Vec<Value> {
        let plugins = members(&self.scene.json(LIST));
        let mesh = |plugin: &Value| MESHES.iter().any(|kind| plugin["type"] == *kind);
        plugins.into_iter().filter(mesh).collect()
    }

    /// Returns the types of the plugins.
    #[track_caller]
    fn types(&self) -> Vec<String> {
        self.plugins().iter().map(|plugin| plugin["type"].as_str().expect("text").to_owned()).collect()
    }

    /// Runs `work`, and asserts that throughout it a new pod gets a plugin that exists.
    fn at_each_instant<T>(&self, work: impl FnOnce() -> T) -> T {
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
    fn new_pod(&self) -> World {
        let world = World::new(Families::Both);
        let plugins = self.plugins();
        assert!(!plugins.is_empty(), "no plugin would redirect the pod");
        self.call(&world, "ADD", plugins);
        world
    }

    /// Stops a pod, with the plugins in reverse order.
    #[track_caller]
    fn delete(&self, world: &World) {
        self.call(world, "DEL", self.plugins().into_iter().rev());
    }

    #[track_caller]
    fn call(&self, world: &World, command: &str, plugins: impl IntoIterator<Item = Value>) {
        for mut plugin in plugins {
            let version = plugin["cniVersion"].clone();
            plugin["prevResult"] = json!({ "cniVersion": version, "ips": [], "dns": {} });
            let program = self.bin_dir().join(plugin["type"].as_str().expect("text"));
            world.call(command, &plugin).run_as(&program).done();
        }
    }
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
