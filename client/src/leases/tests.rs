//! What always holds, on random schedules of gateways, losses and a service that grants as it likes; and tables of
//! how the chunk follows the demand.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use std::collections::HashMap;

/// A service with one bucket: `count` tokens each `period`, counted in parts of a token.
struct Service {
    count: u64,
    period: u64,
    burst: u64,
    level: u64,
    at: u64,
    leases: HashMap<String, Lease>,
    /// What was granted to a wish, for one that is sent again.
    told: HashMap<(usize, u64), Grant>,
}

struct Lease {
    gateway: usize,
    granted: u64,
    ends: u64,
    settled: bool,
    /// When its gateway came to know of it, and over what time it may be spent.
    arrived: Option<u64>,
    spread: u64,
    /// What the gateway said was left of it.
    unused: Option<u64>,
}

/// How a grant is made.
#[derive(Clone, Copy, Debug)]
struct Mood {
    valid_for: u64,
    spread: u64,
    leasable: bool,
}

impl Service {
    fn new(count: u64, period: u64, burst: u64) -> Self {
        Self {
            count,
            period,
            burst,
            level: burst * period,
            at: 0,
            leases: HashMap::new(),
            told: HashMap::new(),
        }
    }

    fn refill(&mut self, now: u64) {
        self.level = (self.level + (now - self.at) * self.count).min(self.burst * self.period);
        self.at = now;
    }

    fn borrow(&mut self, now: u64, gateway: usize, wish: &Wish, mood: Mood) -> Result<Grant, TestCaseError> {
        if let Some(grant) = self.told.get(&(gateway, wish.seq)) {
            return Ok(grant.clone());
        }
        for back in &wish.returns {
            self.take_back(now, gateway, back)?;
        }
        self.refill(now);
        let granted = (self.level / self.period).min(u64::from(wish.n));
        self.level -= granted * self.period;
        let lease_id = if granted > 0 { format!("{gateway}-{}", wish.seq) } else { String::new() };
        if granted > 0 {
            let spread = mood.spread.min(mood.valid_for);
            let ends = now + mood.valid_for;
            let lease = Lease { gateway, granted, ends, settled: false, arrived: None, spread, unused: None };
            self.leases.insert(lease_id.clone(), lease);
        }
        let grant = Grant {
            lease_id,
            granted: u32::try_from(granted).unwrap(),
            valid_for: Duration::from_micros(mood.valid_for),
            spread_over: Duration::from_micros(mood.spread),
            limit: self.burst,
            remaining: self.level / self.period,
            retry_after: Duration::from_micros(
                (self.period - self.level.min(self.period)).div_ceil(self.count),
            ),
            blocked: false,
            leasable: mood.leasable,
            cost: 1,
            degraded: false,
        };
        self.told.insert((gateway, wish.seq), grant.clone());
        Ok(grant)
    }

    fn take_back(&mut self, now: u64, gateway: usize, back: &Return) -> TestCaseResult {
        let Some(lease) = self.leases.get_mut(&back.lease_id) else {
            return Err(TestCaseError::fail(format!("{back:?} was never granted")));
        };
        prop_assert_eq!(lease.gateway, gateway);
        let unused = u64::from(back.unused);
        prop_assert!(unused <= lease.granted, "{:?} of {}", back, lease.granted);
        prop_assert!(lease.unused.is_none_or(|told| told == unused), "{:?}, after {:?}", back, lease.unused);
        lease.unused = Some(unused);
        if !lease.settled && now < lease.ends {
            lease.settled = true;
            self.refill(now);
            self.level = (self.level + unused * self.period).min(self.burst * self.period);
        }
        Ok(())
    }
}

#[derive(Default)]
struct Gateway {
    leases: Leases,
    admitted: u64,
    seq: u64,
    /// A wish that is under way, and what will come of it.
    under_way: Option<Reply>,
    /// A denial that stands: from when, and when it fits.
    held: Option<(u64, u64)>,
    closed: bool,
}

