//! What is found in a real Redis: the names that the contract gives, one slot for all of a key, and an end to
//! everything.

use crate::naive::micros;
use crate::stores::{Ask, START, config, each_on_redis, kinds, left, limit, named, once};
use crate::support::{Redis, engines, eventually};
use deadpool_redis::redis::from_redis_value;
use std::time::Duration;
use tollgate_server::algorithm::ALL;
use tollgate_server::clock::Clock;
use tollgate_server::config::StoreConfig;
use tollgate_server::limit::{Limit, Rate};
use tollgate_server::penalty::Penalty;
use tollgate_server::request::Strikes;
use tollgate_server::store::{Store, connect};

/// Keys that are a trouble to whoever joins or splits names.
const ODD: [&str; 14] = [
    "a",
    "a:b",
    "a:b:c",
    "a}:b",
    "{a}",
    "{",
    "}",
    "{}",
    "%",
    "%3A",
    "a%3Ab",
    "ключ 钥匙",
    "nul\0nul",
    "a b\t\r\n",
];

async fn keys(redis: &Redis) -> Vec<String> {
    let mut keys: Vec<String> = from_redis_value(redis.command(&["KEYS", "*"]).await).unwrap();
    keys.sort();
    keys
}

async fn number(redis: &Redis, words: &[&str]) -> i64 {
    from_redis_value(redis.command(words).await).unwrap()
}

fn hour() -> Duration {
    Duration::from_secs(3600)
}

/// Blocks from the second denial on.
fn strict(reported: u32) -> Strikes {
    Strikes { penalty: Penalty::new(1, hour(), hour(), hour()).unwrap(), reported, on_denial: true }
}

/// Leaves one of each in Redis: bucket, lease, strikes and block. Returns the lease's name.
async fn live(store: &dyn Store, key: &str, class: &str) -> String {
    let ask = Ask { strikes: Some(strict(0)), ..Ask::new(key, class, once(5), 1) };
    let lease = ask.clone().leased(3, hour());
    assert_eq!(lease.of(store).await.granted.get(), 3);
    let too_much = Ask { strikes: Some(strict(0)), ..Ask::new(key, class, once(5), 5) };
    for _ in 0..2 {
        assert!(!too_much.of(store).await.allowed());
    }
    lease.lease.unwrap().id.to_string()
}

#[tokio::test]
async fn names_are_those_of_the_contract() {
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        let plain = live(&*tested.store, "alice", "read").await;
        let odd = live(&*tested.store, "a:b {ü}%\0", "x:y z").await;
        let odd_key = "{a%3Ab%20%7B%C3%BC%7D%25%00}";
        let mut expected = [
            "rl:{alice}:read".to_owned(),
            "rl:strikes:{alice}".to_owned(),
            "rl:block:{alice}".to_owned(),
            format!("rl:lease:{plain}"),
            format!("rl:{odd_key}:x%3Ay%20z"),
            format!("rl:strikes:{odd_key}"),
            format!("rl:block:{odd_key}"),
            format!("rl:lease:{odd}"),
        ];
        expected.sort();
        assert_eq!(keys(redis).await, expected, "{}", tested.name);
        assert!(plain.starts_with("{alice}:read:"), "{plain}");
        assert!(odd.starts_with(&format!("{odd_key}:x%3Ay%20z:")), "{odd}");
    }
}

#[tokio::test]
async fn a_strike_that_is_forgiven_files_no_block() {
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        let ask = Ask { strikes: Some(strict(0)), ..Ask::new("alice", "read", once(5), 6) };
        assert!(!ask.of(&*tested.store).await.allowed());
        assert_eq!(keys(redis).await, ["rl:strikes:{alice}"], "{}", tested.name);
        ask.of(&*tested.store).await;
        assert_eq!(keys(redis).await, ["rl:block:{alice}", "rl:strikes:{alice}"], "{}", tested.name);
    }
}

#[tokio::test]
async fn another_prefix_is_another_world() {
    for engine in engines() {
        let redis = Redis::start(engine).await;
        let with = |prefix: &str| {
            let config = StoreConfig { prefix: prefix.into(), ..config(&redis.url()) };
            connect(&config, Clock::system()).unwrap()
        };
        let (one, other) = (with("one"), with("two:three"));
        let ask = Ask::new("k", "c", once(1), 1);
        assert!(ask.of(&*one).await.allowed());
        assert!(ask.of(&*other).await.allowed(), "{engine:?}");
        assert!(!ask.of(&*one).await.allowed());
        assert_eq!(keys(&redis).await, ["one:{k}:c", "two:three:{k}:c"], "{engine:?}");
    }
}

