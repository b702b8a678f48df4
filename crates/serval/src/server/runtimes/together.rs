//! Who shares a process: seats on one GPU come together and part; see the text of [`super`].

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::time::Instant;

use wire::attach::TOGETHER_MAX;

use super::seat::{Ending, Seat, State};
use super::{Desk, GOODBYE_PATIENCE};

impl Desk {
    /// The change is certain: seats that came with it may share processes with those that stay.
    pub(super) fn settle(&mut self) {
        let came = self.seats.iter_mut().filter(|(_, seat)| !seat.settled);
        let came = came.map(|(id, seat)| {
            seat.settled = true;
            *id
        });
        for id in came.collect::<Vec<_>>() {
            if matches!(self.seats[&id].state, State::Serving { .. }) {
                self.bring_together(id);
            }
        }
    }

    /// The seats in a slot leave; `gone` is dropped when they have.
    pub(super) fn leave(&mut self, slot: u16, gone: &Sender<()>) {
        // Seats that never settled leave all of them, and none is to start again meanwhile.
        for seat in self.seats.values_mut().filter(|s| !s.settled) {
            (seat.last, seat.next_try) = (true, None);
        }
        let of_slot = self.seats.iter().filter(|(_, s)| s.post.slot == slot).map(|(id, _)| *id);
        for id in of_slot.collect::<Vec<_>>() {
            let mut others = self.together(id);
            others.retain(|at| *at != id);
            let serves = |at: &u64| matches!(self.seats[at].state, State::Serving { .. });
            let heir = others.iter().copied().find(|at| self.seats[at].last && serves(at));
            if let Some(heir) = heir.filter(|_| serves(&id)) {
                self.bequeath(id, heir);
                continue;
            }
            // It is gone when the process is, whoever's child that was.
            let child = others.iter().find_map(|at| self.seat(*at).child.take());
            let seat = self.seat(id);
            seat.child = seat.child.take().or(child);
            seat.process = 0;
            seat.part(Some(gone.clone()));
            for at in &others {
                let text = "a service that shares its process leaves";
                self.end_one(*at, Ending::reconfigured(text));
            }
            // Those that came meanwhile did not disturb the process.
            if let Some(at) = others.into_iter().find(|at| !self.seats[at].last) {
                self.bring_together(at);
            }
        }
    }

    /// A seat is given up whose process still answers for others that leave. It ends with the last of
    /// them, which takes over what the process must not lose before.
    fn bequeath(&mut self, id: u64, heir: u64) {
        let Some(mut seat) = self.seats.remove(&id) else { return };
        seat.post.told.end(seat.generation, "changed");
        let heir = self.seat(heir);
        heir.child = heir.child.take().or(seat.child.take());
        heir.inherited.append(&mut seat.inherited);
        heir.inherited.extend(seat.life.take());
    }

    /// The seats that live and end with this one, itself among them.
    pub(super) fn together(&self, id: u64) -> Vec<u64> {
        let process = self.seats[&id].process;
        let with = |(at, seat): (&u64, &Seat)| {
            (*at == id || process > 0 && seat.process == process).then_some(*at)
        };
        self.seats.iter().filter_map(with).collect()
    }

    /// Whether a runtime that was told to end may still have the GPU of a seat that waits.
    pub(super) fn gpu_is_held(&self, id: u64) -> bool {
        let (launched, gpu) = (self.seats[&id].is_launched(), self.seats[&id].gpu());
        let now = Instant::now();
        let holds = |seat: &Seat| match &seat.state {
            // One that cannot even be killed is not waited for.
            State::Leaving { until, .. } => {
                seat.child.is_some() && now < *until + GOODBYE_PATIENCE && seat.gpu() == gpu
            }
            _ => false,
        };
        launched && gpu.is_some() && self.seats.values().any(holds)
    }

    /// A seat serves or is about to: if others do that should share its process, all of them begin a new
    /// life in one. Processes in which somebody leaves are let be until it has, and so are those that came with
    /// a change that may be undone.
    pub(super) fn bring_together(&mut self, id: u64) {
        let seat = &self.seats[&id];
        let fits = |at: &u64| self.seats[at].settled && self.seats[at].goes_with(seat);
        if self.draining() || !self.together(id).iter().all(fits) {
            return;
        }
        let mut apart: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        // Those that wait come along.
        let mut room = TOGETHER_MAX as usize;
        for (at, other) in self.seats.iter().filter(|(at, _)| fits(at)) {
            if other.process == seat.process || matches!(other.state, State::Vacant) {
                room = room.saturating_sub(1);
            } else if matches!(other.state, State::Serving { .. }) {
                apart.entry(other.process).or_default().push(*at);
            }
        }
        apart.retain(|_, seats| {
            let joins = seats.len() <= room && self.together(seats[0]).iter().all(fits);
            room -= if joins { seats.len() } else { 0 };
            joins
        });
        if !apart.is_empty() {
            let text = "it is to share its process with a service that came";
            for at in apart.into_values().map(|seats| seats[0]).chain([id]) {
                // Those of one process end together.
                if matches!(self.seats[&at].state, State::Serving { .. }) {
                    self.end(at, Ending::reconfigured(text));
                }
            }
        }
    }
}
