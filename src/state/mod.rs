//! Saved state: one file per attachment in one directory per pod sandbox, each replaced atomically.

pub mod format;

use crate::cni::{Code, Error};
use crate::trusted_file::{self, Durability, exchange_file, open, read_nofollow, replace_file};
use rustix::fs::OFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The default directory of saved state. A reboot empties it, as it removes the network namespaces.
pub const ROOT: &str = "/run/detour/attachments";

/// The maximum size of a record, in bytes. Versions without limits wrote records of 5 MiB from a pod's
/// annotations, and a DEL must still read those.
const MAX_RECORD_BYTES: u64 = 16 << 20;

/// Separates network and interface in the name of a file: a network name cannot contain it.
const SEPARATOR: char = '@';
const SUFFIX: &str = ".json";

/// An attachment, identified as in CNI (SPEC.md, "Deletion") by container ID, network and interface. The caller
/// has checked each part with [`crate::cni`]; none contains `/`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attachment {
    /// `CNI_CONTAINERID`: the ID of the pod sandbox.
    pub container_id: String,
    /// The configuration's `name`.
    pub network: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attachment {}/{} of pod sandbox {}", self.network, self.ifname, self.container_id)
    }
}

/// A directory with the saved state of attachments.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    durability: Durability,
}

impl Store {
    /// Returns the store in the directory `root`, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), durability: Durability::Volatile }
    }

    /// Returns the store in the directory `root` whose records survive a crash of the node: [`Self::write`]
    /// returns when the record is on the disk.
    pub fn durable(root: impl Into<PathBuf>) -> Self {
        // After a crash, an older record serves as well as this one. A missing one does not.
        Self { root: root.into(), durability: Durability::OldOrNew }
    }

    /// Reads the record of an attachment; `None` if it has none.
    ///
    /// # Errors
    /// The file can't be read, is damaged, or was written by a newer version.
    pub fn read<T: DeserializeOwned>(&self, attachment: &Attachment) -> Result<Option<T>, Error> {
        self.read_with(&self.file(attachment), attachment, format::parse)
    }

    /// Reads the part of a record that every version has, newer ones too; `None` if there is no record.
    ///
    /// # Errors
    /// The file can't be read or is damaged.
    pub fn read_part<T: DeserializeOwned>(&self, attachment: &Attachment) -> Result<Option<T>, Error> {
        self.read_with(&self.file(attachment), attachment, format::parse_part)
    }

    /// Returns the attachments of a pod sandbox that have a record, sorted by name.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn attachments_of(&self, container_id: &str) -> Result<Vec<Attachment>, Error> {
        let names = names_in(&self.directory(container_id))?;
        let parse = |name: &String| {
            let (network, ifname) = name.strip_suffix(SUFFIX)?.split_once(SEPARATOR)?;
            let owned = |text: &str| text.to_owned();
            Some(Attachment { container_id: owned(container_id), network: owned(network), ifname: owned(ifname) })
        };
        Ok(names.iter().filter(|name| !is_temporary(name)).filter_map(parse).collect())
    }

    /// Returns the pod sandboxes that have a record.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn sandboxes(&self) -> Result<Vec<String>, Error> {
        Ok(names_in(&self.root)?.into_iter().filter(|name| !is_temporary(name)).collect())
    }

    /// Returns all attachments that have a record. Other programs may have files in the directory.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn attachments(&self) -> Result<Vec<Attachment>, Error> {
        Ok(self.sandboxes()?.iter().filter_map(|id| self.attachments_of(id).ok()).flatten().collect())
    }

    /// Writes the record of an attachment and replaces an earlier one.
    ///
    /// # Errors
    /// The directory or file can't be written.
    pub fn write<T: Serialize>(&self, attachment: &Attachment, record: &T) -> Result<(), Error> {
        self.replace(&self.file(attachment), record)
    }

    /// Replaces the record of an attachment. Returns false if it has no record: a DEL may have removed it meanwhile, and
    /// nothing must create it again.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn update<T: Serialize>(&self, attachment: &Attachment, record: &T) -> Result<bool, Error> {
        let path = self.file(attachment);
        let exchange = |text: Vec<u8>| exchange_file(&path, &temporary_name(&path), |file| file.write_all(&text));
        match format::print(record).and_then(exchange) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.remove_directory_if_empty(&attachment.container_id);
                Ok(false)
            }
            written => written.map(|()| true).map_err(|error| io_error("write", &path, &error)),
        }
    }

    /// Removes the record of an attachment, if there is one, and the pod sandbox's directory with its last record. A
    /// directory at its path is removed too: a DEL must not leave rules behind because of it.
    ///
    /// # Errors
    /// The file can't be removed.
    pub fn remove(&self, attachment: &Attachment) -> Result<(), Error> {
        let path = self.file(attachment);
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::IsADirectory => fs::remove_dir_all(&path),
            other => other,
        };
        removed.or_else(|error| if is_missing(&error) { Ok(()) } else { Err(io_error("remove", &path, &error)) })?;
        self.remove_directory_if_empty(&attachment.container_id);
        Ok(())
    }

    /// Reads a file that the attachments of a pod sandbox share; `None` if it is missing.
    ///
    /// # Errors
    /// The file can't be read, is damaged, or was written by a newer version.
    pub fn read_shared<T: DeserializeOwned>(&self, container_id: &str, name: &str) -> Result<Option<T>, Error> {
        let path = self.directory(container_id).join(name);
        self.read_with(&path, &format_args!("pod sandbox {container_id}"), format::parse)
    }

    /// Writes a file that the attachments of a pod sandbox share. Its name starts with a dot, and it disappears with the
    /// last record.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn write_shared<T: Serialize>(&self, container_id: &str, name: &str, record: &T) -> Result<(), Error> {
        self.replace(&self.directory(container_id).join(name), record)
    }

    /// Writes a shared file of a pod sandbox that has a record. Returns false if the file exists.
    ///
    /// # Errors
    /// As [`Self::write_shared`].
    pub fn create_shared<T: Serialize>(&self, container_id: &str, name: &str, record: &T) -> Result<bool, Error> {
        let path = self.directory(container_id).join(name);
        let created = format::print(record)
            .and_then(|text| open(&path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?.write_all(&text));
        match created {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            // Another process removed the directory with the last record.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.write_shared(container_id, name, record).map(|()| true)
            }
            written => written.map(|()| true).map_err(|error| io_error("write", &path, &error)),
        }
    }

    /// Checks that a record can be written now.
    ///
    /// # Errors
    /// The directory can't be created or written to.
    pub fn probe(&self) -> Result<(), Error> {
        // One name, so that a probe that is killed leaves at most one file, which the next probe removes.
        let path = self.root.join(".probe");
        let written =
            replace_file(&path, ".probe.tmp", self.durability, |_| Ok(())).and_then(|()| fs::remove_file(&path));
        // A concurrent probe has removed the file, or created it meanwhile.
        let is_concurrent = |error: &io::Error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists);
        written.or_else(|error| if is_concurrent(&error) { Ok(()) } else { Err(io_error("write", &path, &error)) })
    }

    fn directory(&self, container_id: &str) -> PathBuf {
        self.root.join(container_id)
    }

    fn file(&self, attachment: &Attachment) -> PathBuf {
        let name = format!("{}{SEPARATOR}{}{SUFFIX}", attachment.network, attachment.ifname);
        self.directory(&attachment.container_id).join(name)
    }

    fn replace<T: Serialize>(&self, path: &Path, record: &T) -> Result<(), Error> {
        let replace =
            |text: Vec<u8>| replace_file(path, &temporary_name(path), self.durability, |file| file.write_all(&text));
        format::print(record).and_then(replace).map_err(|error| io_error("write", path, &error))
    }

    fn read_with<T>(
        &self,
        path: &Path,
        of: &dyn fmt::Display,
        parse: impl FnOnce(&[u8]) -> Result<T, String>,
    ) -> Result<Option<T>, Error> {
        let parsed = match read_nofollow(path, MAX_RECORD_BYTES) {
            Ok(text) => parse(&text).map(Some),
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) if is_permanent(&error) => Err(error.to_string()),
            Err(error) => return Err(io_error("read", path, &error)),
        };
        parsed.map_err(|cause| {
            let path = path.display();
            let next = "delete the pod, or this file if the pod no longer exists";
            Error::new(Code::State, format!("{path}: can't read the saved state of {of}: {cause}; {next}"))
        })
    }

    /// Removes the directory of a pod sandbox without records, and temporary files of killed calls in it. A
    /// directory that can't be removed is harmless.
    fn remove_directory_if_empty(&self, container_id: &str) {
        let directory = self.directory(container_id);
        if let Ok(leftovers) = trusted_file::names_in(&directory)
            && leftovers.iter().all(|name| is_temporary(name))
        {
            for leftover in leftovers {
                let _ = fs::remove_file(directory.join(leftover));
            }
            // If another call has added an attachment meanwhile, the directory stays.
            let _ = fs::remove_dir(&directory);
        }
    }
}

