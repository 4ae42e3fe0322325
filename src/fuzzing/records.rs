//! A target for saved state.

use crate::firewall::RuleFormat;
use crate::plugin::primary::saved_state::SavedState;
use crate::plugin::record::{AttachmentRecord, SandboxRecords};
use crate::state::{Attachment, format};
use serde_json::{Map, Value};

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
    assert!(!is_native || records.rule_format() != Some(RuleFormat::Nftables) || known.is_empty());
    let _ = (records.fixtures(), records.created_tables(), records.ip6());
}
