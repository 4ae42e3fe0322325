//! What is kept of each attachment for as long as its network namespace can live: one file an
//! attachment, one directory a container, written whole or not at all.

pub mod format;

use crate::cni::{Code, Error};
use crate::trusted_file::{create_directories, create_new, open_directory, read_nofollow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Where state lives unless told otherwise: it goes with a reboot, as the namespaces do.
pub const ROOT: &str = "/run/detour/attachments";

/// An attachment, as CNI knows one (SPEC.md, "Deletion"): container, network, interface. Each
/// part is checked by [`crate::cni`] before it comes here and holds no `/`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attachment {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// The configuration's `name`.
    pub network: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
}

impl std::fmt::Display for Attachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "attachment {}/{} of container {}", self.network, self.ifname, self.container_id)
    }
}

/// The directory in which all is kept.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    /// Whether a record must survive a crash of the node.
    durable: bool,
}

/// The largest record, in bytes. Versions without limits made records of 5 MiB from a pod's annotations, and a
/// DEL must still read those.
const LARGEST: u64 = 16 << 20;

/// Between network and interface in a file's name: no network's name can hold it.
const SEPARATOR: char = '@';
const SUFFIX: &str = ".json";

impl Store {
    /// State below `root`, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), durable: false }
    }

    /// State below `root` of which a crash of the node leaves whole records: [`Self::write`] returns when the
    /// record is on the disk.
    pub fn durable(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), durable: true }
    }

    fn directory(&self, container_id: &str) -> PathBuf {
        self.root.join(container_id)
    }

    fn file(&self, attachment: &Attachment) -> PathBuf {
        let name = format!("{}{SEPARATOR}{}{SUFFIX}", attachment.network, attachment.ifname);
        self.directory(&attachment.container_id).join(name)
    }

    /// What was kept of one attachment.
    ///
    /// # Errors
    /// It can't be read or understood.
    pub fn read<T: DeserializeOwned>(&self, attachment: &Attachment) -> Result<Option<T>, Error> {
        self.read_by(attachment, format::parse)
    }

    /// The part of a record that every version has, newer ones too.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_part<T: DeserializeOwned>(&self, attachment: &Attachment) -> Result<Option<T>, Error> {
        self.read_by(attachment, format::parse_part)
    }

    fn read_by<T>(
        &self,
        attachment: &Attachment,
        parse: impl FnOnce(&[u8]) -> Result<T, format::Unreadable>,
    ) -> Result<Option<T>, Error> {
        let path = self.file(attachment);
        let text = match read_nofollow(&path, LARGEST) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) if is_lasting(&error) => return Err(not_understood(&path, attachment, &error)),
            Err(error) => return Err(failed("read", &path, &error)),
        };
        parse(&text).map(Some).map_err(|error| not_understood(&path, attachment, &error))
    }

    /// The attachments of a container of which something is kept, in the order of their names.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn of_container(&self, container_id: &str) -> Result<Vec<Attachment>, Error> {
        let names = names_in(&self.directory(container_id))?;
        let parse = |name: &String| {
            let (network, ifname) = name.strip_suffix(SUFFIX)?.split_once(SEPARATOR)?;
            let (network, ifname) = (network.to_owned(), ifname.to_owned());
            Some(Attachment { container_id: container_id.to_owned(), network, ifname })
        };
        Ok(names.iter().filter(|name| !is_temporary(name)).filter_map(parse).collect())
    }

    /// The containers of which something is kept.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn containers(&self) -> Result<Vec<String>, Error> {
        Ok(names_in(&self.root)?.into_iter().filter(|name| !is_temporary(name)).collect())
    }

    /// Keeps `record`, in place of what was kept.
    ///
    /// # Errors
    /// The directory or file can't be written.
    pub fn write<T: Serialize>(&self, attachment: &Attachment, record: &T) -> Result<(), Error> {
        let path = self.file(attachment);
        let text = format::print(record).map_err(|e| failed("write", &path, &e.into()))?;
        self.replace(&path, &text).map_err(|e| failed("write", &path, &e))
    }

    fn replace(&self, path: &Path, text: &[u8]) -> io::Result<()> {
        let temporary = path.with_file_name(format!(".{}.{}", std::process::id(), file_name(path)));
        // After a crash, an older record is as good as this one; none is not.
        let is_new = self.durable && !path.exists();
        let written = loop {
            match self.write_in_directory(&temporary, text).and_then(|()| fs::rename(&temporary, path)) {
                // Whoever removed the container's last attachment in between took this for a leftover.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                other => break other,
            }
        };
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written?;
        if is_new { flush(path.parent().unwrap_or(&self.root)) } else { Ok(()) }
    }

    /// Another call may remove the directory just after it was made, so it is made as often as needed.
    /// There may be secrets in the text: a delegate's configuration is its own affair.
    fn write_in_directory(&self, path: &Path, text: &[u8]) -> io::Result<()> {
        let fill = |mut file: File| {
            file.write_all(text)?;
            if self.durable { file.sync_all() } else { Ok(()) }
        };
        let Some(directory) = path.parent() else { return Err(ErrorKind::InvalidInput.into()) };
        loop {
            match create_new(path).and_then(fill) {
                Err(error) if error.kind() == ErrorKind::NotFound => create_directories(directory)?,
                other => return other,
            }
        }
    }

    /// Forgets an attachment, and the container's directory with the last of them.
    ///
    /// # Errors
    /// The file can't be removed; that there is none is no error.
    pub fn remove(&self, attachment: &Attachment) -> Result<(), Error> {
        let path = self.file(attachment);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed("remove", &path, &error)),
            _ => {}
        }
        self.tidy_up(&attachment.container_id);
        Ok(())
    }

    /// Removes the directory of a container without attachments; one that stays does no harm.
    fn tidy_up(&self, container_id: &str) {
        let directory = self.directory(container_id);
        if self.of_container(container_id).is_ok_and(|attachments| attachments.is_empty()) {
            // What a killed call left behind goes too.
            for leftover in names_in(&directory).unwrap_or_default().iter().filter(|name| is_temporary(name)) {
                let _ = fs::remove_file(directory.join(leftover));
            }
            // Another attachment may have been added meanwhile; then the directory stays.
            let _ = fs::remove_dir(&directory);
        }
    }

    /// Whether a record could be kept now.
    ///
    /// # Errors
    /// The directory can't be made or written to.
    pub fn probe(&self) -> Result<(), Error> {
        let path = self.root.join(format!(".probe.{}", std::process::id()));
        let written = self.write_in_directory(&path, b"").and_then(|()| fs::remove_file(&path));
        written.map_err(|e| failed("write", &path, &e))
    }
}

