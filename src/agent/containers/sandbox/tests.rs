//! The state of a sandbox for each order of reports and results.

use super::*;
use crate::cgroup::ContainerGroup;
use crate::cni::Error;
use crate::firewall::ContainerElement;
use crate::plugin::running::containers::{ContainerChanges, ExcludedContainers};
use crate::policy::{ContainerExclusion, ContainerScope, Policy};
use std::sync::Arc;

const CGROUP: u64 = 7;
const VAULT: &str = "vault";

fn container(id: &str, name: &str) -> NriContainer {
    NriContainer { id: id.into(), name: name.into(), running: true, pid: 99, ..NriContainer::default() }
}

/// Saved state that excludes the container `vault`.
fn saved() -> Saved {
    let excluded = ContainerExclusion { name: VAULT.into(), scope: ContainerScope::All };
    let policy = Policy { containers: [excluded].into(), ..Policy::default() };
    Saved { modified: Some(SystemTime::UNIX_EPOCH), excluded: Some(Arc::new(ExcludedContainers::of(policy))) }
}

/// A sandbox of an agent that is registered, with its metrics.
struct Scene {
    sandbox: Sandbox,
    metrics: Metrics,
    is_registered: bool,
    /// The answers that the runtime waits for.
    answers: Vec<oneshot::Receiver<()>>,
}

impl Scene {
    fn of(id: &str) -> Self {
        let (sandbox, metrics) = (Sandbox::new(id), Metrics::default());
        Self { sandbox, metrics, is_registered: true, answers: Vec::new() }
    }

    /// A sandbox that is known to exclude the container `vault`.
    fn new() -> Self {
        let mut scene = Self::of("s");
        scene.sandbox.scanned(saved().modified);
        for _ in 0..2 {
            scene.apply(&[], &[]);
        }
        assert_eq!(scene.pause(), REST_INTERVAL, "no such container runs");
        scene
    }

    /// Begins a check.
    #[track_caller]
    fn begin(&mut self) -> Check {
        self.sandbox.begin(self.is_registered).expect("a check is due")
    }

    /// Ends a check with this result.
    fn finish(&mut self, checked: Check) {
        let checked = Check { saved: Some(saved()), ..checked };
        self.sandbox.finish(checked, (self.is_registered, true), &self.metrics);
    }

    /// Makes a full check that finds these containers running, and adds elements for those in `added`.
    #[track_caller]
    fn apply(&mut self, ids: &[&str], added: &[&str]) {
        self.sandbox.wake();
        let check = self.begin();
        self.finish(applied(&check, ids, added));
    }

    /// Makes a full check that fails.
    fn fail(&mut self, why: &str) {
        self.sandbox.wake();
        let checked = unchanged(&self.begin());
        self.finish(Check { error: Some(Error::new(Code::KernelRefused, why)), ..checked });
    }

    /// Starts a container. Returns the answer that the runtime waits for.
    fn start(&mut self, id: &str, name: &str) -> oneshot::Receiver<()> {
        let (sender, answer) = oneshot::channel();
        self.sandbox.start(container(id, name), sender, &self.metrics);
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

    fn events(&mut self) -> Vec<String> {
        self.sandbox.events.drain(..).map(|event| event.message).collect()
    }

    /// Returns the results of starts that were counted.
    fn results(&self) -> Vec<String> {
        let text = self.metrics.text();
        let of_starts = text.lines().filter_map(|line| line.strip_prefix("detour_container_starts_total"));
        of_starts.map(ToOwned::to_owned).collect()
    }
}

/// A check that did not change the sets.
fn unchanged(check: &Check) -> Check {
    Check { awaited: check.awaited.clone(), exited: check.exited.clone(), ..Check::default() }
}

/// A check that changed the sets.
fn applied(check: &Check, ids: &[&str], added: &[&str]) -> Check {
    let group = |id: &str| ContainerGroup { id: CGROUP, path: format!("/pods/{id}") };
    let element = |id: &&str| ContainerElement::new(ContainerScope::All, CGROUP, VAULT, id);
    let changes = ContainerChanges {
        added: added.iter().map(|_| (VAULT.to_owned(), ContainerScope::All)).collect(),
        live: ids.iter().map(element).collect(),
        removed: 0,
    };
    let running = ids.iter().map(|id| ((*id).to_owned(), group(id), true)).collect();
    Check { running, applied: Some(changes), ..unchanged(check) }
}

fn ids(check: &Check) -> Vec<&str> {
    check.containers.iter().map(|one| one.reported.id.as_str()).collect()
}

#[test]
fn the_runtime_waits_until_the_container_has_its_element() {
    let mut scene = Scene::new();
    let mut answer = scene.start("1", VAULT);
    let check = scene.begin();
    assert!(!check.is_full && check.awaited == ["1"]);
    assert!(answer.try_recv().is_err(), "no answer before the change");
    scene.finish(applied(&check, &["1"], &["1"]));
    assert_eq!(answer.try_recv(), Ok(()));
    assert_eq!(scene.results(), ["{result=\"excluded\"} 1"]);
    assert!(scene.events().is_empty());
}

#[test]
fn a_container_that_is_not_excluded_waits_only_for_the_saved_state() {
    let mut scene = Scene::new();
    let mut answer = scene.start("1", "web");
    let check = scene.begin();
    scene.finish(unchanged(&check));
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

#[test]
fn an_answer_that_comes_too_late_is_reported_and_the_pod_is_not_waited_for_again() {
    let mut scene = Scene::new();
    drop(scene.start("1", VAULT));
    let check = scene.begin();
    let long_ago = Instant::now().checked_sub(2 * START_TIMEOUT).expect("the machine has run for a while");
    scene.sandbox.checking = Some(long_ago);
    scene.sandbox.expire(&scene.metrics);
    let why = "container vault started captured: the pod's rules were not changed within 1000 ms; the agent retries";
    assert_eq!(scene.events(), [why]);
    assert_eq!(scene.start("2", VAULT).try_recv(), Ok(()), "while the check runs");
    scene.finish(applied(&check, &["1"], &["1"]));
    assert_eq!(scene.start("3", VAULT).try_recv(), Ok(()), "after a slow check");
    scene.apply(&["1", "2", "3"], &["2"]);
    assert!(scene.start("4", VAULT).try_recv().is_err(), "after a fast check");
    assert_eq!(scene.results(), ["{result=\"error\"} 3"]);
    assert!(scene.events().is_empty(), "reported before");
}

/// The check read the state before the report, and ends after it.
#[test]
fn a_report_during_a_check_makes_another_one_due() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.apply(&["1"], &["1"]);
    scene.sandbox.wake();
    let check = scene.begin();
    scene.sandbox.removed(container("1", VAULT));
    assert!(scene.sandbox.begin(true).is_none(), "one check at a time");
    scene.finish(applied(&check, &["1"], &[]));
    let check = scene.begin();
    assert_eq!((ids(&check), &check.exited), (vec![], &vec!["1".to_owned()]));
    scene.finish(applied(&check, &[], &[]));
    assert!(scene.sandbox.containers.is_empty(), "its element is removed");
}

#[test]
fn an_ending_container_is_checked_until_it_has_no_process() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.apply(&["1"], &["1"]);
    scene.sandbox.stopped(&container("1", VAULT));
    scene.wait_for("2", "web");
    scene.sandbox.stopped(&container("2", "web"));
    let check = scene.begin();
    assert_eq!((ids(&check), check.containers[0].has_started), (vec!["1"], true));
    scene.finish(Check { exited: vec!["1".into()], ..applied(&check, &[], &[]) });
    assert!(scene.sandbox.containers.is_empty());
    // The report of a start may come after the exit.
    scene.sandbox.started(container("1", VAULT));
    assert!(scene.begin().containers[0].has_started, "it gets no element and no Event");
}

