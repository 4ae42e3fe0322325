//! Excluded containers of a running pod: adds a container's control group to the sets in the pod's network namespace
//! when the container starts, and removes it when the bypass ends. The node's agent calls it.

use crate::cni::{Code, Error, is_identifier};
use crate::firewall::{ContainerElement, ContainerLabel, change_container_elements, required_container_elements};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::NetnsId;
use crate::plugin::netns_state;
use crate::plugin::record::RecordPart;
use crate::pod::PodRef;
use crate::policy::{ContainerScope, Policy};
use crate::state::{ROOT, Store};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A running container, or one that the runtime is about to start.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningContainer {
    /// Its name in the pod.
    pub name: String,
    /// Its ID.
    pub id: String,
    /// The ID of its control group.
    pub cgroup: u64,
}

/// The excluded containers of one pod sandbox, from saved state.
#[derive(Debug)]
pub struct ExcludedContainers {
    /// The path of its network namespace; `None` if no record has one.
    netns: Option<(PathBuf, NetnsId)>,
    /// The pod; `None` if no record names it.
    pub pod: Option<PodRef>,
    /// A policy that has only the excluded containers of all attachments.
    pub policy: Policy,
}

/// What is known about the pod's containers.
#[derive(Debug, Clone, Copy, Default)]
pub struct ObservedContainers<'a> {
    /// Containers that run. Excluded ones get an element.
    pub running: &'a [RunningContainer],
    /// The IDs of containers that have exited. Their elements are removed.
    pub exited: &'a [String],
    /// Whether `running` lists all running containers of the pod. Then all other elements are removed.
    pub complete: bool,
}

/// The changes of one call, by name of the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerChanges {
    /// The containers whose traffic now bypasses the sidecar.
    pub added: Vec<(String, ContainerScope)>,
    /// The number of removed elements of containers that have exited.
    pub removed: usize,
    /// The elements after the call.
    pub live: Vec<ContainerElement>,
}

impl ExcludedContainers {
    /// Reads the excluded containers of a pod sandbox (`CNI_CONTAINERID`); `None` if its attachments exclude no
    /// container.
    ///
    /// # Errors
    /// [`Code::State`] and [`Code::Io`]: the saved state can't be read.
    pub fn find(sandbox_id: &str) -> Result<Option<Self>, Error> {
        Self::find_in(&Store::new(ROOT), sandbox_id)
    }

    fn find_in(store: &Store, sandbox_id: &str) -> Result<Option<Self>, Error> {
        // IDs of attachments are identifiers, and the ID becomes part of a path.
        if !is_identifier(sandbox_id) {
            return Ok(None);
        }
        let (shared, parts, pod) = RecordPart::read_all(store, sandbox_id)?;
        let containers: BTreeSet<_> = parts.into_iter().flat_map(|part| part.policy.containers).collect();
        let policy = Policy { containers, ..Policy::default() };
        Ok((!policy.containers.is_empty()).then(|| Self { netns: shared.location(), pod, policy }))
    }

    /// Makes the sets match the observed containers. Takes no lock: it never waits for a call of the plugin.
    ///
    /// # Errors
    /// [`Code::InvalidNetns`]: the network namespace is gone or can't be opened. It can't be entered, or the kernel
    /// refuses the change. [`Code::Drift`]: a set is missing that a bypass which has not ended needs.
    pub fn reconcile(&self, root: &HostRoot, observed: ObservedContainers<'_>) -> Result<ContainerChanges, Error> {
        let netns = match &self.netns {
            Some((path, id)) => netns_state::open_recorded(root, path, *id)?.ok_or_else(|| gone(root, path))?,
            None => return Err(gone(root, Path::new("(unknown)"))),
        };
        netns.enter_without_lock(|| {
            let required = self.policy.containers.iter().map(|one| one.scope).collect();
            let mut live = required_container_elements(&required)?;
            let plan = ElementPlan::new(&self.policy, &live, observed);
            if !(plan.remove.is_empty() && plan.add.is_empty()) {
                change_container_elements(&plan.remove, &plan.add)?;
            }
            let is_replaced = |element: &ContainerElement| plan.add.iter().any(|new| new.has_key_of(element));
            live.retain(|element| !plan.remove.contains(element) && !is_replaced(element));
            live.extend(plan.add);
            Ok(ContainerChanges { live, ..plan.changes })
        })
    }
}

