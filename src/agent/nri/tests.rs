//! Properties of the framing and of sessions, for any input.

use super::PLUGIN_SERVICE;
use super::session::{REGISTRATION_TIMEOUT, Session};
use super::ttrpc::{self, MAX_MESSAGE, Messages, OF_PLUGIN, OF_RUNTIME, REQUEST, Received, Status};
use proptest::prelude::*;
use prost::Message;
use std::io::ErrorKind;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, ReadBuf, duplex, sink};
use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// An argument that is encoded already.
#[derive(Clone, PartialEq, Message)]
struct Bytes {
    #[prost(bytes = "vec", tag = "1")]
    contents: Vec<u8>,
}

/// Bytes that arrive in pieces of these sizes, and then at once.
struct Pieces<'a>(&'a [u8], Vec<usize>);

impl AsyncRead for Pieces<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let size = self.1.pop().unwrap_or(usize::MAX).max(1);
        let (piece, rest) = self.0.split_at(size.min(self.0.len()).min(buffer.remaining()));
        buffer.put_slice(piece);
        self.0 = rest;
        Poll::Ready(Ok(()))
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    Builder::new_current_thread().enable_all().build().expect("an event loop").block_on(work)
}

/// A call of the runtime: the plugin's own call, on the other connection.
fn call(stream: u32, method: &str, payload: &[u8]) -> Vec<u8> {
    let argument = Bytes { contents: payload.to_vec() };
    let mut frame = ttrpc::request(stream, PLUGIN_SERVICE, method, &argument);
    assert_eq!(frame[3], u8::try_from(OF_PLUGIN).expect("small"));
    frame[3] = 1;
    frame
}

fn received(input: &[u8], cuts: &[usize]) -> Vec<Received> {
    let (mut messages, mut found) = (Messages::new(Pieces(input, cuts.to_vec())), Vec::new());
    run(async {
        loop {
            match messages.next().await {
                Ok(message) => found.push(message),
                Err(end) => break assert_eq!(end.kind(), ErrorKind::UnexpectedEof),
            }
        }
    });
    found
}

/// Returns the number of reports and the bytes that a session sends for an input, after its registration.
fn session(input: &[u8]) -> (usize, Vec<u8>) {
    let ((sender, mut reports), mut sent, mut count) = (mpsc::channel(64), Vec::new(), 0);
    run(async {
        let mut session = Session::new(&sender);
        let serve = session.serve(input, &mut sent, Instant::now() + REGISTRATION_TIMEOUT);
        tokio::pin!(serve);
        loop {
            tokio::select! {
                biased;
                // It drops the sender of a start, which answers the call.
                Some(_) = reports.recv() => count += 1,
                _ = &mut serve => break,
            }
        }
    });
    let registration = 8 + u32::from_be_bytes(*sent[4..].first_chunk().expect("a header")) as usize;
    (count, sent.split_off(registration))
}

proptest! {
    #[test]
    fn any_pieces_give_the_same_messages(
        payloads in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 0..300)), 0..8),
        cuts in prop::collection::vec(0usize..40, 0..80),
    ) {
        let input: Vec<u8> = payloads.iter().flat_map(|(stream, payload)| call(*stream, "M", payload)).collect();
        let messages = received(&input, &cuts);
        prop_assert_eq!(&messages, &received(&input, &[]));
        prop_assert_eq!(messages.len(), payloads.len());
        for (message, (stream, payload)) in messages.iter().zip(&payloads) {
            prop_assert_eq!((message.kind, message.stream), ((OF_RUNTIME, REQUEST), *stream));
            let request = ttrpc::Request::decode(&*message.contents).expect("valid");
            let argument = Bytes::decode(request.payload.as_slice()).expect("valid");
            prop_assert_eq!((request.method.as_str(), &argument.contents), ("M", payload));
        }
    }

    #[test]
    fn any_frame_sizes_give_the_same_messages(
        payload in prop::collection::vec(any::<u8>(), 0..300), sizes in prop::collection::vec(0usize..50, 1..40),
    ) {
        let messages = [call(1, "M", &payload), call(3, "N", &payload)].map(|frame| frame[8..].to_vec()).concat();
        let (mut input, mut rest) = (Vec::new(), messages.as_slice());
        for size in sizes.iter().copied().chain([messages.len()]) {
            let (part, later) = rest.split_at(size.min(rest.len()));
            rest = later;
            input.extend([[0, 0, 0, 1], u32::try_from(part.len()).expect("short").to_be_bytes()].concat());
            input.extend(part);
        }
        let found: Vec<u32> = received(&input, &[]).iter().map(|message| message.stream).collect();
        prop_assert_eq!(found, [1, 3]);
    }

    #[test]
    fn any_bytes_end_a_session_with_a_cause_or_are_ignored(
        prefix in prop::sample::select(vec![
            vec![], vec![0, 0, 0, 1], vec![0, 0, 0, 2, 0, 0, 0, 60, 0, 0, 0, 50], call(1, "StartContainer", &[8; 40])[..30].to_vec(),
        ]),
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let input = [prefix, bytes].concat();
        let (reports, sent) = session(&input);
        // The smallest message has 18 bytes.
        prop_assert!(reports <= input.len() / 18);
        prop_assert!(sent.len() <= (input.len() / 18) * 4096);
    }

    #[test]
    fn no_answer_exceeds_the_buffer_of_a_runtime(method in "\\PC{0,1500}", code in any::<i32>(), text in "\\PC{0,1500}") {
        let answer = ttrpc::response(1, Err(Status { code, message: text }));
        prop_assert!(answer.len() <= 4096);
        let (_, sent) = session(&call(1, &method, &[]));
        prop_assert!((18..=4096).contains(&sent.len()));
    }
}

#[test]
fn memory_grows_with_what_was_received_not_with_what_was_announced() {
    let length = u32::try_from(MAX_MESSAGE).expect("small").to_be_bytes();
    let frame = [[0, 0, 0, 1].as_slice(), &(4194314u32.to_be_bytes()), &length, &[0, 0, 0, 1, 1, 0]].concat();
    // Other connections are skipped, without a buffer.
    let other = [[0, 0, 0, 3, 0, 0, 0x10, 0].as_slice(), &[7; 4096]].concat();
    for (received, limit) in [(0, 4 << 10), (1 << 20, 3 << 20), (MAX_MESSAGE - 1, 2 * (MAX_MESSAGE + 18))] {
        let input = [other.as_slice(), &frame, &vec![0; received]].concat();
        let mut messages = Messages::new(input.as_slice());
        assert_eq!(run(messages.next()).expect_err("incomplete").kind(), ErrorKind::UnexpectedEof);
        assert!(messages.buffered() <= limit, "{received}: {}", messages.buffered());
    }
    let input = [frame, vec![0; MAX_MESSAGE]].concat();
    let mut messages = Messages::new(input.as_slice());
    assert_eq!(run(messages.next()).expect("complete").stream, 1);
    assert_eq!(messages.buffered(), 0);
}

#[test]
fn a_registration_that_the_runtime_does_not_complete_times_out() {
    let (sender, _reports) = mpsc::channel(1);
    let result = run(async {
        let (stream, _runtime) = duplex(64);
        Session::new(&sender).serve(stream, sink(), Instant::now()).await
    });
    let cause = "the runtime did not register the plugin within 30 s; see its log";
    assert_eq!(result, Err(cause.into()));
}
