//! Every store gives the same decisions: memory, Redis on each engine, and a naive model, on random traces.
//!
//! Redis is asked twice: call by call, and with what happens at one moment sent together, so that calls of one
//! batch meet in it.
//!
//! Each trace, and each step of shrinking one, has keys of its own, so that one Redis serves all of them.
//!
//! Synthetic time ends no key of a Redis, so what has ended is dropped by hand: leases always, buckets where
//! rules change (elsewhere a bucket that has ended must read like a new one, dropped or not). And when the
//! clock steps back, it stays behind what has ended: no store promises to bring that back. Nor is what Redis keeps for
//! up to a second after its end compared where rules change: by then memory has forgotten it.

mod traces;

use crate::naive::{Naive, micros};
use crate::stores::{Ask, Kind, START, Tested, config, each, kinds_and_topologies, memory};
use crate::support::DEADLINE;
use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::cmd;
use futures_util::future::join_all;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseError, TestCaseResult, TestRunner};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tollgate_server::algorithm::{ALL, Algorithm};
use tollgate_server::clock::Clock;
use tollgate_server::config::StoreConfig;
use tollgate_server::limit::{Cost, Decision, Limit, Rate, Timestamp, Want};
use tollgate_server::name::LeaseId;
use tollgate_server::request::{Charge, Settlement, Strikes};
use tollgate_server::store::{Store, connect};
use traces::{Amount, Charging, RuleSpec, Shift, Step, Trace, Unused, Wish, traces};

#[test]
fn every_store_gives_the_same_decisions() {
    differ(300, Bench::of(|kind| !matches!(kind, Kind::Cluster(_))), |trace| trace);
}

/// Calls on several slots are charged bucket by bucket there: `tests/topologies.rs` and `tests/envoy/vectors.rs`. What
/// belongs to one key is in one slot.
#[test]
fn every_cluster_gives_the_same_decisions_on_calls_of_one_key() {
    differ(60, Bench::of(|kind| matches!(kind, Kind::Cluster(_))), |mut trace| {
        for (step, _) in &mut trace.steps {
            if let Step::Call(wishes) = step {
                let key = wishes.first().map_or(0, |wish| wish.key);
                for wish in wishes {
                    wish.key = key;
                }
            }
        }
        trace
    });
}

fn differ(cases: u32, bench: impl Future<Output = Bench>, change: impl Fn(Trace) -> Trace) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let bench = runtime.block_on(bench);
    let mut config = Config {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/regressions/differential.txt"
        )))),
        max_shrink_iters: 5_000,
        ..Config::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    let run = |trace: Trace| runtime.block_on(bench.run(&change(trace)));
    TestRunner::new(config).run(&traces(ALL.len()), run).unwrap_or_else(|why| panic!("{why}"));
}

const KEYS: [&str; 3] = ["a", "a:b", "{ä}%"];
const CLASSES: [&str; 3] = ["c", "b:c", "read it"];

/// What all traces run on.
struct Bench {
    clock: Clock,
    /// Each with a connection to all of its servers.
    redis: Vec<(Tested, Vec<MultiplexedConnection>)>,
    cases: AtomicU64,
}

impl Bench {
    async fn of(which: impl Fn(Kind) -> bool) -> Self {
        let clock = Clock::manual(START);
        let mut redis = Vec::new();
        for kind in kinds_and_topologies().into_iter().filter(|kind| *kind != Kind::Memory && which(*kind)) {
            let tested = kind.start(&clock).await;
            let mut connections = Vec::new();
            for server in tested.servers() {
                connections.push(server.connection(DEADLINE).await.unwrap());
            }
            redis.push((tested, connections));
        }
        Self { clock, redis, cases: AtomicU64::new(0) }
    }

    async fn run(&self, trace: &Trace) -> TestCaseResult {
        let case = self.cases.fetch_add(1, Ordering::Relaxed);
        let mut run = Run {
            bench: self,
            prefix: format!("{case}/"),
            memory: memory(&self.clock),
            naive: Naive::default(),
            now: START.as_micros(),

            rules: trace.rules.clone(),
            rules_change: trace.steps.iter().any(|(step, _)| matches!(step, Step::Change { .. })),
            leases: Vec::new(),
            left: HashMap::new(),
            last: Vec::new(),
            together: Vec::new(),
        };
        for (step, shift) in &trace.steps {
            run.step(step).await?;
            if !matches!(shift, Shift::None) {
                run.send_together().await?;
            }
            run.shift(*shift);
        }
        run.send_together().await
    }
}

