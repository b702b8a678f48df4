//! TCP connections of clients.

pub(crate) mod connection;
