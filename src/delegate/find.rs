//! Where the executable of a plugin is.

use crate::cni::{Code, Error};
use std::path::{Path, PathBuf};

/// The first regular file named `kind` in the directories of `path`.
///
/// # Errors
/// [`Code::InvalidConfig`]: there is none, or `kind` is no file's name: what a configuration names
/// stays in these directories.
pub(super) fn find(kind: &str, path: &[PathBuf]) -> Result<PathBuf, Error> {
    if kind.is_empty() || kind == "." || kind == ".." || kind.contains(['/', '\0']) {
        let msg = format!("type {kind:?} is not accepted; accepted: the name of an executable in CNI_PATH, without /");
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    let candidates = path.iter().map(|directory| directory.join(kind));
    candidates.into_iter().find(|file| is_file(file)).ok_or_else(|| {
        let directories: Vec<_> = path.iter().map(|directory| directory.display().to_string()).collect();
        let msg = format!(
            "failed to find plugin {kind:?} in path [{}]; install it in one of these directories or correct the type",
            directories.join(" ")
        );
        Error::new(Code::InvalidConfig, msg)
    })
}

fn is_file(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_regular_file_counts() {
        let root = std::env::temp_dir().join(format!("detour-find-{}", std::process::id()));
        let path = ["none", "a", "b", "c"].map(|name| root.join(name));
        for directory in &path[1..] {
            std::fs::create_dir_all(directory).expect("a directory");
        }
        std::fs::create_dir(path[1].join("x")).expect("a directory of that name");
        std::fs::write(path[2].join("x"), "").expect("a file");
        std::fs::write(path[3].join("x"), "").expect("a file");
        assert_eq!(find("x", &path), Ok(path[2].join("x")));
        let error = find("y", &path[..2]).expect_err("not there");
        assert_eq!(error.code, Code::InvalidConfig);
        let wanted = format!("failed to find plugin \"y\" in path [{0}/none {0}/a]; ", root.display());
        assert!(error.msg.starts_with(&wanted), "{error}");
        std::fs::remove_dir_all(&root).expect("it can be removed");
    }

    #[test]
    fn a_type_is_a_file_name() {
        for kind in ["", ".", "..", "../sh", "/bin/sh", "a/b", "a\0b"] {
            let error = find(kind, &["/".into(), "/bin".into()]).expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains("is not accepted; accepted: "), "{error}");
        }
    }
}
