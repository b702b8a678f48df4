//! What the integration tests share: the server's part, and clients in shared memory.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

#[path = "../../../server/tests/common/mod.rs"]
mod of_server;
pub(crate) mod talk;

pub(crate) use of_server::*;
