//! A pod in one mode and rule format: its calls, and what they left.

use super::call::{Answer, Call, Ended};
use super::ruleset::{Reader, Ruleset};
use crate::attachment::{Facts, Slot};
use crate::node::{STATE, left_in_state};
use crate::pod::Pod;
use crate::support::directory::Directory;
use crate::support::program::write_executable;
use serde_json::{Value, json};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What the plugin does in the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// An attachment with redirection and exclusions.
    Redirect,
    Tproxy,
    /// An attachment with a table of excluded containers.
    Containers,
    /// The primary plugin with a default network and the same sub-plugins as [`Self::Redirect`].
    Primary,
    /// The sub-plugins of [`Self::Redirect`] and the executables `first` and `second`.
    Executables,
}

/// A call of the plugin in a situation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verb {
    Add,
    /// ADD again, with the same inputs.
    AddAgain,
    /// ADD again, with other annotations of the pod.
    AddChanged,
    Check,
    Del,
    Gc,
    Status,
}

/// What the API server and the agent answer about the pod.
pub(crate) const FACTS: Facts = Facts::DnsCaptured;

/// An executable whose interface is a file.
const EXECUTABLE: &str = r#"file="${0%/*}/../interfaces/$CNI_CONTAINERID.${0##*/}"
case $CNI_COMMAND in
ADD) : > "$file"
    echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"interface":0,"address":"10.88.0.2/24"}]}' ;;
DEL) /bin/rm -f "$file" ;;
esac
"#;
/// The state of the primary plugin.
const PRIMARY_STATE: &str = "/run/detour/primary";

/// Returns the directory of executables and their interfaces.
fn networks() -> Directory {
    let directory = Directory::new("faults");
    fs::create_dir(directory.join("bin")).expect("writable");
    fs::create_dir(directory.join("interfaces")).expect("writable");
    for name in ["network", "first", "second"] {
        write_script(&directory.join("bin").join(name), EXECUTABLE);
    }
    directory
}

fn write_script(path: &Path, script: &str) {
    write_executable(path, &format!("#!/bin/sh\n{script}\n"));
}

impl Verb {
    pub(crate) const ALL: [Self; 7] =
        [Self::Add, Self::AddAgain, Self::AddChanged, Self::Check, Self::Del, Self::Gc, Self::Status];

    /// Returns `CNI_COMMAND`.
    pub(crate) fn command(self) -> &'static str {
        match self {
            Self::Add | Self::AddAgain | Self::AddChanged => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
            Self::Gc => "GC",
            Self::Status => "STATUS",
        }
    }

    /// Returns the name for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AddAgain => "second ADD",
            Self::AddChanged => "changed ADD",
            other => other.command(),
        }
    }
}

/// A pod, and the states of its network namespace.
pub(crate) struct Subject {
    pub(crate) pod: Pod,
    pub(crate) mode: Mode,
    pub(crate) dialect: &'static str,
    networks: Directory,
    reader: Reader,
    /// The number of faults that were tried.
    trials: Cell<usize>,
    /// Before any ADD.
    pub(crate) none: Ruleset,
    /// After ADD.
    pub(crate) added: Ruleset,
    /// After an ADD with other annotations.
    pub(crate) changed: Ruleset,
}

impl Subject {
    /// Creates a pod, and finds out its states. Call it on a node of [`crate::node::on_a_node`].
    pub(crate) fn new(mode: Mode, dialect: &'static str) -> Self {
        Self::of(Pod::new(), mode, dialect)
    }

    /// The same for an existing pod.
    pub(crate) fn of(pod: Pod, mode: Mode, dialect: &'static str) -> Self {
        let reader = Reader::new(&pod.netns());
        let none = reader.read();
        let (added, changed) = (none.clone(), none.clone());
        let mut subject = Self::with_states(pod, mode, dialect, reader, [none, added, changed]);
        subject.done(Verb::Add);
        subject.added = subject.read();
        subject.done(Verb::AddChanged);
        subject.changed = subject.read();
        subject.done(Verb::Del);
        assert!(subject.none != subject.added && subject.added != subject.changed, "the states differ");
        subject.assert_nothing_is_left("DEL");
        subject
    }

