//! A netlink socket without a kernel: the other end of a socket pair answers.

use crate::firewall::nfnetlink::NfSocket;
use crate::netlink::{Messages, Received, split};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, setsockopt, socketpair, sockopt};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;

/// Datagrams are smaller than those of the kernel, so that dumps have several.
const DATAGRAM: usize = 8 << 10;
/// The size of buffers for the largest transaction.
const BUFFER: usize = 4 << 20;
/// The message that ends a dump, and the flag on its messages (`NLMSG_DONE`, `NLM_F_MULTI`).
const DONE: u16 = 3;
const MULTI: u16 = 2;

/// A message that answers a request: its type, and its body.
pub(crate) type Reply = (u16, Vec<u8>);

/// Calls `work` with a socket to `kernel`, whose function `answer` gets the messages of each datagram that is sent.
/// Returns the kernel and the result.
pub(crate) fn with_socket<K: Send, T>(
    mut kernel: K,
    answer: impl Fn(&mut K, &[Received<'_>]) -> Vec<Vec<u8>> + Send,
    work: impl FnOnce(&mut NfSocket) -> T,
) -> (K, T) {
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
    let (own, other) = pair.expect("a pair of sockets");
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            serve(&other, |messages| answer(&mut kernel, messages));
            kernel
        });
        let mut socket = NfSocket::of(own);
        let result = work(&mut socket);
        drop(socket);
        (server.join().expect("the kernel does not panic"), result)
    })
}

fn serve(fd: &OwnedFd, mut answer: impl FnMut(&[Received<'_>]) -> Vec<Vec<u8>>) {
    setsockopt(fd, sockopt::SndBuf, &BUFFER).expect("a buffer");
    let mut request = vec![0; 64 << 10];
    loop {
        let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC;
        let length = recv(fd.as_raw_fd(), &mut request, peek).expect("a request");
        request.resize(length.max(request.len()), 0);
        let length = recv(fd.as_raw_fd(), &mut request, MsgFlags::empty()).expect("a request");
        if length == 0 {
            return;
        }
        let messages: Vec<Received<'_>> = split(&request[..length]).collect();
        for datagram in answer(&messages) {
            if send(fd.as_raw_fd(), &datagram, MsgFlags::MSG_NOSIGNAL).is_err() {
                return;
            }
        }
    }
}

/// Returns the datagrams of a dump.
pub(crate) fn dump(sequence: u32, replies: impl IntoIterator<Item = Reply>) -> Vec<Vec<u8>> {
    let mut datagrams = vec![Messages::new()];
    let end = (DONE, 0_i32.to_ne_bytes().to_vec());
    for (kind, body) in replies.into_iter().chain([end]) {
        if datagrams.last().is_some_and(|last| last.as_bytes().len() + body.len() > DATAGRAM) {
            datagrams.push(Messages::new());
        }
        datagrams.last_mut().expect("one at least").put(kind, MULTI, sequence, &body, |list| list);
    }
    datagrams.iter().map(|datagram| datagram.as_bytes().to_vec()).collect()
}

/// Returns the datagram of one message.
pub(crate) fn message(kind: u16, sequence: u32, header: &[u8], attributes: &[u8]) -> Vec<u8> {
    Messages::one(kind, 0, sequence, header, attributes).as_bytes().to_vec()
}