#[test]
fn an_element_that_the_kernel_did_not_remove_is_removed_later() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.apply(&["1"], &["1"]);
    scene.sandbox.removed(container("1", VAULT));
    scene.fail("refused");
    scene.sandbox.wake();
    let check = scene.begin();
    assert_eq!(check.exited, ["1"]);
    scene.finish(applied(&check, &[], &[]));
    assert!(scene.sandbox.containers.is_empty() && scene.events().is_empty());
}

#[test]
fn the_runtimes_list_replaces_all_containers() {
    let mut scene = Scene::new();
    scene.wait_for("1", VAULT);
    scene.apply(&["1"], &["1"]);
    scene.wait_for("2", VAULT);
    for (id, known) in scene.sandbox.take_containers() {
        if id == "1" {
            scene.sandbox.listed(container(&id, VAULT), Some(known));
        }
    }
    scene.sandbox.listed(container("3", VAULT), None);
    scene.sandbox.wake();
    assert_eq!(ids(&scene.begin()), ["1", "3"]);
    assert!(matches!(scene.sandbox.containers["1"].state, ContainerState::Bypassing));
}

#[test]
fn only_a_container_without_an_element_from_before_the_registration_had_started_captured() {
    let (mut scene, not_registered) = (Scene::new(), "was not registered at the container runtime when it started");
    scene.sandbox.listed(container("1", VAULT), None);
    scene.apply(&["1"], &[]);
    assert!(scene.events().is_empty(), "its element is from before the registration");
    scene.sandbox.listed(container("2", VAULT), None);
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
    new.sandbox.wake();
    let check = new.begin();
    new.finish(unchanged(&check));
    new.sandbox.report_disconnection(start, "no socket");
    assert!(new.events().is_empty(), "the elements are unknown before the first change");
    new.apply(&["1"], &["1"]);
    new.sandbox.report_disconnection(start, "no socket");
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
    assert!(!scene.sandbox.is_unused());
    scene.sandbox.scanned(None);
    let checked = Check { saved: Some(Saved::default()), ..unchanged(&scene.begin()) };
    scene.sandbox.finish(checked, (true, true), &scene.metrics);
    assert!(scene.sandbox.is_unused());
}

#[test]
fn a_change_of_saved_state_makes_a_full_check_due() {
    let mut scene = Scene::new();
    scene.sandbox.scanned(saved().modified);
    assert!(scene.sandbox.begin(true).is_none());
    scene.sandbox.scanned(Some(SystemTime::now()));
    assert!(scene.begin().is_full);
    // Also if the check of a container that is not excluded has read it.
    let mut scene = Scene::new();
    scene.sandbox.saved.modified = None;
    scene.wait_for("1", "web");
    let check = scene.begin();
    assert!(!check.is_full);
    scene.finish(unchanged(&check));
    assert!(scene.begin().is_full);
}
