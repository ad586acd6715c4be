//! No sequence of Borrows, Returns and calls gives out more than the bucket had.

use super::Reader;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Builder;
use tollgate_server::algorithm::{ALL, BY_CALENDAR};
use tollgate_server::clock::Clock;
use tollgate_server::engine::Engine;
use tollgate_server::limit::{Cost, Limit, Rate, Timestamp};
use tollgate_server::penalty::Penalty;
use tollgate_server::request::{Borrow, Lease, Request, Return};
use tollgate_server::rules::{Limited, Rule, Rules};
use tollgate_server::store::memory::Memory;

const RATE: u64 = 100;
const BURST: u64 = 50;
const SECOND: u64 = 1_000_000;
const START: u64 = 1_700_000_000 * SECOND;

/// The first byte says how it is counted; then each step is a few bytes: what is done, and how much of it.
pub fn leases(data: &[u8]) {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    let mut from = Reader(data);
    let mut world = World::new(&mut from);
    runtime.block_on(async {
        while !from.0.is_empty() {
            match from.byte() % 5 {
                0 => world.borrow(&mut from).await,
                1 => world.give_back(&mut from).await,
                2 => world.ask(&mut from).await,
                _ => {
                    world.now += u64::from(from.byte()) * u64::from(from.byte() % 16) * 1_000;
                    world.clock.set(Timestamp::from_micros(world.now));
                }
            }
            world.check();
        }
    });
}

/// What was lent.
struct Lent {
    granted: u64,
    ends: u64,
    came_back: bool,
}

impl Lent {
    fn is_out(&self, now: u64) -> bool {
        !self.came_back && now < self.ends
    }
}

struct World {
    engine: Engine,
    clock: Clock,
    now: u64,
    /// By the name of the lease, and the names in their order.
    lent: HashMap<String, Lent>,
    names: Vec<String>,
    /// All that was given out and did not come back, and when the last of it was.
    given: u64,
    latest: u64,
    /// What is given out in no time.
    most: u64,
}

impl World {
    fn new(from: &mut Reader<'_>) -> Self {
        let how = from.byte();
        let algorithm = &ALL[usize::from(how) % ALL.len()];
        let clock = Clock::manual(Timestamp::from_micros(START));
        let second = Duration::from_secs(1);
        let limited = Limited {
            limit: Limit::new(Rate::new(RATE, second).expect("a rate"), BURST).expect("a limit"),
            algorithm,
            cost: Cost::new(1),
            sensitive: false,
            penalty: (how >= 128).then(|| Penalty::new(2, second, second, second).expect("a penalty")),
            shadow: false,
            wait: true,
        };
        let rules = Rules::new([Rule::new("c", Some(limited))]);
        let store = Memory::new(1 << 16, 1 << 24, clock.clone());
        let engine = Engine::new(rules.live(), Arc::new(store), 512, clock.clone());
        // A window by the calendar ends whenever it does, and then there is another burst.
        let most = if algorithm.name == BY_CALENDAR.name { 2 * BURST } else { BURST };
        Self {
            engine,
            clock,
            now: START,
            lent: HashMap::new(),
            names: Vec::new(),
            given: 0,
            latest: START,
            most,
        }
    }

    fn give(&mut self, tokens: u64) {
        if tokens > 0 {
            self.given += tokens;
            self.latest = self.now;
        }
    }

    async fn borrow(&mut self, from: &mut Reader<'_>) {
        let n = u32::from(from.byte()) + 1;
        let gateway = ["", "a", "b"][usize::from(from.byte() % 3)].to_owned();
        let (seq, demand) = (u64::from(from.byte() % 4), u32::from(from.byte()).try_into().ok());
        let denied = u32::from(from.byte()).saturating_sub(250);
        // What is over already can come back as often as one likes.
        let over = self.names.iter().filter(|name| !self.lent[*name].is_out(self.now));
        let returns = over.take(2).map(|name| Return { lease_id: name.clone(), unused: u32::MAX }).collect();
        let key = "k".into();
        let wish =
            Borrow { key, class: "c".into(), n, gateway, seq, demand, denied, returns, deadline: None };
        let Lease { id, granted, valid_for, .. } = self.engine.borrow(wish).await.expect("it can be");
        let Some(id) = id else { return };
        let name = id.as_str().to_owned();
        let granted = granted.get();
        if let Some(known) = self.lent.get(&name)
            && known.is_out(self.now)
        {
            assert_eq!(granted, known.granted, "the same wish is the same lease");
            return;
        }
        assert!(granted <= n.into(), "{granted} granted of {n}");
        let ends = self.now + u64::try_from(valid_for.as_micros()).expect("a short time");
        if self.lent.insert(name.clone(), Lent { granted, ends, came_back: false }).is_none() {
            self.names.push(name);
        }
        self.give(granted);
    }

    async fn give_back(&mut self, from: &mut Reader<'_>) {
        let (which, unused) = (usize::from(from.byte()), u32::from(from.byte()));
        let Some(name) = self.names.get(which % self.names.len().max(1)) else { return };
        let back = Return { lease_id: name.clone(), unused };
        let credited = self.engine.settle(&back, None).await.expect("it can be").get();
        let lent = self.lent.get_mut(name).expect("it was lent");
        let most = if lent.is_out(self.now) { lent.granted.min(unused.into()) } else { 0 };
        assert!(credited <= most, "{credited} of {most} came back");
        lent.came_back = true;
        self.given -= credited;
    }

    async fn ask(&mut self, from: &mut Reader<'_>) {
        let cost = u64::from(from.byte()) % (BURST + 1);
        let request =
            Request { key: "k".into(), class: "c".into(), cost: Some(Cost::new(cost)), deadline: None };
        let verdict = self.engine.should_rate_limit(request).await.expect("it can be");
        assert!(verdict.remaining <= BURST, "{verdict:?}");
        if verdict.denied.is_none() {
            self.give(cost);
        }
    }

    fn check(&self) {
        let most = self.most + RATE * (self.latest - START) / SECOND;
        assert!(self.given <= most, "{} given of {most}", self.given);
    }
}
