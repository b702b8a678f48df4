//! The loops with aws-lc, the library of the engine.

use std::fs::File;
use std::io::{IoSliceMut, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Instant;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use sys::descriptors::{read_at, write_at};
use sys::time::process_cpu_ns;
use transfer::command::limits::{HEADER_BYTES, TAG_BYTES};

use crate::rows::{STREAMS, Sample};

pub(crate) fn connect(port: u16) -> TcpStream {
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_nodelay(true).unwrap();
    socket
}

/// Ends the stream; the receiver closes when it has read everything.
pub(crate) fn end(mut socket: &TcpStream) {
    socket.shutdown(Shutdown::Write).unwrap();
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
}

fn key() -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[1; 32]).unwrap())
}

fn seal(key: &LessSafeKey, record: u64, payload: &mut [u8], tag: &mut [u8]) {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&record.to_be_bytes());
    let nonce = Nonce::assume_unique_for_key(nonce);
    let sealed = key.seal_in_place_separate_tag(nonce, Aad::empty(), payload).unwrap();
    tag[..TAG_BYTES].copy_from_slice(sealed.as_ref());
}

/// The loop of `seal` in C. The record is as long as the buffer.
pub(crate) fn seal_to_socket(path: &Path, bytes: usize, port: u16, buffer_bytes: usize) -> Sample {
    let (file, socket) = (File::open(path).unwrap(), connect(port));
    let mut buffer = vec![0; HEADER_BYTES + buffer_bytes];
    let (began, cpu) = (Instant::now(), process_cpu_ns());
    let key = key();
    let (mut at, mut start) = (0, HEADER_BYTES);
    for record in 0u64.. {
        if at == bytes {
            break;
        }
        let want = (buffer_bytes - TAG_BYTES).min(bytes - at);
        let mut parts = [IoSliceMut::new(&mut buffer[start..start + want])];
        let got = read_at(file.as_fd(), &mut parts, at as u64).unwrap();
        at += got;
        let (payload, tag) = buffer[start..].split_at_mut(got);
        seal(&key, record, payload, tag);
        (&socket).write_all(&buffer[..start + got + TAG_BYTES]).unwrap();
        start = 0;
    }
    end(&socket);
    Sample::since(began, cpu)
}

/// 16 streams of a file, each by the loop, on threads that have a part of them.
pub(crate) fn seal_streams(path: &Path, bytes: usize, port: u16, threads: usize) -> Sample {
    const BUFFER_BYTES: usize = 512 << 10;
    let (began, cpu) = (Instant::now(), process_cpu_ns());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..STREAMS / threads {
                    seal_to_socket(path, bytes, port, BUFFER_BYTES);
                }
            });
        }
    });
    Sample::since(began, cpu)
}

/// The part of it that no sender can avoid: as many bytes from memory to the socket.
pub(crate) fn send_only(bytes: usize, port: u16, buffer_bytes: usize) -> Sample {
    let (socket, buffer) = (connect(port), vec![1; buffer_bytes]);
    let (began, cpu) = (Instant::now(), process_cpu_ns());
    for _ in 0..bytes / buffer_bytes {
        (&socket).write_all(&buffer).unwrap();
    }
    end(&socket);
    Sample::since(began, cpu)
}

/// Read, CRC32C, seal and write as separate passes over memory that holds `window` bytes: all of the file, or a chunk.
pub(crate) fn passes(source: &Path, sink: &Path, bytes: usize, window: usize) -> Sample {
    let (file, sink) =
        (File::open(source).unwrap(), File::options().write(true).open(sink).unwrap());
    const PAYLOAD: usize = (64 << 10) - TAG_BYTES;
    let window = window / PAYLOAD * PAYLOAD;
    let mut memory = vec![0; window + window / PAYLOAD * TAG_BYTES];
    memory.fill(1);
    let (began, cpu) = (Instant::now(), process_cpu_ns());
    let (key, mut crc) = (key(), 0);
    let (mut at, mut written, mut number) = (0, 0, 0);
    while at < bytes {
        let want = window.min(bytes - at);
        let records = want.div_ceil(PAYLOAD);
        let mut parts: Vec<_> = memory
            .chunks_mut(PAYLOAD + TAG_BYTES)
            .take(records)
            .enumerate()
            .map(|(n, record)| &mut record[..PAYLOAD.min(want - n * PAYLOAD)])
            .collect();
        // At most 1024 pieces in one system call.
        let mut read = at;
        for some in parts.chunks_mut(1024) {
            let mut some: Vec<_> = some.iter_mut().map(|part| IoSliceMut::new(part)).collect();
            let wanted: usize = some.iter().map(|part| part.len()).sum();
            assert_eq!(read_at(file.as_fd(), &mut some, read as u64).unwrap(), wanted);
            read += wanted;
        }
        parts.iter().for_each(|part| crc = crc32c::crc32c_append(crc, part));
        let mut len = 0;
        for (n, record) in memory.chunks_mut(PAYLOAD + TAG_BYTES).take(records).enumerate() {
            let plain = PAYLOAD.min(want - n * PAYLOAD);
            let (payload, tag) = record.split_at_mut(plain);
            seal(&key, number, payload, tag);
            number += 1;
            len += plain + TAG_BYTES;
        }
        let mut put = 0;
        while put < len {
            put += write_at(sink.as_fd(), &memory[put..len], (written + put) as u64).unwrap();
        }
        written += len;
        at += want;
    }
    std::hint::black_box(crc);
    Sample::since(began, cpu)
}
