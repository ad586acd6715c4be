//! The slow side of what is held: wishes, grants, returns, and how large the next chunk is to be.
//!
//! A chunk should last about as long as half its lease: [`CHUNK_LASTS`](super::CHUNK_LASTS) where the service grants for twice that. It
//! grows by half when it was spent in less than half of its lease, comes down to what was used when more than half
//! was left, and is halved when the bucket held less than was wished for. A grant that is spread over time says
//! nothing about the wish: the service has chosen its size.

use super::purse::Terms;
use super::{Grant, Leases};
use crate::clock::{Moment, micros};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How long a denial is held at most, so that a block that was lifted or a limit that was raised is heard of.
pub const HOLD_MOST: Duration = Duration::from_secs(1);

/// How long a class that is not leasable is asked for call by call before borrowing is tried again.
pub const REASK: Duration = Duration::from_secs(5);

/// After a failure the next wish waits for this long.
const PAUSE: Duration = Duration::from_millis(25);

/// The life of a lease until one has been seen.
const USUAL_LIFE: Duration = Duration::from_secs(1);

/// No lease is taken to live longer.
const LONGEST_LIFE: Duration = Duration::from_secs(3600);

/// The first chunk, in calls.
const FIRST_CALLS: u32 = 8;

/// Rests that wait to go back. More than two purses and a lost wish can leave.
const MOST_RETURNS: usize = 16;

/// What to ask the service for: a Borrow without the names of bucket and gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The wish's number; the same if it is sent again.
    pub seq: u64,
    /// Tokens.
    pub n: u32,
    /// What is being asked of this bucket here, in tokens per second.
    pub demand_per_s: u32,
    /// Leases that go back with it.
    pub returns: Vec<Return>,
    /// Calls that were denied here since the last wish.
    pub denied: u32,
}

/// The rest of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Return {
    /// The lease's name.
    pub lease_id: String,
    /// What was not spent of it.
    pub unused: u32,
}

#[derive(Debug, Default)]
pub(super) struct Books {
    held: [Option<Held>; 2],
    /// The next wish; zero until a call has waited for one, or a lease was spent quickly.
    chunk: u32,
    /// How long a lease lives.
    life: Option<Duration>,
    out: Option<Out>,
    returns: Vec<Return>,
    closed: bool,
    demand: Demand,
}

/// A lease in the purse at the same place.
#[derive(Debug)]
struct Held {
    lease_id: String,
    granted: u32,
    since: Moment,
    life: Duration,
    spread: bool,
    /// The next chunk has been fitted to it.
    sized: bool,
}

/// A wish that is not answered yet.
#[derive(Debug)]
struct Out {
    wish: Wish,
    /// When it was first sent: the service can not have granted it before.
    sent: Moment,
    /// No answer came; it is to be sent again.
    lost: bool,
}

/// How fast tokens are being asked for.
#[derive(Debug, Default)]
struct Demand {
    per_s: u64,
    since: Moment,
    /// Tokens of leases that are settled, and of calls denied, since then.
    settled: u64,
    /// Tokens already counted of those that are held.
    counted: u64,
}

impl Books {
    pub(super) fn borrow(&mut self, leases: &Leases, now: Moment, seq: u64, waiting: u32) -> Option<Wish> {
        if self.closed {
            return None;
        }
        let life = self.life.unwrap_or(USUAL_LIFE);
        match &mut self.out {
            Some(out) if !out.lost => return None,
            // Within its life: the lease may exist, and this is the only way to its tokens.
            Some(out) if now < out.sent.after(life) => {
                out.lost = false;
                return Some(out.wish.clone());
            }
            _ => {}
        }
        self.abandon();
        self.size_early(leases, now);
        self.make_room(leases, now);
        let cost = leases.facts.cost().unwrap_or(1).max(1);
        let denied = leases.denied.swap(0, Relaxed);
        self.demand.settled += u64::from(denied) * u64::from(cost);
        self.measure(leases, now);
        // Half of a full bucket at most: others want some too.
        let most = match u32::try_from(leases.facts.limit.load(Relaxed)) {
            Ok(0) | Err(_) => u32::MAX,
            Ok(limit) => (limit / 2).max(cost),
        };
        if self.chunk == 0 && waiting > 0 {
            self.chunk = FIRST_CALLS.saturating_mul(cost).min(most / 2);
        }
        // Nobody waits and nothing has been borrowed: it is to learn of the class, for which one call's cost will do.
        self.chunk = self.chunk.min(most);
        let wish = Wish {
            seq,
            n: self.chunk.max(waiting.saturating_mul(cost)).max(cost).min(most),
            demand_per_s: u32::try_from(self.demand.per_s).unwrap_or(u32::MAX),
            returns: std::mem::take(&mut self.returns),
            denied,
        };
        self.out = Some(Out { wish: wish.clone(), sent: now, lost: false });
        Some(wish)
    }

