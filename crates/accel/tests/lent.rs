//! Memory of a GPU that the calling program lends for copies, without a GPU: with the fake driver (`kernels/fake_driver.cpp`).

mod common;
mod fake;

use std::path::Path;
use std::time::Duration;

use accel::cuda::{Gpu, LentError, Ready, StagedArray, gpu_at};
use fake::driver;
use mqueue::staging::Direction;
use mqueue::staging::Staging as _;

/// The program that lends its memory: what it does with the driver itself.
struct Program {
    library: libloading::Library,
}

macro_rules! call {
    ($program:expr, $name:literal ($($argument:expr => $type:ty),*)) => {{
        // SAFETY: `fake_driver.cpp` defines it so, and the arguments are its earlier results.
        let code = unsafe {
            $program.library.get::<unsafe extern "C" fn($($type),*) -> i32>($name).unwrap()($($argument),*)
        };
        assert_eq!(code, 0);
    }};
}

impl Program {
    fn new(library: &Path) -> Self {
        // SAFETY: it runs no code as it is loaded.
        let library = unsafe { libloading::Library::new(library) }.unwrap();
        let program = Self { library };
        let mut context = 0;
        call!(program, "cuDevicePrimaryCtxRetain"(&mut context => *mut usize, 0 => i32));
        program
    }

    fn end(self) {
        // The driver ends the process if anything else is left.
        call!(self, "cuDevicePrimaryCtxRelease_v2"(0 => i32));
    }

    fn allocate(&self, data: &[u8]) -> u64 {
        let mut address = 0;
        call!(self, "cuMemAlloc_v2"(&mut address => *mut u64, data.len() => usize));
        // SAFETY: the fake driver's memory is memory of this process.
        unsafe { std::ptr::copy(data.as_ptr(), address as *mut u8, data.len()) };
        address
    }

    fn content(&self, address: u64, bytes: usize) -> Vec<u8> {
        // SAFETY: as above; nothing writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec()
    }

    fn free(&self, address: u64) {
        call!(self, "cuMemFree_v2"(address => u64));
    }

    fn set_context(&self, context: usize) {
        call!(self, "cuCtxSetCurrent"(context => usize));
    }

    fn context(&self) -> usize {
        let mut context = 0;
        call!(self, "cuCtxGetCurrent"(&mut context => *mut usize));
        context
    }
}

fn slots(library: &Path, gpu: u32) -> StagedArray {
    StagedArray::slots(Gpu::open_for_copies(gpu, Some(library)).unwrap(), 3, 256).unwrap()
}

fn lend(
    slots: &mut StagedArray,
    address: u64,
    bytes: usize,
    ready: Ready,
) -> Result<(), LentError> {
    // SAFETY: every test frees its memory after it has been taken back.
    unsafe { slots.lend(address, bytes, ready) }
}

const PATIENCE: Duration = Duration::from_secs(60);

fn pattern(seed: usize) -> Vec<u8> {
    (0..1000).map(|at| ((at + seed) * 7 % 251) as u8).collect()
}

#[test]
fn memory_that_is_lent_is_copied_and_never_freed() {
    let (library, _) = driver("lent");
    let program = Program::new(&library);
    let address = program.allocate(&pattern(0));
    program.set_context(7);
    let mut slots = slots(&library, gpu_at(address, Some(&library)).unwrap());
    for (from, bytes) in [(0, 1000), (16, 900), (999, 1), (1000, 0)] {
        lend(&mut slots, address + from as u64, bytes, Ready::Now).unwrap_or_else(|error| {
            // An empty array may be anywhere, also behind its allocation.
            assert!(bytes == 0, "{error}");
        });
        if bytes == 0 {
            continue;
        }
        assert_eq!(slots.bytes(), bytes);
        let mut back = vec![0; bytes];
        slots.read(&mut back).unwrap();
        assert!(back == program.content(address + from as u64, bytes));
        slots.write(&pattern(from)[..bytes]).unwrap();
        assert!(slots.take_back(PATIENCE));
        assert_eq!(slots.bytes(), 0);
        assert!(program.content(address + from as u64, bytes) == pattern(from)[..bytes]);
    }
    // Outside of the range nothing has changed.
    assert!(program.content(address, 16) == pattern(0)[..16]);
    lend(&mut slots, address, 1000, Ready::Now).unwrap();
    slots.begin(Direction::Out, 0, 0..256).unwrap();
    drop(slots);
    assert_eq!(program.context(), 7, "the thread has its own context again");
    program.free(address);
    program.end();
}

