//! What the algorithms should decide, told as naively as possible: no units, no state, only the list of what
//! was taken and given back, replayed from the start with fractions. Waits are searched for, not computed.
//!
//! Plain integers and no `use`, so that the tests of the algorithms and those of the stores can share it.

/// `count` tokens each `period` microseconds, at most `burst` at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) count: u64,
    pub(crate) period: u64,
    pub(crate) burst: u64,
}

/// A decision; times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) granted: u64,
    pub(crate) remaining: u64,
    pub(crate) retry_after: u64,
    pub(crate) reset_after: u64,
}

/// A token bucket: everything that ever happened to it.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenBucket {
    events: Vec<Event>,
}

#[derive(Clone, Copy, Debug)]
struct Event {
    at: u64,
    rule: Rule,
    taken: u64,
    given_back: u64,
}

impl TokenBucket {
    pub(crate) fn decide(&self, rule: Rule, now: u64, at_least: u64, at_most: u64) -> Answer {
        let level = self.replay();
        let used = level.at(rule, now);
        let remaining = used.left(rule);
        let fits = |level: Level, cost| level.used + tokens(cost, rule) <= tokens(rule.burst, rule);
        let allowed = fits(used, at_least);
        // What never fits is told when a burst would.
        let most = at_least.min(rule.burst);
        let granted = if allowed { remaining.min(at_most) } else { 0 };
        let after = Level { used: used.used + tokens(granted, rule), ..used };
        Answer {
            allowed,
            granted,
            remaining: remaining - granted,
            retry_after: first(|wait| fits(level.at(rule, now + wait), most)),
            reset_after: first(|wait| after.at(rule, now + wait).used == 0),
        }
    }

    pub(crate) fn take(&mut self, rule: Rule, now: u64, taken: u64) {
        self.events.push(Event { at: now, rule, taken, given_back: 0 });
    }

    pub(crate) fn give_back(&mut self, rule: Rule, now: u64, tokens: u64) -> u64 {
        let level = self.replay();
        // What is owed to a larger limit is not forgiven here.
        if level.under(rule) > 2 * self::tokens(rule.burst, rule) {
            return 0;
        }
        let used = level.at(rule, now).used.div_ceil(u128::from(rule.period));
        let given_back = tokens.min(u64::try_from(used).unwrap());
        if given_back > 0 {
            self.events.push(Event { at: now, rule, taken: 0, given_back });
        }
        given_back
    }

    fn replay(&self) -> Level {
        let new = Level { used: 0, period: 1, grain: 1, time: 0 };
        self.events.iter().fold(new, |level, event| {
            let level = level.at(event.rule, event.at);
            // What is taken by force, more than there is, is bounded as debt is.
            let most = 2 * tokens(event.rule.burst, event.rule);
            let used = (level.used + tokens(event.taken, event.rule)).min(most);
            Level { used: used.saturating_sub(tokens(event.given_back, event.rule)), ..level }
        })
    }
}

/// What is used at a time: `used / period` tokens.
#[derive(Clone, Copy, Debug)]
struct Level {
    used: u128,
    period: u128,
    /// The smallest part of a token that the rule can tell is `1 / grain`.
    grain: u64,
    time: u64,
}

impl Level {
    /// What is still used at `now`, if `rule` has held since.
    fn at(self, rule: Rule, now: u64) -> Self {
        let (period, grain) = (u128::from(rule.period), grain(rule));
        // Nobody owes more than one burst on top of a full one.
        let used = self.under(rule).min(2 * tokens(rule.burst, rule));
        let back = u128::from(now.saturating_sub(self.time)) * u128::from(rule.count);
        let used = used.saturating_sub(back);
        // Time stands still while the clock is behind, except for a full bucket: it is like a new one.
        let time = if used == 0 { now } else { now.max(self.time) };
        Self { used, period, grain, time }
    }

    /// What was used at its time, in the fractions of that rule.
    fn under(self, rule: Rule) -> u128 {
        let period = u128::from(rule.period);
        if grain(rule) == self.grain {
            self.used * period / self.period
        } else {
            // A part of a token that the new rate can not tell counts as a whole one.
            self.used.div_ceil(self.period) * period
        }
    }

    fn left(self, rule: Rule) -> u64 {
        let left = tokens(rule.burst, rule).saturating_sub(self.used) / u128::from(rule.period);
        u64::try_from(left).unwrap()
    }
}

fn tokens(tokens: u64, rule: Rule) -> u128 {
    u128::from(tokens) * u128::from(rule.period)
}

fn grain(rule: Rule) -> u64 {
    let (mut a, mut b) = (rule.period, rule.count);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    rule.period / a
}

