//! Cores: which ones this process may use, and pinning a thread to one.

use std::fs;
use std::io;

use crate::os::{check, zeroed};

/// The cores this thread may run on, ascending.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    // SAFETY: a bit set, for which zero is a value.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    // SAFETY: `set` has the length given and outlives the call; thread 0 is the caller.
    check(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) })?;
    let cores = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: the index is below CPU_SETSIZE.
    Ok(cores.filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect())
}

/// Whether this process may pin a thread to `core`. [`allowed_cores`] does not answer that: `taskset`, systemd's
/// `CPUAffinity` and `isolcpus` restrict the default mask, but a thread may still pin itself to an excluded core.
pub fn is_usable(core: usize) -> bool {
    // Tried on a temporary thread. If no thread can be started, the core counts as usable.
    let tried = std::thread::Builder::new().spawn(move || set_affinity(&[core]).is_ok());
    tried.map_or(true, |thread| thread.join().unwrap_or(true))
}

/// Pins the calling thread to `core`. Fails with `InvalidInput` for a core this process may not
/// use.
pub fn pin_current_thread(core: usize) -> io::Result<()> {
    match set_affinity(&[core]) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            let why =
                format!("core {core} is not usable here: `serval doctor` lists those that are");
            Err(io::Error::new(io::ErrorKind::InvalidInput, why))
        }
        other => other,
    }
}

/// Restricts the calling thread to these cores. Returns the plain OS error and allocates nothing.
pub(crate) fn set_affinity(cores: &[usize]) -> io::Result<()> {
    // SAFETY: a bit set, for which zero is a value.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    for &core in cores {
        if core >= libc::CPU_SETSIZE as usize {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: the index is below CPU_SETSIZE.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    // SAFETY: `set` has the length given and outlives the call; thread 0 is the caller.
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) }).map(|_| ())
}

/// The core the calling thread runs on at this moment.
pub fn current_core() -> usize {
    // SAFETY: no pointers.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// NUMA nodes that are online; `[0]` where the host does not say.
pub fn numa_nodes() -> Vec<u32> {
    let listed = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    let nodes = parse_list(&listed);
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// Parses the host kernel's list form, `0-3,8`.
fn parse_list(list: &str) -> Vec<u32> {
    let mut members = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            members.extend(first..=last);
        }
    }
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_to_every_allowed_core_and_to_no_other() {
        let cores = allowed_cores().unwrap();
        assert!(!cores.is_empty());
        std::thread::spawn(move || {
            for &core in &cores {
                pin_current_thread(core).unwrap();
                assert_eq!(current_core(), core);
                assert_eq!(allowed_cores().unwrap(), [core]);
                // Also from a thread that is not allowed to run on them.
                assert!(cores.iter().all(|other| is_usable(*other)));
            }
            for core in [1023, 1024, usize::MAX] {
                let error = pin_current_thread(core).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
                assert!(!is_usable(core));
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn lists_of_the_host_kernel() {
        assert_eq!(parse_list("0\n"), [0]);
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list(""), []);
    }
}
