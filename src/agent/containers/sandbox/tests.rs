//! The state of a sandbox for each order of reports and results.

use super::super::Task;
use super::*;
use crate::agent::nri::NriReport;
use crate::firewall::ContainerElement;
use crate::host_path::HostPath;
use crate::policy::{ContainerExclusion, ContainerScope, Policy};

const CGROUP: u64 = 7;
const VAULT: &str = "vault";

/// A container of the sandbox `s`.
fn container(id: &str, name: &str) -> NriContainer {
    let mut container = NriContainer::default();
    (container.id, container.pod_id, container.name, container.pid) = (id.into(), "s".into(), name.into(), 99);
    container
}

fn is_ended(container: &Container) -> bool {
    container.state == ContainerState::Ended
}

/// A sandbox of an agent that is registered, and what its checks use.
struct Scene {
    sandbox: Sandbox,
    tools: Tools,
    created: mpsc::Receiver<(PodRef, Event)>,
    connection: Connection,
}

impl Scene {
    /// A sandbox without a check.
    fn unchecked() -> Self {
        let (reports, created) = PodReports::queue();
        let tools = Tools { root: HostRoot::new("/"), metrics: Metrics::default(), reports, damaged: None };
        let connection = Connection::Registered("containerd 2.2".into());
        Self { sandbox: Sandbox::new("s"), tools, created, connection }
    }

    /// A sandbox that is known to exclude the container `vault`.
    fn new() -> Self {
        let mut scene = Self::unchecked();
        scene.apply(&[], &[]);
        assert_eq!(scene.pause(), REST_INTERVAL, "no such container runs");
        scene
    }

    /// Begins a check that reads saved state which excludes the container `vault`.
    fn check(&mut self) -> Check {
        let mut check = self.sandbox.begin(matches!(self.connection, Connection::Registered(_)));
        let excluded = ContainerExclusion { name: VAULT.into(), scope: ContainerScope::All };
        let policy = Policy { containers: [excluded].into(), ..Policy::default() };
        let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: None };
        let excluded = ExcludedContainers::of(pod, policy);
        check.saved = Saved { modified: Some(SystemTime::UNIX_EPOCH), excluded: Some(Arc::new(excluded)) };
        check
    }

    fn end(&mut self, check: Check) {
        self.sandbox.end(check, &self.connection, &self.tools);
    }

    /// Ends a check that finds these containers running, and adds elements for those in `added`.
    fn applied(&mut self, mut check: Check, ids: &[&str], added: &[&str]) {
        check.changes = Some(ContainerChanges {
            added: added.iter().map(|_| (VAULT.to_owned(), ContainerScope::All)).collect(),
            live: ids.iter().map(|id| ContainerElement::new(ContainerScope::All, CGROUP, VAULT, id)).collect(),
            removed: 0,
        });
        for id in ids {
            let group = ContainerGroup { id: CGROUP, path: format!("/pods/{id}") };
            let running = check.containers.get_mut(*id).expect("the runtime reported it");
            (running.has_started, running.state) = (true, ContainerState::Bypassing(group));
        }
        self.end(check);
    }

    /// Makes such a check.
    fn apply(&mut self, ids: &[&str], added: &[&str]) {
        let check = self.check();
        self.applied(check, ids, added);
    }

    /// Makes a check that fails.
    fn fail(&mut self, why: &str) {
        let mut check = self.check();
        check.failure = Some(Error::new(Code::KernelRefused, why));
        self.end(check);
    }

    /// Starts a container. Returns the answer that the runtime waits for.
    fn start(&mut self, id: &str, name: &str) -> oneshot::Receiver<()> {
        let (sender, answer) = oneshot::channel();
        self.sandbox.set_stage(Stage::Start(sender), container(id, name));
        answer
    }

    /// Starts an excluded container, which bypasses the sidecar from its start on.
    fn run(&mut self, id: &str) {
        let answer = self.start(id, VAULT);
        self.apply(&[id], &[id]);
        drop(answer);
    }

    fn set(&mut self, stage: Stage, id: &str) {
        self.sandbox.set_stage(stage, container(id, VAULT));
    }

    /// Returns the time until the next full check.
    fn pause(&self) -> Duration {
        let pause = self.sandbox.due.expect("it excludes containers").duration_since(Instant::now());
        if pause > CHECK_INTERVAL { REST_INTERVAL } else { CHECK_INTERVAL }
    }

    fn is_due(&self) -> bool {
        self.sandbox.is_due(true)
    }

    fn ids(&self) -> Vec<&str> {
        self.sandbox.containers.keys().map(String::as_str).collect()
    }

    fn events(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.created.try_recv().ok()).map(|(_, event)| event.message).collect()
    }

    /// Returns the results of starts that were counted.
    fn results(&self) -> Vec<String> {
        let text = self.tools.metrics.text();
        let of_starts = text.lines().filter_map(|line| line.strip_prefix("detour_container_starts_total"));
        of_starts.map(ToOwned::to_owned).collect()
    }
}

