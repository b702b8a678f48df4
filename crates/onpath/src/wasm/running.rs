//! A running instance of a module: how it is started, and how it is called.

use std::sync::Arc;

use wasmtime::{Memory, Store, StoreLimitsBuilder, Trap, TypedFunc};
use wire::session::{Origin, ReplyTo};

use super::descriptor::{DESCRIPTOR_BYTES, all_pass, write_descriptor};
use super::imports::{self, Held};
use super::{ABI_VERSION, Compiled, one_line};
use crate::dictionary::Dictionary;
use crate::function::{Direction, Failure, Merge, Register};
use crate::messages::{MESSAGES_MAX, Messages, RequestId};
use crate::spec::Sizes;

/// The minor version since which modules get the number of a chunk's connection.
const CONNECTIONS_SINCE: u16 = 1;
const PAGE_BYTES: usize = 64 << 10;
/// Room for what a module writes in a batch.
const SCRATCH_BYTES: usize = 256 << 10;
const REGISTERS_MAX: usize = 64;
const REGISTER_NAME_BYTES_MAX: usize = 31;
/// A register in a module's memory: the address of its name, and how it is merged.
const REGISTER_BYTES: usize = 8;
const TABLE_ELEMENTS_MAX: usize = 10_000;
/// Longest state: the window has room for it.
pub(super) const STATE_BYTES_MAX: usize = crate::messages::SHOWN_BYTES_MIN + SCRATCH_BYTES;
/// How long the start of an instance may take, in milliseconds. It is not on a worker.
pub(super) const START_TICKS: u64 = 1000;

/// What an instance may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory, the host's window included.
    pub memory_bytes: usize,
    /// How long a call may take, in microseconds.
    pub deadline_us: u64,
    /// How long messages are.
    pub sizes: Sizes,
}

type Batch = TypedFunc<(u32, u32, u32, u32), i32>;

/// The functions of a running instance.
pub(super) struct Running {
    pub(super) store: Store<Held>,
    pub(super) memory: Memory,
    /// The minor version of the interface for which it was compiled.
    pub(super) minor: u16,
    pub(super) asks_for_peers: bool,
    pub(super) requests: Batch,
    pub(super) replies: Option<Batch>,
    pub(super) read: Option<TypedFunc<u32, u64>>,
    pub(super) write: Option<TypedFunc<(u32, u64), i32>>,
    pub(super) reset: Option<TypedFunc<(), ()>>,
    pub(super) state: Option<TypedFunc<(), u32>>,
    pub(super) merge: Option<TypedFunc<(u32, u32), i32>>,
    /// Where the host's window begins.
    pub(super) window: usize,
}

/// What an instance is started from.
#[derive(Clone)]
pub(super) struct Start {
    pub(super) compiled: Compiled,
    pub(super) limits: Limits,
    pub(super) dictionary: Option<Arc<Dictionary>>,
    /// Bytes of messages in a batch, at most.
    pub(super) messages_bytes: usize,
    /// Of the first instance: others have the same.
    pub(super) registers: Option<Vec<Register>>,
}

