//! Takes the netfilter transaction of a program from a trace of its system calls.

use anyhow::{Context, ensure};
use std::path::Path;

/// `NFNL_MSG_BATCH_BEGIN`: the type of a transaction's first message (linux/netfilter/nfnetlink.h).
const BATCH_BEGIN: [u8; 2] = 16u16.to_ne_bytes();
/// strace prints 16 bytes a line, in two groups.
const BYTES_OF_LINE: usize = 16 * 3 + 1;

/// Writes the transaction in `trace` to a file.
pub(crate) fn record(trace: &Path, to: &Path) -> anyhow::Result<()> {
    let datagrams = datagrams(&crate::read(trace)?)?;
    let transactions: Vec<_> = datagrams.iter().filter(|data| data.get(4..6) == Some(&BATCH_BEGIN)).collect();
    ensure!(transactions.len() == 1, "{}: expected 1 transaction, got {}", trace.display(), transactions.len());
    std::fs::write(to, transactions[0]).with_context(|| format!("write {}", to.display()))
}

/// Returns the data of each call. A line of data looks like ` | 00010  18 00 00 00 …  ................ |`; lines without
/// data begin a call.
fn datagrams(trace: &str) -> anyhow::Result<Vec<Vec<u8>>> {
    let mut datagrams = vec![Vec::new()];
    for line in trace.lines() {
        let Some((_, data)) = line.strip_prefix(" | ").and_then(|line| line.split_once("  ")) else {
            datagrams.push(Vec::new());
            continue;
        };
        let bytes = data.get(..BYTES_OF_LINE).unwrap_or(data).split_whitespace();
        let bytes: Result<Vec<u8>, _> = bytes.map(|byte| u8::from_str_radix(byte, 16)).collect();
        datagrams.last_mut().context("a call")?.extend(bytes.with_context(|| format!("expected data, got {line:?}"))?);
    }
    Ok(datagrams)
}
