//! The binary interface between Serval and a function on the path of messages, for Rust: what `serval_function.h` is for C.
//!
//! A function implements [`Function`], and `serval_function!(Type)` exports it; one that sees replies as well implements [`Replies`], and
//! `serval_function!(Type, replies)` exports it. Compiled for wasm32-unknown-unknown as a `cdylib`.
#![allow(dead_code)]

use std::ffi::{CStr, c_char};

/// The descriptor of a message.
#[repr(C)]
pub struct Message {
    payload: *const u8,
    length: u32,
    verdict: u32,
    argument: u32,
    written: *const u8,
    written_length: u32,
}

/// How the values of a register on several workers become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Merge {
    /// The sum, modulo 2^64.
    Sum = 0,
    /// The least.
    Min = 1,
    /// The greatest.
    Max = 2,
    /// Commands and params write it on every worker.
    Setting = 3,
}

/// The messages of one call, counted from 0. Each passes unless the function decides otherwise.
pub struct Batch<'a> {
    messages: &'a mut [Message],
    scratch: &'a mut [u8],
    used: usize,
}

impl Batch<'_> {
    /// How many messages.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The bytes of a message.
    pub fn payload(&self, index: usize) -> &[u8] {
        let message = &self.messages[index];
        // SAFETY: the host has put that many bytes there, and nothing writes them during the call: scratch memory is elsewhere.
        unsafe { std::slice::from_raw_parts(message.payload, message.length as usize) }
    }

    /// The connection of a message that is a chunk of a byte stream, before anything is decided about it: a number that no other connection of this
    /// worker has.
    pub fn connection(&self, index: usize) -> Option<u64> {
        let message = &self.messages[index];
        let number = u64::from(message.argument) | u64::from(message.written_length) << 32;
        (number != 0).then_some(number)
    }

    /// The address of the client that sent a message, or that gets it. `None`: it is unknown, as over shared memory, or if the connection has ended.
    #[cfg(target_arch = "wasm32")]
    pub fn peer(&self, index: usize) -> Option<std::net::SocketAddr> {
        use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
        let mut found = Peer { address: [0; 16], port: 0, family: 0 };
        // SAFETY: the host writes a peer there, and the descriptor is one of the running call.
        let family = unsafe { peer(&self.messages[index], &mut found) };
        let [a, b, c, d, ..] = found.address;
        match family {
            4 => Some(SocketAddr::from((Ipv4Addr::new(a, b, c, d), found.port))),
            6 => Some(SocketAddr::from((Ipv6Addr::from(found.address), found.port))),
            _ => None,
        }
    }

    /// The time at which the call began, in nanoseconds of the engine's monotonic clock; it has no relation to the time of day.
    #[cfg(target_arch = "wasm32")]
    pub fn now_ns(&self) -> u64 {
        // SAFETY: it takes nothing.
        unsafe { now() }
    }

    /// It is dropped as `function_drop`.
    pub fn drop(&mut self, index: usize) {
        self.messages[index].verdict = 1;
    }

    /// A request is answered with these bytes; a reply is replaced by them. False: there is no room for them, and it passes unless the
    /// function decides otherwise.
    #[must_use = "without room for the bytes the message passes: decide what becomes of it, or call `reply_or_drop`"]
    pub fn reply(&mut self, index: usize, bytes: &[u8]) -> bool {
        self.write(index, 2, bytes)
    }

    /// As [`Self::reply`], but without room for the bytes the message is dropped: for filters that must let nothing pass which they have not
    /// answered. Returns whether there was room.
    pub fn reply_or_drop(&mut self, index: usize, bytes: &[u8]) -> bool {
        self.or_drop(index, 2, bytes)
    }

    /// These bytes take its place. False: there is no room for them, and it passes as it is unless the function decides otherwise.
    #[must_use = "without room for the bytes the message passes as it is: decide what becomes of it, or call `rewrite_or_drop`"]
    pub fn rewrite(&mut self, index: usize, bytes: &[u8]) -> bool {
        self.write(index, 3, bytes)
    }

    /// As [`Self::rewrite`], but without room for the bytes the message is dropped: for filters that remove something from messages. Returns
    /// whether there was room.
    pub fn rewrite_or_drop(&mut self, index: usize, bytes: &[u8]) -> bool {
        self.or_drop(index, 3, bytes)
    }

    /// A request goes to the mqueue with this number, over all workers.
    pub fn steer(&mut self, index: usize, mqueue: u32) {
        (self.messages[index].verdict, self.messages[index].argument) = (4, mqueue);
    }

    /// A request goes into the ring of the application that made the function.
    pub fn deliver(&mut self, index: usize) {
        self.messages[index].verdict = 5;
    }

    fn or_drop(&mut self, index: usize, verdict: u32, bytes: &[u8]) -> bool {
        let has_room = self.write(index, verdict, bytes);
        if !has_room {
            self.drop(index);
        }
        has_room
    }

    fn write(&mut self, index: usize, verdict: u32, bytes: &[u8]) -> bool {
        let Some(room) = self.scratch[self.used..].get_mut(..bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        let message = &mut self.messages[index];
        (message.written, message.written_length) = (room.as_ptr(), bytes.len() as u32);
        message.verdict = verdict;
        self.used += bytes.len();
        true
    }
}

