//! https endpoints: whom the client trusts, and whom not.

use super::decide;
use crate::support::DEADLINE;
use crate::support::authority::Authority;
use crate::support::calls::answer;
use crate::support::relay::Relay;
use tollgate_client::{Certificate, Client, ClientTlsConfig, Identity};
use tonic::transport::ServerTlsConfig;

impl Authority {
    fn certificate(&self) -> Certificate {
        Certificate::from_pem(self.pem())
    }

    fn identity(&self, name: &str) -> Identity {
        let (certificate, key) = self.sign(name);
        Identity::from_pem(certificate, key)
    }
}

fn client(relay: &Relay, tls: ClientTlsConfig) -> Client {
    let url = relay.url().replace("http://", "https://");
    Client::builder(url).deadline(DEADLINE).tls(tls.domain_name("tollgate.test")).build().unwrap()
}

#[tokio::test]
async fn a_service_is_asked_if_its_certificate_is_trusted_and_not_otherwise() {
    let (_server, caller) = super::serve().await;
    let (authority, other) = (Authority::new(), Authority::new());
    let relay =
        Relay::with_tls(caller, ServerTlsConfig::new().identity(authority.identity("tollgate.test"))).await;
    let trusting = client(&relay, ClientTlsConfig::new().ca_certificate(authority.certificate()));
    let verdict = decide(&trusting, "k", "plenty").await;
    assert!(verdict.allowed() && !verdict.degraded, "{verdict:?}");

    let wary = client(&relay, ClientTlsConfig::new().ca_certificate(other.certificate()));
    let error = answer(wary.should_rate_limit("k", "plenty", None)).await.unwrap_err();
    assert!(!error.is_refusal(), "{error}");
    assert!(decide(&wary, "k", "plenty").await.degraded);
}

#[tokio::test]
async fn a_service_may_ask_who_the_gateway_is() {
    let (_server, caller) = super::serve().await;
    let authority = Authority::new();
    let tls = ServerTlsConfig::new()
        .identity(authority.identity("tollgate.test"))
        .client_ca_root(authority.certificate());
    let relay = Relay::with_tls(caller, tls).await;
    let tls = || ClientTlsConfig::new().ca_certificate(authority.certificate());
    let known = client(&relay, tls().identity(authority.identity("gateway.test")));
    assert!(!decide(&known, "k", "plenty").await.degraded);
    assert!(decide(&client(&relay, tls()), "k", "plenty").await.degraded);
}
