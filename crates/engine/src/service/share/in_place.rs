//! Datagrams that are received in place: the host kernel writes them into buffers of the pool, from which blocks read them.
//!
//! It is done where the destination is known before the bytes are looked at: a service without a function chain and without keys, on
//! one accelerator. Every decision uses what the receive call returned, and the bytes stay unread. Buffers are lent to the receive call
//! and come back when it has returned, except those from which bundles were made: a buffer is shared by the bundles of one GRO
//! batch. Whatever is no bundle is copied out, and checked then.
//!
//! Few buffers are lent: as many as the last call has filled with GRO batches, since each may wait long for its bundles. The pool uses
//! first what was given back last, so they stay in the processor's cache.

use mqueue::abi::{BUNDLE_ALIGN, BUNDLE_MAX};
use wire::nic::RxBatch;

use crate::base::arrival::Arrival;
use crate::service::bundle::messages::Datagrams;
use crate::service::bundle::received::{Expected, unit_of};
use crate::service::bundle::table::{BUFFER_BYTES_MAX, NewBundle, NoBundle};
use crate::service::share::ServiceShare;

impl ServiceShare {
    /// Lends buffers of the pool to the next receive call.
    pub(crate) fn lend(&mut self, rx: &mut RxBatch, expected: Expected) {
        let (batches, bytes) = expected.batches();
        let [accelerator] = &mut self.accelerators[..] else { return };
        let (Some(pool), Some(memory)) = (&mut accelerator.pool, &accelerator.pool_memory) else {
            return;
        };
        let bytes = bytes.min(BUFFER_BYTES_MAX).min(rx.slot_bytes()) as u32;
        // The bundles of a batch need other buffers of this size for their replies.
        let most = (pool.free_of(bytes) as usize + 1) / 3;
        let received = &mut self.bundles.received;
        for _ in 0..batches.min(most) {
            let Some(number) = received.take_entry() else { return };
            let Some(buffer) = pool.take(bytes) else {
                received.put_back(number);
                return;
            };
            let len = buffer.bytes().min(rx.slot_bytes() as u32);
            if !rx.lend(memory, buffer.offset(), len) {
                pool.give_back(buffer);
                received.put_back(number);
                return;
            }
            received.keep(number, buffer);
        }
    }

    /// The messages of the receive call have been admitted.
    pub(crate) fn end_loan(&mut self, rx: &mut RxBatch) {
        rx.end_loan();
        // In reverse order, so that the pool is as before if none is in use.
        while let Some(number) = self.bundles.received.end_last_loan() {
            let buffer = self.bundles.received.release(number);
            if let (Some(buffer), Some(pool)) = (buffer, &mut self.accelerators[0].pool) {
                pool.give_back(buffer);
            }
        }
    }

    /// [`Self::accept_bundle`] for a GRO batch that was received in place, or what is left of it. After an error it has to be copied
    /// out.
    pub(crate) fn accept_in_place(
        &mut self,
        arrival: &Arrival,
        datagrams: &Datagrams<'_>,
    ) -> Result<u32, NoBundle> {
        let Datagrams { rx, train } = *datagrams;
        if self.sampler.is_next() {
            return Err(NoBundle::SingleFirst);
        }
        let first = &rx.items[train.first];
        let len = first.len;
        let place = rx.place_in_lent(first).filter(|(_, at, _)| at % BUNDLE_ALIGN as u32 == 0);
        let place = place.filter(|_| (len as usize) < self.takes_below);
        let Some((slot, at, lent)) = place else { return Err(NoBundle::Singles) };
        let Some((received_in, begin)) = self.bundles.received.lent_to(slot) else {
            return Err(NoBundle::Singles);
        };
        let last = &rx.items[train.first + train.count - 1];
        let all = last.offset + last.len - first.offset;
        let count = if all <= lent { train.count as u32 } else { lent / len };
        let most = count.min(BUNDLE_MAX).min(self.bundles.fit_replies(BUFFER_BYTES_MAX));
        if most < 2 || !train.contiguous {
            return Err(NoBundle::Singles);
        }
        let Some((mqueue, run)) = self.route_run(arrival.flow, most) else {
            return Err(NoBundle::Singles);
        };
        let unit = unit_of(len);
        let splits = (run as usize) < train.count && run >= unit;
        let count = if splits { run - run % unit } else { run };
        let needed = count * self.bundles.reply_stride as u32;
        let pool = self.accelerators.first_mut().and_then(|accelerator| accelerator.pool.as_mut());
        let Some(buffer) = pool.and_then(|pool| pool.take(needed)) else {
            self.counters.pool_dry.one();
            return Err(NoBundle::Singles);
        };
        let last_len = rx.items[train.first + count as usize - 1].len;
        let offset = begin + u64::from(at);
        let bundle = NewBundle { offset, stride: len, count, len, last_len, received_in };
        let pushed = self.push_bundle(arrival, mqueue, &bundle, (buffer, 0), None)?;
        self.counters.in_place.add(pushed.into());
        Ok(pushed)
    }
}