#[cfg(target_arch = "wasm32")]
#[link(wasm_import_module = "serval")]
unsafe extern "C" {
    fn dictionary_get(key: *const u8, key_length: u32, value: *mut u8, room: u32) -> i32;
    fn dictionary_set(key: *const u8, key_length: u32, value: *const u8, value_length: u32) -> i32;
    fn dictionary_delete(key: *const u8, key_length: u32) -> i32;
    fn now() -> u64;
    fn peer(message: *const Message, peer: *mut Peer) -> i32;
}

/// As the host writes it.
#[repr(C)]
struct Peer {
    address: [u8; 16],
    port: u16,
    family: u16,
}

/// The dictionary that the function names in the configuration: functions of one owner share it, on all workers, and it stays when they are
/// replaced. Keys have up to 64 bytes, values up to 192.
#[cfg(target_arch = "wasm32")]
pub mod dictionary {
    /// Copies the value of a key, as far as there is room. Its length.
    pub fn get(key: &[u8], value: &mut [u8]) -> Option<usize> {
        let room = value.len() as u32;
        // SAFETY: the host reads and writes inside these slices.
        let length =
            unsafe { super::dictionary_get(key.as_ptr(), key.len() as u32, value.as_mut_ptr(), room) };
        usize::try_from(length).ok()
    }

    /// Why a value is not stored, or a key not removed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Refusal {
        /// There is no room for another key.
        Full,
        /// The key or the value is too long.
        TooLong,
        /// Another worker was interrupted while it wrote at the same place: the call may be tried again, with a later message.
        Busy,
    }

    /// Stores a value.
    pub fn set(key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let (key_length, length) = (key.len() as u32, value.len() as u32);
        // SAFETY: the host reads inside these slices.
        match unsafe { super::dictionary_set(key.as_ptr(), key_length, value.as_ptr(), length) } {
            0 => Ok(()),
            -1 => Err(Refusal::Full),
            -2 => Err(Refusal::TooLong),
            _ => Err(Refusal::Busy),
        }
    }

    /// Removes a key; whether it was there. It is refused as busy only.
    pub fn delete(key: &[u8]) -> Result<bool, Refusal> {
        // SAFETY: the host reads inside this slice.
        match unsafe { super::dictionary_delete(key.as_ptr(), key.len() as u32) } {
            0 => Ok(true),
            -1 => Ok(false),
            _ => Err(Refusal::Busy),
        }
    }
}

/// A function. Each worker has an instance of its own.
pub trait Function: Default {
    /// The registers, at most 64: their names, of 1 to 31 lower-case letters, digits and `_`.
    const REGISTERS: &'static [(&'static CStr, Merge)] = &[];

    /// Decides about requests.
    fn requests(&mut self, batch: &mut Batch<'_>);

    /// The value of a register.
    fn read(&self, _register: usize) -> u64 {
        0
    }

    /// Writes a setting. False: the value cannot be used.
    fn write(&mut self, _register: usize, _value: u64) -> bool {
        false
    }

    /// Registers that are no settings get their first values.
    fn reset(&mut self) {}
}

