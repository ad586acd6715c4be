//! The cheapest refusals: bounds on the calls in flight, and on what is held of messages that are not yet whole.
//!
//! What a call wants is not known until its message is whole, so it has no place among those in flight before. Some bytes of
//! each message are free, so that peers who hold all that may be held shut out only those who have as much to say.

use crate::telemetry::metric;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use metrics::counter;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::BoxError;

/// When to ask again after a refusal by load.
pub const RETRY_AFTER: Duration = Duration::from_secs(5);

/// The first bytes of a message, which are not counted: more than all but a few messages have.
const FREE: usize = 4 << 10;

/// So many bytes of messages that are not yet whole are held, beyond what is free.
const MOST_BYTES: usize = 64 << 20;

/// Lets so many calls in at a time.
#[derive(Debug)]
pub struct Gate {
    inside: AtomicUsize,
    most: usize,
    room: Arc<Semaphore>,
}

impl Gate {
    /// A gate for `most` calls at a time.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { inside: AtomicUsize::new(0), most, room: Arc::new(Semaphore::new(MOST_BYTES)) }
    }

    /// A place inside, until it is dropped.
    ///
    /// # Errors
    /// As many are inside as may be.
    pub fn enter(&self) -> Result<Place<'_>, Full> {
        let place = Place(&self.inside);
        let others = self.inside.fetch_add(1, Ordering::Relaxed);
        if others < self.most { Ok(place) } else { Err(Full::Calls(self.most).counted()) }
    }

    /// How many calls are inside.
    pub fn inside(&self) -> usize {
        self.inside.load(Ordering::Relaxed)
    }

    /// How many bytes are held of messages that are not yet whole, beyond what is free.
    pub fn held(&self) -> usize {
        MOST_BYTES - self.room.available_permits()
    }

    /// The same body, with what has come of it counted until it is dropped. Where there is no room it fails with [`Full`].
    pub(crate) fn measure<B>(&self, body: B) -> Measured<B> {
        Measured { body, room: self.room.clone(), free: FREE, held: None }
    }
}

/// A message that is on its way in.
#[derive(Debug)]
pub(crate) struct Measured<B> {
    body: B,
    room: Arc<Semaphore>,
    free: usize,
    held: Option<OwnedSemaphorePermit>,
}

impl<B> Measured<B> {
    fn hold(&mut self, bytes: usize) -> Result<(), Full> {
        let counted = bytes.saturating_sub(self.free);
        self.free = self.free.saturating_sub(bytes);
        if counted == 0 {
            return Ok(());
        }
        let more = u32::try_from(counted).ok().and_then(|counted| {
            // If there is none it is not waited for: who holds it may never be done.
            self.room.clone().try_acquire_many_owned(counted).ok()
        });
        let more = more.ok_or_else(|| Full::Messages.counted())?;
        match &mut self.held {
            None => self.held = Some(more),
            Some(held) => held.merge(more),
        }
        Ok(())
    }
}

impl<B> Body for Measured<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        let frame = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
            None => return Poll::Ready(None),
        };
        let held = this.hold(frame.data_ref().map_or(0, Bytes::len));
        Poll::Ready(Some(held.map(|()| frame).map_err(BoxError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
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
pub enum Full {
    /// By the calls in flight.
    #[error("{0} calls are in flight, as many as may be")]
    Calls(usize),
    /// By messages that are on their way in.
    #[error("{MOST_BYTES} bytes of messages are on their way in, as many as may be")]
    Messages,
}

impl Full {
    fn counted(self) -> Self {
        let what = match self {
            Self::Calls(_) => "calls",
            Self::Messages => "messages",
        };
        counter!(metric::SHED, "full" => what).increment(1);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{BodyExt as _, Full as Whole};

    #[test]
    fn as_many_as_may_and_no_more() {
        let gate = Gate::new(2);
        let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
        assert_eq!(gate.enter().unwrap_err(), Full::Calls(2));
        assert_eq!(gate.enter().unwrap_err(), Full::Calls(2));
        drop(one);
        let three = gate.enter();
        assert!(three.is_ok());
        drop((two, three));
        assert_eq!(gate.inside(), 0);
    }

    #[tokio::test]
    async fn messages_beyond_their_free_bytes_are_held_until_they_are_dropped() {
        let gate = Gate::new(1);
        let body = |bytes: usize| Box::pin(gate.measure(Whole::new(Bytes::from(vec![0; bytes]))));
        let mut held = Vec::new();
        for _ in 0..MOST_BYTES >> 22 {
            let mut body = body((4 << 20) + FREE);
            assert!(body.frame().await.unwrap().is_ok());
            held.push(body);
        }
        for (bytes, fits) in [(FREE, true), (FREE + 1, false)] {
            let frame = body(bytes).frame().await.unwrap();
            let full = frame.err().and_then(|error| error.downcast::<Full>().ok());
            assert_eq!(full.as_deref(), (!fits).then_some(&Full::Messages), "{bytes} bytes");
        }
        drop(held);
        assert_eq!(gate.held(), 0);
    }
}