    /// Returns another pod with the same states.
    pub(crate) fn another(&self) -> Self {
        let pod = Pod::new();
        let reader = Reader::new(&pod.netns());
        let states = [&self.none, &self.added, &self.changed].map(Clone::clone);
        Self::with_states(pod, self.mode, self.dialect, reader, states)
    }

    fn with_states(
        pod: Pod,
        mode: Mode,
        dialect: &'static str,
        reader: Reader,
        [none, added, changed]: [Ruleset; 3],
    ) -> Self {
        Self { pod, mode, dialect, networks: networks(), reader, trials: Cell::new(0), none, added, changed }
    }

    /// Returns the configuration of a call.
    pub(crate) fn configuration(&self, verb: Verb) -> Value {
        let facts = match (self.mode, verb) {
            (Mode::Tproxy, Verb::AddChanged) => Facts::DnsCaptured,
            (_, Verb::AddChanged) => Facts::AnnotatedOtherwise,
            (Mode::Tproxy, _) => Facts::Tproxy,
            (Mode::Containers, _) => Facts::ContainerExcluded,
            (Mode::Redirect | Mode::Primary | Mode::Executables, _) => FACTS,
        };
        let mut configuration = Slot::Detour.with(facts).configuration();
        configuration["dialect"] = self.dialect.into();
        if self.mode == Mode::Primary {
            configuration["delegates"] = json!([{ "cniVersion": "1.0.0", "name": "cluster", "type": "network" }]);
            configuration["binDir"] = self.executable("").display().to_string().into();
            configuration["cniDir"] = PRIMARY_STATE.into();
        }
        if self.mode == Mode::Executables {
            let chain = configuration["chain"].as_array_mut().expect("a list");
            chain.extend(["first", "second"].map(|name| json!({ "type": name })));
        }
        if verb == Verb::Gc {
            configuration["cni.dev/valid-attachments"] = json!([]);
        }
        configuration
    }

    /// Returns a call.
    pub(crate) fn call(&self, verb: Verb) -> Call {
        let ifname = if self.mode == Mode::Primary { "eth0" } else { Slot::Detour.ifname() };
        let (netns, ifname) = match verb {
            Verb::Gc | Verb::Status => (String::new(), ""),
            _ => (self.pod.netns().display().to_string(), ifname),
        };
        let call = Call::new(verb.command(), &self.pod.container_id, &netns, ifname, &self.configuration(verb));
        if self.mode == Mode::Executables {
            call.with("CNI_PATH", &self.executable("").display().to_string())
        } else {
            call
        }
    }

    /// Returns a directory of this subject.
    pub(crate) fn directory(&self) -> &Path {
        &self.networks
    }

    /// Returns the path of an executable.
    pub(crate) fn executable(&self, name: &str) -> PathBuf {
        self.networks.join("bin").join(name)
    }

    /// Writes an executable that runs a script for this verb and otherwise works.
    pub(crate) fn script_for(&self, name: &str, verb: &str, script: &str) {
        let script = format!("if [ \"$CNI_COMMAND\" = {verb} ]; then\n{script}\nelse\n{EXECUTABLE}\nfi");
        write_script(&self.executable(name), &script);
    }

    /// Writes an executable that works.
    pub(crate) fn restore_executable(&self, name: &str) {
        let path = self.executable(name);
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
        write_script(&path, EXECUTABLE);
    }

