//! Work that a thread does apart from its transfer: meanwhile other threads read the source and write to the sink.
//!
//! A chunk that goes through digests takes the one pass of [`sys::digests`] together with chunks of other transfers. Chunks of one
//! transfer follow one another, since each has the state of the one before it.

use std::io;
use std::sync::Arc;

use crate::command::device::SocketSender;
use crate::command::error::TransferError;
use crate::command::limits::TAG_BYTES;
use crate::run::progress::Progress;
use crate::stages::Stage;
use crate::stages::buffer::Layout;
use crate::stages::chain::Chunk;
use crate::stages::digest::update_together;
use crate::stages::seal::Sealer;

/// Chunks that go through digests together: the lanes of the widest pass.
pub const TOGETHER_MAX: usize = sys::digests::LANES_MAX;

/// Work apart from a transfer.
pub enum Apart {
    /// A chunk goes through stages.
    Stages(StagesApart),
    /// A chunk is sent.
    Send(SendApart),
}

/// Chunks of one transfer that go through stages that observe, and a seal.
pub struct StagesApart {
    pub(crate) fresh: Vec<Fresh>,
    pub(crate) observers: Vec<Stage>,
    /// The seal, with the bytes that went in and came out.
    pub(crate) direct: Option<(Sealer, u64, u64)>,
    /// The bytes of each chunk afterwards; without those from the one on that failed.
    pub(crate) made: Vec<usize>,
    pub(crate) error: Option<TransferError>,
}

/// A chunk of plain bytes as the source gave it.
pub(crate) struct Fresh {
    pub(crate) buffer: Vec<u8>,
    pub(crate) layout: Layout,
    /// Plain bytes.
    pub(crate) plain: usize,
    /// It is the last one.
    pub(crate) last: bool,
}

/// Takes all chunks through their stages: the first one of each transfer, then the second ones.
pub fn run_together(parts: &mut [&mut StagesApart]) {
    let chunks = parts.iter().map(|part| part.fresh.len()).max();
    for chunk in 0..chunks.unwrap_or(0) {
        run_chunks(parts, chunk);
    }
}

/// Takes the chunk with this number of each transfer through its stages.
fn run_chunks(parts: &mut [&mut StagesApart], chunk: usize) {
    // Pieces of plain bytes between which tags will be: those of all chunks at a time.
    let fresh = parts.iter().filter_map(|part| part.fresh.get(chunk));
    let pieces = fresh.map(|fresh| fresh.layout.pieces(fresh.plain)).max();
    for piece in 0..pieces.unwrap_or(0) {
        let mut updates = Vec::with_capacity(parts.len());
        for part in &mut *parts {
            let StagesApart { fresh, observers, error, .. } = &mut **part;
            let Some(fresh) = fresh.get(chunk) else { continue };
            let Some(range) = fresh.layout.piece(piece, fresh.plain) else { continue };
            let bytes = &fresh.buffer[range];
            for stage in observers {
                if error.is_some() {
                    break;
                }
                match stage.observe_together(bytes) {
                    Ok(None) => {}
                    Ok(Some(digester)) => updates.push((digester, bytes)),
                    Err(failed) => *error = Some(failed),
                }
            }
        }
        update_together(updates.into_iter());
    }
    for part in parts {
        part.seal(chunk);
    }
}

impl StagesApart {
    fn seal(&mut self, chunk: usize) {
        let (Some(fresh), None) = (self.fresh.get_mut(chunk), &self.error) else { return };
        let Fresh { buffer, layout, plain, last } = fresh;
        let made = match &mut self.direct {
            Some(direct) => seal_in_place(direct, buffer, layout, *plain, *last, |_| Ok(())),
            None => Ok(*plain),
        };
        match made {
            Ok(made) => self.made.push(made),
            Err(error) => self.error = Some(error),
        }
    }
}

/// Seals each record of a chunk after `observe` has seen its plain bytes. Returns the bytes of the chunk.
pub(crate) fn seal_in_place(
    (sealer, sealed, made): &mut (Sealer, u64, u64),
    buffer: &mut [u8],
    layout: &Layout,
    plain: usize,
    last: bool,
    mut observe: impl FnMut(&[u8]) -> Result<(), TransferError>,
) -> Result<usize, TransferError> {
    let (mut at, mut left) = (layout.start, plain);
    // An empty stream has one record, and so has one whose last chunk is empty.
    while left > 0 || (last && at == layout.start) {
        let payload = left.min(layout.payload);
        left -= payload;
        observe(&buffer[at..at + payload])?;
        let end = at + payload + TAG_BYTES;
        sealer.seal(&mut buffer[at..end], last && left == 0)?;
        *sealed += payload as u64;
        at = end;
    }
    let len = if at == layout.start { 0 } else { at };
    *made += len as u64;
    Ok(len)
}

/// A chunk that is sent.
pub struct SendApart {
    pub(crate) chunk: Chunk,
    pub(crate) send: Arc<SocketSender>,
    pub(crate) progress: Arc<Progress>,
    /// Bytes that the sink had before.
    pub(crate) before: u64,
    /// Bytes of this chunk that it has got.
    pub(crate) sent: u64,
    pub(crate) error: Option<TransferError>,
}

impl SendApart {
    pub(crate) fn fail(&mut self, error: TransferError) {
        self.error = Some(error);
    }

    /// Sends; returns whether the socket is full.
    pub fn run(&mut self) -> bool {
        while self.chunk.done < self.chunk.len {
            match (self.send)(self.chunk.rest()) {
                Ok(put) => {
                    let put = put.min(self.chunk.len - self.chunk.done);
                    self.chunk.done += put;
                    self.sent += put as u64;
                    self.progress.set_written(self.before + self.sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.error = Some(TransferError::of_host("sending", &error));
                    return false;
                }
            }
        }
        false
    }
}
