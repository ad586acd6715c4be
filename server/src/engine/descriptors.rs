//! Descriptors: each meets a rule or none, the rules that are met become hits, and the decisions on those are
//! joined into one answer.

use super::{Engine, Refusal, in_time};
use crate::algorithm::Lending;
use crate::limit::{Cost, Decision, Reason, Timestamp, Want, micros};
use crate::name::BucketName;
use crate::request::{Charge, Described, Descriptor, Hit, Hits, Joined, Status};
use crate::rules::domain::{Domain, DomainRule, Meter};
use crate::telemetry::metric::Outcome;
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// A call has at most so many descriptors.
const MOST_DESCRIPTORS: usize = 100;

/// And a descriptor so many entries: more than rules have levels.
const MOST_ENTRIES: usize = 32;

/// What a descriptor meets.
enum Met<'r> {
    Nothing,
    Unlimited(&'r DomainRule),
    Limit { rule: Option<&'r Arc<DomainRule>>, meter: Cow<'r, Meter> },
}

/// One bucket of a call, and all that its descriptors do to it: a store has to see it as one.
struct Bucket<'r> {
    meter: Cow<'r, Meter>,
    /// What the log calls it.
    rule: Option<&'r Arc<DomainRule>>,
    taken: u64,
    given_back: u64,
}

impl Engine {
    /// Decides one call by its descriptors: by default all of them are charged, or none.
    ///
    /// # Errors
    /// The request can not be, or the store could not be asked.
    pub async fn should_descriptors_pass(&self, request: Described) -> Result<Joined, Refusal> {
        let Described { domain, descriptors, deadline } = request;
        check(&domain, &descriptors)?;
        in_time(deadline)?;
        let rules = self.rules.load_full();
        let Some(domain) = rules.domain(&domain) else {
            let statuses = descriptors.iter().map(|_| Status::Free).collect();
            return Ok(Joined {
                domain: None,
                denied_by: None,
                degraded: false,
                unavailable: false,
                statuses,
            });
        };
        let met = met(domain, &descriptors)?;
        let Plan { names, buckets, places } = Plan::new(domain, &descriptors, &met);

        let decisions = if buckets.is_empty() {
            Vec::new()
        } else {
            let hits = buckets.iter().zip(names).map(|(bucket, name)| bucket.hit(name)).collect();
            self.store.decide(hits, deadline).await?
        };
        let degraded = decisions.iter().any(|decision| decision.degraded);
        let unavailable = decisions.iter().any(|decision| decision.denied == Some(Reason::Unavailable));
        for (bucket, _) in buckets.iter().zip(&decisions).filter(|(_, decision)| decision.replaced) {
            let rule = bucket.rule.map_or("a limit of requests", |rule| &rule.path);
            self.starts_anew(&format!("{}: {rule}", domain.name), bucket.meter.limited.algorithm);
        }

        let denied_by = denied_by(&buckets, &decisions);
        let status = |(met, place): (Met<'_>, Option<usize>)| match met {
            Met::Nothing => Status::Free,
            Met::Unlimited(rule) => {
                rule.count(&domain.name, Outcome::Allowed);
                Status::Unlimited
            }
            Met::Limit { rule, meter } => match place.and_then(|place| decisions.get(place)) {
                Some(decision) => {
                    rule.inspect(|rule| rule.count(&domain.name, meter.limited.outcome(decision)));
                    met_limit(rule, &meter, decision, self.clock.now())
                }
                None => Status::Free,
            },
        };
        let statuses = met.into_iter().zip(places).map(status).collect();
        Ok(Joined { domain: Some(domain.clone()), denied_by, degraded, unavailable, statuses })
    }
}

