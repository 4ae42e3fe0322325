//! Everything that somebody elsewhere needs to see what is wrong, as files in an archive.

use super::case::Case;
use super::redact::{redact, without_credentials};
use super::ustar::archive;
use super::{Configured, Examination};
use crate::cni::Error;
use crate::firewall::native;
use crate::host_path::HostPath;
use crate::inspect::format::{Format, render};
use crate::inspect::restore::restore_text;
use crate::state::ROOT;
use crate::trusted_file::{read, read_nofollow};
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The largest file that goes into it: as large as the largest record of an attachment.
const LARGEST: u64 = 4 << 20;
/// What the kernel tells of itself that matters (proc(5)).
const KERNEL: [&str; 3] = ["/proc/version", "/proc/modules", "/proc/sys/net/netfilter/nf_conntrack_max"];

impl Examination {
    /// The archive, in tar's format: the list and the explanation as JSON, the rules as text, the
    /// configurations, the installation's log, what is kept of attachments, facts of the kernel, and
    /// the lines of the logs. Nothing in it is a token, a key or a certificate.
    ///
    /// # Errors
    /// A report has no text, which is a fault of this program.
    pub fn bundle(&self, case: &Case) -> Result<Vec<u8>, Error> {
        let mut files = vec![("doctor.json".to_owned(), render(&self.checklist, Format::Json)?)];
        if let Some(explained) = &self.explained {
            files.push(("explain.json".to_owned(), render(&explained.explanation, Format::Json)?));
        }
        if let Some((live, report)) = &self.live {
            files.push(("rules.json".to_owned(), render(report, Format::Json)?));
            files.push(("rules.txt".to_owned(), render(report, Format::Table { colour: false })?));
            if let Some(asked) = &live.asked {
                files.push(("asked.iptables".to_owned(), restore_text(&asked.rules)));
                files.push(("asked.nft".to_owned(), native::text(&native::translate(&asked.rules))));
            }
        }
        let configurations = self.configurations.iter();
        files.extend(configurations.map(|Configured { path, text, .. }| (named("node", path.as_path()), text.clone())));
        if let Some((path, _)) = &self.kubeconfig {
            let text = text(path).and_then(|text| without_credentials(&text));
            files.extend(text.map(|text| ("kubeconfig".to_owned(), text)));
        }
        let log = case.reach(&case.installation.log).ok();
        files.extend(log.and_then(|log| text(&log)).map(|text| (named("node", case.installation.log.as_path()), text)));
        let kept = HostPath::new(ROOT).and_then(|root| case.reach(&root).ok());
        files
            .extend(kept.iter().flat_map(|kept| below(kept)).map(|(name, text)| (format!("attachments/{name}"), text)));
        let of_kernel = |path: &&str| Some((named("kernel", path.as_ref()), lossy(read(path.as_ref(), LARGEST).ok()?)));
        files.extend(KERNEL.iter().filter_map(of_kernel));
        if !self.said.is_empty() {
            files.push(("log.txt".to_owned(), self.said.join("\n")));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let secrets: Vec<String> = self.kubeconfig.iter().filter_map(|(_, summary)| summary.token.clone()).collect();
        let clean = |(name, text): (String, String)| (format!("detour/{name}"), redact(&text, &secrets).into_bytes());
        Ok(archive(&files.into_iter().map(clean).collect::<Vec<_>>(), now))
    }
}

fn named(directory: &str, path: &Path) -> String {
    format!("{directory}{}", path.display())
}

/// A file whose path has been resolved: a link that takes its place leads elsewhere.
fn text(path: &Path) -> Option<String> {
    read_nofollow(path, LARGEST).ok().map(lossy)
}

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The files of each directory in `directory`; links to directories and files are left out.
fn below(directory: &Path) -> Vec<(String, String)> {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().collect::<Vec<_>>();
    let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let mut files = Vec::new();
    for container in entries(directory).into_iter().filter(is_directory) {
        for file in entries(&container.path()) {
            let name = format!("{}/{}", container.file_name().display(), file.file_name().display());
            files.extend(text(&file.path()).map(|text| (name, text)));
        }
    }
    files.sort();
    files
}
