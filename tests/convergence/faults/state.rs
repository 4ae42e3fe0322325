//! Faults of the saved state and of the file system that contains it.

use super::call::Call;
use super::subject::{Mode, Subject, Verb};
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node_with};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::Mode as Permissions;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

const SUBJECTS: [(Mode, &str); 4] = [
    (Mode::Redirect, "iptables"),
    (Mode::Redirect, "nftables"),
    (Mode::Primary, "iptables"),
    (Mode::Tproxy, "nftables"),
];

/// A fault of the file system at [`STATE`].
struct Disk {
    name: &'static str,
    options: &'static str,
    begin: fn(),
    end: fn(),
    /// The codes of the calls; 0 stands for success.
    codes: fn(Verb) -> &'static [u64],
}

fn filler() -> PathBuf {
    Path::new(STATE).join("filler")
}

fn remount(flags: MsFlags) {
    mount(None::<&str>, STATE, None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>).expect("needs root");
}

/// An ADD that must save state fails; a DEL succeeds.
fn unwritable(verb: Verb) -> &'static [u64] {
    match verb {
        Verb::Add | Verb::AddChanged => &[5],
        // A second ADD has nothing new to save; the primary plugin's writes its plan.
        Verb::AddAgain => &[0, 5],
        Verb::Status => &[50],
        Verb::Check | Verb::Del | Verb::Gc => &[0],
    }
}

const DISKS: [Disk; 4] = [
    Disk {
        name: "state: read-only file system",
        options: "size=1m",
        begin: || remount(MsFlags::MS_RDONLY),
        end: || remount(MsFlags::empty()),
        // The primary plugin reports the state that it could not remove; the runtime repeats GC.
        codes: |verb| if verb == Verb::Gc { &[0, 5] } else { unwritable(verb) },
    },
    Disk {
        name: "state: file system full",
        options: "size=256k",
        begin: || drop(fs::write(filler(), vec![0; 1 << 20]).expect_err("it is full")),
        end: || fs::remove_file(filler()).expect("it was written"),
        // An empty file, such as that of STATUS, needs no space.
        codes: |verb| if verb == Verb::Status { &[0, 50] } else { unwritable(verb) },
    },
    Disk {
        name: "state: no inodes left",
        options: "size=1m,nr_inodes=64",
        begin: || {
            fs::create_dir(filler()).expect("one is left");
            while fs::write(filler().join(fs::read_dir(filler()).expect("readable").count().to_string()), "").is_ok() {}
        },
        end: || fs::remove_dir_all(filler()).expect("it was made"),
        codes: unwritable,
    },
    Disk {
        name: "state: locks can't be created",
        options: "size=1m",
        begin: || {
            let _ = fs::remove_dir_all(Path::new(STATE).join("locks"));
            fs::write(Path::new(STATE).join("locks"), "").expect("writable");
        },
        end: || fs::remove_file(Path::new(STATE).join("locks")).expect("it was written"),
        codes: |verb| match verb {
            Verb::Add | Verb::AddAgain | Verb::AddChanged => &[5],
            Verb::Status => &[0, 50],
            _ => &[0],
        },
    },
];

#[test]
fn a_file_system_that_takes_no_state_fails_add_and_not_del() {
    for disk in DISKS {
        on_a_node_with(disk.options, || {
            for (mode, dialect) in &SUBJECTS[1..3] {
                let subject = Subject::new(*mode, dialect);
                for verb in Verb::ALL {
                    let during = |call: Call| {
                        (disk.begin)();
                        let ended = call.run();
                        (disk.end)();
                        ended
                    };
                    subject.attempt(verb, disk.name, during, |ended| ended.is_refused((disk.codes)(verb)));
                }
            }
        });
    }
}

