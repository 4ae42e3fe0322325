//! Remote calls in both directions over one socket: frames of NRI's multiplexer, and in them messages of ttrpc
//! (github.com/containerd/nri, `pkg/net/multiplex`; github.com/containerd/ttrpc, `PROTOCOL.md`).

use crate::printable;
use prost::Message;
use prost::bytes::Buf;
use std::io::{self, ErrorKind};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The size of a message's header: length, stream, kind, flags.
const MESSAGE_HEADER: usize = 10;
/// The limit of a message without its header; the same as in ttrpc.
pub(super) const MAX_MESSAGE: usize = 4 << 20;
/// The limit of a frame without its header (connection and length); the same as in NRI.
const MAX_FRAME: usize = MESSAGE_HEADER + MAX_MESSAGE;
/// The limit of texts in errors, received or sent. With it, each message that this plugin sends fits into one frame of
/// 4 KiB: if a frame is larger than the runtime's read buffer, the runtime closes the connection.
const MAX_TEXT: usize = 1024;

/// The connection of the runtime's calls, with the answers to them.
pub(super) const OF_RUNTIME: u32 = 1;
/// The connection of the plugin's calls.
pub(super) const OF_PLUGIN: u32 = 2;

/// The kinds of messages.
pub(super) const REQUEST: u8 = 1;
pub(super) const RESPONSE: u8 = 2;

/// The status of a method that the plugin does not have (gRPC, `UNIMPLEMENTED`).
pub(super) const UNIMPLEMENTED: i32 = 12;

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
pub(super) struct Response {
    /// The error, if its code is not 0.
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<Status>,
    #[prost(bytes = "vec", tag = "2")]
    payload: Vec<u8>,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Received {
    /// The connection and the kind, such as [`OF_RUNTIME`] and [`REQUEST`].
    pub(super) kind: (u32, u8),
    /// The number of the call.
    pub(super) stream: u32,
    /// The contents.
    pub(super) contents: Vec<u8>,
}

/// Returns a text of at most [`MAX_TEXT`] bytes.
pub(super) fn short_text(text: &str) -> String {
    printable::cut(text, MAX_TEXT).into_owned()
}

/// Reads messages from the runtime's socket. A message may span frames, between which frames of the other connection
/// may come. Memory grows only with bytes that were received.
#[derive(Debug)]
pub(super) struct Messages<R> {
    reader: R,
    /// What was received of the current messages of [`OF_RUNTIME`] and [`OF_PLUGIN`].
    buffers: [Vec<u8>; 2],
}

impl<R: AsyncRead + Unpin> Messages<R> {
    pub(super) const fn new(reader: R) -> Self {
        Self { reader, buffers: [Vec::new(), Vec::new()] }
    }

    /// Returns the next message.
    ///
    /// # Errors
    /// [`ErrorKind::UnexpectedEof`]: the connection has ended. [`ErrorKind::InvalidData`]: a frame or message exceeds its
    /// limit. Nothing can be received.
    pub(super) async fn next(&mut self) -> io::Result<Received> {
        loop {
            for (connection, buffer) in [OF_RUNTIME, OF_PLUGIN].into_iter().zip(&mut self.buffers) {
                if let Some(message) = first_message(connection, buffer)? {
                    return Ok(message);
                }
            }
            let (connection, length) = (self.reader.read_u32().await?, self.reader.read_u32().await?);
            let length = at_most(MAX_FRAME, "frame", length)?;
            let mut skipped = Vec::new();
            let buffer = match connection {
                OF_RUNTIME => &mut self.buffers[0],
                OF_PLUGIN => &mut self.buffers[1],
                _ => &mut skipped,
            };
            if (&mut self.reader).take(length as u64).read_to_end(buffer).await? < length {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Returns the size of the buffers.
    #[cfg(test)]
    pub(super) fn buffered(&self) -> usize {
        self.buffers.iter().map(Vec::capacity).sum()
    }
}

/// Takes the first message from the front of `buffer`; returns `None` if it is not complete.
fn first_message(connection: u32, buffer: &mut Vec<u8>) -> io::Result<Option<Received>> {
    let Some(mut header) = buffer.get(..MESSAGE_HEADER) else { return Ok(None) };
    let (length, stream, kind) = (header.get_u32(), header.get_u32(), header.get_u8());
    let end = MESSAGE_HEADER + at_most(MAX_MESSAGE, "message", length)?;
    if buffer.len() < end {
        return Ok(None);
    }
    let rest = buffer.split_off(end);
    let contents = std::mem::replace(buffer, rest).split_off(MESSAGE_HEADER);
    Ok(Some(Received { kind: (connection, kind), stream, contents }))
}

/// Returns a length that was received.
fn at_most(limit: usize, what: &str, length: u32) -> io::Result<usize> {
    let error =
        || io::Error::new(ErrorKind::InvalidData, format!("expected a {what} of at most {limit} bytes, got {length}"));
    usize::try_from(length).ok().filter(|length| *length <= limit).ok_or_else(error)
}

/// Returns the bytes of a call of this plugin.
pub(super) fn request(stream: u32, service: &str, method: &str, argument: &impl Message) -> Vec<u8> {
    let payload = argument.encode_to_vec();
    let request = Request { service: service.to_owned(), method: method.to_owned(), payload };
    frame(OF_PLUGIN, stream, REQUEST, &request.encode_to_vec())
}

/// Returns the bytes of the answer to the runtime's call `stream`.
pub(super) fn response(stream: u32, result: Result<Vec<u8>, Status>) -> Vec<u8> {
    let response = match result {
        Ok(payload) => Response { status: None, payload },
        Err(Status { code, message }) => {
            Response { status: Some(Status { code, message: short_text(&message) }), payload: Vec::new() }
        }
    };
    frame(OF_RUNTIME, stream, RESPONSE, &response.encode_to_vec())
}

fn frame(connection: u32, stream: u32, kind: u8, contents: &[u8]) -> Vec<u8> {
    let number = |length: usize| u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    let (whole, length) = (number(MESSAGE_HEADER + contents.len()), number(contents.len()));
    [connection.to_be_bytes().as_slice(), &whole, &length, &stream.to_be_bytes(), &[kind, 0], contents].concat()
}
