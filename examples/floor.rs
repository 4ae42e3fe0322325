//! The least that a plugin must do to apply rules to a pod: it enters the network namespace, sends a transaction that
//! `hack/bench.sh` recorded from a real ADD, reads the kernel's acknowledgements and prints a recorded result. It is the
//! unit of the benchmark: the cost of an ADD is stated as a multiple of it.
//!
//! Usage: `floor NETNS TRANSACTION RESULT`: three paths.

use anyhow::{Context, ensure};
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, setsockopt, socket,
    sockopt,
};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

/// The size of `nlmsghdr`: length (4 bytes), type (2), flags (2), sequence number (4), port (4) (netlink(7)).
const HEADER: usize = 16;
/// `NLM_F_ACK`: the kernel acknowledges this message.
const ACK: u16 = 4;
/// `NLMSG_ERROR`: an error, or with error number 0 an acknowledgement.
const ERROR: u16 = 2;
/// A transaction up to this size fits into the default send buffer; the plugin has the same limit.
const UNBUFFERED: usize = 64 * 1024;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let mut path = || arguments.next().context("usage: floor NETNS TRANSACTION RESULT");
    let netns = File::open(path()?).context("open the network namespace")?;
    let transaction = std::fs::read(path()?).context("read the transaction")?;
    let result = std::fs::read(path()?).context("read the result")?;
    setns(&netns, CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
    let kernel = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkNetFilter)?;
    connect(kernel.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    if transaction.len() > UNBUFFERED {
        setsockopt(&kernel, sockopt::SndBufForce, &(2 * transaction.len()))?;
    }
    send(kernel.as_raw_fd(), &transaction, MsgFlags::empty()).context("send the transaction")?;
    let expected = messages(&transaction).filter(|message| field(message, 6) & ACK != 0).count();
    let (mut answers, mut received) = ([0; 8192], 0);
    while received < expected {
        let length = recv(kernel.as_raw_fd(), &mut answers, MsgFlags::empty()).context("read the acknowledgements")?;
        for answer in messages(&answers[..length]) {
            ensure!(field(answer, 4) == ERROR && answer.len() >= HEADER + 4, "expected an acknowledgement");
            let errno = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
            ensure!(errno == 0, "the kernel refuses the transaction: {}", Errno::from_raw(-errno));
            received += 1;
        }
    }
    std::io::stdout().write_all(&result).context("print the result")
}

/// Splits a buffer into netlink messages, header included. Messages begin at multiples of 4 bytes.
fn messages(mut buffer: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*buffer.first_chunk()?) as usize;
        let message = buffer.get(..length).filter(|_| length >= HEADER)?;
        buffer = buffer.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// Returns the 16-bit field at `offset` of a message's header.
fn field(message: &[u8], offset: usize) -> u16 {
    u16::from_ne_bytes([message[offset], message[offset + 1]])
}
