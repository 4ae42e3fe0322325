//! The cluster CNIs of real clusters: which configuration each one writes, and how. The files are in
//! `tests/golden/own_list.md`, below `NAME/before`.

use crate::support::golden::cases;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

pub(crate) const GOLDEN: &str = "own_list.md";

/// How a program replaces a file.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    /// Truncates the file and writes it in place.
    InPlace,
    /// Writes a file of this name in the same directory, and renames it.
    Rename(String),
    /// Removes the file and creates it again.
    Recreate,
    /// The file is a symbolic link through `..data`, which is replaced, as the kubelet does in volumes.
    Symlink,
}

impl Method {
    /// Replaces the file `name` in `directory`.
    pub(crate) fn write(&self, directory: &Path, name: &str, text: &str) {
        let path = directory.join(name);
        match self {
            Self::InPlace => fs::write(&path, text).expect("written"),
            Self::Rename(temporary) => {
                let temporary = directory.join(temporary);
                fs::write(&temporary, text).expect("written");
                let mode = fs::metadata(&path).map_or(0o644, |file| file.permissions().mode());
                fs::set_permissions(&temporary, Permissions::from_mode(mode)).expect("set");
                fs::rename(&temporary, &path).expect("renamed");
            }
            Self::Recreate => {
                fs::remove_file(&path).expect("removed");
                fs::write(&path, text).expect("written");
            }
            Self::Symlink => {
                let data = directory.join("..data");
                let earlier = fs::read_link(&data).ok();
                let number = earlier.as_ref().and_then(|name| name.to_str()?.strip_prefix("..v")?.parse::<u32>().ok());
                let next = format!("..v{}", number.unwrap_or(0) + 1);
                fs::create_dir(directory.join(&next)).expect("made");
                fs::write(directory.join(&next).join(name), text).expect("written");
                let temporary = directory.join("..data_tmp");
                symlink(&next, &temporary).expect("linked");
                fs::rename(&temporary, &data).expect("renamed");
                if earlier.is_none() {
                    let _ = fs::remove_file(&path);
                    symlink(Path::new("..data").join(name), &path).expect("linked");
                }
                if let Some(earlier) = earlier {
                    fs::remove_dir_all(directory.join(earlier)).expect("removed");
                }
            }
        }
    }
}

/// A cluster CNI, as cluster_cnis.yaml describes it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ClusterCni {
    /// Its name in the golden file.
    pub(crate) name: String,
    /// The source code that writes the file: repository and commit, path, function.
    pub(crate) source: String,
    /// The file that it writes.
    pub(crate) file: String,
    /// The file's permission bits.
    mode: String,
    /// How it writes the file.
    pub(crate) method: Method,
    /// A text in the file, and the text that an upgrade puts in its place.
    pub(crate) change: (String, String),
}

pub(crate) static CLUSTER_CNIS: LazyLock<Vec<ClusterCni>> =
    LazyLock::new(|| serde_saphyr::from_str(include_str!("cluster_cnis.yaml")).expect("YAML"));

impl ClusterCni {
    /// Returns the cluster CNI of this name.
    pub(crate) fn named(name: &str) -> Self {
        CLUSTER_CNIS.iter().find(|cni| cni.name == name).expect("a cluster CNI").clone()
    }

    /// Returns the files of its directory.
    pub(crate) fn before(&self) -> BTreeMap<String, String> {
        cases(GOLDEN, &format!("{}/before/", self.name))
    }

    /// Returns the file that it writes.
    pub(crate) fn text(&self) -> String {
        self.before().remove(&self.file).expect("a golden file")
    }

    /// Returns `text`, which the agent may have formatted, as an upgrade of the cluster CNI changes it.
    pub(crate) fn upgraded(&self, text: &str) -> String {
        let formatted = |text: &str| text.replace("\":\"", "\": \"");
        let (from, to) = &self.change;
        let (from, to) =
            if text.contains(from.as_str()) { (from.clone(), to.clone()) } else { (formatted(from), formatted(to)) };
        assert!(text.contains(&from), "{}: {from} is not in {text}", self.name);
        text.replace(&from, &to)
    }

    /// Creates its files in `directory`.
    pub(crate) fn install(&self, directory: &Path) {
        fs::create_dir_all(directory).expect("made");
        for (name, contents) in self.before() {
            let mode = if name == self.file { self.mode.as_str() } else { "600" };
            let mode = u32::from_str_radix(mode, 8).expect("octal");
            fs::write(directory.join(&name), contents).expect("written");
            fs::set_permissions(directory.join(&name), Permissions::from_mode(mode)).expect("set");
        }
    }

    /// Replaces its file in its own manner.
    pub(crate) fn rewrite(&self, directory: &Path, text: &str) {
        self.method.write(directory, &self.file, text);
    }
}

/// Returns the files of a directory.
pub(crate) fn files(directory: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(directory).expect("readable").map(|entry| entry.expect("readable").path());
    let read = |path: PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).expect("text"))
    };
    entries.map(read).collect()
}

/// Returns the files of a directory with their permission bits, to compare the directory byte for byte.
pub(crate) fn snapshot(directory: &Path) -> BTreeMap<String, (String, u32)> {
    let mode = |name: &str| fs::symlink_metadata(directory.join(name)).expect("there").permissions().mode() & 0o7777;
    files(directory).into_iter().map(|(name, text)| (name.clone(), (text, mode(&name)))).collect()
}
