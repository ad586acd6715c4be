//! The do-nothing server: the same messages over the same transport, and every answer is ALLOW at once.
//!
//! What it costs is what the transport costs, and what a real server takes is told as a multiple of that.

use tokio::net::TcpListener;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_proto::v1;
use tollgate_proto::v1::rate_limiter_server::{RateLimiter, RateLimiterServer};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, async_trait};

struct Echo;

#[async_trait]
impl RateLimiter for Echo {
    async fn should_rate_limit(
        &self,
        _: Request<v1::ShouldRateLimitRequest>,
    ) -> Result<Response<v1::ShouldRateLimitResponse>, Status> {
        let verdict = v1::Verdict::Allow.into();
        Ok(Response::new(v1::ShouldRateLimitResponse { verdict, ..Default::default() }))
    }

    async fn borrow(&self, _: Request<v1::BorrowRequest>) -> Result<Response<v1::BorrowResponse>, Status> {
        Err(Status::unimplemented("it does nothing"))
    }

    async fn r#return(&self, _: Request<v1::ReturnRequest>) -> Result<Response<v1::ReturnResponse>, Status> {
        Err(Status::unimplemented("it does nothing"))
    }
}

#[async_trait]
impl RateLimitService for Echo {
    async fn should_rate_limit(
        &self,
        _: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let statuses = vec![DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() }];
        let overall_code = Code::Ok.into();
        Ok(Response::new(RateLimitResponse { overall_code, statuses, ..RateLimitResponse::default() }))
    }
}

/// Says where it listens as Tollgate does, then serves until it is ended.
pub(crate) async fn serve(listener: TcpListener) -> anyhow::Result<()> {
    println!("  grpc     {}", listener.local_addr()?);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .add_service(RateLimiterServer::new(Echo))
        .add_service(RateLimitServiceServer::new(Echo))
        .serve_with_incoming(incoming)
        .await?;
    Ok(())
}
