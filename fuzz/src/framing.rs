//! Framings: two bytes of the input select framing, maximum and chunks, the rest is the stream.

#[allow(dead_code, reason = "shared with the property tests, which use more of it")]
#[path = "../../crates/wire/tests/support/mod.rs"]
mod support;

use support::{Side, check_split, converse};
use wire::framing::{Assembly, Delimits, Framing, Piece, UdpHeader};

/// Longest stream that is cut at every position; longer ones are cut where the input says.
const EVERY_CUT_BYTES: usize = 48;

/// Requests of clients.
pub fn request(input: &[u8]) {
    run(Side::Request, input);
}

/// Responses of backends.
pub fn response(input: &[u8]) {
    run(Side::Response, input);
}

/// The first byte: framing. The second: bits 0-1 maximum, bits 2-4 chunk sizes.
fn run(side: Side, input: &[u8]) {
    let [framing, how, stream @ ..] = input else { return };
    let framing = Framing::ALL[usize::from(*framing) % Framing::ALL.len()].with_parameter(5);
    let max = [4096, 64, 14, 1][usize::from(how & 3)];
    let sizes: &[usize] =
        [&[1][..], &[2], &[3, 1], &[7, 64, 2], &[16], &[100, 1, 1], &[1500], &[13, 5]]
            [usize::from(how >> 2 & 7)];
    check_split(framing, side, max, stream, sizes);
    if stream.len() <= EVERY_CUT_BYTES {
        for cut in 1..stream.len() {
            check_split(framing, side, max, stream, &[cut, stream.len()]);
        }
    }
    check_encoding(framing, side, stream);
    if side == Side::Response {
        check_match(framing, stream);
        check_datagrams(stream, max.min(64));
    }
}

/// Datagrams of 12 bytes each, as fragments of a response of memcached over UDP.
fn check_datagrams(stream: &[u8], max: usize) {
    let mut assembly = Assembly::default();
    let mut taken = 0;
    for datagram in stream.chunks(12) {
        let Some((header, payload)) = UdpHeader::split(datagram) else { continue };
        assert_eq!(header.bytes()[..6], datagram[..6]);
        match assembly.take(header, payload, max) {
            Piece::Taken => taken += payload.len(),
            Piece::Last => {
                taken += payload.len();
                assert!(taken <= max);
                assert_eq!(assembly.whole(&mut [0; 64]).len(), taken);
                assembly.clear();
                taken = 0;
            }
            Piece::Useless => {}
            Piece::TooLong => {
                assembly.clear();
                taken = 0;
            }
        }
    }
}

/// A command, a zero byte, and a backend's answer: matched, whatever their content.
fn check_match(framing: Framing, stream: &[u8]) {
    let mut parts = stream.splitn(2, |byte| *byte == 0);
    let (Some(request), Some(response)) = (parts.next(), parts.next()) else { return };
    let mark = framing.mark(request);
    assert!(mark.len() <= request.len());
    // An error matches every command; no answer matches an empty command.
    assert!(framing.fits(mark, b"ERROR\r\n") || mark.iter().all(|byte| *byte == b' '));
    assert!(!response.is_empty() || framing != Framing::Memcached || !framing.fits(mark, response));
}

/// The stream as a payload: refused without output, or encoded as one message for the other side.
fn check_encoding(framing: Framing, side: Side, payload: &[u8]) {
    let mut out = Vec::new();
    let encoded = match side {
        Side::Request => framing.encode_request(payload, &mut out),
        Side::Response => framing.encode_reply(payload, &mut out),
    };
    let as_produced = framing.delimits() != Delimits::Both && side == Side::Response;
    if encoded.is_err() {
        assert!(out.is_empty());
    } else if !as_produced {
        let transcript = converse(framing, side, payload.len().max(14), [&out[..]], true);
        assert_eq!(transcript.events.len(), 1);
        assert_eq!(transcript.payload(), payload);
    }
}