#[derive(Debug)]
enum Reply {
    Grant(Grant),
    Lost,
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Call { gateway: usize, times: u64 },
    Borrow { gateway: usize, mood: Mood, fate: Fate },
    Land { gateway: usize },
    Sweep { gateway: usize, lost: bool },
    Close { gateway: usize },
    Wait(u64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Answered,
    NeverArrived,
    ReplyLost,
}

const GATEWAYS: usize = 3;

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let gateway = || 0..GATEWAYS;
    let mood = (1_000..2_000_000_u64, prop_oneof![Just(0), 1..300_000_u64], prop::bool::weighted(0.95))
        .prop_map(|(valid_for, spread, leasable)| Mood { valid_for, spread, leasable });
    let fate =
        prop_oneof![4 => Just(Fate::Answered), 1 => Just(Fate::NeverArrived), 1 => Just(Fate::ReplyLost)];
    let act = prop_oneof![
        8 => (gateway(), 1..12_u64).prop_map(|(gateway, times)| Act::Call { gateway, times }),
        5 => (gateway(), mood, fate).prop_map(|(gateway, mood, fate)| Act::Borrow { gateway, mood, fate }),
        6 => gateway().prop_map(|gateway| Act::Land { gateway }),
        2 => (gateway(), prop::bool::weighted(0.2)).prop_map(|(gateway, lost)| Act::Sweep { gateway, lost }),
        1 => gateway().prop_map(|gateway| Act::Close { gateway }),
        6 => (0..60_000_u64).prop_map(Act::Wait),
        2 => (0..1_500_000_u64).prop_map(Act::Wait),
    ];
    prop::collection::vec(act, 1..120)
}

/// How things stood at some time.
struct Stand {
    at: u64,
    admitted: u64,
    outstanding: u64,
}

fn live((count, period, burst): (u64, u64, u64), acts: &[Act]) -> TestCaseResult {
    const START: u64 = 1_000_000;
    let mut now = START;
    let mut service = Service::new(count, period, burst);
    service.at = now;
    let mut gateways: Vec<Gateway> = std::iter::repeat_with(Gateway::default).take(GATEWAYS).collect();
    let mut stands = vec![Stand { at: now, admitted: 0, outstanding: 0 }];
    for act in acts {
        let at = Moment::from_micros(now);
        match *act {
            Act::Call { gateway, times } => {
                for _ in 0..times {
                    call(&mut gateways[gateway], now)?;
                }
            }
            Act::Borrow { gateway, mood, fate } => {
                let g = &mut gateways[gateway];
                g.seq += 1;
                if let Some(wish) = g.leases.borrow(at, g.seq, 0) {
                    prop_assert!(g.under_way.is_none(), "two wishes at a time");
                    prop_assert!(wish.n >= 1 && u64::from(wish.n) <= burst.max(8), "{wish:?}");
                    let granted = if fate == Fate::NeverArrived {
                        None
                    } else {
                        Some(service.borrow(now, gateway, &wish, mood)?)
                    };
                    g.under_way = Some(match granted {
                        Some(grant) if fate == Fate::Answered => Reply::Grant(grant),
                        _ => Reply::Lost,
                    });
                }
            }
            Act::Land { gateway } => land(&mut gateways[gateway], &mut service, now),
            Act::Sweep { gateway, lost } => {
                for back in gateways[gateway].leases.sweep(at) {
                    if lost {
                        // It ends by itself. What it said was true all the same.
                        service.leases.get_mut(&back.lease_id).unwrap().unused = Some(u64::from(back.unused));
                    } else {
                        service.take_back(now, gateway, &back)?;
                    }
                }
            }
            Act::Close { gateway } => {
                let g = &mut gateways[gateway];
                for back in g.leases.close(at) {
                    service.take_back(now, gateway, &back)?;
                }
                g.closed = true;
                prop_assert_eq!(g.leases.outstanding(), 0);
            }
            Act::Wait(span) => now += span,
        }
        check(&service, &gateways, &mut stands, now)?;
    }
    // In the end everything goes back.
    for (which, g) in gateways.iter_mut().enumerate() {
        let at = Moment::from_micros(now);
        let mut back = g.leases.close(at);
        g.closed = true;
        land(g, &mut service, now);
        back.extend(g.leases.sweep(at));
        for back in &back {
            service.take_back(now, which, back)?;
        }
        prop_assert!(g.leases.sweep(at).is_empty() && g.leases.is_empty(), "something is left");
        let of_it =
            || service.leases.values().filter(|lease| lease.gateway == which && lease.arrived.is_some());
        let granted: u64 = of_it().map(|lease| lease.granted).sum();
        let back: u64 = of_it().filter_map(|lease| lease.unused).sum();
        // All that did not come back is spent or has ended.
        let gone: u64 = of_it().filter(|lease| lease.unused.is_none()).map(|lease| lease.granted).sum();
        prop_assert!(g.admitted + back <= granted, "{} + {} of {}", g.admitted, back, granted);
        let all_live = of_it().all(|lease| now < lease.ends.min(lease.arrived.unwrap_or(0)));
        prop_assert!(g.admitted + back == granted || gone > 0 || !all_live);
    }
    Ok(())
}

