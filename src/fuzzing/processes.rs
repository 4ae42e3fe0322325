//! Targets for what other processes send or leave: the container runtime to the agent, other plugins on stdout, and saved
//! state.

use super::{check_error, check_printed, sections};
use crate::agent::nri::session::{REGISTRATION_TIMEOUT, Session};
use crate::agent::nri::{NriReport, Stage};
use crate::cni::{CniCommand, version};
use crate::delegate::process::ChildExit;
use crate::delegate::{convert, parse};
use crate::firewall::RuleFormat;
use crate::plugin::primary::invocation::SavedState;
use crate::plugin::record::{AttachmentRecord, SandboxRecords};
use crate::printable;
use crate::state::{Attachment, format};
use serde_json::{Map, Value};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::pin::Pin;
use std::process::ExitStatus;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::runtime::Builder;
use tokio::sync::mpsc::channel;
use tokio::time::Instant;
use tokio::{pin, select};

/// Bytes that arrive in pieces of at most this size.
struct Pieces<'a>(&'a [u8], usize);

impl AsyncRead for Pieces<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (piece, rest) = self.0.split_at(self.1.min(self.0.len()).min(buffer.remaining()));
        buffer.put_slice(piece);
        self.0 = rest;
        Poll::Ready(Ok(()))
    }
}

/// The bytes of a connection: what they mean does not depend on how they are split into reads.
pub(super) fn session(input: &[u8]) {
    let runtime = Builder::new_current_thread().enable_time().build().expect("an event loop");
    let receive = |size: usize| {
        let ((sender, mut received), mut sent, mut reports) = (channel(64), Vec::new(), Vec::new());
        let cause = runtime.block_on(async {
            let mut session = Session::new(&sender);
            let serve = session.serve(Pieces(input, size), &mut sent, Instant::now() + REGISTRATION_TIMEOUT);
            pin!(serve);
            loop {
                select! {
                    biased;
                    Some(report) = received.recv() => reports.push(match report {
                        // The sender is dropped, which answers the call.
                        NriReport::Container(Stage::Start(_), container) => format!("start {container:?}"),
                        other => format!("{other:?}"),
                    }),
                    Err(cause) = &mut serve => break cause,
                }
            }
        });
        assert!(cause.len() < 4096, "{cause:?}");
        check_printed(&printable::line(&cause));
        (reports, sent, cause)
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
