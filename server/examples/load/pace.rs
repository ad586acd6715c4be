//! When calls begin: as soon as the one before is answered, or at times that heed no answer.
//!
//! The second is an open loop. Its times are fixed before: at random with a mean rate, like calls of many who know
//! nothing of each other. A latency is counted from there even if the call began later because all callers still
//! waited, or else a server that stalls would be asked less just then, and the stall would not be seen.

use anyhow::Context as _;
use async_channel::{Receiver, Sender};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Exp};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;
use tollgate_server::clock::instant;

/// Says to many callers when the next call is to begin.
#[derive(Debug)]
pub(crate) enum Pace {
    /// At once, until then.
    Until(Instant),
    /// At once, so many times.
    Times(AtomicU64),
    /// At the times that come in here.
    At(Receiver<Instant>),
}

impl Pace {
    pub(crate) fn times(times: u64) -> Self {
        Self::Times(AtomicU64::new(times))
    }

    /// So many a second, until then. Needs a tokio runtime.
    pub(crate) fn open(rate: f64, from: Instant, until: Instant) -> anyhow::Result<Self> {
        // Every caller may be busy for a while, and then what is due waits here.
        let (due, next) = async_channel::bounded(1 << 16);
        let schedule = Schedule::new(rate, from, until)?;
        tokio::spawn(announce(schedule, Timer::new()?, due));
        Ok(Self::At(next))
    }

    /// When the next call was to begin, which is not before now. `None`: no more.
    pub(crate) async fn next(&self) -> Option<Instant> {
        match self {
            Self::Until(end) => Some(instant()).filter(|now| now < end),
            Self::Times(left) => {
                let one_less = |left: u64| left.checked_sub(1);
                left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).ok().map(|_| instant())
            }
            Self::At(due) => due.recv().await.ok(),
        }
    }
}

/// Times with a mean rate, each independent of those before: the same ones in every run.
struct Schedule {
    gaps: Exp<f64>,
    rng: SmallRng,
    next: Instant,
    until: Instant,
}

impl Schedule {
    fn new(rate: f64, from: Instant, until: Instant) -> anyhow::Result<Self> {
        let gaps = Exp::new(rate).ok().filter(|_| rate > 0.0).context("a rate is above zero")?;
        Ok(Self { gaps, rng: SmallRng::seed_from_u64(4), next: from, until })
    }
}

impl Iterator for Schedule {
    type Item = Instant;

    fn next(&mut self) -> Option<Instant> {
        self.next += Duration::from_secs_f64(self.gaps.sample(&mut self.rng));
        Some(self.next).filter(|next| *next < self.until)
    }
}

async fn announce(schedule: Schedule, timer: Timer, due: Sender<Instant>) {
    for next in schedule {
        // It fails when nobody listens any more.
        if timer.wait(next).await.is_err() || due.send(next).await.is_err() {
            return;
        }
    }
}

/// tokio's timers are to the millisecond, and a call takes a tenth of that.
struct Timer(AsyncFd<OwnedFd>);

impl Timer {
    #[expect(deprecated, reason = "unsound for what changes its descriptor, and this does not")]
    fn new() -> anyhow::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self(AsyncFd::new(timerfd_create(TimerfdClockId::Monotonic, flags)?)?))
    }

    async fn wait(&self, until: Instant) -> anyhow::Result<()> {
        let wait = until.saturating_duration_since(instant());
        // A wait of nothing would switch the timer off.
        if wait.is_zero() {
            return Ok(());
        }
        let once = Itimerspec { it_interval: Timespec::default(), it_value: Timespec::try_from(wait)? };
        timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::empty(), &once)?;
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_closed_loop_ends_after_its_time_or_its_number() {
        let now = instant();
        assert_eq!(Pace::Until(now).next().await, None);
        assert!(Pace::Until(now + Duration::from_secs(3600)).next().await.is_some());
        let twice = Pace::times(2);
        assert!(twice.next().await.is_some() && twice.next().await.is_some());
        assert_eq!(twice.next().await, None);
    }

    #[test]
    fn a_schedule_is_at_random_with_a_mean_rate() {
        let from = instant();
        let schedule = Schedule::new(1000.0, from, from + Duration::from_secs(10)).unwrap();
        let times: Vec<_> = schedule.collect();
        assert!((9_500..10_500).contains(&times.len()), "{}", times.len());
        let gaps: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // A mean gap is a millisecond; by chance 5% are above three of them.
        let long = gaps.iter().filter(|gap| gap.as_millis() >= 3).count();
        assert!((350..650).contains(&long), "{long}");
        assert!(Schedule::new(0.0, from, from).is_err());
    }

    #[tokio::test]
    async fn an_open_loop_tells_when_a_call_was_due_and_not_when_it_was_asked_for() {
        let from = instant();
        let pace = Pace::open(1_000_000.0, from, from + Duration::from_millis(1)).unwrap();
        let Pace::At(due) = &pace else { panic!("{pace:?}") };
        // Nobody takes a call until all are due.
        while !due.is_closed() {
            tokio::task::yield_now().await;
        }
        let asked = instant();
        let mut times = 0;
        while let Some(due) = pace.next().await {
            assert!(from < due && due < from + Duration::from_millis(1) && due < asked);
            times += 1;
        }
        assert!(times > 500, "{times}");
    }
}
