//! A limit that several instances share while nobody can tell what the others give.

use super::trace::{amounts, limits};
use crate::algorithm::{ALL, BY_CALENDAR};
use crate::limit::{Cost, Limit};
use proptest::prelude::*;
use std::time::Duration;

proptest! {
    #[test]
    fn shares_give_together_no_more_than_there_is(
        limit in limits(),
        shares in 1..=Limit::MOST_SHARES,
        cost in amounts(),
        counted in any::<bool>(),
    ) {
        let limit = if counted {
            Limit::per_window(limit.burst().min(u32::MAX.into()), limit.window().min(Limit::LONGEST_WINDOW)).unwrap()
        } else {
            limit
        };
        let cost = if cost > limit.burst() { 0 } else { cost };
        let equal = (limit.burst() / u64::from(shares)).max(1);
        for algorithm in ALL.iter().filter(|algorithm| (algorithm.check)(&limit).is_ok()) {
            let share = algorithm.share(&limit, shares, Cost::new(cost));
            prop_assert!((algorithm.check)(&share).is_ok(), "{algorithm:?}: {share:?}");
            prop_assert!([equal, equal.max(cost)].contains(&share.burst()), "{algorithm:?}: {share:?}");
            prop_assert!(cost > equal || share.burst() == equal, "{algorithm:?}: {share:?}");
            if limit.flows() {
                let whole = share.rate().period() == limit.rate().period() * shares;
                prop_assert!(whole && share.rate().count() == limit.rate().count(), "{algorithm:?}: {share:?}");
            } else {
                prop_assert_eq!(share.window(), limit.window());
            }
        }
    }
}

#[test]
fn a_share_has_room_for_one_call_and_not_for_what_never_fits() {
    let limit = Limit::per_window(100, Duration::from_secs(60)).unwrap();
    let algorithm = BY_CALENDAR;
    for (shares, cost, burst) in [
        (1, 1, 100),
        (3, 1, 33),
        (100, 1, 1),
        (500, 1, 1),
        (50, 10, 10),
        (50, 100, 100),
        (50, 101, 2),
        (4, 101, 25),
    ] {
        let share = algorithm.share(&limit, shares, Cost::new(cost));
        assert_eq!(share.burst(), burst, "{cost} of {shares}");
    }
}
