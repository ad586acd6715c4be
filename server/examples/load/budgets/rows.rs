//! What each budget measures.

use super::{Bench, ask_each, crowd, ratio, watched};
use crate::api::Api;
use crate::cpu;
use crate::keys::{Classes, Keys, NAME_BYTES, Traffic};
use crate::measure::{Measured, Watched, number};
use crate::peer::{RedisServer, Server};
use crate::table::{Budget, Table};
use anyhow::ensure;
use clap::ValueEnum as _;
use std::fmt::Write as _;

/// What most rows decide by.
const RULES: &str = "
classes:
  read:   { rate: 1000/s, burst: 2000 }
  search: { rate: 1000/s, burst: 2000, cost: 10 }
  write:  { rate: 1000/s, burst: 1000, algorithm: gcra }
  export: { rate: 1/m, burst: 1 }
  hot:    { rate: 1000000/s }
  busy:   { rate: 1000/s, burst: 500 }
  spent:  { rate: 1/h }
  brute:  { rate: 1/h, penalty: { strikes: 1, window: 1h, base: 1h, cap: 1h } }
  kept:   { rate: 1/h, burst: 1000000 }
";

/// Several rules; nearly all calls for `export` are denied once each key has had its one.
const MIX: &[(&str, u32)] = &[("read", 65), ("search", 20), ("write", 10), ("export", 5)];

/// Keys of the rows that are not about their number.
const KEYS: u64 = 10_000;

fn mixed() -> anyhow::Result<Traffic> {
    Ok(Traffic { keys: Keys::Uniform(KEYS), classes: Classes::mixed(MIX)?, cost: None })
}

fn of(class: &str, keys: u64) -> impl Fn() -> anyhow::Result<Traffic> {
    let class = class.to_owned();
    move || Ok(Traffic { keys: Keys::Uniform(keys), classes: Classes::only(&class)?, cost: None })
}

/// P1: what deciding adds to the transport.
pub(super) async fn memory(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    let (nothing, tollgate) = (bench.do_nothing().await?, bench.on_memory(RULES).await?);
    for &api in Api::value_variants() {
        let theirs = bench.full(&nothing, None, api, mixed).await?;
        let ours = bench.full(&tollgate, None, api, mixed).await?;
        table.run(format!("P1 do-nothing, {api:?}, full load"), &theirs);
        table.run(format!("P1 memory, {api:?}, full load"), &ours);
        let what = format!("memory, {api:?}: server us / do-nothing's");
        table.figure("P1", what, Budget::AtMost(1.1), ratio(ours.server_us, theirs.server_us));

        let half = theirs.per_second.min(ours.per_second) / 2.0;
        let theirs = bench.open(&nothing, None, api, mixed, half).await?;
        let ours = bench.open(&tollgate, None, api, mixed, half).await?;
        table.run(format!("P1 do-nothing, {api:?}, half load"), &theirs);
        table.run(format!("P1 memory, {api:?}, half load"), &ours);
        let what = format!("memory, {api:?}: p99 at half load / do-nothing's");
        table.figure("P1", what, Budget::AtMost(1.3), ours.p99() / theirs.p99());
    }
    Ok(())
}

