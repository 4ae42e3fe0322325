//! Excluded containers: each test breaks one precondition of a bypass, with real control groups and real elements.

use crate::compare;
use crate::scene::{AGENT_CONTAINERS, POD, Plan, Scene, line, scene};
use crate::support::cgroup::{Cgroup, hierarchy};
use detour_cni::cluster::agent::{BypassingContainer, ContainersStatus};
use detour_cni::firewall::{ContainerElement, ContainerLabel, change_container_elements};
use detour_cni::inspect::audit::AuditReport;
use detour_cni::policy::ContainerScope;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::net::UnixListener;

const ANNOTATION: &str = "detour.io/exclude-containers";
const ID: &str = "0123456789abcdef0123456789abcdef";
const NRI_SOCKET: &str = "run/nri/nri.sock";

/// A pod whose init container bypasses the sidecar until the proxy is ready, and whose container `backup` until it
/// exits.
pub(crate) fn plan() -> Plan {
    let mut plan = Plan::new();
    plan.config["chain"] = json!([{"type": "istio-redirect"}, {"type": "container-exclude"}]);
    plan.cluster.annotate(ANNOTATION, "vault-agent-init,backup");
    let backup = json!({"name": "backup", "securityContext": {"runAsUser": 1_000_650_000}});
    plan.cluster.pod["spec"]["containers"].as_array_mut().expect("a list").push(backup);
    plan
}

/// The running containers of the scene.
pub(crate) struct Containers {
    init: Cgroup,
    backup: Cgroup,
    _nri: UnixListener,
}

fn label(name: &str) -> Option<ContainerLabel> {
    Some(ContainerLabel::new(name, ID))
}

fn change(scene: &Scene, remove: &[ContainerElement], add: &[ContainerElement]) {
    scene.netns.within(|| change_container_elements(remove, add)).expect("changed");
}

impl Containers {
    /// Creates the desired state after the proxy's start: `backup` bypasses the sidecar, and the init container no
    /// longer does.
    pub(crate) fn new(scene: &Scene) -> Self {
        let groups = scene.path("sys/fs/cgroup");
        fs::create_dir_all(&groups).expect("made");
        mount(Some(&hierarchy()), &groups, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted");
        fs::create_dir_all(scene.path(NRI_SOCKET).parent().expect("a directory")).expect("made");
        let nri = UnixListener::bind(scene.path(NRI_SOCKET)).expect("free");
        let containers = Self { init: Cgroup::new(), backup: Cgroup::new(), _nri: nri };
        change(scene, &[], &[containers.element("backup")]);
        containers.tell(scene, &["backup"], "");
        containers
    }

    fn cgroup(&self, name: &str) -> u64 {
        if name == "backup" { self.backup.id() } else { self.init.id() }
    }

    fn element(&self, name: &str) -> ContainerElement {
        ContainerElement { scope: ContainerScope::All, cgroup: self.cgroup(name), container: label(name) }
    }

    /// Lets the agent expect elements for these containers.
    fn tell(&self, scene: &Scene, expected: &[&str], error: &str) {
        let bypassing = |name: &&str| BypassingContainer {
            name: (*name).to_owned(),
            id: ID.to_owned(),
            cgroup: self.cgroup(name),
            scope: ContainerScope::All,
        };
        let expected = Some(expected.iter().map(bypassing).collect());
        let runtime = Some("containerd 2.2.0".into());
        status(scene, &ContainersStatus { runtime, error: error.into(), expected });
    }

    /// Replaces values that differ between runs.
    fn stable(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, group) in [("INIT", &self.init), ("BACKUP", &self.backup)] {
            text = text.replace(&group.path(), &format!("/{name}"));
            text = text.replace(&format!("control group {}", group.id()), &format!("control group {name}"));
        }
        text.replace(&format!("{} ", hierarchy().display()), "/sys/fs/cgroup ")
    }
}

fn status(scene: &Scene, status: &ContainersStatus) {
    scene.write(AGENT_CONTAINERS, &json!(status).to_string());
}

