//! Kernels that send files through connections of their own: order, ends on either side, and names of connections that are over.

mod common;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use accel::compile::{BuildOptions, build_kernel};
use common::{PATIENCE, address, eventually, start, tcp_client, topology, topology_on};
use engine::topology::{
    Backend, CpuPlacement, FileAccess, FileSpec, Service, SocketAt, SocketSpec,
};
use mqueue::abi::transfer_status as status;
use server::Server;
use sockets::End;
use sys::descriptors::reset_on_close;

const MEMORY: u64 = 64 << 10;
/// Of the file; more than the buffers of a connection hold.
const FILE: usize = 48 << 20;

/// Bits of `how`, see the kernel.
const FROM_MEMORY: u32 = 1;
const TO_OLD: u32 = 2;
const CLOSE: u32 = 4;
const RESET: u32 = 8;

fn kernel() -> String {
    static BUILD: Mutex<()> = Mutex::new(());
    let _alone = BUILD.lock();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/send_file.cpp");
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join("send_file.so");
    build_kernel(&source, &output, &BuildOptions::default()).unwrap();
    output.to_str().unwrap().to_owned()
}

fn service(file: PathBuf) -> Service {
    let mut service = Service::new("files", Vec::new(), &kernel());
    service.mqueues = 1;
    service.sockets = vec![SocketSpec::listen(([127, 0, 0, 1], 0))];
    service.backends = vec![Backend::transfers("disk", MEMORY)];
    service.files = vec![FileSpec::file(file, FileAccess::Read)];
    service
}

/// A file of bytes that differ from one another.
fn sample(folder: &Path) -> (PathBuf, Vec<u8>) {
    let content: Vec<u8> = (0..FILE).map(|at| (at * 7 + at / 251) as u8).collect();
    let path = folder.join("data");
    std::fs::write(&path, &content).unwrap();
    (path, content)
}

fn request(how: u32, offset: usize, bytes: usize, before: usize) -> Vec<u8> {
    let mut request = [0u32.to_le_bytes(), how.to_le_bytes()].concat();
    for number in [offset, bytes, before] {
        request.extend((number as u64).to_le_bytes());
    }
    request
}

fn ask(client: &mut TcpStream, how: u32, offset: usize, bytes: usize, before: usize) {
    client.write_all(&request(how, offset, bytes, before)).unwrap();
}

/// Reads what the kernel has sent before, the bytes of the transfer, and what it has sent meanwhile.
fn read_answer(client: &mut TcpStream, bytes: usize, before: usize) -> Vec<u8> {
    let mut got = vec![0; before + bytes + 16];
    client.read_exact(&mut got).unwrap();
    assert!(got[..before].iter().all(|byte| *byte == b'B'), "bytes before the transfer");
    assert_eq!(got[before + bytes..], [b'A'; 16], "bytes after the transfer");
    got[before..before + bytes].to_vec()
}

/// The status and the count of the transfer.
fn read_end(client: &mut TcpStream) -> (u32, u64) {
    let mut end = [0; 16];
    client.read_exact(&mut end).unwrap();
    (
        u32::from_le_bytes(end[..4].try_into().unwrap()),
        u64::from_le_bytes(end[8..].try_into().unwrap()),
    )
}

fn ends(server: &Server, end: End) -> u64 {
    server.metrics().service(0).socket_ends[end as usize]
}

/// The kernel serves the next connection.
fn works(server: &Server, content: &[u8]) {
    let mut client = tcp_client(address(server, 0));
    ask(&mut client, 0, 5, 1000, 3);
    assert_eq!(read_answer(&mut client, 1000, 3), content[5..1005]);
    assert_eq!(read_end(&mut client), (status::OK, 1000));
}