/// A file that is being written, or was when its writer was killed; a network's name starts with
/// a letter or digit.
fn is_temporary(name: &str) -> bool {
    name.starts_with('.')
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

/// A name lasts when its directory is on the disk; another call may have removed both meanwhile.
fn flush(directory: &Path) -> io::Result<()> {
    match open_directory(directory).and_then(|directory| directory.sync_all()) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn names_in(directory: &Path) -> Result<Vec<String>, Error> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed("read", directory, &error)),
    };
    // An entry that can't be read may be any: without it the list would be wrong.
    let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.file_name().into_string().ok())).collect();
    let mut names: Vec<String> = names.map_err(|e| failed("read", directory, &e))?.into_iter().flatten().collect();
    names.sort();
    Ok(names)
}

/// Whether the next call will see this error too: the path leads to no file that can hold state.
fn is_lasting(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::IsADirectory | ErrorKind::InvalidInput | ErrorKind::FileTooLarge)
}

fn not_understood(path: &Path, attachment: &Attachment, why: &dyn std::fmt::Display) -> Error {
    let msg = format!(
        "{}: what was kept of the {attachment} can't be understood ({why}); delete the pod, or this file if the pod is gone",
        path.display()
    );
    Error::new(Code::State, msg)
}

fn failed(what: &str, path: &Path, why: &io::Error) -> Error {
    Error::new(Code::Io, format!("{}: can't {what} it: {why}", path.display()))
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
    fn what_is_kept_is_found_until_it_is_removed() {
        let (_directory, store) = store("keep");
        let (one, two) = (attachment("c", "istio-cni", "net1"), attachment("c", "a.b", "net2@x"));
        assert_eq!(store.read::<Number>(&one).expect("readable"), None);
        store.write(&one, &Number { n: 1 }).expect("writable");
        store.write(&two, &Number { n: 2 }).expect("writable");
        store.write(&one, &Number { n: 3 }).expect("writable");
        assert_eq!(store.read(&one).expect("readable"), Some(Number { n: 3 }));
        assert_eq!(store.of_container("c").expect("readable"), [two.clone(), one.clone()]);
        store.remove(&one).expect("removable");
        store.remove(&one).expect("removable twice");
        assert_eq!(store.containers().expect("readable"), ["c"]);
        store.remove(&two).expect("removable");
        assert!(store.containers().expect("readable").is_empty());
    }

    #[test]
    fn a_truncated_file_is_an_error_that_names_it() {
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
    fn a_link_in_the_place_of_a_record_or_of_a_temporary_file_leads_nowhere() {
        let (directory, store) = store("links");
        let (store, one) = (Store::durable(store.root), attachment("c", "n", "net1"));
        let elsewhere = directory.join("elsewhere");
        fs::write(&elsewhere, "7").expect("written");
        store.write(&one, &Number { n: 1 }).expect("writable");
        let path = store.file(&one);
        let temporary = path.with_file_name(format!(".{}.{}", std::process::id(), file_name(&path)));
        std::os::unix::fs::symlink(&elsewhere, &temporary).expect("linked");
        store.write(&one, &Number { n: 2 }).expect("writable");
        assert_eq!(store.read(&one).expect("readable"), Some(Number { n: 2 }));
        fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink(&elsewhere, &path).expect("linked");
        let error = store.read::<Number>(&one).expect_err("a link");
        assert!(error.msg.contains("expected a regular file, got a symbolic link"), "{error}");
        store.write(&one, &Number { n: 3 }).expect("writable");
        assert_eq!(fs::read(&elsewhere).expect("read"), b"7");
    }

    #[test]
    fn a_leftover_of_a_killed_call_is_no_attachment_and_goes_with_the_last() {
        let (_directory, store) = store("leftover");
        let one = attachment("c", "n", "net1");
        store.write(&one, &Number { n: 1 }).expect("writable");
        fs::write(store.directory("c").join(".7.n@net9.json"), "").expect("writable");
        assert_eq!(store.of_container("c").expect("readable").len(), 1);
        store.remove(&one).expect("removable");
        assert!(!store.directory("c").exists());
    }
}