fn check(domain: &str, descriptors: &[Descriptor]) -> Result<(), Refusal> {
    if domain.is_empty() {
        return Err(Refusal::EmptyDomain);
    }
    if descriptors.is_empty() || descriptors.len() > MOST_DESCRIPTORS {
        return Err(Refusal::Descriptors { got: descriptors.len(), most: MOST_DESCRIPTORS });
    }
    for (place, descriptor) in descriptors.iter().enumerate() {
        let got = descriptor.entries.len();
        if got == 0 || got > MOST_ENTRIES {
            return Err(Refusal::Entries { place, got, most: MOST_ENTRIES });
        }
    }
    Ok(())
}

/// What each descriptor meets. A rule that another one of the same call replaces is not met.
fn met<'r>(domain: &'r Domain, descriptors: &[Descriptor]) -> Result<Vec<Met<'r>>, Refusal> {
    let mut met = Vec::with_capacity(descriptors.len());
    for (place, descriptor) in descriptors.iter().enumerate() {
        met.push(match descriptor.limit {
            Some(said) => {
                let meter = Meter::new(said, None, domain.algorithm)
                    .map_err(|error| Refusal::Override { place, wrong: error.to_string() })?;
                let meter = Meter { charge_denied: domain.charge_denied, ..meter };
                Met::Limit { rule: None, meter: Cow::Owned(meter) }
            }
            None => match domain.tree.find(descriptor.pairs()) {
                None => Met::Nothing,
                Some(rule) => match &rule.meter {
                    None => Met::Unlimited(rule),
                    Some(meter) => Met::Limit { rule: Some(rule), meter: Cow::Borrowed(meter) },
                },
            },
        });
    }
    let replaced: HashSet<&str> = met.iter().filter_map(Met::rule).flat_map(DomainRule::replaced).collect();
    if !replaced.is_empty() {
        let is_replaced = |met: &&mut Met<'_>| met.rule().is_some_and(|rule| replaced.contains(&*rule.name));
        met.iter_mut().filter(is_replaced).for_each(|met| *met = Met::Nothing);
    }
    Ok(met)
}

impl Descriptor {
    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

impl DomainRule {
    fn replaced(&self) -> impl Iterator<Item = &str> {
        self.replaces.iter().map(String::as_str)
    }
}

impl<'r> Met<'r> {
    fn rule(&self) -> Option<&'r DomainRule> {
        match self {
            Self::Unlimited(rule) => Some(rule),
            Self::Limit { rule, .. } => rule.map(AsRef::as_ref),
            Self::Nothing => None,
        }
    }
}

/// What is to be decided: the buckets that are met, each once.
struct Plan<'r> {
    names: Vec<BucketName>,
    buckets: Vec<Bucket<'r>>,
    /// For each descriptor the place of its bucket.
    places: Vec<Option<usize>>,
}

impl<'r> Plan<'r> {
    fn new(domain: &Domain, descriptors: &[Descriptor], met: &[Met<'r>]) -> Self {
        let room = met.len();
        let (names, buckets) = (Vec::with_capacity(room), Vec::with_capacity(room));
        let mut all = Self { names, buckets, places: Vec::with_capacity(room) };
        for (descriptor, met) in descriptors.iter().zip(met) {
            let place = match met {
                Met::Nothing | Met::Unlimited(_) => None,
                Met::Limit { rule, meter } => {
                    let place = all.place(name(domain, descriptor, *rule, meter), *rule, meter.clone());
                    if let Some(bucket) = all.buckets.get_mut(place) {
                        bucket.join(meter, descriptor.hits);
                    }
                    Some(place)
                }
            };
            all.places.push(place);
        }
        all
    }

    /// Where the bucket of that name is, which is new if need be.
    fn place(&mut self, name: BucketName, rule: Option<&'r Arc<DomainRule>>, meter: Cow<'r, Meter>) -> usize {
        self.names.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.names.push(name);
            self.buckets.push(Bucket { meter, rule, taken: 0, given_back: 0 });
            self.names.len() - 1
        })
    }
}

