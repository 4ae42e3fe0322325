//! The state of a sandbox for each order of reports and results.

use super::super::{Connection, Task};
use super::*;
use crate::agent::nri::{NriPod, NriReport};
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
    tools: Arc<Tools>,
    created: mpsc::Receiver<(PodRef, Event)>,
    is_registered: bool,
    /// The answers that the runtime waits for.
    answers: Vec<oneshot::Receiver<()>>,
}

impl Scene {
    fn of(id: &str) -> Self {
        let (reports, created) = PodReports::queue();
        let tools = Tools { root: HostRoot::new("/"), metrics: Metrics::default(), reports, damaged: None };
        let (mut sandbox, tools) = (Sandbox::new(id), Arc::new(tools));
        sandbox.pod = Some(PodRef { namespace: "shop".into(), name: "web-0".into(), uid: None });
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
        drop(self.sandbox.begin(Arc::clone(&self.tools)));
        let excluded = ContainerExclusion { name: VAULT.into(), scope: ContainerScope::All };
        let policy = Policy { containers: [excluded].into(), ..Policy::default() };
        let excluded = Some(ExcludedContainers::of(policy));
        let saved = Saved { modified: Some(SystemTime::UNIX_EPOCH), excluded, pod: None };
        assert!(self.proceed(Done::Read(Ok(Some(saved)))).is_some(), "there is another step");
    }

    fn proceed(&mut self, done: Done) -> Option<Step> {
        self.sandbox.proceed(done, self.is_registered, &self.tools)
    }

    /// Ends a check that found these containers.
    fn update(&mut self, containers: Containers, result: Result<ContainerChanges, Error>) {
        assert!(self.proceed(Done::Updated(containers, result.map(|changes| (changes, None)))).is_none());
    }

    /// Makes a check that finds these containers running, and adds elements for those in `added`.
    fn apply(&mut self, ids: &[&str], added: &[&str]) {
        self.read();
        let changes = ContainerChanges {
            added: added.iter().map(|_| (VAULT.to_owned(), ContainerScope::All)).collect(),
            live: ids.iter().map(|id| ContainerElement::new(ContainerScope::All, CGROUP, VAULT, id)).collect(),
            removed: 0,
        };
        let mut found = self.sandbox.containers.clone();
        for id in ids {
            let group = ContainerGroup { id: CGROUP, path: format!("/pods/{id}") };
            let new =
                || Container { reported: container(id, VAULT), has_started: true, state: ContainerState::Starting };
            let running = found.entry((*id).to_owned()).or_insert_with(new);
            (running.has_started, running.state) = (true, ContainerState::Bypassing(group));
        }
        self.update(found, Ok(changes));
    }

    /// Makes a check that fails.
    fn fail(&mut self, why: &str) {
        self.read();
        self.update(self.sandbox.containers.clone(), Err(Error::new(Code::KernelRefused, why)));
    }

    /// Starts a container. Returns the answer that the runtime waits for.
    fn start(&mut self, id: &str, name: &str) -> oneshot::Receiver<()> {
        let (sender, answer) = oneshot::channel();
        self.sandbox.start(container(id, name), sender, &self.tools);
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
    scene.read();
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
    let (tools, nri_socket) = (Scene::of("s").tools, HostPath::new("/run/nri/nri.sock").expect("a path"));
    let connection = Connection::Registered("containerd 2.2".into());
    Task { tools, nri_socket, sandboxes: BTreeMap::new(), connection, checks: JoinSet::new() }
}

fn pod() -> NriPod {
    NriPod { id: "s".into(), ..NriPod::default() }
}

#[test]
fn a_container_that_starts_during_a_check_waits_for_the_next_one() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.read();
    let checked = scene.sandbox.containers.clone();
    let mut answer = scene.start("2", VAULT);
    scene.sandbox.removed(container("1", VAULT));
    let mut found = checked.clone();
    found.get_mut("1").expect("it was running").state =
        ContainerState::Bypassing(ContainerGroup { id: CGROUP, path: "/pods/1".into() });
    scene.update(found, Ok(ContainerChanges::default()));
    assert!(answer.try_recv().is_err() && scene.sandbox.is_awaited() && scene.is_due(), "the runtime waits");
    assert!(scene.sandbox.containers["1"].is_ended(), "its element is removed by the next check");
    scene.update(checked, Err(Error::new(Code::KernelRefused, "refused")));
    assert!(answer.try_recv().is_err() && scene.events().is_empty(), "the check did not know the container");
    scene.apply(&["2"], &["2"]);
    assert_eq!((answer.try_recv(), scene.ids()), (Ok(()), vec!["2"]));
}

