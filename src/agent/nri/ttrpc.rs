//! Remote calls in both directions over one socket: frames of NRI's multiplexer, and in them messages of ttrpc
//! (github.com/containerd/nri, `pkg/net/multiplex`; github.com/containerd/ttrpc, `PROTOCOL.md`).

use crate::printable;
use prost::{DecodeError, Message};

/// The size of a frame's header: connection and length.
const FRAME_HEADER: usize = 8;
/// The size of a message's header: length, stream, kind, flags.
const MESSAGE_HEADER: usize = 10;
/// The limit of a message without its header; the same as in ttrpc.
pub(super) const MAX_MESSAGE: usize = 4 << 20;
/// The limit of a frame without its header; the same as in NRI.
const MAX_FRAME: usize = MESSAGE_HEADER + MAX_MESSAGE;
/// The limit of texts in errors, received or sent. With it, each message that this plugin sends fits into one frame of
/// 4 KiB: if a frame is larger than the runtime's read buffer, the runtime closes the connection.
const MAX_TEXT: usize = 1024;

/// The side whose calls, with the answers to them, a connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// The runtime calls the plugin.
    Runtime,
    /// The plugin calls the runtime.
    Plugin,
}

impl Caller {
    const fn connection(self) -> u32 {
        match self {
            Self::Runtime => 1,
            Self::Plugin => 2,
        }
    }
}

const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// The status of a method that the plugin does not have (gRPC, `UNIMPLEMENTED`).
pub(super) const UNIMPLEMENTED: i32 = 12;
/// The status of a message that can't be decoded (gRPC, `INVALID_ARGUMENT`).
pub(super) const INVALID_ARGUMENT: i32 = 3;
/// The status of a message that exceeds a limit (gRPC, `RESOURCE_EXHAUSTED`).
pub(super) const RESOURCE_EXHAUSTED: i32 = 8;

/// An error as the answer to a call.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Status {
    /// The code, as in gRPC.
    #[prost(int32, tag = "1")]
    pub(super) code: i32,
    /// The text of the error.
    #[prost(string, tag = "2")]
    pub(super) message: String,
}

/// A call.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Request {
    /// The service, such as `nri.pkg.api.v1alpha1.Plugin`.
    #[prost(string, tag = "1")]
    pub(super) service: String,
    /// The method, such as `StartContainer`.
    #[prost(string, tag = "2")]
    pub(super) method: String,
    /// The argument.
    #[prost(bytes = "vec", tag = "3")]
    pub(super) payload: Vec<u8>,
}

/// The answer to a call.
#[derive(Clone, PartialEq, Eq, Message)]
struct Response {
    #[prost(message, optional, tag = "1")]
    status: Option<Status>,
    #[prost(bytes = "vec", tag = "2")]
    payload: Vec<u8>,
}

/// A received message of ttrpc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Received {
    /// The connection.
    pub(super) caller: Caller,
    /// Header and contents.
    bytes: Vec<u8>,
}

impl Received {
    /// The number of the call.
    pub(super) fn stream(&self) -> u32 {
        number(&self.bytes, 4)
    }

    /// Returns the call of the runtime; `None` if the message is not a call.
    pub(super) fn request(&self) -> Option<Result<Request, DecodeError>> {
        let is_call = self.caller == Caller::Runtime && self.bytes[8] == REQUEST;
        is_call.then(|| Request::decode(&self.bytes[MESSAGE_HEADER..]))
    }

    /// Returns the runtime's answer to a call of this plugin; `None` if the message is not an answer.
    pub(super) fn response(&self) -> Option<Result<Result<(), Status>, DecodeError>> {
        let is_answer = self.caller == Caller::Plugin && self.bytes[8] == RESPONSE;
        is_answer.then(|| {
            let Response { status, .. } = Response::decode(&self.bytes[MESSAGE_HEADER..])?;
            Ok(match status {
                Some(Status { code, message }) if code != 0 => Err(Status { code, message: short_text(&message) }),
                _ => Ok(()),
            })
        })
    }
}

/// Returns a text of at most [`MAX_TEXT`] bytes.
pub(super) fn short_text(text: &str) -> String {
    printable::cut(text, MAX_TEXT).into_owned()
}

