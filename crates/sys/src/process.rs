//! This process and its limits, other processes, and the peer of a Unix socket.

use std::fs;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::affinity;
use crate::os::{check, zeroed};

/// Raises the limit of open descriptors to the hard limit; returns the limit in force.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let mut limit = limit(libc::RLIMIT_NOFILE)?;
    if limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: `limit` outlives the call.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    }
    Ok(limit.rlim_cur)
}

/// Soft and hard limit of open descriptors.
pub fn descriptor_limit() -> (u64, u64) {
    limit(libc::RLIMIT_NOFILE).map_or((0, 0), |limit| (limit.rlim_cur, limit.rlim_max))
}

/// Soft and hard limit of locked memory in bytes; `u64::MAX` is unlimited.
pub fn locked_memory_limit() -> (u64, u64) {
    limit(libc::RLIMIT_MEMLOCK).map_or((0, 0), |limit| (limit.rlim_cur, limit.rlim_max))
}

fn limit(resource: libc::__rlimit_resource_t) -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call.
    check(unsafe { libc::getrlimit(resource, &raw mut limit) })?;
    Ok(limit)
}

/// The process at the other end of a Unix socket, as the host kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id at the time of connecting.
    pub process: u32,
    /// Effective user id.
    pub user: u32,
    /// Effective group id.
    pub group: u32,
}

/// The credentials of the peer of a connected Unix socket.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<PeerCredentials> {
    // SAFETY: integers, for which zero is a value.
    let mut peer: libc::ucred = unsafe { zeroed() };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: pointer and length describe `peer`, which outlives the call.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    })?;
    // A socket of another family returns zeros and -1.
    let process = u32::try_from(peer.pid).ok().filter(|&process| process != 0);
    let process = process.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTCONN))?;
    Ok(PeerCredentials { process, user: peer.uid, group: peer.gid })
}

/// The supplementary groups that the peer of a connected Unix socket had when it connected.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut len = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: pointer and length describe `groups`, which outlives the call.
        let got = check(unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        });
        let count = len as usize / size_of::<libc::gid_t>();
        match got {
            // The host kernel says how much room it needs.
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && count > groups.len() => {
                groups.resize(count, 0);
            }
            got => {
                got?;
                groups.truncate(count);
                return Ok(groups);
            }
        }
    }
}

/// Soft and hard limit of the length of files that a process writes, in bytes (`RLIMIT_FSIZE`); 0: this one. `u64::MAX` is unlimited. An error if
/// there is no such process.
pub fn file_limit(process: u32) -> io::Result<(u64, u64)> {
    if process == 0 {
        return limit(libc::RLIMIT_FSIZE).map(|limit| (limit.rlim_cur, limit.rlim_max));
    }
    // Every process may read it, and `prlimit` needs CAP_SYS_RESOURCE.
    let text = fs::read_to_string(format!("/proc/{process}/limits"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Max file size"));
    let mut fields = line.unwrap_or_default().split_whitespace();
    let mut next = || match fields.next()? {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    };
    next().zip(next()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Has the host kernel kill this process when the thread that started it ends. If the parent ended before
/// this call, this process is not killed and must notice by other means.
pub fn end_with_parent() -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) })
        .map(|_| ())
}

