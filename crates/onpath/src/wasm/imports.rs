//! What modules may import: calls for the dictionary of their owner, for the time, and for the addresses of clients.
//!
//! Addresses and lengths are the module's: a call whose bytes are not inside its memory is a trap.

use std::net::SocketAddr;
use std::sync::Arc;

use wasmtime::{
    Caller, Error, Extern, ExternType, Func, FuncType, ImportType, Module, Store, StoreLimits,
    ValType,
};

use super::descriptor::DESCRIPTOR_BYTES;
use crate::dictionary::{Dictionary, KEY_BYTES_MAX, Refusal, VALUE_BYTES_MAX};

/// The name of the module that has them.
const MODULE: &str = "serval";
const GET: &str = "dictionary_get";
const SET: &str = "dictionary_set";
const DELETE: &str = "dictionary_delete";
const NOW: &str = "now";
const PEER: &str = "peer";

/// What a call returns for a key that is not there.
const ABSENT: i32 = -1;
const FULL: i32 = -1;
const TOO_LONG: i32 = -2;
/// What it returns if another worker was interrupted while it wrote at the same place.
const BUSY: i32 = -3;

/// The imports: name, parameters, result.
const IMPORTS: [(&str, &[ValType], ValType); 5] = [
    (GET, &[ValType::I32, ValType::I32, ValType::I32, ValType::I32], ValType::I32),
    (SET, &[ValType::I32, ValType::I32, ValType::I32, ValType::I32], ValType::I32),
    (DELETE, &[ValType::I32, ValType::I32], ValType::I32),
    (NOW, &[], ValType::I64),
    (PEER, &[ValType::I32, ValType::I32], ValType::I32),
];

/// A peer in a module's memory: 16 bytes of address, u16 port, u16 family.
const PEER_BYTES: usize = 20;

/// What belongs to an instance.
pub(super) struct Held {
    pub(super) bounds: StoreLimits,
    pub(super) dictionary: Option<Arc<Dictionary>>,
    /// The time at which the last call for a batch began.
    pub(super) now_ns: u64,
    /// Of the messages of a call, by their descriptors; only if the module asks for them.
    pub(super) peers: Vec<Option<SocketAddr>>,
    /// Where the descriptors begin.
    pub(super) window: usize,
}

/// The names of all imports, as part of a sentence.
pub(super) fn names() -> String {
    let names = IMPORTS.iter().map(|(name, ..)| format!("{MODULE}.{name}"));
    names.collect::<Vec<_>>().join(", ")
}

/// Whether a module uses the dictionary.
pub(super) fn uses_dictionary(module: &Module) -> bool {
    module.imports().any(|import| matches!(import.name(), GET | SET | DELETE))
}

/// Whether a module asks for the addresses of clients.
pub(super) fn asks_for_peers(module: &Module) -> bool {
    module.imports().any(|import| import.name() == PEER)
}

/// Whether a module may have this import.
pub(super) fn is_known(import: &ImportType<'_>) -> bool {
    let ExternType::Func(wanted) = import.ty() else { return false };
    let known = IMPORTS.iter().find(|(name, ..)| *name == import.name());
    import.module() == MODULE
        && known.is_some_and(|(_, params, result)| {
            let right = FuncType::new(wanted.engine(), params.to_vec(), [result.clone()]);
            wanted.matches(&right)
        })
}

/// The imports of a module, in their order.
pub(super) fn of(store: &mut Store<Held>, module: &Module) -> Vec<Extern> {
    let import = |import: ImportType<'_>| match import.name() {
        GET => Func::wrap(&mut *store, get),
        SET => Func::wrap(&mut *store, set),
        NOW => Func::wrap(&mut *store, |caller: Caller<'_, Held>| caller.data().now_ns),
        PEER => Func::wrap(&mut *store, peer),
        _ => Func::wrap(&mut *store, delete),
    };
    module.imports().map(import).map(Extern::Func).collect()
}

