//! A start that fails on one worker while another is well, and what is said of starts that fail.

use engine::topology::{
    Accelerator, AcceleratorKind, CpuPlacement, EngineSettings, Limits, STACK_KIB, Service,
};
use wire::nic::{NicError, Transport};

use std::time::{Duration, Instant};

use engine::Attachment;
use engine::accelerator::{Blocks, StartError};

use super::*;

/// Blocks that do nothing, once they have started.
struct Start(fn());

impl Blocks for Start {
    fn start(&mut self) -> Result<(), StartError> {
        self.0();
        Ok(())
    }

    fn drive(&mut self, _: u64, _: &[u32], _: &mut Vec<u32>) {}

    fn wake_at(&self) -> u64 {
        u64::MAX
    }

    fn ended(&mut self, _: &mut Vec<(u32, u64)>) {}
}

#[test]
fn a_worker_that_panics_while_it_starts_is_noticed_beside_one_that_runs() {
    let listen = Listen { transport: Transport::Udp, address: ([127, 0, 0, 1], 0).into() };
    let kind = AcceleratorKind::Cpu { placement: CpuPlacement::Worker, stack_kib: STACK_KIB };
    let mut server = Server::start(Topology {
        engine: EngineSettings { workers: 2, ..EngineSettings::default() },
        limits: Limits::default(),
        accelerators: vec![Accelerator { name: "acc0".into(), kind }],
        services: vec![Service::new("a", vec![listen], "echo")],
    })
    .unwrap();
    // Its place is taken by another start, with blocks of this test.
    server.stop(Instant::now());
    let spec = PortSpec { transport: listen.transport, address: listen.address };
    let first = SocketNic::open(&[spec], SocketOptions::default()).unwrap();
    let (addresses, second) = (first.local_addresses(), first.sibling().unwrap());
    let wakers = [&first, &second].map(SocketNic::waker);
    let wakers = wakers.map(|waker| Box::new(move || waker.wake()) as Box<dyn Fn() + Send + Sync>);
    server.fabric = Fabric::new(wakers.into(), 1);
    let starts: [fn(); 2] = [|| (), || panic!("this panic is part of a test")];
    let share = |start| vec![Attachment { blocks: Box::new(Start(start)), ends: Vec::new() }];
    let regions = vec![starts.map(share).into()];
    let patience = Instant::now() + Duration::from_secs(20);
    let mut late = || Instant::now() > patience;
    let error = server.start_workers(vec![first, second], &addresses, regions, &mut late);
    let error = error.unwrap_err();
    assert!(matches!(error, ServerError::Panicked), "{error}");
}

#[test]
fn what_a_worker_cannot_take_in_is_told_with_the_service_the_cause_and_the_fix() {
    let service = Service::new("digits", Vec::new(), "echo");
    let said = |error: StartError| ServerError::of_blocks(&service, error).to_string();
    let text = said(NicError::Exhausted.into());
    assert!(text.starts_with("service \"digits\": a worker cannot take it in: no free"), "{text}");
    assert!(text.contains("ulimit -n"), "{text}");
    let text = said(NicError::Refused("Cannot allocate memory".into()).into());
    assert!(
        text.contains("\"digits\"") && text.contains("(Cannot allocate memory): free"),
        "{text}"
    );
    let source = std::io::Error::from(std::io::ErrorKind::WouldBlock);
    let text = ServerError::no_thread("heartbeat")(source).to_string();
    assert!(text.contains("serval-heartbeat") && text.contains("ulimit -u"), "{text}");
}
