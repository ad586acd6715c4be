//! Being counted: every instance listens to one channel, on which nothing is ever said.
//!
//! Redis knows who listens. So instances are counted without a key, without a clock, and without waiting for the end of
//! an entry: one that is gone is not counted from when its connection is closed.

use super::INSTANCES;
use super::cluster::slot;
use super::connections::Way;
use deadpool_redis::redis::{Client, RedisResult, Value};
use futures_util::StreamExt as _;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Between two looks whether the connection is still there, and between two tries to make one.
const LOOK: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_secs(1);
/// For an answer. It is no decision, so nobody waits for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Listens until it is dropped, whatever becomes of connections.
pub(super) async fn listen(way: Way, channel: String) {
    loop {
        if let Err(error) = listen_once(&way, &channel).await {
            tracing::debug!("this instance is not counted for now: {error}");
        }
        sleep(AGAIN).await;
    }
}

async fn listen_once(way: &Way, channel: &str) -> RedisResult<()> {
    match way {
        Way::One(client, _) => listen_to(client, channel, || true).await,
        Way::Sentinel(sentinels, _) => {
            let client = soon(async { sentinels.lock().await.async_get_client().await }).await?;
            listen_to(&client, channel, || true).await
        }
        Way::Cluster(cluster) => {
            soon(cluster.is_there()).await?;
            let slot = slot(INSTANCES);
            let owner = cluster.owner(slot);
            let client = cluster.client(owner.as_deref().unwrap_or_default())?;
            listen_to(&client, channel, || cluster.owner(slot) == owner).await
        }
    }
}

/// Until the connection is lost, or it is no longer the right one.
async fn listen_to(client: &Client, channel: &str, is_right: impl Fn() -> bool) -> RedisResult<()> {
    let (mut sink, mut said) = soon(client.get_async_pubsub()).await?.split();
    soon(sink.subscribe(channel)).await?;
    while is_right() {
        tokio::select! {
            word = said.next() => if word.is_none() { break },
            () = sleep(LOOK) => drop(soon(sink.ping::<Value>()).await?),
        }
    }
    Ok(())
}

async fn soon<T>(answer: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    timeout(PATIENCE, answer)
        .await
        .unwrap_or_else(|_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()))
}
