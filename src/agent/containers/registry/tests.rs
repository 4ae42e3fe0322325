use super::sandbox::{LOG_INTERVAL, MAX_LOGGED, START_BUDGET};
use super::*;
use crate::cluster::agent::BypassingContainer;
use crate::policy::{ContainerExclusion, ContainerScope};

const SANDBOX: &str = "sandbox";
const CGROUP: u64 = 7;
const SOCKET: &str = "/run/nri/nri.sock";

fn pod() -> NriPod {
    NriPod { id: SANDBOX.into(), name: "web-0".into(), namespace: "shop".into(), uid: "u".into() }
}

fn container(id: &str, name: &str) -> NriContainer {
    let cgroups_path = format!("/pods/{id}");
    NriContainer {
        id: id.into(),
        pod_id: SANDBOX.into(),
        name: name.into(),
        running: true,
        cgroups_path,
        ..NriContainer::default()
    }
}

fn policy() -> Policy {
    let excluded = ContainerExclusion { name: "vault".into(), scope: ContainerScope::All };
    Policy { containers: [excluded].into(), ..Policy::default() }
}

fn registered() -> NriStatus {
    NriStatus::Registered { runtime: "containerd".into(), version: "2.2".into() }
}

/// A registry with a sandbox that excludes the container `vault`.
fn registry() -> Registry {
    let registry = Registry::new(SOCKET.into());
    registry.report(&registered());
    registry.set_policy(SANDBOX, Some(&policy()));
    registry
}

/// Records that these containers run and have elements, of which those in `added` are new.
fn apply(registry: &Registry, ids: &[&str], added: &[&str]) -> Vec<String> {
    let group = |id: &str| ContainerGroup { id: CGROUP, path: format!("/pods/{id}") };
    let running = ids.iter().map(|id| ((*id).to_owned(), group(id), true)).collect();
    let added: Vec<String> = added.iter().map(|name| (*name).to_owned()).collect();
    let bypassing = added.iter().cloned().collect();
    registry.applied(SANDBOX, &Applied { running, added, bypassing, ..Applied::default() })
}

fn names(registry: &Registry) -> Vec<String> {
    let observed = registry.observe(SANDBOX).expect("it excludes containers");
    observed.named.into_iter().map(|container| container.id).collect()
}

#[test]
fn only_containers_that_the_policy_names_are_observed() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    registry.add(&pod(), &container("2", "web"), true);
    assert_eq!(names(&registry), ["1"]);
    assert_eq!(registry.excludes(SANDBOX, "web"), Some(false));
    assert_eq!(registry.excludes("other", "vault"), None);
}

/// The check read the registry before the report, and ends after it.
#[test]
fn a_report_during_a_check_makes_the_sandbox_due_again() {
    let registry = registry();
    let vault = container("1", "vault");
    registry.add(&pod(), &vault, true);
    let is_due = || registry.wait(Duration::ZERO).is_some_and(|due| due == [SANDBOX]);
    registry.turn(SANDBOX).expect("a sandbox");
    registry.removed(&pod(), &vault);
    apply(&registry, &["1"], &["vault"]);
    assert!(is_due());
    registry.turn(SANDBOX).expect("a sandbox");
    apply(&registry, &[], &[]);
    assert!(!is_due());
}

#[test]
fn two_pods_with_containers_of_one_name_are_separate() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    let (other, same_name) = (NriPod { id: "other".into(), ..pod() }, container("2", "vault"));
    registry.add(&other, &NriContainer { pod_id: "other".into(), ..same_name }, true);
    assert_eq!(names(&registry), ["1"]);
    assert!(registry.observe("other").is_none());
}

#[test]
fn an_ending_container_is_observed_until_it_has_no_process() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    registry.stopped(&pod(), &container("1", "vault"));
    let observed = registry.observe(SANDBOX).expect("it excludes containers");
    assert!(observed.named[0].is_ending);
    registry.mark_exited(SANDBOX, &["1".to_owned()]);
    let observed = registry.observe(SANDBOX).expect("it excludes containers");
    assert_eq!((observed.named, observed.exited), (Vec::new(), vec!["1".to_owned()]));
    registry.applied(SANDBOX, &Applied { exited: vec!["1".to_owned()], ..Applied::default() });
    assert!(registry.observe(SANDBOX).expect("it excludes containers").exited.is_empty());
}

