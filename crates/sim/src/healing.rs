//! Removing faults from a plan.

use crate::accelerator::Behaviour;
use crate::backend::BackendHabits;
use crate::fault::Fault;
use crate::memory_client::MemoryManner;
use crate::net::Faults;
use crate::plan::Plan;
use crate::stream_client::Manner;

impl Plan {
    /// Removes this kind of fault. Everything else stays as the seed has it.
    pub fn heal(&mut self, fault: Fault) {
        heal_network(&mut self.faults, fault);
        self.setup.behaviours.iter_mut().for_each(|behaviour| heal_blocks(behaviour, fault));
        self.backends.iter_mut().for_each(|backend| heal_backend(&mut backend.habits, fault));
        let datagrams = self.datagram_clients.iter_mut().map(|client| &mut client.taste);
        for taste in datagrams.chain(self.stream_clients.iter_mut().map(|c| &mut c.taste)) {
            match fault {
                Fault::Junk => taste.junk = 0,
                Fault::LongRequest => taste.too_long = 0,
                Fault::Unframable => taste.unframable = 0,
                _ => {}
            }
        }
        if fault == Fault::OwnSource {
            self.datagram_clients.iter_mut().for_each(|client| client.forges = 0);
        }
        for client in &mut self.stream_clients {
            heal_manner(&mut client.manner, fault);
        }
        for client in &mut self.memory_clients {
            heal_memory_manner(&mut client.manner, fault);
        }
        for rebirth in &mut self.rebirths {
            heal_blocks(&mut rebirth.next, fault);
        }
        match fault {
            Fault::Restart => self.rebirths.clear(),
            Fault::Hold => self.rebirths.retain(|rebirth| rebirth.hold_ns.is_none()),
            Fault::Reload => self.reloads.clear(),
            Fault::Pause => self.pause_one_in = u64::MAX,
            Fault::EarlyDrain => self.drain_at = None,
            Fault::CutReload => self.drain_cuts_reload = false,
            Fault::RingWrap => self.setup.ring_start = 0,
            _ => {}
        }
    }
}

fn heal_network(faults: &mut Faults, fault: Fault) {
    let sound = Faults::default();
    match fault {
        Fault::Lose => faults.lose = 0,
        Fault::Duplicate => faults.duplicate = 0,
        // Equal delays keep datagrams in order.
        Fault::Reorder => faults.delay_ns.1 = faults.delay_ns.0,
        Fault::Corrupt => faults.corrupt = 0,
        Fault::Truncate => faults.truncate = 0,
        Fault::SocketFull => faults.socket_datagrams = sound.socket_datagrams,
        Fault::RefuseSend => faults.refuse_send = 0,
        Fault::FullSend => faults.full_send = 0,
        Fault::ShortRead => faults.short_read = 0,
        Fault::ShortWrite => faults.short_write = 0,
        Fault::SmallPipe => faults.pipe_bytes = sound.pipe_bytes,
        Fault::ResetDestroys => faults.reset_destroys = 0,
        Fault::Spurious => faults.spurious = 0,
        Fault::LateEvent => faults.late_event = 0,
        Fault::Exhausted => faults.exhausted = 0,
        _ => {}
    }
}

fn heal_blocks(behaviour: &mut Behaviour, fault: Fault) {
    match fault {
        Fault::Twice => behaviour.twice = 0,
        Fault::Late => behaviour.late = 0,
        Fault::Swallow => behaviour.swallow = 0,
        Fault::Reject => {
            (behaviour.reject, behaviour.bad_length, behaviour.too_long) = (0, 0, 0);
        }
        Fault::Forge => behaviour.forge = 0,
        Fault::Steal => behaviour.steal = 0,
        Fault::BadKind => behaviour.bad_kind = 0,
        Fault::BadHeader => behaviour.bad_header = 0,
        Fault::Unwanted => behaviour.unwanted = 0,
        Fault::Stall => behaviour.stall_after = None,
        Fault::Die => behaviour.die_after = None,
        Fault::Scribble => behaviour.scribble_after = None,
        Fault::WideScribble => behaviour.wide = false,
        Fault::Replay => behaviour.replay = 0,
        Fault::FalseAlarm => behaviour.spurious = 0,
        _ => {}
    }
}

fn heal_backend(habits: &mut BackendHabits, fault: Fault) {
    match fault {
        Fault::BackendLate => habits.late = 0,
        Fault::BackendHang => habits.hang = 0,
        Fault::BackendClose => habits.close = 0,
        Fault::BackendCut => habits.cut = 0,
        Fault::BackendGarbage => habits.garbage = 0,
        Fault::BackendUnasked => habits.unasked = 0,
        Fault::BackendSwap => habits.swap = 0,
        Fault::BackendLong => habits.too_long = 0,
        Fault::BackendDoor => habits.change_door = 0,
        _ => {}
    }
}

fn heal_memory_manner(manner: &mut MemoryManner, fault: Fault) {
    match fault {
        Fault::MemoryDeaf => manner.deaf = false,
        Fault::MemoryLeave => manner.leave = 0,
        Fault::MemoryKind => manner.bad_kind = 0,
        Fault::MemoryScribble => manner.scribble_after = None,
        _ => {}
    }
}

fn heal_manner(manner: &mut Manner, fault: Fault) {
    const ANY_BYTES: usize = 100_000;
    match fault {
        Fault::Bytewise => {
            let many = |bytes| if bytes == 1 { ANY_BYTES } else { bytes };
            manner.write_max = many(manner.write_max);
            manner.read_max = many(manner.read_max);
        }
        Fault::Deaf if manner.read_max == 0 => manner.read_max = ANY_BYTES,
        Fault::Bogus => manner.bogus = 0,
        _ => manner.fates = manner.fates.without(fault),
    }
}