/// A limit of the request's own has a bucket apart from that of the rule, one for each window.
fn name(
    domain: &Domain,
    descriptor: &Descriptor,
    rule: Option<&Arc<DomainRule>>,
    meter: &Meter,
) -> BucketName {
    let shared = rule.map_or(&[][..], |rule| &rule.shared);
    let shared = shared.iter().map(Option::as_deref).chain(std::iter::repeat(None));
    let entries = descriptor.pairs().zip(shared).map(|((key, value), shared)| (key, value, shared));
    BucketName::of_descriptor(&domain.name, entries, rule.is_none().then(|| meter.said.window()))
}

impl Bucket<'_> {
    /// One more descriptor on this bucket. Of two limits of requests the lower one holds.
    fn join(&mut self, meter: &Meter, hits: Hits) {
        if meter.said.requests < self.meter.said.requests {
            self.meter = Cow::Owned(meter.clone());
        }
        match hits {
            Hits::Take(some) => self.taken = self.taken.saturating_add(some),
            Hits::GiveBack(some) => self.given_back = self.given_back.saturating_add(some),
        }
    }

    fn hit(&self, bucket: BucketName) -> Hit {
        let Meter { said, limited, quota, charge_denied } = &*self.meter;
        let take = self.taken.saturating_sub(self.given_back);
        let give_back = self.given_back.saturating_sub(self.taken);
        let cost = |hits: u64| Cost::from(u32::try_from(hits).unwrap_or(u32::MAX));
        let (wish, charge) = match said.requests {
            // Two of a bucket of one: never.
            0 => (2, Charge::IfAllowed),
            // What never fits is denied like everything else, however much it is.
            _ => (
                take.min(limited.limit.burst() + 1),
                match (take, give_back) {
                    (0, 0) => Charge::IfAllowed,
                    (0, _) => Charge::GiveBack(cost(give_back)),
                    _ if *charge_denied => Charge::Always(cost(take)),
                    _ => Charge::IfAllowed,
                },
            ),
        };
        Hit {
            bucket,
            limit: limited.limit,
            algorithm: limited.algorithm,
            want: Want::exactly(Cost::new(wish)),
            shadow: limited.shadow,
            sensitive: limited.is_sensitive(),
            quota: *quota,
            charge,
            strikes: limited.strikes(0, take > 0),
            lease: None,
        }
    }

    fn is_over(&self, decision: &Decision) -> bool {
        !decision.allowed() && !self.meter.limited.shadow
    }
}

/// The rule that denies the call, if one does: any that is over, but of quotas only all together.
fn denied_by(buckets: &[Bucket<'_>], decisions: &[Decision]) -> Option<String> {
    let path = |bucket: &Bucket<'_>| match bucket.rule {
        Some(rule) => rule.path.clone(),
        None => "limit of the request".to_owned(),
    };
    let counted = || buckets.iter().zip(decisions).filter(|(bucket, _)| !bucket.meter.limited.shadow);
    let plain = counted().find(|(bucket, decision)| !bucket.meter.quota && bucket.is_over(decision));
    let mut quotas = counted().filter(|(bucket, _)| bucket.meter.quota).peekable();
    let first = plain.or_else(|| {
        let first = quotas.peek().copied()?;
        quotas.all(|(bucket, decision)| bucket.is_over(decision)).then_some(first)
    });
    first.map(|(bucket, _)| path(bucket))
}

fn met_limit(
    rule: Option<&Arc<DomainRule>>,
    Meter { said, limited, .. }: &Meter,
    decision: &Decision,
    now: Timestamp,
) -> Status {
    let denied = !decision.allowed();
    let reset = match (denied, decision.reset_after) {
        (true, _) => decision.retry_after,
        // Of a window by the calendar Envoy is told the end also if nothing was taken.
        (false, Duration::ZERO) if limited.algorithm.lending == Lending::UntilReset => {
            let window = micros(limited.limit.window()).max(1);
            Duration::from_micros(window - now.as_micros() % window)
        }
        (false, reset_after) => reset_after,
    };
    Status::Met {
        over: denied && !limited.shadow,
        limit: *said,
        rule: rule.cloned(),
        remaining: if denied { 0 } else { decision.remaining },
        reset: reset.max(Duration::from_micros(1)),
    }
}
