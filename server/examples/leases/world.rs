//! Gateways, a network and a service, in a time of their own.
//!
//! What decides is real: the server's engine on a store with a manual clock, and the client's leases. What is made up
//! is the traffic, how long messages take, and what goes wrong. Events happen in the order of their time, one at a
//! time, and all chance comes from one seed.

use super::bounds::Bounds;
use super::gateway::{Act, Gateway, Message, Reply};
use super::traffic::{Calls, takes};
use super::watched::Watched;
use fastrand::Rng;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tollgate_client::Moment;
use tollgate_proto::v1::BorrowResponse;
use tollgate_server::clock::Clock;
use tollgate_server::engine::{Engine, Refusal};
use tollgate_server::limit::{Cost, State, Timestamp, Want};
use tollgate_server::request::{Borrow, Request, Return};
use tollgate_server::rules::{Limited, Rule, Rules};
use tollgate_server::store::Store;

/// When it begins: in 2023, and no round number of anything.
pub(crate) const START: Timestamp = Timestamp::from_micros(1_700_000_000_123_457);

/// How long a gateway waits for an answer.
const DEADLINE: u64 = 50_000;

/// How often a gateway looks for tokens that are not being used.
const ROUND: u64 = 25_000;

const CLASS: &str = "read";

/// What happens, in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) limited: Limited,
    /// The calls of each gateway.
    pub(crate) calls: Vec<Calls>,
    pub(crate) lasts: u64,
    /// A message takes so long, and by chance about as much again.
    pub(crate) latency: u64,
    /// Of 256 messages so many are lost, each way.
    pub(crate) lost: u8,
    /// A gateway dies after so long each, one after the other, and another takes its place.
    pub(crate) killed_every: Option<u64>,
    /// When the service is not there: it refuses connections.
    pub(crate) gone: Vec<Range<u64>>,
    /// From when on the service's clock is how much ahead of the gateways', or behind.
    pub(crate) jumps: BTreeMap<u64, i64>,
    pub(crate) seed: u64,
}

/// What became of it.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// When each call came, and when each was admitted by what the bucket had given.
    pub(crate) asked: Vec<u64>,
    pub(crate) admitted: Vec<u64>,
    /// When each was let through without the service.
    pub(crate) alone: Vec<u64>,
    pub(crate) denied: u64,
    /// Calls that each gateway had, and those of them that were admitted by the bucket.
    pub(crate) by_gateway: Vec<(u64, u64)>,
    /// When each message came to the service that was there.
    pub(crate) served: Vec<u64>,
    /// Calls to the store.
    pub(crate) store: u64,
    /// What one bucket in one place would have admitted of the same calls.
    pub(crate) ideal: u64,
    /// By how many tokens any window was above burst + rate x time.
    pub(crate) excess: u64,
    pub(crate) most_outstanding: u64,
    /// A lease that was not as it must be.
    pub(crate) wrong: Option<String>,
    /// Where it was above the bounds of a bucket, which windows do not keep.
    pub(crate) above: Option<String>,
}

#[derive(Debug)]
enum Event {
    Call(usize),
    Sweep(usize),
    Kill(usize),
    Look(Place),
    /// A message comes to the service.
    Arrive(Place, u64, Message),
    /// An answer comes to the gateway, or it is told that there is nobody.
    Answer(Place, u64, Option<Reply>),
    /// The gateway waits no longer.
    Late(Place, u64),
}

impl Event {
    fn whose(&self) -> usize {
        match self {
            Self::Call(at) | Self::Sweep(at) | Self::Kill(at) => *at,
            Self::Look(place) | Self::Arrive(place, ..) | Self::Answer(place, ..) | Self::Late(place, _) => {
                place.at
            }
        }
    }
}

/// A gateway, and how many have been in its place before: what is for one that is dead is for nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    at: usize,
    life: u32,
}

impl Place {
    fn name(self) -> String {
        format!("gw-{}-{}", self.at, self.life)
    }
}

struct Site {
    gateway: Gateway,
    life: u32,
    calls: Calls,
    /// Messages that are not answered.
    open: HashMap<u64, Message>,
    /// What was granted to its wish and has not come to it.
    coming: Option<(u64, u64)>,
}

