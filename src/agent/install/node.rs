//! Reads and changes the node's files: the found state and the plan, the locks of installers (`locks`), and what
//! is installed (`installed`).

mod installed;
mod locks;

pub use installed::{Installed, InstalledText, InstalledTexts};
pub use locks::{InstallLock, Leadership};

use super::atomic::{self, FileOwner};
use super::cluster_list::is_pod_network;
use super::conflist;
use super::error::InstallError;
use super::plan::{
    ConfFile, ConfigurationTarget, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, OWN_LIST,
};
use super::record::{Digest, InstallRecord};
use crate::cni::{PROGRAM, is_configuration_file};
use crate::host_path::{HostPath, HostRoot};
use crate::networks::check_chained_plugin;
use crate::state::format;
use crate::trusted_file::{self, is_trusted, read_nofollow};
use nix::errno::Errno;
use rustix::fs::{OFlags, StatVfsMountFlags, statvfs};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The maximum size of a configuration; a larger file is a program.
const MAX_TEXT_SIZE: u64 = 1 << 20;
/// The contents of a configuration that is larger, or not UTF-8: invalid UTF-8.
const NOT_TEXT: &[u8] = &[0xff];
/// The maximum size of an installation record, which holds the texts of a few configurations.
const MAX_RECORD_SIZE: u64 = 4 << 20;