#[cfg(test)]
impl ExcludedContainers {
    /// Returns the excluded containers of this policy and pod, without a network namespace.
    pub(crate) const fn of(pod: PodRef, policy: Policy) -> Self {
        Self { netns: None, pod: Some(pod), policy }
    }
}

/// Returns an error without the pod sandbox, which the callers name. The directory of a runtime with other settings may
/// not be mounted in an agent's container.
fn gone(root: &HostRoot, netns: &Path) -> Error {
    let directory = netns.parent().and_then(HostPath::new).filter(|_| root.mount() != Path::new("/"));
    let is_hidden = |path: &HostPath| !root.reach(path).is_ok_and(|path| path.is_dir());
    let why = directory.filter(is_hidden).map_or_else(
        || {
            "gone, or not visible in this mount namespace; mount it with the propagation HostToContainer, or delete the \
             pod if it still runs"
                .to_owned()
        },
        |directory| format!("{directory} is not mounted here; set the chart's value cniNetnsDir to this directory"),
    );
    Error::new(Code::InvalidNetns, format!("network namespace {}: {why}", netns.display()))
}

/// The changes of the sets in one transaction.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::plugin) struct ElementPlan {
    pub(in crate::plugin) remove: Vec<ContainerElement>,
    pub(in crate::plugin) add: Vec<ContainerElement>,
    changes: ContainerChanges,
}

