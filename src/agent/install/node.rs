//! Reads and changes the node's files: the found state, the plan, the locks of installers, and the installed
//! configuration.

use super::atomic::{self, FileOwner};
use super::conflist;
use super::digest::Digest;
use super::error::InstallError;
use super::plan::{FileAction, InstallPlan};
use super::state::{
    ConfFile, ConfigurationTarget, DesiredState, FoundFile, FoundState, InstallRecord, PreviousContent, Role,
};
use super::target::is_configuration;
use crate::cni::{NetConf, configuration};
use crate::host_path::{HostPath, HostRoot};
use crate::state::format;
use crate::sub_plugins::SubPlugin;
use crate::trusted_file::{self, FileId, create_directories, is_trusted, open_lock, read_nofollow};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The maximum size of a configuration; a larger file is a program.
const MAX_TEXT_SIZE: u64 = 1 << 20;
/// The maximum size of an installation record, which holds the texts of a few configurations.
const MAX_LOG_SIZE: u64 = 4 << 20;

/// The suffix of the file that an agent holds locked while it runs.
const PRESENCE_SUFFIX: &str = ".present";

/// The file system of a node.
#[derive(Debug, Clone)]
pub struct NodeFiles {
    root: HostRoot,
    /// The directory of the installation record.
    state: HostPath,
}

/// A file lock on the node, released when this value is dropped.
#[derive(Debug)]
pub struct InstallLock(#[expect(dead_code, reason = "held, never read")] File);

/// The plugin's configuration as it is installed on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The configuration without the parts that only the runtime's calls use: executables in the sub-plugin chain,
    /// which may not tolerate a second ADD, and the networks of a primary plugin.
    pub conf: NetConf,
    /// Whether the plugin is called for every pod, not only for pods that select its network.
    pub for_every_pod: bool,
}

impl NodeFiles {
    /// Creates a view of the node whose file system is mounted at `root`, with its installation record in the directory
    /// `state`.
    #[must_use]
    pub fn new(root: HostRoot, state: HostPath) -> Self {
        Self { root, state }
    }