/// Splits the socket's byte stream into messages. It buffers one incomplete message per connection, and only allocates
/// memory for bytes that it has received.
#[derive(Debug, Default)]
pub(super) struct Demultiplexer {
    /// The header of the current frame, as far as it has been received.
    header: Vec<u8>,
    /// The number of bytes that the current frame still contains.
    frame_left: usize,
    from_runtime: Vec<u8>,
    from_plugin: Vec<u8>,
}

impl Demultiplexer {
    /// Takes bytes from the front of `input` until a message is complete. Returns `None` when `input` is empty.
    ///
    /// # Errors
    /// A frame or message exceeds its limit.
    pub(super) fn next(&mut self, input: &mut &[u8]) -> Result<Option<Received>, String> {
        while !input.is_empty() {
            if self.frame_left == 0 {
                take(input, FRAME_HEADER - self.header.len(), &mut self.header);
                if self.header.len() < FRAME_HEADER {
                    break;
                }
                self.frame_left = number(&self.header, 4) as usize;
                if self.frame_left > MAX_FRAME {
                    return Err(format!("expected a frame of at most {MAX_FRAME} bytes, got {}", self.frame_left));
                }
                if self.frame_left == 0 {
                    self.header.clear();
                }
                continue;
            }
            let connection = number(&self.header, 0);
            let caller = [Caller::Runtime, Caller::Plugin].into_iter().find(|it| it.connection() == connection);
            let buffer = match caller {
                Some(Caller::Runtime) => &mut self.from_runtime,
                Some(Caller::Plugin) => &mut self.from_plugin,
                None => &mut Vec::new(),
            };
            let needed = if caller.is_none() { usize::MAX } else { missing(buffer)? };
            self.frame_left -= take(input, needed.min(self.frame_left), buffer);
            if self.frame_left == 0 {
                self.header.clear();
            }
            if let Some(caller) = caller
                && missing(buffer)? == 0
            {
                return Ok(Some(Received { caller, bytes: std::mem::take(buffer) }));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
impl Demultiplexer {
    /// Returns the size of the buffers.
    pub(super) fn buffered(&self) -> usize {
        self.header.capacity() + self.from_runtime.capacity() + self.from_plugin.capacity()
    }
}

/// Returns how many bytes the message in `buffer` lacks: its header first, then its contents.
fn missing(buffer: &[u8]) -> Result<usize, String> {
    if buffer.len() < MESSAGE_HEADER {
        return Ok(MESSAGE_HEADER - buffer.len());
    }
    match number(buffer, 0) as usize {
        length if length > MAX_MESSAGE => {
            Err(format!("expected a message of at most {MAX_MESSAGE} bytes, got {length}"))
        }
        length => Ok(MESSAGE_HEADER + length - buffer.len()),
    }
}

/// Moves at most `length` bytes from the front of `input` to `to`, and returns their number.
fn take(input: &mut &[u8], length: usize, to: &mut Vec<u8>) -> usize {
    let (taken, rest) = input.split_at(length.min(input.len()));
    to.extend_from_slice(taken);
    *input = rest;
    taken.len()
}

/// Returns the number (big-endian) at `at`, which the caller has received.
fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// Returns the bytes of a call of this plugin.
pub(super) fn request(stream: u32, service: &str, method: &str, argument: &impl Message) -> Vec<u8> {
    let payload = argument.encode_to_vec();
    let request = Request { service: service.to_owned(), method: method.to_owned(), payload };
    frame(Caller::Plugin, stream, REQUEST, &request.encode_to_vec())
}

/// Returns the bytes of the answer to the runtime's call `stream`.
pub(super) fn response(stream: u32, result: Result<Vec<u8>, Status>) -> Vec<u8> {
    let response = match result {
        Ok(payload) => Response { status: None, payload },
        Err(Status { code, message }) => {
            Response { status: Some(Status { code, message: short_text(&message) }), payload: Vec::new() }
        }
    };
    frame(Caller::Runtime, stream, RESPONSE, &response.encode_to_vec())
}

fn frame(caller: Caller, stream: u32, kind: u8, contents: &[u8]) -> Vec<u8> {
    let length = |length: usize| u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    let mut frame = Vec::with_capacity(FRAME_HEADER + MESSAGE_HEADER + contents.len());
    frame.extend(caller.connection().to_be_bytes());
    frame.extend(length(MESSAGE_HEADER + contents.len()));
    frame.extend(length(contents.len()));
    frame.extend(stream.to_be_bytes());
    frame.extend([kind, 0]);
    frame.extend_from_slice(contents);
    frame
}
