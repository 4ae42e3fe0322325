//! The one walk of symbolic links: resolves a path part by part, as the kernel does (path_resolution(7)), below any root.

use nix::errno::Errno;
use std::io;
use std::path::{Component, Path, PathBuf};

/// The maximum number of symbolic links in a path, as in the kernel (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// Returns the path in the file system at `root` without symbolic links. `target_of` is called for each part of the path,
/// with whether it is the last one, and returns the target if the part is a link.
///
/// # Errors
/// The links form a loop, or `target_of` fails.
pub fn resolve<E: From<io::Error>>(
    root: &Path,
    path: &Path,
    mut target_of: impl FnMut(&Path, bool) -> Result<Option<PathBuf>, E>,
) -> Result<PathBuf, E> {
    let mut remaining = parts_reversed(path);
    let (mut resolved, mut links) = (root.to_owned(), 0);
    while let Some(part) = remaining.pop() {
        if part.as_os_str() == ".." {
            if resolved != root {
                resolved.pop();
            }
            continue;
        }
        resolved.push(part);
        let Some(target) = target_of(&resolved, remaining.is_empty())? else { continue };
        links += 1;
        if links > MAX_LINKS {
            return Err(io::Error::from(Errno::ELOOP).into());
        }
        resolved.pop();
        if target.is_absolute() {
            root.clone_into(&mut resolved);
        }
        remaining.extend(parts_reversed(&target));
    }
    Ok(resolved)
}

/// Returns the names and `..` of a path, the last one first.
fn parts_reversed(path: &Path) -> Vec<PathBuf> {
    let is_step = |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().rev().filter(is_step).map(|part| PathBuf::from(part.as_os_str())).collect()
}