fn call(g: &mut Gateway, now: u64) -> TestCaseResult {
    let at = Moment::from_micros(now);
    match g.leases.spend(at, None) {
        Spend::Decided { verdict, .. } if verdict.allowed() => {
            prop_assert!(!g.closed, "allowed after the end");
            prop_assert_eq!(verdict.cost, 1);
            g.admitted += 1;
        }
        Spend::Decided { verdict, .. } => {
            prop_assert!(verdict.retry_after > Duration::ZERO, "denied until now: {:?}", verdict);
            if g.leases.outstanding() == 0 {
                // A held denial: exactly until it fits, and heard of again within a second.
                let (since, fits) = g.held.expect("denied, and nobody said so");
                prop_assert_eq!(verdict.retry_after, Duration::from_micros(fits - now));
                prop_assert!(now < since + micros(HOLD_MOST));
            }
        }
        Spend::Nothing => {
            let stands = g.held.is_some_and(|(since, fits)| now < fits.min(since + micros(HOLD_MOST)));
            prop_assert!(!stands, "a denial that stands was forgotten");
            g.leases.touch(at);
        }
    }
    Ok(())
}

fn land(g: &mut Gateway, service: &mut Service, now: u64) {
    let at = Moment::from_micros(now);
    match g.under_way.take() {
        Some(Reply::Grant(grant)) => {
            if let Some(lease) = service.leases.get_mut(&grant.lease_id) {
                lease.arrived = Some(now);
            }
            if grant.granted == 0 && grant.leasable && !grant.retry_after.is_zero() {
                g.held = Some((now, now + micros(grant.retry_after)));
            }
            g.leases.granted(at, grant);
        }
        Some(Reply::Lost) => g.leases.failed(at),
        None => {}
    }
}

fn check(service: &Service, gateways: &[Gateway], stands: &mut Vec<Stand>, now: u64) -> TestCaseResult {
    for (which, g) in gateways.iter().enumerate() {
        // No more than the lines of its leases have reached, and nothing after their ends.
        let line = |lease: &Lease| {
            let until = now.min(lease.ends);
            let since = until.saturating_sub(lease.arrived.unwrap_or(until));
            match lease.arrived {
                None => 0,
                Some(_) if lease.spread == 0 => lease.granted,
                Some(_) => lease.granted * since.min(lease.spread) / lease.spread,
            }
        };
        let may: u64 = service.leases.values().filter(|lease| lease.gateway == which).map(line).sum();
        prop_assert!(
            g.admitted <= may,
            "gateway {} admitted {}, its leases allow {}",
            which,
            g.admitted,
            may
        );
    }
    let admitted: u64 = gateways.iter().map(|g| g.admitted).sum();
    let held: u64 = gateways.iter().map(|g| g.leases.outstanding()).sum();
    let on_the_way = service.leases.values().filter(|lease| lease.arrived.is_none() && now < lease.ends);
    let outstanding = held + on_the_way.map(|lease| lease.granted).sum::<u64>();
    stands.push(Stand { at: now, admitted, outstanding });
    for since in stands.iter() {
        let may = (service.burst + since.outstanding) * service.period + (now - since.at) * service.count;
        prop_assert!(
            (admitted - since.admitted) * service.period <= may,
            "{} admitted in {} us, with {} outstanding at their start",
            admitted - since.admitted,
            now - since.at,
            since.outstanding
        );
    }
    Ok(())
}

proptest! {
    #[test]
    fn whatever_is_lost_no_more_is_spent_than_was_granted(
        limit in (1..=50_u64, 1_000..=3_000_000_u64, 1..=60_u64),
        acts in acts(),
    ) {
        live(limit, &acts)?;
    }
}

/// A gateway and a service that grants everything at once.
struct Steady {
    leases: Leases,
    now: u64,
    seq: u64,
    wishes: Vec<u32>,
}

impl Steady {
    const LIFE: u64 = 500_000;

    fn new() -> Self {
        Self { leases: Leases::default(), now: 1_000_000, seq: 0, wishes: vec![] }
    }

