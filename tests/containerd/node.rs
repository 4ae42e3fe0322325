//! A node: processes, network and the runtime's directories of its own, with containerd on it.

use crate::control_groups::remove_groups;
use crate::image;
use crate::pod::Pod;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);
/// What can't be moved by configuration: where the runtimes' library keeps results, containerd's
/// sockets, mounted network namespaces, and our own state.
const DIRECTORIES: &str = "/var/lib/cni /run/containerd /run/netns /run/detour";
/// It ends with this process, and all others of the node with it.
const FIRST_PROCESS: &str = r#"set -e
for directory in $0; do mkdir -p "$directory"; mount -t tmpfs tmpfs "$directory"; done
ip link set lo up
echo ready
cat"#;
const SOCKET: &str = "/run/containerd/containerd.sock";
/// The plugins that lists here name.
const PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];

/// It goes with the value, whatever runs on it.
pub(crate) struct Node {
    directory: PathBuf,
    first: Child,
    containerd: Option<(Child, String)>,
    /// Below which control group its pods' are.
    group: String,
}

impl Node {
    /// One whose runtime finds these files in its configuration's directory. `NODE` in them is [`Self::path`].
    pub(crate) fn with(name: &str, configurations: &[(&str, &Value)]) -> Self {
        let unique = format!("detour-containerd-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(&unique);
        let _ = fs::remove_dir_all(&directory);
        for within in ["bin", "net.d", "manifests", "image"] {
            fs::create_dir_all(directory.join(within)).expect("made");
        }
        for plugin in PLUGINS {
            symlink(Path::new("/usr/lib/cni").join(plugin), directory.join("bin").join(plugin)).expect("linked");
        }
        let first = Command::new("unshare")
            .args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["sh", "-c", FIRST_PROCESS, DIRECTORIES])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let mut node = Self { directory, first, containerd: None, group: format!("/{unique}") };
        let mut ready = String::new();
        BufReader::new(node.first.stdout.take().expect("a pipe")).read_line(&mut ready).expect("readable");
        assert_eq!(ready, "ready\n", "the node's namespaces need root");
        for (file, configuration) in configurations {
            let text = format!("{configuration:#}").replace("NODE", &node.directory.display().to_string());
            fs::write(node.path("net.d").join(file), text).expect("written");
        }
        for tool in ["containerd", "ctr", "runc", "crictl"] {
            let found = node.run(&["sh", "-c", "command -v \"$0\"", tool]).status.success();
            assert!(found, "{tool} is needed: hack/test.sh gets it");
        }
        node.start_containerd();
        let image = image::pack(&node.path("image")).display().to_string();
        node.ok(&["ctr", "--namespace", "k8s.io", "images", "import", &image]);
        node
    }

    /// A file or directory of the node's own.
    pub(crate) fn path(&self, within: &str) -> PathBuf {
        self.directory.join(within)
    }

    /// Puts the plugin where the runtime looks for plugins.
    pub(crate) fn has_plugin(&self) {
        symlink(env!("CARGO_BIN_EXE_detour"), self.path("bin/detour")).expect("linked");
    }

    fn start_containerd(&mut self) {
        let toml = format!(
            r#"version = 2
root = "{root}/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{root}/bin"
    conf_dir = "{root}/net.d"
"#,
            root = self.directory.display(),
            image = image::NAME,
        );
        let configuration = self.path("containerd.toml");
        fs::write(&configuration, toml).expect("written");
        let log = File::options().create(true).append(true).open(self.path("containerd.log")).expect("writable");
        let mut containerd = self
            .command(&["sh", "-c", "echo $$; exec containerd --config \"$0\""])
            .arg(configuration)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("nsenter starts");
        let mut pid = String::new();
        BufReader::new(containerd.stdout.take().expect("a pipe")).read_line(&mut pid).expect("readable");
        self.containerd = Some((containerd, pid.trim().to_owned()));
        self.until("containerd is ready", |node| node.run(&["crictl", "info"]).status.success());
    }

    /// Ends the runtime and starts it again; the pods run on.
    pub(crate) fn restart_containerd(&mut self) {
        let (mut containerd, pid) = self.containerd.take().expect("it runs");
        self.ok(&["sh", "-c", &format!("kill {pid}")]);
        containerd.wait().expect("a child");
        self.start_containerd();
    }