/// P2: what asking Redis adds, for many keys at once and for one caller alone.
pub(super) async fn redis(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    let (nothing, redis) = (bench.do_nothing().await?, bench.empty_redis().await?);
    let tollgate = bench.on_redis(RULES, &redis).await?;
    let there = Some(&redis);
    let alone = Watched::default().during(redis.redis.alone(bench.span / 2)).await?;
    table.run("P2 Redis itself, one caller", &alone);

    let theirs = bench.full(&nothing, None, Api::Native, mixed).await?;
    let ours = bench.full(&tollgate, there, Api::Native, mixed).await?;
    table.run("P2 do-nothing, full load", &theirs);
    table.run("P2 Redis, full load", &ours);
    let mut figure = |what, most, figure| table.figure("P2", what, Budget::AtMost(most), figure);
    figure("Redis, distinct keys: server us / do-nothing's", 1.6, ratio(ours.server_us, theirs.server_us));
    figure("Redis us a decision", 4.0, ratio(ours.redis_us, Some(1.0)));
    figure("scripts a decision at full load", 0.15, ratio(ours.scripts, Some(1.0)));

    let half = ours.per_second / 2.0;
    let theirs = bench.open(&nothing, None, Api::Native, mixed, half).await?;
    let ours = bench.open(&tollgate, there, Api::Native, mixed, half).await?;
    table.run("P2 do-nothing, half of Redis's full load", &theirs);
    table.run("P2 Redis, half load", &ours);
    let p99 = ours.p99() / (theirs.p99() + alone.p99());
    table.figure("P2", "p99 at half load / (do-nothing's + Redis's own)", Budget::AtMost(1.3), p99);

    let theirs = bench.alone(&nothing, None, of("read", KEYS)).await?;
    let ours = bench.alone(&tollgate, there, of("read", KEYS)).await?;
    table.run("P2 do-nothing, one caller", &theirs);
    table.run("P2 Redis, one caller", &ours);
    let mut figure = |what, budget, figure| table.figure("P2", what, budget, figure);
    // The heartbeat, once a second, is a script call as well.
    figure(
        "one caller alone: scripts a decision",
        Budget::Within(0.99, 1.01),
        ratio(ours.scripts, Some(1.0)),
    );
    let p50 = ours.p50() / (theirs.p50() + alone.p50());
    figure("one caller alone: p50 / (do-nothing's + Redis's own)", Budget::AtMost(1.3), p50);
    let p99 = ours.p99() / (theirs.p99() + alone.p99());
    figure("one caller alone: p99 / (do-nothing's + Redis's own)", Budget::AtMost(1.3), p99);
    Ok(())
}

/// P3: all traffic is one key's.
pub(super) async fn hot_key(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    let redis = bench.empty_redis().await?;
    let tollgate = bench.on_redis(RULES, &redis).await?;
    let hot = |class: &'static str| {
        move || Ok(Traffic { keys: Keys::Hot, classes: Classes::only(class)?, cost: None })
    };
    let allowed = bench.full(&tollgate, Some(&redis), Api::Native, hot("hot")).await?;
    table.run("P3 one key, below its limit", &allowed);
    let scripts = ratio(allowed.scripts, Some(1.0));
    table.figure("P3", "one hot key, all allowed: scripts a decision", Budget::AtMost(0.05), scripts);

    // From the first call on, so that the burst is in it; the callers are warm by now.
    let callers = crowd(&tollgate, Api::Native).await?;
    callers.closed(hot("hot")()?, bench.span / 10).await?;
    let load = callers.closed(hot("busy")()?, bench.span);
    let over = watched(&tollgate, Some(&redis)).during(load).await?;
    table.run("P3 one key, far above its limit", &over);
    let scripts = ratio(over.scripts, Some(1.0));
    table.figure("P3", "one hot key over its limit: scripts a decision", Budget::AtMost(0.05), scripts);
    // On a machine that is busy with other things there may be fewer calls than that.
    let bound = (500.0 + 1000.0 * over.elapsed.as_secs_f64()).min(number(over.allowed + over.denied));
    let exact = number(over.allowed) / bound;
    table.figure("P3", "the same: admitted / (burst + rate x time)", Budget::Within(0.98, 1.0), exact);
    Ok(())
}

/// P4: what is certain is not asked for.
pub(super) async fn denied(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    const BLOCKED: u64 = 100;
    let redis = bench.empty_redis().await?;
    let tollgate = bench.on_redis(RULES, &redis).await?;
    ask_each(&tollgate, KEYS, "spent", 2).await?;
    let spent = bench.full(&tollgate, Some(&redis), Api::Native, of("spent", KEYS)).await?;
    ensure!(spent.allowed == 0, "{} of an empty bucket were allowed", spent.allowed);
    table.run("P4 all denied, no penalty", &spent);
    let scripts = ratio(spent.scripts, Some(1.0));
    table.figure("P4", "all denied, no penalty: scripts a decision", Budget::AtMost(0.001), scripts);

    // One is allowed, one denied and forgiven, and the next one blocks for an hour.
    ask_each(&tollgate, BLOCKED, "brute", 5).await?;
    let blocked = bench.full(&tollgate, Some(&redis), Api::Native, of("brute", BLOCKED)).await?;
    ensure!(blocked.allowed == 0, "{} of blocked keys were allowed", blocked.allowed);
    table.run("P4 100 blocked keys", &blocked);
    let scripts = number(blocked.decisions) * ratio(blocked.scripts, Some(1.0));
    let each = scripts / number(BLOCKED) / blocked.elapsed.as_secs_f64();
    // A block is remembered for a second, so that an unblocked key is seen to be.
    table.figure("P4", "blocked: scripts a key and second", Budget::AtMost(1.1), each);
    Ok(())
}