/// The command's process will run on `cores` (empty: any) and is killed when the thread that starts it
/// ends, for whatever reason. A set-user-ID program is not killed.
pub fn tie(command: &mut Command, cores: &[usize]) {
    let cores = cores.to_vec();
    let starter = std::process::id();
    let tie = move || {
        end_with_parent()?;
        // The parent may have ended before the call, and then no signal would come.
        // SAFETY: no pointers; cannot fail.
        if unsafe { libc::getppid() } != starter as libc::pid_t {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if cores.is_empty() { Ok(()) } else { affinity::set_affinity(&cores) }
    };
    // SAFETY: between fork and exec it makes three system calls and allocates nothing.
    unsafe { command.pre_exec(tie) };
}

/// Limits the command's process to `cpu_seconds` of CPU time, after which it is killed, lowers its priority, and disables its core dumps. A lower limit of this process stays.
pub fn confine(command: &mut Command, cpu_seconds: u32) {
    let confine = move || {
        let most = libc::rlim_t::from(cpu_seconds);
        // At the soft limit SIGXCPU, at the hard one SIGKILL.
        // Workers that poll come first, and leave it a quarter of a core.
        // Added to what it has: a lower priority stays. More nice is always allowed.
        // SAFETY: no pointers.
        unsafe { libc::nice(5) };
        lower(libc::RLIMIT_CPU, most, most + 1)?;
        lower(libc::RLIMIT_CORE, 0, 0)
    };
    // SAFETY: between fork and exec it makes four system calls and allocates nothing.
    unsafe { command.pre_exec(confine) };
}

/// Limits the command's process to `bytes` of address space, and keeps it from writing to files. Pipes and sockets are no files. A lower limit of this process stays.
pub fn confine_memory(command: &mut Command, bytes: u64) {
    let confine = move || {
        lower(libc::RLIMIT_AS, bytes, bytes)?;
        lower(libc::RLIMIT_FSIZE, 0, 0)
    };
    // SAFETY: between fork and exec it makes four system calls and allocates nothing.
    unsafe { command.pre_exec(confine) };
}

/// Lowers a limit of this process to `soft` and `hard`, unless it is lower: only root could raise it.
fn lower(
    resource: libc::__rlimit_resource_t,
    soft: libc::rlim_t,
    hard: libc::rlim_t,
) -> io::Result<()> {
    let before = limit(resource)?;
    let rlim_max = hard.min(before.rlim_max);
    let limit = libc::rlimit { rlim_cur: soft.min(before.rlim_cur).min(rlim_max), rlim_max };
    // SAFETY: `limit` outlives the call.
    check(unsafe { libc::setrlimit(resource, &raw const limit) }).map(drop)
}

/// The name of a signal, such as `SIGSEGV`.
pub fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGHUP => "SIGHUP",
        libc::SIGILL => "SIGILL",
        libc::SIGINT => "SIGINT",
        libc::SIGKILL => "SIGKILL",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGSYS => "SIGSYS",
        libc::SIGTERM => "SIGTERM",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

/// Makes the C library write what code of this process prints to standard output a line at a time, also where that is no terminal: a
/// process that is killed loses nothing that it printed before. To be called before anything is printed.
pub fn print_lines() {
    unsafe extern "C" {
        #[link_name = "stdout"]
        static C_STDOUT: *mut libc::FILE;
    }
    // SAFETY: the C library has initialised the stream before `main`, and nothing has used it yet. Without a buffer of ours it keeps its own.
    unsafe { libc::setvbuf(C_STDOUT, std::ptr::null_mut(), libc::_IOLBF, 0) };
}

/// From now on standard output is standard error: what kernels print goes there, line by line, and never between the lines of a
/// program's own output. Returns the former standard output.
pub fn divert_output() -> io::Result<OwnedFd> {
    let former = io::stdout().as_fd().try_clone_to_owned()?;
    print_lines();
    // SAFETY: no pointers; both descriptors are open for as long as the process runs.
    check(unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) })?;
    Ok(former)
}

/// Ends this process immediately: nothing is flushed and no exit handlers run.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: no pointers; does not return.
    unsafe { libc::_exit(code) }
}

/// Asks a process to terminate (SIGTERM).
pub fn terminate(process: u32) -> io::Result<()> {
    let process = process_id(process)?;
    // SAFETY: no pointers.
    check(unsafe { libc::kill(process, libc::SIGTERM) }).map(|_| ())
}

/// Asks a process to reload its configuration (SIGHUP).
pub fn reload(process: u32) -> io::Result<()> {
    let process = process_id(process)?;
    // SAFETY: no pointers.
    check(unsafe { libc::kill(process, libc::SIGHUP) }).map(|_| ())
}

