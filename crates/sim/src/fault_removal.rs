//! Removing faults from a plan.

use crate::backend::BackendBehaviour;
use crate::behaviour::Behaviour;
use crate::fault::Fault;
use crate::net::Faults;
use crate::plan::Plan;
use crate::shm_client::ShmBehaviour;
use crate::stream_client::StreamBehaviour;

impl Plan {
    /// Removes this kind of fault. Everything else stays as the seed has it.
    pub fn remove_fault(&mut self, fault: Fault) {
        remove_from_network(&mut self.faults, fault);
        self.setup.behaviours.iter_mut().for_each(|behaviour| remove_from_blocks(behaviour, fault));
        self.backends
            .iter_mut()
            .for_each(|backend| remove_from_backend(&mut backend.behaviour, fault));
        let datagrams = self.datagram_clients.iter_mut().map(|client| &mut client.request_mix);
        for request_mix in
            datagrams.chain(self.stream_clients.iter_mut().map(|c| &mut c.request_mix))
        {
            match fault {
                Fault::Junk => request_mix.junk = 0,
                Fault::LongRequest => request_mix.too_long = 0,
                Fault::Unframable => request_mix.unframable = 0,
                _ => {}
            }
        }
        if fault == Fault::OwnSource {
            self.datagram_clients.iter_mut().for_each(|client| client.forges = 0);
        }
        for client in &mut self.stream_clients {
            remove_from_stream_behaviour(&mut client.behaviour, fault);
        }
        for client in &mut self.memory_clients {
            remove_from_shm_behaviour(&mut client.behaviour, fault);
        }
        for load in &mut self.socket_loads {
            match fault {
                Fault::SocketLeave => load.leaves = 0,
                Fault::SocketDeaf => load.deaf = 0,
                _ => {}
            }
        }
        if fault == Fault::SocketDoor {
            self.socket_servers.iter_mut().for_each(|server| server.doors = 0);
        }
        for restart in &mut self.restarts {
            remove_from_blocks(&mut restart.next, fault);
        }
        match fault {
            Fault::Restart => self.restarts.clear(),
            Fault::Hold => self.restarts.retain(|restart| restart.hold_ns.is_none()),
            Fault::Reload => self.reloads.clear(),
            Fault::LateMessage => self.late_messages = 0,
            Fault::Pause => self.pause_one_in = u64::MAX,
            Fault::EarlyDrain => self.drain_at = None,
            Fault::CutReload => self.drain_cuts_reload = false,
            Fault::RingWrap => self.setup.ring_start = 0,
            _ => {}
        }
    }
}

fn remove_from_network(faults: &mut Faults, fault: Fault) {
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
        Fault::LinkShort => faults.link.short = 0,
        Fault::LinkStall => faults.link.stall = 0,
        Fault::LinkCut => faults.link.cut = 0,
        Fault::LinkDamage => faults.link.damage = 0,
        Fault::LinkSilence => faults.link.silence = 0,
        _ => {}
    }
}

fn remove_from_blocks(behaviour: &mut Behaviour, fault: Fault) {
    match fault {
        Fault::Twice => behaviour.twice = 0,
        Fault::Late => behaviour.late = 0,
        Fault::Swallow => behaviour.swallow = 0,
        Fault::Reject => {
            (behaviour.reject, behaviour.bad_length, behaviour.too_long) = (0, 0, 0);
        }
        Fault::Forge => behaviour.forge = 0,
        Fault::Steal => behaviour.steal = 0,
        Fault::BundleForge => behaviour.bundle_forge = 0,
        Fault::BadKind => behaviour.bad_kind = 0,
        Fault::BadHeader => behaviour.bad_header = 0,
        Fault::Unwanted => behaviour.unwanted = 0,
        Fault::Stall => behaviour.stall_after = None,
        Fault::Die => behaviour.die_after = None,
        Fault::Scribble => behaviour.scribble_after = None,
        Fault::WideScribble => behaviour.wide = false,
        Fault::Replay => behaviour.replay = 0,
        Fault::FalseAlarm => behaviour.spurious = 0,
        Fault::SocketForge => behaviour.sockets.forge = 0,
        Fault::SocketScribble => behaviour.sockets.scribble = 0,
        Fault::SocketReset => behaviour.sockets.reset = 0,
        Fault::SocketClose => behaviour.sockets.close = 0,
        Fault::SocketCancel => behaviour.sockets.cancel = 0,
        _ => {}
    }
}

fn remove_from_backend(backend_behaviour: &mut BackendBehaviour, fault: Fault) {
    match fault {
        Fault::BackendLate => backend_behaviour.late = 0,
        Fault::BackendHang => backend_behaviour.hang = 0,
        Fault::BackendClose => backend_behaviour.close = 0,
        Fault::BackendCut => backend_behaviour.cut = 0,
        Fault::BackendGarbage => backend_behaviour.garbage = 0,
        Fault::BackendUnasked => backend_behaviour.unasked = 0,
        Fault::BackendSwap => backend_behaviour.swap = 0,
        Fault::BackendLong => backend_behaviour.too_long = 0,
        Fault::BackendDoor => backend_behaviour.change_reachability = 0,
        _ => {}
    }
}

fn remove_from_shm_behaviour(behaviour: &mut ShmBehaviour, fault: Fault) {
    match fault {
        Fault::MemoryDeaf => behaviour.deaf = false,
        Fault::MemoryLeave => behaviour.leave = 0,
        Fault::MemoryKind => behaviour.bad_kind = 0,
        Fault::MemoryScribble => behaviour.scribble_after = None,
        _ => {}
    }
}

fn remove_from_stream_behaviour(behaviour: &mut StreamBehaviour, fault: Fault) {
    const ANY_BYTES: usize = 100_000;
    match fault {
        Fault::Bytewise => {
            let many = |bytes| if bytes == 1 { ANY_BYTES } else { bytes };
            behaviour.write_max = many(behaviour.write_max);
            behaviour.read_max = many(behaviour.read_max);
        }
        Fault::Deaf if behaviour.read_max == 0 => behaviour.read_max = ANY_BYTES,
        Fault::Bogus => behaviour.bogus = 0,
        _ => behaviour.endings = behaviour.endings.without(fault),
    }
}
