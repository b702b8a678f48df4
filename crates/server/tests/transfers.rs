//! Transfers that kernels ask for: files into memory of blocks and back, peers, stages, and commands of a kernel that writes whatever it likes.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use accel::compile::{BuildOptions, build_kernel};
use common::{PATIENCE, address, ask, start, topology, udp, udp_client};
use engine::topology::{Backend, CpuPlacement, FileAccess, FileSpec, Service};
use mqueue::abi::{
    TransferCommand, TransferDone, transfer_digest, transfer_place, transfer_stage,
    transfer_status as status,
};
use server::Server;
use wire::framing::Framing;
use wire::nic::Transport;

const MEMORY: u64 = 64 << 10;
const ALL: u64 = u64::MAX;

/// A kernel, compiled once.
fn kernel(source: &str) -> String {
    static BUILD: Mutex<()> = Mutex::new(());
    let _alone = BUILD.lock();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let name = source.file_stem().unwrap().to_str().unwrap();
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.so"));
    build_kernel(&source, &output, &BuildOptions::default()).unwrap();
    output.to_str().unwrap().to_owned()
}

fn service(source: &str, files: Vec<FileSpec>) -> Service {
    let mut service = Service::new("files", vec![udp()], &kernel(source));
    service.mqueues = 2;
    service.backends = vec![Backend::transfers("disk", MEMORY)];
    service.files = files;
    service
}

fn raw(files: Vec<FileSpec>) -> (Server, UdpSocket) {
    let server = start(topology(vec![Service {
        mqueues: 1,
        ..service("tests/kernels/transfer_raw.cpp", files)
    }]));
    let client = udp_client(address(&server, 0));
    (server, client)
}

/// What the kernel gets for a command: the status of the answer, and what it says.
fn answer(client: &UdpSocket, message: &[u8]) -> TransferDone {
    let answer = ask(client, message);
    assert_eq!((answer[0], answer.len()), (0, 65), "every command is answered");
    TransferDone::from_bytes(answer[1..].try_into().unwrap())
}

fn run(client: &UdpSocket, command: TransferCommand) -> TransferDone {
    answer(client, &command.to_bytes())
}

fn command(from: (u8, u16, u64), to: (u8, u16, u64), bytes: u64) -> TransferCommand {
    TransferCommand {
        source: from.0,
        sink: to.0,
        digest: transfer_digest::NONE,
        stages: 0,
        source_file: from.1,
        sink_file: to.1,
        source_offset: from.2,
        sink_offset: to.2,
        bytes,
        lease: 0,
        reserved: [0; 3],
    }
}

const fn file(number: u16, offset: u64) -> (u8, u16, u64) {
    (transfer_place::FILE, number, offset)
}
const fn memory(offset: u64) -> (u8, u16, u64) {
    (transfer_place::MEMORY, 0, offset)
}
const fn peer(number: u16) -> (u8, u16, u64) {
    (transfer_place::CONNECTION, number, 0)
}

/// A file of bytes that differ from one another.
fn sample(folder: &Path, name: &str, bytes: usize) -> (PathBuf, Vec<u8>) {
    let content: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
    let path = folder.join(name);
    std::fs::write(&path, &content).unwrap();
    (path, content)
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    let digest = transfer::Source::file(in_memory(bytes), 0, None);
    let digest = digest.digest(transfer::DigestKind::Sha256).file(in_memory(&[]), 0);
    let engine = transfer::Engine::start(transfer::Limits::default()).unwrap();
    let outcome = engine.submit(digest).unwrap().wait();
    outcome.result.unwrap();
    outcome.report.digest().unwrap().bytes().to_vec()
}

fn in_memory(bytes: &[u8]) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

#[test]
fn a_kernel_reads_ranges_of_a_file_into_its_memory_and_answers_with_their_digests() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path(), "data", 200_000);
    let files = vec![FileSpec::file(path, FileAccess::Read)];
    for placement in [CpuPlacement::Worker, CpuPlacement::Threads { threads: 1, cores: Vec::new() }]
    {
        let service = service("../../examples/12_transfer/files.cpp", files.clone());
        let server = start(common::topology_on(placement, vec![service]));
        let client = udp_client(address(&server, 0));
        for (offset, bytes) in [(0, 1), (0, 65_536), (199_999, 1), (1234, 40_000), (3, 0)] {
            let mut request = vec![0; 8];
            request.extend(u64::to_le_bytes(offset as u64));
            request.extend(u64::to_le_bytes(bytes as u64));
            let answer = ask(&client, &request);
            let range = &content[offset..offset + bytes];
            let sum: u32 = range.iter().map(|byte| u32::from(*byte)).sum();
            assert_eq!(answer[..4], status::OK.to_le_bytes(), "{offset} {bytes}");
            assert_eq!(answer[4..8], sum.to_le_bytes(), "the kernel sees the bytes");
            assert_eq!(answer[8..16], (bytes as u64).to_le_bytes());
            assert_eq!(answer[16..48], sha256(range));
        }
    }
}