#[test]
fn the_removal_of_a_container_ends_its_exclusion_whatever_its_control_group_contains() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    apply(&registry, &["1"], &["vault"]);
    registry.removed(&pod(), &container("1", "vault"));
    let observed = registry.observe(SANDBOX).expect("it excludes containers");
    assert_eq!((observed.named, observed.exited), (Vec::new(), vec!["1".to_owned()]));
    registry.removed(&pod(), &container("2", "web"));
    assert_eq!(registry.observe(SANDBOX).expect("it excludes containers").exited, ["1"]);
}

#[test]
fn the_report_of_a_start_may_come_after_the_exit() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    apply(&registry, &["1"], &["vault"]);
    registry.stopped(&pod(), &container("1", "vault"));
    registry.mark_exited(SANDBOX, &["1".to_owned()]);
    registry.add(&pod(), &container("1", "vault"), false);
    let observed = registry.observe(SANDBOX).expect("it excludes containers");
    assert!(observed.named[0].has_started, "its control group has no process, so it gets no element and no Event");
}

#[test]
fn the_runtimes_list_replaces_all_containers() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    apply(&registry, &["1"], &["vault"]);
    registry.add(&pod(), &container("2", "vault"), true);
    let created = NriContainer { running: false, ..container("4", "vault") };
    registry.synchronize(&[pod()], vec![container("1", "vault"), container("3", "vault"), created]);
    assert_eq!(names(&registry), ["1", "3"]);
    assert!(registry.is_bypassing(SANDBOX, "1"));
}

#[test]
fn a_container_that_ran_before_the_registration_and_gets_an_element_had_started_captured() {
    let registry = registry();
    registry.synchronize(&[pod()], vec![container("1", "vault")]);
    assert_eq!(apply(&registry, &["1"], &["vault"]), ["vault"]);
    // The element was lost, and is restored.
    assert!(apply(&registry, &["1"], &["vault"]).is_empty());
}

#[test]
fn a_container_with_an_element_from_before_the_registration_had_not_started_captured() {
    let registry = registry();
    registry.synchronize(&[pod()], vec![container("1", "vault")]);
    assert!(apply(&registry, &["1"], &[]).is_empty());
    assert!(registry.is_bypassing(SANDBOX, "1"));
}

#[test]
fn a_container_that_was_excluded_at_its_start_is_not_reported() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    assert!(apply(&registry, &["1"], &["vault"]).is_empty());
}

#[test]
fn the_pause_depends_on_what_the_sandbox_waits_for() {
    let pause = |registry: &Registry| {
        let state = registry.state();
        let sandbox = &state.sandboxes[SANDBOX];
        let is_complete = matches!(state.connection, Connection::Registered(_));
        sandbox.excluding.as_ref().expect("it excludes containers").pause(&sandbox.containers, is_complete)
    };
    let sandbox = registry();
    assert_eq!(pause(&sandbox), REST_INTERVAL, "no such container runs");
    sandbox.add(&pod(), &container("1", "vault"), true);
    assert_eq!(pause(&sandbox), CHECK_INTERVAL);
    let unknown = Registry::new(SOCKET.into());
    unknown.set_policy(SANDBOX, Some(&policy()));
    assert_eq!(pause(&unknown), CHECK_INTERVAL, "the runtime does not report its containers");
}

#[test]
fn the_status_lists_the_elements_only_while_registered() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    assert_eq!(registry.status(SANDBOX).expected, None, "the control group is unknown");
    apply(&registry, &["1"], &["vault"]);
    let status = registry.status(SANDBOX);
    let vault = BypassingContainer { name: "vault".into(), id: "1".into(), cgroup: CGROUP, scope: ContainerScope::All };
    assert_eq!((status.runtime.as_deref(), status.expected), (Some("containerd 2.2"), Some(vec![vault])));
    assert_eq!(registry.status("other").expected, None);
    assert_eq!(registry.status("other").socket.as_deref(), Some(SOCKET));
    registry.failed(SANDBOX, "refused");
    assert_eq!(registry.status(SANDBOX).error, "refused");
    registry.report(&NriStatus::Disconnected("no socket".into()));
    let status = registry.status(SANDBOX);
    assert_eq!((status.runtime, &*status.error, status.expected), (None, "no socket", None));
}