type Damage = (&'static str, fn(&Path));

fn change(path: &Path, change: fn(&mut Value)) {
    let mut record: Value = serde_json::from_slice(&fs::read(path).expect("saved")).expect("JSON");
    change(&mut record);
    fs::write(path, record.to_string()).expect("writable");
}

fn replace(path: &Path, with: impl FnOnce(&Path)) {
    fs::remove_file(path).expect("saved");
    with(path);
}

const DAMAGES: [Damage; 13] = [
    ("record: empty", |path| fs::write(path, "").expect("writable")),
    ("record: truncated", |path| {
        let text = fs::read(path).expect("saved");
        fs::write(path, &text[..text.len() / 2]).expect("writable");
    }),
    ("record: zeros, as after a crash of the node", |path| {
        let length = fs::metadata(path).expect("saved").len();
        fs::write(path, vec![0; usize::try_from(length).expect("small")]).expect("writable");
    }),
    ("record: other JSON", |path| fs::write(path, "[]").expect("writable")),
    ("record: null", |path| fs::write(path, "null").expect("writable")),
    ("record: a key has another type", |path| {
        change(path, |record| {
            let first = record.as_object_mut().expect("an object").iter_mut().find(|(_, value)| value.is_object());
            *first.expect("a nested object").1 = 7.into();
        })
    }),
    ("record: of a newer version", |path| change(path, |record| record["version"] = 1_000_000.into())),
    ("record: 100 MB, sparse", |path| {
        fs::File::options().write(true).open(path).and_then(|file| file.set_len(100 << 20)).expect("writable")
    }),
    ("record: 17 MB of JSON", |path| fs::write(path, format!("[{}0]", "0,".repeat(17 << 19))).expect("writable")),
    ("record: a directory", |path| replace(path, |path| fs::create_dir(path).expect("writable"))),
    ("record: a symbolic link", |path| replace(path, |path| symlink("/etc/passwd", path).expect("writable"))),
    ("record: a FIFO", |path| replace(path, |path| nix::unistd::mkfifo(path, Permissions::S_IRWXU).expect("writable"))),
    ("record: unreadable mode", |path| fs::set_permissions(path, fs::Permissions::from_mode(0o000)).expect("root")),
];

/// DEL must not fail. Without the record, detour can't identify the redirection in iptables format as its own; it
/// remains until the pod is deleted. Each damage is tried in one mode.
#[test]
fn a_damaged_record_fails_add_and_check_and_not_del() {
    on_a_node_with("size=64m", || {
        for (subject_at, (mode, dialect)) in SUBJECTS.iter().enumerate() {
            let first = Subject::new(*mode, dialect);
            for (name, damage) in DAMAGES.into_iter().skip(subject_at).step_by(SUBJECTS.len()) {
                for verb in [Verb::AddAgain, Verb::Check, Verb::Gc, Verb::Del] {
                    let subject = first.another();
                    subject.prepare(verb);
                    damage(&subject.record());
                    let ended = subject.call(verb).run();
                    let codes: &[u64] = match verb {
                        // Root can read it nevertheless.
                        _ if name.contains("mode") => &[0],
                        Verb::Del => &[0],
                        Verb::Gc => &[0, 5, 105],
                        // The primary plugin's ADD replaces its own record.
                        _ if *mode == Mode::Primary && verb != Verb::Check => &[0, 5, 105],
                        _ => &[105],
                    };
                    let context = format!("{} ({mode:?}, {dialect}), {name}", verb.name());
                    ended.is_refused(codes).unwrap_or_else(|why| panic!("{context}: {why}: {ended:?}"));
                    // After GC, only the record knows where the rules are.
                    if verb != Verb::Gc {
                        subject.done(Verb::Del);
                        let is_clean = subject.read().rules == subject.none.rules;
                        let is_foreign = *dialect == "iptables" && !Kernel::of(&subject.pod).has_exclusions();
                        assert!(is_clean || is_foreign, "{context}: rules with detour's names are left");
                    }
                    let left = left_in_state();
                    assert!(!left.iter().any(|path| path.ends_with(&subject.pod.container_id)), "{context}: {left:?}");
                    let _ = fs::remove_dir_all(Path::new(STATE).join("attachments"));
                    let _ = fs::remove_dir_all(Path::new(STATE).join("primary"));
                }
            }
        }
    });
}
