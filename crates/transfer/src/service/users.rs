//! The processes of other users, which make the system calls of their transfers: how many there
//! are, and when they start and end ([`UserProcess`]).

use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sys::isolation::Identity;

use crate::command::error::CallError;
use crate::engine::fair_share::is_within_share;
use crate::run::user_process::{LOOK_INTERVAL, UserProcess, UserProgram};

/// Processes at a time; as many can be being ended.
const PROCESSES_MAX: usize = 32;
/// Those of one user: its programs may differ in groups and limits.
const OF_USER_MAX: usize = 4;
/// A process without a transfer ends after this time.
const IDLE_MAX: Duration = Duration::from_secs(10);
/// Processes of one user that are started within [`IDLE_MAX`]. Each start copies the tables of the engine's memory, and a user can end its processes.
const STARTS_MAX: usize = 8;
/// One that has been used since is not ended for another one of its user: programs that change their limits start no more than a few processes a second.
const KEPT_MIN: Duration = Duration::from_secs(1);
/// How long the end of a service waits for its processes.
const END_LIMIT: Duration = Duration::from_secs(1);

struct Known {
    /// Number of the user's tenant.
    tenant: u32,
    identity: Identity,
    process: Arc<UserProcess>,
    child: Child,
    used: Instant,
}

/// The processes of an engine's users.
pub(crate) struct Users {
    /// `None`: there are none, and other users are refused.
    program: Option<UserProgram>,
    known: Vec<Known>,
    /// Killed, and not seen to have ended; with their users.
    ending: Vec<(u32, Child)>,
    /// Which users' processes were started when, in the last [`IDLE_MAX`].
    starts: Vec<(u32, Instant)>,
}

impl Users {
    pub(crate) fn new(program: Option<UserProgram>) -> Self {
        Self { program, known: Vec::new(), ending: Vec::new(), starts: Vec::new() }
    }

