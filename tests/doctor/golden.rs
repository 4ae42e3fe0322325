//! What people see, beside the files in `tests/golden/doctor`. With `UPDATE_GOLDEN` set these are written
//! anew, to be looked at before they are committed.

use std::path::Path;

#[track_caller]
pub(crate) fn compare(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/doctor").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        std::fs::write(&path, found).expect("writable");
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (found, wanted)) in (1..).zip(found.lines().zip(wanted.lines())) {
        assert_eq!(found, wanted, "{}:{number}", path.display());
    }
    assert_eq!(found.lines().count(), wanted.lines().count(), "{}", path.display());
}