#[test]
fn the_runtime_waits_until_the_container_has_its_element() {
    let mut scene = Scene::new();
    let mut answer = scene.start("1", VAULT);
    assert!(scene.sandbox.is_due(false), "the limit of checks does not delay it");
    assert!(answer.try_recv().is_err(), "no answer before the change");
    scene.apply(&["1"], &["1"]);
    assert_eq!(answer.try_recv(), Ok(()));
    assert_eq!(scene.results(), ["{result=\"excluded\"} 1"]);
    assert!(scene.events().is_empty() && !scene.is_due());
    // A container that is not excluded is answered, and neither counted nor reported.
    let mut answer = scene.start("2", "web");
    scene.apply(&["1"], &[]);
    assert_eq!((answer.try_recv(), scene.results().len(), scene.events().len()), (Ok(()), 1, 0));
}

#[test]
fn a_failure_answers_and_is_reported_once_for_each_name() {
    let mut scene = Scene::new();
    for id in ["1", "2"] {
        let mut answer = scene.start(id, VAULT);
        scene.fail("refused");
        assert_eq!(answer.try_recv(), Ok(()));
    }
    assert_eq!(scene.results(), ["{result=\"error\"} 2"]);
    assert_eq!(scene.events(), ["container vault started captured: refused"]);
    assert_eq!((scene.sandbox.failure.as_str(), scene.pause()), ("refused", CHECK_INTERVAL));
    scene.apply(&["1", "2"], &["1", "2"]);
    assert!(scene.events().is_empty() && scene.sandbox.failure.is_empty());
    // A container that bypasses the sidecar from its start on makes the next capture news.
    scene.run("3");
    drop(scene.start("4", VAULT));
    scene.fail("refused");
    assert_eq!(scene.events().len(), 1);
}

#[test]
fn a_container_that_starts_during_a_check_waits_for_the_next_one() {
    for fails in [false, true] {
        let mut scene = Scene::new();
        drop(scene.start("1", VAULT));
        let mut check = scene.check();
        // Saved state may have changed since it was read.
        let mut answer = scene.start("2", VAULT);
        scene.set(Stage::Removed, "1");
        if fails {
            check.failure = Some(Error::new(Code::KernelRefused, "refused"));
            scene.end(check);
        } else {
            scene.applied(check, &["1"], &[]);
        }
        assert!(answer.try_recv().is_err() && scene.is_due() && scene.events().is_empty(), "the runtime waits");
        assert!(is_ended(&scene.sandbox.containers["1"]), "its element is removed by the next check");
        let mut check = scene.check();
        check.containers.get_mut("1").expect("it has ended").state = ContainerState::Ended;
        scene.applied(check, &["2"], &["2"]);
        assert_eq!((answer.try_recv(), scene.ids()), (Ok(()), vec!["2"]));
    }
}

fn task() -> Task {
    let mut task = Task::new(Scene::unchecked().tools, HostPath::new("/run/nri/nri.sock").expect("a path"));
    task.connection = Connection::Registered("containerd 2.2".into());
    task
}

/// Begins a check that finds no saved state.
fn begin(task: &mut Task, began: Instant) -> Check {
    let check = task.sandbox("s").begin(true);
    task.sandbox("s").checking = Some(began);
    Check { changes: Some(ContainerChanges::default()), ..check }
}

#[test]
fn a_question_waits_for_the_check() {
    let mut task = task();
    let mut check = begin(&mut task, Instant::now());
    let (sender, mut status) = oneshot::channel();
    task.answer(("s".into(), sender));
    assert!(status.try_recv().is_err());
    check.failure = Some(Error::new(Code::Io, "broken"));
    task.finish(check);
    assert_eq!(status.try_recv().expect("an answer").error, "broken");
}

