use super::*;
use crate::Fallback;
use http::HeaderName;
use http_body_util::BodyExt as _;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use tower::{Service, ServiceBuilder, ServiceExt as _, service_fn};

/// A client of nobody: all is decided by its fallbacks.
fn client() -> Client {
    let few = Fallback::Limit { rate_per_s: 0.001, burst: 2 };
    let many = Fallback::Limit { rate_per_s: 0.001, burst: 5 };
    Client::builder("http://127.0.0.1:1")
        .class_fallback("default", few)
        .class_fallback("coarse", many)
        .class_fallback("free", Fallback::Allow)
        .build()
        .unwrap()
}

type Text = Full<Bytes>;

fn request(path: &str) -> Request<Text> {
    Request::get(path).header("x-user", "alice").body(Text::default()).unwrap()
}

/// A service, and how often it was called.
fn hello(
    calls: &Arc<AtomicUsize>,
) -> impl Service<Request<Text>, Response = Response<Text>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    let calls = calls.clone();
    service_fn(move |_| {
        calls.fetch_add(1, SeqCst);
        std::future::ready(Ok(Response::new(Text::from("hello"))))
    })
}

fn by_user() -> impl Fn(&Parts) -> Option<String> + Send + Sync + 'static {
    by::header(HeaderName::from_static("x-user"))
}

#[tokio::test]
async fn every_answer_says_what_is_left_and_a_denied_call_does_not_reach_the_service() {
    let calls = Arc::default();
    let service = RateLimitLayer::new(client(), by_user()).ietf().layer(hello(&calls));
    for (status, remaining) in [(200, "1"), (200, "0"), (429, "0"), (429, "0")] {
        let response = service.clone().oneshot(request("/")).await.unwrap();
        assert_eq!(response.status(), status);
        let fields = response.headers();
        assert_eq!(
            (&fields["x-ratelimit-limit"], &fields["x-ratelimit-remaining"]),
            (&"2".parse().unwrap(), &remaining.parse().unwrap())
        );
        assert!(fields["x-ratelimit-reset"].to_str().unwrap().parse::<u64>().unwrap() > 1_700_000_000);
        assert_eq!(fields.contains_key("retry-after"), status == 429);
        assert!(fields.contains_key("ratelimit") && fields.contains_key("ratelimit-policy"));
        let verdict = *response.extensions().get::<Verdict>().unwrap();
        assert!(verdict.degraded && verdict.allowed() == (status == 200));
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(&body[..] == b"hello", status == 200, "{body:?}");
    }
    assert_eq!(calls.load(SeqCst), 2);
    // Somebody else, and nobody.
    let mut other = request("/");
    other.headers_mut().insert("x-user", "bob".parse().unwrap());
    assert_eq!(service.clone().oneshot(other).await.unwrap().status(), 200);
    for status in [200, 200, 429] {
        let nobody = Request::get("/").body(Text::default()).unwrap();
        assert_eq!(
            service.clone().oneshot(nobody).await.unwrap().status(),
            status,
            "all without a key share one"
        );
    }
}

#[tokio::test]
async fn what_is_exempt_or_of_no_class_is_not_limited() {
    let calls = Arc::default();
    let layer = RateLimitLayer::new(client(), by_user()).exempt("/healthz").exempt("/assets/*");
    let layer = layer.class_by(by::path([("/free", "free"), ("/api/", "default")]));
    let service = layer.layer(hello(&calls));
    for path in ["/healthz", "/assets", "/assets/a/b", "/free/x", "/elsewhere", "/apiary"] {
        for _ in 0..5 {
            let response = service.clone().oneshot(request(path)).await.unwrap();
            assert_eq!(response.status(), 200, "{path}");
            assert!(!response.headers().contains_key("x-ratelimit-limit"), "{path}");
        }
    }
    for (path, status) in [("/api", 200), ("/api/x", 200), ("/api/healthz", 429)] {
        assert_eq!(service.clone().oneshot(request(path)).await.unwrap().status(), status, "{path}");
    }
}

#[tokio::test]
async fn of_two_stages_the_inner_one_speaks_unless_the_outer_one_denies() {
    let calls = Arc::default();
    let client = client();
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(client.clone(), by::address).class("coarse"))
        .layer(RateLimitLayer::new(client, by_user()).shape(Shape::Compact))
        .service(hello(&calls));
    let limit_of = async |user: &str| {
        let mut request = request("/");
        request.headers_mut().insert("x-user", user.parse().unwrap());
        request.extensions_mut().insert(Peer("192.0.2.1:5".parse().unwrap()));
        let response = service.clone().oneshot(request).await.unwrap();
        (response.status().as_u16(), response.headers()["x-ratelimit-limit"].clone())
    };
    for (user, status, limit) in
        [("a", 200, "2"), ("a", 200, "2"), ("a", 429, "2"), ("b", 200, "2"), ("c", 200, "2"), ("d", 429, "5")]
    {
        assert_eq!(limit_of(user).await, (status, limit.parse().unwrap()), "{user}");
    }
    assert_eq!(calls.load(SeqCst), 4);
}

