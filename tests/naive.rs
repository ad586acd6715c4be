//! A store as naive as can be, to compare the real ones with: maps of what was asked, by the names that were
//! given, in the order of the contract.
//!
//! It shares no arithmetic with the server for the algorithms that have a naive model in `model.rs`. Any other
//! is asked itself, in Rust: then the comparison still holds memory, Lua and everything around to each other.

use crate::model::{Answer, Counted, Grants, Rule, TokenBucket};
use crate::stores::Ask;
use std::collections::HashMap;
use std::time::Duration;
use tollgate_server::algorithm::Algorithm;
use tollgate_server::limit::{Cost, Decision, Limit, Reason, State, Timestamp, Want};
use tollgate_server::name::BucketName;
use tollgate_server::penalty::Penalty;
use tollgate_server::request::Charge;

/// Times are microseconds; tokens and strikes are plain numbers.
#[derive(Default)]
pub(crate) struct Naive {
    buckets: HashMap<(String, String), Bucket>,
    strikes: HashMap<String, Strikes>,
    blocks: HashMap<String, u64>,
    leases: HashMap<String, Lease>,
    /// The latest of all ends that are past.
    pub(crate) ended: u64,
}

struct Bucket {
    algorithm: &'static str,
    usage: Usage,
    /// When it is as good as new.
    ends: u64,
}

struct Strikes {
    count: u64,
    ends: u64,
}

struct Lease {
    outstanding: u64,
    ends: u64,
}

impl Naive {
    /// Forgets what has ended. Returns the names that a Redis would have dropped by itself, without a prefix.
    pub(crate) fn forget(&mut self, now: u64) -> Vec<String> {
        let mut names = Vec::new();
        let mut ended = self.ended;
        let mut is_over = |ends: u64| {
            let over = ends <= now;
            ended = if over { ended.max(ends) } else { ended };
            over
        };
        self.buckets.retain(|(key, class), bucket| {
            let over = is_over(bucket.ends);
            names.extend(over.then(|| BucketName::new(key, class).as_str().to_owned()));
            !over
        });
        self.leases.retain(|id, lease| {
            let over = is_over(lease.ends);
            names.extend(over.then(|| format!("lease:{id}")));
            !over
        });
        self.strikes.retain(|_, strikes| !is_over(strikes.ends));
        self.blocks.retain(|_, ends| !is_over(*ends));
        self.ended = ended;
        names
    }

    /// Decides one call. Whatever has ended must be forgotten first.
    pub(crate) fn decide(&mut self, asks: &[Ask], now: u64) -> Vec<Decision> {
        let mut decisions: Vec<_> = asks.iter().map(|ask| self.alone(ask, now)).collect();
        let counted = asks.iter().zip(&decisions).filter(|(ask, _)| !ask.shadow);
        let (quotas, plain): (Vec<_>, Vec<_>) = counted.partition(|(ask, _)| ask.quota);
        let is_denied = |(_, decision): &(&Ask, &Decision)| decision.denied.is_some();
        let held_up = plain.iter().any(is_denied) || !quotas.is_empty() && quotas.iter().all(is_denied);
        for (ask, decision) in asks.iter().zip(&mut decisions) {
            match decision.denied {
                Some(Reason::Blocked | Reason::Unavailable) => {}
                Some(Reason::OverLimit) => {
                    if let Charge::Always(cost) = ask.charge
                        && cost > Cost::ZERO
                    {
                        let replaced = decision.replaced;
                        let mut usage = self.bucket(ask);
                        usage.take(&ask.limit, now, cost.get());
                        self.file(ask, usage, now);
                        let want = ask.want;
                        *decision = self.look(ask, now, want.at_least.get(), want.at_most.get());
                        decision.replaced = replaced;
                    }
                    if let Some(strikes) = &ask.strikes
                        && strikes.on_denial
                    {
                        self.strike(&ask.key, &strikes.penalty, now, 1);
                        if let Some(ends) = self.blocks.get(&ask.key) {
                            let shut = Duration::from_micros(ends - now);
                            decision.retry_after = decision.retry_after.max(shut);
                        }
                    }
                }
                None if self.lent(ask).is_some() => {}
                None if held_up && ask.charge == Charge::IfAllowed => *decision = self.look(ask, now, 0, 0),
                None => self.take(ask, decision, now),
            }
        }
        decisions
    }

