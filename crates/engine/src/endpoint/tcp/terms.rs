//! What a service sets for its own connections, by slot. What it does not set are the limits of the engine.

use crate::topology::Service;

/// The terms of one service's connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Terms {
    /// A connection without a complete message for this long is closed; `None`: after the limit of the engine.
    pub(crate) idle_ns: Option<u64>,
}

impl Terms {
    pub(crate) fn new(service: &Service) -> Self {
        Self { idle_ns: service.idle_ms.map(|ms| ms * 1_000_000) }
    }
}