    /// Tries a fault: makes the calls before it, and the call itself with `make`. Fails unless `is_right` accepts the
    /// answer, what the call left is allowed, and the next call completes the work.
    #[track_caller]
    pub(crate) fn attempt(
        &self,
        verb: Verb,
        fault: &str,
        make: impl FnOnce(Call) -> Ended,
        is_right: impl FnOnce(&Ended) -> Result<(), String>,
    ) {
        self.prepare(verb);
        let ended = make(self.call(verb));
        if !matches!(ended.answer, Answer::Done | Answer::Refused(..)) {
            self.wait_for_executables();
        }
        let answered = if ended.is_loaded() { is_right(&ended) } else { Ok(()) };
        if verb == Verb::Status {
            // The next STATUS removes the file of a killed one.
            self.done(Verb::Status);
        }
        let verdict = self.left(verb, &ended).and(answered).and_then(|()| self.continues(fault));
        let context = format!("{} ({:?}, {}), {fault}", verb.name(), self.mode, self.dialect);
        verdict.unwrap_or_else(|why| panic!("{context}: {why}; {ended:?}"));
    }

    /// Checks that the next call, whichever it is, completes the work: in turn DEL, ADD, and CHECK.
    fn continues(&self, when: &str) -> Result<(), String> {
        let turn = self.trials.get() % 3;
        self.trials.set(self.trials.get() + 1);
        if turn == 2 {
            let check = self.call(Verb::Check).run();
            if !matches!(check.answer, Answer::Done | Answer::Refused(103 | 104, _)) {
                return Err(format!("CHECK after {when}: {:?}", check.answer));
            }
        }
        if turn == 0 { self.is_removed(when) } else { self.completes(when) }
    }

    /// Runs a call, which must succeed.
    #[track_caller]
    pub(crate) fn done(&self, verb: Verb) {
        let ended = self.call(verb).run();
        assert_eq!(ended.answer, Answer::Done, "{} ({:?}, {}): {}", verb.name(), self.mode, self.dialect, ended.stderr);
    }

    /// Makes the calls that come before this one.
    pub(crate) fn prepare(&self, verb: Verb) {
        if !matches!(verb, Verb::Add | Verb::Status) {
            self.done(Verb::Add);
        }
    }

    /// Returns the states before and after a call.
    pub(crate) fn states(&self, verb: Verb) -> (&Ruleset, &Ruleset) {
        match verb {
            Verb::Add => (&self.none, &self.added),
            Verb::AddAgain | Verb::Check => (&self.added, &self.added),
            Verb::AddChanged => (&self.added, &self.changed),
            Verb::Del | Verb::Gc => (&self.added, &self.none),
            Verb::Status => (&self.none, &self.none),
        }
    }

    /// Reads the state of the network namespace.
    pub(crate) fn read(&self) -> Ruleset {
        self.reader.read()
    }

    /// Returns the file with the saved state that DEL reads first.
    pub(crate) fn record(&self) -> PathBuf {
        let directory = match self.mode {
            Mode::Primary => PathBuf::from(PRIMARY_STATE),
            _ => Path::new(STATE).join("attachments"),
        };
        let ifname = if self.mode == Mode::Primary { "eth0" } else { Slot::Detour.ifname() };
        directory.join(&self.pod.container_id).join(format!("detour@{ifname}.json"))
    }

    /// Returns whether the container has saved state, or its default network an interface.
    pub(crate) fn has_state(&self) -> bool {
        let id = &self.pod.container_id;
        let directories = [Path::new(STATE).join("attachments").join(id), Path::new(PRIMARY_STATE).join(id)];
        directories.iter().any(|path| path.symlink_metadata().is_ok())
    }

    /// Waits for the executables of a call that was killed: they keep running, and could otherwise create an interface
    /// after the next DEL.
    pub(crate) fn wait_for_executables(&self) {
        let own = format!("CNI_CONTAINERID={}", self.pod.container_id);
        let deadline = Instant::now() + Duration::from_secs(120);
        let runs = || {
            let processes = fs::read_dir("/proc").expect("readable").flatten();
            let mut environments = processes.filter_map(|process| fs::read(process.path().join("environ")).ok());
            let is_own = |text: Vec<u8>| text.split(|byte| *byte == 0).any(|variable| variable == own.as_bytes());
            environments.any(is_own)
        };
        while self.mode == Mode::Primary && runs() {
            assert!(Instant::now() < deadline, "an executable does not end");
            std::thread::yield_now();
        }
    }