    pub(super) fn granted(&mut self, leases: &Leases, now: Moment, grant: Grant) {
        let Some(out) = self.out.take() else { return };
        leases.facts.degraded.store(grant.degraded, Relaxed);
        if grant.cost > 0 || grant.granted > 0 {
            leases.facts.cost.store(grant.cost, Relaxed);
        }
        if grant.limit > 0 {
            leases.facts.limit.store(grant.limit, Relaxed);
        }
        if !grant.leasable {
            quiet(leases, now.after(REASK));
        }
        if grant.granted == 0 {
            if grant.leasable {
                self.halve(grant.cost);
                hold(leases, now, &grant);
            }
            return;
        }
        if grant.granted < out.wish.n && grant.spread_over.is_zero() {
            self.halve(grant.cost);
        }
        let life = grant.valid_for.min(LONGEST_LIFE);
        self.life = Some(life);
        let ends = out.sent.after(life);
        if self.closed || now >= ends {
            self.give_back(Return { lease_id: grant.lease_id, unused: grant.granted });
            return;
        }
        let empty = self.held.iter().position(Option::is_none).unwrap_or(0);
        // `borrow` has made room; if a grant comes that nobody asked for, the older one goes back.
        self.settle(leases, now, empty);
        let terms = Terms {
            granted: grant.granted,
            remaining: grant.remaining,
            start: now,
            ends,
            late: Moment::from_micros(ends.as_micros() - micros(life) / 4),
            spread: grant.spread_over.min(life),
        };
        let Some((purse, held)) = leases.purses.get(empty).zip(self.held.get_mut(empty)) else { return };
        purse.fill(&terms);
        let spread = !terms.spread.is_zero();
        let Grant { lease_id, granted, .. } = grant;
        *held = Some(Held { lease_id, granted, since: now, life, spread, sized: false });
        let other = 1 - empty;
        let other_holds = self.held.get(other).is_some_and(Option::is_some);
        leases.first.store(u8::from((if other_holds { other } else { empty }) == 1), Relaxed);
    }

    pub(super) fn failed(&mut self, leases: &Leases, now: Moment) {
        let Some(out) = &mut self.out else { return };
        out.lost = true;
        quiet(leases, now.after(PAUSE));
        if self.closed {
            self.abandon();
        }
    }

    pub(super) fn refused(&mut self, leases: &Leases, now: Moment) {
        self.abandon();
        quiet(leases, now.after(REASK));
    }

    pub(super) fn sweep(&mut self, leases: &Leases, now: Moment) -> Vec<Return> {
        let unused_for = now.since(Moment::from_micros(leases.used.load(Relaxed)));
        for at in 0..self.held.len() {
            let Some((purse, held)) = leases.purses.get(at).zip(self.held.get(at).and_then(Option::as_ref))
            else {
                continue;
            };
            if unused_for >= held.life / 4 || purse.has_ended(now) {
                self.settle(leases, now, at);
            }
        }
        let life = self.life.unwrap_or(USUAL_LIFE);
        if self.out.as_ref().is_some_and(|out| out.lost && now >= out.sent.after(life)) {
            self.abandon();
        }
        std::mem::take(&mut self.returns)
    }

    pub(super) fn close(&mut self, leases: &Leases, now: Moment) -> Vec<Return> {
        self.closed = true;
        if self.out.as_ref().is_some_and(|out| out.lost) {
            self.abandon();
        }
        for at in 0..self.held.len() {
            self.settle(leases, now, at);
        }
        std::mem::take(&mut self.returns)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.iter().all(Option::is_none) && self.out.is_none() && self.returns.is_empty()
    }
    /// Gives a lost wish up. What was to go back with it goes with the next one: if the service had that, it settles
    /// it once all the same.
    fn abandon(&mut self) {
        let lost = self.out.take();
        lost.into_iter().flat_map(|lost| lost.wish.returns).for_each(|back| self.give_back(back));
    }

