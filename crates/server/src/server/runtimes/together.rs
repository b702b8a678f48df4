//! Who shares a process: seats on one device come together and part; see the text of [`super`].

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::time::Instant;

use engine::{ControlMessage, DrainBarrier, RuntimeEvent};
use wire::attach::TOGETHER_MAX;

use super::seat::{Ending, First, Hold, Seat, State, warn_of_shared_devices};
use super::{Desk, Dying, GOODBYE_PATIENCE};

/// A planned change of who shares a process. Lives of services that stay end for it, when all that they accepted has
/// been answered.
pub(super) enum Move {
    /// The seats in this slot leave; what comes along is dropped when they have.
    Leave(u16, Sender<()>),
    /// This one shares a process with those that should be with it.
    Join(u64),
}

impl Desk {
    /// Carries out what was planned and need not wait any more. Services that need not wait for a new life after all
    /// are held no longer.
    pub(super) fn move_on(&mut self) {
        self.seats.values_mut().filter_map(|s| s.hold.as_mut()).for_each(|h| h.wanted = false);
        for next in std::mem::take(&mut self.moves) {
            let ends = self.ends_for(&next);
            if self.draining() && !ends.is_empty() {
                // The engine is about to end all of them, and what was accepted is answered before.
                continue;
            }
            if !self.all_quiet(&ends) {
                self.moves.push(next);
                continue;
            }
            match next {
                Move::Leave(slot, gone) => self.let_leave(slot, &gone),
                Move::Join(_) => {
                    let text = "it is to share its process with a service that came";
                    for at in ends {
                        // Those of one process end together.
                        if matches!(self.seats[&at].state, State::Serving { .. }) {
                            self.end(at, Ending::reconfigured(text));
                        }
                    }
                }
            }
        }
        let unwanted = |seat: &Seat| seat.hold.as_ref().is_some_and(|hold| !hold.wanted);
        let free = self.seats.iter().filter(|(_, seat)| unwanted(seat)).map(|(id, _)| *id);
        free.collect::<Vec<_>>().into_iter().for_each(|id| self.free(id));
    }

    /// The lives that serve, stay and end for a change.
    fn ends_for(&self, planned: &Move) -> Vec<u64> {
        let serves = |at: &u64| matches!(self.seats[at].state, State::Serving { .. });
        match planned {
            Move::Join(id) => self.joined_by(*id),
            Move::Leave(slot, _) => {
                let of_slot = self.seats.iter().filter(|(_, s)| s.post.slot == *slot);
                let of_slot = of_slot.filter(|(id, _)| self.heir(**id).is_none());
                let others = of_slot.flat_map(|(id, _)| self.together(*id));
                others.filter(|at| serves(at) && !self.seats[at].last).collect()
            }
        }
    }

    /// Holds the services of these seats; whether all that they accepted has been answered, or its time is over.
    fn all_quiet(&mut self, seats: &[u64]) -> bool {
        let (workers, now) = (self.fabric.workers(), Instant::now());
        let mut quiet = true;
        for id in seats {
            if self.seats[id].hold.is_none() {
                self.hold(*id);
            }
            let Some(hold) = &mut self.seat(*id).hold else { continue };
            hold.wanted = true;
            quiet &= hold.barrier.is_complete(workers) || now >= hold.until;
        }
        quiet
    }

    fn hold(&mut self, id: u64) {
        let (fabric, drain) = (self.fabric.clone(), self.drain);
        let seat = self.seat(id);
        let barrier = DrainBarrier::default();
        let (service, accelerator) = (seat.post.slot, seat.post.place as u16);
        let drain_ns = u64::try_from(drain.as_nanos()).unwrap_or(u64::MAX);
        fabric.post_to_all(|_| {
            let barrier = barrier.clone();
            ControlMessage::Runtime(RuntimeEvent::Paused {
                service,
                accelerator,
                drain_ns,
                barrier,
            })
        });
        seat.hold = Some(Hold { barrier, until: Instant::now() + drain, wanted: true });
        let service = &seat.post.service.name;
        tracing::info!(service, "held: its runtime begins anew for a change of others");
    }

    /// A life that was about to end goes on.
    fn free(&mut self, id: u64) {
        let fabric = self.fabric.clone();
        let seat = self.seat(id);
        seat.hold = None;
        let (service, accelerator) = (seat.post.slot, seat.post.place as u16);
        let resumed = || RuntimeEvent::Resumed { service, accelerator };
        fabric.post_to_all(|_| ControlMessage::Runtime(resumed()));
        let service = &seat.post.service.name;
        tracing::info!(service, "no longer held: its runtime goes on");
        if let Some(first) = seat.first.take() {
            // The server may have given up already.
            let _ = first.send(First::Told(seat.post.service.name.clone(), Ok(())));
        }
    }

    /// Whether a seat that waits for a process gets company when others have ended their lives.
    pub(super) fn others_come_along(&self, id: u64) -> bool {
        let with =
            |other: &u64| self.seats.get(other).is_some_and(|s| s.goes_with(&self.seats[&id]));
        self.moves.iter().any(|planned| matches!(planned, Move::Join(other) if with(other)))
    }