    /// Returns whether the interface of an executable exists.
    pub(crate) fn has_interface(&self) -> bool {
        let files = fs::read_dir(self.networks.join("interfaces")).expect("readable").flatten();
        let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        names.any(|name| name.starts_with(&format!("{}.", self.pod.container_id)))
    }

    /// Checks what a call left: either the state before the call or the state after it, and saved state for everything
    /// that DEL has to remove.
    pub(crate) fn left(&self, verb: Verb, ended: &Ended) -> Result<(), String> {
        let (now, (from, to)) = (self.read(), self.states(verb));
        let has_rules = !now.has_same_rules(&self.none);
        let is_clean = !has_rules && now.fixtures == self.none.fixtures;
        // An ADD of the primary plugin that fails undoes the whole pod, also if an earlier one succeeded.
        let is_undone = self.mode == Mode::Primary && verb.command() == "ADD" && !has_rules;
        // Without `retryDeleteOnError`, a DEL removes the state also if a network fails, as with Multus; and an ADD does
        // if the default network's plugin can be started neither for ADD nor for its undo. The next DEL finds the
        // default network in the configuration.
        let is_configured = is_clean && (matches!(verb, Verb::Del | Verb::Gc) || is_undone);
        let needs_state = (!is_clean || self.has_interface()) && !is_configured;
        let is_whole = now.has_same_rules(from) || now.has_same_rules(to) || is_undone;
        match () {
            () if !is_whole => Err("there is a part of the rules".into()),
            () if ended.answer == Answer::Done && !now.has_same_rules(to) => Err("the call did nothing".into()),
            () if needs_state && !self.has_state() => Err("no saved state describes what is left".into()),
            () => Ok(()),
        }
    }

    /// Fails unless everything is as before any ADD.
    #[track_caller]
    pub(crate) fn assert_nothing_is_left(&self, when: &str) {
        self.nothing_is_left(when).unwrap_or_else(|left| panic!("{left}"));
    }

    /// Returns an error unless everything is as before any ADD.
    pub(crate) fn nothing_is_left(&self, when: &str) -> Result<(), String> {
        let now = self.read();
        let mut files = left_in_state();
        files.retain(|path: &PathBuf| path != Path::new(PRIMARY_STATE));
        match () {
            () if now.rules != self.none.rules => Err(format!("after {when}: rules are left")),
            () if now != self.none => {
                Err(format!("after {when}: {:?} instead of {:?}", now.fixtures, self.none.fixtures))
            }
            () if !files.is_empty() => Err(format!("after {when}: {files:?} is left")),
            () if self.has_interface() => Err(format!("after {when}: an executable's interface is left")),
            () => Ok(()),
        }
    }

    /// Checks that an ADD reaches its state, and that the next DEL leaves nothing.
    pub(crate) fn completes(&self, when: &str) -> Result<(), String> {
        let ended = self.call(Verb::Add).run();
        ended.is_done().map_err(|why| format!("ADD after {when}: {why}: {:?}", ended.answer))?;
        if self.read() != self.added {
            return Err(format!("ADD after {when}: the rules are not as after one ADD"));
        }
        self.is_removed(when)
    }

    /// Checks that a DEL leaves nothing.
    fn is_removed(&self, when: &str) -> Result<(), String> {
        let ended = self.call(Verb::Del).run();
        ended.is_done().map_err(|why| format!("DEL after {when}: {why}: {:?}", ended.answer))?;
        self.nothing_is_left(&format!("DEL after {when}"))
    }
}
