//! `detour doctor --bundle`: all evidence as files in one archive. The archive has the POSIX.1-1988 "ustar" format, which
//! every tar reads; it is written here, because a header of fixed fields is not worth a dependency.

use super::redact::Redactor;
use super::report::CheckTarget;
use super::{Configured, Examination};
use crate::cluster::yaml::documents;
use crate::cni::Error;
use crate::firewall::native;
use crate::host_path::HostPath;
use crate::inspect::rules::RulesView;
use crate::inspect::terminal::{Format, render};
use crate::inspect::trace::restore_text;
use crate::printable::{cut, line};
use crate::state::ROOT;
use crate::trusted_file::{read, read_nofollow};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fs, io};

/// Files with facts about the kernel (proc(5)).
const KERNEL: [&str; 3] = ["/proc/version", "/proc/modules", "/proc/sys/net/netfilter/nf_conntrack_max"];

/// The maximum size of a file that is read, in bytes; larger files are omitted.
const FILE_LIMIT: u64 = 1 << 20;
/// The maximum number of state files; a node has some hundred pods.
const FILES: usize = 2000;
/// The maximum size of a file in the archive, in bytes; the rest of it is omitted.
const MEMBER_LIMIT: usize = 8 << 20;

impl Examination {
    /// Returns the archive in tar's format: checks and explanation as JSON, the rules as text, the configurations, the
    /// installation's log, the saved state of attachments, facts about the kernel, and log lines. Files contain only
    /// values of keys that are known to be harmless; other text contains nothing that looks like a secret.
    ///
    /// # Errors
    /// A report can't be serialized, which is a bug.
    pub fn bundle(&self, target: &CheckTarget) -> Result<Vec<u8>, Error> {
        let secrets = self.kubeconfig.iter().filter_map(|(_, summary)| summary.token.clone()).collect();
        let redactor = Redactor { secrets, harmless: self.names.clone() };
        let mut files = vec![("doctor.json".to_owned(), redactor.report(&self.checklist))];
        if let Some(explained) = &self.explained {
            files.push(("explain.json".to_owned(), redactor.report(&explained.explanation)));
        }
        if let Some((live, report)) = &self.live {
            let table = render(&RulesView { report, all: true }, Format::Table { color: false })?;
            files.push(("rules.json".to_owned(), redactor.report(report)));
            files.push(("rules.txt".to_owned(), redactor.text(table.as_str())));
            if let Some(asked) = &live.desired {
                let nft = native::text(&asked.dialect.native(&asked.rules));
                files.push(("asked.iptables".to_owned(), redactor.text(&restore_text(&asked.rules))));
                files.push(("asked.nft".to_owned(), redactor.text(&nft)));
            }
        }
        let structured = |text: &str| match parsed(text) {
            Some(value) => redactor.file(value),
            None => format!("(omitted: {} bytes that are neither JSON nor YAML)\n", text.len()),
        };
        // A file can have several configurations.
        let mut configurations: Vec<&Configured> = self.configurations.iter().collect();
        configurations.dedup_by(|a, b| a.path == b.path);
        let configuration =
            |configured: &Configured| (named("node", configured.path.as_path()), structured(&configured.text));
        files.extend(configurations.into_iter().map(configuration));
        for (own, list) in &target.installation.own_lists {
            let path = own.parent().join(&list.source);
            let Ok(reached) = target.reach(&path) else { continue };
            let text = text(&reached).map_or_else(|why| why, |text| structured(&text));
            files.push((named("node", path.as_path()), text));
        }
        if let Some((path, _)) = &self.kubeconfig {
            files.push(("kubeconfig".to_owned(), text(path).map_or_else(|why| why, |text| structured(&text))));
        }
        for record in &target.installation.records {
            let Ok(reached) = target.reach(record) else { continue };
            let text = text(&reached).map_or_else(|why| why, |text| structured(&text));
            files.push((named("node", record.as_path()), text));
        }
        let kept = HostPath::new(ROOT).and_then(|root| target.reach(&root).ok());
        for path in kept.iter().flat_map(|kept| below(kept)) {
            let text = text(&path).map_or_else(|why| why, |text| structured(&text));
            let name = kept.as_ref().and_then(|kept| path.strip_prefix(kept).ok()).unwrap_or(&path);
            files.push((format!("attachments/{}", name.display()), text));
        }
        for path in KERNEL.map(Path::new) {
            let text = kernel_text(path).map_or_else(|why| why, |text| redactor.text(&text));
            files.push((named("kernel", path), text));
        }
        if !self.log_lines.is_empty() {
            files.push(("log.txt".to_owned(), redactor.log(&self.log_lines.join("\n"))));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let member = |(name, text): (String, String)| {
            (format!("detour/{}", line(&name)), cut(&text, MEMBER_LIMIT).into_owned().into_bytes())
        };
        Ok(archive(&files.into_iter().map(member).collect::<Vec<_>>(), now))
    }
}

/// Parses JSON or, for a kubeconfig, YAML.
fn parsed(text: &str) -> Option<Value> {
    let mut documents = documents(text).ok()?;
    documents.pop().filter(|value| value.is_object() && documents.is_empty())
}

fn named(directory: &str, path: &Path) -> String {
    format!("{directory}{}", path.display())
}

/// Returns the text of a file, or the reason for its omission. The path is resolved already: a symbolic link in its
/// place is not followed.
fn text(path: &Path) -> Result<String, String> {
    contents(read_nofollow(path, FILE_LIMIT))
}

fn kernel_text(path: &Path) -> Result<String, String> {
    contents(read(path, FILE_LIMIT))
}

fn contents(read: io::Result<Vec<u8>>) -> Result<String, String> {
    let bytes = read.map_err(|why| format!("(omitted: {why})\n"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the first files of each directory in `directory`, in the order of their names, without symbolic links.
fn below(directory: &Path) -> Vec<PathBuf> {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let containers = entries(directory).filter(is_directory).map(|entry| entry.path());
    let files = containers.flat_map(|container| entries(&container).map(|entry| entry.path()).collect::<Vec<_>>());
    let mut files: Vec<PathBuf> = files.take(FILES).collect();
    files.sort();
    files
}

const BLOCK: usize = 512;
/// The size of a record of an archive, in bytes.
const RECORD: usize = 20 * BLOCK;
/// The maximum length of a file name, in bytes.
const MAX_NAME: usize = 99;

/// Returns the archive of files (name, content); `time` is their time of change in seconds since 1970.
pub(super) fn archive(files: &[(String, Vec<u8>)], time: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, contents) in files {
        out.extend(header(name, contents.len(), time));
        out.extend(contents);
        out.resize(out.len().next_multiple_of(BLOCK), 0);
    }
    out.resize((out.len() + 2 * BLOCK).next_multiple_of(RECORD), 0);
    out
}

fn header(name: &str, length: usize, time: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let name: Vec<u8> = name.bytes().take(MAX_NAME).collect();
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &name);
    put(100, b"0000600\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{length:011o}\0").as_bytes());
    put(136, format!("{time:011o}\0").as_bytes());
    // The checksum counts its own field as spaces.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn deep_or_long_files_are_left_out_without_a_crash() {
        let started = Instant::now();
        let deep = |open: &str, close: &str| open.repeat(100_000) + &close.repeat(100_000);
        for text in [deep("[", "]"), deep("{\"a\":", "}"), deep("- ", ""), deep("{a: ", "}"), deep("? ", "")] {
            assert_eq!(parsed(&text), None);
        }
        let long = format!("{{\"name\": \"{}\"}}", "x".repeat(1 << 20));
        assert!(parsed(&long).is_some());
        assert_eq!((parsed("[1]"), parsed("token s3cr3t"), parsed("\u{1b}")), (None, None, None));
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }

    #[test]
    fn tar_reads_it() {
        let path = std::env::temp_dir().join(format!("detour-ustar-{}.tar", std::process::id()));
        let long = vec![b'x'; 1000];
        let files = [("a/one.json".to_owned(), b"{}\n".to_vec()), ("a/two".to_owned(), long.clone())];
        fs::write(&path, archive(&files, 1_000_000_000)).expect("written");
        let tar = |arguments: &[&str]| {
            let output = Command::new("tar").args(arguments).arg("-f").arg(&path).env("TZ", "UTC").output();
            let output = output.expect("tar starts");
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            output.stdout
        };
        let list = String::from_utf8(tar(&["-tv"])).expect("text");
        assert!(list.contains("2001-09-09 01:46 a/one.json") && list.lines().count() == 2, "{list}");
        assert_eq!(tar(&["-xO"]), [b"{}\n".to_vec(), long].concat());
        let _ = fs::remove_file(path);
    }
}
