//! Isolation of a process that runs foreign kernels: what it may ask the host kernel for.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::os::check;
use crate::process::end_with_parent;

/// `struct seccomp_data`: the number of the call, the architecture, and the low halves of its arguments.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;
/// `AUDIT_ARCH_X86_64`, `AUDIT_ARCH_AARCH64`.
#[cfg(target_arch = "x86_64")]
const OWN_ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const OWN_ARCHITECTURE: u32 = 0xc000_00b7;
/// Calls of the x32 interface have this bit.
const X32: u32 = 0x4000_0000;

/// Calls that are refused with `EPERM`: network, other processes, other programs, other namespaces, the machine.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_by_handle_at,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_shmget,
    libc::SYS_msgget,
    libc::SYS_semget,
    libc::SYS_mq_open,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_fanotify_init,
    libc::SYS_quotactl,
    libc::SYS_acct,
    libc::SYS_swapon,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setpriority,
];
/// As above; they exist on x86-64 only.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[libc::c_long] =
    &[libc::SYS_fork, libc::SYS_vfork, libc::SYS_ioperm, libc::SYS_iopl, libc::SYS_modify_ldt];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[libc::c_long] = &[];

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

fn refuse(error: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | error as u32
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn load(at: u32) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at)
}

fn end(with: u32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, with)
}

/// The next `skip` instructions are for values that are as `kind` says.
fn unless(kind: u32, k: u32, skip: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | kind | libc::BPF_K) as u16, jt: 0, jf: skip, k }
}

/// The filter of this process.
fn filter(own: u32) -> Vec<libc::sock_filter> {
    let equal = libc::BPF_JEQ;
    let mut program = vec![
        load(ARCHITECTURE),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 1,
            jf: 0,
            k: OWN_ARCHITECTURE,
        },
        end(KILL),
        load(NUMBER),
        unless(libc::BPF_JGE, X32, 1),
        end(KILL),
    ];
    for call in REFUSED.iter().chain(REFUSED_HERE) {
        program.extend([unless(equal, *call as u32, 1), end(refuse(libc::EPERM))]);
    }
    // The C library falls back to `clone`, whose flags can be read here.
    program.extend([unless(equal, libc::SYS_clone3 as u32, 1), end(refuse(libc::ENOSYS))]);
    let thread = libc::CLONE_THREAD as u32;
    program.extend([
        unless(equal, libc::SYS_clone as u32, 4),
        load(FIRST_ARGUMENT),
        unless(libc::BPF_JSET, thread, 1),
        end(ALLOW),
        end(refuse(libc::EPERM)),
    ]);
    // Signals go to threads of this process only, limits are those of this process.
    for (call, of) in [(libc::SYS_tgkill, own), (libc::SYS_prlimit64, 0)] {
        program.extend([
            unless(equal, call as u32, 4),
            load(FIRST_ARGUMENT),
            unless(equal, of, 1),
            end(ALLOW),
            end(refuse(libc::EPERM)),
        ]);
    }
    program.push(end(ALLOW));
    program
}

/// No other process of this user may read or write this one's memory, or trace it; it leaves no core dump.
pub fn forbid_inspection() -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0 as libc::c_ulong) }).map(drop)
}

/// The command's process starts without the rights of root over other processes and the machine, and cannot gain any: root keeps its own files only.
/// With a `user` it is that user's, and in no group but the one with the same number; only root can start it. If it then [enters
/// namespaces](enter_namespaces) as root, it keeps until then what the host kernel asks for a user namespace with root in it.
pub fn start_without_rights(command: &mut Command, user: Option<u32>, enters_namespaces: bool) {
    let keeps = if enters_namespaces { 1 << CAP_SETFCAP } else { 0 };
    let drop = move || {
        user.map_or(Ok(()), |user| become_user(user, user, &[]))?;
        // A process that does not have it fails when it enters them, and says why.
        if keeps == 0 || keep_capabilities(keeps).is_err() {
            keep_capabilities(0)?;
        }
        gain_nothing()
    };
    // SAFETY: between fork and exec it makes a few system calls and allocates nothing.
    unsafe { command.pre_exec(drop) };
}

/// With whose rights a process acts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its user.
    pub user: u32,
    /// Its group.
    pub group: u32,
    /// Its supplementary groups.
    pub groups: Vec<u32>,
    /// Soft and hard limit of the length of files that it writes, in bytes (`RLIMIT_FSIZE`); `u64::MAX`: none.
    pub file_bytes: (u64, u64),
}

/// The variable of the environment that names the identity of [`start_for`].
const IDENTITY: &str = "SERVAL_IDENTITY";

/// The command's process has these limits, inherits no descriptor but standard streams, gains no rights by what it executes, and leaves no core dump. It is still root's, and calls [`become_started`] first.
/// A process that had the user's rights before its program runs could be stopped by the user there, and its starter would wait for it without end.
/// Only root can start it.
pub fn start_for(command: &mut Command, identity: &Identity) {
    let Identity { user, group, groups, file_bytes: (soft, hard) } = identity;
    let (soft, hard) = (*soft, *hard);
    let numbers = [std::process::id(), *user, *group];
    let numbers: Vec<String> = numbers.iter().chain(groups).map(u32::to_string).collect();
    command.env(IDENTITY, numbers.join(" "));
    let start = move || {
        let limits = [(libc::RLIMIT_FSIZE, soft, hard), (libc::RLIMIT_CORE, 0, 0)];
        for (which, soft, hard) in limits {
            let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
            // SAFETY: `limit` outlives the call.
            check(unsafe { libc::setrlimit(which, &raw const limit) })?;
        }
        // Nothing but standard streams stays open, also if this process was started with descriptors that its own programs inherit.
        // SAFETY: no pointers.
        let closed =
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        if closed != 0 {
            return Err(io::Error::last_os_error());
        }
        gain_nothing()
    };
    // SAFETY: between fork and exec it makes a few system calls and allocates nothing.
    unsafe { command.pre_exec(start) };
}