impl ElementPlan {
    pub(in crate::plugin) fn new(policy: &Policy, live: &[ContainerElement], observed: ObservedContainers<'_>) -> Self {
        let wanted = |container: &RunningContainer| {
            let scope = policy.container_scope(&container.name)?;
            Some(ContainerElement::new(scope, container.cgroup, &container.name, &container.id))
        };
        let mut plan = Self::default();
        for container in observed.running {
            let Some(element) = wanted(container).filter(|element| !live.contains(element)) else { continue };
            let is_wider = |other: &&ContainerElement| other.scope > element.scope && other.cgroup == element.cgroup;
            if !live.iter().any(|other| is_wider(&other) && other.container == element.container) {
                plan.changes.added.push((container.name.clone(), element.scope));
            }
            plan.add.push(element);
        }
        for element in live {
            if plan.add.iter().any(|new| new.has_key_of(element)) {
                // The transaction replaces the element.
                continue;
            }
            let is_of =
                |id: &str| element.container.as_ref().is_some_and(|it| *it == ContainerLabel::new(&it.name, id));
            let running = observed.running.iter().find(|container| is_of(&container.id));
            let has_ended = running.is_none() && (observed.complete || observed.exited.iter().any(|id| is_of(id)));
            let scope = element.container.as_ref().and_then(|label| policy.container_scope(&label.name));
            let stays = match running {
                Some(container) => wanted(container).as_ref() == Some(element),
                None => !has_ended && scope.is_some_and(|scope| scope >= element.scope),
            };
            if stays {
                continue;
            }
            plan.remove.push(element.clone());
            if has_ended {
                plan.changes.removed += 1;
            } else if running.is_none() {
                plan.add.extend(scope.map(|scope| ContainerElement { scope, ..element.clone() }));
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::container_elements;
    use crate::netns::NetnsId;
    use crate::plugin::record::AttachmentRecord;
    use crate::scratch::Directory;
    use crate::state::Attachment;
    use nix::sched::{CloneFlags, unshare};
    use serde_json::{Value, json};
    use std::collections::BTreeSet;
    use std::fs::{self, File};
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;
    use std::process::{Command, Stdio};

    const SANDBOX: &str = "sandbox";

    const TABLE: &str = "table inet detour-exclusions {
    set excluded-all { type cgroupsv2; }
    set excluded-dns { type cgroupsv2; }
}";

    /// A pod sandbox with a network namespace and saved state. The test's thread is in the namespace.
    struct Sandbox {
        directory: Directory,
        netns: File,
    }

    impl Sandbox {
        fn new(name: &str, containers: &Value) -> Self {
            unshare(CloneFlags::CLONE_NEWNET).expect("needs root");
            let netns = File::open("/proc/thread-self/ns/net").expect("readable");
            let sandbox = Self { directory: Directory::new(name), netns };
            sandbox.nft(TABLE);
            sandbox.ip("link set lo up");
            sandbox.save("net1", &json!({"containers": containers}));
            sandbox
        }

        fn nft(&self, text: &str) {
            let mut nft = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().expect("nft is needed");
            nft.stdin.take().expect("piped").write_all(text.as_bytes()).expect("it reads");
            assert!(nft.wait().expect("it ends").success(), "{text}");
        }

        fn ip(&self, arguments: &str) {
            assert!(Command::new("ip").args(arguments.split(' ')).status().expect("ip is needed").success());
        }

        fn netns_path(&self) -> PathBuf {
            format!("/proc/{}/fd/{}", std::process::id(), self.netns.as_raw_fd()).into()
        }

        fn store(&self) -> Store {
            Store::new(self.directory.join("state"))
        }

        /// Saves an attachment with these keys of a policy.
        fn save(&self, ifname: &str, keys: &Value) {
            let mut record = AttachmentRecord::default();
            let mut policy = serde_json::to_value(&record.policy).expect("JSON");
            policy.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
            record.policy = serde_json::from_value(policy).expect("a policy");
            record.netns_id = Some(NetnsId::of(&self.netns.metadata().expect("readable")));
            record.netns_path = Some(self.netns_path());
            self.store().write(&attachment(ifname), &record).expect("written");
        }

        fn find(&self) -> Result<Option<ExcludedContainers>, Error> {
            ExcludedContainers::find_in(&self.store(), SANDBOX)
        }

        /// Returns the error of a change. The excluded containers are known nevertheless.
        fn error(&self, root: &HostRoot) -> Error {
            let found = ExcludedContainers::find_in(&self.store(), SANDBOX).expect("readable");
            let found = found.expect("excluded containers");
            assert_eq!(found.policy.containers.len(), 1);
            found.reconcile(root, ObservedContainers::default()).expect_err("no network namespace")
        }

        /// Returns the changes. The elements afterwards must be those of the sets.
        fn reconcile(&self, observed: ObservedContainers<'_>) -> ContainerChanges {
            let excluded = self.find().expect("readable").expect("excluded containers");
            let mut changes = excluded.reconcile(&HostRoot::new("/"), observed).expect("reconciled");
            let mut live = container_elements().expect("listed");
            changes.live.sort_unstable();
            live.sort_unstable();
            assert_eq!(changes.live, live);
            ContainerChanges { live: Vec::new(), ..changes }
        }
    }

    fn attachment(ifname: &str) -> Attachment {
        Attachment { container_id: SANDBOX.into(), network: "n".into(), ifname: ifname.into() }
    }

    fn running(name: &str, id: &str, cgroup: u64) -> RunningContainer {
        RunningContainer { name: name.into(), id: id.into(), cgroup }
    }

    fn exclusion(name: &str, scope: &str) -> Value {
        json!({"name": name, "scope": scope})
    }

    fn elements() -> BTreeSet<ContainerElement> {
        container_elements().expect("listed").into_iter().collect()
    }

    /// The elements of these containers, each with its scope.
    fn of(containers: &[(&RunningContainer, ContainerScope)]) -> BTreeSet<ContainerElement> {
        let element =
            |(one, scope): &(&RunningContainer, _)| ContainerElement::new(*scope, one.cgroup, &one.name, &one.id);
        containers.iter().map(element).collect()
    }

    use ContainerScope::{All, Dns};

    const LONG: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn a_start_adds_the_container_once_and_its_exit_removes_it() {
        let sandbox = Sandbox::new("exempt", &json!([exclusion("vault", "all")]));
        let (vault, app) = (running("vault", LONG, 7), running("app", "fedcba", 8));
        let both = [vault.clone(), app];
        let observed = ObservedContainers { running: &both, ..ObservedContainers::default() };
        let changes = sandbox.reconcile(observed);
        assert_eq!(changes.added, [("vault".to_owned(), All)]);
        assert_eq!(elements(), of(&[(&vault, All)]));
        assert_eq!(sandbox.reconcile(observed), ContainerChanges::default(), "a repetition changes nothing");
        let exited = [LONG.to_owned()];
        let changes = sandbox.reconcile(ObservedContainers { exited: &exited, ..ObservedContainers::default() });
        assert_eq!((changes.removed, elements()), (1, BTreeSet::new()));
    }

    #[test]
    fn a_complete_list_removes_all_other_elements() {
        let sandbox = Sandbox::new("complete", &json!([exclusion("vault", "all")]));
        let [vault, earlier] = [running("vault", LONG, 7), running("vault", "earlier", 6)];
        let foreign = ContainerElement { scope: Dns, cgroup: 9, container: None };
        let mut before: Vec<_> =
            of(&[(&vault, All), (&earlier, All), (&running("app", "app", 5), Dns)]).into_iter().collect();
        before.push(foreign);
        change_container_elements(&[], &before).expect("added");
        let known = [vault.clone()];
        let observed = ObservedContainers { running: &known, ..ObservedContainers::default() };
        // Elements of containers that were not observed stay, except those without a name that is excluded.
        assert_eq!(sandbox.reconcile(observed).removed, 0);
        assert_eq!(elements().iter().map(|element| element.cgroup).collect::<BTreeSet<_>>(), [6, 7].into());
        let changes = sandbox.reconcile(ObservedContainers { complete: true, ..observed });
        assert_eq!((changes.removed, changes.added.len()), (1, 0));
        assert_eq!(elements(), of(&[(&vault, All)]));
    }

    #[test]
    fn an_element_with_another_control_group_set_or_comment_is_replaced() {
        let sandbox = Sandbox::new("replaced", &json!([exclusion("vault", "all")]));
        let vault = running("vault", LONG, 7);
        let mut before: Vec<_> = of(&[(&running("vault", LONG, 3), All), (&vault, Dns)]).into_iter().collect();
        before.push(ContainerElement { scope: All, cgroup: 7, container: None });
        change_container_elements(&[], &before).expect("added");
        let known = [vault.clone()];
        let changes = sandbox.reconcile(ObservedContainers { running: &known, ..ObservedContainers::default() });
        assert_eq!(changes.added, [("vault".to_owned(), All)]);
        assert_eq!(elements(), of(&[(&vault, All)]));
    }

    #[test]
    fn the_exclusions_of_all_attachments_count() {
        let sandbox = Sandbox::new("union", &json!([exclusion("vault", "dns")]));
        sandbox.save("net2", &json!({"containers": [exclusion("vault", "all")]}));
        sandbox.save("net3", &json!({}));
        // The record of a network namespace that is gone does not count.
        sandbox.save("net0", &json!({"containers": [exclusion("app", "all")]}));
        let stale = sandbox.directory.join("state/sandbox/n@net0.json");
        let text = fs::read_to_string(&stale).expect("readable");
        let mut record: Value = serde_json::from_str(&text).expect("JSON");
        record["netns_id"]["inode"] = 1.into();
        fs::write(&stale, record.to_string()).expect("written");
        let both = [running("vault", "v", 1), running("app", "a", 2)];
        sandbox.reconcile(ObservedContainers { running: &both, ..ObservedContainers::default() });
        assert_eq!(elements(), of(&[(&both[0], All)]));
    }

    #[test]
    fn a_sandbox_without_exclusions_or_saved_state_has_none() {
        let sandbox = Sandbox::new("none", &json!([]));
        assert!(sandbox.find().expect("readable").is_none());
        let store = sandbox.store();
        for id in ["unknown", "../state/sandbox", "", "."] {
            assert!(ExcludedContainers::find_in(&store, id).expect("readable").is_none(), "{id}");
        }
        // A record of a newer version is only a problem if it excludes containers.
        let file = sandbox.directory.join("state/sandbox/n@net1.json");
        let text = fs::read_to_string(&file).expect("readable");
        let mut newer: Value = serde_json::from_str(&text).expect("JSON");
        newer["version"] = 99.into();
        // The network namespace is not opened either.
        newer["netns"] = "/run/netns/detour-none".into();
        fs::write(&file, newer.to_string()).expect("written");
        assert!(sandbox.find().expect("readable").is_none());
    }

    #[test]
    fn damaged_state_and_a_missing_table_or_namespace_are_errors_with_their_object() {
        let sandbox = Sandbox::new("errors", &json!([exclusion("vault", "all")]));
        let vault = [running("vault", "v", 1)];
        let observed = ObservedContainers { running: &vault, ..ObservedContainers::default() };
        sandbox.nft("delete table inet detour-exclusions");
        let found = sandbox.find().expect("readable").expect("excluded containers");
        for observed in [observed, ObservedContainers::default()] {
            let error = found.reconcile(&HostRoot::new("/"), observed).expect_err("no table");
            assert_eq!(error.code, Code::Drift);
            assert!(
                error.msg.starts_with("table inet detour-exclusions: expected set excluded-all, got none"),
                "{error}"
            );
        }

        let file = sandbox.directory.join("state/sandbox/n@net1.json");
        let text = fs::read_to_string(&file).expect("readable");
        fs::write(&file, text.replace(&sandbox.netns_path().display().to_string(), "/run/netns/detour-none"))
            .expect("written");
        let error = sandbox.error(&HostRoot::new("/"));
        assert_eq!(error.code, Code::InvalidNetns);
        assert!(error.msg.starts_with("network namespace /run/netns/detour-none: gone"), "{error}");

        // Another namespace at the same path.
        fs::write(&file, &text).expect("written");
        let other = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("needs root");
            File::open("/proc/thread-self/ns/net").expect("readable")
        });
        let other = other.join().expect("no panic");
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.as_raw_fd());
        fs::write(&file, text.replace(&sandbox.netns_path().display().to_string(), &path)).expect("written");
        assert_eq!(sandbox.error(&HostRoot::new("/")).code, Code::InvalidNetns);

