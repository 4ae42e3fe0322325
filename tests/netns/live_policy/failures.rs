//! Changes that fail or are interrupted: the pod has all of its old rules or all of its new ones.

use super::*;
use crate::world::Ruleset;
use detour_cni::cni::Code;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::Duration;

const STATE: &str = "/run/detour/attachments";
/// How many processes are killed while they apply a policy, in each dialect.
const KILLS: u32 = 12;
/// The system calls that fail, with their errors.
const FAULTS: [(&str, &str); 7] = [
    ("flock", "ENOLCK"),
    ("recvfrom", "ENOBUFS"),
    ("renameat2", "EIO"),
    ("sendto", "ENOMEM"),
    ("setns", "EPERM"),
    ("unlink", "EIO"),
    ("write", "ENOSPC"),
];
/// How many calls of each kind fail, one after another.
const FAULTS_OF_EACH: u32 = 3;
/// The variable with the container of a process that is killed.
const CONTAINER: &str = "LIVE_POLICY_CONTAINER";

/// The pod's rules and its saved state.
#[derive(Debug, PartialEq)]
struct Snapshot {
    rules: (Vec<Ruleset>, Vec<String>),
    records: BTreeMap<PathBuf, Vec<u8>>,
}

fn rules(world: &World) -> (Vec<Ruleset>, Vec<String>) {
    (world.families().iter().map(|family| world.iptables_save(*family)).collect(), world.native_tables())
}

fn snapshot(world: &World) -> Snapshot {
    let directory = Path::new(STATE).join(&world.name);
    let paths = std::fs::read_dir(directory).expect("saved state").map(|entry| entry.expect("readable").path());
    // A temporary file that can't be removed is ignored, and removed with the last record.
    let is_record = |path: &PathBuf| path.extension().is_some() && !path.to_string_lossy().contains("/.");
    let records = paths.filter(is_record).map(|path| (path.clone(), std::fs::read(path).expect("readable"))).collect();
    Snapshot { rules: rules(world), records }
}

/// Returns the path of the record of an attachment.
fn record(world: &World) -> PathBuf {
    Path::new(STATE).join(&world.name).join("istio-cni@net1.json")
}

/// Whether a change was not completed.
fn is_interrupted(world: &World) -> bool {
    snapshot(world).records.values().any(|record| !String::from_utf8_lossy(record).contains("\"before\":null"))
}

in_both_dialects! {
    fn a_killed_process_leaves_the_old_or_the_new_rules_and_the_next_one_completes(dialect) {
        let world = World::new(Families::Both);
        let states = [false, true].map(|excludes| written(&world, Dns::Captured, &annotations(excludes)));
        let configuration = dialect.of(exclude_1337(&states[0]));
        world.add(&configuration);
        world.call("ADD", &configuration).interface("net2").run().done();
        let mut usual = Duration::ZERO;
        let expected = [1, 0].map(|index| {
            let start = Instant::now();
            follow(&world, &states[index]).expect("applied");
            usual = start.elapsed();
            rules(&world)
        });
        let (mut old, mut interrupted) = (0, 0);
        for kill in 0..KILLS {
            let mut child = applying(Command::new(this_program()), &world, &states[1])
                .stdout(Stdio::piped())
                .spawn()
                .expect("it starts");
            let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().expect("it is piped")));
            assert!(lines.any(|line| line.expect("text").contains("ready")), "it applies the policy");
            let deadline = Instant::now() + usual * kill * 3 / 2 / KILLS;
            while Instant::now() < deadline {
                std::hint::spin_loop();
            }
            child.kill().expect("it can be killed");
            child.wait().expect("it ends");
            let found = rules(&world);
            assert!(expected.contains(&found), "after kill {kill}: {found:?}");
            old += u32::from(found == expected[1]);
            interrupted += u32::from(is_interrupted(&world));
            // What is in the kernel is known: the next change leaves nothing of it.
            let next = usize::try_from(kill).expect("small") % 2;
            follow(&world, &states[next]).expect("completed");
            assert_eq!(rules(&world), expected[1 - next], "after kill {kill}");
            assert!(!is_interrupted(&world));
            follow(&world, &states[0]).expect("applied");
        }
        println!("{old} of {KILLS} processes left the old rules, {interrupted} an interrupted change");
    }

    fn a_system_call_that_fails_leaves_the_old_or_the_new_rules(dialect) {
        let world = World::new(Families::Both);
        let states = [false, true].map(|excludes| written(&world, Dns::Captured, &annotations(excludes)));
        let configuration = dialect.of(exclude_1337(&states[0]));
        world.add(&configuration);
        world.call("ADD", &configuration).interface("net2").run().done();
        let new = {
            follow(&world, &states[1]).expect("applied");
            rules(&world)
        };
        follow(&world, &states[0]).expect("applied");
        let before = snapshot(&world);
        let mut failed = 0;
        for (fault, number) in FAULTS.iter().flat_map(|fault| (1..=FAULTS_OF_EACH).map(move |number| (fault, number))) {
            let mut strace = Command::new("strace");
            let inject = format!("inject={}:error={}:when={number}", fault.0, fault.1);
            strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &inject]).arg(this_program());
            let output = applying(strace, &world, &states[1]).output().expect("strace is needed");
            let left = snapshot(&world);
            let is_new = left.rules == new;
            assert!(is_new || left.rules == before.rules, "{inject}: {left:#?}");
            if !output.status.success() && !is_new && !is_interrupted(&world) {
                failed += 1;
                assert_eq!(left.records, before.records, "{inject}");
            }
            follow(&world, &states[1]).expect("completed");
            assert_eq!(rules(&world), new, "{inject}");
            follow(&world, &states[0]).expect("applied");
            assert_eq!(snapshot(&world), before, "{inject}");
        }
        assert!(failed >= FAULTS.len(), "{failed}");
    }
}