#[tokio::test]
async fn names_that_joining_would_confuse_have_buckets_of_their_own() {
    let classes = ["c", "b:c", "b", "c:b:c", "%", "strikes", "block"];
    let long = |last: &str| "x".repeat(511) + last;
    let keys =
        ODD.into_iter().map(str::to_owned).chain([long("y"), long("z"), "lease".into(), "strikes".into()]);
    let pairs: Vec<_> = keys.flat_map(|key| classes.map(|class| (key.clone(), class))).collect();
    for kind in kinds() {
        let tested = kind.start(&Clock::system()).await;
        // Each takes a number of tokens that no other takes.
        let burst = 1_000;
        for (n, (key, class)) in (1..).zip(&pairs) {
            let ask = Ask::new(key, class, once(burst), n);
            assert_eq!(
                ask.of(&*tested.store).await.remaining,
                burst - n,
                "{}: {key:?} {class:?}",
                tested.name
            );
        }
        for (n, (key, class)) in (1..).zip(&pairs) {
            let ask = Ask::new(key, class, once(burst), 0);
            assert_eq!(left(&*tested.store, &ask).await, burst - n, "{}: {key:?} {class:?}", tested.name);
        }
    }
}

#[tokio::test]
async fn nobody_is_blocked_for_another() {
    for kind in kinds() {
        let tested = kind.start(&Clock::system()).await;
        for key in ODD {
            live(&*tested.store, key, "c").await;
            let ask = Ask::new(key, "other class", once(1), 1);
            assert!(
                !ask.of(&*tested.store).await.allowed(),
                "{}: {key:?} is blocked in every class",
                tested.name
            );
        }
        for key in ["b", "A", "a ", " a", "a%3ab", "a%253Ab", "", "{a", "a}"] {
            let ask = Ask::new(key, "c", once(1), 1);
            assert!(ask.of(&*tested.store).await.allowed(), "{}: {key:?}", tested.name);
        }
    }
}

#[tokio::test]
async fn every_key_expires() {
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        for (algorithm, key) in ALL.iter().flat_map(|algorithm| ODD.map(|key| (algorithm, key))) {
            let key = format!("{algorithm:?} {key}");
            live(&*tested.store, &key, "c").await;
            // Denials and blocks that write again, settlements, several buckets at once, a reported strike.
            let ask = |class, cost| {
                Ask::new(&format!("{key} other"), class, limit(1, 3600, 10), cost).by(algorithm)
            };
            let lease = ask("leased", 1).leased(4, hour());
            lease.of(&*tested.store).await;
            tested.store.settle(lease.settlement(2), None).await.unwrap();
            let both = vec![ask("one", 10).hit(), ask("other", 3).hit()];
            tested.store.decide(both.clone(), None).await.unwrap();
            tested.store.decide(both, None).await.unwrap();
            Ask { strikes: Some(strict(1)), ..ask("one", 0) }.of(&*tested.store).await;
        }
        let keys = keys(redis).await;
        assert!(keys.len() > 6 * ODD.len(), "{}: {keys:?}", tested.name);
        for key in keys {
            assert!(number(redis, &["PTTL", &key]).await > 0, "{}: {key} stays for ever", tested.name);
        }
    }
}

/// Not a moment before the bucket is as good as new, since then it would give more than its limit, and no more
/// than a second later or when it would have filled.
#[tokio::test]
async fn a_bucket_ends_when_it_is_as_good_as_new() {
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        let time = async || {
            let (seconds, micros): (u64, u64) = from_redis_value(redis.command(&["TIME"]).await).unwrap();
            seconds * 1_000_000 + micros
        };
        for n in 0..100_u64 {
            // Whole milliseconds, and a little less and more.
            let rate = Rate::new(1, Duration::from_micros(60_000_000 + n % 5 - 2)).unwrap();
            let ask = Ask::new(&format!("key {n}"), "c", Limit::new(rate, 3).unwrap(), 1);
            for _ in 0..3 {
                let before = time().await;
                let reset_after = micros(ask.of(&*tested.store).await.reset_after);
                let after = time().await;
                let ends = number(redis, &["PEXPIRETIME", &format!("rl:{}", ask.bucket().as_str())]).await;
                let ends = u64::try_from(ends).unwrap() * 1_000;
                let full = after + micros(ask.limit.window()) + 1_000;
                let (early, late) = (before + reset_after, full.min(after + reset_after + 1_001_000));
                assert!(ends >= early, "{}: it ends {} us early", tested.name, early - ends);
                assert!(ends <= late, "{}: it ends {} us late", tested.name, ends - late);
            }
        }
    }
}

