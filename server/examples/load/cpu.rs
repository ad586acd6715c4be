//! What the system knows of a process, and which core runs which.

use anyhow::Context as _;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::time::Duration;

/// The time that all threads of a process have been on a core, for themselves and in the kernel.
pub(crate) fn time(pid: u32) -> anyhow::Result<Duration> {
    let file = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&file).with_context(|| file.clone())?;
    Ok(span(ticks(&stat).with_context(|| format!("{file}: no user and system time"))?))
}

fn span(ticks: u64) -> Duration {
    Duration::from_micros(ticks * 1_000_000 / rustix::param::clock_ticks_per_second())
}

/// User and system time, the 14th and 15th fields. The second is a name in brackets, with any character in it.
fn ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// The time that all cores together have been busy, with whatever.
pub(crate) fn busy() -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    Ok(span(busy_ticks(&stat).context("/proc/stat: no line of all cores")?))
}

/// Of user, nice, system, idle, iowait, irq, softirq, steal: all but the two in which nothing ran.
fn busy_ticks(stat: &str) -> Option<u64> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(8).enumerate();
    fields.filter(|(at, _)| ![3, 4].contains(at)).map(|(_, ticks)| ticks.parse::<u64>().ok()).sum()
}

/// The memory of a process that is in RAM, in bytes.
pub(crate) fn resident(pid: u32) -> anyhow::Result<u64> {
    let file = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&file).with_context(|| file.clone())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kilobytes.with_context(|| format!("{file}: no VmRSS"))? * 1024)
}

/// Which cores run what. On a machine with one core nothing is pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cores {
    /// The server's own.
    pub(crate) server: Option<usize>,
    /// This program's.
    pub(crate) load: Option<usize>,
    /// Redis has one of its own where there are three, else that of this program.
    pub(crate) redis: Option<usize>,
}

impl Cores {
    /// Of the cores that this process may use.
    pub(crate) fn here() -> io::Result<Self> {
        let allowed = sched_getaffinity(None)?;
        let allowed: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        Ok(Self::of(&allowed))
    }

    fn of(allowed: &[usize]) -> Self {
        match *allowed {
            [server, load, redis, ..] => Self { server: Some(server), load: Some(load), redis: Some(redis) },
            [server, load] => Self { server: Some(server), load: Some(load), redis: Some(load) },
            _ => Self::default(),
        }
    }
}

/// Keeps this thread, and what it starts from now on, to one core.
pub(crate) fn pin(core: usize) -> io::Result<()> {
    let mut only = CpuSet::new();
    only.set(core);
    Ok(sched_setaffinity(None, &only)?)
}

/// Starts something on one core, which it inherits from this thread.
pub(crate) fn on<T>(core: Option<usize>, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(core) = core else { return start() };
    let before = sched_getaffinity(None)?;
    pin(core)?;
    let started = start();
    sched_setaffinity(None, &before)?;
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_read_whatever_the_process_is_called() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 9 0 0 0 17 25 0 0 20 0 2 0 100 1 2 3";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("42 (a) S 1"), None);
    }

    #[test]
    fn cores_are_busy_when_they_do_not_wait() {
        assert_eq!(busy_ticks("cpu  1 2 4 1000 1000 8 16 32 5 5\ncpu0 9"), Some(63));
        assert_eq!(busy_ticks("intr 5"), None);
        assert!(busy().is_ok());
    }

    #[test]
    fn this_process_takes_memory_and_knows_its_time() {
        let pid = std::process::id();
        assert!(resident(pid).unwrap() > 0);
        assert!(time(pid).is_ok());
    }

    #[test]
    fn the_server_shares_its_core_with_nobody() {
        assert_eq!(Cores::of(&[3]), Cores::default());
        let two = Cores::of(&[3, 5]);
        assert_eq!((two.server, two.load, two.redis), (Some(3), Some(5), Some(5)));
        let four = Cores::of(&[0, 1, 2, 3]);
        assert_eq!((four.server, four.load, four.redis), (Some(0), Some(1), Some(2)));
    }
}