    fn borrow(&mut self, grant: impl FnOnce(&Wish, Grant) -> Grant) -> Option<Wish> {
        self.seq += 1;
        let at = Moment::from_micros(self.now);
        let wish = self.leases.borrow(at, self.seq, 1)?;
        self.wishes.push(wish.n);
        let usual = Grant {
            lease_id: format!("lease {}", self.seq),
            granted: wish.n,
            valid_for: Duration::from_micros(Self::LIFE),
            limit: 10_000,
            remaining: 9_000,
            leasable: true,
            cost: 1,
            ..Grant::default()
        };
        self.leases.granted(at, grant(&wish, usual));
        Some(wish)
    }

    /// Calls each `every` microseconds, borrowing whenever it is time; returns how many were allowed.
    fn run(&mut self, every: u64, calls: u64) -> u64 {
        let mut allowed = 0;
        for _ in 0..calls {
            self.now += every;
            let at = Moment::from_micros(self.now);
            match self.leases.spend(at, None) {
                Spend::Decided { verdict, low } => {
                    allowed += u64::from(verdict.allowed());
                    if low {
                        self.borrow(|_, grant| grant);
                    }
                }
                Spend::Nothing => {
                    if self.leases.touch(at) {
                        self.borrow(|_, grant| grant);
                        allowed += u64::from(matches!(self.leases.spend(at, None), Spend::Decided { .. }));
                    }
                }
            }
            self.leases.sweep(at);
        }
        allowed
    }
}

#[test]
fn a_key_is_asked_for_until_it_is_hot() {
    let mut cold = Steady::new();
    assert_eq!(cold.run(251_000, 20), 0);
    assert_eq!(cold.wishes, [], "four calls a second are not worth a chunk");
    let mut hot = Steady::new();
    assert_eq!(hot.run(249_000, 20), 19, "all but the first are decided here");
}

#[test]
fn the_chunk_grows_until_it_lasts_half_of_its_lease_and_then_stays() {
    let mut gateway = Steady::new();
    // A thousand a second: 250 ms are 250 calls.
    assert_eq!(gateway.run(1_000, 10_000), 9_999);
    assert_eq!(gateway.wishes[..9], [8, 12, 18, 27, 41, 62, 93, 140, 210]);
    let last = *gateway.wishes.last().unwrap();
    // The quarter that is left of the one before comes on top.
    assert!((200..=300).contains(&last), "{:?}", gateway.wishes);
    let steady = gateway.wishes.iter().filter(|n| **n == last).count();
    assert!(steady + 11 > gateway.wishes.len(), "{:?}", gateway.wishes);
    // One call in a hundred is heard of at most.
    assert!(gateway.wishes.len() < 10_000 / 100);
}

#[test]
fn the_chunk_comes_down_to_what_was_used() {
    let mut gateway = Steady::new();
    gateway.run(1_000, 5_000);
    let before = *gateway.wishes.last().unwrap();
    gateway.run(20_000, 200);
    let after = *gateway.wishes.last().unwrap();
    // Fifty a second; three quarters of a lease are 19 calls.
    assert!(before > 200 && (8..=25).contains(&after), "{:?}", gateway.wishes);
}

#[test]
fn the_chunk_is_halved_when_the_bucket_holds_less() {
    let mut gateway = Steady::new();
    gateway.borrow(|wish, grant| Grant { granted: wish.n - 1, ..grant });
    gateway.now += Steady::LIFE / 4;
    gateway.borrow(|_, grant| grant);
    assert_eq!(gateway.wishes, [8, 4]);
    // A grant that is spread is of the service's own choice.
    let mut gateway = Steady::new();
    let spread_over = Duration::from_millis(60);
    gateway.borrow(|_, grant| Grant { granted: 3, spread_over, ..grant });
    gateway.borrow(|_, grant| grant);
    assert_eq!(gateway.wishes, [8, 8]);
}

#[test]
fn a_cold_key_borrows_one_call_to_learn_of_its_class() {
    let leases = Leases::default();
    let at = Moment::from_micros(1_000_000);
    assert_eq!(leases.borrow(at, 1, 0).unwrap().n, 1);
    leases.granted(at, Grant { leasable: true, cost: 5, limit: 100, ..Grant::default() });
    assert_eq!(leases.borrow(at, 2, 0).unwrap().n, 5);
    leases.granted(at, Grant { leasable: true, cost: 5, ..Grant::default() });
    assert_eq!(leases.borrow(at, 3, 1).unwrap().n, 25, "eight calls, but a quarter of the burst at most");
    leases.granted(at, Grant { leasable: true, cost: 5, ..Grant::default() });
    assert_eq!(leases.borrow(at, 4, 30).unwrap().n, 50, "as many as wait, but half of the burst at most");
}

