//! Shared by the integration tests: the server's part, and clients over shared memory.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

#[path = "../../../server/tests/common/mod.rs"]
mod of_server;
pub(crate) mod talk;

pub(crate) use of_server::*;