    /// Makes sure that a purse is free, by settling what is spent or will not be before its end.
    fn make_room(&mut self, leases: &Leases, now: Moment) {
        let cost = leases.facts.cost().unwrap_or(1);
        for at in 0..self.held.len() {
            let Some(purse) = leases.purses.get(at) else { continue };
            if purse.left() < cost.max(1) || purse.is_late(now) {
                self.settle(leases, now, at);
            }
        }
        if self.held.iter().all(Option::is_some) {
            self.settle(leases, now, usize::from(leases.first.load(Relaxed) % 2));
        }
    }

    /// Ends a lease here: what is left of it is to go back, unless it has ended.
    fn settle(&mut self, leases: &Leases, now: Moment, at: usize) {
        let Some((purse, slot)) = leases.purses.get(at).zip(self.held.get_mut(at)) else { return };
        let Some(held) = slot.take() else { return };
        let has_ended = purse.has_ended(now);
        let left = purse.close();
        let used = held.granted.saturating_sub(left);
        self.demand.settled += u64::from(used);
        self.size(leases, now, &held, used);
        if left > 0 && !has_ended {
            self.give_back(Return { lease_id: held.lease_id, unused: left });
        }
    }

    fn give_back(&mut self, back: Return) {
        // Without a name nothing was taken.
        if !back.lease_id.is_empty() && self.returns.len() < MOST_RETURNS {
            self.returns.push(back);
        }
    }

    /// Fits the chunk to leases that are being spent: the next wish is about to go out.
    fn size_early(&mut self, leases: &Leases, now: Moment) {
        for at in 0..self.held.len() {
            let Some(left) = leases.purses.get(at).map(super::Purse::left) else { continue };
            let Some(held) = self.held.get_mut(at).and_then(Option::take) else { continue };
            let used = held.granted.saturating_sub(left);
            let sized = held.sized || (left <= held.granted / 4 && self.size(leases, now, &held, used));
            if let Some(slot) = self.held.get_mut(at) {
                *slot = Some(Held { sized, ..held });
            }
        }
    }

    /// The bucket holds less than was wished for.
    fn halve(&mut self, cost: u32) {
        if self.chunk > 0 {
            self.chunk = (self.chunk / 2).max(cost);
        }
    }

    /// Fits the next chunk to how this one was used; true if it did.
    fn size(&mut self, leases: &Leases, now: Moment, held: &Held, used: u32) -> bool {
        if held.sized || held.spread {
            return false;
        }
        let took = micros(now.since(held.since));
        let at_that_pace = (u128::from(took) * u128::from(held.granted)).checked_div(u128::from(used));
        let cost = leases.facts.cost().unwrap_or(1);
        if used < held.granted / 2 {
            self.chunk = self.chunk.min(used.max(cost));
        } else if at_that_pace.is_some_and(|took| took < u128::from(micros(held.life)) / 2) {
            let chunk = self.chunk.max(held.granted);
            self.chunk = chunk.saturating_add(chunk.div_ceil(2));
        } else {
            return false;
        }
        true
    }

    /// What was asked for since the last time: spent, or denied here.
    fn measure(&mut self, leases: &Leases, now: Moment) {
        const SHORTEST: Duration = Duration::from_millis(5);
        let lent = |(held, purse): (&Option<Held>, &super::Purse)| {
            held.as_ref().map_or(0, |held| u64::from(held.granted.saturating_sub(purse.left())))
        };
        let spent = self.held.iter().zip(&leases.purses).map(lent).sum::<u64>();
        let demand = &mut self.demand;
        let took = now.since(demand.since);
        if demand.since == Moment::NEVER || took > USUAL_LIFE {
            *demand = Demand { since: now, counted: spent, ..Demand::default() };
        } else if took >= SHORTEST {
            let asked = (demand.settled + spent).saturating_sub(demand.counted);
            let per_s = asked.saturating_mul(1_000_000) / micros(took);
            let per_s = if demand.per_s == 0 { per_s } else { demand.per_s.midpoint(per_s) };
            *demand = Demand { per_s, since: now, settled: 0, counted: spent };
        }
    }
}

fn quiet(leases: &Leases, until: Moment) {
    leases.quiet_until.fetch_max(until.as_micros(), Relaxed);
}

fn hold(leases: &Leases, now: Moment, grant: &Grant) {
    let until = now.after(grant.retry_after.min(HOLD_MOST));
    leases.hold.blocked.store(u8::from(grant.blocked), Relaxed);
    leases.hold.fits.store(now.after(grant.retry_after).as_micros(), Relaxed);
    leases.hold.until.store(until.as_micros(), Relaxed);
    quiet(leases, until);
}
