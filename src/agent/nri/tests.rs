//! Properties of the encodings, for any input.

use super::protobuf::{Fields, Malformed, Message, Value};
use super::session::Session;
use super::ttrpc::{self, Caller, Demultiplexer, MAX_MESSAGE, Received, Status};
use super::{NriContainer, NriHandler, NriPod, messages};
use proptest::prelude::*;

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

/// A call of the runtime: the plugin's own call, on the other connection.
fn call(stream: u32, method: &str, payload: &[u8]) -> Vec<u8> {
    let mut frame = ttrpc::request(stream, messages::PLUGIN_SERVICE, method, payload);
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

/// A container and its encoding, with fields that the plugin does not know.
fn container() -> impl Strategy<Value = (NriContainer, Vec<u8>)> {
    let text = || "[a-z0-9/:-]{0,20}";
    (text(), text(), text(), any::<bool>(), text(), any::<u32>(), (9u64..11, 13u64..4000), any::<u64>()).prop_map(
        |(id, pod_id, name, running, cgroups_path, pid, (below, above), other)| {
            let linux = Message::default().bytes(1, b"x").bytes(5, cgroups_path.as_bytes()).encoded();
            let message = Message::default()
                .number(above, other)
                .bytes(1, id.as_bytes())
                .bytes(2, pod_id.as_bytes())
                .bytes(3, name.as_bytes())
                .bytes(below, b"unknown")
                .number(4, if running { 3 } else { 4 })
                .bytes(11, &linux)
                .number(12, pid.into())
                .encoded();
            (NriContainer { id, pod_id, name, running, cgroups_path, pid }, message)
        },
    )
}

proptest! {
    #[test]
    fn fields_are_read_as_they_were_written(
        fields in prop::collection::vec((1u64..1 << 29, prop::option::of(1u64..), prop::collection::vec(any::<u8>(), 1..40)), 0..20),
    ) {
        let message = fields.iter().fold(Message::default(), |message, (field, number, bytes)| match number {
            Some(number) => message.number(*field, *number),
            None => message.bytes(*field, bytes),
        });
        let message = message.encoded();
        let expected: Vec<_> = fields
            .iter()
            .map(|(field, number, bytes)| Ok((*field, number.map_or(Value::Bytes(bytes), Value::Number))))
            .collect();
        prop_assert_eq!(Fields::of(&message).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn any_bytes_are_fields_or_malformed(message in prop::collection::vec(any::<u8>(), 0..200)) {
        // Ends: each field takes at least one byte.
        prop_assert!(Fields::of(&message).count() <= message.len());
        let _ = (messages::pod(&message), messages::container(&message));
    }

    #[test]
    fn a_container_is_read_as_it_was_written((container, message) in container()) {
        prop_assert_eq!(messages::container(&message), Ok(container));
    }

    #[test]
    fn a_truncated_container_is_malformed_or_has_fewer_fields((_, message) in container(), cut in any::<prop::sample::Index>()) {
        let cut = cut.index(message.len() + 1);
        let fields = Fields::of(&message[..cut]).collect::<Result<Vec<_>, _>>();
        let complete = Fields::of(&message).count();
        match fields {
            Ok(fields) => prop_assert!(fields.len() <= complete),
            Err(Malformed) => prop_assert_eq!(messages::container(&message[..cut]), Err(Malformed)),
        }
    }

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
            prop_assert_eq!((request.method, request.payload), (b"M".as_slice(), payload.as_slice()));
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
    fn no_answer_exceeds_the_buffer_of_a_runtime(method in "\\PC{0,1500}", code in any::<u64>(), text in "\\PC{0,1500}") {
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

#[test]
fn malformed_fields_are_refused() {
    for message in [
        &[0x08][..],
        &[0x0a, 0x02, 0x01],
        &[0x0b],
        &[0x00, 0x01],
        &[0xff; 11],
        &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        &[0x09, 0, 0, 0],
        &[0x0d, 0, 0, 0],
    ] {
        assert_eq!(Fields::of(message).last(), Some(Err(Malformed)), "{message:?}");
    }
    let fixed = [0x09, 0, 0, 0, 0, 0, 0, 0, 0, 0x0d, 0, 0, 0, 0, 0x10, 0x01];
    let fields: Vec<_> = Fields::of(&fixed).map(|field| field.expect("valid").1).collect();
    assert_eq!(fields, [Value::Fixed, Value::Fixed, Value::Number(1)]);
}
