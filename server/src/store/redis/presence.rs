//! Being counted: every instance listens to one channel, on which nothing is ever said.
//!
//! Redis knows who listens. So instances are counted without a key, without a clock, and without waiting for the end of
//! an entry: one that is gone is not counted from when its connection is closed.

use crate::store::StoreError;
use deadpool_redis::redis::{Client, Value};
use futures_util::StreamExt as _;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Between two looks whether the connection is still there, and between two tries to make one.
const LOOK: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_secs(1);
/// For an answer. It is no decision, so nobody waits for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Listens until it is dropped, whatever becomes of connections.
pub(super) async fn listen(client: Client, channel: String) {
    loop {
        if let Err(error) = listen_once(&client, &channel).await {
            tracing::debug!("this instance is not counted for now: {error}");
        }
        sleep(AGAIN).await;
    }
}

async fn listen_once(client: &Client, channel: &str) -> Result<(), StoreError> {
    let late = |_| StoreError::Timeout(PATIENCE);
    let connecting = timeout(PATIENCE, client.get_async_pubsub()).await.map_err(late)?;
    let (mut sink, mut said) = connecting.map_err(|error| super::lost(&error))?.split();
    let subscribed = timeout(PATIENCE, sink.subscribe(channel)).await.map_err(late)?;
    subscribed.map_err(|error| super::lost(&error))?;
    loop {
        tokio::select! {
            word = said.next() => if word.is_none() { return Ok(()) },
            () = sleep(LOOK) => {
                let pong = timeout(PATIENCE, sink.ping::<Value>()).await.map_err(late)?;
                pong.map_err(|error| super::lost(&error))?;
            }
        }
    }
}