pub(crate) struct World {
    setting: Setting,
    engine: Engine,
    store: Arc<Watched>,
    clock: Clock,
    rng: Rng,
    sites: Vec<Site>,
    events: BTreeMap<(u64, u64), Event>,
    counter: u64,
    now: u64,
    /// What the service's clock told when the bucket first gave something, and the latest when it did: no bucket gets
    /// anything for a time in which it has.
    seen: Option<(u64, u64)>,
    /// What is on its way back, and until when it is worth something.
    back: HashMap<String, (u64, u64)>,
    /// What is with each gateway, or on its way to it, and the sum.
    held: Vec<u64>,
    out: u64,
    bounds: Bounds,
    outcome: Outcome,
}

impl World {
    /// Runs on that store, whose clock this is, until it is over.
    ///
    /// # Errors
    /// The service has refused something, or its store did not answer.
    pub(crate) async fn run(
        setting: Setting,
        store: Arc<dyn Store>,
        clock: Clock,
        key: &str,
    ) -> Result<Outcome, Refusal> {
        let mut world = Self::new(setting, store, clock);
        while let Some(((at, _), event)) = world.events.pop_first() {
            if at > world.setting.lasts {
                break;
            }
            world.now = at;
            world.clock.set(world.service_time());
            let whose = event.whose();
            world.stand(whose);
            world.happen(event, key).await?;
            world.stand(whose);
        }
        Ok(world.end())
    }

