//! What modules may import: calls for the dictionary of their owner.
//!
//! Addresses and lengths are the module's: a call whose bytes are not inside its memory is a trap.

use std::sync::Arc;

use wasmtime::{Caller, Error, Extern, ExternType, Func, ImportType, Module, Store, StoreLimits};

use crate::dictionary::{Dictionary, KEY_BYTES_MAX, Refusal, VALUE_BYTES_MAX};

/// The name of the module that has them.
const MODULE: &str = "serval";
const GET: &str = "dictionary_get";
const SET: &str = "dictionary_set";
const DELETE: &str = "dictionary_delete";

/// What a call returns for a key that is not there.
const ABSENT: i32 = -1;
const FULL: i32 = -1;
const TOO_LONG: i32 = -2;
/// What it returns if another worker was interrupted while it wrote at the same place.
const BUSY: i32 = -3;

/// What belongs to an instance.
pub(super) struct Held {
    pub(super) bounds: StoreLimits,
    pub(super) dictionary: Option<Arc<Dictionary>>,
}

/// Whether a module may have this import.
pub(super) fn is_known(import: &ImportType<'_>) -> bool {
    let count = match import.name() {
        GET | SET => 4,
        DELETE => 2,
        _ => return false,
    };
    let ExternType::Func(wanted) = import.ty() else { return false };
    let mut all = wanted.params().chain(wanted.results());
    import.module() == MODULE
        && wanted.params().len() == count
        && wanted.results().len() == 1
        && all.all(|of| of.is_i32())
}

/// The imports of a module, in their order.
pub(super) fn of(store: &mut Store<Held>, module: &Module) -> Vec<Extern> {
    let import = |import: ImportType<'_>| match import.name() {
        GET => Func::wrap(&mut *store, get),
        SET => Func::wrap(&mut *store, set),
        _ => Func::wrap(&mut *store, delete),
    };
    module.imports().map(import).map(Extern::Func).collect()
}

/// The memory of the module and its dictionary.
fn parts<'a>(caller: &'a mut Caller<'_, Held>) -> Result<(&'a mut [u8], Arc<Dictionary>), Error> {
    let memory = caller.get_export("memory").and_then(Extern::into_memory);
    let memory = memory.ok_or_else(|| Error::msg("it has no memory"))?;
    let (bytes, held) = memory.data_and_store_mut(caller);
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