/// One trace, and where it is.
struct Run<'b> {
    bench: &'b Bench,
    prefix: String,
    memory: Arc<dyn Store>,
    naive: Naive,
    now: u64,

    rules: Vec<RuleSpec>,
    rules_change: bool,
    /// Leases that were asked for, granted or not.
    leases: Vec<(Ask, usize)>,
    /// What was last said to be left in a bucket.
    left: HashMap<(usize, usize), u64>,
    /// The last decisions.
    last: Vec<Decision>,
    /// What has happened at this moment.
    together: Vec<Event>,
}

/// A call of a store, and what it has to answer.
#[derive(Debug)]
enum Event {
    Call(Vec<Ask>, Vec<Decision>),
    Settle(Box<Ask>, u64, Cost),
}

/// Where batches are kept apart from calls that are sent alone.
const BATCHED: &str = "batched";

impl Run<'_> {
    async fn step(&mut self, step: &Step) -> TestCaseResult {
        self.bench.clock.set(Timestamp::from_micros(self.now));
        self.drop_ended().await?;
        match step {
            Step::Call(wishes) => self.call(wishes).await,
            Step::Settle { which, unused } if !self.leases.is_empty() => {
                let (mut ask, class) = self.leases[which.index(self.leases.len())].clone();
                // As it is now, not as it was when the tokens were taken.
                ask.limit = self.rules[class].limit;
                ask.algorithm = &ALL[self.rules[class].algorithm];
                self.settle(&ask, *unused).await
            }
            Step::Settle { unused, .. } | Step::SettleUnknown { unused } => {
                let rule = &self.rules[0];
                let never = Ask::new(&format!("{}{}", self.prefix, KEYS[0]), CLASSES[0], rule.limit, 1);
                let never = never.by(&ALL[rule.algorithm]).leased(1, Duration::from_secs(1));
                self.settle(&never, *unused).await
            }
            Step::Again { which } if !self.leases.is_empty() => {
                let (mut ask, class) = self.leases[which.index(self.leases.len())].clone();
                ask.limit = self.rules[class].limit;
                ask.algorithm = &ALL[self.rules[class].algorithm];
                // More than the burst is refused before it comes to a store.
                let most = Cost::new(ask.limit.burst());
                ask.want.at_least = ask.want.at_least.min(most);
                if self.together.iter().any(|event| matches!(event, Event::Settle(..))) {
                    self.send_together().await?;
                }
                self.decide(vec![ask]).await.map(drop)
            }
            Step::Again { .. } => Ok(()),
            Step::Change { class, rule } => {
                self.rules[*class] = rule.clone();
                Ok(())
            }
        }
    }

    async fn call(&mut self, wishes: &[Wish]) -> TestCaseResult {
        let mut seen = HashSet::new();
        let wishes: Vec<_> = wishes.iter().filter(|wish| seen.insert((wish.key, wish.class))).collect();
        let asks: Vec<_> = wishes.iter().map(|wish| self.ask(wish)).collect();
        let expected = self.decide(asks.clone()).await?;
        for (wish, decision) in wishes.iter().zip(&expected) {
            self.left.insert((wish.key, wish.class), decision.remaining);
        }
        let leases = wishes.iter().zip(asks).filter(|(_, ask)| ask.lease.is_some());
        self.leases.extend(leases.map(|(wish, ask)| (ask, wish.class)));
        Ok(())
    }

    async fn decide(&mut self, asks: Vec<Ask>) -> Result<Vec<Decision>, TestCaseError> {
        let expected = self.naive.decide(&asks, self.now);
        let hits = || asks.iter().map(Ask::hit).collect::<Vec<_>>();
        let of_memory = self.memory.decide(hits(), None).await.unwrap();
        prop_assert_eq!(&of_memory, &expected, "memory at {}, asked {:#?}", self.now, asks);
        for (tested, _) in &self.bench.redis {
            let of_redis = tested.store.decide(hits(), None).await.unwrap();
            prop_assert_eq!(&of_redis, &expected, "{} at {}, asked {:#?}", tested.name, self.now, asks);
        }

        self.together.push(Event::Call(asks, expected.clone()));
        self.last.clone_from(&expected);
        Ok(expected)
    }

    async fn settle(&mut self, ask: &Ask, unused: Unused) -> TestCaseResult {
        let unused = match unused {
            Unused::Some(some) => some % (ask.want.at_most.get() + 2),
            Unused::Nothing => 0,
            Unused::Everything => ask.want.at_most.get(),
            Unused::More => u32::MAX.into(),
        };
        let is_its = |other: &Ask| other.bucket() == ask.bucket() && other.lease.is_some();
        if self.together.iter().any(|event| matches!(event, Event::Call(asks, _) if asks.iter().any(is_its)))
        {
            // Nobody can know a lease before it is granted.
            self.send_together().await?;
        }
        let expected = Cost::new(self.naive.settle(ask, unused, self.now));
        self.together.push(Event::Settle(Box::new(ask.clone()), unused, expected));
        let of_memory = self.memory.settle(ask.settlement(unused), None).await.unwrap();
        prop_assert_eq!(of_memory, expected, "memory at {}, {} of {:#?}", self.now, unused, ask);
        for (tested, _) in &self.bench.redis {
            let of_redis = tested.store.settle(ask.settlement(unused), None).await.unwrap();
            prop_assert_eq!(of_redis, expected, "{} at {}, {} of {:#?}", tested.name, self.now, unused, ask);
        }
        Ok(())
    }

    /// Sends what has happened at this moment at once: the first goes out alone, the others meanwhile wait.
    async fn send_together(&mut self) -> TestCaseResult {
        let events = std::mem::take(&mut self.together);
        for (tested, _) in &self.bench.redis {
            // A new one: what it remembers of denials would answer before its turn.
            let config =
                StoreConfig { connections: 1, prefix: BATCHED.into(), ..config(&tested.url().unwrap()) };
            let store = connect(&config, self.bench.clock.clone()).unwrap();
            let answers = join_all(events.iter().map(async |event| match event {
                Event::Call(asks, _) => {
                    let decisions = store.decide(asks.iter().map(Ask::hit).collect(), None).await.unwrap();
                    Event::Call(asks.clone(), decisions)
                }
                Event::Settle(ask, unused, _) => {
                    let credited = store.settle(ask.settlement(*unused), None).await.unwrap();
                    Event::Settle(ask.clone(), *unused, credited)
                }
            }));
            for (n, (answer, event)) in answers.await.iter().zip(&events).enumerate() {
                match (answer, event) {
                    (Event::Call(_, decided), Event::Call(_, expected)) => {
                        prop_assert_eq!(decided, expected, "{}, {} of {:#?}", tested.name, n, events);
                    }
                    (Event::Settle(_, _, credited), Event::Settle(_, _, expected)) => {
                        prop_assert_eq!(credited, expected, "{}, {} of {:#?}", tested.name, n, events);
                    }
                    _ => unreachable!("each is answered in its kind"),
                }
            }
        }
        Ok(())
    }

    fn ask(&self, wish: &Wish) -> Ask {
        let rule = &self.rules[wish.class];
        let left = self.left.get(&(wish.key, wish.class)).copied().unwrap_or(rule.limit.burst());
        let tokens = |amount: Amount| match amount {
            Amount::None => 0,
            Amount::One => 1,
            Amount::Burst => rule.limit.burst(),
            Amount::Left => left,
            Amount::OneMoreThanLeft => left + 1,
            Amount::Some(some) => some % (rule.limit.burst() + 1),
            Amount::Any => u32::MAX.into(),
        };
        // More than the burst is refused before it comes to a store.
        let at_least = tokens(wish.at_least).min(rule.limit.burst());
        let at_most = wish.at_most.map_or(at_least, |most| tokens(most).max(at_least));
        let ask = Ask::new(&format!("{}{}", self.prefix, KEYS[wish.key]), CLASSES[wish.class], rule.limit, 0);
        let strikes =
            rule.penalty.map(|penalty| Strikes { penalty, reported: wish.reported, on_denial: wish.counts });
        let cost = Cost::new(tokens(wish.at_least));
        let (want, charge) = match wish.charge {
            Charging::Always => {
                let never = Cost::new(rule.limit.burst() + 1);
                (Want::exactly(cost.min(never)), Charge::Always(cost))
            }
            // Nothing given back is a peek.
            Charging::GiveBack if cost == Cost::ZERO => (Want::exactly(cost), Charge::IfAllowed),
            Charging::GiveBack => (Want::exactly(Cost::ZERO), Charge::GiveBack(cost)),
            Charging::IfAllowed => {
                (Want { at_least: Cost::new(at_least), at_most: Cost::new(at_most) }, Charge::IfAllowed)
            }
        };
        let quota = wish.quota;
        let ask = Ask { want, shadow: rule.shadow, quota, charge, strikes, ..ask.by(&ALL[rule.algorithm]) };
        match wish.lease {
            Some(valid_for) if charge == Charge::IfAllowed => ask.leased(at_most, valid_for),
            _ => ask,
        }
    }

    fn shift(&mut self, shift: Shift) {
        let seen = |which: prop::sample::Index| {
            let decision = (!self.last.is_empty()).then(|| self.last[which.index(self.last.len())]);
            decision.map_or((0, 0), |d| (micros(d.retry_after), micros(d.reset_after)))
        };
        // Not so far that a later one would leave the numbers that a double holds exactly.
        let near = |span: u64| span.min(1 << 46);
        self.now = match shift {
            Shift::None => self.now,
            Shift::Forward(span) => self.now + span,
            Shift::Window { class, share } => {
                self.now + near(micros(self.rules[class].limit.window())) / 1_000 * u64::from(share)
            }
            Shift::Retry { which, early } => self.now + near(seen(which).0).saturating_sub(early),
            Shift::Reset { which, early } => self.now + near(seen(which).1).saturating_sub(early),
            // Not behind what has ended.
            Shift::Back(span) => self.now.saturating_sub(span),
        };
    }

    async fn drop_ended(&mut self) -> TestCaseResult {
        let ended = self.naive.forget(self.now);
        self.now = self.now.max(self.naive.ended);
        self.bench.clock.set(Timestamp::from_micros(self.now));
        let gone = ended.iter().filter(|name| self.rules_change || name.starts_with("lease:"));
        let gone: Vec<_> =
            gone.flat_map(|name| ["rl", BATCHED].map(|prefix| format!("{prefix}:{name}"))).collect();
        if gone.is_empty() {
            return Ok(());
        }
        self.send_together().await?;
        for (tested, connections) in &self.bench.redis {
            for connection in connections {
                let mut connection = connection.clone();
                if tested.cluster.is_none() {
                    cmd("DEL").arg(&gone).exec_async(&mut connection).await.unwrap();
                }
                for key in gone.iter().filter(|_| tested.cluster.is_some()) {
                    // Who does not have it says so.
                    cmd("DEL").arg(key).exec_async(&mut connection).await.ok();
                }
            }
        }
        for bucket in ended.iter().filter(|name| name.starts_with('{')) {
            // What is known of its denials would outlive it: to the store it is told as tokens that come back.
            let id = LeaseId::parse(&format!("{bucket}:{:032x}", 0)).unwrap();
            let (limit, algorithm) = (self.rules[0].limit, &ALL[self.rules[0].algorithm]);
            for (tested, _) in &self.bench.redis {
                let nothing = Settlement { id: id.clone(), limit, algorithm, unused: Cost::ZERO };
                tested.store.settle(nothing, None).await.unwrap();
            }
        }
        Ok(())
    }
}