#[test]
fn a_wish_whose_reply_was_lost_is_sent_again_as_it_was() {
    let leases = Leases::default();
    let at = |millis: u64| Moment::from_micros(1_000_000 + millis * 1_000);
    let first = leases.borrow(at(0), 1, 0).unwrap();
    assert_eq!(leases.borrow(at(1), 2, 0), None, "one at a time");
    leases.failed(at(50));
    assert_eq!(leases.borrow(at(51), 3, 9), None, "not at once");
    assert_eq!(leases.borrow(at(80), 4, 9), Some(first.clone()));
    leases.failed(at(130));
    // The lease, if there ever was one, has ended.
    let next = leases.borrow(at(1_000), 5, 0).unwrap();
    assert_eq!((first.seq, next.seq), (1, 5));
}

#[test]
fn what_was_to_go_back_with_a_lost_wish_goes_back_with_the_end() {
    let mut gateway = Steady::new();
    gateway.borrow(|_, grant| grant);
    gateway.now += Steady::LIFE * 3 / 4;
    // Late, so that it goes back with the next wish.
    let wish = gateway.leases.borrow(Moment::from_micros(gateway.now), 9, 1).unwrap();
    assert_eq!(wish.returns, [Return { lease_id: "lease 1".into(), unused: 8 }]);
    gateway.leases.failed(Moment::from_micros(gateway.now + 1));
    assert_eq!(gateway.leases.close(Moment::from_micros(gateway.now + 2)), wish.returns);
    assert!(gateway.leases.is_empty());
}

#[test]
fn nothing_is_free_before_the_cost_is_known() {
    let leases = Leases::default();
    let now = Moment::from_micros(1);
    assert_eq!((leases.cost(), leases.spend(now, None)), (None, Spend::Nothing));
    leases.borrow(now, 1, 1).unwrap();
    leases.granted(now, Grant { granted: 5, valid_for: HOLD_MOST, leasable: true, ..Grant::default() });
    assert_eq!(leases.cost(), Some(0), "a class that is never limited");
    assert!(matches!(
        leases.spend(now, None),
        Spend::Decided { verdict: Verdict { denied: None, cost: 0, .. }, .. }
    ));
}

#[test]
fn what_comes_late_is_counted_from_when_it_was_asked_for() {
    let mut late = Grant {
        lease_id: "a".into(),
        granted: 10,
        valid_for: Duration::from_millis(100),
        limit: 100,
        leasable: true,
        cost: 1,
        ..Grant::default()
    };
    let at = |millis: u64| Moment::from_micros(1_000_000 + millis * 1_000);
    let leases = Leases::default();
    leases.borrow(at(0), 1, 0).unwrap();
    leases.granted(at(60), late.clone());
    assert!(matches!(leases.spend(at(99), None), Spend::Decided { low: true, .. }));
    assert_eq!(leases.spend(at(100), None), Spend::Nothing);
    assert_eq!(leases.sweep(at(100)), [], "it has ended, so nothing is to go back");

    leases.borrow(at(200), 2, 0).unwrap();
    late.lease_id = "b".into();
    leases.granted(at(300), late);
    assert_eq!(leases.spend(at(300), None), Spend::Nothing);
    assert_eq!(leases.sweep(at(300)), [Return { lease_id: "b".into(), unused: 10 }], "all that can be done");
}

#[test]
fn idle_tokens_go_back_once() {
    let mut gateway = Steady::new();
    gateway.run(1_000, 10);
    let held = u32::try_from(gateway.leases.outstanding()).unwrap();
    assert!(held > 0);
    let at = |after: u64| Moment::from_micros(gateway.now + after);
    assert_eq!(gateway.leases.sweep(at(Steady::LIFE / 4 - 1)), []);
    let back = gateway.leases.sweep(at(Steady::LIFE / 4));
    assert_eq!(back.iter().map(|back| back.unused).sum::<u32>(), held);
    assert_eq!((gateway.leases.outstanding(), gateway.leases.is_empty()), (0, true));
    assert_eq!(gateway.leases.sweep(at(Steady::LIFE / 4)), []);
    assert_eq!(gateway.leases.spend(at(Steady::LIFE / 4), None), Spend::Nothing);
}