/// Each backend has the rings of its own, whichever of them comes first.
#[test]
fn a_service_has_transfers_and_a_server_in_either_order() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path(), "data", 4096);
    let db = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = db.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok((count, from)) = db.recv_from(&mut bytes) {
            bytes[..count].reverse();
            let _ = db.send_to(&bytes[..count], from);
        }
    });
    for disk in [0, 1] {
        let mut service = service(
            "tests/kernels/transfer_beside.cpp",
            vec![FileSpec::file(path.clone(), FileAccess::Read)],
        );
        let beside = Backend::new("db", Transport::Udp, to, Framing::Fixed(8));
        service.backends.insert(1 - disk, beside);
        let server = start(topology(vec![service]));
        let client = udp_client(address(&server, 0));
        let mut expected = content[..8].to_vec();
        expected.reverse();
        for _ in 0..20 {
            assert_eq!(ask(&client, &[disk as u8]), expected, "transfers are backend {disk}");
        }
    }
}

#[test]
fn memory_goes_to_a_file_and_to_a_peer_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at: SocketAddr = listener.local_addr().unwrap();
    let created = folder.path().join("new");
    let (server, client) =
        raw(vec![FileSpec::file(&created, FileAccess::Create), FileSpec::connection(at)]);
    let text = b"what the kernel has written";
    ask(&client, &[b"P", &text[..]].concat());
    let bytes = text.len() as u64;
    let done = run(&client, command(memory(0), file(0, 5), bytes));
    assert_eq!((done.status, done.read, done.written), (status::OK, bytes, bytes));
    assert_eq!(std::fs::read(&created).unwrap(), [&[0; 5], &text[..]].concat());

    let accepted = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut got = Vec::new();
        socket.read_to_end(&mut got).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(b"from the peer").unwrap();
        got
    });
    let done = run(&client, command(file(0, 5), peer(1), ALL));
    assert_eq!((done.status, done.written), (status::OK, bytes));
    let done = run(&client, command(peer(1), memory(4096), 13));
    assert_eq!((done.status, done.written), (status::OK, 13));
    assert_eq!(accepted.join().unwrap(), text);
    let done = run(&client, command(memory(4096), file(0, 0), 13));
    assert_eq!(done.status, status::OK);
    assert_eq!(std::fs::read(&created).unwrap()[..13], b"from the peer"[..]);
    let counters = server.transfer_counters().expect("kernels have asked for some");
    let tenants = counters.tenants();
    let [(tenant, of)] = &tenants[..] else { panic!("{tenants:?}") };
    assert_eq!((tenant.as_str(), of.started()), ("default", 4));
}

#[test]
fn stages_and_keys_are_those_of_the_places() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path(), "data", 50_000);
    let key = folder.path().join("key");
    std::fs::write(&key, [7; 32]).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let sealed = FileSpec::file(folder.path().join("sealed"), FileAccess::Create);
    let sealed = FileSpec { key: Some(key), ..sealed };
    let (_server, client) = raw(vec![FileSpec::file(path, FileAccess::Read), sealed]);
    let stages = transfer_stage::COMPRESS_ZSTD | transfer_stage::SEAL;
    let digest = transfer_digest::SHA256;
    let seal = TransferCommand { stages, digest, ..command(file(0, 0), file(1, 0), ALL) };
    let done = run(&client, seal);
    assert_eq!((done.status, done.read), (status::OK, 50_000));
    assert_eq!(done.digest[..done.digest_bytes as usize], sha256(&content));
    let stages = transfer_stage::OPEN | transfer_stage::EXPAND_ZSTD;
    let open = TransferCommand { stages, digest, ..command(file(1, 0), memory(0), ALL) };
    let done = run(&client, open);
    assert_eq!((done.status, done.written), (status::OK, 50_000));
    assert_eq!(done.digest[..32], sha256(&content));
    assert_eq!(ask(&client, b"G")[..], content[..128]);
    // It would not fit behind that.
    let far = run(&client, TransferCommand { sink_offset: MEMORY - 49_999, ..open });
    assert_eq!(far.status, status::CORRUPT);
    // A place without a key.
    let stages = transfer_stage::OPEN;
    let keyless = run(&client, TransferCommand { stages, ..command(file(0, 0), memory(0), 100) });
    assert_eq!(keyless.status, status::NOT_ALLOWED);
}

