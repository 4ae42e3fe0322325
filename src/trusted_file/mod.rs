//! Opens, reads and writes the node's files as root, so that the owner of a file cannot harm this process.
//!
//! | function | for |
//! |---|---|
//! | [`read`], [`read_text`], [`follow`] | a file whose contents are checked by the caller: a regular file of limited size, opened without blocking; also files of proc(5) |
//! | [`open()`], [`read_nofollow`] | the same for paths that must not end in a symbolic link: state, and paths that [`crate::host_path`] has resolved |
//! | [`open_of_any_kind`] | a directory, or a namespace, whose kind the caller checks |
//! | [`read_trusted`] | a file that decides what root does: credentials, configuration |
//! | [`check()`] | a path that root executes or uses: only trusted users can change it |
//! | [`create_new`], [`append_below`] | a file that is written: never through a link that another user made |
//! | [`replace_file`] | a file that is replaced as a whole |
//! | [`create_directories`], [`names_in`] | a directory that is created or listed |
//! | [`FileId`] | whether two paths or open files are the same file |
//!
//! A trusted user is root or the user of this process. Group root counts as root, as in sudo's
//! `sudo_secure_path`: archives of the CNI plugins up to 1.4 make `/opt/cni/bin` writable for it.

mod check;
mod open;

pub use check::{FileError, check, is_trusted};
pub use open::{
    Durability, FileId, append_below, create_directories, create_new, exchange_file, follow, names_in, open,
    open_of_any_kind, read, read_nofollow, read_text, read_trusted, replace_file, sync_directory,
};

#[cfg(test)]
mod tests;
