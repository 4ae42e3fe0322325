//! Reads and changes the node's files, under the locks of installers; what is installed (`installed`).

mod installed;

pub use installed::Installed;

use super::InstallError;
use super::cluster_list::pod_network;
use super::conflist::{ConfList, UnusableList};
use super::plan::{Change, ConfFile, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, OWN_LIST};
use super::reconcile::{reconcile, undo};
use super::record::{Digest, InstallRecord, Role};
use super::settings::PLATFORMS;
use crate::cni::is_configuration_file;
use crate::host_path::{HostPath, HostRoot};
use crate::networks::check_chained_plugin;
use crate::plugin::running::guarded_pods;
use crate::state::format;
use crate::trusted_file::{
    self, Durability, FileId, create_directories, is_trusted, names_in, read_nofollow, replace_file, sync_directory,
};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// The maximum size of a configuration, and of the installation record; a larger file is a program.
const MAX_TEXT_SIZE: u64 = 1 << 20;

/// The directory on the node with the installation record, the kubeconfig and the node configuration.
const STATE_DIRECTORY: &str = "/var/lib/cni/detour";
/// The plugin's file in the directory of Multus's auxiliary chain.
pub const CHAIN_FILE: &str = "detour.conf";
/// The name of the installation record.
const RECORD: &str = "install.json";

/// The lock under which installers change the node.
const CHANGES: &str = "install.lock";
/// The lock of the agent that leads on the node, which it holds while it runs.
const LEADERSHIP: &str = "agent.lock";