/// The directory on the node with the installation record, the kubeconfig and the node configuration.
const STATE_DIRECTORY: &str = "/var/lib/cni/detour";
/// The directories in which runtimes look for configurations, other than that of the platform (OpenShift's is the second).
const RUNTIME_DIRECTORIES: [&str; 2] = ["/etc/cni/net.d", "/etc/kubernetes/cni/net.d"];
/// How long the file of which the own list is a copy must be missing before another one takes its place, and invalid
/// before the node is not ready: some tools remove or truncate their file before they write it.
const SETTLING: Duration = Duration::from_secs(5);
/// The name of the installation record.
const RECORD: &str = "install.json";

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

    /// Returns the directories, as this process reaches them, of the configurations to which symbolic links in the
    /// directory of the cluster network's list lead.
    #[must_use]
    pub fn linked_directories(&self, desired: &DesiredState) -> BTreeSet<PathBuf> {
        let listed = desired.configurations.iter().filter(|target| target.file().is_none());
        let mut found = BTreeSet::new();
        for dir in listed.map(ConfigurationTarget::directory) {
            for name in self.names(&dir).unwrap_or_default().iter().filter(|name| is_configuration_file(name)) {
                let path = dir.join(name);
                let (Ok(entry), Ok(reached)) = (self.root.reach_entry(&path), self.root.reach(&path)) else { continue };
                found.extend(reached.parent().filter(|_| entry != reached).map(Path::to_owned));
            }
        }
        found
    }

    /// Returns the path in this process of a path of the node.
    ///
    /// # Errors
    /// Symbolic links on the way form a loop or can't be read.
    pub fn reach(&self, path: &HostPath) -> Result<PathBuf, InstallError> {
        self.root.reach(path).map_err(|error| InstallError::file("resolve", path, &error))
    }

    /// Returns the state of the files that `desired` or the installation record refers to.
    ///
    /// # Errors
    /// A file or directory can't be read, or `desired` is `None` and the record is invalid.
    pub fn look(&self, desired: Option<&DesiredState>) -> Result<FoundState, InstallError> {
        let mut found = FoundState::default();
        match (self.record(), desired) {
            // The desired state can be installed without the record.
            (Err(error @ InstallError::Record { .. }), Some(_)) => found.notes.push(error.to_string()),
            (record, _) => found.record = record?.unwrap_or_default(),
        }
        if let Some(desired) = desired {
            self.name_as_desired(&mut found.record, desired);
        }
        let record = &found.record;
        let mut paths: BTreeSet<HostPath> = record.files.keys().cloned().collect();
        let mut directories = BTreeSet::from([record_path().parent()]);
        if let Some(desired) = desired {
            paths.extend(desired.programs.iter().cloned());
            paths.extend(desired.programs.iter().map(|path| path.sibling(PROGRAM)));
            paths.extend(desired.kubeconfig.iter().map(|(path, _)| path.clone()));
            paths.extend(desired.node.iter().map(|(path, _)| path.clone()));
            paths.extend(desired.configurations.iter().filter_map(ConfigurationTarget::file).cloned());
            found.notes.extend(self.untrusted(desired));
            if let Some(directory) = &desired.multus_chain {
                let own: Vec<&HostPath> = desired.configurations.iter().filter_map(ConfigurationTarget::file).collect();
                found.invalid_chain_files = self.invalid_files(directory, &own)?;
            }
            for target in &desired.configurations {
                if let ConfigurationTarget::Listed { dir, own_list, .. } = target {
                    directories.insert(dir.clone());
                    let notes;
                    (found.configurations, notes) = self.configurations(dir, desired)?;
                    found.notes.extend(notes);
                    found.named = self.named_in(dir)?;
                    found.is_settled = self.is_settled(dir, &found.configurations);
                    let names = found.configurations.iter().map(|file| file.name.as_str()).chain([OWN_LIST]);
                    paths.extend(names.map(|name| dir.join(name)));
                    if *own_list {
                        found.multus = self.multus(desired);
                    }
                }
            }
        }
        self.find_needed_programs(desired, &mut found);
        found.guarded_pods = if desired.is_none() { self.guarded_pods() } else { Vec::new() };
        let is_desired = |path: &HostPath| desired.is_some_and(|desired| desired.paths().any(|other| other == path));
        let unreachable = found.record.files.keys().filter(|path| !is_desired(path));
        found.unreachable = unreachable.filter_map(|path| Some((path.clone(), self.unreachable(path)?))).collect();
        directories.extend(paths.iter().filter(|path| !found.unreachable.contains_key(path)).map(HostPath::parent));
        for directory in &directories {
            let names = self.names(directory)?.into_iter().filter(|name| atomic::is_leftover(name));
            found.leftovers.extend(names.map(|name| directory.join(&name)));
        }
        for path in paths {
            let file = self.file(&path).map_err(|error| InstallError::file("read", &path, &error))?;
            found.files.extend(file.map(|file| (path, file)));
        }
        Ok(found)
    }

    /// Renames recorded paths to the directories of `desired`: a symbolic link, such as `/var/run`, gives a file several
    /// paths, and a file that is desired must not be reverted under another path.
    fn name_as_desired(&self, record: &mut InstallRecord, desired: &DesiredState) {
        let directories: BTreeSet<HostPath> = desired
            .paths()
            .map(HostPath::parent)
            .chain(desired.configurations.iter().map(ConfigurationTarget::directory))
            .collect();
        let reached: BTreeMap<PathBuf, &HostPath> =
            directories.iter().filter_map(|directory| Some((self.root.reach(directory).ok()?, directory))).collect();
        let renamed = |path: HostPath| {
            let directory = path.parent();
            if directories.contains(&directory) {
                return path;
            }
            let same = self.root.reach(&directory).ok().and_then(|directory| reached.get(&directory));
            same.map_or_else(|| path.clone(), |directory| directory.join(&path.name()))
        };
        record.files = mem::take(&mut record.files).into_iter().map(|(path, file)| (renamed(path), file)).collect();
    }

    /// Returns the invalid files of other tools in the directory of Multus's auxiliary chain, each with the reason.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn invalid_chain_files(
        &self,
        directory: &HostPath,
        record: &InstallRecord,
    ) -> Result<Vec<String>, InstallError> {
        self.invalid_files(directory, &record.files.keys().collect::<Vec<_>>())
    }

    fn invalid_files(&self, directory: &HostPath, own: &[&HostPath]) -> Result<Vec<String>, InstallError> {
        let names = self.names(directory)?.into_iter().filter(|name| name.ends_with(".conf"));
        let paths = names.map(|name| directory.join(&name)).filter(|path| !own.contains(&path));
        let invalid = |path: HostPath| match self.file(&path) {
            Ok(Some(_)) => match self.root.reach(&path).and_then(|reached| trusted_file::read(&reached, MAX_TEXT_SIZE))
            {
                Ok(text) => check_chained_plugin(&path.to_string(), &text).err().map(|error| error.msg),
                Err(error) => Some(format!("{path}: {error}")),
            },
            Ok(None) => self.not_a_file(&path).map(|found| format!("{path}: expected a file, got {found}")),
            Err(error) => Some(format!("{path}: {error}")),
        };
        Ok(paths.filter_map(invalid).collect())
    }

    /// Returns what an entry is instead of a file, in words; `None` for a directory, which libcni skips, and for an entry
    /// that has been removed.
    fn not_a_file(&self, path: &HostPath) -> Option<&'static str> {
        let entry = self.root.reach_entry(path).and_then(fs::symlink_metadata).ok()?;
        if entry.is_dir() {
            return None;
        }
        let what = "a symbolic link to a missing file, to one that is not mounted here, or to a directory";
        Some(if entry.is_symlink() { what } else { "a device, socket or pipe" })
    }

    /// Returns the installation record; `None` if nothing is installed.
    ///
    /// # Errors
    /// The record can't be read or is invalid.
    pub(super) fn record(&self) -> Result<Option<InstallRecord>, InstallError> {
        let path = record_path();
        match self.root.reach(&path).and_then(|path| read_nofollow(&path, MAX_RECORD_SIZE)) {
            Ok(text) => format::parse(&text).map(Some).map_err(|cause| InstallError::Record { path, cause }),
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

    /// Returns why a file in the record can't be changed here: its directory is not mounted, or mounted read-only. In a
    /// process that sees the whole node, a directory that does not exist contains nothing.
    fn unreachable(&self, path: &HostPath) -> Option<String> {
        let directory = path.parent();
        let next = "mount this directory in the agent's container (with the chart: run helm upgrade with the earlier value, \
                    then with the new one), or run `detour uninstall` on the node itself";
        if !self.has(&directory) {
            let is_whole_node = self.root.mount() == Path::new("/") || self.has(&HostPath::root().join("usr"));
            return (!is_whole_node).then(|| format!("{directory} is not mounted here: {next}"));
        }
        let is_read_only = statvfs(&self.root.reach(&directory).ok()?)
            .is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY));
        is_read_only.then(|| format!("{directory} is mounted read-only here: {next}"))
    }

    /// Whether no file in the directory was added, removed or written for [`SETTLING`].
    fn is_settled(&self, directory: &HostPath, files: &[ConfFile]) -> bool {
        let is_old = |path: HostPath| {
            let changed = self.root.reach(&path).and_then(fs::metadata).and_then(|metadata| metadata.modified());
            changed.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age > SETTLING))
        };
        is_old(directory.clone()) && files.iter().all(|file| is_old(directory.join(&file.name)))
    }

    /// Returns the files in a directory that configurations on the node name (`clusterNetwork`,
    /// `readinessindicatorfile`), each with the configuration that names it. Go ignores the case of keys.
    fn named_in(&self, dir: &HostPath) -> Result<BTreeMap<HostPath, HostPath>, InstallError> {
        let mut named = BTreeMap::new();
        let own = self.root.reach(dir).ok();
        let is_in = |file: &HostPath| self.root.reach(&file.parent()).is_ok_and(|found| Some(found) == own);
        let others = RUNTIME_DIRECTORIES.into_iter().filter_map(HostPath::new);
        for directory in BTreeSet::from_iter([dir.clone()].into_iter().chain(others)) {
            for name in self.names(&directory)?.iter().filter(|name| is_configuration_file(name)) {
                let path = directory.join(name);
                let text = self.file(&path).ok().flatten().and_then(|file| file.text).unwrap_or_default();
                let conf: Value = serde_json::from_str(&text).unwrap_or_default();
                let plugins = conf["plugins"].as_array().into_iter().flatten().chain([&conf]);
                let is_name = |key: &str| ["clusternetwork", "readinessindicatorfile"].contains(&&*key.to_lowercase());
                let keys = plugins.filter_map(Value::as_object).flatten().filter(|(key, _)| is_name(key));
                for value in keys.filter_map(|(_, value)| value.as_str()) {
                    let values = [Some(value), value.strip_prefix("/host")].into_iter().flatten();
                    let inside = values.filter_map(HostPath::new).find(is_in);
                    named.extend(inside.map(|file| (dir.join(&file.name()), path.clone())));
                }
            }
        }
        Ok(named)
    }

    /// Returns the configurations in a directory, and a note for each symbolic link before the first usable one that
    /// leads to no file.
    fn configurations(
        &self,
        dir: &HostPath,
        desired: &DesiredState,
    ) -> Result<(Vec<ConfFile>, Vec<String>), InstallError> {
        let names = self.names(dir)?;
        let (mut files, mut links) = (Vec::new(), Vec::new());
        for name in names.into_iter().filter(|name| is_configuration_file(name)) {
            let path = dir.join(&name);
            let is_link = || self.root.reach_entry(&path).is_ok_and(|entry| entry.is_symlink());
            let file = match self.file(&path) {
                Ok(None) if is_link() => {
                    let what = "symbolic link to a missing file, or to one that is not mounted here";
                    links.push((name, format!("{path}: skipped: {what}")));
                    continue;
                }
                Err(error) if error.raw_os_error() == Some(Errno::ELOOP as i32) => {
                    links.push((name, format!("{path}: skipped: {error}")));
                    continue;
                }
                file => file.map_err(|error| InstallError::file("read", &path, &error))?,
            };
            let Some(file) = file else { continue };
            let beside = file.text.as_deref().and_then(conflist::directory).map(|name| dir.join(&name));
            let has_directory = beside.is_some_and(|directory| {
                self.names(&directory).is_ok_and(|names| names.iter().any(|name| name.ends_with(".conf")))
            });
            let missing_programs = file.text.as_deref().and_then(|text| self.missing_programs(text, desired));
            let contents = file.text.map_or_else(|| NOT_TEXT.to_vec(), String::into_bytes);
            let untrusted = self.untrusted_path(&path);
            files.push(ConfFile { name, contents, mode: file.mode, untrusted, has_directory, missing_programs });
        }
        let first =
            files.iter().filter(|file| file.name != OWN_LIST && is_pod_network(file)).map(|file| &file.name).min();
        links.retain(|(name, _)| first.is_none_or(|first| name < first));
        Ok((files, links.into_iter().map(|(_, note)| note).collect()))
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

    /// Applies the plan; `program` is the file to copy. The record is written before the first change. What the plan
    /// reverts leaves the record after the last change; the record is removed if nothing is left in it.
    ///
    /// # Errors
    /// The file system refuses a change. The changes before it stay, and every configuration is complete.
    pub fn apply(&self, plan: &InstallPlan, program: &Path, _: &InstallLock) -> Result<(), InstallError> {
        let is_empty = plan.record.is_empty();
        if !is_empty {
            let mut files = self.record().ok().flatten().unwrap_or_default().files;
            files.extend(plan.record.files.clone());
            self.write_record(&InstallRecord { files, ..plan.record.clone() })?;
        }
        for action in &plan.actions {
            let verb = if matches!(action, FileAction::Remove { .. }) { "remove" } else { "write" };
            self.act(action, program).map_err(|error| InstallError::file(verb, action.path(), &error))?;
        }
        if !is_empty {
            return self.write_record(&plan.record);
        }
        let path = record_path();
        let removed = self.root.reach_entry(&path).and_then(|path| atomic::remove(&path));
        removed.map_err(|error| InstallError::file("remove", &path, &error))
    }

    fn write_record(&self, record: &InstallRecord) -> Result<(), InstallError> {
        if self.record().is_ok_and(|current| current.as_ref() == Some(record)) {
            return Ok(());
        }
        let path = record_path();
        let write = || {
            let text = format::print(record)?;
            atomic::write(&self.root.reach_entry(&path)?, 0o600, FileOwner::Own, |file| file.write_all(&text))
        };
        write().map_err(|error| InstallError::file("write", &path, &error))
    }

    fn act(&self, action: &FileAction, program: &Path) -> io::Result<()> {
        let entry = |path: &HostPath| self.root.reach_entry(path);
        match action {
            FileAction::CopyProgram { path } => atomic::write(&entry(path)?, 0o755, FileOwner::Own, |file| {
                io::copy(&mut trusted_file::follow(program)?, file).map(|_| ())
            }),
            FileAction::Write { path, text, mode, follow, .. } => {
                // A link leads to another tool's file, which keeps its owner.
                let (path, owner) =
                    if *follow { (self.root.reach(path)?, FileOwner::Kept) } else { (entry(path)?, FileOwner::Own) };
                atomic::write(&path, *mode, owner, |file| file.write_all(text.as_bytes()))
            }
            FileAction::Remove { path, .. } => atomic::remove(&entry(path)?),
        }
    }
}

fn record_path() -> HostPath {
    state_path(RECORD)
}

/// Opens a file for reading; [`HostRoot`] has resolved its path.
fn open(reached: &Path) -> io::Result<File> {
    trusted_file::open(reached, OFlags::RDONLY)
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
