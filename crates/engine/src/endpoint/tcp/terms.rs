//! What a service sets for its own connections, by slot. What it does not set are the limits of the engine and the words of
//! the framing.

use std::ops::Deref;
use std::sync::Arc;

use wire::error_reply::ErrorReply;
use wire::framing::Framing;

use crate::base::topology::Service;

/// The terms of one service's connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Terms {
    /// A connection without a complete message for this long is closed; `None`: after the limit of the engine.
    pub(crate) idle_ns: Option<u64>,
    /// Its error reply as it is on the wire, to clients whose lines end in LF, and in CR LF.
    error: Option<[Arc<[u8]>; 2]>,
}

/// Bytes that report an error to a client, complete in wire format. Copies share them: a loss allocates nothing.
#[derive(Clone, Debug)]
pub(crate) enum ErrorBytes {
    /// Of the protocol.
    Protocol(&'static [u8]),
    /// Of the service.
    Service(Arc<[u8]>),
}

impl ErrorBytes {
    /// None: the client finds the end of the connection.
    pub(crate) const NONE: Self = Self::Protocol(b"");
}

impl Deref for ErrorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Protocol(bytes) => bytes,
            Self::Service(bytes) => bytes,
        }
    }
}

impl Terms {
    pub(crate) fn new(service: &Service) -> Self {
        let error = [false, true].map(|crlf| {
            let mut out = Vec::new();
            let framing = service.framing.as_client_writes(crlf);
            let encoded = framing.encode_reply(&service.error_reply, &mut out);
            (encoded.is_ok() && !service.error_reply.is_empty()).then(|| Arc::from(out))
        });
        let error = match error {
            [Some(lf), Some(crlf)] => Some([lf, crlf]),
            _ => None,
        };
        Self { idle_ns: service.idle_ms.map(|ms| ms * 1_000_000), error }
    }

    /// The bytes that report an error to a client whose last line ended in CR LF, or did not. `None`: neither the protocol nor the service has
    /// any, and the connection must be closed.
    pub(super) fn error_reply(
        &self,
        framing: Framing,
        crlf: bool,
        what: ErrorReply,
    ) -> Option<ErrorBytes> {
        let own =
            || self.error.as_ref().map(|own| ErrorBytes::Service(own[usize::from(crlf)].clone()));
        framing.error_reply(what).map(ErrorBytes::Protocol).or_else(own)
    }
}
