//! A service behind a `shm://` port as a stage of a transfer.

use std::path::PathBuf;
use std::time::Duration;

use bench::client::shm::{Client, Options, ShmError};
use transfer::{Kernel, KernelSource};

/// The service whose port is at this path.
pub(crate) fn behind(path: PathBuf) -> KernelSource {
    KernelSource::new(move || {
        let client = Client::connect(&path, &Options::default());
        let client = client.map_err(|error| error.to_string())?;
        if !client.answers() {
            return Err("the service sends no replies".to_owned());
        }
        Ok(Box::new(Port(client)))
    })
}

struct Port(Client);

impl Kernel for Port {
    fn bytes_max(&self) -> (usize, usize) {
        (self.0.request_bytes_max(), self.0.reply_bytes_max())
    }

    fn depth(&self) -> usize {
        self.0.depth()
    }

    fn send(&mut self, number: u64, message: &[u8]) -> Result<bool, String> {
        match self.0.try_send(number, message) {
            Ok(()) => Ok(true),
            Err(ShmError::Full) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    fn receive(&mut self, into: &mut [u8], wait: Duration) -> Result<Option<(u64, usize)>, String> {
        self.0.publish();
        let reply = match wait.is_zero() {
            true => self.0.try_receive(into),
            false => self.0.receive(into, wait),
        };
        let Some(reply) = reply.map_err(|error| error.to_string())? else { return Ok(None) };
        match reply.lost {
            None => Ok(Some((reply.tag, reply.len))),
            Some(reason) => {
                let (piece, reason) = (reply.tag, reason.name());
                Err(format!("the message of piece {piece} was dropped: {reason}"))
            }
        }
    }
}