/// A function that also sees replies: `serval_function!(Type, replies)`. It is a trait of its own so that replies are never left out by mistake:
/// without the word `replies` such a function does not compile.
pub trait Replies: Function {
    /// Decides about replies.
    fn replies(&mut self, batch: &mut Batch<'_>);
}

/// A register in the table that the host reads.
#[repr(C)]
pub struct Register {
    name: *const c_char,
    merge: u32,
}

/// The table of registers, which ends with one without a name.
pub fn table(registers: &[(&'static CStr, Merge)]) -> *const Register {
    let registers = registers.iter().map(|(name, merge)| (name.as_ptr(), *merge as u32));
    let end = (std::ptr::null(), 0);
    let table = registers.chain([end]).map(|(name, merge)| Register { name, merge });
    table.collect::<Vec<_>>().leak().as_ptr()
}

/// What a call is given.
///
/// # Safety
/// The arguments are those of a call by the host.
pub unsafe fn batch<'a>(
    messages: *mut Message,
    count: u32,
    scratch: *mut u8,
    scratch_bytes: u32,
) -> Batch<'a> {
    // SAFETY: the host gives a call that memory, and descriptors and scratch memory are different parts of it.
    unsafe {
        Batch {
            messages: std::slice::from_raw_parts_mut(messages, count as usize),
            scratch: std::slice::from_raw_parts_mut(scratch, scratch_bytes as usize),
            used: 0,
        }
    }
}

/// Exports a function. With `replies` it sees replies as well ([`Replies`](crate::serval_function::Replies)); without it no call is made for them.
#[macro_export]
macro_rules! serval_function {
    (@batches $export:ident, $trait:ident, $method:ident) => {
        #[unsafe(no_mangle)]
        extern "C" fn $export(
            messages: *mut $crate::serval_function::Message,
            count: u32,
            scratch: *mut u8,
            scratch_bytes: u32,
        ) -> i32 {
            use $crate::serval_function::{$trait as _, batch};
            // SAFETY: the host calls it.
            let mut batch = unsafe { batch(messages, count, scratch, scratch_bytes) };
            INSTANCE.with_borrow_mut(|function| function.$method(&mut batch));
            0
        }
    };
    ($function:ty, replies) => {
        $crate::serval_function!(@exports $function);

        $crate::serval_function!(@batches serval_replies, Replies, replies);
    };
    ($function:ty) => {
        $crate::serval_function!(@exports $function);

        // An inherent constant is found before one of a trait, and this one exists only if the function sees replies.
        const _: () = {
            struct Probe<T>(std::marker::PhantomData<T>);
            trait SeesNone {
                const SEES_REPLIES: bool = false;
            }
            impl<T> SeesNone for Probe<T> {}
            impl<T: $crate::serval_function::Replies> Probe<T> {
                #[allow(dead_code)]
                const SEES_REPLIES: bool = true;
            }
            assert!(
                !<Probe<$function>>::SEES_REPLIES,
                "the function implements Replies: write serval_function!(Type, replies)"
            );
        };
    };
    (@exports $function:ty) => {
        thread_local! {
            // A module has one thread.
            static INSTANCE: std::cell::RefCell<$function> = std::cell::RefCell::default();
        }

        #[unsafe(no_mangle)]
        extern "C" fn serval_abi() -> i32 {
            1 | 2 << 16
        }

        $crate::serval_function!(@batches serval_requests, Function, requests);

        #[unsafe(no_mangle)]
        extern "C" fn serval_registers() -> *const $crate::serval_function::Register {
            use $crate::serval_function::table;
            table(<$function as $crate::serval_function::Function>::REGISTERS)
        }

        #[unsafe(no_mangle)]
        extern "C" fn serval_read(register: u32) -> u64 {
            use $crate::serval_function::Function as _;
            INSTANCE.with_borrow(|function| function.read(register as usize))
        }

        #[unsafe(no_mangle)]
        extern "C" fn serval_write(register: u32, value: u64) -> i32 {
            use $crate::serval_function::Function as _;
            let done = INSTANCE.with_borrow_mut(|f| f.write(register as usize, value));
            if done { 0 } else { -1 }
        }

        #[unsafe(no_mangle)]
        extern "C" fn serval_reset() {
            use $crate::serval_function::Function as _;
            INSTANCE.with_borrow_mut(|function| function.reset());
        }
    };
}