    /// Why no other user is served, whatever tenant it has.
    pub(crate) fn refusal(&self) -> Option<&'static str> {
        if sys::process::user() != 0 {
            return Some(
                "only an engine of root serves users of tenants: it starts a process of each; run it as root, or ask as its user",
            );
        }
        let why = "this transfer engine serves processes of its own user only";
        self.program.is_none().then_some(why)
    }

    /// The process with these rights, which is started if there is none.
    pub(crate) fn process(
        &mut self,
        (tenant, identity): (u32, &Identity),
        now: Instant,
    ) -> Result<Arc<UserProcess>, CallError> {
        let usable = |known: &&mut Known| {
            known.identity == *identity && !known.process.is_broken() && !known.process.only_hangs()
        };
        if let Some(known) = self.known.iter_mut().find(usable) {
            known.used = now;
            return Ok(known.process.clone());
        }
        let Some(program) = &self.program else {
            return Err(CallError::Process(self.refusal().unwrap_or_default().to_owned()));
        };
        let program = program.clone();
        self.look(now);
        let user = identity.user;
        let is_of_user = |known: &Known| known.identity.user == user;
        let of_user = self.known.iter().filter(|known| is_of_user(known)).count();
        let ending = self.ending.iter().filter(|(of, _)| *of == user).count();
        let has_place = of_user < OF_USER_MAX || self.end_one(is_of_user, now);
        if !has_place || ending >= OF_USER_MAX {
            let why = format!(
                "user {user} has {OF_USER_MAX} processes for transfers, one for each group and limit of its programs, which is the limit: wait until one has ended"
            );
            return Err(CallError::Process(why));
        }
        let has_place = self.known.len() < PROCESSES_MAX || self.end_one(|_| true, now);
        if !has_place || self.ending.len() >= PROCESSES_MAX {
            let why = format!(
                "{PROCESSES_MAX} processes execute transfers of users, which is the limit: wait until one has ended"
            );
            return Err(CallError::Process(why));
        }
        let of_tenant = self.known.iter().filter(|known| known.tenant == tenant).count() as u64;
        let all = self.known.len() as u64;
        let is_of_tenant = |known: &Known| known.tenant == tenant;
        let has_place = is_within_share(1, of_tenant, all, PROCESSES_MAX as u64, 1);
        if !has_place && !self.end_one(is_of_tenant, now) {
            let why = format!(
                "{of_tenant} processes execute transfers of users of this tenant, and the rest is for those of others: wait until one has ended"
            );
            return Err(CallError::Process(why));
        }
        self.starts.retain(|(_, at)| now.saturating_duration_since(*at) < IDLE_MAX);
        if self.starts.iter().filter(|(of, _)| *of == user).count() >= STARTS_MAX {
            let why = format!(
                "{STARTS_MAX} processes for transfers of user {user} were started in {} s, which is the limit: wait, and end none of them",
                IDLE_MAX.as_secs()
            );
            return Err(CallError::Process(why));
        }
        self.starts.push((user, now));
        let (process, child) = UserProcess::start(&program, identity).map_err(|error| {
            let why = format!("a process of user {user} cannot be started: {error}");
            CallError::Process(why)
        })?;
        let (process, identity) = (Arc::new(process), identity.clone());
        self.known.push(Known { tenant, identity, process: process.clone(), child, used: now });
        Ok(process)
    }

    /// Ends the one of these without a transfer that was used longest ago; returns whether there was one.
    fn end_one(&mut self, of: impl Fn(&Known) -> bool, now: Instant) -> bool {
        let is_kept = |known: &Known| now.saturating_duration_since(known.used) < KEPT_MIN;
        let idle = self.known.iter().enumerate();
        let idle =
            idle.filter(|(_, known)| of(known) && known.process.is_idle() && !is_kept(known));
        let Some((at, _)) = idle.min_by_key(|(_, known)| known.used) else { return false };
        self.end(at);
        true
    }

    fn end(&mut self, at: usize) {
        let Known { mut child, identity, process, .. } = self.known.swap_remove(at);
        // Fails only if it has ended.
        let _ = child.kill();
        process.give_up();
        self.ending.push((identity.user, child));
    }

    /// Ends processes that have had nothing to do for long, that broke, and those in which only calls hang: the engine's threads that wait for these return.
    pub(crate) fn look(&mut self, now: Instant) {
        for at in (0..self.known.len()).rev() {
            let known = &mut self.known[at];
            if !known.process.is_idle() {
                known.used = now;
            }
            let has_ended = !matches!(known.child.try_wait(), Ok(None));
            let is_over = now.saturating_duration_since(known.used) >= IDLE_MAX;
            let process = &known.process;
            if has_ended || is_over || process.is_broken() || process.only_hangs() {
                self.end(at);
            }
        }
        self.forget_ended();
    }

    fn forget_ended(&mut self) {
        self.ending.retain_mut(|(_, child)| matches!(child.try_wait(), Ok(None)));
    }

    /// When [`Self::look`] is to be called next.
    pub(crate) fn next_look(&self) -> Option<Duration> {
        let is_empty = self.known.is_empty() && self.ending.is_empty();
        (!is_empty).then_some(LOOK_INTERVAL)
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        while !self.known.is_empty() {
            self.end(0);
        }
        let deadline = Instant::now() + END_LIMIT;
        // One that a file holds stays until the host kernel lets it go.
        while !self.ending.is_empty() && Instant::now() < deadline {
            self.forget_ended();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::user_process::{Operation, Remote};

    /// Processes that do nothing.
    fn users() -> Option<Users> {
        if sys::process::user() != 0 {
            eprintln!("SKIPPED: only root can start processes of other users");
            return None;
        }
        let (path, arguments) = ("/bin/sleep".into(), vec!["600".into()]);
        Some(Users::new(Some(UserProgram { path, arguments, environment: Vec::new() })))
    }

    fn identity(user: u32, file_bytes: u64) -> Identity {
        let file_bytes = (file_bytes, u64::MAX);
        Identity { user, group: user, groups: Vec::new(), file_bytes }
    }

    #[test]
    fn processes_are_bounded_and_end_when_they_are_idle() {
        let Some(mut users) = users() else { return };
        let began = Instant::now();
        assert_eq!(users.refusal(), None);
        let one = users.process((60_000, &identity(60_000, 1)), began).unwrap();
        let again = users.process((60_000, &identity(60_000, 1)), began).unwrap();
        assert!(Arc::ptr_eq(&one, &again));
        // A user has some, one of each kind of program, and no more for a while.
        for bytes in 2..=OF_USER_MAX as u64 {
            users.process((60_000, &identity(60_000, bytes)), began).unwrap();
        }
        let refused = users.process((60_000, &identity(60_000, 100)), began).err().unwrap();
        assert!(refused.to_string().contains("4 processes"), "{refused}");
        // Of those without a transfer, the one that was used longest ago makes room.
        one.begin();
        let later = began + KEPT_MIN;
        users.process((60_000, &identity(60_000, 3)), later).unwrap();
        users.process((60_000, &identity(60_000, 100)), later).unwrap();
        let known = |users: &Users| -> Vec<u64> {
            users.known.iter().map(|known| known.identity.file_bytes.0).collect()
        };
        let mut left = known(&users);
        left.sort_unstable();
        assert_eq!(left, [1, 3, 4, 100]);
        // All users together.
        for user in 1..=(PROCESSES_MAX - OF_USER_MAX) as u32 {
            users.process((60_000 + user, &identity(60_000 + user, 1)), later).unwrap();
        }
        users.process((70_000, &identity(70_000, 1)), later).unwrap();
        assert!(!known(&users).contains(&4), "it was used longest ago");
        let refused = users.process((70_001, &identity(70_001, 1)), later).err().unwrap();
        assert!(refused.to_string().contains("32 processes"), "{refused}");
        // Idle ones end, and the one with a transfer stays until it has none.
        users.look(later + IDLE_MAX);
        assert_eq!(known(&users), [1]);
        one.answered();
        users.look(later + 2 * IDLE_MAX - Duration::from_millis(1));
        assert_eq!(known(&users), [1]);
        users.look(later + 2 * IDLE_MAX);
        assert_eq!(known(&users), [0; 0]);
        while users.next_look().is_some() {
            users.look(later);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_tenant_leaves_processes_for_others() {
        let Some(mut users) = users() else { return };
        let now = Instant::now();
        let mut of_tenant = 0;
        let refused = loop {
            let identity = identity(60_000 + of_tenant, 1);
            match users.process((1, &identity), now) {
                Ok(process) => process.begin(),
                Err(error) => break error.to_string(),
            }
            of_tenant += 1;
        };
        assert_eq!(of_tenant as usize, PROCESSES_MAX / 2);
        assert!(refused.contains("users of this tenant"), "{refused}");
        users.process((2, &identity(70_000, 1)), now).unwrap();
    }

    #[test]
    fn a_process_that_ends_or_cannot_start_is_replaced() {
        let Some(mut users) = users() else { return };
        let now = Instant::now();
        let one = users.process((60_000, &identity(60_000, 1)), now).unwrap();
        users.known[0].child.kill().unwrap();
        while users.known.len() == 1 {
            users.look(now);
        }
        assert!(!Arc::ptr_eq(&one, &users.process((60_000, &identity(60_000, 1)), now).unwrap()));
        users.program = Some(UserProgram {
            path: "/nowhere".into(),
            arguments: Vec::new(),
            environment: Vec::new(),
        });
        let refused = users.process((60_000, &identity(60_000, 2)), now).err().unwrap().to_string();
        assert!(
            refused.starts_with("a process of user 60000 cannot be started: No such"),
            "{refused}"
        );
    }

    #[test]
    fn a_user_that_ends_its_processes_gets_no_more_than_a_few() {
        let Some(mut users) = users() else { return };
        let now = Instant::now();
        let mut next = |now| {
            let process = users.process((60_000, &identity(60_000, 1)), now)?;
            users.known[0].child.kill().unwrap();
            while users.known.len() == 1 {
                users.look(now);
            }
            Ok::<_, CallError>(process)
        };
        for _ in 0..STARTS_MAX {
            next(now).unwrap();
        }
        let refused = next(now).err().unwrap().to_string();
        assert!(refused.starts_with("8 processes"), "{refused}");
        next(now + IDLE_MAX).unwrap();
    }

    /// A call whose transfer has been given up holds a thread of the engine until the process ends.
    #[test]
    fn a_process_in_which_only_calls_hang_ends_and_its_calls_return() {
        let Some(mut users) = users() else { return };
        let now = Instant::now();
        let process = users.process((60_000, &identity(60_000, 1)), now).unwrap();
        process.begin();
        let mut remote = Remote::new(&process);
        let call =
            std::thread::spawn(move || remote.give(Operation::Send, &[], b"bytes").unwrap_err());
        users.look(now + 10 * IDLE_MAX);
        assert_eq!(users.known.len(), 1, "its caller waits");
        process.answered();
        users.look(now);
        assert_eq!(users.known.len(), 0);
        let why = call.join().unwrap().to_string();
        assert!(why.contains("user 60000") && why.contains("has ended"), "{why}");
        assert!(process.is_broken());
    }
}