/// The outcome of each check of excluded containers, in order.
fn outcomes(report: &Value) -> Vec<(String, String)> {
    let text = |line: &Value, key: &str| line[key].as_str().expect("text").to_owned();
    let checks = report["checks"].as_array().expect("checks").iter().filter(|line| line["group"] == "containers");
    checks.map(|line| (text(line, "id"), text(line, "outcome"))).collect()
}

/// A fault: its name in the golden file, the checks that fail, and what it changes.
type Fault = (&'static str, &'static [&'static str], fn(&Scene, &Containers));

const FAULTS: [Fault; 7] = [
    ("containers-healthy", &[], |_, _| {}),
    ("containers-no-nri", &["containers-ready"], |scene, _| {
        fs::remove_file(scene.path(NRI_SOCKET)).expect("removed");
        let error = "/var/run/nri/nri.sock: no such file or directory".into();
        status(scene, &ContainersStatus { error, ..ContainersStatus::default() });
    }),
    ("containers-not-registered", &["containers-ready"], |scene, _| status(scene, &ContainersStatus::default())),
    ("containers-cgroup-v1", &["containers-ready"], |scene, _| {
        umount2(&scene.path("sys/fs/cgroup"), MntFlags::MNT_DETACH).expect("unmounted");
        fs::create_dir(scene.path("sys/fs/cgroup/memory")).expect("made");
    }),
    // A running container without its element, the element of one that has exited, and that of another program.
    ("containers-element-missing", &["containers-bypass"], |scene, containers| {
        change(scene, &[containers.element("backup")], &[]);
        containers.tell(scene, &["backup"], "container backup: the kernel refuses the element");
    }),
    ("containers-element-stale", &["containers-bypass"], |scene, containers| containers.tell(scene, &[], "")),
    ("containers-element-foreign", &["containers-bypass"], |scene, containers| {
        change(scene, &[], &[ContainerElement { container: None, ..containers.element("vault-agent-init") }]);
    }),
];

#[test]
fn each_missing_precondition_and_each_wrong_element_fails_its_check() {
    for (name, failed, fault) in FAULTS {
        scene(plan(), |scene| {
            let containers = Containers::new(scene);
            fault(scene, &containers);
            let text = containers.stable(&scene.printed(&POD));
            assert_eq!(crate::faults::failed(&text), failed, "{name}: {text}");
            let lines = text.lines().filter(|line| line.contains("containers-"));
            compare(name, &lines.fold(String::new(), |all, line| all + line + "\n"));
        });
    }
}

/// `explain` warns about both.
#[test]
fn an_exclusion_that_is_ignored_is_counted_as_a_warning() {
    for (mut plan, names, warnings, part) in [
        (Plan::new(), "vault-agent-init", 2, "the sub-plugin chain has no container-exclude"),
        (plan(), "vault-agent-int,backup", 3, "\\\"vault-agent-int\\\": pod shop/web-0 has no such container"),
    ] {
        plan.cluster.annotate(ANNOTATION, names);
        let (report, explained) = scene(plan, |scene| {
            let explained = scene.command("explain", &[&POD[..], &["-o", "json"]].concat());
            (scene.report(&POD), String::from_utf8(explained.stdout).expect("text"))
        });
        assert!(explained.contains(part), "{part}: {explained}");
        let (outcome, found, _) = line(&report, "redirected");
        let expected = format!("; {warnings} warnings, see detour explain");
        assert!(outcome == "pass" && found.ends_with(&expected), "{found}");
    }
}

#[test]
fn a_removed_table_is_a_difference_of_the_rules() {
    scene(plan(), |scene| {
        let _containers = Containers::new(scene);
        scene.netns.run("nft delete table inet detour-exclusions");
        let report = scene.report(&POD);
        let failed = report["checks"].as_array().expect("checks").iter().filter(|line| line["outcome"] == "fail");
        assert_eq!(failed.map(|line| line["id"].clone()).collect::<Vec<_>>(), ["rules-equal"], "{report:#}");
        let of_pod = outcomes(&report).into_iter().filter(|(id, _)| id == "containers-bypass");
        assert_eq!(of_pod.map(|(_, outcome)| outcome).collect::<Vec<_>>(), ["not-checked"]);
    });
}

/// Without a pod, the configuration decides whether `doctor` makes the checks.
#[test]
fn a_node_is_checked_only_if_its_configuration_excludes_containers() {
    let of_node = |plan: Plan, with: fn(&Scene) -> Option<Containers>| {
        scene(plan, |scene| {
            let _containers = with(scene);
            outcomes(&scene.report(&["--node"]))
        })
    };
    assert_eq!(of_node(Plan::new(), |_| None), []);
    let found = of_node(plan(), |scene| Some(Containers::new(scene)));
    assert_eq!(found, [("containers-ready".to_owned(), "pass".to_owned())]);
}

#[test]
fn rules_lists_the_elements_with_their_paths_and_marks_foreign_ones() {
    scene(plan(), |scene| {
        let containers = Containers::new(scene);
        let odd = ContainerLabel { name: "x\u{1b}[2J".into(), id: "y".into() };
        let odd = ContainerElement { scope: ContainerScope::All, cgroup: 7, container: Some(odd) };
        let without = ContainerElement { container: None, ..containers.element("vault-agent-init") };
        change(scene, &[], &[odd, without]);
        let output = scene.command("rules", &["-n", "shop", "web-0", "-o", "json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
        assert_eq!(report["as_asked"], true, "elements are no drift: {report:#}");
        let mut elements = report["containers"]["elements"].as_array().expect("a list").clone();
        elements.sort_by_key(|element| element["cgroup"].as_u64());
        let element = |container: Value, id: Value, cgroup: u64, path: Value, foreign: bool| json!({"scope": "all", "container": container, "id": id, "cgroup": cgroup, "path": path, "foreign": foreign});
        let (init, backup) = (&containers.init, &containers.backup);
        let mut expected = vec![
            element("x\u{1b}[2J".into(), "y".into(), 7, Value::Null, true),
            element(Value::Null, Value::Null, init.id(), init.path().into(), true),
            element("backup".into(), ID[..16].into(), backup.id(), backup.path().into(), false),
        ];
        expected.sort_by_key(|element| element["cgroup"].as_u64());
        assert_eq!(elements, expected);
        let output = scene.command("rules", &["/run/netns/pod"]);
        let text = String::from_utf8(output.stdout).expect("text");
        assert!(text.contains("\nExcluded containers (") && text.contains("x\\u{1b}[2J"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("  foreign")).count(), 2, "{text}");
    });
    scene(Plan::new(), |scene| {
        let output = scene.command("rules", &["/run/netns/pod", "-o", "json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
        assert_eq!(report["containers"], Value::Null);
    });
}

/// `rules` lists the containers of a set; its rules have one counter for each level of control groups.
#[test]
fn audit_lists_the_rules_of_excluded_containers_that_have_matched() {
    for dialect in ["iptables", "nftables"] {
        let mut plan = plan();
        plan.config["dialect"] = dialect.into();
        scene(plan, |scene| {
            let containers = Containers::new(scene);
            let audit = |arguments: &[&str]| -> AuditReport {
                let output = scene.command("audit", &[&["-o", "json"], arguments].concat());
                serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
            };
            assert!(audit(&[]).pods.is_empty());
            let unused = audit(&["--all"]).pods.remove(0).bypasses;
            // One packet of 60 bytes; a connection attempt would be repeated after a second.
            let send = "printf %032d 0 >/dev/udp/192.0.2.1/80";
            let mut command = containers.backup.command("bash");
            let sent = scene.netns.within(|| command.args(["-c", send]).status());
            assert!(sent.expect("it starts").success());
            let report = audit(&[]);
            assert!(report.is_clean(), "an exclusion: {report:#?}");
            let [used] = &report.pods[0].bypasses[..] else { panic!("one rule: {report:#?}") };
            assert_eq!((used.packets, used.source.as_str()), (Some(1), "inet detour-exclusions DETOUR_OUTPUT"));
            assert!(used.bytes.is_some_and(|bytes| bytes >= 40), "{used:?}");
            assert!(used.traffic.starts_with("socket cgroupv2 level ") && used.traffic.contains(" @excluded-all "));
            assert!(unused.iter().any(|one| one.traffic == used.traffic && one.packets == Some(0)), "{unused:#?}");
        });
    }
}
