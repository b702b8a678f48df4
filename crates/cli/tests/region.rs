//! The region is the contract: what any other process finds in it that holds its descriptor. The server
//! runs as a process of its own; this one is an onlooker that has nothing but the file and the public
//! layout.

mod common;

use std::fs::{self, File};
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use common::*;
use mqueue::abi::{self, RegionHeader, RingEntry, SlotHeader, protocol, ring_kind};
use sys::SharedView;
use wire::framing::Framing;

/// A region seen from outside. (Read through the descriptor: a mapping may only be read through
/// atomics, and nothing here needs more than a copy.)
struct Onlooker {
    file: File,
    bytes: u64,
}

impl Onlooker {
    /// Finds the memfd of (service, accelerator) among the descriptors of a process.
    fn find(process: u32, service: &str, accelerator: &str) -> Self {
        let name = format!("serval:{service}:{accelerator}");
        for entry in fs::read_dir(format!("/proc/{process}/fd")).unwrap() {
            let path = entry.unwrap().path();
            let Ok(target) = fs::read_link(&path) else { continue };
            if target.to_string_lossy().contains(&name) {
                let file = File::open(&path).expect("a region can be opened for reading");
                let view = SharedView::open(file.as_fd(), 1 << 30).expect("a sealed region");
                return Self { bytes: view.len_bytes() as u64, file };
            }
        }
        panic!("process {process} has no descriptor named {name}");
    }

    fn bytes_at(&self, at: u64, len: usize) -> Vec<u8> {
        assert!(at + len as u64 <= self.bytes, "outside the region");
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    fn u64_at(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes_at(at, 8).try_into().unwrap())
    }

    fn u32_at(&self, at: u64) -> u32 {
        self.u64_at(at & !7).rotate_right(8 * (at % 8) as u32) as u32
    }

    /// The directory, as the header says where.
    fn rings(&self) -> Vec<Ring> {
        assert_eq!(self.u64_at(offset_of!(RegionHeader, magic) as u64), abi::REGION_MAGIC);
        let version = self.u32_at(offset_of!(RegionHeader, abi_version) as u64);
        assert_eq!(version, abi::ABI_VERSION);
        let bytes = self.u64_at(offset_of!(RegionHeader, region_bytes) as u64);
        assert!(bytes <= self.bytes);
        let rings = self.u32_at(offset_of!(RegionHeader, ring_count) as u64);
        let directory = self.u64_at(offset_of!(RegionHeader, directory_offset) as u64);
        let entry = |n: u64| {
            let at = directory + n * size_of::<RingEntry>() as u64;
            let bytes = self.bytes_at(at, size_of::<RingEntry>());
            let u32_of = |field: usize| self.u32_at(at + field as u64);
            let u64_of = |field: usize| self.u64_at(at + field as u64);
            Ring {
                kind: u32_of(offset_of!(RingEntry, kind)) as u16,
                protocol: bytes[offset_of!(RingEntry, protocol)],
                depth: u32_of(offset_of!(RingEntry, depth)).into(),
                stride: u32_of(offset_of!(RingEntry, slot_stride)).into(),
                slots: u64_of(offset_of!(RingEntry, slots_offset)),
                head: u64_of(offset_of!(RingEntry, head_offset)),
                tail: u64_of(offset_of!(RingEntry, tail_offset)),
                arena: u64_of(offset_of!(RingEntry, arena_offset)),
            }
        };
        (0..u64::from(rings)).map(entry).collect()
    }

    /// Message `n` of a ring.
    fn message(&self, ring: &Ring, n: u64) -> Vec<u8> {
        let slot = self.bytes_at(ring.slots + n % ring.depth * ring.stride, ring.stride as usize);
        let bytes = match ring.protocol {
            protocol::DOORBELL => slot,
            protocol::GRANULE8 => ungranule(&slot, 4, n),
            _ => ungranule(&slot, 12, n),
        };
        let len = u32::from_le_bytes(bytes[offset_of!(SlotHeader, len)..][..4].try_into().unwrap());
        assert_eq!(bytes[offset_of!(SlotHeader, kind)], abi::kind::MESSAGE);
        let flags = offset_of!(SlotHeader, flags);
        if bytes[flags] & abi::flags::ARENA as u8 != 0 {
            let offset = &bytes[offset_of!(SlotHeader, arena_offset)..][..8];
            let offset = u64::from_le_bytes(offset.try_into().unwrap());
            return self.bytes_at(ring.arena + offset, len as usize);
        }
        bytes[size_of::<SlotHeader>()..][..len as usize].to_vec()
    }
}

/// Takes the data out of units that each end in a sequence; those of other messages end it.
fn ungranule(slot: &[u8], data_bytes: usize, n: u64) -> Vec<u8> {
    let sequence = (n as u32).wrapping_add(1).to_le_bytes();
    let units = slot.chunks_exact(data_bytes + 4);
    let whole = units.take_while(|unit| unit[data_bytes..] == sequence);
    whole.flat_map(|unit| &unit[..data_bytes]).copied().collect()
}

#[derive(Debug)]
struct Ring {
    kind: u16,
    protocol: u8,
    depth: u64,
    stride: u64,
    slots: u64,
    head: u64,
    tail: u64,
    arena: u64,
}