    /// What would become of this bucket if it were the only one.
    fn alone(&mut self, ask: &Ask, now: u64) -> Decision {
        if let Charge::GiveBack(cost) = ask.charge {
            let mut usage = self.bucket(ask);
            if usage.give_back(&ask.limit, now, cost.get()) > 0 {
                self.file(ask, usage, now);
            }
            return Decision {
                denied: None,
                retry_after: Duration::ZERO,
                replaced: false,
                degraded: false,
                gateways: 0,
                ..self.look(ask, now, 0, 0)
            };
        }
        if let Some(granted) = self.lent(ask) {
            let granted = Cost::new(granted);
            let left = self.look(ask, now, 0, 0);
            return Decision { denied: None, granted, retry_after: Duration::ZERO, replaced: false, ..left };
        }
        let known = ask.lease.as_ref().is_some_and(|lease| self.leases.contains_key(lease.id.as_str()));
        if let Some(strikes) = &ask.strikes
            && strikes.reported > 0
            && !self.blocks.contains_key(&ask.key)
            && !known
        {
            self.strike(&ask.key, &strikes.penalty, now, strikes.reported.into());
            if let Some(lease) = &ask.lease {
                let marker = Lease { outstanding: 0, ends: now + micros(lease.valid_for) };
                self.leases.insert(lease.id.to_string(), marker);
            }
        }
        if let Some(ends) = self.blocks.get(&ask.key) {
            return Decision::blocked(Duration::from_micros(ends - now));
        }
        self.look(ask, now, ask.want.at_least.get(), ask.want.at_most.get())
    }

    /// What was granted when this lease was asked for before.
    fn lent(&self, ask: &Ask) -> Option<u64> {
        let lease = self.leases.get(ask.lease.as_ref()?.id.as_str())?;
        Some(lease.outstanding).filter(|granted| *granted > 0)
    }

    fn look(&self, ask: &Ask, now: u64, at_least: u64, at_most: u64) -> Decision {
        let decision = self.bucket(ask).decide(&ask.limit, now, at_least, at_most);
        let other = self.buckets.get(&(ask.key.clone(), ask.class.clone()));
        Decision { replaced: other.is_some_and(|other| other.algorithm != ask.algorithm.name), ..decision }
    }

    fn take(&mut self, ask: &Ask, decision: &Decision, now: u64) {
        let granted = decision.granted.get();
        if granted == 0 {
            return;
        }
        let mut usage = self.bucket(ask);
        usage.take(&ask.limit, now, granted);
        self.file(ask, usage, now);
        if let Some(lease) = &ask.lease {
            let valid_for = match ask.algorithm.name {
                // What is left of a window is not for the next one.
                "fixed_window" => lease.valid_for.min(decision.reset_after),
                _ => lease.valid_for,
            };
            let ends = now + micros(valid_for);
            self.leases.insert(lease.id.to_string(), Lease { outstanding: granted, ends });
        }
    }

    /// The lease of that ask comes back, under the limit and by the algorithm of that ask.
    pub(crate) fn settle(&mut self, ask: &Ask, unused: u64, now: u64) -> u64 {
        let id = ask.lease.as_ref().unwrap().id.as_str();
        let Some(lease) = self.leases.remove(id) else { return 0 };
        let mut usage = self.bucket(ask);
        let credited = usage.give_back(&ask.limit, now, unused.min(lease.outstanding));
        if credited > 0 {
            self.file(ask, usage, now);
        }
        credited
    }

    fn bucket(&self, ask: &Ask) -> Usage {
        match self.buckets.get(&(ask.key.clone(), ask.class.clone())) {
            Some(bucket) if bucket.algorithm == ask.algorithm.name => bucket.usage.clone(),
            // What another algorithm wrote, this one can not read.
            _ => Usage::new(ask.algorithm),
        }
    }

    fn file(&mut self, ask: &Ask, usage: Usage, now: u64) {
        let ends = now + micros(usage.decide(&ask.limit, now, 0, 0).reset_after);
        let name = (ask.key.clone(), ask.class.clone());
        if ends == now {
            self.buckets.remove(&name);
        } else {
            self.buckets.insert(name, Bucket { algorithm: ask.algorithm.name, usage, ends });
        }
    }

