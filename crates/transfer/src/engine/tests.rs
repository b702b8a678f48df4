use std::os::unix::net::UnixStream;

use super::*;
use crate::command::compression::{Compression, ExpandLimits, Format};
use crate::command::device::Device;
use crate::command::error::TransferError;
use crate::command::key::Key;
use crate::command::limits::STAGES_MAX;
use crate::command::pipeline::Source;
use crate::command::stage::{Cipher, SearchKind, SearchSpec, StageSpec};
use crate::run::plan::{Cut, Plan};

/// The smallest limit that a configuration can set.
const SMALLEST_MIB: u32 = 64;

#[test]
fn memory_of_transfers_is_limited_and_given_back() {
    let engine = Engine::start(Limits { memory_mib: SMALLEST_MIB, ..Limits::default() }).unwrap();
    let mut peers = Vec::new();
    let mut submit = || {
        let ((from, ours), (to, theirs)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        peers.push((ours, theirs));
        let source = Source::socket(from, None);
        engine.submit(source.expand(Format::Zstd, ExpandLimits::default()).socket(to))
    };
    for round in 0..3 {
        // Two chunks, one for the stage, and the largest window: 10 MiB.
        let mut transfers: Vec<_> = (0..6).map(|_| submit().unwrap()).collect();
        let error = submit().err().unwrap();
        assert_eq!((error.name(), error.errno()), ("too_much_memory", 12));
        let text = error.to_string();
        assert!(
            text.ends_with("KiB of memory are not left of the 64 MiB of all transfers: wait until one has ended, or raise transfer.memory_mib"),
            "{text}"
        );
        // One that ends makes room for one.
        let one = transfers.remove(0);
        one.cancel();
        assert_eq!(one.wait().result, Err(TransferError::Cancelled));
        transfers.push(submit().unwrap());
        assert!(submit().is_err());
        transfers.iter().for_each(Transfer::cancel);
        for transfer in transfers {
            assert_eq!(transfer.wait().result, Err(TransferError::Cancelled));
        }
        assert_eq!(engine.shared.memory.held(), 0, "round {round}");
    }
    let refused = engine.counters().failed().find(|(name, _)| *name == "too_much_memory");
    assert_eq!(refused, Some(("too_much_memory", 6)));
}

#[test]
fn every_transfer_fits_the_smallest_limit_and_many_plain_ones_the_default() {
    let lines = SearchSpec { kind: SearchKind::Lines, pattern: b"a".to_vec(), offsets: 1024 };
    let key = || Key::new([1; 32]);
    let mut stages = vec![
        StageSpec::Open(Cipher::Aes256Gcm, key()),
        StageSpec::Expand(Format::Zstd, ExpandLimits::default()),
        StageSpec::Compress(Compression::new(Format::Zstd, 9).unwrap()),
        StageSpec::Seal(Cipher::Aes256Gcm, key()),
    ];
    while stages.len() < STAGES_MAX {
        stages.insert(2, StageSpec::Search(lines.clone()));
    }
    let plan = |stages| Plan {
        source: Device::Socket,
        sink: Device::Socket,
        from: 0,
        bytes: None,
        to: 0,
        head: Vec::new(),
        stages,
        when_blocked: crate::command::pipeline::WhenBlocked::Wait,
        sync: false,
        part: None,
        cut: Cut::No,
        parts_max: 1,
    };
    let largest = plan(stages).memory_bytes();
    assert!(largest > 30 << 20 && largest <= u64::from(SMALLEST_MIB) << 20, "{largest}");
    let Limits { in_flight, memory_mib, .. } = Limits::default();
    assert!(plan(Vec::new()).memory_bytes() * u64::from(in_flight) <= u64::from(memory_mib) << 20);
}

/// Runs a future on this thread, which sleeps until it is woken.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(60)),
        }
    }
}