impl Start {
    /// Starts an instance with these settings. The module's code may run for `ticks` while it is instantiated, and for `ticks` afterwards.
    pub(super) fn run(
        &self,
        ticks: u64,
        settings: &[Option<u64>],
    ) -> Result<(Running, Vec<Register>), String> {
        let Self { compiled: Compiled { module, host }, limits, .. } = self;
        let bounds = StoreLimitsBuilder::new()
            .memory_size(limits.memory_bytes)
            .table_elements(TABLE_ELEMENTS_MAX)
            .instances(1)
            .memories(1)
            .tables(4)
            .build();
        let dictionary = self.dictionary.clone();
        let held = Held { bounds, dictionary, now_ns: 0, peers: Vec::new(), window: 0 };
        let mut store = Store::new(&host.engine, held);
        store.limiter(|held| &mut held.bounds);
        store.epoch_deadline_trap();
        host.begin_call();
        store.set_epoch_deadline(ticks);
        let too_large = |error: &wasmtime::Error| {
            format!(
                "it does not start with memory_mib = {}: {}",
                limits.memory_bytes >> 20,
                why(error)
            )
        };
        if self.dictionary.is_none() && imports::uses_dictionary(module) {
            return Err("it uses a dictionary and has none: name one with `dictionary`".to_owned());
        }
        let imports = imports::of(&mut store, module);
        let instance = wasmtime::Instance::new(&mut store, module, &imports);
        let instance = instance.map_err(|error| too_large(&error))?;
        let memory = instance.get_memory(&mut store, "memory").expect("it was checked");
        let window = memory.data_size(&store);
        let asks_for_peers = imports::asks_for_peers(module);
        let held = store.data_mut();
        held.window = window;
        held.peers.reserve(if asks_for_peers { MESSAGES_MAX } else { 0 });
        let pages = self.window_bytes().div_ceil(PAGE_BYTES) as u64;
        if memory.grow(&mut store, pages).is_err() {
            return Err(format!(
                "it needs {} MiB of memory with the messages of a batch, which is more than memory_mib = {} or its own maximum: \
                 raise memory_mib, and link it without a maximum",
                (window + self.window_bytes()).div_ceil(1 << 20),
                limits.memory_bytes >> 20
            ));
        }
        host.begin_call();
        store.set_epoch_deadline(ticks);
        macro_rules! export {
            ($name:literal) => {
                instance.get_typed_func(&mut store, $name)
            };
        }
        let checked = |_| "its exports differ from those that were checked".to_owned();
        let abi: TypedFunc<(), i32> = export!("serval_abi").map_err(checked)?;
        if let Ok(initialize) = instance.get_typed_func::<(), ()>(&mut store, "_initialize") {
            let done = initialize.call(&mut store, ());
            done.map_err(|error| format!("_initialize failed: {}", why(&error)))?;
        }
        let version = abi.call(&mut store, ()).map_err(|error| why(&error))?;
        let minor = check_version(version)?;
        let registers: Option<TypedFunc<(), u32>> = export!("serval_registers").ok();
        let registers = match registers {
            None => Vec::new(),
            Some(registers) => {
                let address = registers.call(&mut store, ()).map_err(|error| why(&error))?;
                read_registers(memory.data(&store), address as usize)?
            }
        };
        let (requests, replies) = (export!("serval_requests"), export!("serval_replies").ok());
        let (read, write) = (export!("serval_read").ok(), export!("serval_write").ok());
        let reset = export!("serval_reset").ok();
        let requests = requests.map_err(checked)?;
        if write.is_none() && registers.iter().any(|register| register.merge == Merge::Setting) {
            return Err("it has settings and does not export serval_write".to_owned());
        }
        if self.registers.as_ref().is_some_and(|first| *first != registers) {
            return Err("its registers are others than at its first start".to_owned());
        }
        // The deadline of the start goes on: all settings are written within it.
        if let Some(write) = &write {
            for (register, value) in (0..).zip(settings) {
                if let Some(value) = *value {
                    write.call(&mut store, (register, value)).map_err(|error| why(&error))?;
                }
            }
        }
        let (state, merge) = (export!("serval_state").ok(), export!("serval_merge").ok());
        if state.is_none() && registers.iter().any(|register| register.merge == Merge::State) {
            return Err("it has registers of its state and does not export serval_state".to_owned());
        }
        let running = Running {
            store,
            memory,
            minor,
            asks_for_peers,
            requests,
            replies,
            read,
            write,
            reset,
            state,
            merge,
            window,
        };
        Ok((running, registers))
    }

    fn window_bytes(&self) -> usize {
        MESSAGES_MAX * DESCRIPTOR_BYTES + self.messages_bytes + SCRATCH_BYTES
    }
}

/// The minor version of a module, from what its `serval_abi` returns. The error says what is wrong and what would be right.
fn check_version(version: i32) -> Result<u16, String> {
    let (major, minor) = (version as u16, (version >> 16) as u16);
    let (our_major, our_minor) = ABI_VERSION;
    let of = format!(
        "it is for version {major}.{minor} of the interface, and this program has version {our_major}.{our_minor}"
    );
    match () {
        () if major != our_major => {
            Err(format!("{of}: compile it with the serval_function.h of this version"))
        }
        () if minor > our_minor => Err(format!(
            "{of}: use a newer Serval, or compile it with the serval_function.h of this version"
        )),
        () => Ok(minor),
    }
}

/// The number of the connection of a chunk, for a module; not 0.
fn connection_of(request: &RequestId) -> u64 {
    match request.origin {
        Origin::Client(ReplyTo { key, generation, .. }) => {
            (u64::from(key) + 1) | u64::from(generation) << 32
        }
        Origin::Datagram { .. } => 0,
    }
}

/// A call begins.
pub(super) fn begin(store: &mut Store<Held>, compiled: &Compiled, limits: &Limits) {
    compiled.host.begin_call();
    store.set_epoch_deadline(ticks(limits));
}

/// The deadline of a call. One more: the first tick may come at once.
fn ticks(limits: &Limits) -> u64 {
    limits.deadline_us.div_ceil(1000) + 1
}

pub(super) fn failure(error: wasmtime::Error) -> Failure {
    Failure(why(&error))
}

fn why(error: &wasmtime::Error) -> String {
    match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => "it exceeded its deadline".to_owned(),
        Some(trap) => format!("it trapped: {}", trap.to_string().trim_start_matches("wasm trap: ")),
        None => one_line(error),
    }
}