/// Whether a child of this process has ended. It is not reaped, so its process id is not reused yet.
pub fn child_has_ended(process: u32) -> io::Result<bool> {
    // SAFETY: integers and a union of them, for which zero is a value.
    let mut found: libc::siginfo_t = unsafe { zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `found` outlives the call.
    check(unsafe { libc::waitid(libc::P_PID, process, &raw mut found, flags) })?;
    // SAFETY: waitid filled in the fields of SIGCHLD, or left the number of the process at zero.
    Ok(unsafe { found.si_pid() } != 0)
}

/// Kills every process of a process group (SIGKILL).
pub fn kill_group(group: u32) -> io::Result<()> {
    let group = process_id(group)?;
    // SAFETY: no pointers.
    check(unsafe { libc::kill(-group, libc::SIGKILL) }).map(|_| ())
}

/// Rejects zero, one and negative numbers, which would address several processes, or all.
fn process_id(process: u32) -> io::Result<libc::pid_t> {
    let process = libc::pid_t::try_from(process).ok().filter(|&process| process > 1);
    process.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

/// Where a program is, as a shell would find it.
pub fn find_program(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;

    let is_program = |path: &PathBuf| {
        path.metadata()
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(is_program);
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(is_program)
}

/// A number that differs in a process and in its forks, so that a value which remembers it can tell that it was copied by `fork`.
///
/// A process that was made without the C library's handlers of `fork` (`vfork`, `posix_spawn`, `clone`) has its parent's number.
pub fn fork_generation() -> u64 {
    static GENERATION: AtomicU64 = AtomicU64::new(0);
    static HANDLER: Once = Once::new();
    extern "C" fn count() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    HANDLER.call_once(|| {
        // SAFETY: the handler runs in a process that `fork` has just made, and touches one atomic word. It fails only without memory,
        // and then forks go unnoticed.
        unsafe { libc::pthread_atfork(None, None, Some(count)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

/// The effective user of this process.
pub fn user() -> u32 {
    // SAFETY: no pointers; cannot fail.
    unsafe { libc::geteuid() }
}

/// The effective group of this process.
pub fn group() -> u32 {
    // SAFETY: no pointers; cannot fail.
    unsafe { libc::getegid() }
}

/// Resident memory of this process in bytes (VmRSS).
pub fn resident_bytes() -> u64 {
    kib_field("/proc/self/status", "VmRSS:").unwrap_or(0) << 10
}

/// Memory the host can allocate without swapping, in bytes (MemAvailable); `u64::MAX` if not reported.
pub fn memory_available_bytes() -> u64 {
    kib_field("/proc/meminfo", "MemAvailable:").map_or(u64::MAX, |kib| kib << 10)
}

/// Descriptors this process has open.
pub fn open_descriptors() -> usize {
    // Reading the directory opens one descriptor itself.
    fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1))
}

fn kib_field(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_tied_process_ends_with_the_thread_that_started_it() {
        let core = affinity::allowed_cores().unwrap()[0];
        let start = move || {
            let mut command = Command::new("sleep");
            tie(command.arg("600"), &[core]);
            let child = command.spawn().unwrap();
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
            assert!(status.contains(&format!("Cpus_allowed_list:\t{core}\n")), "{status}");
            child
        };
        let mut child = std::thread::spawn(start).join().unwrap();
        let killed = std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap());
        assert_eq!(killed, Some(libc::SIGKILL));
        let mut command = Command::new("true");
        tie(&mut command, &[usize::MAX]);
        assert!(command.spawn().is_err(), "there is no such core");
    }

    #[test]
    fn a_fork_has_another_generation() {
        let before = fork_generation();
        // SAFETY: the child makes no call but those that a fork of several threads may make.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = if fork_generation() == before { 1 } else { 42 };
            // SAFETY: no pointers; it does not return.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: writes one integer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42, "{status:#x}");
        assert_eq!(fork_generation(), before);
    }

    #[test]
    fn the_limit_of_file_lengths_of_a_process_is_known() {
        let own = file_limit(0).unwrap();
        assert_eq!(file_limit(std::process::id()).unwrap(), own);
        let mut child =
            Command::new("prlimit").args(["--fsize=4096:8192", "sleep", "600"]).spawn().unwrap();
        while file_limit(child.id()).unwrap() == own {
            std::thread::yield_now();
        }
        assert_eq!(file_limit(child.id()).unwrap(), (4096, 8192));
        child.kill().unwrap();
        let ended = child.id();
        child.wait().unwrap();
        assert!(file_limit(ended).is_err());
    }

    #[test]
    fn the_descriptor_limit_reaches_the_hard_limit() {
        let raised = raise_descriptor_limit().unwrap();
        assert_eq!(descriptor_limit(), (raised, raised));
    }

    #[test]
    fn a_unix_peer_is_known_and_others_are_not() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = peer_credentials(a.as_fd()).unwrap();
        assert_eq!((peer.process, peer.user), (std::process::id(), user()));
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(peer_credentials(udp.as_fd()).is_err());
    }

    #[test]
    fn processes_are_asked_to_end_and_groups_are_killed() {
        use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
        let sleep = || {
            let mut command = std::process::Command::new("sleep");
            command.arg("60").process_group(0).spawn().unwrap()
        };
        let mut child = sleep();
        terminate(child.id()).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
        let mut child = sleep();
        assert!(!child_has_ended(child.id()).unwrap());
        kill_group(child.id()).unwrap();
        while !child_has_ended(child.id()).unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(
            child.wait().unwrap().signal(),
            Some(libc::SIGKILL),
            "the child was not reaped before"
        );
        assert!(child_has_ended(child.id()).is_err());
        for invalid in [0, 1, u32::MAX, 1 << 31] {
            for refused in [terminate(invalid), kill_group(invalid)] {
                assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::ESRCH));
            }
        }
    }

    #[test]
    fn a_process_has_the_limits_that_it_was_given_and_lower_ones_stay() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "ulimit -t; ulimit -v; ulimit -f; ulimit -c"]);
        confine(&mut command, 20);
        confine_memory(&mut command, 1 << 30);
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert_eq!(said, "20\n1048576\n0\n0\n");
        // As `confine` does when this process has lower limits itself.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "ulimit -t; ulimit -v"]);
        for seconds in [10, 30] {
            confine(&mut command, seconds);
            confine_memory(&mut command, u64::from(seconds) << 26);
        }
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert_eq!(said, format!("10\n{}\n", 10 << 16));
    }

    #[test]
    fn usage_is_read_from_the_host() {
        assert!(resident_bytes() > 100 << 10);
        assert!(memory_available_bytes() > 0);
        let before = open_descriptors();
        let _file = fs::File::open("/proc/self/status").unwrap();
        // Other tests open and close descriptors concurrently, so only a lower bound is certain.
        assert!(before >= 3 && open_descriptors() >= 3);
    }
}