    /// Returns the mount point of the node's file system.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.root.mount()
    }

    /// Whether `path` exists on the node.
    #[must_use]
    pub fn has(&self, path: &HostPath) -> bool {
        self.root.reach(path).is_ok_and(|path| path.exists())
    }

    /// Whether one of `directories` has the program `name`; `None` if it is not found and one of the directories does
    /// not exist here, as in a pod that mounts only some of them. The first is the installation's own directory, which
    /// is created if it does not exist.
    #[must_use]
    pub fn has_program(&self, name: &str, directories: &[HostPath]) -> Option<bool> {
        let is_file = |directory: &HostPath| self.root.reach(&directory.join(name)).is_ok_and(|path| path.is_file());
        match directories.iter().any(is_file) {
            true => Some(true),
            false => directories.iter().skip(1).all(|directory| self.has(directory)).then_some(false),
        }
    }

    /// Returns the path in this process of a path of the node.
    ///
    /// # Errors
    /// Symbolic links on the way form a loop or can't be read.
    pub fn reach(&self, path: &HostPath) -> Result<PathBuf, InstallError> {
        self.root.reach(path).map_err(|error| InstallError::file("resolve", path, &error))
    }

    /// Waits for the lock under which installers change the node.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lock(&self) -> Result<InstallLock, InstallError> {
        self.lock_at(&self.lock_file())
    }

    /// Releases the lock, and removes its file if nothing is installed. Another process that waits for the lock
    /// creates a new file.
    pub fn forget_lock(&self, lock: InstallLock) {
        if !self.has(&self.record_path()) {
            let removed = self.root.reach_entry(&self.lock_file()).and_then(|path| atomic::remove(&path));
            if let Err(error) = removed {
                tracing::warn!("can't remove {}: {error}", self.lock_file());
            }
        }
        drop(lock);
    }

    fn lock_file(&self) -> HostPath {
        self.state.join("install.lock")
    }

    fn lock_at(&self, path: &HostPath) -> Result<InstallLock, InstallError> {
        let lock = || {
            let reached = self.root.reach_entry(path)?;
            create_directories(reached.parent().unwrap_or(Path::new("/")))?;
            loop {
                let file = open_lock(&reached)?;
                file.lock()?;
                // Another process may have removed the file before it was locked, as `forget_absent` does.
                if is_at(&file, &reached)? {
                    return Ok(InstallLock(file));
                }
            }
        };
        lock().map_err(|error| InstallError::file("lock", path, &error))
    }

    /// Marks `installer` as running until the lock is dropped.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn be_present(&self, installer: &str) -> Result<InstallLock, InstallError> {
        self.lock_at(&self.presence(installer))
    }

    /// Whether `installer` is running.
    #[must_use]
    pub fn is_present(&self, installer: &str) -> bool {
        let file = self.root.reach_entry(&self.presence(installer)).and_then(|path| open(&path));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Removes the file that [`NodeFiles::be_present`] created.
    pub fn forget_presence(&self, installer: &str) {
        // A file that could not be removed is empty and unlocked, so it has no effect.
        let _ = self.root.reach_entry(&self.presence(installer)).and_then(|path| atomic::remove(&path));
    }

    /// Removes the files that [`NodeFiles::be_present`] created for agents that were killed.
    pub fn forget_absent(&self) {
        let forget = |name: &str| -> io::Result<()> {
            let path = self.root.reach_entry(&self.state.join(name))?;
            let file = open(&path)?;
            // The lock is held during the removal: an agent of that name that starts now creates a new file.
            if file.try_lock().is_ok() && is_at(&file, &path)? {
                atomic::remove(&path)?;
            }
            Ok(())
        };
        for name in self.names(&self.state).unwrap_or_default() {
            if name.ends_with(PRESENCE_SUFFIX)
                && let Err(error) = forget(&name)
            {
                tracing::warn!("can't remove {}: {error}", self.state.join(&name));
            }
        }
    }

    fn presence(&self, installer: &str) -> HostPath {
        self.state.join(&format!("{}{PRESENCE_SUFFIX}", installer.replace('/', "_")))
    }

    /// Returns the state of the files that `desired` or the installation record refers to.
    ///
    /// # Errors
    /// A file or directory can't be read, or `desired` is `None` and the record is invalid.
    pub fn look(&self, desired: Option<&DesiredState>) -> Result<FoundState, InstallError> {
        let (record, notes) = match (self.record(), desired) {
            // The desired state can be installed without the record.
            (Err(error @ InstallError::Record { .. }), Some(_)) => (InstallRecord::default(), vec![error.to_string()]),
            (record, _) => (record?, Vec::new()),
        };
        let mut paths: BTreeSet<HostPath> = record.files.keys().chain(record.lists.keys()).cloned().collect();
        paths.extend(record.lists.values().filter_map(|listed| Some(listed.single.as_ref()?.0.clone())));
        paths.extend(record.files.values().filter_map(|owned| match &owned.before {
            PreviousContent::Aside(aside) => Some(aside.clone()),
            _ => None,
        }));
        let mut directories = BTreeSet::from([self.state.clone()]);
        let mut found = FoundState { record, notes, ..FoundState::default() };
        if let Some(desired) = desired {
            paths.extend(desired.programs.iter().cloned());
            paths.extend([&desired.kubeconfig, &desired.node].into_iter().flatten().map(|(path, _)| path.clone()));
            found.notes.extend(self.untrusted(desired));
            match &desired.configuration {
                ConfigurationTarget::Own { path, .. } => drop(paths.insert(path.clone())),
                ConfigurationTarget::Listed { dir, .. } => {
                    directories.insert(dir.clone());
                    found.configurations = self.configurations(dir)?;
                }
            }
        }
        directories.extend(paths.iter().map(HostPath::parent));
        for directory in &directories {
            let names = self.names(directory)?.into_iter().filter(|name| atomic::is_leftover(name));
            found.leftovers.extend(names.map(|name| directory.join(&name)));
        }
        for path in paths {
            let file = self.file(&path).map_err(|error| InstallError::file("read", &path, &error))?;
            found.files.extend(file.map(|file| (path, file)));
        }
        self.upgrade_digests(&mut found)?;
        Ok(found)
    }

    /// Replaces the digests of version 0.1.0 in the record by those of this version, where the contents did not change
    /// since. The others match no content.
    fn upgrade_digests(&self, found: &mut FoundState) -> Result<(), InstallError> {
        let replace = |digests: &mut Vec<Digest>, legacy: &Digest, current: &Digest| {
            digests.iter_mut().filter(|digest| *digest == legacy).for_each(|digest| digest.clone_from(current));
        };
        for (path, owned) in &mut found.record.files {
            let Some(file) = found.files.get(path).filter(|_| owned.ours.iter().any(Digest::is_legacy)) else {
                continue;
            };
            let legacy = self.root.reach(path).and_then(|reached| Digest::read_legacy(open(&reached)?));
            let legacy = legacy.map_err(|error| InstallError::file("read", path, &error))?;
            replace(&mut owned.ours, &legacy, &file.digest);
        }
        for (path, listed) in &mut found.record.lists {
            let text = found.files.get(path).and_then(|file| file.text.as_deref());
            let Some(text) = text.filter(|_| listed.ours.iter().any(Digest::is_legacy)) else { continue };
            for entry in conflist::of_type(text, &listed.kind).into_iter().flatten() {
                replace(&mut listed.ours, &Digest::legacy_of_value(&entry), &Digest::of_value(&entry));
            }
        }
        Ok(())
    }

    /// Returns a warning for each program directory from which the plugin refuses to execute plugins.
    fn untrusted(&self, desired: &DesiredState) -> Vec<String> {
        let directories: BTreeSet<_> = desired.programs.iter().map(HostPath::parent).collect();
        let warning = |directory: &HostPath| {
            let error = trusted_file::check(&self.root.reach(directory).ok()?).err()?;
            let problem = format!("{directory}: plugins in this directory are not executed: {error}");
            (!error.is_not_found()).then(|| format!("{problem}; run on the node: chown -R root:root {directory}"))
        };
        directories.iter().filter_map(warning).collect()
    }

    /// Returns the plugin's installed configuration; `None` if it is not installed.
    ///
    /// # Errors
    /// The installation record or the configuration can't be read or parsed.
    pub fn installed(&self) -> Result<Option<Installed>, String> {
        let record = self.record().map_err(|error| error.to_string())?;
        let own = record.files.iter().find(|(_, owned)| owned.role == Role::Configuration);
        let listed = record.lists.keys().next();
        let Some(path) = listed.or(own.map(|(path, _)| path)) else { return Ok(None) };
        let file = self.file(path).map_err(|error| InstallError::file("read", path, &error).to_string())?;
        let Some(text) = file.and_then(|file| file.text) else { return Ok(None) };
        let mut conf = configuration(path.as_path(), text.as_bytes()).map_err(|error| error.to_string())?;
        let for_every_pod = listed.is_some() || conf.primary.is_some();
        conf.primary = None;
        conf.chain.retain(|block| SubPlugin::of(block).is_some());
        let source = &mut conf.kubernetes;
        let paths = [&mut source.agent_socket, &mut source.kubeconfig, &mut source.manifests_dir];
        for path in paths.into_iter().flatten() {
            *path = self.reach_path(path.clone()).map_err(|error| error.to_string())?;
        }
        conf.group_file = self.group_file(conf.group_file);
        Ok(Some(Installed { conf, for_every_pod }))
    }

    /// Returns the path of the node's group file. If it is not mounted, the root directory of the node's first process
    /// has it (proc_pid_root(5)).
    fn group_file(&self, path: PathBuf) -> PathBuf {
        let of_first_process = self.root().join("proc/1/root").join(path.strip_prefix("/").unwrap_or(&path));
        self.reach_path(path).ok().filter(|path| path.exists()).unwrap_or(of_first_process)
    }

    fn reach_path(&self, path: PathBuf) -> Result<PathBuf, InstallError> {
        HostPath::new(&path).map_or(Ok(path), |path| self.reach(&path))
    }

    fn record(&self) -> Result<InstallRecord, InstallError> {
        let path = self.record_path();
        match self.root.reach(&path).and_then(|path| read_nofollow(&path, MAX_LOG_SIZE)) {
            Ok(text) => format::parse(&text).map_err(|error| InstallError::Record { path, cause: error.to_string() }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(InstallRecord::default()),
            Err(error) => Err(InstallError::file("read", &path, &error)),
        }
    }

    fn record_path(&self) -> HostPath {
        self.state.join("install.json")
    }

    fn configurations(&self, dir: &HostPath) -> Result<Vec<ConfFile>, InstallError> {
        let names = self.names(dir)?;
        let mut files = Vec::new();
        for name in names.into_iter().filter(|name| is_configuration(name)) {
            let path = dir.join(&name);
            let file = self.file(&path).map_err(|error| InstallError::file("read", &path, &error))?;
            let text = |file: FoundFile| ConfFile {
                name,
                contents: file.text.unwrap_or_else(|| "(not UTF-8)".into()).into_bytes(),
                mode: file.mode,
            };
            files.extend(file.map(text));
        }
        Ok(files)
    }

    /// Returns the sorted names in a directory; none if it does not exist.
    fn names(&self, directory: &HostPath) -> Result<Vec<String>, InstallError> {
        let list = || {
            let entries = fs::read_dir(self.root.reach(directory)?)?;
            entries.map(|entry| entry.map(|entry| entry.file_name().into_string())).collect::<io::Result<Vec<_>>>()
        };
        let mut names: Vec<String> = match list() {
            Ok(names) => names.into_iter().flatten().collect(),
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(InstallError::file("read", directory, &error)),
        };
        names.sort();
        Ok(names)
    }

    /// Returns a regular file, symbolic links followed; `None` if it does not exist.
    fn file(&self, path: &HostPath) -> io::Result<Option<FoundFile>> {
        let reached = self.root.reach(path)?;
        let mut file = match open(&reached) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(_) if fs::symlink_metadata(&reached).is_ok_and(|metadata| !metadata.is_file()) => return Ok(None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        let (digest, text) = if metadata.len() > MAX_TEXT_SIZE {
            (Digest::read(file)?, None)
        } else {
            let mut contents = Vec::new();
            Read::by_ref(&mut file).take(MAX_TEXT_SIZE).read_to_end(&mut contents)?;
            (Digest::of(&contents), String::from_utf8(contents).ok())
        };
        let (mode, trusted) = (metadata.mode() & 0o7777, is_trusted(metadata.uid()));
        Ok(Some(FoundFile { digest, text, mode, trusted }))
    }

    /// Applies the plan; `program` is the file to copy. The record is written before the first change, and removed after
    /// the last one if nothing is installed any more.
    ///
    /// # Errors
    /// The file system refuses a change. The changes before it stay, and every configuration is complete.
    pub fn apply(&self, plan: &InstallPlan, program: &Path, _: &InstallLock) -> Result<(), InstallError> {
        let empty = plan.record.files.is_empty() && plan.record.lists.is_empty();
        if !empty {
            self.write_log(&plan.record)?;
        }
        for action in &plan.actions {
            self.act(action, program).map_err(|error| InstallError::file(verb(action), target(action), &error))?;
        }
        if empty {
            let removed = self.root.reach_entry(&self.record_path()).and_then(|path| atomic::remove(&path));
            removed.map_err(|error| InstallError::file("remove", &self.record_path(), &error))?;
        }
        Ok(())
    }

    fn write_log(&self, record: &InstallRecord) -> Result<(), InstallError> {
        if self.record().is_ok_and(|current| current == *record) {
            return Ok(());
        }
        let write = || {
            let text = format::print(record).map_err(io::Error::from)?;
            atomic::write(&self.root.reach_entry(&self.record_path())?, 0o600, FileOwner::Own, |file| {
                file.write_all(&text)
            })
        };
        write().map_err(|error| InstallError::file("write", &self.record_path(), &error))
    }

    fn act(&self, action: &FileAction, program: &Path) -> io::Result<()> {
        let entry = |path: &HostPath| self.root.reach_entry(path);
        match action {
            FileAction::SetAside { path, aside } => atomic::second_name(&self.root.reach(path)?, &entry(aside)?),
            FileAction::CopyProgram { path } => atomic::write(&entry(path)?, 0o755, FileOwner::Own, |file| {
                io::copy(&mut trusted_file::follow(program)?, file).map(|_| ())
            }),
            FileAction::Write { path, text, mode, follow, .. } => {
                // A link leads to another tool's file, which keeps its owner.
                let (path, owner) =
                    if *follow { (self.root.reach(path)?, FileOwner::Kept) } else { (entry(path)?, FileOwner::Own) };
                atomic::write(&path, *mode, owner, |file| file.write_all(text.as_bytes()))
            }
            FileAction::Restore { aside, path } => atomic::rename(&entry(aside)?, &entry(path)?),
            FileAction::Remove { path, .. } => atomic::remove(&entry(path)?),
        }
    }
}

/// Opens a file for reading; [`HostRoot`] has resolved its path.
fn open(reached: &Path) -> io::Result<File> {
    trusted_file::open(reached, OpenOptions::new().read(true))
}

/// Whether `path` still refers to `file`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::metadata(path) {
        Ok(found) => Ok(FileId::of(&found) == FileId::of(&own)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn verb(action: &FileAction) -> &'static str {
    match action {
        FileAction::SetAside { .. } => "back up",
        FileAction::CopyProgram { .. } | FileAction::Write { .. } => "write",
        FileAction::Restore { .. } => "restore",
        FileAction::Remove { .. } => "remove",
    }
}

fn target(action: &FileAction) -> &HostPath {
    match action {
        FileAction::SetAside { path, .. }
        | FileAction::CopyProgram { path }
        | FileAction::Write { path, .. }
        | FileAction::Restore { path, .. }
        | FileAction::Remove { path, .. } => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;
    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

    /// A node in a temporary directory.
    fn node(name: &str) -> (PathBuf, NodeFiles) {
        let directory = std::env::temp_dir().join(format!("detour-node-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("created");
        let node = NodeFiles::new(HostRoot::new(&directory), HostPath::new("/").expect("a path"));
        (directory, node)
    }

    #[test]
    fn files_that_version_0_1_0_installed_are_recognized_and_those_edited_since_are_not() {
        let (directory, node) = node("legacy");
        let list = r#"{"name":"n","plugins":[{"type":"a"},{"type":"detour","a":1}]}"#;
        // The program is no text; the text is as version 0.1.0 wrote it; another process edited the last file.
        let program = [b"program".as_slice(), &[0xff]].concat();
        for (name, contents) in [("p", program.as_slice()), ("c", b"program"), ("e", b"edited"), ("l", list.as_bytes())]
        {
            fs::write(directory.join(name), contents).expect("written");
        }
        let legacy = Digest::read_legacy(program.as_slice()).expect("readable");
        let owned = |ours: &str| serde_json::json!({"role": "program", "ours": [ours], "before": "nothing"});
        let log = serde_json::json!({
            "installer": "i",
            "files": {"/p": owned(&legacy.to_string()), "/c": owned("7-4e2d3c643c61336f"), "/e": owned("7-4e2d3c643c61336f")},
            "lists": {"/l": {"kind": "detour", "ours": ["23-75edffdd650a9d9d"], "single": null}},
        });
        fs::write(directory.join("install.json"), log.to_string()).expect("written");
        let found = node.look(None).expect("readable");
        let plan = crate::agent::install::plan::undo(&found);
        let removed: Vec<_> = plan.actions.iter().map(|action| target(action).to_string()).collect();
        assert_eq!(removed, ["/l", "/c", "/p"]);
        assert_eq!(plan.record.files.keys().map(ToString::to_string).collect::<Vec<_>>(), ["/e"]);
        fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn reading_the_node_wakes_no_watcher() {
        let (directory, node) = node("watched");
        let look = || {
            let _lock = node.lock().expect("locked");
            node.look(None).expect("looked at");
        };
        look();
        let changes = Inotify::init(InitFlags::IN_NONBLOCK).expect("a watch");
        let all = AddWatchFlags::IN_ALL_EVENTS;
        let harmless = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_ACCESS | AddWatchFlags::IN_CLOSE_NOWRITE;
        changes.add_watch(&directory, all - harmless).expect("watched");
        look();
        assert_eq!(changes.read_events().map(|events| events.len()), Err(Errno::EAGAIN));
        fs::remove_dir_all(&directory).expect("removed");
    }
}
