//! Properties of the framing and of sessions, for any input.

use super::session::Session;
use super::ttrpc::{self, Caller, Demultiplexer, MAX_MESSAGE, Received, Status};
use super::{NriContainer, NriHandler, NriPod, messages};
use proptest::prelude::*;
use prost::Message;

/// Counts the calls.
#[derive(Default)]
struct Counter(usize);

impl NriHandler for Counter {
    fn synchronize(&mut self, _: Vec<NriPod>, _: Vec<NriContainer>) {
        self.0 += 1;
    }

    fn start(&mut self, _: &NriPod, _: &NriContainer) {
        self.0 += 1;
    }

    fn started(&mut self, _: &NriPod, _: &NriContainer) {
        self.0 += 1;
    }

    fn stopped(&mut self, _: &NriPod, _: &NriContainer) {
        self.0 += 1;
    }

    fn removed(&mut self, _: &NriPod, _: &NriContainer) {
        self.0 += 1;
    }
}

/// An argument that is encoded already.
#[derive(Clone, PartialEq, Message)]
struct Bytes {
    #[prost(bytes = "vec", tag = "1")]
    contents: Vec<u8>,
}

/// A call of the runtime: the plugin's own call, on the other connection.
fn call(stream: u32, method: &str, payload: &[u8]) -> Vec<u8> {
    let argument = Bytes { contents: payload.to_vec() };
    let mut frame = ttrpc::request(stream, messages::PLUGIN_SERVICE, method, &argument);
    frame[3] = 1;
    frame
}

fn received(input: &[u8], cuts: &[usize]) -> Vec<Received> {
    let (mut demultiplexer, mut messages, mut rest) = (Demultiplexer::default(), Vec::new(), input);
    for cut in cuts.iter().copied().chain([usize::MAX]) {
        let (mut part, later) = rest.split_at(cut.min(rest.len()));
        rest = later;
        while let Some(message) = demultiplexer.next(&mut part).expect("valid") {
            messages.push(message);
        }
    }
    messages
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
            prop_assert_eq!((message.caller, message.stream()), (Caller::Runtime, *stream));
            let request = message.request().expect("a call").expect("valid");
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
        let found: Vec<u32> = received(&input, &[]).iter().map(Received::stream).collect();
        prop_assert_eq!(found, [1, 3]);
    }

    #[test]
    fn any_bytes_end_a_session_with_a_cause_or_are_ignored(
        prefix in prop::sample::select(vec![
            vec![], vec![0, 0, 0, 1], vec![0, 0, 0, 2, 0, 0, 0, 60, 0, 0, 0, 50], call(1, "StartContainer", &[8; 40])[..30].to_vec(),
        ]),
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let (mut session, mut handler, mut answers) = (Session::default(), Counter::default(), 0);
        let input = [prefix, bytes].concat();
        let _ = session.receive(&input, &mut handler, &mut |answer| {
            answers += answer.len();
            Ok(())
        });
        // The smallest message has 18 bytes.
        prop_assert!(handler.0 <= input.len() / 18);
        prop_assert!(answers <= (input.len() / 18) * 4096);
    }

    #[test]
    fn no_answer_exceeds_the_buffer_of_a_runtime(method in "\\PC{0,1500}", code in any::<i32>(), text in "\\PC{0,1500}") {
        let answer = ttrpc::response(1, Err(Status { code, message: text }));
        prop_assert!(answer.len() <= 4096);
        let (mut session, mut handler, mut sizes) = (Session::default(), Counter::default(), Vec::new());
        let result = session.receive(&call(1, &method, &[]), &mut handler, &mut |answer| {
            sizes.push(answer.len());
            Ok(())
        });
        prop_assert_eq!(result, Ok(()));
        prop_assert!(sizes.len() == 1 && sizes[0] <= 4096);
    }
}

#[test]
fn memory_grows_with_what_was_received_not_with_what_was_announced() {
    let mut demultiplexer = Demultiplexer::default();
    let length = u32::try_from(MAX_MESSAGE).expect("small").to_be_bytes();
    let frame = [[0, 0, 0, 1].as_slice(), &(4194314u32.to_be_bytes()), &length, &[0, 0, 0, 1, 1, 0]].concat();
    assert_eq!(demultiplexer.next(&mut frame.as_slice()), Ok(None));
    assert!(demultiplexer.buffered() < 100);
    for _ in 0..4095 {
        assert_eq!(demultiplexer.next(&mut [0; 1024].as_slice()), Ok(None));
        assert!(demultiplexer.buffered() <= 2 * (MAX_MESSAGE + 18));
    }
    let last = demultiplexer.next(&mut [0; 1024].as_slice()).expect("valid").expect("complete");
    assert_eq!(last.stream(), 1);
    assert!(demultiplexer.buffered() < 100);
    // Other connections are skipped, without a buffer.
    let other = [0, 0, 0, 3, 0, 0, 0xff, 0xff, 1, 2, 3];
    assert_eq!(demultiplexer.next(&mut other.as_slice()), Ok(None));
    assert!(demultiplexer.buffered() < 100);
}