    fn new(setting: Setting, store: Arc<dyn Store>, clock: Clock) -> Self {
        // The client's own chances.
        fastrand::seed(setting.seed);
        clock.set(START);
        let store = Arc::new(Watched::new(store, clock.clone()));
        let rule = Rule::new(CLASS, Some(setting.limited.clone()));
        let engine = Engine::new(Rules::new([rule]).live(), store.clone(), 512, clock.clone());
        let limit = &setting.limited.limit;
        let mut world = Self {
            engine,
            store,
            clock,
            rng: Rng::with_seed(setting.seed),
            sites: vec![],
            events: BTreeMap::new(),
            counter: 0,
            now: 0,
            seen: None,
            back: HashMap::new(),
            held: vec![0; setting.calls.len()],
            out: 0,
            bounds: Bounds::new(limit.rate().count(), limit.rate().period(), limit.burst()),
            outcome: Outcome { by_gateway: vec![(0, 0); setting.calls.len()], ..Outcome::default() },
            setting,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        for (at, calls) in self.setting.calls.clone().into_iter().enumerate() {
            let gateway = self.fresh();
            self.sites.push(Site { gateway, life: 0, calls, open: HashMap::new(), coming: None });
            // Gateways did not all start at the same time.
            let first = self.rng.u64(0..calls.next(0, &mut Rng::with_seed(0)).max(1));
            self.after(first, Event::Call(at));
            let first = self.rng.u64(0..ROUND);
            self.after(first, Event::Sweep(at));
        }
        if let Some(every) = self.setting.killed_every {
            self.after(every, Event::Kill(0));
        }
    }

    fn fresh(&mut self) -> Gateway {
        let cost = u32::try_from(self.setting.limited.cost.get()).unwrap_or(u32::MAX);
        Gateway::new(self.rng.u8(..), cost)
    }

    fn after(&mut self, span: u64, event: Event) {
        self.counter += 1;
        self.events.insert((self.now + span, self.counter), event);
    }

    /// By the service's clock.
    fn service_time(&self) -> Timestamp {
        let ahead = self.setting.jumps.range(..=self.now).next_back().map_or(0, |(_, ahead)| *ahead);
        Timestamp::from_micros((START.as_micros() + self.now).saturating_add_signed(ahead))
    }

    fn gave(&mut self) {
        let at = self.service_time().as_micros();
        self.seen = Some(self.seen.map_or((at, at), |(first, last)| (first, last.max(at))));
    }

    /// The time that the bucket has had.
    fn had(&self) -> u64 {
        if self.setting.jumps.is_empty() {
            self.now
        } else {
            self.seen.map_or(0, |(first, last)| last - first)
        }
    }

    fn moment(&self) -> Moment {
        Moment::from_micros(self.now + 1)
    }

    /// The site of a gateway that still lives.
    fn site(&mut self, place: Place) -> Option<&mut Site> {
        self.sites.get_mut(place.at).filter(|site| site.life == place.life)
    }

    async fn happen(&mut self, event: Event, key: &str) -> Result<(), Refusal> {
        let now = self.moment();
        match event {
            Event::Call(at) => {
                self.outcome.asked.push(self.now);
                if let Some((asked, _)) = self.outcome.by_gateway.get_mut(at) {
                    *asked += 1;
                }
                let Some(site) = self.sites.get_mut(at) else { return Ok(()) };
                site.gateway.call(now);
                let (place, calls) = (Place { at, life: site.life }, site.calls);
                let next = calls.next(self.now, &mut self.rng) - self.now;
                self.after(next, Event::Call(at));
                self.act(place);
            }
            Event::Sweep(at) => {
                let Some(site) = self.sites.get_mut(at) else { return Ok(()) };
                site.gateway.sweep(now);
                let place = Place { at, life: site.life };
                self.after(ROUND, Event::Sweep(at));
                self.act(place);
            }
            Event::Kill(at) => self.kill(at),
            Event::Look(place) => {
                let Some(site) = self.site(place) else { return Ok(()) };
                site.gateway.look();
                self.act(place);
            }
            Event::Arrive(place, number, message) => {
                let gone = self.setting.gone.iter().any(|gone| gone.contains(&self.now));
                let reply = if gone { None } else { Some(self.serve(place, message, key).await?) };
                if self.comes_through() {
                    let takes = takes(self.setting.latency, &mut self.rng);
                    self.after(takes, Event::Answer(place, number, reply));
                }
            }
            Event::Answer(place, number, reply) => {
                let Some(site) = self.site(place) else { return Ok(()) };
                let Some(message) = site.open.remove(&number) else { return Ok(()) };
                if let Some(reply) = reply {
                    if matches!(message, Message::Borrow(_)) {
                        site.coming = None;
                    }
                    site.gateway.answered(now, reply);
                } else {
                    site.gateway.unanswered(now, &message);
                }
                self.act(place);
            }
            Event::Late(place, number) => {
                let Some(site) = self.site(place) else { return Ok(()) };
                let Some(message) = site.open.remove(&number) else { return Ok(()) };
                site.gateway.unanswered(now, &message);
                self.act(place);
            }
        }
        Ok(())
    }

    fn comes_through(&mut self) -> bool {
        self.rng.u8(..) >= self.setting.lost
    }

    /// What it held is lost, and its successor knows nothing.
    fn kill(&mut self, at: usize) {
        let life = self.sites.get(at).map_or(0, |site| site.life + 1);
        let gateway = self.fresh();
        if let Some(site) = self.sites.get_mut(at) {
            *site = Site { gateway, life, calls: site.calls, open: HashMap::new(), coming: None };
        }
        if let Some(every) = self.setting.killed_every {
            self.after(every, Event::Kill((at + 1) % self.setting.calls.len()));
        }
    }

    /// Does what a gateway has come to do.
    fn act(&mut self, place: Place) {
        let Some(site) = self.site(place) else { return };
        for act in site.gateway.acts() {
            match act {
                Act::Send(message) => self.send(place, message),
                Act::Decided { allowed: true } => self.admit(place.at),
                // It was admitted when the service said so.
                Act::Answered { allowed: true } => {}
                Act::Alone { allowed: true } => self.outcome.alone.push(self.now),
                Act::Decided { .. } | Act::Answered { .. } | Act::Alone { .. } => self.outcome.denied += 1,
                Act::LookAfter(span) => {
                    self.after(u64::try_from(span.as_micros()).unwrap_or(u64::MAX), Event::Look(place));
                }
            }
        }
    }

    fn admit(&mut self, at: usize) {
        self.outcome.admitted.push(self.now);
        self.bounds.admit(self.had(), self.setting.limited.cost.get());
        if let Some((_, admitted)) = self.outcome.by_gateway.get_mut(at) {
            *admitted += 1;
        }
    }

    fn send(&mut self, place: Place, message: Message) {
        let number = self.counter;
        for back in returns(&message) {
            // No lease lives longer.
            self.back.insert(back.lease_id.clone(), (back.unused.into(), self.now + 1_000_000));
        }
        if let Some(site) = self.site(place) {
            if let Message::Borrow(wish) = &message {
                // Of another wish nothing comes any more.
                site.coming = site.coming.filter(|(seq, _)| *seq == wish.seq);
            }
            site.open.insert(number, message.clone());
        }
        self.after(DEADLINE, Event::Late(place, number));
        if self.comes_through() {
            let takes = takes(self.setting.latency, &mut self.rng);
            self.after(takes, Event::Arrive(place, number, message));
        } else if let Message::Return(back) = message {
            self.back.remove(&back.lease_id);
        }
    }

    /// The service decides.
    async fn serve(&mut self, place: Place, message: Message, key: &str) -> Result<Reply, Refusal> {
        self.outcome.served.push(self.now);
        for back in returns(&message) {
            self.back.remove(&back.lease_id);
        }
        let request = |cost| Request { key: key.into(), class: CLASS.into(), cost, deadline: None };
        Ok(match message {
            Message::Ask => {
                let verdict = self.engine.should_rate_limit(request(None)).await?;
                if verdict.denied.is_none() {
                    self.gave();
                    self.admit(place.at);
                }
                Reply::Asked(verdict.into())
            }
            Message::Look => {
                self.engine.should_rate_limit(request(Some(Cost::ZERO))).await?;
                Reply::Other
            }
            Message::Return(back) => {
                self.engine.settle(&told(&back), None).await?;
                Reply::Other
            }
            Message::Borrow(wish) => {
                let seq = wish.seq;
                let borrow = Borrow {
                    key: key.into(),
                    class: CLASS.into(),
                    n: wish.n,
                    gateway: place.name(),
                    seq,
                    demand: NonZeroU32::new(wish.demand_per_s),
                    denied: wish.denied,
                    returns: wish.returns.iter().map(told).collect(),
                    deadline: None,
                };
                let reply = BorrowResponse::from(self.engine.borrow(borrow).await?);
                self.granted(place, seq, wish.n, &reply);
                Reply::Borrowed(Box::new(reply))
            }
        })
    }

    fn granted(&mut self, place: Place, seq: u64, n: u32, reply: &BorrowResponse) {
        if reply.granted > n || reply.valid_for.is_some_and(|life| (life.seconds, life.nanos) > (1, 0)) {
            self.outcome.wrong = Some(format!("{n} wished for, and granted: {reply:?}"));
        }
        if reply.granted > 0 {
            self.gave();
            if let Some(site) = self.site(place) {
                site.coming = Some((seq, reply.granted.into()));
            }
        }
    }

    /// Notes how it stands. What the others hold has not changed.
    fn stand(&mut self, whose: usize) {
        let now = self.now;
        self.back.retain(|_, (_, until)| *until > now);
        if let Some((site, held)) = self.sites.get(whose).zip(self.held.get_mut(whose)) {
            let holds = site.gateway.leases.outstanding() + site.coming.map_or(0, |(_, n)| n);
            self.out = self.out + holds - *held;
            *held = holds;
        }
        let outstanding = self.out + self.back.values().map(|(unused, _)| unused).sum::<u64>();
        self.outcome.most_outstanding = self.outcome.most_outstanding.max(outstanding);
        self.bounds.stand(self.had(), outstanding);
    }

    fn end(self) -> Outcome {
        let Limited { limit, algorithm, cost, .. } = &self.setting.limited;
        let (mut state, mut ideal) = (State::default(), 0);
        for at in &self.outcome.asked {
            let at = START.after(Duration::from_micros(*at));
            let decision = (algorithm.decide)(limit, &state, at, Want::exactly(*cost));
            if decision.allowed() {
                (algorithm.charge)(limit, &mut state, at, *cost);
                ideal += 1;
            }
        }
        let seen = self.store.seen();
        let wrong = self.outcome.wrong.or_else(|| seen.wrong.clone());
        Outcome {
            store: seen.calls,
            ideal,
            excess: self.bounds.excess(),
            wrong,
            above: self.bounds.wrong,
            ..self.outcome
        }
    }
}

fn returns(message: &Message) -> &[tollgate_client::leases::Return] {
    match message {
        Message::Borrow(wish) => &wish.returns,
        Message::Return(back) => std::slice::from_ref(back),
        Message::Ask | Message::Look => &[],
    }
}

fn told(back: &tollgate_client::leases::Return) -> Return {
    Return { lease_id: back.lease_id.clone(), unused: back.unused }
}