#[test]
fn the_runtime_does_not_wait_for_a_sandbox_whose_checks_are_slow() {
    let mut task = task();
    let is_answered = |task: &mut Task, id: &str| {
        let (sender, mut answer) = oneshot::channel();
        task.handle(NriReport::Container(Stage::Start(sender), container(id, VAULT)));
        // The runtime does not wait for a sender that was dropped.
        answer.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    };
    let long_ago = Instant::now().checked_sub(2 * START_TIMEOUT).expect("the machine has run for a while");
    let check = begin(&mut task, long_ago);
    assert!(is_answered(&mut task, "1"), "while the check runs");
    task.finish(check);
    assert!(is_answered(&mut task, "2"), "after a slow check");
    let check = begin(&mut task, Instant::now());
    task.finish(check);
    assert!(!is_answered(&mut task, "3"), "after a fast check");
}

#[test]
fn a_start_that_waits_too_long_for_a_check_is_reported_once() {
    let mut scene = Scene::new();
    let waiting = scene.start("1", VAULT);
    scene.sandbox.report_late(&scene.tools);
    assert!(scene.events().is_empty(), "the runtime waits");
    drop((waiting, scene.start("2", "web")));
    for _ in 0..2 {
        scene.sandbox.report_late(&scene.tools);
    }
    let why = "container vault started captured: the pod's rules were not changed within 1000 ms; the agent retries";
    assert_eq!(scene.events(), [why]);
    scene.apply(&["1"], &["1"]);
    assert_eq!(scene.results(), ["{result=\"error\"} 1"]);
    assert!(scene.events().is_empty(), "reported before");
}

#[test]
fn an_ending_container_is_checked_until_it_has_no_process() {
    let mut scene = Scene::new();
    scene.run("1");
    scene.set(Stage::Stopped, "1");
    let known = &scene.sandbox.containers["1"];
    assert!(known.has_started && known.reported.pid == 0 && !is_ended(known) && scene.is_due());
    let mut check = scene.check();
    check.containers.get_mut("1").expect("it ends").state = ContainerState::Ended;
    scene.applied(check, &[], &[]);
    assert!(scene.sandbox.containers.is_empty());
    // The report of a start may come after the exit.
    scene.set(Stage::Started, "1");
    assert!(scene.is_due() && scene.sandbox.containers["1"].has_started, "it gets no element and no Event");
}

#[test]
fn an_element_that_the_kernel_did_not_remove_is_removed_later() {
    let mut scene = Scene::new();
    scene.run("1");
    scene.set(Stage::Removed, "1");
    assert!(scene.is_due());
    scene.fail("refused");
    assert!(is_ended(&scene.sandbox.containers["1"]), "its element remains");
    scene.apply(&[], &[]);
    assert!(scene.sandbox.containers.is_empty() && scene.events().is_empty());
}

#[test]
fn the_runtimes_list_replaces_all_containers() {
    let mut task = task();
    for id in ["1", "2"] {
        task.handle(NriReport::Container(Stage::Start(oneshot::channel().0), container(id, VAULT)));
    }
    let group = ContainerGroup { id: CGROUP, path: "/pods/1".into() };
    task.sandbox("s").containers.get_mut("1").expect("it starts").state = ContainerState::Bypassing(group);
    let mut other = container("4", VAULT);
    other.pod_id = "t".into();
    let running = vec![container("1", VAULT), container("3", VAULT), other];
    task.handle(NriReport::Registered { runtime: "containerd 2.3".into(), running });
    let sandbox = task.sandbox("s");
    assert!(sandbox.containers.keys().eq(["1", "3"]) && sandbox.answers.is_empty() && sandbox.is_due(true));
    assert!(matches!(sandbox.containers["1"].state, ContainerState::Bypassing(_)));
    assert!(sandbox.containers["3"].has_started && task.sandboxes["t"].containers.contains_key("4"));
}

#[test]
fn only_a_container_without_an_element_from_before_the_registration_had_started_captured() {
    let (mut scene, not_registered) = (Scene::new(), "was not registered at the container runtime when it started");
    scene.set(Stage::Started, "1");
    scene.apply(&["1"], &[]);
    assert!(scene.events().is_empty(), "its element is from before the registration");
    scene.set(Stage::Started, "2");
    scene.apply(&["1", "2"], &["2"]);
    let events = scene.events();
    assert!(events.len() == 1 && events[0].contains(not_registered), "{events:?}");
    // The element was lost, and is restored.
    scene.apply(&["1", "2"], &["2"]);
    assert!(scene.events().is_empty());
}