#[test]
fn a_file_has_its_place_among_the_bytes_of_a_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path());
    for placement in [CpuPlacement::Worker, CpuPlacement::Threads { threads: 1, cores: Vec::new() }]
    {
        let server = start(topology_on(placement, vec![service(path.clone())]));
        let mut client = tcp_client(address(&server, 0));
        for (offset, bytes, before) in
            [(0, 1, 0), (1, 0, 5), (7, 100_000, 1), (0, 3 << 20, 600_000), (FILE - 9, 9, 13)]
        {
            ask(&mut client, 0, offset, bytes, before);
            assert_eq!(read_answer(&mut client, bytes, before), content[offset..offset + bytes]);
            assert_eq!(read_end(&mut client), (status::OK, bytes as u64));
        }
        ask(&mut client, FROM_MEMORY, 0, 6, 4);
        assert_eq!(read_answer(&mut client, 6, 4), b"memory");
        assert_eq!(read_end(&mut client), (status::OK, 6));
        // The end of the connection comes behind the file.
        ask(&mut client, CLOSE, 0, 1 << 20, 0);
        assert_eq!(read_answer(&mut client, 1 << 20, 0), content[..1 << 20]);
        assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
        works(&server, &content);
    }
}

#[test]
fn a_transfer_never_reaches_a_later_connection_of_its_slot() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path());
    let server = start(topology(vec![service(path)]));
    works(&server, &content);
    let mut client = tcp_client(address(&server, 0));
    ask(&mut client, TO_OLD, 0, 1000, 2);
    // Nothing of the file: the bytes before and behind it are next to one another.
    assert_eq!(read_answer(&mut client, 0, 2), b"");
    assert_eq!(read_end(&mut client), (status::CLOSED, 0));
    ask(&mut client, 0, 9, 10, 0);
    assert_eq!(read_answer(&mut client, 10, 0), content[9..19]);
}

#[test]
fn a_transfer_that_fails_resets_the_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path());
    let server = start(topology(vec![service(path)]));
    let mut client = tcp_client(address(&server, 0));
    ask(&mut client, 0, FILE - 10, 20, 0);
    let mut got = Vec::new();
    let error = client.read_to_end(&mut got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(content[FILE - 10..].starts_with(&got), "{got:?}");
    eventually("the end is counted", || ends(&server, End::TransferFailed) == 1);
    works(&server, &content);
}

#[test]
fn an_end_of_the_connection_on_either_side_ends_the_transfer() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = sample(folder.path());
    let server = start(topology(vec![service(path)]));
    // The client.
    let mut client = tcp_client(address(&server, 0));
    ask(&mut client, 0, 0, FILE, 1);
    client.read_exact(&mut [0; 5000]).unwrap();
    reset_on_close(std::os::fd::AsFd::as_fd(&client), true).unwrap();
    drop(client);
    works(&server, &content);
    // The kernel: the client is not to take a part for the whole.
    let mut client = tcp_client(address(&server, 0));
    ask(&mut client, RESET, 0, FILE, 1);
    let mut got = Vec::new();
    let error = client.read_to_end(&mut got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(got.len() < FILE);
    works(&server, &content);
    // The server.
    let mut client = tcp_client(address(&server, 0));
    ask(&mut client, 0, 0, FILE, 1);
    client.read_exact(&mut [0; 5000]).unwrap();
    drop(server);
    let error = client.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_unix_socket_takes_no_transfer_because_it_has_no_reset() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = sample(folder.path());
    let mut service = service(path);
    let at = folder.path().join("clients");
    service.sockets = vec![SocketSpec::listen(SocketAt::Unix(at.clone()))];
    let _server = start(topology(vec![service]));
    let mut client = UnixStream::connect(at).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.write_all(&request(0, 0, 1000, 2)).unwrap();
    let mut got = [0; 2 + 16 + 16];
    client.read_exact(&mut got).unwrap();
    assert_eq!(got[..18], *b"BBAAAAAAAAAAAAAAAA");
    assert_eq!(got[18..22], status::NOT_ALLOWED.to_le_bytes());
}

#[test]
fn a_service_with_sockets_has_one_backend_for_transfers() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = sample(folder.path());
    let mut service = service(path);
    service.backends.push(Backend::transfers("other", MEMORY));
    let refused = topology(vec![service.clone()]).check().unwrap_err().to_string();
    assert!(refused.contains("keep one"), "{refused}");
    service.sockets.clear();
    service.listen = vec![common::udp()];
    topology(vec![service]).check().unwrap();
}
