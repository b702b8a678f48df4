//! The report of a kernel that crashes, before the process ends.
//!
//! A host kernel that accesses a wrong address, divides by zero or exhausts its stack ends its process by a signal. This module handles
//! SIGSEGV, SIGBUS, SIGFPE and SIGILL: if the thread that caused one was in a block, a line on standard error names the service, the
//! block, the kernel and the signal. Then the previously installed handler runs, so that the process ends with its usual
//! status, and so that other code (Rust's own report of stack overflows, a WebAssembly runtime) can handle the same signals.
//!
//! The handler runs on a stack of its own, calls only functions that signal-safety(7) allows, and never waits: if standard error
//! cannot take the line, it is lost.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;

/// The signals for faults of a thread, with their descriptions.
const SIGNALS: [(c_int, &str); 4] = [
    (libc::SIGSEGV, "SIGSEGV, invalid memory access"),
    (libc::SIGBUS, "SIGBUS, access to missing memory"),
    (libc::SIGFPE, "SIGFPE, arithmetic such as a division by zero"),
    (libc::SIGILL, "SIGILL, invalid instruction"),
];
/// Longest line; names are truncated.
const LINE_BYTES: usize = 512;
const _: () = assert!(LINE_BYTES <= libc::PIPE_BUF);
const NAME_BYTES_MAX: usize = 160;
const ALTERNATE_STACK_BYTES: usize = 64 << 10;
/// [`Scene::running`] between two blocks.
pub(crate) const NO_BLOCK: u32 = u32::MAX;

/// The blocks of a thread, as the handler sees them.
pub(crate) struct Scene {
    pub(crate) service: String,
    pub(crate) kernel: String,
    /// The running block, as an index into `blocks`.
    pub(crate) running: Cell<u32>,
    /// The blocks by their numbers in the region.
    pub(crate) blocks: Box<[u32]>,
    /// Address of the first guard page, distance to the next, and bytes of each.
    pub(crate) guards: (usize, usize, usize),
    pub(crate) stack_bytes: usize,
}

thread_local! {
    // Without a destructor, so without lazy initialisation.
    static SCENE: Cell<*const Scene> = const { Cell::new(ptr::null()) };
    static ALTERNATE: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, blocks of a scene may run on this thread.
pub(crate) struct OnScene(*const Scene);

impl OnScene {
    /// The scene must not move until this is dropped; the borrow of its owner ensures that.
    #[inline]
    pub(crate) fn enter(scene: *const Scene) -> Self {
        Self(SCENE.replace(scene))
    }
}

impl Drop for OnScene {
    #[inline]
    fn drop(&mut self) {
        SCENE.set(self.0);
    }
}

/// The previously installed actions, in the order of [`SIGNALS`].
static mut PREVIOUS: [MaybeUninit<libc::sigaction>; SIGNALS.len()] =
    [const { MaybeUninit::uninit() }; SIGNALS.len()];

/// Must be called on every thread that runs blocks, before the first block.
pub(crate) fn watch_this_thread() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(install);
    if !ALTERNATE.replace(true) {
        give_alternate_stack();
    }
}

fn install() {
    for (at, (signal, _)) in SIGNALS.iter().enumerate() {
        // SAFETY: all zeros are a valid action; the relevant fields are set.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: PREVIOUS is written here only, before the handler can run.
        unsafe {
            libc::sigemptyset(&mut action.sa_mask);
            let previous = (&raw mut PREVIOUS[at]).cast::<libc::sigaction>();
            libc::sigaction(*signal, ptr::null(), previous);
            libc::sigaction(*signal, &action, ptr::null_mut());
        }
    }
}