#[test]
fn a_transfer_can_be_awaited_while_it_is_in_flight_and_afterwards() {
    use std::io::Write as _;
    let engine = Engine::start(Limits::default()).unwrap();
    let ((from, mut writer), (to, _reader)) =
        (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    let transfer = engine.submit(Source::socket(from, Some(5)).socket(to)).unwrap();
    let writes = std::thread::spawn(move || {
        // Mostly after the first poll; the result is the same before it.
        std::thread::sleep(Duration::from_millis(20));
        writer.write_all(b"bytes").unwrap();
        writer
    });
    let outcome = block_on(transfer);
    assert_eq!((outcome.result, outcome.report.written), (Ok(()), 5));
    drop(writes.join());
}

#[test]
fn transfers_of_a_tenant_are_counted_as_its_own_and_leave_memory_to_others() {
    let engine = Engine::start(Limits { memory_mib: SMALLEST_MIB, ..Limits::default() }).unwrap();
    let [light, heavy] =
        ["light", "heavy"].map(|name| (name.to_owned(), u32::from(name == "heavy") * 3));
    let tenants = [&light, &heavy].map(|(name, more)| TenantShare {
        name: name.clone(),
        weight: 1 + more,
        users: vec![70_000 + more],
    });
    engine.set_tenants(tenants.into());
    assert!(engine.tenant_of(0).is_none());
    let mut peers = Vec::new();
    let mut fill = |account: &Account| {
        let mut submitted = Vec::new();
        loop {
            let ((from, ours), (to, theirs)) =
                (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
            peers.push((ours, theirs));
            match engine.submit_for(account, Source::socket(from, None).socket(to), drop) {
                Ok(one) => submitted.push(one),
                Err(TransferError::TooMuchMemory { .. }) => return submitted,
                Err(other) => panic!("{other}"),
            }
        }
    };
    let [light, heavy] = [70_000, 70_003].map(|user| engine.tenant_of(user).unwrap());
    let few = fill(&light);
    let many = fill(&heavy);
    let (most, held) = (u64::from(SMALLEST_MIB) << 20, light.counters.held());
    // The last one may pass the half by a part of itself.
    assert!(held <= most / 2 + (2 << 20) && held > most / 4, "{held}");
    // Four times what is free, of the other half.
    assert!(heavy.counters.held() > (most - held) / 2, "{}", heavy.counters.held());
    assert_eq!(light.counters.in_flight(), few.len() as u64);
    many.iter().chain(&few).for_each(TransferHandle::cancel);
    let deadline = Instant::now() + Duration::from_secs(60);
    while light.counters.in_flight() + heavy.counters.in_flight() > 0 {
        assert!(Instant::now() < deadline, "they end");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((light.counters.held(), heavy.counters.held()), (0, 0));
    let counted = engine.counters().tenants();
    let counted: Vec<_> = counted.iter().map(|(name, of)| (&**name, of.started())).collect();
    assert_eq!(counted, [("light", few.len() as u64), ("heavy", many.len() as u64)]);
}

#[test]
fn a_tenant_leaves_places_in_flight_to_others() {
    let engine = Engine::start(Limits { in_flight: 8, ..Limits::default() }).unwrap();
    let tenants = [("light", 1), ("heavy", 3)].map(|(name, weight)| TenantShare {
        name: name.to_owned(),
        weight,
        users: Vec::new(),
    });
    engine.set_tenants(tenants.into());
    let mut peers = Vec::new();
    let mut command = || {
        let ((from, ours), (to, theirs)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        peers.push((ours, theirs));
        Source::socket(from, None).socket(to)
    };
    let [light, heavy] = ["light", "heavy"].map(|name| engine.tenant(name));
    let mut submitted = Vec::new();
    // Half; then three times what is free of the other half.
    for (tenant, places) in [(&light, 4), (&heavy, 3)] {
        for _ in 0..places {
            submitted.push(engine.submit_for(tenant, command(), drop).unwrap());
        }
        let refused = engine.submit_for(tenant, command(), drop).err();
        assert_eq!(refused, Some(TransferError::TooMany(places)));
    }
    // The last place is for the next one.
    let next = engine.submit(command()).unwrap();
    for tenant in [None, Some(&light)] {
        let caller = Caller { tenant: tenant.cloned(), ..Caller::default() };
        let refused = engine.submit_within(command(), caller, drop).err();
        assert_eq!(refused, Some(TransferError::TooMany(8)));
    }
    assert_eq!(engine.in_flight(), 8);
    // What was refused holds nothing: one that ends makes room for one.
    next.cancel();
    assert_eq!(next.wait().result, Err(TransferError::Cancelled));
    submitted.pop().unwrap().cancel();
    let deadline = Instant::now() + Duration::from_secs(60);
    while heavy.counters.in_flight() > 2 {
        assert!(Instant::now() < deadline, "it ends");
        std::thread::sleep(Duration::from_millis(1));
    }
    engine.submit_for(&heavy, command(), drop).unwrap();
    assert_eq!(engine.in_flight(), 7);
}
