//! The state of a sandbox for each order of reports and results.

use super::super::{Connection, Slot, Task};
use super::*;
use crate::agent::nri::{NriPod, NriReport, START_TIMEOUT};
use crate::firewall::ContainerElement;
use crate::host_path::HostPath;
use crate::policy::{ContainerExclusion, ContainerScope, Policy};
use tokio::task::JoinSet;

const CGROUP: u64 = 7;
const VAULT: &str = "vault";

fn container(id: &str, name: &str) -> NriContainer {
    NriContainer { id: id.into(), name: name.into(), running: true, pid: 99, ..NriContainer::default() }
}

/// A sandbox of an agent that is registered, and what its checks use.
struct Scene {
    sandbox: Sandbox,
    tools: Tools,
    created: mpsc::Receiver<(PodRef, Event)>,
    is_registered: bool,
    /// The answers that the runtime waits for.
    answers: Vec<oneshot::Receiver<()>>,
}

impl Scene {
    fn of(id: &str) -> Self {
        let (reports, created) = PodReports::queue();
        let tools = Tools { root: HostRoot::new("/"), metrics: Metrics::default(), reports, damaged: None };
        let mut sandbox = Sandbox::new(id);
        sandbox.captures.pod = Some(PodRef { namespace: "shop".into(), name: "web-0".into(), uid: None });
        Self { sandbox, tools, created, is_registered: true, answers: Vec::new() }
    }

    /// A sandbox that is known to exclude the container `vault`.
    fn new() -> Self {
        let mut scene = Self::of("s");
        scene.apply(&[], &[]);
        assert_eq!(scene.pause(), REST_INTERVAL, "no such container runs");
        scene
    }

    /// Reads saved state that excludes the container `vault`.
    fn read(&mut self) {
        self.sandbox.due = None;
        let excluded = ContainerExclusion { name: VAULT.into(), scope: ContainerScope::All };
        let policy = Policy { containers: [excluded].into(), ..Policy::default() };
        self.sandbox.set_saved(Some(SystemTime::UNIX_EPOCH), Some(ExcludedContainers::of(policy)));
    }

    fn finish(&mut self, result: Result<(), Error>) {
        self.sandbox.finish(result, (false, self.is_registered), &self.tools);
    }

    /// Makes a full check that finds these containers running, and adds elements for those in `added`.
    fn apply(&mut self, ids: &[&str], added: &[&str]) {
        self.read();
        let group = |id: &str| ContainerGroup { id: CGROUP, path: format!("/pods/{id}") };
        let changes = ContainerChanges {
            added: added.iter().map(|_| (VAULT.to_owned(), ContainerScope::All)).collect(),
            live: ids.iter().map(|id| ContainerElement::new(ContainerScope::All, CGROUP, VAULT, id)).collect(),
            removed: 0,
        };
        let groups = ids.iter().map(|id| ((*id).to_owned(), group(id), true)).collect();
        self.sandbox.apply(changes, groups, &self.tools.metrics);
        self.finish(Ok(()));
    }

    /// Makes a full check that fails.
    fn fail(&mut self, why: &str) {
        self.read();
        self.finish(Err(Error::new(Code::KernelRefused, why)));
    }

    /// Starts a container. Returns the answer that the runtime waits for.
    fn start(&mut self, id: &str, name: &str) -> oneshot::Receiver<()> {
        let (sender, answer) = oneshot::channel();
        self.sandbox.start(container(id, name), Some(Answer(sender, Instant::now())), &self.tools.metrics);
        answer
    }

    /// Starts a container; the runtime waits.
    fn wait_for(&mut self, id: &str, name: &str) {
        let answer = self.start(id, name);
        self.answers.push(answer);
    }

    /// Returns the time until the next full check.
    fn pause(&self) -> Duration {
        let pause = self.sandbox.due.expect("it excludes containers").duration_since(Instant::now());
        if pause > CHECK_INTERVAL { REST_INTERVAL } else { CHECK_INTERVAL }
    }

    fn is_due(&self) -> bool {
        self.sandbox.is_due(Instant::now())
    }

    fn ids(&self) -> Vec<&str> {
        self.sandbox.containers.keys().map(String::as_str).collect()
    }

