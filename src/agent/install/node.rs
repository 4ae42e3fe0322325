//! A node's file system: looked at, and changed as a plan says.

use super::atomic::{self, FileOwner};
use super::digest::Digest;
use super::plan::{FileAction, InstallPlan};
use super::reconcile::{ConfigurationTarget, DesiredState, FoundFile, FoundState};
use super::record::{InstallLog, PreviousContent};
use super::target::{ConfFile, is_configuration};
use super::{HostPath, HostRoot, InstallError};
use crate::state::format;
use crate::trusted_file::{self, FileId, create_directories, is_trusted, open_lock, read_nofollow};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// No configuration is larger; what is, is a program, or a mistake.
const LARGEST_TEXT: u64 = 1 << 20;
/// The log of an installation is larger only by mistake: it holds the texts of a few configurations.
const LARGEST_LOG: u64 = 4 << 20;

/// The end of the name of a file that an agent holds locked while it runs.
const PRESENT: &str = ".present";

/// The node.
#[derive(Debug, Clone)]
pub struct NodeFiles {
    root: HostRoot,
    /// Where the log of the installation is.
    state: HostPath,
}

/// Keeps others from changing the node at the same time; until it is dropped.
#[derive(Debug)]
pub struct InstallLock(#[expect(dead_code, reason = "held, never read")] File);

impl NodeFiles {
    /// The node whose file system `root` is, and the directory of the log there.
    #[must_use]
    pub fn new(root: HostRoot, state: HostPath) -> Self {
        Self { root, state }
    }

    /// Where the node's file system is mounted.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.root.mount()
    }

    /// Whether there is something at that path.
    #[must_use]
    pub fn has(&self, path: &HostPath) -> bool {
        self.root.reach(path).is_ok_and(|path| path.exists())
    }

    /// Whether one of `directories` has the program `name`; `None` if it is not found and a directory is not in
    /// reach, as in a pod that mounts only some. The first is the installation's own, which it creates if it does
    /// not exist.
    #[must_use]
    pub fn has_program(&self, name: &str, directories: &[HostPath]) -> Option<bool> {
        let is_file = |directory: &HostPath| self.root.reach(&directory.join(name)).is_ok_and(|path| path.is_file());
        match directories.iter().any(is_file) {
            true => Some(true),
            false => directories.iter().skip(1).all(|directory| self.has(directory)).then_some(false),
        }
    }

    /// Where this process reaches a path.
    ///
    /// # Errors
    /// Links on the way lead in a circle or can't be read.
    pub fn reach(&self, path: &HostPath) -> Result<PathBuf, InstallError> {
        self.root.reach(path).map_err(|why| InstallError::file("reach", path, &why))
    }

    /// Waits until nobody else changes the node.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lock(&self) -> Result<InstallLock, InstallError> {
        self.locked(&self.lock_file())
    }

    /// Removes the lock's file, if nothing is installed any more. Another process that waits for the lock makes a
    /// new file.
    pub fn forget_lock(&self, lock: InstallLock) {
        if !self.has(&self.log()) {
            let removed = self.root.reach_entry(&self.lock_file()).and_then(|path| atomic::remove(&path));
            if let Err(why) = removed {
                tracing::warn!("remove {}: {why}", self.lock_file());
            }
        }
        drop(lock);
    }

    fn lock_file(&self) -> HostPath {
        self.state.join("install.lock")
    }

    fn locked(&self, path: &HostPath) -> Result<InstallLock, InstallError> {
        let lock = || {
            let reached = self.root.reach_entry(path)?;
            create_directories(reached.parent().unwrap_or(Path::new("/")))?;
            loop {
                let file = open_lock(&reached)?;
                file.lock()?;
                // Another process may have removed it meanwhile, as `forget_absent` does.
                if is_at(&file, &reached)? {
                    return Ok(InstallLock(file));
                }
            }
        };
        lock().map_err(|why| InstallError::file("lock", path, &why))
    }

    /// Tells others that `installer` is here; until it is dropped.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn be_present(&self, installer: &str) -> Result<InstallLock, InstallError> {
        self.locked(&self.presence(installer))
    }

    /// Whether `installer` is still here.
    #[must_use]
    pub fn is_present(&self, installer: &str) -> bool {
        let file = self.root.reach_entry(&self.presence(installer)).and_then(|path| open(&path));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Takes away what [`Node::be_present`] left.
    pub fn forget_presence(&self, installer: &str) {
        // What stays is an empty file that nobody holds.
        let _ = self.root.reach_entry(&self.presence(installer)).and_then(|path| atomic::remove(&path));
    }

    /// Removes what [`Node::be_present`] left of agents that were killed.
    pub fn forget_absent(&self) {
        let forget = |name: &str| -> io::Result<()> {
            let path = self.root.reach_entry(&self.state.join(name))?;
            let file = open(&path)?;
            // The lock is held until the file is gone: an agent of that name that starts now makes a new one.
            if file.try_lock().is_ok() && is_at(&file, &path)? {
                atomic::remove(&path)?;
            }
            Ok(())
        };
        for name in self.names(&self.state).unwrap_or_default() {
            if name.ends_with(PRESENT)
                && let Err(why) = forget(&name)
            {
                tracing::warn!("remove {}: {why}", self.state.join(&name));
            }
        }
    }

    fn presence(&self, installer: &str) -> HostPath {
        self.state.join(&format!("{}{PRESENT}", installer.replace('/', "_")))
    }

    /// What is there, as far as `desired` and the log speak of it.
    ///
    /// # Errors
    /// A file or directory can't be read; nothing is desired and the log can't be understood.
    pub fn look(&self, desired: Option<&DesiredState>) -> Result<FoundState, InstallError> {
        let (record, notes) = match (self.record(), desired) {
            // What was there before can't be known any more; what is wanted can.
            (Err(why @ InstallError::Log { .. }), Some(_)) => (InstallLog::default(), vec![why.to_string()]),
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
            let file = self.file(&path).map_err(|why| InstallError::file("read", &path, &why))?;
            found.files.extend(file.map(|file| (path, file)));
        }
        Ok(found)
    }

    /// The program directories in which the plugin would not execute anything, one line each.
    fn untrusted(&self, desired: &DesiredState) -> Vec<String> {
        let directories: BTreeSet<_> = desired.programs.iter().map(HostPath::parent).collect();
        let refused = |directory: &HostPath| {
            let error = trusted_file::check(&self.root.reach(directory).ok()?).err()?;
            let why = format!("{directory}: plugins in it are not executed: {error}");
            (!error.is_not_found()).then(|| format!("{why}; on the node: chown -R root:root {directory}"))
        };
        directories.iter().filter_map(refused).collect()
    }

    pub(super) fn record(&self) -> Result<InstallLog, InstallError> {
        let path = self.log();
        match self.root.reach(&path).and_then(|path| read_nofollow(&path, LARGEST_LOG)) {
            Ok(text) => format::parse(&text).map_err(|why| InstallError::Log { path, why: why.to_string() }),
            Err(why) if why.kind() == ErrorKind::NotFound => Ok(InstallLog::default()),
            Err(why) => Err(InstallError::file("read", &path, &why)),
        }
    }

    fn log(&self) -> HostPath {
        self.state.join("install.json")
    }

    fn configurations(&self, dir: &HostPath) -> Result<Vec<ConfFile>, InstallError> {
        let names = self.names(dir)?;
        let mut files = Vec::new();
        for name in names.into_iter().filter(|name| is_configuration(name)) {
            let path = dir.join(&name);
            let file = self.file(&path).map_err(|why| InstallError::file("read", &path, &why))?;
            let text = |file: FoundFile| ConfFile {
                name,
                contents: file.text.unwrap_or_else(|| "(no text)".into()).into_bytes(),
                mode: file.mode,
            };
            files.extend(file.map(text));
        }
        Ok(files)
    }

    /// In the order of their names; none where there is no such directory.
    fn names(&self, directory: &HostPath) -> Result<Vec<String>, InstallError> {
        let list = || {
            let entries = fs::read_dir(self.root.reach(directory)?)?;
            entries.map(|entry| entry.map(|entry| entry.file_name().into_string())).collect::<io::Result<Vec<_>>>()
        };
        let mut names: Vec<String> = match list() {
            Ok(names) => names.into_iter().flatten().collect(),
            Err(why) if why.kind() == ErrorKind::NotFound => Vec::new(),
            Err(why) => return Err(InstallError::file("read", directory, &why)),
        };
        names.sort();
        Ok(names)
    }

    /// What a file holds; `None` where there is none, or no text.
    pub(super) fn text(&self, path: &HostPath) -> Result<Option<String>, InstallError> {
        let file = self.file(path).map_err(|why| InstallError::file("read", path, &why))?;
        Ok(file.and_then(|file| file.text))
    }

    /// A regular file, or what a link leads to; `None` where there is none.
    fn file(&self, path: &HostPath) -> io::Result<Option<FoundFile>> {
        let reached = self.root.reach(path)?;
        let mut file = match open(&reached) {
            Ok(file) => file,
            Err(why) if why.kind() == ErrorKind::NotFound => return Ok(None),
            Err(_) if fs::symlink_metadata(&reached).is_ok_and(|there| !there.is_file()) => return Ok(None),
            Err(why) => return Err(why),
        };
        let there = file.metadata()?;
        let (digest, text) = if there.len() > LARGEST_TEXT {
            (Digest::read(file)?, None)
        } else {
            let mut contents = Vec::new();
            Read::by_ref(&mut file).take(LARGEST_TEXT).read_to_end(&mut contents)?;
            (Digest::of(&contents), String::from_utf8(contents).ok())
        };
        let (mode, trusted) = (there.mode() & 0o7777, is_trusted(there.uid()));
        Ok(Some(FoundFile { digest, text, mode, trusted }))
    }

    /// Does what the plan says, `program` being the file that is copied. The log comes first, and goes when
    /// nothing is left to be taken away.
    ///
    /// # Errors
    /// A change that the file system refuses; those before it are made, and every configuration is
    /// still whole.
    pub fn apply(&self, plan: &InstallPlan, program: &Path, _: &InstallLock) -> Result<(), InstallError> {
        let empty = plan.record.files.is_empty() && plan.record.lists.is_empty();
        if !empty {
            self.write_log(&plan.record)?;
        }
        for action in &plan.actions {
            self.act(action, program).map_err(|why| InstallError::file(verb(action), place(action), &why))?;
        }
        if empty {
            let removed = self.root.reach_entry(&self.log()).and_then(|path| atomic::remove(&path));
            removed.map_err(|why| InstallError::file("remove", &self.log(), &why))?;
        }
        Ok(())
    }

    fn write_log(&self, record: &InstallLog) -> Result<(), InstallError> {
        if self.record().is_ok_and(|there| there == *record) {
            return Ok(());
        }
        let write = || {
            let text = format::print(record).map_err(io::Error::from)?;
            atomic::write(&self.root.reach_entry(&self.log())?, 0o600, FileOwner::Own, |file| file.write_all(&text))
        };
        write().map_err(|why| InstallError::file("write", &self.log(), &why))
    }

    fn act(&self, action: &FileAction, program: &Path) -> io::Result<()> {
        let entry = |path: &HostPath| self.root.reach_entry(path);
        match action {
            FileAction::SetAside { path, aside } => atomic::second_name(&self.root.reach(path)?, &entry(aside)?),
            FileAction::CopyProgram { path } => atomic::write(&entry(path)?, 0o755, FileOwner::Own, |file| {
                io::copy(&mut trusted_file::follow(program)?, file).map(|_| ())
            }),
            FileAction::Write { path, text, mode, follow, .. } => {
                // A file that is followed is another's.
                let (path, owner) =
                    if *follow { (self.root.reach(path)?, FileOwner::Kept) } else { (entry(path)?, FileOwner::Own) };
                atomic::write(&path, *mode, owner, |file| file.write_all(text.as_bytes()))
            }
            FileAction::Restore { aside, path } => atomic::rename(&entry(aside)?, &entry(path)?),
            FileAction::Remove { path, .. } => atomic::remove(&entry(path)?),
        }
    }
}

/// Opens a file whose path [`Root`] has resolved, for reading.
fn open(reached: &Path) -> io::Result<File> {
    trusted_file::open(reached, OpenOptions::new().read(true))
}

/// Whether `path` still leads to `file`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok(FileId::of(&there) == FileId::of(&own)),
        Err(why) if why.kind() == ErrorKind::NotFound => Ok(false),
        Err(why) => Err(why),
    }
}

fn verb(action: &FileAction) -> &'static str {
    match action {
        FileAction::SetAside { .. } => "keep",
        FileAction::CopyProgram { .. } | FileAction::Write { .. } => "write",
        FileAction::Restore { .. } => "restore",
        FileAction::Remove { .. } => "remove",
    }
}

fn place(action: &FileAction) -> &HostPath {
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

    #[test]
    fn looking_does_not_wake_who_watches_the_node() {
        let directory = std::env::temp_dir().join(format!("detour-node-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("made");
        let node = NodeFiles::new(HostRoot::new(&directory), HostPath::new("/").expect("a path"));
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