/// P7: what a bucket takes.
pub(super) async fn bytes(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    let name = f64::from(NAME_BYTES);
    let more = number(bench.many_keys - FEW);
    let tollgate = bench.on_memory(RULES).await?;
    ask_each(&tollgate, FEW, "kept", 10).await?;
    let before = cpu::resident(tollgate.pid())?;
    ask_each(&tollgate, bench.many_keys, "kept", 1).await?;
    let grown = cpu::resident(tollgate.pid())?.saturating_sub(before);
    table.figure(
        "P7",
        "memory: bytes of RAM a bucket, key excluded",
        Budget::AtMost(150.0),
        number(grown) / more - name,
    );
    drop(tollgate);

    let redis = bench.empty_redis().await?;
    let tollgate = bench.on_redis(RULES, &redis).await?;
    ask_each(&tollgate, FEW, "kept", 10).await?;
    let before = redis.redis.memory().await?;
    ask_each(&tollgate, bench.many_keys, "kept", 1).await?;
    let grown = redis.redis.memory().await?.saturating_sub(before);
    let keys = redis.redis.keys().await?;
    ensure!(keys == bench.many_keys, "{keys} keys in Redis");
    let one = number(redis.redis.memory_of_one().await?);
    table.figure("P7", "Redis: MEMORY USAGE of a bucket, key excluded", Budget::AtMost(140.0), one - name);
    let what = "Redis: growth of used_memory a bucket, key excluded";
    table.figure("P7", what, Budget::None, number(grown) / more - name);
    Ok(())
}

/// Keys of a store that is nearly empty.
const FEW: u64 = 1_000;

/// P8: what a decision costs when there are many keys, and many rules.
pub(super) async fn growth(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    let few = bench.on_memory(RULES).await?;
    let many = bench.on_memory(RULES).await?;
    keys(bench, table, "memory", (&few, None), (&many, None)).await?;
    drop((few, many));

    let few = bench.empty_redis().await?;
    let many = bench.empty_redis().await?;
    let on_few = bench.on_redis(RULES, &few).await?;
    let on_many = bench.on_redis(RULES, &many).await?;
    keys(bench, table, "Redis", (&on_few, Some(&few)), (&on_many, Some(&many))).await?;
    drop((few, many, on_few, on_many));

    let (few, many) = (bench.on_memory(&classes(10)).await?, bench.on_memory(&classes(10_000)).await?);
    rules(bench, table, "memory", (&few, None), (&many, None)).await?;
    let redis = bench.empty_redis().await?;
    let few = bench.on_redis(&classes(10), &redis).await?;
    let many = bench.on_redis(&classes(10_000), &redis).await?;
    rules(bench, table, "Redis", (&few, Some(&redis)), (&many, Some(&redis))).await
}

type On<'a> = (&'a Server, Option<&'a RedisServer>);

async fn keys(
    bench: &Bench,
    table: &mut Table,
    store: &str,
    few: On<'_>,
    many: On<'_>,
) -> anyhow::Result<()> {
    let most = bench.many_keys;
    ask_each(few.0, FEW, "kept", 1).await?;
    ask_each(many.0, most, "kept", 1).await?;
    let with_few = bench.full(few.0, few.1, Api::Native, of("kept", FEW)).await?;
    let with_many = bench.full(many.0, many.1, Api::Native, of("kept", most)).await?;
    table.run(format!("P8 {store}, {FEW} keys"), &with_few);
    table.run(format!("P8 {store}, {most} keys"), &with_many);
    let server = ratio(with_many.server_us, with_few.server_us);
    table.figure("P8", format!("{store}, {FEW} to {most} keys: server us"), Budget::AtMost(1.3), server);
    if few.1.is_some() {
        let redis = ratio(with_many.redis_us, with_few.redis_us);
        table.figure("P8", format!("{store}, {FEW} to {most} keys: Redis us"), Budget::AtMost(1.3), redis);
    }
    Ok(())
}

