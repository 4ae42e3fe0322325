//! The quick start with kind of docs/install.md: the image that hack/image.sh builds runs the agent. `ctr` imports the
//! archive on the node, as kind does (`pkg/cluster/nodeutils`, `LoadImageArchive`).

use super::agent::{Agent, Program};
use super::cluster::Cluster;
use super::scene::until_used;
use super::{Cell, Mode};
use crate::cluster::detour;
use crate::node::Runtime;
use crate::result;
use crate::support::new_netns::tool;
use std::fs;
use std::path::Path;

#[test]
fn the_archive_of_the_image_runs_the_agent() {
    let cell = Cell { runtime: Runtime::Containerd, mode: Mode::OwnList, dialect: "iptables" };
    let node = cell.node();
    let cluster = Cluster::start();
    let _entrance = cluster.open(&node);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = fs::read_to_string(root.join("docs/install.md")).expect("readable");
    let (_, section) = guide.split_once("\n## Quick start with kind\n").expect("a section");
    let block = section.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).expect("commands");

    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let work = node.path("quick-start");
    fs::create_dir_all(work.join("target")).expect("made");
    fs::copy(detour(), work.join(format!("detour-{architecture}"))).expect("copied");
    let (mut chart, mut rest) = (None, Vec::new());
    for line in block.lines().map(|line| line.split(" #").next().unwrap_or_default().trim()) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["hack/image.sh", "--arch", _] => {
                let (image, work) = (root.join("hack/image.sh"), work.display().to_string());
                let layout = format!("{work}/target/image");
                let arguments = ["--arch", architecture, "--binaries", &work, "--output", &layout];
                tool(&image.display().to_string(), &arguments, "");
            }
            ["skopeo", ..] => drop(tool("sh", &["-c", &format!("cd {} && {line}", work.display())], "")),
            ["kind", "load", "image-archive", archive] => {
                let archive = work.join(archive).display().to_string();
                let import = ["ctr", "--namespace=k8s.io", "images", "import", "--all-platforms", "--digests"];
                // Without --local, containerd unpacks only for the snapshotter overlayfs, which kind uses.
                node.ok(&[&import[..], &["--local", "--snapshotter=native", &archive]].concat());
            }
            ["helm", .., "--set", values] => {
                chart = Some(cluster.install_chart(&node.path("chart.yaml"), &[values.to_owned()]));
            }
            _ => rest.push(line),
        }
    }
    assert_eq!(rest.len(), 2, "commands that need kind and a kubelet: {rest:?}");
    let chart = chart.expect("a command of helm");
    let agent = Agent::start(&cluster, &node, &chart, "detour-agent-a", Program::OfTheImage);
    agent.until_ready();
    until_used(&node, "detour");
    assert!(fs::read(node.path("bin/detour")).expect("installed") == fs::read(detour()).expect("built"));
    result(
        Runtime::Containerd,
        "quick start with kind",
        "the imported image runs the agent, which installs the plugin",
    );
}