#[test]
fn every_hostile_command_is_answered_and_touches_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path(), "data", 100_000);
    let closed = "127.0.0.1:1".parse::<SocketAddr>().unwrap();
    let (_server, client) =
        raw(vec![FileSpec::file(&path, FileAccess::Read), FileSpec::connection(closed)]);
    ask(&client, &[b"P", &[9; 127][..]].concat());
    let good = command(file(0, 0), memory(0), 100);
    let bad = [
        (TransferCommand { source: 0, ..good }, status::BAD_COMMAND),
        (TransferCommand { source: 4, ..good }, status::BAD_COMMAND),
        (TransferCommand { sink: 255, ..good }, status::BAD_COMMAND),
        (TransferCommand { digest: 5, ..good }, status::BAD_COMMAND),
        (TransferCommand { stages: 64, ..good }, status::BAD_COMMAND),
        (TransferCommand { stages: 2 | 4, ..good }, status::BAD_COMMAND),
        (TransferCommand { stages: transfer_stage::SEAL, ..good }, status::NOT_ALLOWED),
        (TransferCommand { stages: transfer_stage::COMPRESS_GZIP, ..good }, status::BAD_COMMAND),
        (TransferCommand { reserved: [0, 0, 1], ..good }, status::BAD_COMMAND),
        (TransferCommand { sink_file: 1, ..good }, status::BAD_COMMAND),
        (command(memory(0), memory(8), 8), status::BAD_COMMAND),
        // Files of others, and another kind of place.
        (TransferCommand { source_file: 2, ..good }, status::NOT_ALLOWED),
        (TransferCommand { source_file: u16::MAX, ..good }, status::NOT_ALLOWED),
        (TransferCommand { source_file: 1, ..good }, status::NOT_ALLOWED),
        (command(peer(0), memory(0), 1), status::NOT_ALLOWED),
        // To a file that may be read only.
        (command(memory(0), file(0, 0), 1), status::NOT_ALLOWED),
        // Outside the memory.
        (command(file(0, 0), memory(MEMORY), 1), status::RANGE),
        (command(file(0, 0), memory(1), MEMORY), status::RANGE),
        (command(file(0, 0), memory(u64::MAX), 1), status::RANGE),
        (command(file(0, 0), memory(u64::MAX - 99), 100), status::RANGE),
        (command(file(0, 0), memory(0), ALL), status::RANGE),
        (command(file(0, 0), memory(0), ALL - 1), status::RANGE),
        (command(memory(0), peer(1), ALL), status::RANGE),
        (command(memory(MEMORY), peer(1), 1), status::RANGE),
        (command(memory(u64::MAX), peer(1), 1), status::RANGE),
        // Outside the file.
        (command(file(0, 99_999), memory(0), 2), status::FILE_ENDED),
        (command(file(0, 1 << 62), memory(0), 2), status::FILE_ENDED),
        (command(file(0, u64::MAX), memory(0), 2), status::RANGE),
        (command(file(0, i64::MAX as u64), memory(0), 2), status::RANGE),
        // No process listens there.
        (command(file(0, 0), peer(1), 2), status::REFUSED),
    ];
    for (command, wanted) in bad {
        let done = run(&client, command);
        assert_eq!(done.status, wanted, "{command:?}");
        assert_eq!((done.digest_bytes, done.digest), (0, [0; 32]));
    }
    for len in [1, 63] {
        assert_eq!(answer(&client, &good.to_bytes()[..len]).status, status::BAD_COMMAND, "{len}");
    }
    // A range that ends behind the file may have been read up to its end.
    let untouched = &ask(&client, b"G")[2..];
    assert!(untouched[..125].iter().all(|byte| *byte == 9), "{untouched:?}");
    // The block and its service go on, and take as many as they like.
    let mut many = vec![b'B', 0, 0, 0, 200, 0, 0, 0];
    many.extend(good.to_bytes());
    assert_eq!(ask(&client, &many), 200_u32.to_le_bytes());
    assert_eq!(run(&client, good).status, status::OK);
    assert_eq!(ask(&client, b"G")[..100], content[..100]);
    assert_eq!(std::fs::read(&path).unwrap(), content);
}