#[tokio::test]
async fn a_grpc_caller_gets_a_status_of_its_own() {
    let calls = Arc::default();
    let service = ServiceBuilder::new()
        .layer(ShedLayer::new(0).exempt("/limited"))
        .layer(RateLimitLayer::new(client(), by_user()))
        .service(hello(&calls));
    let ask = async |path: &str| {
        let mut request = request(path);
        request.headers_mut().insert("content-type", "application/grpc+proto".parse().unwrap());
        service.clone().oneshot(request).await.unwrap()
    };
    let shed = ask("/").await;
    assert_eq!((shed.status().as_u16(), &shed.headers()["grpc-status"]), (200, &"14".parse().unwrap()));
    assert_eq!(shed.headers()["retry-after"], "5");
    ask("/limited").await;
    ask("/limited").await;
    let denied = ask("/limited").await;
    assert_eq!((denied.status().as_u16(), &denied.headers()["grpc-status"]), (200, &"8".parse().unwrap()));
    assert!(
        denied.headers().contains_key("retry-after") && denied.headers().contains_key("x-ratelimit-reset")
    );
}

#[tokio::test]
async fn above_the_maximum_calls_are_shed_before_anything_else() {
    let (open, gate) = tokio::sync::watch::channel(false);
    let layer = ShedLayer::new(2).exempt("/healthz").shape(Shape::Compact);
    let service = layer.layer(service_fn(move |request: Request<Text>| {
        let mut gate = gate.clone();
        async move {
            if request.uri().path() != "/healthz" {
                gate.wait_for(|open| *open).await.unwrap();
            }
            Ok::<_, Infallible>(Response::new(Text::from("late")))
        }
    }));
    let held: Vec<_> = (0..2).map(|_| tokio::spawn(service.clone().oneshot(request("/")))).collect();
    while layer.inside() < 2 {
        tokio::task::yield_now().await;
    }
    let shed = service.clone().oneshot(request("/")).await.unwrap();
    assert_eq!((shed.status().as_u16(), &shed.headers()["retry-after"]), (503, &"5".parse().unwrap()));
    let body = shed.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(&body[..], br#"{"error":"overloaded","retry_after":5}"#);
    assert_eq!(service.clone().oneshot(request("/healthz")).await.unwrap().status(), 200);
    open.send(true).unwrap();
    for held in held {
        assert_eq!(held.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(layer.inside(), 0);
    // A caller that leaves makes room as well.
    open.send(false).unwrap();
    let left = tokio::spawn(service.clone().oneshot(request("/")));
    while layer.inside() < 1 {
        tokio::task::yield_now().await;
    }
    left.abort();
    drop(left.await);
    assert_eq!(layer.inside(), 0);
}

#[test]
fn an_address_is_a_key_and_of_ipv6_its_network() {
    for (address, key) in [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
    ] {
        assert_eq!(by::network(address.parse().unwrap()), key);
    }
    let key = |fill: fn(&mut http::Extensions)| {
        let mut parts = request("/").into_parts().0;
        fill(&mut parts.extensions);
        by::address(&parts)
    };
    let fills: [fn(&mut http::Extensions); 3] = [
        |extensions| {
            extensions.insert(Peer(([192, 0, 2, 1], 5).into()));
        },
        |extensions| {
            extensions.insert(SocketAddr::from(([192, 0, 2, 1], 5)));
        },
        |extensions| {
            extensions.insert(IpAddr::from([192, 0, 2, 1]));
        },
    ];
    for fill in fills {
        assert_eq!(key(fill).as_deref(), Some("192.0.2.1"));
    }
    assert_eq!(key(|_| ()), None);
}

#[test]
fn of_what_was_forwarded_only_what_our_own_proxies_wrote_counts() {
    let key = |fields: &[&str], proxies| {
        let mut request = Request::builder();
        for field in fields {
            request = request.header("x-forwarded-for", *field);
        }
        by::forwarded(proxies)(&request.body(()).unwrap().into_parts().0)
    };
    let some = |key: &str| Some(key.to_owned());
    assert_eq!(key(&["6.6.6.6, 192.0.2.1"], 1), some("192.0.2.1"));
    assert_eq!(key(&["6.6.6.6, 192.0.2.1", "10.0.0.1"], 2), some("192.0.2.1"));
    assert_eq!(key(&["192.0.2.1:1234"], 1), some("192.0.2.1"));
    assert_eq!(key(&["[2001:db8::1]:80"], 1), some("2001:db8::/64"));
    assert_eq!(key(&["192.0.2.1"], 2), None, "somebody else's proxy");
    assert_eq!(key(&["nonsense"], 1), None);
    assert_eq!(key(&["192.0.2.1"], 0), None, "nobody said where the call is from");
    assert_eq!(key(&[], 1), None);
}

#[test]
fn a_header_is_cut_where_it_is_too_long_for_a_key() {
    let key = |value: &str| {
        let request = Request::get("/").header("x-user", value).body(()).unwrap();
        by_user()(&request.into_parts().0)
    };
    assert_eq!(key("alice").as_deref(), Some("alice"));
    assert_eq!(key(&"a".repeat(1000)).unwrap().len(), 256);
    assert_eq!(key(""), None);
}
