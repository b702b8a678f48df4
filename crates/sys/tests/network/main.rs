//! `SocketNic` over loopback, with the standard library's sockets as peers.

mod lent;
mod ports;
mod sleep;
mod support;
mod tap;
mod tcp;
mod udp;
mod watched;