#[test]
fn a_file_that_cannot_be_used_ends_the_start_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |file: FileSpec| {
        let service = service("tests/kernels/transfer_raw.cpp", vec![file]);
        Server::start(topology(vec![service])).err().expect("it does not start").to_string()
    };
    let missing = refused(FileSpec::file(folder.path().join("missing"), FileAccess::Write));
    assert!(missing.contains("missing cannot be opened: No such file"), "{missing}");
    let directory = refused(FileSpec::file(folder.path(), FileAccess::Read));
    assert!(directory.contains("is not a regular file"), "{directory}");
    let (path, _) = sample(folder.path(), "key", 31);
    std::fs::set_permissions(
        &path,
        <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o644),
    )
    .unwrap();
    let key =
        refused(FileSpec { key: Some(path.clone()), ..FileSpec::file(path, FileAccess::Read) });
    assert!(key.contains("can be read by other users"), "{key}");
}

#[test]
fn a_transfer_in_flight_ends_with_its_block_and_a_stalled_peer_holds_back_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = sample(folder.path(), "small", 1000);
    let large = folder.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(256 << 20).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let files = vec![
        FileSpec::file(&path, FileAccess::Read),
        FileSpec::file(&large, FileAccess::Read),
        FileSpec::connection(listener.local_addr().unwrap()),
    ];
    let server = start(topology(vec![Service {
        mqueues: 2,
        ..service("tests/kernels/transfer_raw.cpp", files)
    }]));
    let [stalls, other] = [0, 1].map(|_| udp_client(address(&server, 0)));
    // One block waits for the peer, which takes nothing; round-robin gives the next ones to the other block in turn.
    stalls.send(&command(file(1, 0), peer(2), ALL).to_bytes()).unwrap();
    let (mut socket, _) = listener.accept().unwrap();
    assert_eq!(run(&other, command(file(0, 0), memory(0), 1000)).status, status::OK);
    let counters = server.transfer_counters().unwrap();
    let in_flight = || counters.tenants().iter().map(|(_, of)| of.in_flight()).sum::<u64>();
    assert_eq!(in_flight(), 1);
    drop(server);
    common::eventually("the transfer is cancelled", || in_flight() == 0);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    // The end, or a reset.
    let got = std::io::copy(&mut socket, &mut std::io::sink()).unwrap_or(0);
    assert!(got < 256 << 20, "{got}");
}

#[test]
fn the_weight_of_a_tenant_reaches_transfers_of_its_kernels_and_a_change_of_it_too() {
    use engine::topology::Tenant;
    let folder = tempfile::tempdir().unwrap();
    let large = folder.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(256 << 20).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let files = vec![
        FileSpec::file(&large, FileAccess::Read),
        FileSpec::connection(listener.local_addr().unwrap()),
    ];
    let limits = transfer::Limits { in_flight: 4, ..transfer::Limits::default() };
    // The peer takes nothing, so what is in flight stays.
    let order = command(file(0, 0), peer(1), ALL).to_bytes();
    let orders = [&b"B\0\0\0\x08\0\0\0"[..], &order[..]].concat();
    // Of 4 places a tenant with weight 1 gets 2: its third would be more than the 2 that are free. With weight 2 it gets 3.
    for (weight, places) in [(1, 2), (2, 3)] {
        let tenant = |weight| Tenant { weight, ..Tenant::new("default") };
        let services = vec![service("tests/kernels/transfer_raw.cpp", files.clone())];
        let wanted =
            engine::topology::Topology { tenants: vec![tenant(weight)], ..topology(services) };
        let transfers = std::sync::Arc::new(transfer::Engine::start(limits).unwrap());
        let server = Server::start_unless(wanted, None, Some(&transfers), &mut || false);
        let mut server = server.unwrap();
        let counters = transfers.counters();
        let counts = || {
            let refused = counters.failed().find(|(name, _)| *name == "too_many").unwrap().1;
            let tenants = counters.tenants();
            (tenants.iter().map(|(_, of)| of.in_flight()).sum::<u64>(), refused)
        };
        let clients = [0, 1].map(|_| udp_client(address(&server, 0)));
        clients[0].send(&orders).unwrap();
        common::eventually("others are refused", || counts() == (places, 8 - places));
        server.put_tenant(server::Caller::engine(), tenant(2), false).unwrap();
        // The second block gets them.
        clients[1].send(&orders).unwrap();
        common::eventually("it has its part of weight 2", || counts() == (3, 13));
    }
}