        fs::write(&file, "{").expect("written");
        let error = sandbox.find().expect_err("damaged");
        assert_eq!(error.code, Code::State);
        assert!(error.msg.contains("n@net1.json"), "{error}");
    }

    #[test]
    fn the_path_of_the_runtime_is_mapped_below_the_mount_of_the_node() {
        let sandbox = Sandbox::new("root", &json!([exclusion("vault", "all")]));
        let root = HostRoot::new(sandbox.directory.join("host"));
        let file = sandbox.directory.join("state/sandbox/n@net1.json");
        let text = fs::read_to_string(&file).expect("readable");
        let visible_here = ExcludedContainers::find_in(&sandbox.store(), SANDBOX).expect("readable");
        let changed = visible_here.expect("excluded containers").reconcile(&root, ObservedContainers::default());
        assert!(changed.is_ok(), "nothing is mounted below the root");
        fs::write(&file, text.replace(&sandbox.netns_path().display().to_string(), "/run/netns/pod")).expect("written");
        let error = sandbox.error(&root);
        assert_eq!(error.code, Code::InvalidNetns);
        let why = "network namespace /run/netns/pod: /run/netns is not mounted here; set the chart's value cniNetnsDir";
        assert!(error.msg.starts_with(why), "{error}");
        let mounted = root.mount().join("run/netns/pod");
        fs::create_dir_all(mounted.parent().expect("a parent")).expect("made");
        fs::write(&mounted, "").expect("written");
        let error = sandbox.error(&root);
        assert_eq!(error.code, Code::InvalidNetns);
        assert!(error.msg.starts_with("network namespace /run/netns/pod: gone"), "{error}");
        let path = sandbox.netns_path();
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).expect("needs root");
            let mount = |arguments: &[&std::ffi::OsStr]| {
                assert!(Command::new("mount").args(arguments).status().expect("mount is needed").success());
            };
            mount(&["--make-rprivate".as_ref(), "/".as_ref()]);
            mount(&["--bind".as_ref(), path.as_ref(), mounted.as_ref()]);
            let store = Store::new(file.ancestors().nth(2).expect("a parent"));
            let found = ExcludedContainers::find_in(&store, SANDBOX).expect("readable").expect("exclusions");
            found.reconcile(&root, ObservedContainers { complete: true, ..ObservedContainers::default() })
        });
        thread.join().expect("no panic").expect("the sets of the pod's network namespace");
    }
}