    fn events(&mut self) -> Vec<String> {
        self.sandbox.captures.create_events(&self.tools.reports);
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
    assert!(scene.sandbox.is_awaited() && !scene.is_due());
    assert!(answer.try_recv().is_err(), "no answer before the change");
    scene.apply(&["1"], &["1"]);
    assert_eq!(answer.try_recv(), Ok(()));
    assert_eq!(scene.results(), ["{result=\"excluded\"} 1"]);
    assert!(scene.events().is_empty());
}

#[test]
fn a_container_that_is_not_excluded_waits_only_for_the_saved_state() {
    let mut scene = Scene::new();
    let mut answer = scene.start("1", "web");
    scene.sandbox.update(&scene.tools, true).expect_err("it has no network namespace");
    assert_eq!(answer.try_recv(), Ok(()));
    assert!(scene.results().is_empty() && scene.events().is_empty());
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
    assert_eq!(scene.sandbox.failure, "refused");
    assert_eq!(scene.pause(), CHECK_INTERVAL);
    // A container that bypasses the sidecar from its start on makes the next capture news.
    scene.apply(&["1", "2"], &["1", "2"]);
    assert!(scene.events().is_empty() && scene.sandbox.failure.is_empty());
}

fn task() -> Task {
    let tools = Arc::new(Scene::of("s").tools);
    let nri_socket = HostPath::new("/run/nri/nri.sock").expect("a path");
    let connection = Connection::Registered("containerd 2.2".into());
    Task { tools, nri_socket, slots: [("s".into(), Slot::new("s"))].into(), connection, checks: JoinSet::new() }
}

#[test]
fn what_happens_during_a_check_changes_the_sandbox_after_it() {
    let mut task = task();
    let pod = NriPod { id: "s".into(), ..NriPod::default() };
    let slot = |task: &mut Task| task.slots.remove("s").expect("known");
    let mut place = slot(&mut task);
    let mut checked = place.sandbox.take().expect("no check runs");
    let (sender, mut answer) = oneshot::channel();
    task.slots.insert("s".into(), place);
    task.handle(NriReport::Start(pod.clone(), container("1", VAULT), sender));
    assert!(answer.try_recv().is_err() && task.slots["s"].sandbox.is_none(), "the runtime waits");
    checked.wake();
    task.finish(checked);
    let place = slot(&mut task).sandbox.expect("the check has ended");
    assert!(place.is_awaited() && !place.is_slow);
}

#[test]
fn the_runtime_does_not_wait_for_a_sandbox_whose_checks_are_slow() {
    let mut task = task();
    let pod = NriPod { id: "s".into(), ..NriPod::default() };
    let slot = task.slots.get_mut("s").expect("known");
    let checked = slot.sandbox.take().expect("no check runs");
    slot.checked = Instant::now().checked_sub(2 * START_TIMEOUT).expect("the machine has run for a while");
    let is_answered = |task: &mut Task, id: &str| {
        let (sender, mut answer) = oneshot::channel();
        task.handle(NriReport::Start(pod.clone(), container(id, VAULT), sender));
        // The runtime does not wait for a sender that was dropped.
        answer.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    };
    assert!(is_answered(&mut task, "1"), "while the check runs");
    task.finish(checked);
    assert!(is_answered(&mut task, "2"), "after a slow check");
    let slot = task.slots.get_mut("s").expect("known");
    (slot.checked, slot.sandbox) = (Instant::now(), None);
    task.finish(Sandbox::new("s"));
    assert!(!is_answered(&mut task, "3"), "after a fast check");
}

#[test]
fn a_start_that_waits_too_long_for_a_check_is_reported_once() {
    let mut scene = Scene::new();
    let mut slot = Slot::new("s");
    let long_ago = Instant::now().checked_sub(2 * START_TIMEOUT).expect("the machine has run for a while");
    scene.sandbox.start(container("1", "web"), Some(Answer(oneshot::channel().0, long_ago)), &scene.tools.metrics);
    scene.sandbox.start(container("2", VAULT), Some(Answer(oneshot::channel().0, long_ago)), &scene.tools.metrics);
    (slot.awaited, slot.excluded) = (scene.sandbox.awaited(), scene.sandbox.excluded.clone());
    // It came during the check.
    slot.awaited.push((Instant::now(), VAULT.into()));
    (slot.captures, slot.sandbox) = (scene.sandbox.captures.clone(), None);
    for _ in 0..2 {
        slot.report_late(&scene.tools.reports);
    }
    let why = "container vault started captured: the pod's rules were not changed within 1000 ms; the agent retries";
    assert_eq!(scene.events(), [why]);
    scene.sandbox.captures.add_reported(&slot.captures);
    scene.apply(&["2"], &["2"]);
    assert_eq!(scene.results(), ["{result=\"error\"} 1"]);
    assert!(scene.events().is_empty(), "reported before");
}

#[test]
fn an_ending_container_is_checked_until_it_has_no_process() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.apply(&["1"], &["1"]);
    scene.sandbox.stopped(&container("1", VAULT));
    scene.wait_for("2", "web");
    scene.sandbox.stopped(&container("2", "web"));
    assert_eq!((scene.ids(), scene.is_due(), scene.sandbox.containers["1"].has_started), (vec!["1"], true, true));
    scene.sandbox.containers.get_mut("1").expect("it ends").state = ContainerState::Ended;
    scene.apply(&[], &[]);
    assert!(scene.sandbox.containers.is_empty());
    // The report of a start may come after the exit.
    scene.sandbox.started(container("1", VAULT));
    assert!(scene.is_due() && scene.sandbox.containers["1"].has_started, "it gets no element and no Event");
}

