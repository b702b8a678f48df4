//! How test clients receive datagrams. Unit tests of the server include this file too.

use std::io::{ErrorKind, Result};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

/// Receives one datagram. A signal interrupts a receive that has a timeout, and the host kernel does not restart it.
pub(crate) fn receive(socket: &UdpSocket, into: &mut [u8]) -> Result<usize> {
    loop {
        match socket.recv(into) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            received => return received,
        }
    }
}

/// Sends a request every second until there is a reply, for at most about `patience`. The socket is only for this call: late
/// replies stay in it.
pub(crate) fn ask_again(socket: &UdpSocket, request: &[u8], patience: Duration) -> Result<Vec<u8>> {
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let deadline = Instant::now() + patience;
    let mut reply = vec![0; 65_536];
    loop {
        socket.send(request)?;
        match receive(socket, &mut reply) {
            Ok(len) => {
                reply.truncate(len);
                return Ok(reply);
            }
            Err(error) => {
                let late = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                if !late || Instant::now() >= deadline {
                    return Err(error);
                }
            }
        }
    }
}