/// Gives a thread without an alternate signal stack one, permanently: Rust's own threads have one.
fn give_alternate_stack() {
    // SAFETY: queries the current one, and sets one with no other user.
    unsafe {
        let mut present: libc::stack_t = MaybeUninit::zeroed().assume_init();
        if libc::sigaltstack(ptr::null(), &mut present) != 0
            || present.ss_flags & libc::SS_DISABLE == 0
        {
            return;
        }
        let stack = libc::mmap(
            ptr::null_mut(),
            ALTERNATE_STACK_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if stack != libc::MAP_FAILED {
            let given = libc::stack_t { ss_sp: stack, ss_flags: 0, ss_size: ALTERNATE_STACK_BYTES };
            libc::sigaltstack(&given, ptr::null_mut());
        }
    }
}

extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(at) = SIGNALS.iter().position(|(known, _)| *known == signal) else { return };
    // One line at most.
    let scene = SCENE.replace(ptr::null());
    // SAFETY: the function that set it has not returned yet, and the host kernel passes every handler an info.
    let (scene, code, address) =
        unsafe { (scene.as_ref(), (*info).si_code, (*info).si_addr().addr()) };
    // A signal sent by kill(2) is not a kernel's fault.
    let block = scene.and_then(|scene| scene.blocks.get(scene.running.get() as usize));
    if let (Some(scene), Some(block), true) = (scene, block, code > 0) {
        let mut line = Line::new();
        let (first, stride, bytes) = scene.guards;
        let guard = first.wrapping_add(scene.running.get() as usize * stride);
        let guard = guard..guard.wrapping_add(bytes);
        let overflow = signal != libc::SIGFPE && signal != libc::SIGILL && guard.contains(&address);
        line.text(if overflow {
            "serval: stack overflow in block "
        } else {
            "serval: crash in block "
        });
        line.number((*block).into(), 10);
        line.text(" of service \"");
        line.name(&scene.service);
        line.text("\", kernel \"");
        line.name(&scene.kernel);
        line.text("\": ");
        line.text(SIGNALS[at].1);
        line.text(" at address 0x");
        line.number(address as u64, 16);
        if overflow {
            line.text("; the block has ");
            line.number(scene.stack_bytes as u64 >> 10, 10);
            line.text(" KiB of stack: raise stack_kib of its accelerator");
        }
        line.text("\n");
        line.write();
    }
    // SAFETY: written by install().
    let previous = unsafe { (&raw const PREVIOUS[at]).cast::<libc::sigaction>().read() };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: the default action; the faulting instruction is executed again and ends the process. A signal that
            // was sent has no such instruction: it is sent again, and arrives when this returns.
            unsafe {
                let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &action, ptr::null_mut());
                if code <= 0 {
                    libc::raise(signal);
                }
            }
        }
        function if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the handler with three arguments that was installed before, with this call's arguments.
            unsafe {
                std::mem::transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(
                    function,
                )(signal, info, context);
            }
        }
        function => {
            // SAFETY: as above, with one argument.
            unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(function)(signal) }
        }
    }
}

/// A line that is built without an allocation.
struct Line {
    bytes: [u8; LINE_BYTES],
    len: usize,
}

impl Line {
    fn new() -> Self {
        Self { bytes: [0; LINE_BYTES], len: 0 }
    }

    fn byte(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.len) {
            *place = byte;
            self.len += 1;
        }
    }

    fn text(&mut self, text: &str) {
        text.bytes().for_each(|byte| self.byte(byte));
    }

    /// A name, only its end if it is long, without control characters.
    fn name(&mut self, name: &str) {
        let bytes = name.as_bytes();
        for &byte in &bytes[bytes.len().saturating_sub(NAME_BYTES_MAX)..] {
            self.byte(if byte.is_ascii_control() { b'?' } else { byte });
        }
    }

    fn number(&mut self, mut number: u64, base: u64) {
        let mut digits = [0; 20];
        let mut from = digits.len();
        loop {
            from -= 1;
            digits[from] = b"0123456789abcdef"[(number % base) as usize];
            number /= base;
            if number == 0 {
                break;
            }
        }
        digits[from..].iter().for_each(|digit| self.byte(*digit));
    }

    /// Writes to standard error unless that would block; a full pipe takes nothing.
    fn write(&self) {
        let flags = libc::O_WRONLY | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        // SAFETY: only async-signal-safe calls, with this line's bytes. Reopening the file gives it flags of its own, which do not
        // affect other writers; a socket cannot be reopened, and gets MSG_DONTWAIT. What can be neither reopened nor
        // sent to (a pipe after a change of user) is polled for room; a write of at most PIPE_BUF then
        // blocks only if another writer takes the room first.
        unsafe {
            // A regular file never blocks. Writing through the engine's own open file moves the shared position:
            // otherwise the engine's next line would overwrite this one.
            let mut found: libc::stat = MaybeUninit::zeroed().assume_init();
            if libc::fstat(libc::STDERR_FILENO, &mut found) == 0
                && found.st_mode & libc::S_IFMT == libc::S_IFREG
            {
                libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len);
                return;
            }
            let file = libc::open(c"/proc/self/fd/2".as_ptr(), flags);
            if file >= 0 {
                libc::write(file, self.bytes.as_ptr().cast(), self.len);
                libc::close(file);
            } else {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                let sent =
                    libc::send(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len, flags);
                let mut stderr =
                    libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
                if sent < 0
                    && *libc::__errno_location() == libc::ENOTSOCK
                    && libc::poll(&mut stderr, 1, 0) == 1
                    && stderr.revents == libc::POLLOUT
                {
                    libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len);
                }
            }
        }
    }
}