#[test]
fn an_element_that_the_kernel_did_not_remove_is_removed_later() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.apply(&["1"], &["1"]);
    scene.sandbox.removed(container("1", VAULT));
    assert!(scene.is_due());
    scene.fail("refused");
    assert!(scene.sandbox.containers["1"].is_ended(), "its element remains");
    scene.apply(&[], &[]);
    assert!(scene.sandbox.containers.is_empty() && scene.events().is_empty());
}

#[test]
fn the_runtimes_list_replaces_all_containers() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.apply(&["1"], &["1"]);
    scene.wait_for("2", VAULT);
    scene.sandbox.listed(vec![container("1", VAULT), container("3", VAULT)]);
    assert!(scene.ids() == ["1", "3"] && scene.is_due());
    assert!(matches!(scene.sandbox.containers["1"].state, ContainerState::Bypassing(_)));
}

#[test]
fn only_a_container_without_an_element_from_before_the_registration_had_started_captured() {
    let (mut scene, not_registered) = (Scene::new(), "was not registered at the container runtime when it started");
    scene.sandbox.listed(vec![container("1", VAULT)]);
    scene.apply(&["1"], &[]);
    assert!(scene.events().is_empty(), "its element is from before the registration");
    scene.sandbox.listed(vec![container("1", VAULT), container("2", VAULT)]);
    scene.apply(&["1", "2"], &["2"]);
    let events = scene.events();
    assert!(events.len() == 1 && events[0].contains(not_registered), "{events:?}");
    // The element was lost, and is restored.
    scene.apply(&["1", "2"], &["2"]);
    assert!(scene.events().is_empty());
}

#[test]
fn new_pods_are_reported_once_while_the_agent_is_not_registered() {
    let (mut scene, start) = (Scene::new(), Instant::now());
    scene.is_registered = false;
    scene.sandbox.report_disconnection(start, "no socket");
    assert!(scene.events().is_empty(), "it has its elements from before");
    let mut new = Scene { is_registered: false, ..Scene::of("n") };
    new.read();
    new.finish(Ok(()));
    new.sandbox.report_disconnection(start, "no socket");
    assert!(new.events().is_empty(), "the elements are unknown before the first change");
    new.apply(&["1"], &["1"]);
    new.sandbox.report_disconnection(start, "no socket");
    assert!(new.events().is_empty(), "it bypasses the sidecar");
    assert_eq!(new.pause(), CHECK_INTERVAL, "the runtime does not report its containers");
    for failure in [false, true] {
        new.sandbox.captures.reported.clear();
        if failure {
            new.sandbox.bypassing = None;
            new.fail("gone");
        } else {
            new.apply(&[], &[]);
        }
        new.sandbox.report_disconnection(start, "no socket");
        new.sandbox.report_disconnection(start, "no socket");
        let why = "container vault started captured: the agent is not registered at the container runtime: no socket";
        assert_eq!(new.events(), [why]);
    }
}

#[test]
fn the_expected_elements_are_known_after_a_change() {
    let mut scene = Scene::new();
    assert_eq!(scene.sandbox.expected(), Some(vec![]));
    scene.wait_for("1", VAULT);
    assert_eq!(scene.sandbox.expected(), None, "the control group is unknown");
    scene.apply(&["1"], &["1"]);
    let vault = BypassingContainer { name: VAULT.into(), id: "1".into(), cgroup: CGROUP, scope: ContainerScope::All };
    assert_eq!(scene.sandbox.expected(), Some(vec![vault]));
    scene.sandbox.removed(container("1", VAULT));
    assert_eq!(scene.sandbox.expected(), Some(vec![]));
    assert_eq!(Sandbox::new("other").expected(), None);
}

#[test]
fn each_failure_is_logged_once_and_only_if_an_excluded_container_runs() {
    let mut scene = Scene::new();
    scene.fail("gone");
    assert!(scene.sandbox.logged.is_empty());
    scene.wait_for("1", VAULT);
    for number in 0..50 {
        scene.fail(&format!("cause {number}"));
        scene.apply(&["1"], &[]);
    }
    assert_eq!(scene.sandbox.logged.len(), MAX_LOGGED);
}

#[test]
fn a_sandbox_without_saved_state_and_containers_is_forgotten() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.sandbox.removed(container("1", VAULT));
    scene.sandbox.due = None;
    assert!(!scene.sandbox.is_unused());
    scene.sandbox.set_saved(None, None);
    scene.finish(Ok(()));
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
