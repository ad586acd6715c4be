//! The cheapest refusal: a bound on the calls in flight.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// When to ask again after a refusal by load.
pub const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Lets so many calls in at a time.
#[derive(Debug)]
pub struct Gate {
    inside: AtomicUsize,
    most: usize,
}

impl Gate {
    /// A gate for `most` calls at a time.
    #[must_use]
    pub const fn new(most: usize) -> Self {
        Self { inside: AtomicUsize::new(0), most }
    }

    /// A place inside, until it is dropped.
    ///
    /// # Errors
    /// As many are inside as may be.
    pub fn enter(&self) -> Result<Place<'_>, Full> {
        let place = Place(&self.inside);
        if self.inside.fetch_add(1, Ordering::Relaxed) < self.most { Ok(place) } else { Err(Full(self.most)) }
    }
}

/// One call inside the gate.
#[derive(Debug)]
pub struct Place<'g>(&'g AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Refused by load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} calls are in flight, as many as may be")]
pub struct Full(usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_may_and_no_more() {
        let gate = Gate::new(2);
        let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
        assert_eq!(gate.enter().unwrap_err(), Full(2));
        assert_eq!(gate.enter().unwrap_err(), Full(2));
        drop(one);
        let three = gate.enter();
        assert!(three.is_ok());
        drop((two, three));
        assert_eq!(gate.inside.load(Ordering::Relaxed), 0);
    }
}
