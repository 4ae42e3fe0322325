//! Targets for what other processes send or leave: the container runtime to the agent, other plugins on stdout, and saved
//! state.

use super::{check_error, check_printed, sections};
use crate::agent::nri::session::{Failure, Session};
use crate::agent::nri::{NriContainer, NriHandler, NriPod};
use crate::cni::{CniCommand, version};
use crate::delegate::answer::{convert, parse};
use crate::delegate::process::ChildExit;
use crate::firewall::RuleFormat;
use crate::plugin::primary::saved_state::SavedState;
use crate::plugin::record::{AttachmentRecord, SandboxRecords};
use crate::printable;
use crate::state::{Attachment, format};
use serde_json::{Map, Value};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

/// Records what is reported.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reported(Vec<(&'static str, Vec<NriPod>, Vec<NriContainer>)>);

impl Reported {
    fn add(&mut self, what: &'static str, pod: &NriPod, container: &NriContainer) {
        self.0.push((what, vec![pod.clone()], vec![container.clone()]));
    }
}

impl NriHandler for Reported {
    fn synchronize(&mut self, pods: Vec<NriPod>, containers: Vec<NriContainer>) {
        self.0.push(("synchronize", pods, containers));
    }

    fn start(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("start", pod, container);
    }

    fn started(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("started", pod, container);
    }

    fn stopped(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("stopped", pod, container);
    }

    fn removed(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("removed", pod, container);
    }
}

/// The bytes of a connection: what they mean does not depend on how they are split into reads.
pub(super) fn session(input: &[u8]) {
    let text = |failure: Failure| match failure {
        Failure::Cause(cause) => cause,
        other => format!("{other:?}"),
    };
    let receive = |size: usize| {
        let (mut session, mut reported, mut sent) = (Session::default(), Reported::default(), Vec::new());
        let mut send = |bytes: &[u8]| -> Result<(), Failure> {
            sent.extend_from_slice(bytes);
            Ok(())
        };
        let mut parts = input.chunks(size);
        let failure = parts.find_map(|part| session.receive(part, &mut reported, &mut send).err());
        let failure = failure.map(text);
        assert!(failure.as_ref().is_none_or(|text| text.len() < 4096), "{failure:?}");
        check_printed(&printable::line(&session.closed()));
        (reported, sent, failure)
    };
    let whole = receive(input.len().max(1));
    assert_eq!(receive(7), whole);
}

/// Stdout and the end of stderr of a plugin that succeeds, fails, or is killed. A result is converted to every version;
/// a second conversion changes nothing.
pub(super) fn answer(input: &[u8]) {
    let [stdout, stderr] = sections(input);
    for status in [0, 256, 9] {
        let exit = ChildExit {
            status: ExitStatus::from_raw(status),
            stdout: stdout.to_vec(),
            stderr_tail: String::from_utf8_lossy(stderr).into_owned(),
        };
        for command in [CniCommand::Add, CniCommand::Del] {
            let result = match parse(Path::new("/opt/cni/bin/x"), command, &exit) {
                Ok(result) => result,
                Err(error) => {
                    check_error(&error);
                    continue;
                }
            };
            for version in result.iter().flat_map(|_| version::SUPPORTED) {
                match convert(result.clone().unwrap_or_default(), version) {
                    Ok(converted) => assert_eq!(convert(converted.clone(), version), Ok(converted)),
                    Err(error) => check_error(&error),
                }
            }
        }
    }
}

/// A record of any version: what is written is read back as the same, and the readable part of any object is enough to
/// remove what it describes.
pub(super) fn record(input: &[u8]) {
    match format::parse::<AttachmentRecord>(input) {
        Ok(record) => {
            let text = format::print(&record).expect("an object");
            assert_eq!(format::parse::<AttachmentRecord>(&text).expect("its own text"), record);
            let Ok(fields) = serde_json::from_slice::<Map<String, Value>>(&text) else { panic!("an object") };
            assert_eq!(AttachmentRecord::recover(&fields).as_ref(), Some(&record));
            check_rules(record);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Ok(state) = format::parse::<SavedState>(input) {
        let text = format::print(&state).expect("an object");
        assert_eq!(format::parse::<SavedState>(&text).expect("its own text"), state);
    }
    let Ok(fields) = serde_json::from_slice::<Map<String, Value>>(input) else { return };
    if let Some(record) = AttachmentRecord::recover(&fields) {
        assert_eq!(AttachmentRecord::recover(&fields).as_ref(), Some(&record));
        check_rules(record);
    }
    assert_eq!(SavedState::recover(&fields), SavedState::recover(&fields));
}

/// Derives what a DEL removes for a record.
fn check_rules(record: AttachmentRecord) {
    let own = Attachment { container_id: "c".into(), network: "n".into(), ifname: "eth0".into() };
    let is_native = record.rule_format == RuleFormat::Nftables;
    let mut records = SandboxRecords::default();
    records.insert(&own, record);
    records.policy().unwrap_or_else(|error| panic!("one policy does not contradict itself: {error}"));
    let known = records.known_rules();
    assert!(!is_native || records.rule_format(None) != Some(RuleFormat::Nftables) || known.is_empty());
    let _ = records.ip6();
}