    fn strike(&mut self, key: &str, penalty: &Penalty, now: u64, more: u64) {
        let (before, till) = self.strikes.get(key).map_or((0, 0), |strikes| (strikes.count, strikes.ends));
        let count = (before + more).min(u32::MAX.into());
        let mut block = 0;
        if count > penalty.strikes().into() {
            block = micros(penalty.base());
            for _ in u64::from(penalty.strikes())..count {
                block = (2 * block).min(micros(penalty.cap()));
                if block == micros(penalty.cap()) {
                    break;
                }
            }
            let before = self.blocks.get(key).copied().unwrap_or(0);
            self.blocks.insert(key.into(), before.max(now + block));
        }
        let ends = till.max(now + micros(penalty.window()).max(2 * block));
        self.strikes.insert(key.into(), Strikes { count, ends });
    }
}

/// What was taken from one bucket.
#[derive(Clone)]
enum Usage {
    TokenBucket(TokenBucket),
    Queue(TokenBucket),
    Log(Grants),
    Told(&'static Algorithm, State),
}

impl Usage {
    fn new(algorithm: &'static Algorithm) -> Self {
        match algorithm.name {
            "token_bucket" | "gcra" => Self::TokenBucket(TokenBucket::default()),
            "leaky_bucket" => Self::Queue(TokenBucket::default()),
            "sliding_log" => Self::Log(Grants::new(Counted::Log)),
            _ => Self::Told(algorithm, State::default()),
        }
    }

    fn decide(&self, limit: &Limit, now: u64, at_least: u64, at_most: u64) -> Decision {
        match self {
            Self::TokenBucket(bucket) => decision(bucket.decide(rule(limit), now, at_least, at_most)),
            Self::Queue(queue) => {
                let answer = queue.decide(rule(limit), now, at_least, at_most);
                // One's turn is when all that came before is gone.
                let wait = if answer.allowed { queue.decide(rule(limit), now, 0, 0).reset_after } else { 0 };
                Decision { wait: Duration::from_micros(wait), ..decision(answer) }
            }
            Self::Log(log) => decision(log.decide(rule(limit), now, at_least, at_most)),
            Self::Told(algorithm, state) => {
                let want = Want { at_least: Cost::new(at_least), at_most: Cost::new(at_most) };
                (algorithm.decide)(limit, state, Timestamp::from_micros(now), want)
            }
        }
    }

    fn take(&mut self, limit: &Limit, now: u64, tokens: u64) {
        match self {
            Self::TokenBucket(bucket) | Self::Queue(bucket) => bucket.take(rule(limit), now, tokens),
            Self::Log(log) => log.take(rule(limit), now, tokens),
            Self::Told(algorithm, state) => {
                (algorithm.charge)(limit, state, Timestamp::from_micros(now), Cost::new(tokens));
            }
        }
    }

    fn give_back(&mut self, limit: &Limit, now: u64, tokens: u64) -> u64 {
        match self {
            Self::TokenBucket(bucket) | Self::Queue(bucket) => bucket.give_back(rule(limit), now, tokens),
            Self::Log(log) => log.give_back(rule(limit), now, tokens),
            Self::Told(algorithm, state) => {
                (algorithm.refund)(limit, state, Timestamp::from_micros(now), Cost::new(tokens)).get()
            }
        }
    }
}

fn rule(limit: &Limit) -> Rule {
    Rule { count: limit.rate().count(), period: micros(limit.rate().period()), burst: limit.burst() }
}

fn decision(answer: Answer) -> Decision {
    Decision {
        denied: (!answer.allowed).then_some(Reason::OverLimit),
        granted: Cost::new(answer.granted),
        remaining: answer.remaining,
        retry_after: Duration::from_micros(answer.retry_after),
        reset_after: Duration::from_micros(answer.reset_after),
        wait: Duration::ZERO,
        replaced: false,
        degraded: false,
        gateways: 0,
    }
}

pub(crate) fn micros(span: Duration) -> u64 {
    span.as_micros().try_into().unwrap()
}