#[test]
fn an_address_that_is_not_the_callers_memory_is_refused_in_one_sentence() {
    let (library, _) = driver("lent-refusals");
    let program = Program::new(&library);
    let address = program.allocate(&pattern(0));
    let freed = program.allocate(&pattern(0));
    program.free(freed);
    let mut slots = slots(&library, 0);
    let mut refused = |address: u64, bytes: usize, part: &str| {
        let found = gpu_at(address, Some(&library));
        let error = found.and_then(|_| lend(&mut slots, address, bytes, Ready::Now)).unwrap_err();
        let sentence = error.to_string();
        assert!(sentence.contains(part) && sentence.contains("give an array"), "{sentence}");
        assert_eq!(slots.bytes(), 0);
    };
    for unknown in [0, 8, freed, u64::MAX, address - 1] {
        refused(unknown, 8, "is no memory of a GPU");
    }
    let ends = format!("ends at {:#x}", address + 1000);
    for (from, bytes) in [(0, 1001), (1, 1000), (999, 2), (0, usize::MAX), (500, usize::MAX)] {
        let address = address + from as u64;
        let error = lend_error(&library, address, bytes);
        assert!(error.contains(&ends) && error.contains("give one that lies in"), "{error}");
    }
    // Pinned memory of the host.
    let mut host = vec![0u8; 4096];
    call!(program, "cuMemHostRegister_v2"(host.as_mut_ptr() => *mut u8, 4096 => usize, 0 => u32));
    refused(host.as_ptr() as u64, 8, "is host memory");
    call!(program, "cuMemHostUnregister"(host.as_mut_ptr() => *mut u8));
    // A sound one is still taken.
    lend(&mut slots, address, 1000, Ready::Now).unwrap();
    assert!(slots.take_back(PATIENCE));
    drop(slots);
    program.free(address);
    program.end();
}

/// The error with slots that exist for nothing else.
fn lend_error(library: &Path, address: u64, bytes: usize) -> String {
    let gpu = gpu_at(address, Some(library)).unwrap_or(0);
    lend(&mut slots(library, gpu), address, bytes, Ready::Now).unwrap_err().to_string()
}

#[test]
fn memory_of_another_kind_context_or_gpu_is_refused() {
    for (behaviour, part) in [
        ("managed-lent", "is managed memory"),
        ("foreign-lent", "belongs to another context"),
        ("second-lent", "is memory of GPU 1, not of GPU 0"),
    ] {
        let (library, _) = driver(behaviour);
        let program = Program::new(&library);
        let address = program.allocate(&pattern(0));
        let found = gpu_at(address, Some(&library));
        assert_eq!(
            found.as_ref().ok(),
            (behaviour != "managed-lent").then_some(&u32::from(behaviour == "second-lent"))
        );
        let mut slots = slots(&library, 0);
        let error = found.and_then(|_| lend(&mut slots, address, 8, Ready::Now)).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
        drop(slots);
        program.free(address);
        program.end();
    }
}

/// A copy out of the memory comes after what the caller's stream has been given.
#[test]
fn copies_come_after_the_callers_stream() {
    let (library, _) = driver("lent-streams");
    let program = Program::new(&library);
    let address = program.allocate(&pattern(0));
    let (mut stream, mut event) = (0, 0);
    call!(program, "cuStreamCreate"(&mut stream => *mut usize, 1 => u32));
    call!(program, "cuEventCreate"(&mut event => *mut usize, 2 => u32));
    let mut slots = slots(&library, 0);
    let mut host = pattern(1);
    call!(program, "cuMemHostRegister_v2"(host.as_mut_ptr() => *mut u8, 1000 => usize, 0 => u32));
    for (round, ready) in
        [Ready::Now, Ready::Stream(stream), Ready::Event(event)].into_iter().enumerate()
    {
        host.copy_from_slice(&pattern(round + 1));
        call!(program, "cuMemcpyHtoDAsync_v2"(
            address => u64, host.as_ptr() => *const u8, 1000 => usize, stream => usize));
        call!(program, "cuEventRecord"(event => usize, stream => usize));
        lend(&mut slots, address, 1000, ready).unwrap();
        let mut back = vec![0; 1000];
        slots.read(&mut back).unwrap();
        assert!(slots.take_back(PATIENCE));
        // Without an order the copy of the caller's stream has not been made yet.
        let expected = if ready == Ready::Now { pattern(0) } else { pattern(round + 1) };
        assert!(back == expected, "{ready:?}");
        call!(program, "cuStreamSynchronize"(stream => usize));
    }
    // The default streams.
    for stream in [1, 2] {
        lend(&mut slots, address, 1000, Ready::Stream(stream)).unwrap();
        assert!(slots.take_back(PATIENCE));
    }
    drop(slots);
    call!(program, "cuMemHostUnregister"(host.as_mut_ptr() => *mut u8));
    call!(program, "cuEventDestroy_v2"(event => usize));
    call!(program, "cuStreamDestroy_v2"(stream => usize));
    program.free(address);
    program.end();
}

/// What a copy that does not end may use is never released: the driver would end this process.
#[test]
fn memory_of_a_copy_that_does_not_end_is_not_given_back() {
    let (library, _) = driver("stuck-lent");
    let program = Program::new(&library);
    let address = program.allocate(&pattern(0));
    let mut slots = slots(&library, 0);
    lend(&mut slots, address, 1000, Ready::Now).unwrap();
    slots.begin(Direction::Out, 1, 0..256).unwrap();
    assert!(!slots.take_back(Duration::from_millis(20)));
    assert_eq!(slots.bytes(), 1000);
    drop(slots);
}