/// Returns the name under which this process writes the new contents of `path`.
fn temporary_name(path: &Path) -> String {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    format!(".{}.{name}", std::process::id())
}

/// Returns whether `name` is the name of a temporary file: the names of networks and pod sandboxes start with a
/// letter or digit.
fn is_temporary(name: &str) -> bool {
    name.starts_with('.')
}

/// Returns the names in a directory, sorted; none if the directory is missing.
fn names_in(directory: &Path) -> Result<Vec<String>, Error> {
    match trusted_file::names_in(directory) {
        Err(error) if is_missing(&error) => Ok(Vec::new()),
        names => names.map_err(|error| io_error("read", directory, &error)),
    }
}

/// Returns whether there is no such file. A name that is too long for one never had any, and Multus has a file with the
/// name of the pod sandbox's directory.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidFilename | ErrorKind::NotADirectory)
}

/// Returns whether a retry can't succeed: the path leads to a file that can't be a record.
fn is_permanent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::IsADirectory | ErrorKind::InvalidInput | ErrorKind::FileTooLarge)
}

fn io_error(action: &str, path: &Path, cause: &io::Error) -> Error {
    Error::new(Code::Io, format!("{}: can't {action} saved state: {cause}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Directory;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Number {
        n: u32,
    }

    fn attachment(container_id: &str, network: &str, ifname: &str) -> Attachment {
        let owned = |text: &str| text.to_owned();
        Attachment { container_id: owned(container_id), network: owned(network), ifname: owned(ifname) }
    }

    fn store(name: &str) -> (Directory, Store) {
        let directory = Directory::new(&format!("state-{name}"));
        let store = Store::new(directory.join("root"));
        (directory, store)
    }

    #[test]
    fn a_record_can_be_read_until_it_is_removed() {
        let (_directory, store) = store("write");
        let (one, two) = (attachment("c", "istio-cni", "net1"), attachment("c", "a.b", "net2@x"));
        assert_eq!(store.read::<Number>(&one).expect("readable"), None);
        store.write(&one, &Number { n: 1 }).expect("writable");
        store.write(&two, &Number { n: 2 }).expect("writable");
        store.write(&one, &Number { n: 3 }).expect("writable");
        assert_eq!(store.read(&one).expect("readable"), Some(Number { n: 3 }));
        assert_eq!(store.attachments_of("c").expect("readable"), [two.clone(), one.clone()]);
        store.remove(&one).expect("removable");
        store.remove(&one).expect("removable twice");
        assert_eq!(store.sandboxes().expect("readable"), ["c"]);
        store.remove(&two).expect("removable");
        assert!(store.sandboxes().expect("readable").is_empty());
    }

    #[test]
    fn an_update_replaces_a_record_and_creates_none() {
        let (_directory, store) = store("update");
        let one = attachment("c", "n", "net1");
        assert!(!store.update(&one, &Number { n: 1 }).expect("writable"));
        assert!(!store.root.exists());
        store.write(&one, &Number { n: 1 }).expect("writable");
        assert!(store.update(&one, &Number { n: 2 }).expect("writable"));
        assert_eq!(store.read(&one).expect("readable"), Some(Number { n: 2 }));
        assert_eq!(fs::read_dir(store.directory("c")).expect("readable").count(), 1);
        store.remove(&one).expect("removable");
        fs::create_dir(store.directory("c")).expect("creatable");
        assert!(!store.update(&one, &Number { n: 3 }).expect("writable"));
        assert!(!store.directory("c").exists());
    }

    #[test]
    fn a_name_that_is_too_long_for_a_file_has_no_record() {
        let (_directory, store) = store("long");
        let long = "n".repeat(300);
        store.write(&attachment("c", "n", "net1"), &Number { n: 1 }).expect("writable");
        for one in [attachment("c", &long, "net1"), attachment(&long, "n", "net1")] {
            assert_eq!(store.read::<Number>(&one).expect("no record"), None);
            store.remove(&one).expect("nothing to remove");
            store.write(&one, &Number { n: 1 }).expect_err("too long");
        }
        assert!(store.attachments_of(&long).expect("no record").is_empty());
        assert_eq!(store.attachments_of("c").expect("readable").len(), 1);
    }

    #[test]
    fn a_truncated_file_is_an_error_with_its_path() {
        let (_directory, store) = store("truncated");
        let one = attachment("c", "n", "net1");
        store.write(&one, &Number { n: 1 }).expect("writable");
        fs::write(store.file(&one), "{\"n").expect("writable");
        let error = store.read::<Number>(&one).expect_err("truncated");
        assert_eq!(error.code, Code::State);
        assert!(error.msg.contains("/c/n@net1.json: "), "{error}");
        store.remove(&one).expect("removable");
    }

    #[test]
    fn a_probe_removes_the_file_of_a_killed_one() {
        let (_directory, store) = store("probe");
        store.probe().expect("writable");
        fs::write(store.root.join(".probe"), "").expect("writable");
        store.probe().expect("writable");
        assert_eq!(fs::read_dir(&store.root).expect("readable").count(), 0);
    }

    #[test]
    fn concurrent_probes_succeed() {
        let (_directory, store) = store("probes");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|_| store.probe().expect("writable")));
            }
        });
    }

    #[test]
    fn a_directory_at_the_path_of_a_record_is_removed() {
        let (_directory, store) = store("directory");
        let one = attachment("c", "n", "net1");
        fs::create_dir_all(store.file(&one).join("below")).expect("creatable");
        assert_eq!(store.read::<Number>(&one).expect_err("a directory").code, Code::State);
        store.remove(&one).expect("removable");
        assert!(store.sandboxes().expect("readable").is_empty());
    }

    #[test]
    fn links_at_the_path_of_a_record_or_temporary_file_are_not_followed() {
        let (directory, store) = store("links");
        let (store, one) = (Store::durable(store.root), attachment("c", "n", "net1"));
        let target = directory.join("target");
        fs::write(&target, "7").expect("written");
        store.write(&one, &Number { n: 1 }).expect("writable");
        let path = store.file(&one);
        let temporary = path.with_file_name(temporary_name(&path));
        std::os::unix::fs::symlink(&target, &temporary).expect("linked");
        store.write(&one, &Number { n: 2 }).expect("writable");
        assert_eq!(store.read(&one).expect("readable"), Some(Number { n: 2 }));
        fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink(&target, &path).expect("linked");
        let error = store.read::<Number>(&one).expect_err("a link");
        assert!(error.msg.contains("expected a regular file, got a symbolic link"), "{error}");
        store.write(&one, &Number { n: 3 }).expect("writable");
        assert_eq!(fs::read(&target).expect("read"), b"7");
    }

    #[test]
    fn a_temporary_file_of_a_killed_call_is_ignored_and_removed_with_the_last_record() {
        let (_directory, store) = store("leftover");
        let one = attachment("c", "n", "net1");
        store.write(&one, &Number { n: 1 }).expect("writable");
        fs::write(store.directory("c").join(".7.n@net9.json"), "").expect("writable");
        assert_eq!(store.attachments_of("c").expect("readable").len(), 1);
        store.remove(&one).expect("removable");
        assert!(!store.directory("c").exists());
    }
}