/// Every request was in exactly one RX ring, as the client sent it, and every reply in a TX ring.
fn requests_are_in_the_rings(rings: &str, messages: usize, bytes: impl Fn(usize) -> usize) {
    let config = format!(
        "[[accelerator]]\nname = \"acc7\"\nkind = \"cpu\"\n[[service]]\nname = \"seen\"\n\
         listen = [\"udp://127.0.0.1:0\", \"tcp://127.0.0.1:0\"]\nframing = \"length:u32\"\n\
         accelerator = \"acc7\"\nkernel = \"echo\"\nmqueues = 3\nslots = 64\n{rings}\n"
    );
    let name = format!("region-{}", rings.replace(|c: char| !c.is_alphanumeric(), "-"));
    let served = Served::start(&name, "", &config);
    let client = udp_client(served.services[0][0]);
    let mut stream = tcp_client(served.services[0][1]);
    let region = Onlooker::find(served.process.0.id(), "seen", "acc7");
    let mut rings = region.rings();
    // Besides a pool for bundles.
    rings.retain(|ring| [ring_kind::SERVER_RX, ring_kind::SERVER_TX].contains(&ring.kind));
    assert_eq!(rings.len(), 6, "an RX and a TX ring for each of three blocks");
    for n in 0..messages {
        let message = pattern(bytes(n), n);
        let heads: Vec<u64> = rings.iter().map(|ring| region.u64_at(ring.head)).collect();
        if n % 2 == 0 {
            assert_eq!(ask(&client, &message), message);
        } else {
            let (mut request, mut reply) = (Vec::new(), Vec::new());
            Framing::LengthU32.encode_request(&message, &mut request).unwrap();
            Framing::LengthU32.encode_reply(&message, &mut reply).unwrap();
            assert_eq!(exchange(&mut stream, &request, reply.len()), reply);
        }
        for kind in [ring_kind::SERVER_RX, ring_kind::SERVER_TX] {
            let of_kind = rings.iter().zip(&heads).filter(|(ring, _)| ring.kind == kind);
            let moved = of_kind.filter(|(ring, before)| region.u64_at(ring.head) != **before);
            let moved: Vec<_> = moved.collect();
            assert_eq!(moved.len(), 1, "message {n} is in one ring of kind {kind}");
            let (ring, before) = moved[0];
            assert_eq!(region.u64_at(ring.head), before + 1);
            // What was published last stays where it is until the next one comes.
            assert!(region.message(ring, *before) == message, "message {n}: {ring:?}");
        }
    }
    for kind in [ring_kind::SERVER_RX, ring_kind::SERVER_TX] {
        let rings = rings.iter().filter(|ring| ring.kind == kind);
        assert_eq!(rings.map(|ring| region.u64_at(ring.head)).sum::<u64>(), messages as u64);
    }
    eventually("every slot is released", || {
        rings.iter().all(|ring| region.u64_at(ring.tail) == region.u64_at(ring.head))
    });
    let accepted = served.metric("serval_requests_accepted_total{service=\"seen\"}");
    assert_eq!(accepted, messages as u64, "accepted means written to an RX ring");
    drop((client, stream));
    assert_eq!(served.drain(), 0);
}

#[test]
fn requests_are_in_doorbell_rings_as_sent() {
    requests_are_in_the_rings("rings = \"doorbell\"", 150, |n| n * 7 % 1025);
}

#[test]
fn requests_are_in_granule_rings_as_sent() {
    requests_are_in_the_rings("rings = \"granule8\"", 150, |n| n * 7 % 1025);
    requests_are_in_the_rings("rings = \"granule\"", 150, |n| n * 11 % 1025);
}

#[test]
fn long_requests_are_in_arenas_as_sent() {
    let sizes = "max_message_bytes = 8000\nmax_reply_bytes = 8000\narena_bytes = 20000";
    requests_are_in_the_rings(sizes, 100, |n| n * 79 % 8001);
}

#[test]
fn not_even_the_owner_can_resize_the_region() {
    let config = "[[service]]\nname = \"seen\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n\
                  accelerator = \"acc0\"\n[[accelerator]]\nname = \"acc0\"\nkind = \"cpu\"\n";
    let served = Served::start("region-sealed", "", config);
    let region = Onlooker::find(served.process.0.id(), "seen", "acc0");
    let path = format!("/proc/{}/fd", served.process.0.id());
    let writable = fs::read_dir(path).unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let target = fs::read_link(&path).ok()?;
        let found = target.to_string_lossy().contains("serval:seen:acc0");
        found.then(|| File::options().read(true).write(true).open(&path).unwrap())
    });
    let writable = writable.expect("the owner may write");
    for bytes in [0, region.bytes - 4096, region.bytes + 4096] {
        assert!(writable.set_len(bytes).is_err(), "resized to {bytes}");
    }
    assert_eq!(ask(&udp_client(served.services[0][0]), b"still whole"), b"still whole");
    assert_eq!(served.drain(), 0);
}

#[test]
fn the_engine_loads_no_gpu_driver() {
    let config =
        "[[service]]\nname = \"seen\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n";
    let served = Served::start("region-driver", "", config);
    assert_eq!(ask(&udp_client(served.services[0][0]), b"hello"), b"hello");
    let maps = fs::read_to_string(format!("/proc/{}/maps", served.process.0.id())).unwrap();
    assert!(maps.contains("serval:seen:"), "the region is mapped");
    for library in ["libcuda", "libnvidia"] {
        assert!(!maps.contains(library), "{library} is loaded");
    }
    assert_eq!(served.drain(), 0);
}