#[test]
fn a_denial_is_held_and_counted() {
    let mut gateway = Steady::new();
    let retry_after = Duration::from_millis(70);
    gateway.borrow(|_, _| Grant { retry_after, leasable: true, cost: 1, limit: 5, ..Grant::default() });
    let start = gateway.now;
    for (after, left) in [(0, 70_000), (30_000, 40_000), (69_999, 1)] {
        let Spend::Decided { verdict, low: false } =
            gateway.leases.spend(Moment::from_micros(start + after), None)
        else {
            panic!("decided here");
        };
        assert_eq!(verdict.denied, Some(Denial::OverLimit));
        assert_eq!((verdict.retry_after, verdict.limit), (Duration::from_micros(left), 5));
    }
    gateway.now = start + 69_999;
    assert_eq!(gateway.borrow(|_, grant| grant), None, "nothing is to be had yet");
    gateway.now = start + 70_000;
    assert_eq!(gateway.leases.spend(Moment::from_micros(gateway.now), None), Spend::Nothing);
    assert_eq!(gateway.borrow(|_, grant| grant).unwrap().denied, 3);
    gateway.now += Steady::LIFE;
    assert_eq!(gateway.borrow(|_, grant| grant).unwrap().denied, 0, "told once");
}

#[test]
fn a_long_denial_is_asked_about_each_second() {
    let mut gateway = Steady::new();
    let retry_after = Duration::from_secs(3600);
    gateway.borrow(|_, _| Grant { retry_after, blocked: true, leasable: true, ..Grant::default() });
    let at = |after: u64| Moment::from_micros(gateway.now + after);
    let Spend::Decided { verdict, .. } = gateway.leases.spend(at(999_999), None) else { panic!("held") };
    assert_eq!(verdict.denied, Some(Denial::Blocked));
    assert_eq!(verdict.retry_after, Duration::from_micros(3_599_000_001));
    assert_eq!(gateway.leases.spend(at(1_000_000), None), Spend::Nothing);
}

#[test]
fn many_threads_spend_each_token_once() {
    const CHUNK: u32 = 1_000;
    let leases = Leases::default();
    let now = Moment::from_micros(1_000_000);
    let spent = AtomicU64::new(0);
    let back = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // Until the end, which is a closed purse and a denial that is held.
                loop {
                    match leases.spend(now, None) {
                        Spend::Decided { verdict, .. } if verdict.allowed() => spent.fetch_add(1, Relaxed),
                        Spend::Decided { .. } => return,
                        Spend::Nothing => continue,
                    };
                }
            });
        }
        // Meanwhile leases come, and some of them go back half spent.
        let mut back = 0_u64;
        for seq in 0..2_000 {
            let wish = leases.borrow(now, seq, CHUNK).unwrap();
            back += wish.returns.iter().map(|back| u64::from(back.unused)).sum::<u64>();
            let grant = Grant {
                lease_id: seq.to_string(),
                granted: CHUNK,
                valid_for: Duration::from_secs(1),
                leasable: true,
                cost: 1,
                ..Grant::default()
            };
            leases.granted(now, grant);
        }
        let last = leases.borrow(now, 2_000, 0).unwrap();
        let retry_after = Duration::from_secs(1);
        leases.granted(now, Grant { retry_after, leasable: true, cost: 1, ..Grant::default() });
        back += last.returns.iter().map(|back| u64::from(back.unused)).sum::<u64>();
        back + leases.close(now).iter().map(|back| u64::from(back.unused)).sum::<u64>()
    });
    assert_eq!(spent.load(Relaxed) + back, 2_000 * u64::from(CHUNK));
}

#[test]
fn what_is_decided_says_how_the_service_decided_last() {
    let now = Moment::from_micros(1_000_000);
    let leases = Leases::default();
    let mut seq = 0;
    for degraded in [false, true, false] {
        seq += 1;
        assert!(leases.borrow(now, seq, 4).is_some());
        let grant = Grant {
            lease_id: seq.to_string(),
            granted: 1,
            valid_for: Duration::from_secs(1),
            limit: 10,
            leasable: true,
            cost: 1,
            degraded,
            ..Grant::default()
        };
        leases.granted(now, grant);
        let Spend::Decided { verdict, .. } = leases.spend(now, None) else { panic!("nothing is held") };
        assert_eq!((verdict.allowed(), verdict.degraded), (true, degraded));
    }
}
