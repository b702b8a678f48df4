//! Work that a thread does apart from its transfer: meanwhile other threads read the source and write to the sink.
//!
//! A chunk that goes through digests takes the one pass of [`sys::digests`] together with chunks of other transfers. Chunks of one
//! transfer follow one another, since each has the state of the one before it.

use std::io;
use std::sync::Arc;

use crate::buffer::Layout;
use crate::chain::{Chunk, Stage};
use crate::error::TransferError;
use crate::flow::Progress;
use crate::seal::{Sealer, TAG_BYTES};
use crate::stage::update_together;

/// Chunks that go through digests together: the lanes of the widest pass.
pub const TOGETHER_MAX: usize = sys::digests::LANES_MAX;

/// Sends what a socket takes now; `WouldBlock` if that is nothing.
pub type Send = dyn Fn(&[u8]) -> io::Result<usize> + std::marker::Send + Sync;

/// Work apart from a transfer.
pub enum Apart {
    /// A chunk goes through stages.
    Stages(StagesApart),
    /// A chunk is sent.
    Send(SendApart),
}

/// A chunk that goes through stages that observe, and a seal.
pub struct StagesApart {
    pub(crate) fresh: Fresh,
    pub(crate) observers: Vec<Stage>,
    /// The seal, with the bytes that went in and came out.
    pub(crate) direct: Option<(Sealer, u64, u64)>,
    /// The bytes of the chunk afterwards.
    pub(crate) result: Result<usize, TransferError>,
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

/// Takes all chunks through their stages.
pub fn run_together(parts: &mut [&mut StagesApart]) {
    // Pieces of plain bytes between which tags will be: those of all chunks at a time.
    let pieces = parts.iter().map(|part| part.fresh.layout.pieces(part.fresh.plain)).max();
    for piece in 0..pieces.unwrap_or(0) {
        let mut updates = Vec::with_capacity(parts.len());
        for part in &mut *parts {
            let StagesApart { fresh, observers, result, .. } = &mut **part;
            let Some(range) = fresh.layout.piece(piece, fresh.plain) else { continue };
            let bytes = &fresh.buffer[range];
            for stage in observers {
                if result.is_err() {
                    break;
                }
                match stage.observe_together(bytes) {
                    Ok(None) => {}
                    Ok(Some(digester)) => updates.push((digester, bytes)),
                    Err(error) => *result = Err(error),
                }
            }
        }
        update_together(updates.into_iter());
    }
    for part in parts {
        part.seal();
    }
}

impl StagesApart {
    fn seal(&mut self) {
        if self.result.is_err() {
            return;
        }
        let Fresh { buffer, layout, plain, last } = &mut self.fresh;
        self.result = match &mut self.direct {
            Some(direct) => seal_in_place(direct, buffer, layout, *plain, *last, |_| Ok(())),
            None => Ok(*plain),
        };
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
    pub(crate) send: Arc<Send>,
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