#[test]
fn a_container_that_starts_while_saved_state_is_read_waits_for_the_next_check() {
    let mut scene = Scene::of("s");
    drop(scene.sandbox.begin(Arc::clone(&scene.tools)));
    let mut answer = scene.start("1", VAULT);
    let saved = Saved { modified: Some(SystemTime::UNIX_EPOCH), excluded: None, pod: None };
    assert!(scene.proceed(Done::Read(Ok(Some(saved)))).is_none());
    assert!(answer.try_recv().is_err() && scene.sandbox.is_awaited(), "saved state may have changed since");
    scene.apply(&["1"], &["1"]);
    assert_eq!(answer.try_recv(), Ok(()));
}

#[test]
fn a_question_waits_for_the_check() {
    let mut task = task();
    let tools = Arc::clone(&task.tools);
    drop(task.of_pod(pod()).begin(tools));
    let (sender, mut status) = oneshot::channel();
    task.answer(("s".into(), sender));
    assert!(status.try_recv().is_err());
    task.finish("s".into(), Done::Read(Err(Error::new(Code::Io, "broken"))));
    let status = status.try_recv().expect("an answer");
    assert_eq!(status.error, "can't read which containers are excluded: broken");
}

#[test]
fn the_runtime_does_not_wait_for_a_sandbox_whose_checks_are_slow() {
    let mut task = task();
    let is_answered = |task: &mut Task, id: &str| {
        let (sender, mut answer) = oneshot::channel();
        task.handle(NriReport::Start(pod(), container(id, VAULT), sender));
        // The runtime does not wait for a sender that was dropped.
        answer.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    };
    let check = |task: &mut Task, began: Instant| {
        let tools = Arc::clone(&task.tools);
        drop(task.of_pod(pod()).begin(tools));
        task.of_pod(pod()).checking = Some(began);
    };
    check(&mut task, Instant::now().checked_sub(2 * START_TIMEOUT).expect("the machine has run for a while"));
    assert!(is_answered(&mut task, "1"), "while the check runs");
    task.finish("s".into(), Done::Read(Ok(None)));
    assert!(is_answered(&mut task, "2"), "after a slow check");
    check(&mut task, Instant::now());
    task.finish("s".into(), Done::Read(Ok(None)));
    assert!(!is_answered(&mut task, "3"), "after a fast check");
}

#[test]
fn a_start_that_waits_too_long_for_a_check_is_reported_once() {
    let mut scene = Scene::new();
    let long_ago = Instant::now().checked_sub(2 * START_TIMEOUT).expect("the machine has run for a while");
    for (id, name) in [("1", "web"), ("2", VAULT)] {
        drop(scene.start(id, name));
        scene.sandbox.answers.get_mut(id).expect("the runtime waits").1 = long_ago;
    }
    for _ in 0..2 {
        scene.sandbox.report_late(&scene.tools);
    }
    let why = "container vault started captured: the pod's rules were not changed within 1000 ms; the agent retries";
    assert_eq!(scene.events(), [why]);
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
    scene.sandbox.report_disconnection(start, "no socket", &scene.tools);
    assert!(scene.events().is_empty(), "it has its elements from before");
    let mut new = Scene { is_registered: false, ..Scene::of("n") };
    new.read();
    new.sandbox.report_disconnection(start, "no socket", &new.tools);
    assert!(new.events().is_empty(), "the elements are unknown before the first change");
    new.apply(&["1"], &["1"]);
    new.sandbox.report_disconnection(start, "no socket", &new.tools);
    assert!(new.events().is_empty(), "it bypasses the sidecar");
    assert_eq!(new.pause(), CHECK_INTERVAL, "the runtime does not report its containers");
    for failure in [false, true] {
        new.sandbox.reported.clear();
        if failure {
            new.sandbox.bypassing = None;
            new.fail("gone");
        } else {
            new.apply(&[], &[]);
        }
        new.sandbox.report_disconnection(start, "no socket", &new.tools);
        new.sandbox.report_disconnection(start, "no socket", &new.tools);
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
    assert!(scene.proceed(Done::Read(Ok(Some(Saved::default())))).is_none());
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