/// The first time at which something comes true that then stays so.
fn first(is_so: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, 1 << 55);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_so(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Which of the grants count, in a window of so many microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "windows are compared with it where rules do not change: beside the algorithms")]
pub(crate) enum Counted {
    /// Those of the window that ends now.
    Log,
    /// Those since the last multiple of the window.
    Fixed,
    /// Those, and a share of the ones before, as if they had come evenly.
    Sliding,
}

/// A list of what was granted, and when.
#[derive(Clone, Debug)]
pub(crate) struct Grants {
    counted: Counted,
    list: Vec<(u64, u64)>,
    /// When it was last changed. A log does not keep that.
    changed: u64,
}

impl Grants {
    pub(crate) fn new(counted: Counted) -> Self {
        Self { counted, list: vec![], changed: 0 }
    }

    pub(crate) fn decide(&self, rule: Rule, now: u64, at_least: u64, at_most: u64) -> Answer {
        let used = self.used(rule, now);
        let allowed = used + at_least <= rule.burst;
        let remaining = rule.burst.saturating_sub(used);
        let granted = if allowed { remaining.min(at_most) } else { 0 };
        let mut after = self.clone();
        after.take(rule, now, granted);
        Answer {
            allowed,
            granted,
            remaining: remaining - granted,
            retry_after: first(|wait| self.used(rule, now + wait) + at_least.min(rule.burst) <= rule.burst),
            reset_after: first(|wait| after.used(rule, now + wait) == 0),
        }
    }

    pub(crate) fn take(&mut self, rule: Rule, now: u64, taken: u64) {
        if taken == 0 {
            return;
        }
        self.forget(rule, now);
        self.changed = self.time(now);
        let used = self.used(rule, now);
        // A log in debt grows by the last grant, to another burst at most.
        let (taken, grows) = match self.counted {
            Counted::Log => (taken.min((2 * rule.burst).saturating_sub(used)), used > rule.burst),
            Counted::Fixed | Counted::Sliding => (taken, false),
        };
        if taken > 0 {
            let last = if grows { self.list.pop().map_or(0, |(_, last)| last) } else { 0 };
            self.list.push((self.changed, last + taken));
        }
    }

    pub(crate) fn give_back(&mut self, rule: Rule, now: u64, tokens: u64) -> u64 {
        let (time, length) = (self.time(now), length(rule));
        let may = |at: u64| match self.counted {
            Counted::Log => at + length > time,
            Counted::Fixed | Counted::Sliding => at / length == time / length,
        };
        let most: u64 = self.list.iter().filter(|(at, _)| may(*at)).map(|(_, tokens)| tokens).sum();
        let given_back = tokens.min(most);
        if given_back == 0 {
            return 0;
        }
        self.forget(rule, now);
        self.changed = time;
        let mut left = given_back;
        while left > 0 {
            let (_, last) = self.list.last_mut().unwrap();
            let some = left.min(*last);
            (*last, left) = (*last - some, left - some);
            if *last == 0 {
                self.list.pop();
            }
        }
        given_back
    }

    fn used(&self, rule: Rule, now: u64) -> u64 {
        let (time, length) = (self.time(now), length(rule));
        let sum = |counts: &dyn Fn(u64) -> bool| -> u64 {
            self.list.iter().filter(|(at, _)| counts(*at)).map(|(_, tokens)| tokens).sum()
        };
        let this = sum(&|at| at / length == time / length);
        match self.counted {
            Counted::Log => sum(&|at| at + length > time),
            Counted::Fixed => this,
            Counted::Sliding => {
                let before = sum(&|at| at / length + 1 == time / length);
                let overlap = u128::from(before) * u128::from(length - time % length);
                this + u64::try_from(overlap.div_ceil(u128::from(length))).unwrap()
            }
        }
    }

    /// Time stands still while the clock is behind.
    fn time(&self, now: u64) -> u64 {
        let last = match self.counted {
            Counted::Log => self.list.last().map_or(0, |(at, _)| *at),
            Counted::Fixed | Counted::Sliding => self.changed,
        };
        now.max(last)
    }

    /// What no longer counts is gone; if nothing counts, so is the time.
    fn forget(&mut self, rule: Rule, now: u64) {
        let (time, length) = (self.time(now), length(rule));
        if self.used(rule, now) == 0 {
            (self.list, self.changed) = (vec![], 0);
        } else if self.counted == Counted::Log {
            self.list.retain(|(at, _)| at + length > time);
        }
    }
}

/// The window in which a burst comes at the rate, in whole microseconds.
fn length(rule: Rule) -> u64 {
    let length = u128::from(rule.burst) * u128::from(rule.period);
    u64::try_from(length.div_ceil(u128::from(rule.count))).unwrap()
}
