//! A process that is isolated, in which a hostile kernel tries everything. The test starts itself as that process.

use std::process::{Command, Stdio};

use sys::isolation::{isolate, start_without_rights};

const TRIES: &str = "SERVAL_TEST_ISOLATED";

fn refused(what: &str, done: i64) {
    let error = std::io::Error::last_os_error().raw_os_error();
    let expected = if what == "clone3" { libc::ENOSYS } else { libc::EPERM };
    assert_eq!((done, error), (-1, Some(expected)), "{what}");
}

/// What a hostile kernel tries; `victim` is another process of the same user.
#[allow(unsafe_code)]
fn attack(victim: i32) {
    let word = 0u64;
    let span = libc::iovec { iov_base: (&raw const word).cast_mut().cast(), iov_len: 8 };
    // SAFETY: the calls are refused before they use an argument; pointers are valid nevertheless.
    unsafe {
        for family in [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX, libc::AF_NETLINK] {
            refused("socket", libc::socket(family, libc::SOCK_STREAM, 0).into());
        }
        refused("ptrace", libc::ptrace(libc::PTRACE_ATTACH, victim, 0, 0));
        let read = libc::process_vm_readv(victim, &raw const span, 1, &raw const span, 1, 0);
        refused("process_vm_readv", read as i64);
        refused("kill", libc::kill(victim, libc::SIGKILL).into());
        refused("kill all", libc::kill(-1, libc::SIGKILL).into());
        refused("tgkill", libc::syscall(libc::SYS_tgkill, victim, victim, libc::SIGKILL));
        refused("pidfd_open", libc::syscall(libc::SYS_pidfd_open, victim, 0));
        refused("fork", libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0));
        refused("clone3", libc::syscall(libc::SYS_clone3, &raw const span, 64));
        let path = c"/bin/true".as_ptr();
        refused("execve", libc::execv(path, [path, std::ptr::null()].as_ptr()).into());
        refused("unshare", libc::unshare(libc::CLONE_NEWUSER).into());
        refused("setuid", libc::setuid(0).into());
        let limit = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
        let set = libc::syscall(libc::SYS_prlimit64, victim, libc::RLIMIT_CPU, &raw const limit, 0);
        refused("prlimit", set);
        refused("io_uring", libc::syscall(libc::SYS_io_uring_setup, 8, &raw const span));
    }
    // Its memory cannot be opened either: it may not be traced.
    let memory = std::fs::File::open(format!("/proc/{victim}/mem"));
    assert!(memory.is_err(), "the victim's memory cannot be opened");
    // What kernels need works: threads, memory, time, files.
    assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
    assert!(!vec![1u8; 64 << 20].is_empty() && std::fs::read("/proc/self/status").is_ok());
}

/// Isolates itself and attacks the process in the variable; or waits, as a victim.
#[test]
fn the_isolated_process() {
    let Ok(role) = std::env::var(TRIES) else { return };
    isolate().unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    if role == "victim" {
        println!("isolated");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        return;
    }
    attack(role.parse().unwrap());
    println!("attacked");
}

#[test]
fn an_isolated_process_reaches_neither_the_network_nor_another_one_of_its_user() {
    use std::io::{BufRead as _, BufReader};
    let start = |role: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_isolated_process", "--nocapture"]).env(TRIES, role);
        start_without_rights(&mut command, None, false);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    };
    let mut victim = start("victim");
    let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("isolated")), "it has isolated itself");
    let attacker = start(&victim.id().to_string()).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&attacker.stdout).into_owned();
    assert!(attacker.status.success() && said.contains("attacked"), "{said}");
    drop(victim.stdin.take());
    assert!(victim.wait().unwrap().success(), "the victim has noticed nothing");
}
