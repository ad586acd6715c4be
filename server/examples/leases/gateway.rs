//! A gateway and its one key: the client's own leases, fallback and outage, and the path of a call between them as
//! `client/src/shared.rs` and `client/src/keeper.rs` have it.

use std::collections::HashMap;
use std::time::Duration;
use tollgate_client::fallback::{Alone, Bucket, Fallback, Outage, Rule, pause};
use tollgate_client::leases::{Grant, Leases, Return, Spend, Wish};
use tollgate_client::{Answer, Moment};
use tollgate_proto::v1::{BorrowResponse, ShouldRateLimitResponse};

/// Borrows that a call waits for before it asks for itself.
const ROUNDS: u32 = 3;

/// What a gateway sends to the service.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    Ask,
    Borrow(Wish),
    Return(Return),
    /// Is the service back?
    Look,
}

/// What the service answers; `None` where the answer says no more than that there is one.
#[derive(Debug)]
pub(crate) enum Reply {
    Asked(ShouldRateLimitResponse),
    Borrowed(Box<BorrowResponse>),
    Other,
}

/// What a gateway does.
#[derive(Debug)]
pub(crate) enum Act {
    Send(Message),
    /// A call is decided from a lease, or from a denial that is held.
    Decided {
        allowed: bool,
    },
    /// A call is decided by the service.
    Answered {
        allowed: bool,
    },
    /// A call is decided without the service.
    Alone {
        allowed: bool,
    },
    /// The service is to be looked for after this long.
    LookAfter(Duration),
}

pub(crate) struct Gateway {
    pub(crate) leases: Leases,
    pub(crate) outage: Outage,
    alone: Bucket,
    rule: Rule,
    part: u8,
    cost: u32,
    seq: u64,
    /// A Borrow is under way.
    wanted: bool,
    /// Calls that wait for it, by the Borrows that they have waited for.
    waiting: HashMap<u32, u32>,
    looks: u32,
    acts: Vec<Act>,
}

impl Gateway {
    /// `part` says when it is its key's turn after an outage. It spends nothing alone until the service has said.
    pub(crate) fn new(part: u8, cost: u32) -> Self {
        Self {
            leases: Leases::default(),
            outage: Outage::default(),
            alone: Bucket::default(),
            rule: Rule::new(Fallback::Deny),
            part,
            cost,
            seq: 1,
            wanted: false,
            waiting: HashMap::new(),
            looks: 0,
            acts: vec![],
        }
    }

    /// What it has come to do.
    pub(crate) fn acts(&mut self) -> Vec<Act> {
        std::mem::take(&mut self.acts)
    }

    pub(crate) fn call(&mut self, now: Moment) {
        if self.decide(now) {
            return;
        }
        if self.leases.touch(now) { self.wait(now, 0) } else { self.acts.push(Act::Send(Message::Ask)) }
    }

    /// Gives back what is not being used.
    pub(crate) fn sweep(&mut self, now: Moment) {
        let back = self.leases.sweep(now);
        if !self.outage.is_gone() {
            self.acts.extend(back.into_iter().map(|back| Act::Send(Message::Return(back))));
        }
    }

    /// Looks for a service that is gone.
    pub(crate) fn look(&mut self) {
        if self.outage.is_gone() {
            self.acts.push(Act::Send(Message::Look));
        }
    }

    /// The service has answered.
    pub(crate) fn answered(&mut self, now: Moment, reply: Reply) {
        self.outage.answered(now);
        match reply {
            Reply::Asked(reply) => {
                let Answer { verdict, .. } = reply.into();
                self.leases.learn(&verdict);
                self.acts.push(Act::Answered { allowed: verdict.allowed() });
                if !self.rule.is_learned() {
                    self.want(now);
                }
            }
            Reply::Borrowed(reply) => {
                if let Some(fallback) = Fallback::of(&reply) {
                    self.rule.learn(fallback);
                }
                self.leases.granted(now, Grant::from_reply(&reply));
                self.land(now, false);
            }
            Reply::Other => {}
        }
    }

    /// It has not, or not in time.
    pub(crate) fn unanswered(&mut self, now: Moment, message: &Message) {
        // Tokens that go back are not waited for, and say nothing of the service.
        if matches!(message, Message::Return(_)) {
            return;
        }
        if self.outage.failed(now) {
            self.looks = 0;
            self.look_again();
        } else if matches!(message, Message::Look) && self.outage.is_gone() {
            self.look_again();
        }
        match message {
            Message::Ask => self.decide_alone(now),
            Message::Borrow(_) => {
                self.leases.failed(now);
                self.land(now, true);
            }
            Message::Return(_) | Message::Look => {}
        }
    }

    fn look_again(&mut self) {
        self.acts.push(Act::LookAfter(pause(self.looks)));
        self.looks += 1;
    }

    /// Decides a call here, if there is something to decide it from.
    fn decide(&mut self, now: Moment) -> bool {
        match self.leases.spend(now, None) {
            Spend::Decided { verdict, low } => {
                self.acts.push(Act::Decided { allowed: verdict.allowed() });
                if low {
                    self.want(now);
                }
                true
            }
            Spend::Nothing => {
                let alone = self.outage.covers(now, if self.rule.denies() { 0 } else { self.part });
                if alone {
                    self.decide_alone(now);
                }
                alone
            }
        }
    }

    fn decide_alone(&mut self, now: Moment) {
        let taken = self.alone.take(&self.rule, self.outage.without(now), self.cost);
        let allowed = matches!(taken, Alone::Allowed | Alone::Passed { .. });
        self.acts.push(Act::Alone { allowed });
    }

    /// Has a call wait for the key's Borrow, unless something decides it meanwhile or none is to be had.
    fn wait(&mut self, now: Moment, rounds: u32) {
        for round in rounds..=ROUNDS {
            if self.decide(now) {
                return;
            }
            if round == ROUNDS || self.leases.is_quiet(now) {
                break;
            }
            *self.waiting.entry(round + 1).or_default() += 1;
            if self.want(now) {
                return;
            }
            self.waiting.entry(round + 1).and_modify(|waiting| *waiting -= 1);
        }
        self.acts.push(Act::Send(Message::Ask));
    }

    /// Sees to it that a Borrow is under way; false if there is nothing to ask for.
    fn want(&mut self, now: Moment) -> bool {
        if self.wanted {
            return true;
        }
        if self.outage.is_gone() {
            return false;
        }
        let waiting = self.waiting.values().sum();
        let wish = self.leases.borrow(now, self.seq, waiting);
        self.seq += 1;
        self.wanted = wish.is_some();
        self.acts.extend(wish.map(|wish| Act::Send(Message::Borrow(wish))));
        self.wanted
    }

    /// A Borrow has been answered, or will not be.
    fn land(&mut self, now: Moment, failed: bool) {
        self.wanted = false;
        let mut waiting: Vec<_> = std::mem::take(&mut self.waiting).into_iter().collect();
        waiting.sort_unstable();
        for (rounds, calls) in waiting {
            for _ in 0..calls {
                if failed { self.decide_alone(now) } else { self.wait(now, rounds) }
            }
        }
    }
}