    /// The change is certain: seats that came with it may share processes with those that stay.
    pub(super) fn settle(&mut self) {
        let came = self.seats.iter_mut().filter(|(_, seat)| !seat.settled);
        let came = came.map(|(id, seat)| {
            seat.settled = true;
            *id
        });
        for id in came.collect::<Vec<_>>() {
            self.try_together_again(id);
            // What the one before set going may have ended it.
            let serves = |seat: &Seat| matches!(seat.state, State::Serving { .. });
            if self.seats.get(&id).is_some_and(serves) {
                self.bring_together(id);
            }
        }
    }

    /// The seats in a slot leave; `gone` is dropped when they have.
    pub(super) fn leave(&mut self, slot: u16, gone: Sender<()>) {
        // Seats that never settled leave all of them, and none is to start again meanwhile.
        for seat in self.seats.values_mut().filter(|s| !s.settled) {
            (seat.last, seat.next_try) = (true, None);
        }
        self.moves.push(Move::Leave(slot, gone));
        self.move_on();
    }

    /// Seats that were to begin together did not. If that was refused, each begins alone from now on. If their process
    /// was lost, that may have had any reason, and they are tried together once more.
    pub(super) fn did_not_start(&mut self, together: &[u64], ending: &Ending) {
        let mut apart = false;
        for at in together {
            let seat = self.seat(*at);
            seat.alone |= ending.told || seat.lost_at_start;
            seat.lost_at_start = true;
            apart |= seat.alone;
        }
        if apart {
            warn_of_shared_devices(&self.seats);
        }
    }

    /// A seat comes, changes or leaves: those beside it that did not start together are tried together again. Returns
    /// one of them that serves.
    pub(super) fn try_together_again(&mut self, id: u64) -> Option<u64> {
        let changed = &self.seats[&id];
        let again = |(_, seat): &(&u64, &Seat)| seat.alone && !seat.last && seat.is_beside(changed);
        let again: Vec<u64> = self.seats.iter().filter(again).map(|(at, _)| *at).collect();
        for at in &again {
            let seat = self.seat(*at);
            (seat.alone, seat.lost_at_start) = (false, false);
        }
        again.into_iter().find(|at| matches!(self.seats[at].state, State::Serving { .. }))
    }

    /// One that serves, leaves and stays for longer than a seat that leaves too, in the same process.
    fn heir(&self, id: u64) -> Option<u64> {
        let serves = |at: &u64| matches!(self.seats[at].state, State::Serving { .. });
        let others = self.together(id).into_iter().filter(|at| *at != id);
        others.filter(|_| serves(&id)).find(|at| self.seats[at].last && serves(at))
    }

    fn let_leave(&mut self, slot: u16, gone: &Sender<()>) {
        let of_slot = self.seats.iter().filter(|(_, s)| s.post.slot == slot).map(|(id, _)| *id);
        for id in of_slot.collect::<Vec<_>>() {
            if let Some(heir) = self.heir(id) {
                self.bequeath(id, heir);
                continue;
            }
            // One that never settled has changed nothing for those that stay.
            let settled = self.seats[&id].settled;
            let again = if settled { self.try_together_again(id) } else { None };
            let mut others = self.together(id);
            others.retain(|at| *at != id);
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
            let stays = others.into_iter().find(|at| !self.seats[at].last);
            self.moves.extend(stays.or(again).map(Move::Join));
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

    /// Whether a runtime that was told to end, or killed, may still have the device of a seat that waits.
    pub(super) fn device_is_held(&self, id: u64) -> bool {
        let seat = &self.seats[&id];
        let Some(device) = seat.exclusive_key().filter(|_| seat.is_launched()) else {
            return false;
        };
        let now = Instant::now();
        // One that cannot even be killed is not waited for.
        let leaves = |seat: &Seat| match &seat.state {
            State::Leaving { until, .. } => {
                seat.child.is_some()
                    && now < *until + GOODBYE_PATIENCE
                    && seat.exclusive_key().as_ref() == Some(&device)
            }
            _ => false,
        };
        let dies = |dying: &Dying| now < dying.until && dying.device.as_ref() == Some(&device);
        self.seats.values().any(leaves) || self.dying.iter().any(dies)
    }

    /// A seat serves or is about to: if others do that should share its process, all of them begin a new
    /// life in one.
    pub(super) fn bring_together(&mut self, id: u64) {
        self.moves.push(Move::Join(id));
        self.move_on();
    }

    /// The lives that end so that a seat shares a process with those that should be with it; none if it does.
    /// Processes in which somebody leaves are let be until it has, and so are those that came with a change that may
    /// be undone.
    fn joined_by(&self, id: u64) -> Vec<u64> {
        let Some(seat) = self.seats.get(&id) else { return Vec::new() };
        let fits = |at: &u64| self.seats[at].settled && self.seats[at].goes_with(seat);
        if !self.together(id).iter().all(fits) {
            return Vec::new();
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
        if apart.is_empty() {
            return Vec::new();
        }
        let serves = |at: &u64| matches!(self.seats[at].state, State::Serving { .. });
        let own = self.together(id).into_iter().filter(serves);
        own.chain(apart.into_values().flatten()).collect()
    }
}