/// The memory of the module.
fn memory_of<'a>(caller: &'a mut Caller<'_, Held>) -> Result<(&'a mut [u8], &'a mut Held), Error> {
    let memory = caller.get_export("memory").and_then(Extern::into_memory);
    let memory = memory.ok_or_else(|| Error::msg("it has no memory"))?;
    Ok(memory.data_and_store_mut(caller))
}

/// Writes the peer of the message with this descriptor; its family.
fn peer(mut caller: Caller<'_, Held>, descriptor: u32, to: u32) -> Result<i32, Error> {
    let (memory, held) = memory_of(&mut caller)?;
    let at = (descriptor as usize).checked_sub(held.window);
    let index = at.filter(|at| at % DESCRIPTOR_BYTES == 0).map(|at| at / DESCRIPTOR_BYTES);
    let found = index.and_then(|index| held.peers.get(index));
    let found = found.ok_or_else(|| Error::msg("it asks for the peer of what is no message"))?;
    let mut bytes = [0; PEER_BYTES];
    let family: u16 = match found {
        None => 0,
        Some(SocketAddr::V4(address)) => {
            bytes[..4].copy_from_slice(&address.ip().octets());
            4
        }
        Some(SocketAddr::V6(address)) => {
            bytes[..16].copy_from_slice(&address.ip().octets());
            6
        }
    };
    bytes[16..18].copy_from_slice(&found.map_or(0, |address| address.port()).to_le_bytes());
    bytes[18..].copy_from_slice(&family.to_le_bytes());
    range(memory, to, PEER_BYTES as u32)?;
    memory[to as usize..][..PEER_BYTES].copy_from_slice(&bytes);
    Ok(i32::from(family))
}

/// The memory of the module and its dictionary.
fn parts<'a>(caller: &'a mut Caller<'_, Held>) -> Result<(&'a mut [u8], Arc<Dictionary>), Error> {
    let (bytes, held) = memory_of(caller)?;
    let dictionary = held.dictionary.clone();
    let right = "it has no dictionary: name one with `dictionary`";
    Ok((bytes, dictionary.ok_or_else(|| Error::msg(right))?))
}

fn range(memory: &[u8], address: u32, len: u32) -> Result<&[u8], Error> {
    let bytes = memory.get(address as usize..).and_then(|rest| rest.get(..len as usize));
    bytes.ok_or_else(|| Error::msg("it names bytes that are outside of its memory"))
}

/// The length of a value, of which as much is copied as there is room for.
fn get(
    mut caller: Caller<'_, Held>,
    key: u32,
    key_len: u32,
    value: u32,
    room: u32,
) -> Result<i32, Error> {
    let (memory, dictionary) = parts(&mut caller)?;
    range(memory, value, room)?;
    let mut copy = [0; KEY_BYTES_MAX];
    let key = range(memory, key, key_len)?;
    let Some(copied) = copy.get_mut(..key.len()) else { return Ok(ABSENT) };
    copied.copy_from_slice(key);
    let into = &mut memory[value as usize..][..room as usize];
    let found = dictionary.get(copied, |bytes| {
        let len = bytes.len().min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        bytes.len() as i32
    });
    Ok(found.unwrap_or(ABSENT))
}

fn set(
    mut caller: Caller<'_, Held>,
    key: u32,
    key_len: u32,
    value: u32,
    value_len: u32,
) -> Result<i32, Error> {
    let (memory, dictionary) = parts(&mut caller)?;
    let (key, value) = (range(memory, key, key_len)?, range(memory, value, value_len)?);
    debug_assert!(VALUE_BYTES_MAX <= i32::MAX as usize);
    Ok(match dictionary.set(key, value) {
        Ok(()) => 0,
        Err(Refusal::Full) => FULL,
        Err(Refusal::TooLong) => TOO_LONG,
        Err(Refusal::Busy) => BUSY,
    })
}

fn delete(mut caller: Caller<'_, Held>, key: u32, key_len: u32) -> Result<i32, Error> {
    let (memory, dictionary) = parts(&mut caller)?;
    Ok(match dictionary.delete(range(memory, key, key_len)?) {
        Ok(true) => 0,
        Ok(false) => ABSENT,
        Err(_) => BUSY,
    })
}
