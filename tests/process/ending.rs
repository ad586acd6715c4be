//! How it ends when it is asked to: health says so, what is in flight finishes, nothing is left.

use crate::support::calls::{allowed, answer};
use crate::support::{Redis, Tollgate, engines};
use rustix::process::Signal;
use tokio_stream::StreamExt as _;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[tokio::test]
async fn asked_to_end_it_tells_health_finishes_its_calls_and_is_gone() {
    for (signal, engine) in [Signal::TERM, Signal::INT].into_iter().zip(engines().into_iter().cycle()) {
        let mut redis = Redis::start(engine).await;
        let config = format!(
            "server: {{ max_in_flight: 1 }}\nstore: {{ url: \"{}\", deadline: 10s }}\nclasses: {{ read: {{ rate: 1/h, \
             burst: 5 }} }}",
            redis.url()
        );
        let mut server = Tollgate::start(&config).await;
        let caller = server.serving().await;
        let request = HealthCheckRequest { service: String::new() };
        let watched = HealthClient::new(server.caller().await.channel()).watch(request).await.unwrap();
        let mut watched = watched.into_inner();
        let mut health = async || answer(watched.next()).await.map(|told| told.unwrap().status());
        assert_eq!(health().await, Some(ServingStatus::Serving));

        // One call is let in and held by a Redis that does not answer; which one is seen by the other's refusal.
        redis.stop();
        let held = crate::support::calls::one_shed_one_held(&caller, "read").await.1;

        server.process().signal(signal);
        assert_eq!(health().await, Some(ServingStatus::NotServing), "{signal:?}");
        server.says("stopping: calls in flight finish").await;
        assert!(server.process().is_running() && !held.is_finished(), "{signal:?}: a call is in flight");

        redis.cont();
        let response = answer(held).await.unwrap();
        assert_eq!((allowed(&response), response.remaining), (true, 4), "{signal:?}: {response:?}");
        assert!(server.process().exit().await.success(), "{signal:?}:\n{}", server.process().output());
        // A watcher is not a call that could finish: it is told, and sent away.
        assert_eq!(health().await, None, "{signal:?}");
        assert!(!server.process().output().contains("cut off"), "{}", server.process().output());
        tokio::net::TcpStream::connect(server.grpc()).await.expect_err("nobody listens there any more");
    }
}
