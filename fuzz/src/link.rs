//! Links to remote accelerators: greetings of strangers, and the frames of an authenticated peer.

use wire::link::{Frame, Greeting, LinkError, VERSION, record_bytes};

/// A stream of greetings, or of frames: the same messages however it is cut, each with one encoding, or an error.
pub fn stream(input: &[u8]) {
    let [which, rest @ ..] = input else { return };
    if which % 2 == 0 {
        return greetings(rest);
    }
    let _ = record_bytes(rest);
    let mut at = 0;
    while let Ok(Some((frame, len))) = Frame::decode(&rest[at..]) {
        let bytes = &rest[at..at + len];
        let mut again = Vec::new();
        frame.encode(&mut again);
        assert_eq!(again, bytes, "a frame has one encoding");
        for cut in [0, 1, 7, 8, len / 2, len - 1] {
            let early = Frame::decode(&bytes[..cut.min(len - 1)]);
            assert_eq!(early, Ok(None), "a frame is complete too early");
        }
        at += len;
    }
}

fn greetings(mut rest: &[u8]) {
    loop {
        match Greeting::decode(rest) {
            Ok(Some((greeting, len))) => {
                match &greeting {
                    // Any version and any characters are decoded.
                    Greeting::Refuse(text) => assert!(!text.contains(char::is_control)),
                    other => assert_eq!(other.encode(), &rest[..len]),
                }
                assert_eq!(Greeting::decode(&rest[..len - 1]), Ok(None));
                rest = &rest[len..];
            }
            Err(LinkError::Version(version)) => {
                assert_ne!(version, VERSION);
                return;
            }
            _ => return,
        }
    }
}