/// The lock of the agent that leads on the node.
#[derive(Debug)]
pub struct Leadership(#[expect(dead_code, reason = "held, never read")] File);

/// The file system of a node.
#[derive(Debug, Clone)]
pub struct NodeFiles {
    root: HostRoot,
}

/// Returns a path in the state directory.
#[must_use]
pub fn state_path(name: &str) -> HostPath {
    HostPath::root().join(STATE_DIRECTORY).join(name)
}

impl NodeFiles {
    /// Creates a view of the node whose file system is mounted at `root`.
    #[must_use]
    pub const fn new(root: HostRoot) -> Self {
        Self { root }
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

    /// Returns the directories, as this process reaches them, whose changes may require another installation.
    #[must_use]
    pub fn directories(&self, desired: &DesiredState) -> BTreeSet<PathBuf> {
        desired.directories().iter().filter_map(|directory| self.root.reach(directory).ok()).collect()
    }

    /// Returns the path in this process of a path of the node.
    ///
    /// # Errors
    /// Symbolic links on the way form a loop or can't be read.
    pub fn reach(&self, path: &HostPath) -> Result<PathBuf, InstallError> {
        self.root.reach(path).map_err(|error| InstallError::file("resolve", path, &error))
    }

    /// Returns the plan of [`Self::change`], without a change.
    ///
    /// # Errors
    /// A file or directory can't be read, or the installation belongs to another DaemonSet.
    pub fn preview(&self, desired: Option<&DesiredState>) -> Result<InstallPlan, InstallError> {
        let found = self.look(desired)?;
        desired.map_or_else(|| Ok(undo(&found)), |desired| reconcile(desired, &found))
    }

    /// Brings the node to the desired state, or removes the installation from it, under the lock of installers. Returns
    /// what has changed.
    ///
    /// # Errors
    /// As [`Self::preview`], or the file system refuses a change. The changes before it stay, and every configuration is
    /// complete.
    pub fn change(&self, desired: Option<&DesiredState>) -> Result<InstallPlan, InstallError> {
        let _lock = self.lock()?;
        let plan = self.preview(desired)?;
        self.apply(&plan)?;
        if desired.is_none() {
            self.remove_locks(&plan.record);
        }
        Ok(plan)
    }

    /// Returns the state of the files that `desired` or the installation record refers to.
    ///
    /// # Errors
    /// A file or directory can't be read, or `desired` is `None` and the record is invalid.
    pub fn look(&self, desired: Option<&DesiredState>) -> Result<FoundState, InstallError> {
        let mut found = FoundState::default();
        match (self.record(), desired) {
            // The desired state can be installed without the record.
            (Err(error @ InstallError::Record(..)), Some(_)) => found.notes.push(error.to_string()),
            (record, _) => found.record = record?.unwrap_or_default(),
        }
        let mut paths = BTreeSet::new();
        if let Some(desired) = desired {
            self.name_as_desired(&mut found.record, desired);
            paths.extend(desired.paths().cloned());
            found.notes.extend(self.untrusted(desired));
            let known = PLATFORMS.iter().filter_map(|platform| HostPath::new(platform.bin_dir));
            for directory in desired.programs().map(HostPath::parent).chain(known) {
                found.programs.insert(directory.clone(), self.names(&directory)?.into_iter().collect());
            }
            if let Some(directory) = &desired.multus_chain {
                found.invalid_chain_files = self.invalid_chain_files(directory)?;
            }
            if let Some(entry) = &desired.entry {
                paths.insert(entry.dir.join(OWN_LIST));
                found.configurations = self.configurations(&entry.dir, &mut found.files)?;
            }
        }
        found.needed_programs = self.needed_programs(&found.record, desired);
        if let Some(records) = self.records().filter(|_| desired.is_none()) {
            found.guarded_pods = guarded_pods(&records);
        }
        let unreachable = found.record.files.keys().filter(|path| !paths.contains(*path));
        found.unreachable = unreachable.filter_map(|path| Some((path.clone(), self.unreachable(path)?))).collect();
        paths.extend(found.record.files.keys().cloned());
        for path in paths {
            if !found.files.contains_key(&path) {
                let file = self.file(&path).map_err(|error| InstallError::file("read", &path, &error))?;
                found.files.extend(file.map(|file| (path, file)));
            }
        }
        Ok(found)
    }

    /// Renames recorded paths to the directories of `desired`: a symbolic link, such as `/var/run`, gives a file several
    /// paths, and a file that is desired must not be reverted under another path.
    fn name_as_desired(&self, record: &mut InstallRecord, desired: &DesiredState) {
        let directories = desired.directories();
        let reached = |directory: &HostPath| self.root.reach(directory).ok();
        let renamed = |path: HostPath| {
            let (own, is_desired) = (reached(&path.parent()), directories.contains(&path.parent()));
            let same = directories.iter().find(|other| !is_desired && own.is_some() && reached(other) == own);
            same.map_or_else(|| path.clone(), |same| same.join(&path.name()))
        };
        record.files = mem::take(&mut record.files).into_iter().map(|(path, file)| (renamed(path), file)).collect();
    }

    /// Returns the invalid files of other tools in the directory of Multus's auxiliary chain, each with the reason.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn invalid_chain_files(&self, directory: &HostPath) -> Result<Vec<String>, InstallError> {
        let invalid = |name: &String| {
            let path = directory.join(name);
            // libcni skips directories.
            if self.root.reach_entry(&path).and_then(fs::symlink_metadata).is_ok_and(|entry| entry.is_dir()) {
                return None;
            }
            match self.root.reach(&path).and_then(|reached| trusted_file::read(&reached, MAX_TEXT_SIZE)) {
                Ok(text) => check_chained_plugin(&path.to_string(), &text).err().map(|error| error.msg),
                Err(error) => Some(format!("{path}: {error}")),
            }
        };
        let names = self.names(directory)?.into_iter();
        Ok(names
            .filter(|name| name.ends_with(".conf") && name != CHAIN_FILE)
            .filter_map(|name| invalid(&name))
            .collect())
    }

    /// Checks whether an own list is a copy of `source`, apart from the plugin's entry of the type `kind`.
    ///
    /// # Errors
    /// The reason why it is not a copy.
    pub fn check_own_list(&self, path: &HostPath, source: &str, kind: &str) -> Result<(), String> {
        let found = self.configurations(&path.parent(), &mut BTreeMap::new()).map_err(|error| error.to_string())?;
        if let Some((name, _)) = found.iter().find(|(_, file)| pod_network(file) == Err(UnusableList::Multus)) {
            return Err(format!("{name} is a configuration of Multus, which it bypasses"));
        }
        let without_entry = |name: &str| {
            let file = found.get(name).ok_or_else(|| format!("{name} not found"))?;
            let list = file.list.as_ref().map_err(|why| format!("{name}: {why}"))?;
            file.untrusted.clone().map_or_else(|| Ok(list.without(kind)), Err)
        };
        match without_entry(&path.name())? == without_entry(source)? {
            true => Ok(()),
            false => Err("it is older; until it is written again, pods start with it".to_owned()),
        }
    }

    /// Returns the installation record; `None` if nothing is installed.
    ///
    /// # Errors
    /// The record can't be read or is invalid.
    pub(super) fn record(&self) -> Result<Option<InstallRecord>, InstallError> {
        let path = state_path(RECORD);
        match self.root.reach(&path).and_then(|path| read_nofollow(&path, MAX_TEXT_SIZE)) {
            Ok(text) => format::parse(&text).map(Some).map_err(|cause| InstallError::Record(path, cause)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(InstallError::file("read", &path, &error)),
        }
    }

    /// Returns the DaemonSet, other than `own`, that owns the installation on the node.
    ///
    /// # Errors
    /// The record can't be read or is invalid.
    pub fn other_owner(&self, own: Option<&str>) -> Result<Option<String>, InstallError> {
        let owner = self.record()?.unwrap_or_default().owner;
        Ok(owner.filter(|owner| Some(owner.as_str()) != own))
    }

    /// Returns why a file in the record can't be changed here: its directory is not mounted. In a
    /// process that sees the whole node, a directory that does not exist contains nothing.
    fn unreachable(&self, path: &HostPath) -> Option<String> {
        let directory = path.parent();
        let is_whole_node = || self.root.mount() == Path::new("/") || self.has(&HostPath::root().join("usr"));
        (!self.has(&directory) && !is_whole_node()).then(|| {
            format!(
                "{directory} is not mounted here: mount this directory in the agent's container (with the chart: run helm \
                 upgrade with the earlier value, then with the new one), or run `detour uninstall` on the node itself"
            )
        })
    }

    /// Returns the configurations in a directory, and adds their files to `files`.
    pub(super) fn configurations(
        &self,
        dir: &HostPath,
        files: &mut BTreeMap<HostPath, FoundFile>,
    ) -> Result<BTreeMap<String, ConfFile>, InstallError> {
        let mut configurations = BTreeMap::new();
        for name in self.names(dir)?.into_iter().filter(|name| is_configuration_file(name)) {
            let path = dir.join(&name);
            let list = match self.file(&path) {
                Ok(Some(file)) => {
                    let not_text = || UnusableList::Unsupported("expected UTF-8 text of at most 1 MiB".into());
                    let list = file.text.as_ref().ok_or_else(not_text).and_then(|text| ConfList::of_file(&name, text));
                    files.insert(path.clone(), file);
                    list
                }
                Ok(None) => {
                    Err(UnusableList::Invalid("not a file, or a symbolic link to one that is not here".to_owned()))
                }
                Err(error) => Err(UnusableList::Unsupported(error.to_string())),
            };
            configurations.insert(name, ConfFile { list, untrusted: self.untrusted_path(&path) });
        }
        Ok(configurations)
    }

    /// Returns the sorted names in a directory; none if it does not exist.
    fn names(&self, directory: &HostPath) -> Result<Vec<String>, InstallError> {
        match self.root.reach(directory).and_then(|reached| names_in(&reached)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            names => names.map_err(|error| InstallError::file("read", directory, &error)),
        }
    }

    /// Returns a regular file, symbolic links followed; `None` if it does not exist.
    fn file(&self, path: &HostPath) -> io::Result<Option<FoundFile>> {
        let file = match self.root.reach(path).and_then(|reached| trusted_file::open(&reached, OFlags::RDONLY)) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidInput) => return Ok(None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        let (mode, trusted) = (metadata.mode() & 0o7777, is_trusted(metadata.uid()));
        if metadata.len() > MAX_TEXT_SIZE {
            return Ok(Some(FoundFile { digest: Digest::read(file)?, text: None, mode, trusted }));
        }
        let mut contents = Vec::new();
        file.take(MAX_TEXT_SIZE).read_to_end(&mut contents)?;
        let digest = Digest::of(&contents);
        Ok(Some(FoundFile { digest, text: String::from_utf8(contents).ok(), mode, trusted }))
    }

    /// Applies the plan. The record is written before the first change. What the plan reverts leaves the record after the
    /// last change; the record is removed if nothing is left in it. So are the temporary files of an installation that was
    /// killed.
    fn apply(&self, plan: &InstallPlan) -> Result<(), InstallError> {
        let is_empty = plan.record.files.is_empty();
        let mut files = self.record().ok().flatten().unwrap_or_default().files;
        files.extend(plan.record.files.clone());
        let written = files.keys().cloned().chain([state_path(RECORD)]);
        let temporary: Vec<_> = written.map(|path| temporary(&path)).filter(|path| self.has(path)).collect();
        if !is_empty {
            self.write_record(&InstallRecord { files, ..plan.record.clone() })?;
        }
        for action in &plan.actions {
            let verb = if action.change == Change::Remove { "remove" } else { "write" };
            self.act(action).map_err(|error| InstallError::file(verb, &action.path, &error))?;
        }
        for path in temporary.iter().chain(is_empty.then(|| state_path(RECORD)).iter()) {
            self.remove(path).map_err(|error| InstallError::file("remove", path, &error))?;
        }
        if is_empty { Ok(()) } else { self.write_record(&plan.record) }
    }

    fn write_record(&self, record: &InstallRecord) -> Result<(), InstallError> {
        if self.record().is_ok_and(|current| current.as_ref() == Some(record)) {
            return Ok(());
        }
        let path = state_path(RECORD);
        let write = || {
            let text = format::print(record)?;
            replace(&self.root.reach_entry(&path)?, 0o600, false, |file| file.write_all(&text))
        };
        write().map_err(|error| InstallError::file("write", &path, &error))
    }

    fn act(&self, action: &FileAction) -> io::Result<()> {
        // A link leads to another owner's list.
        let is_listed = action.role == Role::Entry;
        let reached = || if is_listed { self.root.reach(&action.path) } else { self.root.reach_entry(&action.path) };
        match &action.change {
            Change::Program(program) => replace(&reached()?, action.role.mode(), false, |file| {
                io::copy(&mut trusted_file::open_of_any_kind(program)?, file).map(|_| ())
            }),
            Change::Text(text, mode) => replace(&reached()?, *mode, is_listed, |file| file.write_all(text.as_bytes())),
            Change::Remove => self.remove(&action.path),
        }
    }

    /// Removes a file, if it exists. The removal is flushed to the disk.
    fn remove(&self, path: &HostPath) -> io::Result<()> {
        let path = self.root.reach_entry(path)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => sync_directory(path.parent().unwrap_or(Path::new("/"))),
        }
    }

    /// Waits for the lock under which installers change the node. It is released when the file is closed.
    fn lock(&self) -> Result<File, InstallError> {
        self.locked(CHANGES, |file| file.lock().map_err(TryLockError::Error))
            .map_err(|error| InstallError::file("lock", &state_path(CHANGES), &error))
    }

    /// Returns the lock of the agent that leads; `None` while another agent holds it.
    ///
    /// # Errors
    /// The state directory can't be written.
    pub fn lead(&self) -> Result<Option<Leadership>, InstallError> {
        match self.locked(LEADERSHIP, File::try_lock) {
            Ok(file) => Ok(Some(Leadership(file))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(InstallError::file("lock", &state_path(LEADERSHIP), &error)),
        }
    }

    /// Removes the file of the lock, which this process holds, if nothing is installed, and that of a killed agent. Another
    /// process that waits for a lock creates a new file.
    fn remove_locks(&self, installed: &InstallRecord) {
        if installed.files.is_empty() {
            self.remove_lock(CHANGES);
        }
        if self.has(&state_path(LEADERSHIP)) && !self.has_agent() {
            self.remove_lock(LEADERSHIP);
        }
    }

    /// Whether an agent leads.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        let file =
            self.root.reach_entry(&state_path(LEADERSHIP)).and_then(|path| trusted_file::open(&path, OFlags::RDONLY));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Ends the lead of this agent. The lock is held while its file is removed: an agent that starts now creates a new one.
    pub fn end_lead(&self, own: Leadership) {
        self.remove_lock(LEADERSHIP);
        drop(own);
    }

    /// Locks a file with `lock`; creates it if it is missing.
    fn locked(&self, name: &str, lock: impl Fn(&File) -> Result<(), TryLockError>) -> io::Result<File> {
        loop {
            let path = self.root.reach_entry(&state_path(name))?;
            create_directories(path.parent().unwrap_or(Path::new("/")))?;
            // Opening it for writing would wake processes that watch the directory.
            let file = trusted_file::open(&path, OFlags::RDONLY | OFlags::CREATE)?;
            let own = file.metadata()?;
            // A user who can open a file can also hold its lock.
            if own.mode() & 0o077 != 0 {
                file.set_permissions(Permissions::from_mode(0o600))?;
            }
            lock(&file)?;
            // Another process may have removed the file before it was locked.
            if fs::metadata(&path).is_ok_and(|found| FileId::of(&found) == FileId::of(&own)) {
                return Ok(file);
            }
        }
    }

    fn remove_lock(&self, name: &str) {
        if let Err(error) = self.remove(&state_path(name)) {
            tracing::warn!("can't remove {}: {error}", state_path(name));
        }
    }
}

/// Replaces the file at `path` with what `fill` writes, with the permission bits `mode`. It is owned by the user of this
/// process, because the plugin uses its own files only if root owns them, unless it `keeps_owner`.
fn replace(path: &Path, mode: u32, keeps_owner: bool, fill: impl Fn(&mut File) -> io::Result<()>) -> io::Result<()> {
    let replaced = keeps_owner.then(|| fs::symlink_metadata(path).ok()).flatten();
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    replace_file(path, &temporary_name(&name), Durability::OldOrNew, |file| {
        fill(file)?;
        if let Some(replaced) = &replaced {
            fchown(&*file, Some(replaced.uid()), Some(replaced.gid()))?;
        }
        file.set_permissions(Permissions::from_mode(mode))
    })?;
    sync_directory(path.parent().unwrap_or(Path::new("/")))
}

/// Returns the temporary file from which a file is renamed. It is left if its writer was killed. Runtimes load it neither as
/// a configuration nor as a plugin.
fn temporary(path: &HostPath) -> HostPath {
    path.sibling(&temporary_name(&path.name()))
}

fn temporary_name(name: &str) -> String {
    format!(".detour-{name}.tmp")
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
        let node = NodeFiles::new(HostRoot::new(&directory));
        (directory, node)
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