    /// Waits until that holds.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !holds(self) {
            let log = || fs::read_to_string(self.path("containerd.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "it does not come to hold that {what}: {}", log());
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    /// The plugins that the runtime would call now.
    pub(crate) fn plugins(&self) -> Vec<String> {
        let info: Value = serde_json::from_str(&self.ok(&["crictl", "info"])).expect("JSON");
        let networks = info["cniconfig"]["Networks"].as_array().expect("networks");
        let plugins = networks.iter().filter_map(|network| network["Config"]["Plugins"].as_array()).flatten();
        plugins.map(|plugin| plugin["Network"]["type"].as_str().expect("a type").to_owned()).collect()
    }

    /// Tells the plugin of a pod, as a directory of manifests does.
    pub(crate) fn knows(&self, manifest: &Value) {
        let name = format!("{}-{}.json", manifest["kind"], manifest["metadata"]["name"]).replace('"', "");
        fs::write(self.path("manifests").join(name), manifest.to_string()).expect("written");
    }

    /// Starts a pod's sandbox and gives its ID.
    ///
    /// # Errors
    /// What the runtime says of it.
    pub(crate) fn start(&self, pod: &Pod) -> Result<String, String> {
        let path = self.path(&format!("{}.json", pod.name));
        fs::write(&path, pod.sandbox(&self.group).to_string()).expect("written");
        let output = self.run(&["crictl", "runp", &path.display().to_string()]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Starts a container in the pod with that sandbox and gives its ID.
    pub(crate) fn start_container(&self, sandbox: &str, pod: &Pod) -> String {
        let path = self.path("container.json");
        let container = json!({"metadata": {"name": "web"}, "image": {"image": image::NAME}, "linux": {}});
        fs::write(&path, container.to_string()).expect("written");
        let of_pod = self.path(&format!("{}.json", pod.name));
        let paths = [&path, &of_pod].map(|path| path.display().to_string());
        let id = self.ok(&["crictl", "create", sandbox, &paths[0], &paths[1]]).trim().to_owned();
        self.ok(&["crictl", "start", &id]);
        id
    }

    /// Stops a pod and removes it, as the kubelet does in the end.
    pub(crate) fn remove(&self, sandbox: &str) {
        self.ok(&["crictl", "stopp", sandbox]);
        self.ok(&["crictl", "rmp", sandbox]);
    }

    /// What the runtime says of a pod.
    pub(crate) fn inspect(&self, sandbox: &str) -> Value {
        serde_json::from_str(&self.ok(&["crictl", "inspectp", sandbox])).expect("JSON")
    }

    /// What a command prints in a pod's network namespace.
    pub(crate) fn ok_in(&self, sandbox: &str, command: &[&str]) -> String {
        let pid = self.inspect(sandbox)["info"]["pid"].to_string();
        self.ok(&[&["nsenter", "--target", &pid, "--net", "--"], command].concat())
    }

    /// The pod's rules, both families'.
    pub(crate) fn rules(&self, sandbox: &str) -> [Vec<String>; 2] {
        ["iptables-save", "ip6tables-save"].map(|save| {
            let saved = self.ok_in(sandbox, &[save]);
            saved.lines().filter(|line| line.starts_with("-A")).map(str::to_owned).collect()
        })
    }

    /// What is kept of pods: namespaces, addresses, results and our own state.
    pub(crate) fn left(&self) -> Vec<String> {
        let found = self.ok(&["find", "/run/netns", "/run/detour", "/var/lib/cni", "-type", "f"]);
        // host-local's own, and ours of the installation.
        let stays = ["/last_reserved_ip.", "/lock", "/var/lib/cni/detour/install."];
        found.lines().filter(|path| !stays.iter().any(|part| path.contains(part))).map(str::to_owned).collect()
    }

    /// What a command prints that must succeed on the node.
    #[track_caller]
    pub(crate) fn ok(&self, command: &[&str]) -> String {
        let output = self.run(command);
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// What comes of a command on the node.
    pub(crate) fn run(&self, command: &[&str]) -> Output {
        self.command(command).output().expect("nsenter starts")
    }

    fn command(&self, command: &[&str]) -> Command {
        let unshare = self.first.id();
        // proc_pid(5): the children of a task.
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).expect("it runs");
        let first = children.trim();
        let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("tools");
        let path = std::env::var("PATH").unwrap_or_default();
        let mut entered = Command::new("nsenter");
        entered.args(["--target", first, "--mount", "--net", "--pid", "--"]).args(&command[..1]);
        // By default, it waits 2 s for an answer, and 4 s for the start of a sandbox.
        entered.args((command[0] == "crictl").then_some("--timeout=60s")).args(&command[1..]);
        entered.env("PATH", format!("{}:{path}", tools.display()));
        entered.env("CONTAINER_RUNTIME_ENDPOINT", format!("unix://{SOCKET}"));
        entered
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.first.stdin.take());
        let _ = self.first.wait();
        if let Some((containerd, _)) = &mut self.containerd {
            let _ = containerd.wait();
        }
        let _ = fs::remove_dir_all(&self.directory);
        remove_groups(&self.group);
    }
}