fn this_program() -> PathBuf {
    std::env::current_exe().expect("this program")
}

/// Completes a command that runs this program, so that it applies the policy of the manifests.
fn applying(mut command: Command, world: &World, manifests: &Path) -> Command {
    command
        .args(["--exact", "live_policy::failures::a_process_that_is_killed", "--ignored", "--nocapture"])
        .env(CONTAINER, format!("{}:{}", world.name, manifests.display()))
        .stdin(Stdio::null());
    command
}

/// Runs in a process of its own, which is killed.
#[test]
#[ignore = "a part of the test above"]
fn a_process_that_is_killed() {
    let Ok(target) = std::env::var(CONTAINER) else { return };
    let (container, manifests) = target.split_once(':').expect("a container and a directory");
    let facts = facts(Path::new(manifests));
    println!("ready");
    RepeatedAdd { root: Path::new(NODE), facts: Some(&facts), installed: &[], restores: true, found: None }
        .run(container)
        .expect("applied");
}

#[test]
fn a_deleted_pod_gets_neither_rules_nor_saved_state_again() {
    let world = World::new(Families::Both);
    let states = [false, true].map(|excludes| written(&world, Dns::Left, &annotations(excludes)));
    let configuration = exclude_1337(&states[0]);
    world.add(&configuration);
    world.call("DEL", &configuration).run().done();
    let before = rules(&world);
    let error = follow(&world, &states[1]).expect_err("the pod is gone");
    assert_eq!(error.code, Code::NoAdd, "{error}");
    assert!(!Path::new(STATE).join(&world.name).exists());
    assert_eq!(rules(&world), before);
}

#[test]
fn the_network_namespace_of_another_pod_is_not_changed() {
    let world = World::new(Families::Both);
    let states = [false, true].map(|excludes| written(&world, Dns::Left, &annotations(excludes)));
    world.add(&exclude_1337(&states[0]));
    let text = std::fs::read_to_string(record(&world)).expect("readable");
    let mut changed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    changed["netns_id"]["inode"] = json!(changed["netns_id"]["inode"].as_u64().expect("a number") + 1);
    std::fs::write(record(&world), changed.to_string()).expect("writable");
    let before = snapshot(&world);
    let error = follow(&world, &states[1]).expect_err("another network namespace");
    assert!(error.code == Code::InvalidNetns && error.msg.contains("replaced"), "{error}");
    assert_eq!(snapshot(&world), before);
    std::fs::write(record(&world), text).expect("writable");
    follow(&world, &states[1]).expect("applied");
    new_traffic_follows(&world, true);
}

/// Each call waits for the others in the network namespace.
#[test]
fn concurrent_calls_end_in_the_state_of_one_of_them() {
    let world = World::new(Families::Both);
    let states = [false, true].map(|excludes| written(&world, Dns::Left, &annotations(excludes)));
    let configuration = exclude_1337(&states[0]);
    world.add(&configuration);
    let expected = [1, 0].map(|index| {
        follow(&world, &states[index]).expect("applied");
        rules(&world)
    });
    let facts = states.each_ref().map(|state| facts(state));
    let name = &world.name;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let facts = &facts;
            scope.spawn(move || {
                for n in 0..10 {
                    // A change waits 200 ms for the lock, and the agent retries it.
                    let facts = Some(&facts[(n + thread) % 2]);
                    let add = RepeatedAdd { root: Path::new(NODE), facts, installed: &[], restores: true, found: None };
                    let ended = std::iter::repeat_with(|| add.run(name).err().map(|error| error.code));
                    let code = { ended }.find(|code| *code != Some(Code::TryAgain));
                    assert_eq!(code, Some(None));
                }
            });
        }
        (0..10).for_each(|_| world.add(&configuration));
    });
    assert!(expected.contains(&rules(&world)));
    assert!(!is_interrupted(&world));
}
