//! `SocketNic` over loopback, with the standard library's sockets as peers.

mod ports;
mod sleep;
mod support;
mod tap;
mod tcp;
mod udp;
