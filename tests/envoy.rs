//! Envoy's rate limit service: what its own implementation answers, and what a real Envoy makes of it.

mod answers;
mod check;
mod docs;
mod http;
mod real;
mod reload;
mod vectors;

use crate::stores::{Kind, Tested};
use crate::support::calls::answer;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_server::app;
use tollgate_server::clock::Clock;
use tollgate_server::config::{Config, StoreUrl};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// A server in this process, by a clock that the test moves, with its buckets in a store of some kind.
struct Served {
    client: RateLimitServiceClient<Channel>,
    address: SocketAddr,
    server: JoinHandle<()>,
    store: Tested,
    folder: TempDir,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Served {
    /// Serves these files: their names and their texts.
    async fn start(kind: Kind, clock: &Clock, files: &[(&str, &str)]) -> Self {
        let store = kind.start(clock).await;
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("rules")).unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join("rules").join(name), text).unwrap();
        }
        let file = folder.path().join("tollgate.yaml");
        std::fs::write(&file, "domains: [ rules ]\n").unwrap();
        let mut config = Config::check(&file).unwrap();
        if let Some(url) = store.url() {
            config.store.url = StoreUrl::new(&url).unwrap();
            config.store.deadline = Duration::from_secs(10);
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = app::build(config, clock.clone()).unwrap();
        let server = tokio::spawn(async move {
            app.serve(listener, std::future::pending()).await.unwrap();
        });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let client = RateLimitServiceClient::new(answer(endpoint.connect()).await.unwrap());
        Self { client, address, server, store, folder }
    }

    /// Where its files are.
    fn rules(&self) -> std::path::PathBuf {
        Path::join(self.folder.path(), "rules")
    }

    async fn try_ask(
        &self,
        domain: &str,
        descriptors: Vec<RateLimitDescriptor>,
        hits: u32,
    ) -> Result<RateLimitResponse, Status> {
        let request = RateLimitRequest { domain: domain.into(), descriptors, hits_addend: hits };
        answer(self.client.clone().should_rate_limit(request)).await.map(tonic::Response::into_inner)
    }

    async fn ask(&self, domain: &str, descriptors: Vec<RateLimitDescriptor>, hits: u32) -> RateLimitResponse {
        self.try_ask(domain, descriptors, hits).await.unwrap_or_else(|why| panic!("{why:?}"))
    }
}

/// A descriptor with these entries: `user=bob,path=/a`.
fn descriptor(entries: &str) -> RateLimitDescriptor {
    let entry = |entry: &str| {
        let (key, value) = entry.split_once('=').unwrap();
        Entry { key: key.into(), value: value.into() }
    };
    RateLimitDescriptor { entries: entries.split(',').map(entry).collect(), ..RateLimitDescriptor::default() }
}

/// That many hits of its own.
fn hits(hits: u64, it: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..it }
}

fn given_back(hits: u64, it: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), is_negative_hits: true, ..it }
}

fn limited(
    requests_per_unit: u32,
    unit: i32,
    unit_multiplier: Option<u32>,
    it: RateLimitDescriptor,
) -> RateLimitDescriptor {
    RateLimitDescriptor { limit: Some(RateLimitOverride { requests_per_unit, unit, unit_multiplier }), ..it }
}