/// The table of registers at an address of a module's memory. It ends with the address 0. The error says what is wrong.
pub fn read_registers(memory: &[u8], address: usize) -> Result<Vec<Register>, String> {
    let outside = || "its table of registers is outside of its memory".to_owned();
    let mut registers: Vec<Register> = Vec::new();
    for index in 0.. {
        let entry = memory.get(address.saturating_add(index * REGISTER_BYTES)..);
        let entry = entry.and_then(|entry| entry.first_chunk::<REGISTER_BYTES>());
        let [a, b, c, d, merge @ ..] = *entry.ok_or_else(outside)?;
        let (name, merge) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(merge));
        if name == 0 {
            break;
        }
        if registers.len() == REGISTERS_MAX {
            return Err(format!("it has more than {REGISTERS_MAX} registers"));
        }
        let name = memory.get(name as usize..).ok_or_else(outside)?;
        let name = &name[..name.len().min(REGISTER_NAME_BYTES_MAX + 1)];
        let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        let letter = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'_';
        let right = (1..=REGISTER_NAME_BYTES_MAX).contains(&len) && name[..len].iter().all(letter);
        if !right {
            return Err(format!(
                "the name of its register {index} does not consist of 1 to {REGISTER_NAME_BYTES_MAX} lower-case letters, digits and `_`"
            ));
        }
        let name: Box<str> = String::from_utf8_lossy(&name[..len]).into();
        if registers.iter().any(|register| register.name == name) {
            return Err(format!("it has two registers {name:?}"));
        }
        let merge = match merge {
            0 => Merge::Sum,
            1 => Merge::Min,
            2 => Merge::Max,
            3 => Merge::Setting,
            4 => Merge::State,
            other => {
                return Err(format!(
                    "its register {name:?} has the kind {other}, which does not exist"
                ));
            }
        };
        registers.push(Register { name, merge });
    }
    Ok(registers)
}

impl Running {
    /// The state; empty if it has none.
    pub(super) fn state(&mut self) -> Result<&[u8], Failure> {
        let Some(state) = self.state.clone() else { return Ok(&[]) };
        let address = state.call(&mut self.store, ()).map_err(failure)?;
        read_state(self.memory.data(&self.store), address as usize).map_err(Failure)
    }

    /// Shows a batch to the module and copies out the descriptors that it leaves; none if all messages pass.
    pub(super) fn call(
        &mut self,
        direction: Direction,
        messages: &Messages,
        shown: &mut Vec<u32>,
        left: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let Self { store, memory, minor, asks_for_peers, requests, replies, window, .. } = self;
        let chunks = *minor >= CONNECTIONS_SINCE && messages.are_chunks();
        let Some(function) = (match direction {
            Direction::Requests => Some(requests),
            Direction::Replies => replies.as_mut(),
        }) else {
            return Ok(());
        };
        let payloads = *window + MESSAGES_MAX * DESCRIPTOR_BYTES;
        let bytes = messages.memory();
        let scratch = payloads + bytes.len().next_multiple_of(8);
        let data = memory.data_mut(&mut *store);
        // Of all but a single message, which is copied below.
        let copied = if messages.open() > 1 { bytes.len() } else { 0 };
        data[payloads..payloads + copied].copy_from_slice(&bytes[..copied]);
        let (descriptors, payload) = data[*window..].split_at_mut(payloads - *window);
        let (descriptors, _) = descriptors.as_chunks_mut::<DESCRIPTOR_BYTES>();
        shown.clear();
        for index in 0..messages.len() {
            if messages.is_open(index) {
                let (start, len) = messages.place(index);
                let descriptor = &mut descriptors[shown.len()];
                let connection = if chunks { connection_of(messages.request(index)) } else { 0 };
                write_descriptor(descriptor, payloads as u32 + start, len, connection);
                if copied == 0 {
                    let place = start as usize..(start + len) as usize;
                    payload[place.clone()].copy_from_slice(&bytes[place]);
                }
                shown.push(index as u32);
            }
        }
        let held = store.data_mut();
        held.now_ns = messages.now_ns();
        if *asks_for_peers {
            held.peers.clear();
            held.peers.extend(shown.iter().map(|index| messages.peer(*index as usize)));
        }
        let count = shown.len() as u32;
        let arguments = (*window as u32, count, scratch as u32, SCRATCH_BYTES as u32 - 8);
        let done = function.call(&mut *store, arguments);
        // They are those of this call.
        store.data_mut().peers.clear();
        let done = done.map_err(failure)?;
        if done != 0 {
            return Err(Failure(format!("it returned {done}")));
        }
        left.clear();
        let descriptors = &memory.data(&*store)[*window..][..shown.len() * DESCRIPTOR_BYTES];
        // What most calls leave.
        if !all_pass(descriptors) {
            left.extend_from_slice(descriptors);
        }
        Ok(())
    }
}

/// The state that a module has at an address: that of its bytes, and their number. The error says what is wrong.
fn read_state(memory: &[u8], address: usize) -> Result<&[u8], String> {
    let place = memory.get(address..).and_then(|rest| rest.first_chunk::<8>());
    let state = place.and_then(|place| {
        let word = u64::from_le_bytes(*place);
        let (start, len) = (word as u32 as usize, (word >> 32) as usize);
        memory.get(start..)?.get(..len)
    });
    match state {
        None => Err("its state is outside of its memory".to_owned()),
        Some(state) if state.len() > STATE_BYTES_MAX => {
            Err(format!("its state has more than {STATE_BYTES_MAX} bytes"))
        }
        Some(state) => Ok(state),
    }
}