async fn rules(
    bench: &Bench,
    table: &mut Table,
    store: &str,
    few: On<'_>,
    many: On<'_>,
) -> anyhow::Result<()> {
    let traffic = |classes: u64| {
        move || Ok(Traffic { keys: Keys::Uniform(KEYS), classes: Classes::OfKey(classes), cost: None })
    };
    let by_few = bench.full(few.0, few.1, Api::Native, traffic(10)).await?;
    let by_many = bench.full(many.0, many.1, Api::Native, traffic(10_000)).await?;
    table.run(format!("P8 {store}, 10 rules"), &by_few);
    table.run(format!("P8 {store}, 10000 rules"), &by_many);
    let server = ratio(by_many.server_us, by_few.server_us);
    table.figure("P8", format!("{store}, 10 to 10000 rules: server us"), Budget::AtMost(1.1), server);
    if few.1.is_some() {
        let redis = ratio(by_many.redis_us, by_few.redis_us);
        table.figure("P8", format!("{store}, 10 to 10000 rules: Redis us"), Budget::AtMost(1.1), redis);
    }
    Ok(())
}

/// So many classes, each by a rule of its own.
fn classes(n: u64) -> String {
    let mut rules = "classes:\n".to_owned();
    for class in 0..n {
        let name = Classes::numbered(class);
        // Writing to a string does not fail.
        writeln!(rules, "  {name}: {{ rate: 1000/s, burst: {} }}", 2000 + class).ok();
    }
    rules
}

/// P9: how soon it serves, and how large it is.
pub(super) async fn start(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    for _ in 0..3 {
        let start = bench.on_memory(RULES).await?.start.as_secs_f64() * 1000.0;
        table.figure("P9", "memory: ms from start to SERVING", Budget::AtMost(100.0), start);
        let redis = bench.empty_redis().await?;
        let start = bench.on_redis(RULES, &redis).await?.start.as_secs_f64() * 1000.0;
        table.figure("P9", "Redis: ms from start to SERVING", Budget::AtMost(100.0), start);
    }
    let size = number(std::fs::metadata(&bench.tollgate)?.len()) / 1e6;
    table.figure("P9", "MB of the binary, stripped", Budget::AtMost(15.0), size);
    Ok(())
}

/// What happens above what the store can decide. Redis stands still for nearly all of the time, so that the server and
/// the load have time to spare.
pub(super) async fn overload(bench: &Bench, table: &mut Table) -> anyhow::Result<()> {
    let redis = bench.empty_redis().await?;
    // No more wait than Redis decides within the deadline.
    let bounds = ["--max-in-flight", "256", "--store-connections", "1", "--store-deadline", "100ms"];
    let tollgate = bench.on_redis_with(RULES, &redis, &bounds).await?;
    let load = async {
        let full = tollgate.callers(Api::Native, 4, 60).await?;
        let kept = of("kept", KEYS);
        full.closed(kept()?, bench.span / 10).await?;
        let full = watched(&tollgate, Some(&redis)).during(full.closed(kept()?, bench.span)).await?;
        let callers = tollgate.callers(Api::Native, 4, 1000).await?;
        let rate = 3.0 * full.per_second;
        callers.open(kept()?, rate, bench.span / 10).await?;
        let over = watched(&tollgate, Some(&redis)).during(callers.open(kept()?, rate, bench.span)).await?;
        anyhow::Ok((full, over))
    };
    let (full, over) = tokio::select! {
        both = load => both?,
        failed = redis.slow_down() => failed?,
    };
    table.run("Overload: as much as Redis can decide", &full);
    table.run("Overload: three times that", &over);
    let decided = |run: &Measured| number(run.allowed + run.denied) / run.elapsed.as_secs_f64();
    let what = "decided by Redis at three times the load / at full load";
    table.figure("Overload", what, Budget::AtLeast(0.9), decided(&over) / decided(&full));
    table.figure("Overload", "p99 of those, ms", Budget::AtMost(105.0), over.p99() / 1e3);
    let part = |count: u64| 100.0 * number(count) / number(over.decisions);
    table.figure("Overload", "of all calls, refused, percent", Budget::None, part(over.errors));
    table.figure(
        "Overload",
        "of all calls, decided without Redis, percent",
        Budget::None,
        part(over.degraded),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_server::config::Config;

    #[test]
    fn the_rules_are_valid_and_name_every_class_that_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rules.yaml");
        std::fs::write(&file, RULES).unwrap();
        let rules = Config::check(&file).unwrap().rules;
        assert!(MIX.iter().all(|(class, _)| rules.iter().any(|rule| rule.class == *class)));
        std::fs::write(&file, classes(10)).unwrap();
        assert_eq!(Config::check(&file).unwrap().rules.iter().count(), 10);
    }
}