/// Random traces keep logs short; this one is as long as a log may be, and is cut in the middle of a grant.
#[tokio::test]
async fn a_long_log_is_forgotten_searched_and_cut_alike() {
    let clock = Clock::manual(START);
    let limit = Limit::new(Rate::new(10_000, Duration::from_secs(10)).unwrap(), 10_000).unwrap();
    let log = Algorithm::named("sliding_log").unwrap();
    let at = |millis: u64| Timestamp::from_micros(START.as_micros() + 1000 * millis);
    let mut told = Vec::new();
    for tested in each(&clock).await {
        clock.set(at(0));
        let ask = |cost: u64| Ask::new("k", "c", limit, cost).by(log);
        let lease = ask(6000).leased(6000, Duration::from_secs(60));
        let mut said = vec![lease.of(&*tested.store).await];
        for n in 0..1000 {
            clock.set(at(n));
            said.push(ask(3).of(&*tested.store).await);
        }
        for cost in [1001, 2500, 7001, 9999, 10_000] {
            said.push(ask(cost).of(&*tested.store).await);
        }
        let credited = tested.store.settle(lease.settlement(2000), None).await.unwrap();
        for (millis, cost) in [(1000, 4000), (9999, 1), (10_500, 3000), (11_500, 10_000), (90_000, 10_000)] {
            clock.set(at(millis));
            said.push(ask(cost).of(&*tested.store).await);
        }
        told.push((tested.name, credited, said));
    }
    let (_, credited, said) = &told[0];
    assert_eq!(*credited, Cost::new(2000));
    assert!(said.iter().any(Decision::allowed) && !said.iter().all(Decision::allowed));
    for (name, other, all) in &told[1..] {
        assert_eq!((other, all), (credited, said), "{name}");
    }
}