/// This process, which [`start_for`] started and which has one thread, acts as that user from now on: with its groups and without capabilities. Other
/// processes of the user cannot inspect it. It is killed when the thread that started it ends.
pub fn become_started() -> io::Result<()> {
    let numbers = std::env::var(IDENTITY).map_err(io::Error::other)?;
    let numbers: Result<Vec<u32>, _> = numbers.split(' ').map(str::parse).collect();
    let numbers = numbers.map_err(io::Error::other)?;
    let [starter, user, group, groups @ ..] = &numbers[..] else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    become_user(*user, *group, groups)?;
    forbid_inspection()?;
    keep_capabilities(0)?;
    // Another user clears what `process::tie` has set.
    end_with_parent()?;
    // SAFETY: no pointers; cannot fail.
    match unsafe { libc::getppid() } == *starter as libc::pid_t {
        true => Ok(()),
        // The parent has ended, and then no signal would come.
        false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
    }
}

fn become_user(user: u32, group: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: pointer and length describe `groups`.
    check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
    // SAFETY: no pointers.
    check(unsafe { libc::setresgid(group, group, group) })?;
    // SAFETY: no pointers.
    check(unsafe { libc::setresuid(user, user, user) }).map(drop)
}

/// Namespaces that a process has of its own, besides that of users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// No other process exists for it.
    pub pid: bool,
    /// It writes no file.
    pub mount: bool,
    /// It shares no memory by name.
    pub ipc: bool,
}

/// Moves this process, which must have one thread, into namespaces of its own, where it has no rights that others do not have. With `pid` the
/// calling process only waits for a child, which returns: it ends as the child does, and the child ends with it.
pub fn enter_namespaces(own: Namespaces) -> io::Result<()> {
    // SAFETY: no pointers; neither can fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let chosen = [
        (own.pid, libc::CLONE_NEWPID),
        (own.mount, libc::CLONE_NEWNS),
        (own.ipc, libc::CLONE_NEWIPC),
    ];
    let flags = chosen.iter().filter(|(chosen, _)| *chosen).map(|(_, flag)| flag);
    let flags = flags.fold(libc::CLONE_NEWUSER, |all, flag| all | flag);
    // SAFETY: no pointers.
    check(unsafe { libc::unshare(flags) })?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    if own.mount {
        mount_read_only()?;
    }
    if own.pid {
        go_on_as_child()?;
    }
    keep_capabilities(0)
}

/// All file systems become read-only, and what is mounted elsewhere does not appear.
fn mount_read_only() -> io::Result<()> {
    #[repr(C)]
    struct Attributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    const READ_ONLY: u64 = 1;
    let attributes =
        Attributes { set: READ_ONLY, clear: 0, propagation: libc::MS_PRIVATE, user_namespace: 0 };
    // SAFETY: a path with its end, and a structure with its length; both outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            c"/".as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<Attributes>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns in a child, which is the first process of its namespace.
fn go_on_as_child() -> io::Result<()> {
    // SAFETY: the process has one thread, so the child may do what this one may.
    let child = check(unsafe { libc::fork() })?;
    if child == 0 {
        return end_with_parent();
    }
    end_with_parent()?;
    // Signals of a terminal are the engine's, which ends the child in order.
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: no handler is set.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // The other end of the child's connection must see that the child closes it.
    // SAFETY: nothing uses a descriptor afterwards.
    unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0) };
    let mut status = 0;
    // SAFETY: `status` outlives the calls.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } != child {}
    // SAFETY: no pointers. The process ends here, as its child has.
    unsafe {
        if libc::WIFSIGNALED(status) {
            let signal = libc::WTERMSIG(status);
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        libc::_exit(libc::WEXITSTATUS(status))
    }
}

/// Programs that this process starts get no rights that it does not have.
fn gain_nothing() -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1 as libc::c_ulong, 0, 0, 0) }).map(drop)
}

/// From now on all threads of this process can neither use the network nor other processes, start programs, change their user or namespace, nor
/// gain rights. Sockets that are open stay. This cannot be undone.
pub fn isolate() -> io::Result<()> {
    forbid_inspection()?;
    let limits = [(libc::RLIMIT_CORE, 0), (libc::RLIMIT_NOFILE, 1024)];
    for (which, most) in limits {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` outlives both calls.
        check(unsafe { libc::getrlimit(which, &raw mut limit) })?;
        let most = limit.rlim_max.min(most);
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: as above.
        check(unsafe { libc::setrlimit(which, &raw const limit) })?;
    }
    gain_nothing()?;
    let mut program = filter(std::process::id());
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: `program` and what it points to outlive the call, which copies them.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    match done {
        0 => Ok(()),
        // The number of a thread that could not be synchronised.
        1.. => Err(io::Error::other("a thread has a filter of its own")),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Which lets a process map root of its own user namespace to root outside, since Linux 5.12.
const CAP_SETFCAP: u32 = 31;

/// This process has these of its capabilities, a bit each, and no others.
fn keep_capabilities(kept: u32) -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        process: i32,
    }
    /// `_LINUX_CAPABILITY_VERSION_3`: low and high halves of the effective, the permitted and the inheritable ones.
    const VERSION: u32 = 0x2008_0522;
    let mut header = Header { version: VERSION, process: 0 };
    let sets = [[kept, kept, 0], [0; 3]];
    // SAFETY: both have the layout of the version and outlive the call.
    let done = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