/// Once told its end, a bucket keeps it as long as it needs no later one.
#[tokio::test]
async fn a_bucket_in_use_is_told_a_new_end_when_it_needs_one() {
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        // 700 ms for each token, so that ends are needed that are no whole seconds after another.
        let ask = Ask::new("k", "c", limit(10, 7, 1_000), 1);
        let name = format!("rl:{}", ask.bucket().as_str());
        let mut ends = Vec::new();
        for _ in 0..10 {
            let (seconds, part): (u64, u64) = from_redis_value(redis.command(&["TIME"]).await).unwrap();
            let reset_after = ask.of(&*tested.store).await.reset_after;
            let end = number(redis, &["PEXPIRETIME", &name]).await;
            let needed = seconds * 1_000_000 + part + micros(reset_after);
            assert!(u64::try_from(end).unwrap() * 1_000 >= needed, "{}: {end} is early", tested.name);
            ends.push(end);
        }
        ends.dedup();
        assert!((5..=6).contains(&ends.len()), "{}: {ends:?}", tested.name);
    }
}

#[tokio::test]
async fn a_bucket_that_is_as_good_as_new_goes_by_itself() {
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        let ask = Ask::new("k", "c", limit(50, 1, 2), 2);
        assert!(ask.of(&*tested.store).await.allowed());
        eventually("the bucket is gone", async || keys(redis).await.is_empty().then_some(())).await;
        // And nothing was left behind that a new one would owe.
        assert!(ask.of(&*tested.store).await.allowed());
    }
}

#[tokio::test]
async fn a_bucket_that_is_given_everything_back_is_gone() {
    // By a clock that stands: where tokens flow in, not all of them have room.
    for tested in each_on_redis(&Clock::manual(START)).await {
        let lease = Ask::new("k", "c", once(10), 1).leased(10, hour());
        assert_eq!(lease.of(&*tested.store).await.granted.get(), 10);
        let credited = tested.store.settle(lease.settlement(10), None).await.unwrap();
        assert_eq!(credited.get(), 10, "{}", tested.name);
        let keys = keys(tested.redis.as_ref().unwrap()).await;
        assert!(keys.is_empty(), "{}: {keys:?}", tested.name);
    }
}

#[tokio::test]
async fn a_log_remembers_what_is_in_its_window_and_no_more() {
    let clock = Clock::manual(START);
    for tested in each_on_redis(&clock).await {
        let redis = tested.redis.as_ref().unwrap();
        let ask = Ask::new("alice", "read", limit(5, 3600, 5), 1).by(named("sliding_log"));
        for call in 1..20 {
            clock.set(START.after(hour() / 3 * u32::try_from(call).unwrap()));
            assert!(ask.of(&*tested.store).await.allowed());
            // At each third call the first of them is a window old.
            assert_eq!(number(redis, &["ZCARD", "rl:{alice}:read"]).await, call.min(3), "{}", tested.name);
        }
    }
}

#[tokio::test]
async fn a_peek_and_a_denial_write_nothing() {
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        for algorithm in ALL {
            let ask = |cost| Ask::new("k", "c", once(5), cost).by(algorithm);
            assert!(ask(0).of(&*tested.store).await.allowed());
            assert!(!ask(6).of(&*tested.store).await.allowed());
            // Held up by another.
            let full = Ask::new("other", "c", once(5), 6).by(algorithm);
            let decisions = tested.store.decide(vec![ask(1).hit(), full.hit()], None).await.unwrap();
            assert!(decisions[0].allowed() && decisions[0].granted.get() == 0, "{decisions:?}");
            let keys = keys(redis).await;
            assert!(keys.is_empty(), "{algorithm:?} on {}: {keys:?}", tested.name);
        }
    }
}

#[tokio::test]
async fn all_of_a_key_shares_a_slot() {
    assert_eq!(crc16(b"123456789"), 0x31C3, "the check value of the Redis Cluster specification");
    for tested in each_on_redis(&Clock::system()).await {
        let redis = tested.redis.as_ref().unwrap();
        for key in ODD {
            let before = keys(redis).await;
            live(&*tested.store, key, "c").await;
            live(&*tested.store, &format!("{key} in two classes"), "d:{d}").await;
            let new: Vec<_> = keys(redis).await.into_iter().filter(|name| !before.contains(name)).collect();
            assert_eq!(new.len(), 8, "{new:?}");
            let (two, one): (Vec<_>, Vec<_>) = new.into_iter().partition(|name| name.contains("two"));
            for names in [one, two] {
                let slots: Vec<_> = names.iter().map(|name| slot(name)).collect();
                assert!(slots.iter().all(|slot| *slot == slots[0]), "{}: {names:?} {slots:?}", tested.name);
            }
        }
    }
}

/// As the Redis Cluster specification has it.
fn slot(name: &str) -> u16 {
    let tag = name.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    crc16(tag.filter(|tag| !tag.is_empty()).unwrap_or(name).as_bytes()) % 16_384
}

fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    })
}
