//! A simulated node with an agent: the node's files at [`ROOT`], calls of the plugin for its pods, and what the agent
//! writes to the API server.

use super::api::Api;
use super::called::{Called, plugin};
pub(crate) use super::simulated_node::bind;
use super::simulated_node::{Node, Process};
use super::wait::{DEADLINE, pause};
use nix::mount::{MsFlags, mount};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Where the node's files are. The path of a socket has at most 107 bytes (unix(7)).
pub(crate) const ROOT: &str = "/mnt";
const NETNS: &str = "/run/netns";

/// Mounts the node's files at [`ROOT`], with the plugin's state as this process sees it.
pub(crate) fn mount_node(node: &Node) {
    bind(&node.root, Path::new(ROOT));
    for (directory, also) in [("run/detour", true), ("run/netns", false)] {
        let (own, of_node) = (Path::new("/").join(directory), Path::new(ROOT).join(directory));
        fs::create_dir_all(&own).expect("needs root");
        fs::create_dir_all(&of_node).expect("made");
        mount(Some("tmpfs"), &own, Some("tmpfs"), MsFlags::empty(), Some("size=64m")).expect("a tmpfs");
        if also {
            bind(&own, &of_node);
        }
    }
}

/// Returns a path of the node as this process reaches it.
pub(crate) fn reach(path: &str) -> PathBuf {
    Path::new(ROOT).join(path.trim_start_matches('/'))
}

/// Returns the arguments of an agent whose node is at `root`. Its account and its configuration are in `/account` and
/// `/config/agent.json` of the node.
pub(crate) fn agent_arguments(root: &Path, api: &str, more: &[&str]) -> Vec<String> {
    let root = root.display();
    let own = [
        format!("--root={root}"),
        format!("--api-server={api}"),
        format!("--service-account={root}/account"),
        format!("--config={root}/config/agent.json"),
    ];
    let flags = ["agent", "--platform=kubernetes", "--node-name=node-1"].into_iter();
    flags.chain(own.iter().map(String::as_str)).chain(more.iter().copied()).map(str::to_owned).collect()
}

/// Writes a file of the node. As in a volume of a ConfigMap, no process sees a part of the text.
pub(crate) fn write(path: &str, text: &str) -> PathBuf {
    let path = reach(path);
    fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &path)).expect("written");
    path
}

/// Mounts the network namespace of a sandbox as runtimes do.
pub(crate) fn pin(sandbox: &str, process: &Process) {
    for path in [reach(NETNS), PathBuf::from(NETNS)] {
        let path = path.join(sandbox);
        fs::write(&path, "").expect("written");
        bind(&process.netns(), &path);
    }
}

/// Calls the plugin as the runtime does, for a pod with this name in the namespace shop, and further arguments.
///
/// # Errors
/// The call fails; the text is what it prints.
pub(crate) fn call(
    verb: &str,
    (sandbox, netns): (&str, &Path),
    (pod, arguments): (&str, &str),
    conf: &Value,
) -> Result<(), String> {
    let mut plugin = plugin([
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", sandbox),
        ("CNI_NETNS", netns.to_str().expect("text")),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin"),
        ("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={pod}{arguments}")),
    ]);
    let called = Called::run(&mut plugin, conf);
    if called.success { Ok(()) } else { Err(format!("{}{}", called.stdout, called.stderr)) }
}

/// Returns the path of a sandbox's network namespace in the runtime.
pub(crate) fn netns_of(sandbox: &str) -> PathBuf {
    Path::new(NETNS).join(sandbox)
}

/// Returns the messages of the Events about the pod with this UID and this reason.
pub(crate) fn events(api: &Api, uid: &str, reason: &str) -> Vec<String> {
    let bodies = api.bodies();
    let of_pod = bodies.iter().filter(|body| body["reason"] == reason && body["involvedObject"]["uid"] == uid);
    of_pod.map(|body| body["message"].as_str().expect("text").to_owned()).collect()
}

/// Waits for an Event about a pod with this reason whose message contains `part`. Returns the message.
#[track_caller]
pub(crate) fn wait_for_event(api: &Api, uid: &str, reason: &str, part: &str) -> String {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(message) = events(api, uid, reason).into_iter().find(|message| message.contains(part)) {
            return message;
        }
        assert!(Instant::now() < deadline, "{reason}, {part}: got {:#?}", api.bodies());
        pause();
    }
}