#[test]
fn only_a_new_pod_is_reported_while_the_agent_is_not_registered() {
    let why = "container vault started captured: the agent is not registered at the container runtime: no socket";
    // For how long the pod excludes containers, and the agent is not connected.
    let (new, old, now, long_ago) = (Duration::ZERO, 3 * GRACE, Duration::ZERO, 2 * GRACE);
    let (captured, bypassing, fails, none) = (Some([].as_slice()), Some(["1"].as_slice()), None, &[]);
    for (case, known, disconnected, cause, found, expected) in [
        ("new", new, long_ago, Some("no socket"), captured, [why].as_slice()),
        ("bypassing", new, long_ago, Some("no socket"), bypassing, none),
        ("from before the end of the connection", old, long_ago, Some("no socket"), captured, none),
        ("the runtime restarts", new, now, Some("no socket"), captured, none),
        ("a check that fails", new, long_ago, Some("no socket"), fails, none),
        ("the agent has just started", new, long_ago, None, captured, none),
    ] {
        let mut scene = Scene::unchecked();
        // For each case anew, because the grace period begins here.
        let started = Instant::now();
        let before = |time| started.checked_sub(time).expect("the machine has run for a while");
        let (why, since) = (cause.map(str::to_owned), before(disconnected));
        scene.connection = Connection::Disconnected { why, since };
        scene.sandbox.excluding_since = Some(before(known));
        if found == bypassing {
            scene.set(Stage::Started, "1");
        }
        for _ in 0..2 {
            match found {
                Some(ids) => scene.apply(ids, &[]),
                None => scene.fail("gone"),
            }
        }
        assert_eq!(scene.events(), expected, "{case}");
        assert_eq!(scene.pause(), CHECK_INTERVAL, "{case}: the runtime does not report its containers");
    }
}

#[test]
fn a_pod_is_new_again_after_it_has_excluded_no_container() {
    let mut scene = Scene::new();
    scene.fail("no rules");
    drop(scene.start("1", VAULT));
    scene.fail("no rules");
    assert_eq!(scene.events().len(), 1);
    assert!(scene.sandbox.excluding_since.is_some());
    let check = scene.sandbox.begin(true);
    scene.end(Check { saved: Saved::default(), changes: Some(ContainerChanges::default()), ..check });
    assert_eq!(scene.sandbox.excluding_since, None);
    drop(scene.start("2", VAULT));
    scene.fail("no rules");
    assert_eq!(scene.events().len(), 1, "it is reported again");
}

#[test]
fn the_expected_elements_are_known_after_a_change() {
    let mut scene = Scene::new();
    assert_eq!(scene.sandbox.expected(), Some(vec![]));
    drop(scene.start("1", VAULT));
    assert_eq!(scene.sandbox.expected(), None, "the control group is unknown");
    scene.apply(&["1"], &["1"]);
    let vault = BypassingContainer { name: VAULT.into(), id: "1".into(), cgroup: CGROUP, scope: ContainerScope::All };
    assert_eq!(scene.sandbox.expected(), Some(vec![vault]));
    scene.set(Stage::Removed, "1");
    assert_eq!(scene.sandbox.expected(), Some(vec![]));
    assert_eq!(Sandbox::new("other").expected(), None);
}

#[test]
fn each_failure_is_logged_once_and_only_if_an_excluded_container_runs() {
    let mut scene = Scene::new();
    scene.fail("gone");
    assert!(scene.sandbox.logged.is_empty());
    assert_eq!(scene.pause(), CHECK_INTERVAL, "it is repeated soon");
    // The network namespace of a deleted pod is gone as soon as its containers have ended.
    scene.run("0");
    let mut check = scene.check();
    check.containers.get_mut("0").expect("it ran").state = ContainerState::Ended;
    check.failure = Some(Error::new(Code::InvalidNetns, "gone"));
    scene.end(check);
    assert!(scene.sandbox.logged.is_empty());
    drop(scene.start("1", VAULT));
    for number in 0..50 {
        scene.fail(&format!("cause {number}"));
        scene.apply(&["1"], &[]);
    }
    assert_eq!(scene.sandbox.logged.len(), MAX_LOGGED);
}

#[test]
fn a_sandbox_without_saved_state_and_containers_is_forgotten() {
    let mut scene = Scene::new();
    drop(scene.start("1", VAULT));
    scene.set(Stage::Removed, "1");
    scene.sandbox.due = None;
    assert!(!scene.sandbox.is_unused());
    let check = scene.sandbox.begin(true);
    scene.end(Check { saved: Saved::default(), changes: Some(ContainerChanges::default()), ..check });
    assert!(scene.sandbox.is_unused());
}

#[test]
fn a_change_of_saved_state_makes_a_full_check_due() {
    let mut scene = Scene::new();
    scene.sandbox.scanned(Some(SystemTime::UNIX_EPOCH));
    assert!(!scene.is_due());
    scene.sandbox.scanned(Some(SystemTime::now()));
    assert!(scene.is_due());
}