#[test]
fn a_failure_is_logged_once_and_only_if_an_excluded_container_runs() {
    let registry = registry();
    assert!(!registry.failed(SANDBOX, "gone"));
    registry.add(&pod(), &container("1", "vault"), true);
    assert!(registry.failed(SANDBOX, "refused"));
    assert!(!registry.failed(SANDBOX, "refused"));
    // Another process lets changes fail and succeed in turn.
    apply(&registry, &["1"], &["vault"]);
    assert!(!registry.failed(SANDBOX, "refused"));
    assert!(registry.failed(SANDBOX, "another cause"));
    assert!(!registry.failed(SANDBOX, "refused"));
}

#[test]
fn a_failure_is_logged_again_after_the_interval_and_the_number_of_causes_is_limited() {
    let mut excluding = Excluding::new(policy());
    let now = Instant::now();
    let logged = (0..50).filter(|number| excluding.is_new_failure(&format!("cause {number}"), now));
    assert_eq!(logged.count(), MAX_LOGGED);
    assert!(!excluding.is_new_failure("cause 0", now + LOG_INTERVAL / 2));
    assert!(excluding.is_new_failure("cause 0", now + LOG_INTERVAL));
}

#[test]
fn new_pods_are_reported_once_while_the_agent_is_not_registered() {
    let registry = Registry::new(SOCKET.into());
    let long_ago = Instant::now().checked_sub(2 * GRACE).expect("the machine has run for a while");
    let why = "no socket".to_owned();
    registry.state().connection = Connection::Disconnected { why: why.clone(), since: long_ago };
    registry.set_policy(SANDBOX, Some(&policy()));
    let capture = Capture { sandbox_id: SANDBOX.into(), container: "vault".into(), why: why.clone() };
    assert_eq!(registry.captured_by_disconnection(), [], "the elements are unknown before the first check");
    apply(&registry, &[], &["vault"]);
    assert_eq!(registry.captured_by_disconnection(), [], "it bypasses the sidecar");
    apply(&registry, &[], &[]);
    assert_eq!(registry.captured_by_disconnection(), [capture]);
    assert_eq!(registry.captured_by_disconnection(), []);
    registry.report(&registered());
    assert!(registry.captured_by_disconnection().is_empty());
    // Pods from before the disconnection have their elements.
    registry.state().connection = Connection::Disconnected { why, since: Instant::now() };
    assert!(registry.captured_by_disconnection().is_empty(), "a runtime may restart");
}

#[test]
fn while_the_agent_is_not_registered_a_failed_check_is_reported() {
    let long_ago = Instant::now().checked_sub(2 * GRACE).expect("the machine has run for a while");
    let registry = Registry::new(SOCKET.into());
    registry.state().connection = Connection::Disconnected { why: String::new(), since: long_ago };
    registry.set_policy(SANDBOX, Some(&policy()));
    assert!(!registry.failed(SANDBOX, "gone"));
    assert_eq!(registry.captured_by_disconnection().len(), 1);
}

#[test]
fn a_sandbox_without_saved_state_and_containers_is_forgotten() {
    let registry = registry();
    registry.add(&pod(), &container("1", "vault"), true);
    registry.set_policy(SANDBOX, None);
    assert!(registry.observe(SANDBOX).is_none());
    registry.stopped(&pod(), &container("1", "vault"));
    assert!(registry.state().sandboxes.is_empty());
}

#[test]
fn waiting_ends_when_a_container_starts_and_when_the_agent_ends() {
    let registry = registry();
    apply(&registry, &[], &[]);
    assert_eq!(registry.wait(Duration::ZERO), Some(Vec::new()));
    registry.add(&pod(), &container("1", "vault"), true);
    assert_eq!(registry.wait(Duration::from_secs(60)), Some(vec![SANDBOX.to_owned()]));
    registry.end();
    assert_eq!(registry.wait(Duration::from_secs(60)), None);
}

#[test]
fn a_sandbox_that_made_the_runtime_wait_gets_less_time() {
    let registry = registry();
    assert_eq!(registry.start_timeout(SANDBOX), START_BUDGET);
    registry.waited(SANDBOX, Duration::from_millis(300));
    assert_eq!(registry.start_timeout(SANDBOX), START_BUDGET - Duration::from_millis(300));
    registry.waited(SANDBOX, START_BUDGET);
    assert_eq!(registry.start_timeout(SANDBOX), START_TIMEOUT);
    assert_eq!(registry.start_timeout("other"), START_TIMEOUT);
}
